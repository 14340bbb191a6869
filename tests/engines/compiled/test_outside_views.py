"""Views of memory outside of an arena: launches read that memory itself, unless something else reads the view."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.small_models import F32, INPUT, OUTPUT, graph, scalar

from nnfmq.engines import interpreter
from nnfmq.engines.compiled.executor import CompiledPartition
from nnfmq.engines.compiled.partition import prepare
from nnfmq.hal.types import Model, Operand, OperationType
from nnfmq.hal.types import Operation as Op

MATRIX, VECTOR = Operand(F32, (3, 5)), Operand(F32, (15,))
SHAPE = Operand(type(F32).TENSOR_INT32, (1,))
NONE, NONE_BYTES = scalar(0)
VALUES = {2: NONE_BYTES, 3: np.int32(15).tobytes()}
ADD, RESHAPE, TOPK = OperationType.ADD, OperationType.RESHAPE, OperationType.TOPK_V2


def model(operands: list[Operand], operations: list[Op]) -> Model:
    """Return a model of two inputs, a matrix and a vector (operands 0 and 1); operand 3 is the vector's shape."""
    inputs = [replace(MATRIX, lifetime=INPUT), replace(VECTOR, lifetime=INPUT)]
    return graph([*inputs, NONE, SHAPE, *operands], operations, VALUES)


def view_at_the_beginning() -> Model:
    operations = [Op(RESHAPE, (0, 3), (4,)), Op(ADD, (4, 1, 2), (5,))]
    return model([VECTOR, replace(VECTOR, lifetime=OUTPUT)], operations)


def views_of_a_view_in_the_middle() -> Model:
    operands = [VECTOR, VECTOR, VECTOR, replace(VECTOR, lifetime=OUTPUT)]
    operations = [
        Op(ADD, (1, 1, 2), (4,)),
        Op(RESHAPE, (0, 3), (5,)),
        Op(RESHAPE, (5, 3), (6,)),
        Op(ADD, (4, 6, 2), (7,)),
    ]
    return model(operands, operations)


def view_that_is_also_an_output() -> Model:
    operands = [VECTOR, replace(VECTOR, lifetime=OUTPUT), replace(VECTOR, lifetime=OUTPUT)]
    operations = [Op(ADD, (1, 1, 2), (4,)), Op(RESHAPE, (0, 3), (5,)), Op(ADD, (4, 5, 2), (6,))]
    return model(operands, operations)


def view_that_the_interpreter_reads() -> Model:
    """TOPK_V2 is a step of the interpreter; a view of the view is read in the partition after it."""
    count, indexes = scalar(15)[0], Operand(type(F32).TENSOR_INT32, (15,))
    operands = [VECTOR, VECTOR, indexes, VECTOR, replace(VECTOR, lifetime=OUTPUT), count]
    operations = [
        Op(RESHAPE, (0, 3), (4,)),
        Op(TOPK, (4, 9), (5, 6)),
        Op(RESHAPE, (4, 3), (7,)),
        Op(ADD, (5, 7, 2), (8,)),
    ]
    made = model(operands, operations)
    return graph(list(made.main.operands), operations, {**VALUES, 9: np.int32(15).tobytes()})


@pytest.mark.parametrize(
    ("build", "partitions"),
    [
        (view_at_the_beginning, [1]),
        (views_of_a_view_in_the_middle, [1]),
        (view_that_is_also_an_output, [1, 0, 1]),
        (view_that_the_interpreter_reads, [0, 0, 1]),
    ],
)
def test_a_view_is_a_step_only_if_something_else_reads_it(build: Any, partitions: list[int]) -> None:
    program, expected_program = prepare(build()), interpreter.prepare(build())
    assert [int(isinstance(step.function, CompiledPartition)) for step in program.steps] == partitions
    random = np.random.default_rng(3)
    outputs = [np.empty(15, np.float32) for _ in build().main.output_indexes]
    execution = program.bind(inputs := [np.zeros((3, 5), np.float32), np.zeros(15, np.float32)], outputs)
    for _ in range(3):  # the second run writes outputs directly
        for array in inputs:
            array[...] = random.random(array.shape)
        execution.run()
        expected = [np.empty_like(output) for output in outputs]
        expected_program.execute(inputs, expected)
        for one, other in zip(outputs, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_an_input_that_is_not_contiguous_is_viewed_as_if_it_were() -> None:
    matrix, vector = np.arange(30, dtype=np.float32).reshape(3, 10)[:, ::2], np.ones(15, np.float32)
    out = np.empty(15, np.float32)
    prepare(view_at_the_beginning()).execute([matrix, vector], [out])
    np.testing.assert_array_equal(out, matrix.reshape(-1) + 1)
