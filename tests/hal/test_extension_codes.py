"""Numbers of extensions by name: what an application builds its models with."""

from __future__ import annotations

import pytest

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import ExtensionCodes, extension_prefix, extension_type, is_extension, named_code
from nnfmq.hal.types import ExtensionNameAndPrefix, OperandType, OperationType
from nnfmq.validation.values import validate_extensions

FIRST, SECOND = "com.example.fibonacci", "org.example.other"


def test_EXT_3_codes_are_assigned_by_name() -> None:
    numbers = ExtensionCodes()
    kind, operation = numbers.operand_type(FIRST, 1), numbers.operation_type(FIRST, 0)
    assert isinstance(kind, OperandType) and isinstance(operation, OperationType)
    assert (extension_type(kind), extension_type(operation)) == (1, 0)
    assert extension_prefix(kind) == extension_prefix(operation)
    assert numbers.operand_type(FIRST, 1) == kind


def test_EXT_3_prefixes_are_never_0_and_differ() -> None:
    numbers = ExtensionCodes()
    codes = [numbers.operand_type(name, 0) for name in (FIRST, SECOND)]
    assert all(is_extension(code) for code in codes)
    assert codes[0] != codes[1]


def test_MOD_15_names_and_prefixes_are_one_to_one() -> None:
    numbers = ExtensionCodes()
    for name in (SECOND, FIRST, SECOND, FIRST):
        numbers.prefix(name)
    assert numbers.extensions == (ExtensionNameAndPrefix(SECOND, 1), ExtensionNameAndPrefix(FIRST, 2))
    assert validate_extensions(numbers.extensions) == 3


def test_EXT_3_a_model_without_extensions_has_no_prefixes() -> None:
    assert ExtensionCodes().extensions == ()


@pytest.mark.parametrize("name", ["", "fibonacci", "com.Example", "com..example"])
def test_EXT_1_a_malformed_name_gets_no_prefix(name: str) -> None:
    numbers = ExtensionCodes()
    with pytest.raises(InvalidArgument, match="extension name"):
        numbers.operand_type(name, 0)
    assert numbers.extensions == ()


@pytest.mark.parametrize("number", [-1, 1 << 16])
def test_MOD_15_a_type_beyond_16_bits_is_rejected(number: int) -> None:
    with pytest.raises(InvalidArgument, match="within an extension"):
        ExtensionCodes().operation_type(FIRST, number)


def test_a_code_with_a_name_equals_the_code_without_one() -> None:
    plain = OperandType(7 << 16)
    shown = named_code(OperandType, 7 << 16, "com.example.fibonacci.INT64")
    assert (shown, hash(shown), shown.name) == (plain, hash(plain), "com.example.fibonacci.INT64")
    assert plain.name == "EXTENSION_0x70000"
