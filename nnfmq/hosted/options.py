"""Checks of the options that a client gave for a runtime: values of JSON, of which each adapter lists its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nnfmq.base.processes import allowed_cores, allowed_cpus
from nnfmq.hal.errors import InvalidArgument

__all__ = ["require_one_of", "settings_by_name", "thread_count"]


def require_one_of(what: str, value: object, allowed: Iterable[object]) -> None:
    """Check a value that a client gave for `what`. Raises InvalidArgument with those that are allowed."""
    if not any(value == one and type(value) is type(one) for one in allowed):
        raise InvalidArgument(f"{what} {value!r:.80}: allowed are {', '.join(map(str, allowed)) or 'none'}")


def settings_by_name(what: str, value: object) -> dict[str, Any]:
    """Return a table of settings that a client gave for `what`. Raises InvalidArgument if it is none."""
    if not isinstance(value, dict):
        raise InvalidArgument(f"{what!r:.80} has settings by name, not {value!r:.80}")
    return dict(value)


def thread_count(option: object) -> int:
    """Return the number of threads of an execution: the option, at most the CPUs of this process; else its cores.

    Raises:
        InvalidArgument: If the option is not a number of at least 1.
    """
    if option is None:
        return allowed_cores()
    if not isinstance(option, int) or isinstance(option, bool) or option < 1:
        raise InvalidArgument(f"threads {option!r}: a number of at least 1 is needed")
    return min(option, allowed_cpus())
