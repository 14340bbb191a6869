"""Extensions in the tables of the built-in operations, and models' numbers for them translated to this process's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.plugins import FLOAT_N, FLOATS, Fibonacci, tables_as_they_were
from support.small_models import F32, one_operation, two_adds

from nnfmq.driver.devices.registry import load_devices
from nnfmq.engines import interpreter
from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.extensions import ExtensionCodes, extension_code
from nnfmq.hal.types import (
    ExtensionNameAndPrefix,
    Model,
    Operand,
    OperandType,
    OperationType,
    element_bytes,
    is_scalar,
    operand_bytes,
)
from nnfmq.operations.declaration import V1_2, Array, Declaration, Run, Shape, Tensor, Variant, data, overload, weight
from nnfmq.operations.extensions import (
    ExtensionType,
    VendorExtension,
    define_operation,
    define_type,
    install,
    to_local_prefixes,
)
from nnfmq.operations.kernel_adapters import stateless
from nnfmq.operations.shapes import require
from nnfmq.validation import validate_model
from nnfmq.validation.values import validate_extensions

NAME = "com.example.wide"
OTHERS = [f"com.example.other{index}" for index in range(50)]  # more than a process of tests installs
SCALAR, WIDE = define_type(3, "SCALAR"), define_type(7, "WIDE")


def plan_shift(x: Tensor, by: Tensor, *, output: Tensor) -> Run:
    """Return x + by + the zero point that the output carries, a byte."""
    require(len(output.extension_data) == 1, "C1", "one byte")
    addend = by.array.item() + output.extension_data[0]
    return lambda values: values + addend


def same_shape(x: Shape, by: Shape | None = None) -> Shape:
    return x


def twice(x: Array) -> Array:
    return x * 2


EXTENSION = VendorExtension(
    NAME,
    (ExtensionType(SCALAR, "int16", is_tensor=False), ExtensionType(WIDE, "int64")),
    (
        Declaration(
            define_operation(2, "SHIFT"),
            V1_2,
            (overload(data("x"), weight("by", SCALAR)),),
            (Variant({"T": WIDE}, V1_2, plan_shift),),
            same_shape,
        ),
        Declaration(
            define_operation(5, "TWICE"),
            V1_2,
            (overload(data("x")),),
            (Variant({"T": F32}, V1_2, stateless(twice)), Variant({"T": WIDE}, V1_2, stateless(twice))),
            same_shape,
        ),
    ),
)


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    with tables_as_they_were():
        install(EXTENSION)
        yield


def shift(by: bytes = b"\x10\0", byte: bytes = b"\x03") -> Model:
    """Return SHIFT of two elements, under numbers that are not this process's."""
    numbers = ExtensionCodes()
    for name in OTHERS:
        numbers.prefix(name)
    wide, scalar = numbers.operand_type(NAME, 7), numbers.operand_type(NAME, 3)
    code = numbers.operation_type(NAME, 2)
    model = one_operation(code, [Operand(wide, (2,)), (Operand(scalar), by)], Operand(wide, (2,), extension_data=byte))
    return replace(model, extensions=numbers.extensions)


def test_EXT_4_a_plan_finds_the_bytes_of_its_operands() -> None:
    model = to_local_prefixes(shift())
    assert validate_model(model) == 3
    out = np.zeros(2, np.int64)
    interpreter.prepare(model).execute([np.int64([1, 2**40])], [out])
    assert out.tolist() == [1 + 16 + 3, 2**40 + 16 + 3]


def test_EXT_4_a_plan_rejects_invalid_extension_data() -> None:
    model = to_local_prefixes(shift(byte=b""))
    assert load_devices()["reference"]._supported(model) == [True]
    with pytest.raises(GeneralFailure, match=r"operation 0 \(com\.example\.wide\.SHIFT\): one byte \(C1\)$"):
        interpreter.prepare(model)


def test_EXT_1_types_of_an_extension_have_sizes_where_it_is_installed() -> None:
    kinds = [operand.type for operand in to_local_prefixes(shift()).main.operands]
    assert [kind.name for kind in kinds] == [f"{NAME}.WIDE", f"{NAME}.SCALAR", f"{NAME}.WIDE"]
    assert [(element_bytes(kind), is_scalar(kind)) for kind in kinds] == [(8, False), (2, True), (8, False)]
    assert operand_bytes(Operand(kinds[1])) == 2


def test_VAL_5_a_constant_scalar_of_another_size_is_rejected_by_its_owner() -> None:
    assert validate_model(shift(by=b"\x10\0\0")) == 3  # as the generic validator has it
    with pytest.raises(InvalidArgument, match="N-VAL-3"):
        validate_model(to_local_prefixes(shift(by=b"\x10\0\0")))


def test_an_operation_of_a_plug_in_takes_types_of_the_hal_too() -> None:
    numbers = ExtensionCodes()
    code = numbers.operation_type(NAME, 5)
    model = replace(one_operation(code, [Operand(F32, (2,))], Operand(F32, (2,))), extensions=numbers.extensions)
    out = np.zeros(2, np.float32)
    interpreter.prepare(to_local_prefixes(model)).execute([np.float32([1.5, -2])], [out])
    assert out.tolist() == [3, -4]


def test_an_operation_of_the_hal_takes_no_type_of_an_extension() -> None:
    numbers = ExtensionCodes()
    wide = Operand(numbers.operand_type(NAME, 7), (2,))
    model = one_operation(OperationType.ABS, [wide], wide)
    with pytest.raises(InvalidArgument, match=rf"argument 0 \(input\) has type {NAME}\.WIDE, allowed are .*\(S2\)$"):
        validate_model(to_local_prefixes(replace(model, extensions=numbers.extensions)))


def test_MOD_15_a_model_without_names_stays_as_it_is() -> None:
    model = two_adds()
    assert to_local_prefixes(model) is model


def test_MOD_15_names_stay_one_to_one() -> None:
    """Those that are not installed get prefixes that no installed one has."""
    model = to_local_prefixes(shift())
    assert validate_extensions(model.extensions) == 3
    assert [entry.name for entry in model.extensions] == [*OTHERS, NAME]


def test_MOD_15_an_unknown_extension_is_never_taken_for_an_installed_one() -> None:
    model = Fibonacci().model(FLOAT_N, FLOATS)  # prefix 1 here, as the installed extension's may be
    assert load_devices()["reference"]._supported(to_local_prefixes(model)) == [False]
    assert to_local_prefixes(model).main.operations[0].type.name == "com.example.fibonacci.0"


def test_MOD_15_names_that_clients_make_up_fill_no_table() -> None:
    named = [(ExtensionNameAndPrefix(f"com.example.made_up_{number}", 1),) for number in range(2)]
    first, second = (to_local_prefixes(replace(two_adds(), extensions=names)).extensions[0] for names in named)
    assert first.prefix == second.prefix


@pytest.mark.parametrize("prefix", [1, 2, 7, 0xFFFF])
def test_N_VAL_11_a_prefix_that_the_model_does_not_name_is_rejected(prefix: int) -> None:
    model = Fibonacci().model(FLOAT_N, FLOATS)
    foreign = Operand(OperandType(extension_code(prefix, 7, prefix_bits=16)), (2,))
    named = ExtensionNameAndPrefix(NAME, 3)
    model = replace(one_operation(OperationType.ABS, [foreign], foreign), extensions=(named,))
    with pytest.raises(InvalidArgument, match=rf"has prefix {prefix}, the model declares \[3\] \(N-VAL-11\)$"):
        to_local_prefixes(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": NAME}, rf"extension {NAME} is already installed"),
        (
            {"types": (ExtensionType(OperandType(extension_code(7, 1)), "int16"),), "declarations": ()},
            "is not a code of this extension",
        ),
        ({"types": ()}, "SCALAR.* is not a code of this extension"),
        ({"types": (ExtensionType(WIDE, "U4"),), "declarations": ()}, "WIDE has elements of .*, not numeric"),
    ],
)
def test_EXT_1_a_plug_in_that_is_not_sound_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        install(replace(EXTENSION, **({"name": "com.example.broken"} | changes)))


def test_EXT_2_an_extension_that_fails_to_install_leaves_nothing() -> None:
    broken = replace(EXTENSION, name="com.example.broken", declarations=(EXTENSION.declarations[0],) * 2)
    with pytest.raises(InvalidArgument, match="declared twice"):
        install(broken)
    numbers = ExtensionCodes()
    model = one_operation(numbers.operation_type("com.example.broken", 2), [FLOAT_N], FLOATS)
    assert load_devices()["reference"]._supported(to_local_prefixes(replace(model, extensions=numbers.extensions))) == [
        False
    ]
