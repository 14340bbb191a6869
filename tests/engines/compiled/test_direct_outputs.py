"""Direct outputs: from the second run on, kernels write a request's outputs where the client has its arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.compiled import before_a_guard
from support.small_models import F32, INPUT, OUTPUT, graph, scalar

from nnfmq.engines.compiled.partition import prepare
from nnfmq.engines.execution import RunOptions
from nnfmq.engines.program import Program
from nnfmq.hal.errors import MissedDeadlineTransient
from nnfmq.hal.types import Model, Operand, OperationType
from nnfmq.hal.types import Operation as Op

TENSOR = Operand(F32, (3, 5))
Array = np.ndarray[Any, Any]


def ones(value: float = 1) -> Array:
    return np.full(TENSOR.dimensions, value, np.float32)


def doubling() -> Model:
    """Return a model with two outputs: x + x, and (x + x) reshaped and added to itself."""
    (none, none_bytes), vector = scalar(0), replace(TENSOR, dimensions=(15,))
    shape = Operand(type(F32).TENSOR_INT32, (1,))
    operands = [
        replace(TENSOR, lifetime=INPUT),
        none,
        replace(TENSOR, lifetime=OUTPUT),
        shape,
        vector,
        replace(vector, lifetime=OUTPUT),
    ]
    operations = [
        Op(OperationType.ADD, (0, 0, 1), (2,)),
        Op(OperationType.RESHAPE, (2, 3), (4,)),
        Op(OperationType.ADD, (4, 4, 1), (5,)),
    ]
    return graph(operands, operations, {1: none_bytes, 3: np.int32(15).tobytes()})


def add_one(outputs: int = 1) -> Program:
    """Return a program whose outputs are all x + 1."""
    (none, none_bytes), constant = scalar(0), ones().tobytes()
    operands = [replace(TENSOR, lifetime=INPUT), none, TENSOR, *[replace(TENSOR, lifetime=OUTPUT)] * outputs]
    operations = [Op(OperationType.ADD, (0, 2, 1), (3 + number,)) for number in range(outputs)]
    return prepare(graph(operands, operations, {1: none_bytes, 2: constant}))


def is_direct(program: Program, inputs: list[Array], outputs: list[Array]) -> list[bool]:
    """Run twice, and return for each output whether the frame has the request's array, in place of the arena's."""
    execution = program.bind(inputs, outputs)
    execution.run()
    assert not any(value is output for value in execution.frame for output in outputs)
    execution.run()
    return [any(value is output for value in execution.frame) for output in outputs]


def test_the_second_run_writes_to_the_request_s_array() -> None:
    output, x = before_a_guard(ones(0)), ones(1)
    execution = add_one().bind([x], [output])
    for value in (1, 2, 3):
        x[...] = value
        assert execution.run()[0].dimensions == TENSOR.dimensions
        np.testing.assert_array_equal(output, ones(value + 1))
    assert any(value is output for value in execution.frame)


def test_an_output_that_a_kernel_reads_stays_in_the_arena() -> None:
    first, second = ones(0), np.zeros(15, np.float32)
    assert is_direct(prepare(doubling()), [ones(3)], [first, second]) == [False, True]
    assert (first == 6).all() and (second == 12).all()


def test_a_peer_that_changes_an_output_changes_no_other_result() -> None:
    first, second = ones(0), np.zeros(15, np.float32)
    execution = prepare(doubling()).bind([ones(3)], [first, second])
    for _ in range(3):
        execution.run()
        first[...] = np.nan
        assert (second == 12).all()


def test_an_output_that_overlaps_an_input_is_copied() -> None:
    memory = np.zeros(20, np.float32)
    x, output = memory[5:].reshape(TENSOR.dimensions), memory[:15].reshape(TENSOR.dimensions)
    assert is_direct(add_one(), [x], [output]) == [False]


def test_outputs_that_overlap_are_copied() -> None:
    output = ones(0)
    assert is_direct(add_one(2), [ones()], [output, output[:]]) == [False, False]
    assert (output == 2).all()


@pytest.mark.parametrize("layout", ["not contiguous", "not aligned"])
def test_an_output_in_unsuitable_memory_is_copied(layout: str) -> None:
    memory = np.zeros(1000, np.uint8)
    if layout == "not aligned":
        output = memory[1:61].view(np.float32).reshape(TENSOR.dimensions)
    else:
        output = np.zeros((3, 10), np.float32)[:, ::2]
    assert is_direct(add_one(), [ones(4)], [output]) == [False]
    assert (output == 5).all()


def test_an_output_in_bytes_is_copied() -> None:
    output = bytearray(60)
    execution = add_one().bind([ones()], [output])
    for _ in range(3):
        execution.run()
        assert bytes(output) == ones(2).tobytes()
        output[:] = bytes(60)


def test_the_next_execution_with_a_context_writes_to_its_own_arrays() -> None:
    program, first, second = add_one(), ones(0), ones(0)
    execution = program.bind([ones(1)], [first])
    execution.run()
    execution.run()
    del execution
    later = program.bind([ones(2)], [second])
    for _ in range(3):
        later.run()
    assert (first == 2).all() and (second == 3).all()


def test_a_program_from_a_cache_has_the_same_direct_outputs() -> None:
    program = prepare(doubling(), prepare(doubling()).prepacked)
    first, second = ones(0), np.zeros(15, np.float32)
    assert is_direct(program, [ones(3)], [first, second]) == [False, True]
    assert (first == 6).all() and (second == 12).all()


def test_a_run_after_a_failed_one_writes_all_outputs() -> None:
    output = ones(0)
    execution = add_one().bind([ones()], [output])
    for _ in range(3):
        with pytest.raises(MissedDeadlineTransient):
            execution.run(RunOptions(deadline_ns=0))
        output[...] = 0
        execution.run()
        assert (output == 2).all()
