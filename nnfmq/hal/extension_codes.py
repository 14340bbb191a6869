"""Codes and names of vendor extensions.

The code of an extension's operand type or operation is prefix << 16 | type, which is above BASE_MAX. AIDL's codes are
signed, so a prefix has 15 bits; HIDL's has 16. Each model chooses the prefixes of its extensions (`Model.extensions`);
prefix 0 is never used. `ExtensionCodes` assigns them.

Source: HAL 1.2 types.hal, `Extension` and `ExtensionNameAndPrefix`.
"""

from __future__ import annotations

import re
from typing import TypeVar

from msgspec import Struct

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
    "named_code",
]

TYPE_BITS = 16
AIDL_PREFIX_BITS = 15
HIDL_PREFIX_BITS = 16

Code = TypeVar("Code", OperandType, OperationType)

_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+")


class Extension(Struct, frozen=True):
    """An extension that a device supports, with its operand types."""

    name: str
    operand_types: tuple[ExtensionOperandTypeInformation, ...] = ()


def is_extension(code: int) -> bool:
    """Return True if an operand type or operation code belongs to an extension."""
    return code > BASE_MAX


def extension_prefix(code: int) -> int:
    """Return the prefix of a code; 0 if it does not belong to an extension."""
    return code >> TYPE_BITS


def extension_type(code: int) -> int:
    """Return the type of a code, which identifies the operand type or operation within its extension."""
    return code & BASE_MAX


def extension_code(prefix: int, type: int, *, prefix_bits: int = AIDL_PREFIX_BITS) -> int:
    """Return the code of operand type or operation `type` of the extension with `prefix`.

    Raises:
        InvalidArgument: If `prefix` is not in 1 to 2^prefix_bits - 1, or `type` not in 0 to 2^16 - 1.
    """
    if not 0 < prefix < 1 << prefix_bits:
        raise InvalidArgument(f"extension prefix {prefix}, allowed are 1 to {(1 << prefix_bits) - 1}")
    if not 0 <= type <= BASE_MAX:
        raise InvalidArgument(f"type {type} within an extension, allowed are 0 to {BASE_MAX}")
    return prefix << TYPE_BITS | type


def is_extension_name(name: str) -> bool:
    """Return whether `name` has two or more parts of lowercase letters, digits and underscores, joined by periods."""
    return _NAME.fullmatch(name) is not None


def named_code(kind: type[Code], code: int, name: str) -> Code:
    """Return an extension's code as a member of the enum `kind` that has this name, for messages and displays."""
    member = kind(code)  # the enums create a new object for each extension code
    member._name_ = name
    return member


class ExtensionCodes:
    """Assigns the codes of extensions' operand types and operations in one model; prefixes are 1, 2, ... in call order.

    codes = ExtensionCodes()
    int64 = codes.operand_type("com.example.fibonacci", 0)
    model = Model(..., extensions=codes.extensions)
    """

    def __init__(self) -> None:
        self._prefixes: dict[str, int] = {}

    @property
    def extensions(self) -> tuple[ExtensionNameAndPrefix, ...]:
        """Names and prefixes of all extensions used so far, for `Model.extensions`."""
        return tuple(ExtensionNameAndPrefix(name, prefix) for name, prefix in self._prefixes.items())

    def prefix(self, name: str) -> int:
        """Return the prefix of an extension.

        Raises:
            InvalidArgument: If the name is malformed.
        """
        if not is_extension_name(name):
            raise InvalidArgument(f"extension name {name!r}, e.g. 'com.example.name' is one")
        return self._prefixes.setdefault(name, len(self._prefixes) + 1)

    def operand_type(self, name: str, type: int) -> OperandType:
        """Return the code of operand type `type` of an extension.

        Raises:
            InvalidArgument: If the name is malformed, or the type out of range.
        """
        return OperandType(extension_code(self.prefix(name), type))

    def operation_type(self, name: str, type: int) -> OperationType:
        """Return the code of operation `type` of an extension.

        Raises:
            InvalidArgument: If the name is malformed, or the type out of range.
        """
        return OperationType(extension_code(self.prefix(name), type))
