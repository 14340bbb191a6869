"""Internal errors of drivers that run in threads of the tests' process: recorded instead of ending the process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from nnfmq.driver.session import session

_PID = os.getpid()
_found: list[BaseException | None] = []
_die = session.abort_on_internal_error


def _note(error: BaseException | None) -> None:
    if os.getpid() != _PID:  # a driver in a fork
        _die(error)
    _found.append(error)


def watch_for_them() -> None:
    """Record internal errors until the process ends, because a thread may outlive the test that started it."""
    session.abort_on_internal_error = _note


@contextmanager
def none() -> Iterator[None]:
    """Fail if a driver had an internal error, in this test or in a thread that an earlier test left."""
    yield
    if _found:
        bug = _found.pop()
        _found.clear()
        raise AssertionError("a bug would have ended the driver's process") from bug
