"""The requests of workers to the supervisor: in their sandbox they may neither write files nor start programs.

It writes programs to the cache, each in a child process, and starts the process that compiles models whose client has
left. Workers are not trusted: what they send was checked to be sealed memory (`cache.shared`), nothing of it is
interpreted, and there are at most WRITERS_MAX writing processes at a time, with no more bytes than the cache may have.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from nnfmq.base.accounts import become, give_up_capabilities
from nnfmq.base.logs import rate_limited
from nnfmq.base.scheduling import lower_priority
from nnfmq.driver.cache import programs
from nnfmq.driver.cache.user_caches import cache_of
from nnfmq.driver.compilation import unfinished
from nnfmq.driver.process.children import ChildProcess, fork_child
from nnfmq.driver.process.event_loop import EventLoop
from nnfmq.driver.process.log_pipe import LogPipe
from nnfmq.driver.process.statistics_area import SharedStatistics
from nnfmq.hal.client_class import ClientClass
from nnfmq.hal.errors import NnfmqError

__all__ = ["WRITERS_MAX", "DriverRequests"]

WRITERS_MAX = 16
_log = rate_limited("nnfmq.supervisor")
_ERRORS = (NnfmqError, OSError, RuntimeError)  # RuntimeError: the user has no home directory


class DriverRequests:
    """Does what workers ask for. Used by one thread, the only one of its process. Borrows `loop` and `statistics`.

    `set_class` changes the class of a client (`WorkerProcesses.set_class`). `user` is the uid of the workers' clients
    if the driver serves several users: they have a cache of their own.
    """

    def __init__(
        self,
        loop: EventLoop,
        statistics: SharedStatistics,
        set_class: Callable[[int, int, ClientClass], str],
        user: int | None = None,
    ) -> None:
        self._loop = loop
        self._statistics = statistics
        self._user = user
        self.set_class = set_class
        self._writers = self._written_bytes = 0  # that are being written

    def store(self, files: Sequence[tuple[str, int]], memory: int, pipe: int) -> None:
        """Write the files of entries in a child process, which keeps `pipe` open until then. Borrows the fds."""
        size = sum(size for _, size in files)
        is_too_much = self._writers > 0 and self._written_bytes + size > programs.cache_limit_bytes()
        if self._writers >= WRITERS_MAX or is_too_much:
            text = "a program is not added to the cache: %d of %d bytes are being written"
            _log.warning(text, self._writers, self._written_bytes)
            return
        try:
            run = partial(_write, self._user, files, memory)
            process, log = self._fork(run, (memory, pipe), "nnfmq-store", give_up_capabilities)
        except _ERRORS as error:
            _log.warning("a program is not added to the cache: %s", error)
            return
        self._writers += 1
        self._written_bytes += size
        self._watch(process, partial(self._end_writer, process, log, size))

    def _end_writer(self, process: ChildProcess, log: LogPipe, size: int) -> None:
        self._writers -= 1
        self._written_bytes -= size
        self._reap(process, log)

    def open(self, name: str) -> int | None:
        """Return an fd of the file of an entry for a worker that may not open it; None if there is none."""
        if self._user is None:
            return None
        try:
            with cache_of(self._user):
                fd = programs.open_entry(name)
            if fd is not None:
                programs.mark_used(fd)
            return fd
        except _ERRORS as error:
            _log.warning("the cache of uid %d is not used: %s", self._user, error)
            return None

    def go_on(self, requests: int, pools: Sequence[int]) -> None:
        """Start the process that compiles models whose client has left, unless one runs. Borrows the fds."""
        try:
            with cache_of(self._user):
                pid = unfinished.start(requests, pools)
            process = None if pid is None else ChildProcess.of(pid)
        except _ERRORS as error:
            _log.warning("a compilation ends with its client: %s", error)
            return
        if process is not None:
            self._watch(process, partial(self._reap, process))

    def open_statistics(self) -> int | None:
        """Return an fd of a copy of the statistics that clients of this user may see; None if that fails."""
        try:
            return self._statistics.open_for_user(None if self._user in (None, os.getuid(), 0) else self._user)
        except _ERRORS as error:
            _log.warning("statistics are not shown: %s", error)
            return None

    def copy_pages(self) -> None:
        """Copy what the clients have counted themselves to where others read it."""
        self._statistics.copy_pages()

    def remove_folder(self, path: str, uid: int | None) -> None:
        """Remove the private folder of a worker that has exited, in a child process under the worker's uid."""
        if not os.path.isdir(path if uid is None else os.path.dirname(path)):  # only that uid may look into it
            return
        try:
            enter = give_up_capabilities if uid is None else partial(become, uid)
            run = partial(_remove_tree, path)
            process, log = self._fork(run, (), "nnfmq-remove", enter, at_parent_exit=signal.SIGCONT, uid=uid)
        except _ERRORS as error:
            _log.warning("%s is not removed: %s", path, error)
            return
        self._watch(process, partial(self._reap, process, log))

    def _fork(
        self, run: Callable[[], None], fds: Sequence[int], name: str, enter: Callable[[], None], **rest: Any
    ) -> tuple[ChildProcess, LogPipe]:
        """Start a process; return it and the pipe with its log, to close when it has exited. Raises `_ERRORS`."""
        with ExitStack() as undo:
            log = undo.enter_context(LogPipe(self._loop, name))
            process = fork_child(run, fds, name, enter=enter, log_fd=log.child_fd, **rest)
            undo.pop_all()
        log.begin(process.pid)
        return process, log

    def _watch(self, process: ChildProcess, on_exit: Callable[[], None]) -> None:
        """Call `on_exit` when a process has exited. One that is stopped is ended: it would keep its place."""
        self._loop.watch_stops(process, partial(process.send, signal.SIGKILL))
        self._loop.add_reader(process.fileno(), on_exit)

    def _reap(self, process: ChildProcess, log: LogPipe | None = None) -> None:
        self._loop.unwatch_stops(process)
        self._loop.remove_reader(process.fileno())
        process.reap()
        if log is not None:
            log.close()


def _write(user: int | None, files: Sequence[tuple[str, int]], memory: int) -> None:
    lower_priority(is_background=True)
    with cache_of(user):
        programs.copy_entries(files, memory)


def _remove_tree(path: str) -> None:
    import shutil  # follows no links in the folder

    while os.path.isdir(path):
        with suppress(FileNotFoundError):  # another worker removes it, too (`private_folder`)
            shutil.rmtree(path)
    with suppress(OSError):  # another worker has a folder there
        os.rmdir(os.path.dirname(path))
