"""Act at a chosen step of a module's code: what a signal's handler or another thread would do there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, ModuleType
from typing import Any

from nnfmq.base.ownership import Closable

__all__ = ["Tracer", "interrupt", "made_with_an_interrupt_at_every_line"]


class Tracer:
    """Calls `action` once, before step `step` of the code of `modules`; a step is a "line" or an "opcode".

    If `action` raises inside a comprehension, CPython 3.12 and 3.13 run neither `finally` nor `__exit__` of the
    statements around it: that is so for trace functions, not for signal handlers. Traced code has none there.
    """

    def __init__(self, event: str, step: int, action: Callable[[], object], *modules: ModuleType) -> None:
        self._left = step
        self._event = event
        self._action = action
        self._files = {module.__file__ for module in modules}
        self._before = sys.gettrace()

    def __call__(self, frame: FrameType, event: str, _argument: object) -> Any:
        """Trace a frame, as `sys.settrace` describes."""
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes = self._event == "opcode"
        if event == self._event:
            self._left -= 1
            if self._left < 0:
                sys.settrace(self._before)
                self._action()
                return None
        return self

    def __enter__(self) -> Tracer:
        # Python 3.12 asks whether any frame wants opcodes when the trace function is set, and never again.
        sys._getframe().f_trace_opcodes = self._event == "opcode"
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    @property
    def has_acted(self) -> bool:
        """Whether `action` was called."""
        return self._left < 0


def made_with_an_interrupt_at_every_line(make: Callable[[], Closable], *modules: ModuleType) -> int:
    """Call `make` again and again, each time with a KeyboardInterrupt before another line of `modules`.

    Closes what it returns. Returns the number of lines. Warnings are errors, what `__del__` raises fails a test, and
    the fixture that compares resources looks for the rest.
    """
    step = 0
    while True:
        made = []
        with Tracer("line", step, interrupt, *modules) as tracer, suppress(KeyboardInterrupt):
            made.append(make())
        for one in made:
            one.close()
        if not tracer.has_acted:
            return step
        step += 1


def interrupt() -> None:
    """Raise what the handler of SIGINT raises."""
    raise KeyboardInterrupt
