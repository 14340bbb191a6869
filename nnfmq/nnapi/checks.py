"""Checks of arguments that NNAPI makes in every call, and extension attributes."""

from __future__ import annotations

from typing import TypeVar

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import TYPE_BITS
from nnfmq.hal.types import ExtensionNameAndPrefix, TokenValuePair

__all__ = ["ExtensionAttributes", "required"]

T = TypeVar("T")


def required(value: T | None, what: str) -> T:
    """Return `value`.

    Raises:
        InvalidArgument: If it is None, NNAPI's null pointer.
    """
    if value is None:
        raise InvalidArgument(f"{what} is None; it is required (NNAPI: UNEXPECTED_NULL)")
    return value


# ----------------------------------------------------------------------------------------------------------------------
# ExtensionAttributes: vendor hints of a compilation or an execution, collected one by one.


class ExtensionAttributes:
    """Attributes of extensions, in the form of the HAL's hints. Each extension gets a prefix, counted from 1."""

    def __init__(self) -> None:
        self._prefixes: dict[str, int] = {}
        self._values: dict[int, bytes] = {}

    def add(self, extension_name: str, code: int, value: bytes) -> None:
        """Add attribute `code` of an extension.

        Raises:
            InvalidArgument: If the code has more than 16 bits, or was added before.
        """
        required(extension_name, "the extension's name")
        required(value, "the attribute's value")
        if not 0 <= code < 1 << TYPE_BITS:
            raise InvalidArgument(f"attribute {code} of extension {extension_name!r}: a code has {TYPE_BITS} bits")
        prefix = self._prefixes.setdefault(extension_name, len(self._prefixes) + 1)
        token = prefix << TYPE_BITS | code
        if token in self._values:
            raise InvalidArgument(f"attribute {code} of extension {extension_name!r} was added before")
        self._values[token] = bytes(value)

    @property
    def hints(self) -> tuple[TokenValuePair, ...]:
        """The attributes."""
        return tuple(TokenValuePair(token, value) for token, value in self._values.items())

    @property
    def extensions(self) -> tuple[ExtensionNameAndPrefix, ...]:
        """The prefixes of the extensions in `hints`."""
        return tuple(ExtensionNameAndPrefix(name, prefix) for name, prefix in self._prefixes.items())
