"""What a model is made of (REQUIREMENTS 1.2), by its rows' ids: parts, lifetimes, constants, pools, order of bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import fields, replace
from support.control_flow_models import Parts, branching, inputs, named, output
from support.executed import executed
from support.small_models import (
    F32,
    I32,
    INPUT,
    OUTPUT,
    Q8,
    TEMPORARY,
    one_operation,
    two_adds,
    with_main,
    with_operand,
)
from support.vts_models import one_of_each

from nnfmq.base.memory import Memory
from nnfmq.engines import interpreter
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import extension_code
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
from nnfmq.lab.conformance.testmodels import BytesPool
from nnfmq.serialize.models import decode_model, encode_model
from nnfmq.validation import validate_model
from nnfmq.validation.values import validate_consumers

Array = npt.NDArray[Any]
ADD = OperationType.ADD
PREFIX = 9  # of no installed extension, whose rules validation would apply
REALS = np.array([1, 2], np.float32)


def rejected(model: Model, rule: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"\({rule}\)$"):
        validate_model(model)


def outputs_of(model: Model, *arrays: Array) -> list[float]:
    buffer = np.zeros(2, np.float32)
    interpreter.prepare(model).execute(list(arrays), [buffer])
    return buffer.tolist()


# -- what there is ----------------------------------------------------------------------------------------------------


def test_MOD_1_a_model_has_these_parts_and_all_that_computes_travels() -> None:
    names = [field.name for field in fields(Model)]
    assert names == [
        "main", "referenced", "operand_values", "pools", "relax_computation_float32_to_float16", "extensions",
    ]  # fmt: skip

    pools = (BytesPool(bytes(4)), BytesPool(bytes(8)))
    model = replace(branching(), pools=pools, relax_computation_float32_to_float16=True)
    data, sent = encode_model(model)
    assert decode_model(data, sent) == model


def test_MOD_1_names_and_prefixes_of_extensions_are_part_of_a_model() -> None:
    listed = (ExtensionNameAndPrefix("com.example.one", PREFIX), ExtensionNameAndPrefix("com.example.two", 2))

    assert validate_model(replace(two_adds(), extensions=listed)) == 3
    rejected(replace(two_adds(), extensions=(*listed, listed[0])), "N-VAL-12")


def test_MOD_2_a_subgraph_has_operands_operations_and_two_lists() -> None:
    assert [field.name for field in fields(Subgraph)] == [
        "operands", "operations", "input_indexes", "output_indexes",
    ]  # fmt: skip


def two_sums(order: tuple[int, int, int]) -> Model:
    """Return (x + x) + (x + x) with its three operations in some order."""
    tensor = Operand(F32, (2,))
    model = one_operation(ADD, [tensor, tensor, 0], tensor)
    operands = (
        *(replace(tensor, lifetime=kind) for kind in (INPUT, TEMPORARY, TEMPORARY, OUTPUT)),
        model.main.operands[2],
    )
    operations = [Operation(ADD, (0, 0, 4), (1,)), Operation(ADD, (0, 0, 4), (2,)), Operation(ADD, (1, 2, 4), (3,))]
    main = Subgraph(operands, tuple(operations[i] for i in order), (0,), (3,))
    return replace(model, main=main)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)])
def test_MOD_2_operations_may_have_any_order_in_which_every_read_comes_after_its_write(order: Any) -> None:
    validate_model(two_sums(order))

    assert outputs_of(two_sums(order), REALS) == [4, 8]


@pytest.mark.parametrize("order", [(2, 0, 1), (0, 2, 1), (1, 2, 0)])
def test_MOD_2_a_read_before_its_write_is_rejected(order: Any) -> None:
    rejected(two_sums(order), "N-MOD-1")


def test_MOD_3_an_operand_has_these_fields_and_its_readers_are_counted_for_HIDL() -> None:
    assert [field.name for field in fields(Operand)] == [
        "type", "dimensions", "scale", "zero_point", "lifetime", "location", "channel_quant", "extension_data",
    ]  # fmt: skip
    assert validate_consumers(two_adds().main, [1, 2, 2, 1, 0]) == 1


# -- lifetimes and what goes with types -------------------------------------------------------------------------------

PLACE = DataLocation(0, 0, 16)


@pytest.mark.parametrize(
    ("index", "changes", "rule"),
    [
        (0, {"location": PLACE}, "N-VAL-6"),
        (3, {"location": PLACE}, "N-VAL-6"),
        (4, {"location": PLACE}, "N-VAL-6"),
        (2, {"location": DataLocation(0, 4, 4)}, "N-VAL-4"),
        (2, {"lifetime": LifeTime.CONSTANT_REFERENCE}, "N-VAL-5"),
        (2, {"lifetime": LifeTime.NO_VALUE}, "N-VAL-6"),
        (2, {"lifetime": LifeTime.SUBGRAPH}, "N-VAL-1"),
        (2, {"lifetime": LifeTime.SUBGRAPH, "type": OperandType.SUBGRAPH}, "N-VAL-7"),
    ],
)
def test_MOD_4_each_lifetime_has_its_own_rule_for_the_location(index: int, changes: Any, rule: str) -> None:
    rejected(with_operand(two_adds(), index, **changes), rule)


EXTENDED = OperandType(extension_code(PREFIX, 7))


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"type": F32, "extension_data": b"x"}, "N-VAL-10"),
        ({"type": Q8, "scale": 1.0, "channel_quant": ChannelQuant((1.0, 1.0), 0)}, "N-VAL-9"),
        ({"type": OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL}, "N-VAL-9"),
        ({"type": EXTENDED, "channel_quant": ChannelQuant((1.0, 1.0), 0)}, "N-VAL-10"),
        ({"type": EXTENDED, "scale": 1.0}, "N-VAL-10"),
        ({"type": EXTENDED, "zero_point": 1}, "N-VAL-10"),
        ({"type": EXTENDED, "scale": 1.0, "zero_point": 1}, "N-VAL-10"),
    ],
)
def test_MOD_6_extra_parameters_match_the_type(fields: dict[str, Any], rule: str) -> None:
    model = replace(two_adds(), extensions=(ExtensionNameAndPrefix("com.example.one", PREFIX),))

    rejected(with_operand(model, 3, **fields), rule)


def test_MOD_6_bytes_besides_are_an_extension_type_s() -> None:
    model = replace(two_adds(), extensions=(ExtensionNameAndPrefix("com.example.one", PREFIX),))
    unread = Operand(EXTENDED, lifetime=INPUT, extension_data=b"x")
    wider = with_main(model, operands=(*model.main.operands, unread), input_indexes=(0, 1, 5))

    assert validate_model(wider) == 3


# -- constants and pools ----------------------------------------------------------------------------------------------


def added(count: int) -> Model:
    """Return x + 0, 1, 2, ...: a constant whose data is in the model."""
    tensor = Operand(F32, (count,))
    data = np.arange(count, dtype=np.float32).tobytes()
    return one_operation(ADD, [tensor, (tensor, data), 0], tensor)


def in_a_pool(model: Model, pool: Any, offset: int = 0) -> Model:
    """Return the model with its operand 1 at `offset` in a pool."""
    place = DataLocation(0, offset, model.main.operands[1].location.length)
    moved = with_operand(model, 1, lifetime=LifeTime.CONSTANT_REFERENCE, location=place)
    return replace(moved, pools=(pool,))


@pytest.fixture
def pool() -> Iterator[Memory]:
    with Memory.create(4096) as memory:
        memory.view[64 : 64 + 4000] = np.arange(1000, dtype=np.float32).tobytes()
        yield memory


@pytest.mark.parametrize("count", [1, 32, 33, 1000])  # 4, 128, 132 and 4000 bytes
def test_MOD_8_a_constant_means_the_same_in_the_model_and_in_a_pool(count: int, pool: Memory) -> None:
    results = []
    for model in (added(count), in_a_pool(added(count), pool, 64)):
        validate_model(model)
        buffer = np.zeros(count, np.float32)
        interpreter.prepare(model).execute([np.ones(count, np.float32)], [buffer])
        results.append(buffer.tolist())

    assert results == [list(range(1, count + 1))] * 2


def test_MOD_9_a_pool_that_is_overwritten_afterwards_changes_no_prepared_model(pool: Memory) -> None:
    program = interpreter.prepare(in_a_pool(added(2), pool, 64))
    pool.view[:] = bytes(4096)

    buffer = np.zeros(2, np.float32)
    program.execute([REALS], [buffer])
    assert buffer.tolist() == [1, 3]


def test_N_VAL_13_a_pool_that_was_closed_is_rejected(pool: Memory) -> None:
    model = in_a_pool(added(2), pool, 64)
    pool.close()

    with pytest.raises(InvalidArgument, match="this memory is closed"):
        interpreter.prepare(model)


@pytest.mark.parametrize("fd", [-1, -(1 << 31), 1 << 20])
def test_N_VAL_13_a_number_that_is_no_descriptor_is_no_pool(fd: int) -> None:
    with pytest.raises(InvalidArgument, match="no memfd"):
        Memory.adopt(fd)


def test_N_VAL_13_a_pool_of_no_bytes_is_rejected() -> None:
    rejected(replace(two_adds(), pools=(BytesPool(b"x"), BytesPool(b""))), "N-VAL-13")


def test_MOD_10_the_first_dimension_is_the_slowest_and_rows_have_no_gaps() -> None:
    cube = np.frombuffer(np.arange(24, dtype="<i4").tobytes(), np.int32).reshape(2, 3, 4)
    i32 = Operand(I32, ())
    begin, size = np.array([1, 2, 0], np.int32), np.array([1, 1, 4], np.int32)

    (last_row,) = executed(OperationType.SLICE, [(i32, cube), (i32, begin), (i32, size)], [i32], unknown=True)
    assert struct.unpack("<4i", last_row.tobytes()) == (20, 21, 22, 23)  # (1 * 3 + 2) * 4 + 0 ... 3


# -- subgraphs --------------------------------------------------------------------------------------------------------


def test_MOD_11_subgraphs_may_call_subgraphs() -> None:
    parts = Parts()
    real = Operand(F32, (2,))
    leaves = [parts.binary(code, real) for code in (OperationType.SUB, OperationType.MUL)]
    truth = Operand(OperandType.TENSOR_BOOL8, (1,))
    inner_operands = [*inputs(truth, real, real), *map(named, leaves), output(real)]
    inner = parts.add(inner_operands, [Operation(OperationType.IF, (0, 3, 4, 1, 2), (5,))])
    other = parts.add(inner_operands, [Operation(OperationType.IF, (0, 4, 3, 1, 2), (5,))])
    outer = [*inputs(truth, truth, real, real), named(inner), named(other), output(real)]
    model = parts.model(outer, [Operation(OperationType.IF, (0, 4, 5, 1, 2, 3), (6,))])
    assert validate_model(model) == 4

    yes, no = np.array([1], np.uint8), np.array([0], np.uint8)
    found = {(bool(a[0]), bool(b[0])): outputs_of(model, a, b, REALS, REALS * 3) for a in (yes, no) for b in (yes, no)}
    difference, product = [-2, -4], [3, 12]
    assert found == {
        (True, True): difference, (True, False): product, (False, True): product, (False, False): difference,
    }  # fmt: skip


# -- what a driver does with it ---------------------------------------------------------------------------------------


def test_MOD_16_preparing_changes_no_model_and_many_threads_may_prepare_one(pool: Memory) -> None:
    model = in_a_pool(added(1000), pool, 64)
    before, data = bytes(pool.view), encode_model(model)[0]

    def run(value: int) -> bool:
        buffer = np.zeros(1000, np.float32)
        validate_model(model)
        interpreter.prepare(model).execute([np.full(1000, value, np.float32)], [buffer])
        return buffer.tolist() == list(range(value, 1000 + value))

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(run, range(40))) == [True] * 40
    assert (bytes(pool.view), encode_model(model)[0]) == (before, data)


def test_MOD_16_preparing_and_executing_change_nothing_of_any_operation_s_model(data_dir: Path) -> None:
    changed = []
    for test in one_of_each():
        copies = [None if array is None else array.copy() for array in test.inputs]
        before = encode_model(test.model)[0], [pool.view.tobytes() for pool in test.model.pools]
        if not test.must_fail:
            outputs = [np.empty_like(array) for array in test.expected]
            interpreter.prepare(test.model).execute(copies, outputs)
        after = encode_model(test.model)[0], [pool.view.tobytes() for pool in test.model.pools]
        same = all(
            a is b is None or np.array_equal(a, b, equal_nan=True) for a, b in zip(copies, test.inputs, strict=True)
        )
        if before != after or not same:
            changed.append(test.name)
    assert changed == []


# -- what nobody checks, and what is no model -------------------------------------------------------------------------


@pytest.mark.parametrize("lifetime", [INPUT, LifeTime.NO_VALUE])
@pytest.mark.parametrize("kind", [OperandType.OEM, OperandType.TENSOR_OEM_BYTE, EXTENDED])
def test_VAL_5_what_an_owner_checks_is_let_through(kind: OperandType, lifetime: LifeTime) -> None:
    model = replace(two_adds(), extensions=(ExtensionNameAndPrefix("com.example.one", PREFIX),))
    operands = (*model.main.operands, Operand(kind, lifetime=lifetime))
    listed = (0, 1, 5) if lifetime is INPUT else (0, 1)
    operation = Operation(
        OperationType(extension_code(PREFIX, 3)) if kind is EXTENDED else OperationType.OEM_OPERATION, (5, 3), (4,)
    )
    operations = (model.main.operations[0], operation)

    assert validate_model(with_main(model, operands=operands, operations=operations, input_indexes=listed)) >= 1
