"""The operand types of a model under construction, and the checks of the arguments of its calls.

Extension codes are those of the model: its builder assigns a prefix to each extension by name, and has no others.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Protocol, TypeVar

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import NAME as BUILT_IN
from nnfmq.hal.extensions import ExtensionCodes, extension_prefix, is_extension
from nnfmq.hal.summaries import clipped, listed
from nnfmq.hal.tensor_info import ElementInfo
from nnfmq.hal.types import (
    BASE_MAX,
    ExtensionNameAndPrefix,
    Operand,
    OperandType,
    OperationType,
    has_unspecified_dimensions,
)
from nnfmq.validation.models import operand_size, size_of_elements, validate_operand_type
from nnfmq.validation.values import DescribedType, element_info, require

__all__ = ["DescribedExtension", "OperandTypes", "to_code", "to_indexes", "to_integer", "to_integers", "to_real"]


# ----------------------------------------------------------------------------------------------------------------------
# Checks of the arguments of ModelBuilder's calls: codes, indexes, numbers.


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
        from difflib import get_close_matches  # only errors need it

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


# ----------------------------------------------------------------------------------------------------------------------
# OperandTypes: the operand types of a model under construction, those of extensions included.


class DescribedExtension(Protocol):
    """An extension, as `DeviceInfo.extensions` has it."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def operand_types(self) -> Sequence[DescribedType]:
        """Its operand types."""
        ...


class OperandTypes:
    """The types that a model may use: the HAL's, and those of extensions.

    Attributes:
        elements: NumPy's element types of the known types of extensions, by the model's code.

    Args:
        described: The extensions of a device. Without any, every extension may be used, and nothing is known of its
            types.
    """

    def __init__(self, described: Iterable[DescribedExtension] = ()) -> None:
        self._described = {extension.name: extension for extension in described}
        self._known: dict[OperandType, DescribedType] = {}  # of described extensions, by the model's code
        self.elements: dict[OperandType, ElementInfo] = {}  # of the same
        self._codes = ExtensionCodes()
        self._codes.prefix(BUILT_IN)  # so that it has its usual prefix

    def prefix(self, name: str) -> int:
        """Return this model's prefix of an extension.

        Raises:
            InvalidArgument: If the name is malformed, or extensions are described and this one is not among them.
        """
        require(isinstance(name, str), "N-API-1", f"extension name {name!r}, e.g. 'com.example.name' is one")
        if self._described and name not in self._described:
            known = ", ".join(sorted(self._described))
            raise InvalidArgument(f"there is no extension {name!r}, the device has: {known} (N-API-1)")
        return self._codes.prefix(name)

    def operand_type(self, name: str, number: int) -> OperandType:
        """Return the code of operand type `number` of an extension.

        Raises:
            InvalidArgument: As `prefix`; or if the described extension has no such type.
        """
        self.prefix(name)
        code = self._codes.operand_type(name, to_integer(number, "code", "N-API-1"))
        if self._described:
            kinds = {kind.type: kind for kind in self._described[name].operand_types}
            message = f"extension {name} has no operand type {number}, it has: {listed(sorted(kinds), len(kinds))}"
            require(number in kinds, "N-API-1", message)
            self._known[code], self.elements[code] = kinds[number], element_info(name, kinds[number])
        return code

    def operation_type(self, name: str, number: int) -> OperationType:
        """Return the code of operation `number` of an extension. Raises InvalidArgument as `prefix`."""
        self.prefix(name)
        return self._codes.operation_type(name, to_integer(number, "code", "N-API-1"))

    def used(self, codes: Iterable[int]) -> tuple[ExtensionNameAndPrefix, ...]:
        """Return the extensions of `codes`, for `Model.extensions`."""
        prefixes = {extension_prefix(code) for code in codes}
        return tuple(entry for entry in self._codes.extensions if entry.prefix in prefixes)

    def require_prefix(self, code: int, where: str) -> None:
        """Require that an extension's code is one of this model.

        Raises:
            InvalidArgument: If it has another prefix.
        """
        known = {entry.prefix: entry.name for entry in self._codes.extensions}
        text = f"{where}: code {int(code):#x} has extension prefix {extension_prefix(code)}, this model has {known}"
        require(extension_prefix(code) in known, "N-API-1", f"{text}; get codes from this builder")

    def validate(self, operand: Operand, where: str) -> None:
        """Validate type, dimensions, scale and zero point.

        Raises:
            InvalidArgument: If one is invalid; `where` begins the message.
        """
        if not is_extension(operand.type):
            validate_operand_type(operand, where)
            return
        self.require_prefix(operand.type, where)
        kind = self._known.get(operand.type)
        require(
            kind is None or kind.is_tensor or not operand.dimensions,
            "N-API-1",
            f"{where}: a scalar with dimensions {operand.dimensions}",
        )
        in_range = all(0 <= dimension < 1 << 32 for dimension in operand.dimensions)
        require(in_range, "N-API-1", f"{where}: dimensions {operand.dimensions}, each must be 0 to 2^32 - 1")
        require(
            operand.scale == operand.zero_point == 0,
            "N-API-1",
            f"{where}: a scale or zero point on an extension's type",
        )
        size_of_elements(1 if kind is None else kind.byte_size, operand.dimensions, where)

    def value_bytes(self, operand: Operand, where: str) -> int | None:
        """Return the size of a value of an operand; None if only the extension's vendor knows it.

        Raises:
            InvalidArgument: If the operand has unknown dimensions.
        """
        kind = self._known.get(operand.type)
        is_foreign = is_extension(operand.type) and kind is None
        if is_extension(operand.type):
            is_unspecified = 0 in operand.dimensions or (kind is not None and kind.is_tensor and not operand.dimensions)
        else:
            is_unspecified = has_unspecified_dimensions(operand.type, operand.dimensions)
        message = f"{where}: a value needs known dimensions, they are {operand.dimensions}"
        require(not is_unspecified, "N-API-3", message)
        if is_foreign or operand.type == OperandType.OEM:
            return None
        if kind is not None:
            return size_of_elements(kind.byte_size, operand.dimensions, where)
        return operand_size(operand.type, operand.dimensions, where)
