"""Vendor extensions at the level of numbers: prefixes, names, and what a device says of its extensions.

A code above BASE_MAX is prefix << 16 | type. AIDL has signed 32-bit codes, so prefixes of 15 bits; HIDL has 16 bits.
Which prefix stands for which name is each model's own affair (`Model.extensions`); prefix 0 is never an extension.
`ExtensionCodes` gives them out. Nothing here knows a particular extension. Spec: HAL 1.2 types, `Extension` and
`ExtensionNameAndPrefix`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeVar

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import (
    BASE_MAX,
    ExtensionNameAndPrefix,
    ExtensionOperandTypeInformation,
    OperandType,
    OperationType,
)

__all__ = [
    "AIDL_PREFIX_BITS",
    "HIDL_PREFIX_BITS",
    "TYPE_BITS",
    "Extension",
    "ExtensionCodes",
    "ExtensionOperandTypeInformation",
    "extension_code",
    "extension_prefix",
    "extension_type",
    "is_extension",
    "is_extension_name",
    "with_name",
]

TYPE_BITS = 16
AIDL_PREFIX_BITS = 15
HIDL_PREFIX_BITS = 16

Code = TypeVar("Code", OperandType, OperationType)

_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+")


@dataclass(frozen=True, slots=True)
class Extension:
    """An extension that a device supports: all of its operand types and operations."""

    name: str
    operand_types: tuple[ExtensionOperandTypeInformation, ...] = ()


def is_extension(code: int) -> bool:
    """Return True if an operand type or operation code belongs to an extension."""
    return code > BASE_MAX


def extension_prefix(code: int) -> int:
    """Return the prefix of a code; 0 where it is no extension's."""
    return code >> TYPE_BITS


def extension_type(code: int) -> int:
    """Return the number within its extension of a code."""
    return code & BASE_MAX


def extension_code(prefix: int, number: int, *, prefix_bits: int = AIDL_PREFIX_BITS) -> int:
    """Return the code of type or operation `number` of the extension with `prefix`.

    Raises InvalidArgument if either is out of range: prefixes are 1 to 2^prefix_bits - 1, numbers 0 to 2^16 - 1.
    """
    if not 0 < prefix < 1 << prefix_bits:
        raise InvalidArgument(f"extension prefix {prefix}, allowed are 1 to {(1 << prefix_bits) - 1}")
    if not 0 <= number <= BASE_MAX:
        raise InvalidArgument(f"number {number} within an extension, allowed are 0 to {BASE_MAX}")
    return prefix << TYPE_BITS | number


def is_extension_name(name: str) -> bool:
    """Return True for lowercase letters, digits and underscores in at least two parts joined by periods."""
    return _NAME.fullmatch(name) is not None


def with_name(code: Code, name: str) -> Code:
    """Return an extension's code under a name that says more than its number; equal to every other of that number."""
    member = type(code)(code.value)  # a new one, since extensions' members are kept nowhere
    member._name_ = name
    return member


class ExtensionCodes:
    """The numbers of extensions' types and operations in one model, by name: prefixes 1, 2, ... as they are asked for.

    numbers = ExtensionCodes()
    int64 = numbers.operand_type("com.example.fibonacci", 0)
    model = Model(..., extensions=numbers.extensions)
    """

    def __init__(self) -> None:
        self._prefixes: dict[str, int] = {}

    @property
    def extensions(self) -> tuple[ExtensionNameAndPrefix, ...]:
        """What the model has to name: every extension that a number was asked of."""
        return tuple(ExtensionNameAndPrefix(name, prefix) for name, prefix in self._prefixes.items())

    def prefix(self, name: str) -> int:
        """Return the prefix of an extension. Raises InvalidArgument for a malformed name."""
        if not is_extension_name(name):
            raise InvalidArgument(f"extension name {name!r}, e.g. 'com.example.name' is one")
        return self._prefixes.setdefault(name, len(self._prefixes) + 1)

    def operand_type(self, name: str, number: int) -> OperandType:
        """Return operand type `number` of the extension. Raises InvalidArgument for a malformed name or number."""
        return OperandType(extension_code(self.prefix(name), number))

    def operation_type(self, name: str, number: int) -> OperationType:
        """Return operation `number` of the extension. Raises InvalidArgument for a malformed name or number."""
        return OperationType(extension_code(self.prefix(name), number))
