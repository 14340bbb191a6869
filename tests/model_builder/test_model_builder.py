"""ModelBuilder's calls: what they build, and NNAPI's errors for wrong arguments and in wrong states."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.models import add_model

import nnfmq
from nnfmq.hal.extensions import extension_code
from nnfmq.hal.models import model_architecture_hash
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import (
    ChannelQuant,
    ExtensionNameAndPrefix,
    LifeTime,
    Operand,
    OperandType,
    Operation,
    OperationType,
)
from nnfmq.serialize.messages import ExtensionData, OperandTypeData

F32 = OperandType.TENSOR_FLOAT32
NAME = "com.example.numbers"
INT64 = ExtensionData(NAME, (OperandTypeData(0, False, 8, "int64"), OperandTypeData(1, True, 8, "int64")))


@pytest.fixture
def builder() -> Iterator[nnfmq.ModelBuilder]:
    """Return a builder with operands: 0, 1 and 3 float tensors of 2x2, 2 an INT32, 4 a tensor of unknown rows."""
    with nnfmq.ModelBuilder() as made:
        for operand in ((F32, (2, 2)), (F32, (2, 2)), ("INT32", ()), (F32, (2, 2)), (F32, (0, 2))):
            made.add_operand(*operand)
        yield made


def finish_add(builder: nnfmq.ModelBuilder) -> None:
    """Finish a model that adds operands 0 and 1 of `builder`."""
    builder.set_operand_value(2, 0)
    builder.set_operand_value(4, None)
    builder.add_operation("ADD", [0, 1, 2], [3])
    builder.identify_inputs_and_outputs([0, 1], [3])
    builder.finish()


def rejection(call: Callable[..., object], *arguments: Any, **named: Any) -> str:
    """Return the message of the InvalidArgument that a call raises."""
    with pytest.raises(nnfmq.InvalidArgument) as caught:
        call(*arguments, **named)
    assert not isinstance(caught.value, nnfmq.BadState)
    return str(caught.value)


# -- building ---------------------------------------------------------------------------------------------------------


def test_API_3_a_model_has_what_was_added(builder: nnfmq.ModelBuilder) -> None:
    builder.relax_computation()
    finish_add(builder)
    main = builder.model.main
    tensor = (F32, (2, 2))
    assert [(o.type, o.dimensions) for o in main.operands] == [tensor, tensor, (OperandType.INT32, ()), tensor]
    assert main.operations == (Operation(OperationType.ADD, (0, 1, 2), (3,)),)
    assert (main.input_indexes, main.output_indexes) == ((0, 1), (3,))
    assert builder.model.operand_values == bytes(4)
    assert builder.model.relax_computation_float32_to_float16


def test_API_3_indexes_count_from_0() -> None:
    with nnfmq.ModelBuilder() as builder:
        assert [builder.add_operand(F32, (1,)) for _ in range(3)] == [0, 1, 2]


def test_API_3_types_are_members_names_or_codes() -> None:
    with nnfmq.ModelBuilder() as builder:
        for kind in (F32, "TENSOR_FLOAT32", 3):
            builder.add_operand(kind, np.array([2, 3]))  # type: ignore[arg-type]  # an array is not a Sequence
        assert builder._operands == [Operand(F32, (2, 3))] * 3
        assert all(type(dimension) is int for operand in builder._operands for dimension in operand.dimensions)


def test_API_3_inputs_and_outputs_have_names(builder: nnfmq.ModelBuilder) -> None:
    builder.set_operand_value(2, 0)
    builder.set_operand_value(4, None)
    builder.add_operation("ADD", [0, 1, 2], [3])
    builder.identify_inputs_and_outputs({"left": 1, "right": 0}, [3])
    builder.finish()
    assert builder.inputs == (TensorInfo("left", (2, 2), "float32"), TensorInfo("right", (2, 2), "float32"))
    assert builder.outputs == (TensorInfo("output 0", (2, 2), "float32"),)
    assert builder.model.main.input_indexes == (1, 0)


def test_API_3_an_operand_keeps_its_quantization() -> None:
    with nnfmq.ModelBuilder() as builder:
        builder.add_operand("TENSOR_QUANT8_ASYMM", (4,), 0.5, 128)
        builder.add_operand("TENSOR_QUANT8_SYMM_PER_CHANNEL", (2, 3))
        builder.set_per_channel_quant_params(1, np.array([0.5, 0.25], np.float32), 0)
        assert builder._operands[0] == Operand(OperandType.TENSOR_QUANT8_ASYMM, (4,), 0.5, 128)
        assert builder._operands[1].channel_quant == ChannelQuant((0.5, 0.25), 0)


def test_API_3_None_makes_an_operand_an_omitted_argument(builder: nnfmq.ModelBuilder) -> None:
    builder.set_operand_value(0, np.ones((2, 2), np.float32))
    builder.set_operand_value(0, None)
    assert builder._operands[0] == Operand(F32, (2, 2), lifetime=LifeTime.NO_VALUE)


def test_API_3_extension_data_is_set_and_removed() -> None:
    with nnfmq.ModelBuilder() as builder:
        builder.add_operand(builder.get_extension_operand_type(NAME, 0))
        builder.set_extension_data(0, b"parameters")
        assert builder._operands[0].extension_data == b"parameters"
        builder.set_extension_data(0, None)
        assert builder._operands[0].extension_data == b""


def test_API_3_codes_of_an_extension_have_one_prefix_which_the_model_declares() -> None:
    with nnfmq.ModelBuilder() as builder:
        builder.get_extension_operation_type("com.example.unused", 1)
        kind = builder.get_extension_operand_type(NAME, 7)
        operation = builder.get_extension_operation_type(NAME, 9)
        prefix = kind >> 16
        assert (kind & 0xFFFF, operation & 0xFFFF, operation >> 16) == (7, 9, prefix)
        builder.add_operand(kind, (2,))
        builder.add_operand(F32, (2,))
        builder.add_operation(operation, [0], [1])
        builder.identify_inputs_and_outputs([0], [1])
        builder.finish()
        assert builder.model.extensions == (ExtensionNameAndPrefix(NAME, prefix),)


def test_API_3_inputs_of_an_extensions_type_have_the_dtype_that_the_device_reports() -> None:
    with nnfmq.ModelBuilder(extensions=[INT64]) as builder:
        builder.add_operand(builder.get_extension_operand_type(NAME, 1), (3,))
        builder.add_operand(builder.get_extension_operand_type(NAME, 0))
        builder.add_operation(builder.get_extension_operation_type(NAME, 0), [0], [1])
        builder.identify_inputs_and_outputs({"numbers": 0}, {"sum": 1})
        builder.finish()
        assert builder.inputs == (TensorInfo("numbers", (3,), "int64"),)
        assert builder.outputs == (TensorInfo("sum", (), "int64", is_scalar=True),)


def test_API_3_inputs_of_an_unknown_extensions_type_cannot_be_described() -> None:
    with nnfmq.ModelBuilder() as builder:
        builder.add_operand(builder.get_extension_operand_type(NAME, 1), (3,))
        builder.add_operand(F32, (3,))
        builder.add_operation(builder.get_extension_operation_type(NAME, 0), [0], [1])
        builder.identify_inputs_and_outputs([0], [1])
        builder.finish()
        assert "give ModelBuilder the device's extensions, or prepare its `model`" in rejection(lambda: builder.inputs)
        assert repr(builder).startswith("<ModelBuilder, finished: EXTENSION_")


def test_API_3_a_deprecated_OEM_operation_has_any_arguments() -> None:
    with nnfmq.ModelBuilder() as builder:
        for operand in (("TENSOR_OEM_BYTE", (3,)), ("OEM", ()), (F32, (1,))):
            builder.add_operand(*operand)
        builder.set_operand_value(1, b"any length!")
        builder.add_operation("OEM_OPERATION", [0, 1], [2])
        builder.identify_inputs_and_outputs([], [2])
        builder.set_operand_value(0, b"\x01\x02\x03")
        builder.finish()
        assert builder.model.operand_values == b"any length!\0\x01\x02\x03"  # 3 bytes are aligned at 2


def test_API_3_two_builders_of_the_same_model_build_equal_ones() -> None:
    models = []
    for _ in range(2):
        with nnfmq.ModelBuilder() as builder:
            for operand in ((F32, (4,)), (F32, (4,)), (F32, (4,)), ("INT32", ())):
                builder.add_operand(*operand)
            builder.set_operand_value(3, 0)
            builder.add_operation("ADD", [0, 1, 3], [2])
            builder.identify_inputs_and_outputs([0, 1], [2])
            builder.finish()
            models.append(builder.model)
    assert models == [add_model(), add_model()]


def test_API_4_the_hash_is_that_of_telemetry(builder: nnfmq.ModelBuilder) -> None:
    finish_add(builder)
    assert builder.architecture_hash == model_architecture_hash(builder.model)


def test_API_4_a_finished_model_has_only_operands_that_are_used(builder: nnfmq.ModelBuilder) -> None:
    finish_add(builder)
    assert len(builder.model.main.operands) == 4


def test_API_16_a_model_outlives_its_builder(builder: nnfmq.ModelBuilder) -> None:
    finish_add(builder)
    model = builder.model
    builder.close()
    builder.close()
    assert model.main.operations
    with pytest.raises(nnfmq.BadState, match="this model is closed"):
        _ = builder.model


def test_API_16_a_builder_that_was_never_finished_can_be_closed(builder: nnfmq.ModelBuilder) -> None:
    builder.set_operand_value(0, np.ones((2, 2), np.float32))
    builder.close()
    assert repr(builder) == "<ModelBuilder, closed: 0 operands, 0 operations>"


def test_a_builder_shows_its_parts_and_its_model(builder: nnfmq.ModelBuilder) -> None:
    assert repr(builder) == "<ModelBuilder, building: 5 operands, 0 operations>"
    finish_add(builder)
    signature = "TENSOR_FLOAT32 2x2, TENSOR_FLOAT32 2x2 → TENSOR_FLOAT32 2x2"
    assert repr(builder) == f"<ModelBuilder, finished: {signature}; 1 operations, 4 operands>"


def test_a_builder_cannot_be_pickled(builder: nnfmq.ModelBuilder) -> None:
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        pickle.dumps(builder)


# -- wrong arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operand", "message"),
    [
        (("TENSOR_QUANT8_ASYMM", (1,), -1.0, 0), "scale -1.0"),
        (("TENSOR_QUANT8_ASYMM", (1,), 0.0, 0), "scale 0.0"),
        (("TENSOR_QUANT8_ASYMM", (1,), math.inf, 0), "scale inf"),
        (("TENSOR_QUANT8_ASYMM", (1,), math.nan, 0), "scale nan"),
        (("TENSOR_FLOAT32", (1,), 0.5, 0), "scale 0.5"),
        (("TENSOR_QUANT8_ASYMM", (1,), 1.0, -1), "zero point -1"),
        (("TENSOR_QUANT8_ASYMM", (1,), 1.0, 256), "zero point 256"),
        (("TENSOR_QUANT16_SYMM", (1,), 1.0, 1), "zero point 1"),
        (("INT32", (1,)), "a scalar with dimensions (1,)"),
        (("INT32", (0,)), "a scalar with dimensions (0,)"),
        ((-1, (1,)), "unknown OperandType -1, allowed are 0 to 15, 10000, 10001 and codes of extensions, above 65535"),
        ((16, (1,)), "unknown OperandType 16"),
        ((10002, (1,)), "unknown OperandType 10002"),
        ((None, (1,)), "unknown OperandType None"),
        (("TENSOR_FLOAT", (1,)), "similar are: TENSOR_FLOAT32, TENSOR_FLOAT16"),
        (("%", (1,)), "nnfmq.hal.types.OperandType has all"),
        (("TENSOR_FLOAT32", (2**16, 2**14)), "more than 2^32 - 1 bytes"),
        (("TENSOR_FLOAT32", (2**31, 4, 0)), "more than 2^32 - 1 bytes"),
        (("TENSOR_FLOAT32", (-1,)), "dimension -1"),
        (("TENSOR_FLOAT32", (2**32,)), "dimension 4294967296"),
        (("TENSOR_FLOAT32", None), "a sequence of integers is required, not None"),
        (("TENSOR_FLOAT32", "12"), "a sequence of integers is required, not '12'"),
        (("TENSOR_FLOAT32", (1.5,)), "an integer is required, not 1.5"),
        (("TENSOR_FLOAT32", (1,), None), "a number is required, not None"),
        (("TENSOR_FLOAT32", (1,), 0.0, None), "an integer is required, not None"),
        ((extension_code(9, 0), (1,)), "code 0x90000 has extension prefix 9, this model has {1: 'nnfmq.tflite'}"),
    ],
)
def test_N_API_1_an_operand_that_is_not_allowed_is_rejected(operand: tuple[Any, ...], message: str) -> None:
    with nnfmq.ModelBuilder() as builder:
        assert message in rejection(builder.add_operand, *operand)
        assert builder.add_operand(F32, (1,)) == 0, "nothing was added"


@pytest.mark.parametrize(
    ("number", "rest", "message"),
    [
        (0, ((2,),), "a scalar with dimensions (2,)"),
        (1, ((2,), 0.5), "a scale or zero point on an extension's type"),
        (1, ((2,), 0.0, 3), "a scale or zero point on an extension's type"),
        (1, ((-2,),), "each must be 0 to 2^32 - 1"),
        (1, ((2**20, 2**9),), "more than 2^32 - 1 bytes"),
    ],
)
def test_N_API_1_an_operand_of_an_extensions_type_is_checked_against_the_devices_description(
    number: int, rest: tuple[Any, ...], message: str
) -> None:
    with nnfmq.ModelBuilder(extensions=[INT64]) as builder:
        kind = builder.get_extension_operand_type(NAME, number)
        assert message in rejection(builder.add_operand, kind, *rest)


def test_N_API_1_extensions_that_the_device_lacks_are_rejected() -> None:
    with nnfmq.ModelBuilder(extensions=[INT64]) as builder:
        text = "there is no extension 'com.example.other', the device has: com.example.numbers"
        assert text in rejection(builder.get_extension_operand_type, "com.example.other", 0)
        assert text in rejection(builder.get_extension_operation_type, "com.example.other", 0)
        assert "no operand type 2, it has: 0, 1" in rejection(builder.get_extension_operand_type, NAME, 2)


@pytest.mark.parametrize("name", ["numbers", "", "Com.Example", None])
def test_N_API_1_malformed_names_of_extensions_are_rejected(name: Any) -> None:
    with nnfmq.ModelBuilder() as builder:
        assert "'com.example.name' is one" in rejection(builder.get_extension_operand_type, name, 0)
        assert "'com.example.name' is one" in rejection(builder.get_extension_operation_type, name, 0)


@pytest.mark.parametrize("number", [-1, 1 << 16, None])
def test_N_API_1_numbers_within_an_extension_have_16_bits(number: Any) -> None:
    with nnfmq.ModelBuilder() as builder:
        rejection(builder.get_extension_operand_type, NAME, number)
        rejection(builder.get_extension_operation_type, NAME, number)


def test_N_API_1_a_description_without_a_usable_dtype_is_rejected() -> None:
    hostile = ExtensionData(NAME, (OperandTypeData(0, True, 8, "object"),))
    with nnfmq.ModelBuilder(extensions=[hostile]) as builder:
        assert "elements of 'object' in 8 bytes" in rejection(builder.get_extension_operand_type, NAME, 0)


SETTERS: dict[str, Callable[[nnfmq.ModelBuilder], object]] = {
    "add_operand": lambda b: b.add_operand(F32, (1,)),
    "set_operand_value": lambda b: b.set_operand_value(0, None),
    "set_operand_value_from_memory": lambda b: b.set_operand_value_from_memory(0, None),  # type: ignore[arg-type]
    "set_operand_value_from_model": lambda b: b.set_operand_value_from_model(0, b),
    "set_per_channel_quant_params": lambda b: b.set_per_channel_quant_params(0, [1.0], 0),
    "set_extension_data": lambda b: b.set_extension_data(0, None),
    "get_extension_operand_type": lambda b: b.get_extension_operand_type(NAME, 0),
    "get_extension_operation_type": lambda b: b.get_extension_operation_type(NAME, 0),
    "add_operation": lambda b: b.add_operation("RELU", [0], [1]),
    "identify_inputs_and_outputs": lambda b: b.identify_inputs_and_outputs([0], [1]),
    "relax_computation": lambda b: b.relax_computation(),
    "finish": lambda b: b.finish(),
}


@pytest.mark.parametrize("call", SETTERS)
def test_N_API_2_a_finished_model_cannot_be_changed(builder: nnfmq.ModelBuilder, call: str) -> None:
    finish_add(builder)
    model = builder.model
    with pytest.raises(nnfmq.BadState, match=f"{call}: this model is finished"):
        SETTERS[call](builder)
    assert builder.model is model


@pytest.mark.parametrize("call", SETTERS)
def test_N_API_2_neither_can_an_invalid_or_closed_one(builder: nnfmq.ModelBuilder, call: str) -> None:
    rejection(builder.finish)
    with pytest.raises(nnfmq.BadState, match=r"invalid, because finish\(\) failed: build it again"):
        SETTERS[call](builder)
    builder.close()
    with pytest.raises(nnfmq.BadState, match=f"{call}: this model is closed"):
        SETTERS[call](builder)


@pytest.mark.parametrize("index", [-1, 5, 999, None, "0", 1.0])
def test_N_API_3_an_index_without_an_operand_is_rejected(builder: nnfmq.ModelBuilder, index: Any) -> None:
    rejection(builder.set_operand_value, index, 0)
    rejection(builder.set_operand_value_from_memory, index, None)
    rejection(builder.set_operand_value_from_model, index, builder)
    rejection(builder.set_per_channel_quant_params, index, [1.0], 0)
    rejection(builder.set_extension_data, index, b"x")


@pytest.mark.parametrize(("index", "size"), [(0, 15), (0, 17), (0, 0), (2, 3), (2, 5)])
def test_N_API_3_a_value_of_another_length_is_rejected(builder: nnfmq.ModelBuilder, index: int, size: int) -> None:
    assert f"the value has {size} bytes, " in rejection(builder.set_operand_value, index, bytes(size))


def test_N_API_3_a_value_needs_known_dimensions(builder: nnfmq.ModelBuilder) -> None:
    unranked = builder.add_operand(F32)
    for index in (4, unranked):
        assert "a value needs known dimensions" in rejection(builder.set_operand_value, index, bytes(8))


def test_N_API_3_so_does_a_value_of_an_extensions_type() -> None:
    with nnfmq.ModelBuilder(extensions=[INT64]) as builder:
        tensor, scalar = (builder.get_extension_operand_type(NAME, number) for number in (1, 0))
        for dimensions in ((), (0,), (2, 0)):
            index = builder.add_operand(tensor, dimensions)
            assert "a value needs known dimensions" in rejection(builder.set_operand_value, index, bytes(8))
        index = builder.add_operand(scalar)
        assert "the value has 4 bytes, 8 are required" in rejection(builder.set_operand_value, index, bytes(4))
        builder.set_operand_value(index, 1 << 40)
        builder.set_operand_value(builder.add_operand(tensor, (2,)), [1, 2])
        assert bytes(builder._values.small) == np.array([1 << 40, 1, 2], np.int64).tobytes()


def test_N_API_3_an_unknown_extensions_value_has_any_length_but_no_unknown_extent() -> None:
    with nnfmq.ModelBuilder() as builder:
        kind = builder.get_extension_operand_type(NAME, 3)
        index, unknown = builder.add_operand(kind, (2,)), builder.add_operand(kind, (2, 0))
        builder.set_operand_value(index, b"five!")
        assert "only bytes can be its value, not [1, 2]" in rejection(builder.set_operand_value, index, [1, 2])
        assert "a value needs known dimensions" in rejection(builder.set_operand_value, unknown, b"five!")


def test_N_API_3_inputs_and_outputs_have_no_value(builder: nnfmq.ModelBuilder) -> None:
    builder.identify_inputs_and_outputs([0], [3])
    assert "is SUBGRAPH_INPUT: it has no value" in rejection(builder.set_operand_value, 0, bytes(16))
    assert "is SUBGRAPH_OUTPUT: it has no value" in rejection(builder.set_operand_value, 3, bytes(16))


def test_N_API_5_an_unfinished_model_cannot_be_a_value(builder: nnfmq.ModelBuilder) -> None:
    index = builder.add_operand("SUBGRAPH")
    with nnfmq.ModelBuilder() as other:
        for unfinished in (builder, other):
            with pytest.raises(nnfmq.BadState, match=r"not finished: call finish\(\)"):
                builder.set_operand_value_from_model(index, unfinished)
        rejection(other.finish)
        with pytest.raises(nnfmq.BadState, match="this model is invalid"):
            builder.set_operand_value_from_model(index, other)


def test_N_API_6_only_a_SUBGRAPH_operand_refers_to_a_model(builder: nnfmq.ModelBuilder) -> None:
    index = builder.add_operand("SUBGRAPH")
    assert "only a SUBGRAPH can refer to a model" in rejection(builder.set_operand_value_from_model, 0, builder)
    for other in (None, add_model()):
        assert "a ModelBuilder is required" in rejection(builder.set_operand_value_from_model, index, other)
    assert "a model is its value" in rejection(builder.set_operand_value, index, b"")
    assert "a model is its value" in rejection(builder.set_operand_value, index, None)
    assert "a model is its value" in rejection(builder.set_operand_value_from_memory, index, None)


@pytest.mark.parametrize(
    ("scales", "dimension", "message"),
    [
        ([0.5], 0, "1 scales for 2 channels"),
        ([0.5, 0.5], 1, "2 scales for 3 channels"),
        ([0.5, 0.5], 2, "channelDim 2, the operand has 2 dimensions"),
        ([0.5, 0.5], -1, "channelDim -1"),
        ([0.5, 0.0], 0, "is not positive and finite"),
        ([0.5, -1.0], 0, "is not positive and finite"),
        ([0.5, math.nan], 0, "is not positive and finite"),
        ([0.5, None], 0, "a number is required, not None"),
        (None, 0, "a sequence is required, not None"),
        ([0.5, 0.5], None, "an integer is required, not None"),
    ],
)
def test_N_API_7_scales_that_do_not_fit_are_rejected(scales: Any, dimension: Any, message: str) -> None:
    with nnfmq.ModelBuilder() as builder:
        builder.add_operand("TENSOR_QUANT8_SYMM_PER_CHANNEL", (2, 3))
        assert message in rejection(builder.set_per_channel_quant_params, 0, scales, dimension)
        assert builder._operands[0].channel_quant is None


def test_N_API_7_only_one_type_has_scales_of_channels(builder: nnfmq.ModelBuilder) -> None:
    extension = builder.add_operand(builder.get_extension_operand_type(NAME, 0), (2,))
    for index in (0, 2, extension):
        assert "channelQuant given for type" in rejection(builder.set_per_channel_quant_params, index, [1.0, 1.0], 0)


@pytest.mark.parametrize("data", [b"", "text", 7])
def test_N_API_7_extension_data_that_is_empty_or_no_bytes_is_rejected(data: Any) -> None:
    with nnfmq.ModelBuilder() as builder:
        builder.add_operand(builder.get_extension_operand_type(NAME, 0), (2,))
        assert "must be bytes, at least one, or None" in rejection(builder.set_extension_data, 0, data)


def test_N_API_7_only_types_of_extensions_have_extension_data(builder: nnfmq.ModelBuilder) -> None:
    for data in (b"x", None):
        assert "only types of extensions have extension data" in rejection(builder.set_extension_data, 0, data)


@pytest.mark.parametrize(
    ("operation", "inputs", "outputs", "message"),
    [
        (-1, [0], [1], "unknown OperationType -1, allowed are 0 to 105, 10000 and codes of extensions, above 65535"),
        (106, [0], [1], "unknown OperationType 106"),
        (10001, [0], [1], "unknown OperationType 10001"),
        (None, [0], [1], "unknown OperationType None"),
        ("CONV2D", [0], [1], "similar are: CONV_2D"),
        ("RELU", [5], [1], "operation 0 (RELU): inputs: there is no operand 5, the model has 5"),
        ("RELU", [0], [-1], "operation 0 (RELU): outputs: there is no operand -1, the model has 5"),
        ("RELU", None, [1], "inputs: a sequence of integers is required, not None"),
        ("RELU", [0], None, "outputs: a sequence of integers is required, not None"),
        ("RELU", [0], [None], "outputs: an integer is required, not None"),
        ("RELU", [], [1], "operation 0 (RELU): 0 arguments"),
        ("RELU", [0, 1], [3], "operation 0 (RELU): 2 arguments"),
        ("RELU", [0], [], "operation 0 (RELU): 0 outputs given, allowed are 1"),
        ("RELU", [2], [3], "operation 0 (RELU): argument 0 (input) has type INT32, allowed are"),
        ("ADD", [0, 1, 2], [2], "operation 0 (ADD): output types (INT32) do not match"),
        ("IF", [0, 1], [3], "operation 0 (IF): 2 inputs, at least 3 are required"),
        ("WHILE", [0, 1, 2], [], "operation 0 (WHILE): no output, at least 1 is required"),
        (extension_code(9, 0), [0], [1], "code 0x90000 has extension prefix 9"),
    ],
)
def test_N_API_8_an_operation_that_is_not_allowed_is_rejected(
    builder: nnfmq.ModelBuilder, operation: Any, inputs: Any, outputs: Any, message: str
) -> None:
    assert message in rejection(builder.add_operation, operation, inputs, outputs)
    assert builder._operations == []


def test_N_API_8_an_argument_that_must_not_be_omitted_is_named(builder: nnfmq.ModelBuilder) -> None:
    builder.set_operand_value(0, None)
    assert "argument 0 (input) must not be omitted" in rejection(builder.add_operation, "RELU", [0], [1])


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ([0, 0], [3], "inputs [0, 0]: an operand is listed twice"),
        ([0], [3, 3], "outputs [3, 3]: an operand is listed twice"),
        ([0, 3], [3], "operands [3] are listed as inputs and as outputs"),
        ([5], [3], "inputs: there is no operand 5"),
        ([0], [-1], "outputs: there is no operand -1"),
        ([2], [3], "operand 2 (INT32) cannot be an input: it is CONSTANT_COPY"),
        ([0], [2], "operand 2 (INT32) cannot be an output: it is CONSTANT_COPY"),
        (None, [3], "inputs: a sequence of integers is required, not None"),
        ([0], None, "outputs: a sequence of integers is required, not None"),
    ],
)
def test_N_API_9_inputs_and_outputs_that_do_not_fit_are_rejected(
    builder: nnfmq.ModelBuilder, inputs: Any, outputs: Any, message: str
) -> None:
    builder.set_operand_value(2, 0)
    before = list(builder._operands)
    assert message in rejection(builder.identify_inputs_and_outputs, inputs, outputs)
    assert builder._operands == before
    builder.identify_inputs_and_outputs([0], [3])


def test_N_API_9_inputs_and_outputs_are_identified_once(builder: nnfmq.ModelBuilder) -> None:
    builder.identify_inputs_and_outputs([0], [3])
    assert "identified already" in rejection(builder.identify_inputs_and_outputs, [0], [3])


# -- wrong models -----------------------------------------------------------------------------------------------------


def test_N_API_10_an_empty_model_is_rejected() -> None:
    with nnfmq.ModelBuilder() as builder:
        assert "a subgraph without operands" in rejection(builder.finish)


def test_N_API_10_a_model_without_operations_is_rejected() -> None:
    with nnfmq.ModelBuilder() as builder:
        builder.add_operand(F32, (1,))
        builder.identify_inputs_and_outputs([0], [])
        assert "a subgraph without operations" in rejection(builder.finish)


def relus(*pairs: tuple[int, int], outputs: tuple[int, ...] = (2,)) -> nnfmq.ModelBuilder:
    """Return a builder of RELUs of one operand into another; there are 4, 0 is the input."""
    builder = nnfmq.ModelBuilder()
    for _ in range(4):
        builder.add_operand(F32, (2,))
    for read, written in pairs:
        builder.add_operation("RELU", [read], [written])
    builder.identify_inputs_and_outputs([0], outputs)
    return builder


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(0, 3), (1, 2), (2, 1)], "need each other's outputs: operation 1 (RELU) → operation 2 (RELU)"),
        ([(0, 3), (1, 2)], "no operation writes operand 1 (TENSOR_FLOAT32 2) and operation 1 (RELU) reads it"),
        ([(0, 1), (0, 2)], "no operation writes operand 3 (TENSOR_FLOAT32 2): make it an input"),
        ([(0, 1), (1, 3)], "no operation writes operand 2 (TENSOR_FLOAT32 2): make it an input"),
        ([(0, 1), (0, 2), (1, 2), (0, 3)], "written twice, by operation 1 (RELU) and operation 2 (RELU)"),
        ([(1, 0), (0, 1), (0, 2), (0, 3)], "operand 0, whose lifetime is SUBGRAPH_INPUT"),
    ],
)
def test_N_API_10_cycles_and_wrong_numbers_of_writers_are_rejected(pairs: list[tuple[int, int]], message: str) -> None:
    with relus(*pairs) as builder:
        assert message in rejection(builder.finish)
        with pytest.raises(nnfmq.BadState, match="this model is invalid"):
            _ = builder.model


def test_N_API_10_inputs_that_were_not_identified_are_named() -> None:
    with nnfmq.ModelBuilder() as builder:
        for _ in range(2):
            builder.add_operand(F32, (2,))
        builder.add_operation("RELU", [0], [1])
        text = "no operation writes operand 0 (TENSOR_FLOAT32 2) and operation 0 (RELU) reads it: make it an input"
        assert text in rejection(builder.finish)


def test_N_API_10_a_SUBGRAPH_without_a_model_is_named(builder: nnfmq.ModelBuilder) -> None:
    builder.add_operand("SUBGRAPH")
    assert "operand 5 (SUBGRAPH) has no value: call set_operand_value_from_model" in rejection(builder.finish)


def test_N_API_10_scales_of_channels_that_are_missing_are_named() -> None:
    with relus((0, 1), (1, 3), (1, 2)) as builder:
        index = builder.add_operand("TENSOR_QUANT8_SYMM_PER_CHANNEL", (2, 3))
        builder.set_operand_value(index, bytes(6))
        assert "operand 4: channelQuant missing" in rejection(builder.finish)


def test_N_API_10_a_second_finish_is_a_wrong_state(builder: nnfmq.ModelBuilder) -> None:
    finish_add(builder)
    with pytest.raises(nnfmq.BadState, match="finish: this model is finished"):
        builder.finish()


def test_N_API_11_reads_before_writes_in_order_of_addition_are_legal() -> None:
    with relus((3, 2), (1, 3), (0, 1)) as builder:
        builder.finish()
        order = [(operation.inputs, operation.outputs) for operation in builder.model.main.operations]
        assert order == [((0,), (1,)), ((1,), (3,)), ((3,), (2,))]
