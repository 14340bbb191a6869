"""OperandTypes: the operand types of a model under construction, those of extensions included.

Extension codes are those of the model: its builder assigns a prefix to each extension by name, and has no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extension_codes import ExtensionCodes, extension_prefix, is_extension
from nnfmq.hal.summaries import listed
from nnfmq.hal.tensor_info import ElementInfo
from nnfmq.hal.tflite_codes import NAME as BUILT_IN
from nnfmq.hal.types import (
    ExtensionNameAndPrefix,
    Operand,
    OperandType,
    OperationType,
    has_unspecified_dimensions,
)
from nnfmq.model_builder.argument_checks import to_integer
from nnfmq.validation.extension_elements import DescribedType, element_info
from nnfmq.validation.model_validation import operand_size, size_of_elements, validate_operand_type
from nnfmq.validation.rules import require

__all__ = ["DescribedExtension", "OperandTypes"]


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
