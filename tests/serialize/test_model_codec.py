"""A model as bytes: exactly this array of numbers, and nothing else is read as one."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.small_models import two_adds

from nnfmq.hal.errors import DeadObject, InvalidArgument, ProtocolError
from nnfmq.hal.types import (
    ChannelQuant,
    DataLocation,
    ExtensionNameAndPrefix,
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
)
from nnfmq.serialize.models import SLICE_RECORDS, decode_model, encode_model
from nnfmq.validation import validate_model


@dataclass(frozen=True)
class FakePool:
    """A pool in name only."""

    size_bytes: int

    @property
    def view(self) -> memoryview:
        raise AssertionError("nobody looks into a pool here")


POOLS = (FakePool(4096), FakePool(64))
MAIN = Subgraph(
    operands=(
        Operand(OperandType.TENSOR_FLOAT32, (1, 0), lifetime=LifeTime.SUBGRAPH_INPUT),
        Operand(
            OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL, (2, 1),
            lifetime=LifeTime.CONSTANT_REFERENCE, location=DataLocation(1, 32, 2, 1),
            channel_quant=ChannelQuant((0.5, 0.25), 0),
        ),
        Operand(OperandType.TENSOR_QUANT8_ASYMM, (3,), 0.125, 128, LifeTime.CONSTANT_COPY, DataLocation(0, 0, 3)),
        Operand(OperandType.TENSOR_QUANT8_ASYMM_SIGNED, (3,), 0.125, -128, LifeTime.SUBGRAPH_OUTPUT),
        Operand(OperandType(0x7_0001), (2,), lifetime=LifeTime.NO_VALUE, extension_data=b"\x00\xff"),
    ),
    operations=(Operation(OperationType.CONV_2D, (0, 1, 2), (3,)),),
    input_indexes=(0,),
    output_indexes=(3,),
)  # fmt: skip
OTHER = Subgraph((), (), (), ())
NAMED = (ExtensionNameAndPrefix("com.example.fibonacci", 7),)
MODEL = Model(MAIN, (OTHER,), b"\x00\x01\xff", POOLS, True, NAMED)

# The layout: fields in the order of their declarations, numbers as in the HAL.
MAIN_WIRE: list[Any] = [
    [
        [3, [1, 0], 0.0, 0, 1, [0, 0, 0, 0], None, b""],
        [11, [2, 1], 0.0, 0, 4, [1, 32, 2, 1], [[0.5, 0.25], 0], b""],
        [5, [3], 0.125, 128, 3, [0, 0, 3, 0], None, b""],
        [14, [3], 0.125, -128, 2, [0, 0, 0, 0], None, b""],
        [0x7_0001, [2], 0.0, 0, 5, [0, 0, 0, 0], None, b"\x00\xff"],
    ],
    [[3, [0, 1, 2], [3]]],
    [0],
    [3],
]
WIRE: list[Any] = [MAIN_WIRE, [[[], [], [], []]], b"\x00\x01\xff", [4096, 64], True, [["com.example.fibonacci", 7]]]
DATA = msgspec.msgpack.encode(WIRE)


def changed(path: tuple[int, ...], value: Any) -> bytes:
    """Return the model's bytes with another value at `path`."""
    tree: Any = msgspec.msgpack.decode(DATA)
    node = tree
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = value
    return msgspec.msgpack.encode(tree)


def is_rejected(data: bytes) -> bool:
    try:
        decode_model(data, POOLS)
    except ProtocolError:
        return True
    return False


FIRST_USE = """
import sys
from nnfmq.hal.types import LifeTime, Model, Operand, OperandType, Operation, OperationType, Subgraph
from nnfmq.serialize.models import decode_model, encode_model

operands = tuple(Operand(OperandType.TENSOR_FLOAT32, (2,), lifetime=kind)
                 for kind in (LifeTime.SUBGRAPH_INPUT, LifeTime.SUBGRAPH_OUTPUT))
model = Model(Subgraph(operands, (Operation(OperationType.RELU, (0,), (1,)),), (0,), (1,)))
called = []
sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name))
assert decode_model(encode_model(model)[0], ()) == model
sys.setprofile(None)
sys.exit(called.count("get_class_annotations"))
"""


def test_msgspec_inspects_no_type_when_the_first_model_is_encoded() -> None:
    """If several threads encode their first model while msgspec inspects a type, the process crashes."""
    assert subprocess.run([sys.executable, "-P", "-c", FIRST_USE], timeout=60, check=False).returncode == 0


def test_a_model_is_encoded_as_the_documented_array() -> None:
    data, pools = encode_model(MODEL)
    assert msgspec.msgpack.decode(data) == WIRE
    assert pools == POOLS


def test_a_model_is_decoded_from_the_documented_array() -> None:
    assert decode_model(DATA, POOLS) == MODEL


def test_constants_are_encoded_as_raw_bytes() -> None:
    values = bytes(range(256)) * 64
    data, _ = encode_model(replace(MODEL, operand_values=values))
    assert values in data
    assert decode_model(data, POOLS).operand_values == values


def test_a_model_truncated_at_any_byte_is_rejected() -> None:
    assert [end for end in range(len(DATA)) if not is_rejected(DATA[:end])] == []


def test_a_model_with_a_trailing_byte_is_rejected() -> None:
    assert is_rejected(DATA + b"\xc0")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((0, 0, 0, 0), 16),  # operand type
        ((0, 0, 0, 0), -1),
        ((0, 0, 0, 0), "TENSOR_FLOAT32"),
        ((0, 0, 0, 1), [-1]),  # dimensions
        ((0, 0, 0, 1), [2**32]),
        ((0, 0, 0, 1), [1.5]),
        ((0, 0, 0, 1), None),
        ((0, 0, 0, 2), "0"),  # scale
        ((0, 0, 0, 3), 2**31),  # zero point
        ((0, 0, 0, 4), 7),  # lifetime
        ((0, 0, 0, 5), [0, 0, 0]),  # location
        ((0, 0, 0, 5), [0, 0, 0, 0, 0]),
        ((0, 0, 0, 5), [-1, 0, 0, 0]),
        ((0, 0, 0, 6), [[0.5], -1]),  # channel quantization
        ((0, 0, 0, 6), [0.5, 0]),
        ((0, 0, 0, 7), None),  # extension data
        ((0, 0, 0, 7), "bytes"),
        ((0, 1, 0, 0), 9999),  # operation type
        ((0, 1, 0, 1), [-1]),  # indexes
        ((0, 1, 0, 2), [True]),
        ((0, 2), [-1]),
        ((0, 3), [2**32]),
        ((1,), [[[], [], []]]),  # referenced subgraphs
        ((2,), "text"),  # constants
        ((2,), None),
        ((3,), [-1, 64]),  # pool sizes
        ((4,), 1),  # relaxed
        ((5,), [["a.b", -1]]),  # extensions
        ((5,), [["a.b", 2**16]]),
        ((5,), [["a" * 257, 1]]),
        ((5,), [["a.b"]]),
        ((5,), [["a.b", 1]] * 1025),
    ],
)
def test_invalid_numbers_and_types_are_rejected(path: tuple[int, ...], value: Any) -> None:
    assert is_rejected(changed(path, value))


@pytest.mark.parametrize("wire", [[], {}, None, [*WIRE, 1], WIRE[:-1]])
def test_a_wrong_number_of_parts_is_rejected(wire: Any) -> None:
    assert is_rejected(msgspec.msgpack.encode(wire))


def test_the_error_names_the_position_in_the_model() -> None:
    with pytest.raises(ProtocolError, match=r"not a model: .* - at `\$\[0\]\[2\]\[0\]`"):
        decode_model(changed((0, 2, 0), -1), POOLS)
    with pytest.raises(ProtocolError, match=r"main.operands, counted from 0, .* enum value 16 - at `\$\[2\]\[0\]`"):
        decode_model(changed((0, 0, 2, 0), 16), POOLS)
    with pytest.raises(ProtocolError, match=r"referenced\[0\].operations, counted from 0, .*: Expected `array`"):
        decode_model(changed((1, 0, 1), [7]), POOLS)


SLICES = replace(MAIN, operands=MAIN.operands * SLICE_RECORDS, operations=MAIN.operations * (2 * SLICE_RECORDS + 1))


def test_a_model_of_many_slices_round_trips() -> None:
    model = Model(MAIN, (SLICES, OTHER))
    data, pools = encode_model(model)
    assert decode_model(data, pools) == model


def test_decoding_is_checked_between_slices_and_ends_with_an_error() -> None:
    calls: list[str] = []
    data, _ = encode_model(Model(SLICES))
    decode_model(data, (), check=lambda: calls.append("slice"))
    assert len(calls) == (len(MAIN.operands) - 1) + 2

    def fail() -> None:
        raise DeadObject("no longer wanted")

    with pytest.raises(DeadObject, match="no longer wanted"):
        decode_model(data, (), check=fail)


def test_a_model_of_one_slice_is_not_checked() -> None:
    def fail() -> None:
        raise AssertionError

    assert decode_model(DATA, POOLS, check=fail) == MODEL


def test_excessive_nesting_is_rejected() -> None:
    assert is_rejected(b"\x91" * 100_000)


@pytest.mark.parametrize("pools", [(), POOLS[:1], (*POOLS, POOLS[0])])
def test_a_wrong_number_of_pools_is_rejected(pools: tuple[FakePool, ...]) -> None:
    with pytest.raises(ProtocolError, match=f"lists 2 pools, {len(pools)} were received"):
        decode_model(DATA, pools)


def test_a_pool_that_is_too_small_is_rejected() -> None:
    with pytest.raises(ProtocolError, match="pool 1 of the model has 64 bytes, the received one 63"):
        decode_model(DATA, (FakePool(4096), FakePool(63)))


def test_a_larger_pool_is_accepted() -> None:
    pools = (FakePool(8192), FakePool(64))
    assert decode_model(DATA, pools).pools == pools


def test_numbers_out_of_range_are_invalid_arguments() -> None:
    wrong = replace(MAIN, input_indexes=(-1,))
    with pytest.raises(InvalidArgument, match="model cannot be written"):
        encode_model(replace(MODEL, main=wrong))


def test_an_empty_model_round_trips() -> None:
    data, pools = encode_model(Model(OTHER))
    assert decode_model(data, pools) == Model(OTHER)


u32 = st.integers(0, 2**32 - 1)
u32s = st.lists(u32, max_size=4).map(tuple)
floats = st.floats(allow_nan=False, width=32)
operands = st.builds(
    Operand,
    st.sampled_from(OperandType) | st.integers(2**16, 2**32 - 1).map(OperandType),
    u32s,
    floats,
    st.integers(-(2**31), 2**31 - 1),
    st.sampled_from(LifeTime),
    st.builds(DataLocation, u32, u32, u32, u32),
    st.none() | st.builds(ChannelQuant, st.lists(floats, max_size=3).map(tuple), u32),
    st.binary(max_size=20),
)
subgraphs = st.builds(
    Subgraph,
    st.lists(operands, max_size=4).map(tuple),
    st.lists(st.builds(Operation, st.sampled_from(OperationType), u32s, u32s), max_size=3).map(tuple),
    u32s,
    u32s,
)
models = st.builds(
    Model,
    subgraphs,
    st.lists(subgraphs, max_size=2).map(tuple),
    st.binary(max_size=64),
    st.lists(st.builds(FakePool, st.integers(0, 2**63 - 1)), max_size=3).map(tuple),
    st.booleans(),
    st.lists(st.builds(ExtensionNameAndPrefix, st.text(max_size=20), st.integers(0, 2**16 - 1)), max_size=2).map(tuple),
)


@given(models)
def test_any_model_round_trips(model: Model) -> None:
    data, pools = encode_model(model)
    assert decode_model(data, pools) == model


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_but_protocol_error(data: bytes) -> None:
    assert is_rejected(data)


@given(st.integers(0, len(DATA) - 1), st.integers(0, 255))
def test_a_changed_byte_never_raises_anything_but_protocol_error(at: int, byte: int) -> None:
    data = bytearray(DATA)
    data[at] = byte
    assert is_rejected(data) in (True, False)


def test_MOD_15_EXT_4_an_extensions_type_arrives_with_its_name_and_its_bytes() -> None:
    operand = Operand(OperandType(7 << 16), lifetime=LifeTime.NO_VALUE, extension_data=b"\0\1")
    legal = replace(two_adds(), extensions=NAMED)
    legal = replace(legal, main=replace(legal.main, operands=(*legal.main.operands, operand)))
    arrived = decode_model(encode_model(legal)[0], ())
    assert arrived == legal
    assert validate_model(arrived) == 3


@pytest.mark.parametrize("prefix", [-1, 2**16])
def test_N_VAL_12_a_prefix_out_of_range_is_an_invalid_argument(prefix: int) -> None:
    with pytest.raises(InvalidArgument, match="model cannot be written"):
        encode_model(replace(MODEL, extensions=(ExtensionNameAndPrefix("com.example.fibonacci", prefix),)))
