"""A line on the terminal while a model is compiled, for an application that has no progress callback of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from nnfmq.hal.device_choice import DeviceChoice

__all__ = ["ProgressCallback", "compile_notice"]

ProgressCallback: TypeAlias = Callable[[int, int], None]
"""Called with the number of compiled units, and how many there are."""

DELAY_S = 1.0
_REDRAW_S = 0.1


@contextmanager
def compile_notice(
    name: str, progress: ProgressCallback | None = None, choice: DeviceChoice = "application"
) -> Iterator[ProgressCallback | None]:
    """Yield `progress`; if that is None, a callback that shows the progress on stderr after a second.

    Yields None if stderr is no terminal, and for a step of a plan, because steps are prepared concurrently. The line is
    redrawn by the thread that prepares, and completed with the time at the end.
    """
    if progress is not None or choice == "step" or sys.stderr is None or not sys.stderr.isatty():
        yield progress
        return
    begin = time.monotonic()
    drawn_at = begin + DELAY_S - _REDRAW_S
    text = f"\rnnfmq: compiling {name or 'a model'} for this machine, once:"

    def show(done: int, total: int) -> None:
        nonlocal drawn_at
        now = time.monotonic()
        if now - drawn_at >= _REDRAW_S:
            drawn_at = now
            print(f"{text} {done} of {total} kernels", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if drawn_at >= begin + DELAY_S:
            print(f"{text} {time.monotonic() - begin:.1f} s\x1b[K", file=sys.stderr)
