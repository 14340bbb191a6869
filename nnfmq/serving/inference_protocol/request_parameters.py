"""The parameters of a request that this server knows; others are ignored, as the protocol allows.

Parameters of extensions that the server does not have would change the result, so they are rejected instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from nnfmq.hal.errors import InvalidArgument

__all__ = ["Parameters", "boolean", "require_no_other_extension", "size", "timeout_s"]

Parameters: TypeAlias = dict[str, bool | int | float | str]

_OTHER_EXTENSIONS = {
    "sequence_id": "sequences; send the state of a model as an input",
    "shared_memory_region": "shared memory of a client; use binary data, or nnfmq itself on the same machine",
    "classification": "classification; take the largest scores of the output",
}
_LONGEST_US = 10_000_000_000_000
"""A limit of months, which fits the clock, in place of longer ones."""


def require_no_other_extension(parameters: Mapping[str, object]) -> None:
    """Raise InvalidArgument if a parameter belongs to an extension that this server does not have."""
    for name in parameters:
        if name in _OTHER_EXTENSIONS:
            raise InvalidArgument(f"parameter {name!r}: this server has no {_OTHER_EXTENSIONS[name]}")


def size(parameters: Parameters, name: str) -> int | None:
    """Return a parameter that is a number of bytes; None without it.

    Raises:
        InvalidArgument: If it is not an integer, or negative.
    """
    value = parameters.get(name)
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise InvalidArgument(f"parameter {name!r} is {value!r}; a number of bytes is needed")
    return value


def boolean(parameters: Parameters, name: str) -> bool | None:
    """Return a parameter that is true or false; None without it.

    Raises:
        InvalidArgument: If it is something else.
    """
    value = parameters.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidArgument(f"parameter {name!r} is {value!r}; true or false is needed")
    return value


def timeout_s(parameters: Parameters) -> float | None:
    """Return the parameter `timeout`, which is in microseconds, in seconds; None without it, or if it is 0.

    Raises:
        InvalidArgument: If it is not an integer, or negative.
    """
    value = parameters.get("timeout")
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise InvalidArgument(f"parameter 'timeout' is {value!r}; a number of microseconds is needed")
    return min(value, _LONGEST_US) / 1e6 or None
