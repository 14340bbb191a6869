"""Vendor extensions at the level of numbers: prefixes, names, and what a device says of its extensions.

A code above BASE_MAX is prefix << 16 | type. AIDL has signed 32-bit codes, so prefixes of 15 bits; HIDL has 16 bits.
Which prefix stands for which name is each model's own affair (`Model.extensions`); prefix 0 is never an extension.
Nothing here knows a particular extension. Spec: HAL 1.2 types, `Extension` and `ExtensionNameAndPrefix`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import BASE_MAX

__all__ = [
    "AIDL_PREFIX_BITS",
    "HIDL_PREFIX_BITS",
    "TYPE_BITS",
    "Extension",
    "ExtensionOperandTypeInformation",
    "extension_code",
    "extension_prefix",
    "extension_type",
    "is_extension",
    "is_extension_name",
]

TYPE_BITS = 16
AIDL_PREFIX_BITS = 15
HIDL_PREFIX_BITS = 16

_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+")


@dataclass(frozen=True, slots=True)
class ExtensionOperandTypeInformation:
    """One operand type of an extension: its number there, tensor or scalar, and the bytes of one element."""

    type: int
    is_tensor: bool
    byte_size: int


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
