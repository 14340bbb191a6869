"""Checks of the arguments of ModelBuilder's calls: codes, indexes, numbers."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import TypeVar

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.summaries import clipped
from nnfmq.hal.types import BASE_MAX
from nnfmq.validation.rules import require

__all__ = ["to_code", "to_indexes", "to_integer", "to_integers", "to_real"]

Code = TypeVar("Code", bound=IntEnum)

_FIRST_OEM_CODE = 10_000


def to_code(kind: type[Code], value: Code | int | str, rule: str) -> Code:
    """Return the member of `kind` that is given, by its name or by its code.

    Raises:
        InvalidArgument: If there is none. The message lists similar names.
    """
    if isinstance(value, str):
        if value in kind.__members__:
            return kind[value]
        from difflib import get_close_matches

        similar = ", ".join(get_close_matches(value.upper(), kind.__members__, 3, 0.5))
        remedy = f"similar are: {similar}" if similar else f"nnfmq.hal.types.{kind.__name__} has all"
        raise InvalidArgument(f"there is no {kind.__name__} {value!r}; {remedy} ({rule})")
    try:
        return kind(value)
    except ValueError:
        last = max(member for member in kind if member < _FIRST_OEM_CODE)
        known = f"0 to {last}, {', '.join(str(int(member)) for member in kind if member > last)}"
        codes = f"allowed are {known} and codes of extensions, above {BASE_MAX}"
        raise InvalidArgument(f"unknown {kind.__name__} {value!r}, {codes} ({rule})") from None


def to_integer(value: object, name: str, rule: str) -> int:
    """Return an integer, NumPy's included. Raises InvalidArgument for anything else."""
    try:
        return operator.index(value)  # type: ignore[arg-type]  # that is what it checks
    except TypeError:
        raise InvalidArgument(f"{name}: an integer is required, not {_shown(value)} ({rule})") from None


def to_integers(values: Iterable[object], name: str, rule: str) -> tuple[int, ...]:
    """Return integers. Raises InvalidArgument for anything else."""
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise InvalidArgument(f"{name}: a sequence of integers is required, not {_shown(values)} ({rule})")
    return tuple(to_integer(number, name, rule) for number in values)


def to_real(value: object, name: str, rule: str) -> float:
    """Return a real number. Raises InvalidArgument for anything else."""
    try:
        return float(value)  # type: ignore[arg-type]  # that is what it checks
    except (TypeError, ValueError):
        raise InvalidArgument(f"{name}: a number is required, not {_shown(value)} ({rule})") from None


def to_indexes(values: Iterable[object], count: int, name: str, rule: str) -> tuple[int, ...]:
    """Return indexes of `count` operands. Raises InvalidArgument if one is out of range."""
    indexes: Sequence[int] = to_integers(values, name, rule)
    for index in indexes:
        require(0 <= index < count, rule, f"{name}: there is no operand {index}, the model has {count}")
    return tuple(indexes)


def _shown(value: object) -> str:
    return clipped(repr(value), 60)
