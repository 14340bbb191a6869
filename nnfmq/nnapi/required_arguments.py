"""Checks of arguments that NNAPI makes in every call: null pointers and indexes."""

from __future__ import annotations

from collections.abc import Sized
from typing import TypeVar

from nnfmq.hal.errors import InvalidArgument

__all__ = ["check_index", "required"]

T = TypeVar("T")


def required(value: T | None, what: str) -> T:
    """Return `value`.

    Raises:
        InvalidArgument: If it is None, NNAPI's null pointer.
    """
    if value is None:
        raise InvalidArgument(f"{what} is None; it is required (NNAPI: UNEXPECTED_NULL)")
    return value


def check_index(index: int, found: Sized, kind: str) -> None:
    """Require that there is an element `index` of `found`, which are the model's inputs or outputs.

    Raises:
        InvalidArgument: If there is none.
    """
    if not 0 <= index < len(found):
        raise InvalidArgument(f"the model has {len(found)} {kind}s, there is no {kind} {index}")
