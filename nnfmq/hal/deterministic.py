"""The option that floats have the same bits on every machine, as a compilation hint.

It is a hint of AIDL's prepareModelWithConfig, of the extension `nnfmq.deterministic`: type 0, the value one byte, 1. A
device that has the extension obeys the hint or fails the preparation. For any other device the client library rejects
the hint (EXT-6), because a driver ignores those that it does not know (PREP-10).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import extension_code
from nnfmq.hal.types import ExtensionNameAndPrefix, TokenValuePair

__all__ = ["DETERMINISTIC", "is_deterministic", "with_deterministic_hint"]

DETERMINISTIC = "nnfmq.deterministic"
"""The name of the extension."""

_TYPE, _YES = 0, b"\x01"


def with_deterministic_hint(
    hints: Sequence[TokenValuePair], extensions: Sequence[ExtensionNameAndPrefix]
) -> tuple[Sequence[TokenValuePair], Sequence[ExtensionNameAndPrefix]]:
    """Return hints that ask for the same bits, and the prefixes of their extensions; those given, if they ask for it.

    Raises:
        InvalidArgument: If those given have the hint with another value.
    """
    if is_deterministic(hints, extensions):
        return hints, extensions
    taken = {extension.prefix for extension in extensions}
    prefix = next(number for number in itertools.count(1) if number not in taken)
    hint = TokenValuePair(extension_code(prefix, _TYPE), _YES)
    return (*hints, hint), (*extensions, ExtensionNameAndPrefix(DETERMINISTIC, prefix))


def is_deterministic(hints: Sequence[TokenValuePair], extensions: Sequence[ExtensionNameAndPrefix]) -> bool:
    """Return whether valid hints ask for the same bits.

    Raises:
        InvalidArgument: If the hint has another value.
    """
    tokens = {extension_code(one.prefix, _TYPE) for one in extensions if one.name == DETERMINISTIC}
    values = [hint.value for hint in hints if hint.token in tokens]
    for value in values:
        if value != _YES:
            raise InvalidArgument(f"the hint of {DETERMINISTIC} has the value {value!r}, allowed is {_YES!r}")
    return bool(values)
