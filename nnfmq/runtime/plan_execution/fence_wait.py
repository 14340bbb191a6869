"""FenceWait: a call when several fences are no longer active, without a thread that waits for them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from nnfmq import watcher
from nnfmq.fence import fence_state
from nnfmq.hal.errors import ResourceExhaustedTransient
from nnfmq.hal.types import FenceState
from nnfmq.uncopyable import Uncopyable

__all__ = ["FenceWait"]


class FenceWait(Uncopyable):
    """Calls `on_done` once, when none of the fences is active any more: on the watcher thread, or in `start`.

    Args:
        fds: The fences. Borrowed until this returns: it makes duplicates, which it closes.
        on_done: Must not block.

    Raises:
        ResourceExhaustedTransient: If no fd is left.
    """

    def __init__(self, fds: Sequence[int], on_done: Callable[[], None]) -> None:
        self._on_done = on_done
        self._lock = threading.Lock()
        self._waits = 1 + len(fds)  # that of `start` is the first
        self._readers: dict[int, watcher.ReaderHandle] = {}
        self._fds: list[int] = []
        try:
            for fd in fds:
                self._fds.append(os.dup(fd))
        except OSError as error:
            self._close()
            raise ResourceExhaustedTransient(f"no file descriptor is left to wait for a fence: {error}") from error

    def start(self) -> None:
        """Begin to wait.

        Raises:
            ResourceExhaustedTransient: If the watcher cannot watch the fences; `on_done` is then not called.
        """
        try:
            for fd in self._fds:
                self._watch(fd)
        except (OSError, RuntimeError) as error:
            self._close()
            raise ResourceExhaustedTransient(f"the fences cannot be watched: {error}") from error
        self._count_down()

    def _watch(self, fd: int) -> None:
        with self._lock:
            self._readers[fd] = watcher.add_reader(fd, lambda: self._on_readable(fd))

    def _on_readable(self, fd: int) -> None:
        with self._lock:
            reader = self._readers.get(fd)
            if reader is None or fence_state(fd) is FenceState.ACTIVE:
                return
            del self._readers[fd]
        watcher.remove_reader(reader)
        self._count_down()

    def _count_down(self) -> None:
        with self._lock:
            self._waits -= 1
            if self._waits:
                return
        self._close()
        self._on_done()

    def cancel(self) -> None:
        """Wait no longer: `on_done` is not called, unless it is being called by another thread. Idempotent."""
        self._close()

    def _close(self) -> None:
        with self._lock:
            readers, self._readers = self._readers, {}
            fds, self._fds = self._fds, []
        for reader in readers.values():
            watcher.remove_reader(reader)
        for fd in fds:
            with suppress(OSError):
                os.close(fd)
