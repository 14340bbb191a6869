"""What stderr says while a model is compiled, for an application that has no progress callback of its own.

    nnfmq: compiling net.tflite for this machine, once; later starts read it from the cache
    nnfmq: compiling net.tflite: 3 of 8 kernels       (redrawn, on a terminal only)

$NNFMQ_COMPILE_NOTICE=0 turns it off.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol, TypeAlias

from nnfmq import settings
from nnfmq.hal.device_choice import DeviceChoice

__all__ = ["ProgressCallback", "ProgressReport", "compile_notice"]

ProgressCallback: TypeAlias = Callable[[int, int], None]
"""Called with the number of compiled units, and how many there are."""

DELAY_S = 0.25
_DRAW_DELAY_S = 1.0
_REDRAW_S = 0.1


class ProgressReport(Protocol):
    """Called as a ProgressCallback; `is_kept` tells that later starts need not compile the model."""

    def __call__(self, done: int, total: int, is_kept: bool = False) -> None:
        """Report progress."""


@contextmanager
def compile_notice(
    name: str, progress: ProgressCallback | None = None, choice: DeviceChoice = "application"
) -> Iterator[ProgressReport | None]:
    """Yield what is called with the progress of a compilation: `progress`, or if that is None, what writes to stderr.

    That is one line if the model is still compiled after a quarter of a second, by a thread of its own, because
    progress is reported rarely. After a second, a line on a terminal shows the progress; the thread that prepares draws
    it, and completes it with the time at the end.

    Yields None if there is no stderr, the setting says so, or for a step of a plan: the plan has a notice for all.
    """
    if progress is not None:
        yield _without_kept(progress)
    elif choice == "step" or sys.stderr is None or not settings.COMPILE_NOTICE.value():
        yield None
    else:
        notice = _Notice(name or "a model")
        try:
            yield notice.report
        finally:
            notice.end()


def _without_kept(progress: ProgressCallback) -> ProgressReport:
    return lambda done, total, is_kept=False: progress(done, total)


class _Notice:
    """The lines about one model. Any thread may report."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin = time.monotonic()
        self._reports = itertools.count()  # `next` is atomic
        self._timer: threading.Timer | None = None
        self._drawn_at: float | None = None

    def report(self, done: int, total: int, is_kept: bool = False) -> None:
        """Begin the wait for the first line, and draw the progress on a terminal."""
        now = time.monotonic()
        if next(self._reports) == 0:
            self._say_later(self._begin + DELAY_S - now, is_kept)
        last = self._begin + _DRAW_DELAY_S - _REDRAW_S if self._drawn_at is None else self._drawn_at
        if now - last >= _REDRAW_S and sys.stderr.isatty():
            self._drawn_at = now
            _write(f"\rnnfmq: compiling {self._name}: {done} of {total} kernels")

    def _say_later(self, delay_s: float, is_kept: bool) -> None:
        if delay_s <= 0:
            self._say(is_kept)
            return
        self._timer = threading.Timer(delay_s, self._say, [is_kept])
        self._timer.daemon = True
        self._timer.start()

    def _say(self, is_kept: bool) -> None:
        later = "; later starts read it from the cache" if is_kept else ""
        _write(f"nnfmq: compiling {self._name} for this machine, once{later}\n")

    def end(self) -> None:
        """Write no more, and complete the line that shows the progress."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        if self._drawn_at is not None:
            _write(f"\rnnfmq: compiling {self._name}: {time.monotonic() - self._begin:.1f} s\x1b[K\n")


def _write(text: str) -> None:
    """Write to stderr, which the application may have closed; in one call, so that no other output comes between."""
    with suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
