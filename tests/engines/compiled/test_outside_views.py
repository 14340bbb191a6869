"""Views of memory outside of an arena: launches read that memory itself, unless something else reads the view.

Copies of adjacent bytes in the arena are views, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.compiled import assert_kernels_agree
from support.small_models import F32, INPUT, OUTPUT, graph, scalar, vector

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


def sum_of_parts(column: int, source: int = 4, is_output: bool = False) -> Model:
    """Return a model: operand 4 is input 0 doubled, 5 a part of 4, 6 its reshape; the result is 5 + row 0 of `source`.

    Operand 5 begins at row 1 and the column, `source` is 0 or 4.
    """
    matrix, row = Operand(F32, (3, 40)), Operand(F32, (1, 16))
    constants = dict(enumerate([scalar(0), vector([1, column]), vector([1, 16])], 1))
    constants |= {8: vector([16]), 9: vector([0, 0])}
    operands = [replace(matrix, lifetime=INPUT), *(operand for operand, _ in constants.values())][:4]
    operands += [matrix, replace(row, lifetime=OUTPUT) if is_output else row, Operand(F32, (16,)), row]
    operands += [constants[8][0], constants[9][0], replace(row, lifetime=OUTPUT)]
    operations = [
        Op(ADD, (0, 0, 1), (4,)),
        Op(OperationType.SLICE, (4, 2, 3), (5,)),
        Op(RESHAPE, (5, 8), (6,)),
        Op(OperationType.SLICE, (source, 9, 3), (7,)),
        Op(ADD, (6, 7, 1), (10,)),
    ]
    return graph(operands, operations, {index: data for index, (_, data) in constants.items()})


@pytest.mark.parametrize(
    ("found", "copies"),
    [
        (sum_of_parts(8), 0),  # 40 + 8 floats are three cache lines
        (sum_of_parts(9), 1),
        (sum_of_parts(8, source=0), 1),  # an input is outside of the arena
        (sum_of_parts(8, is_output=True), 1),
    ],
)
def test_a_part_of_an_array_is_a_view_if_it_begins_at_a_cache_line_and_is_no_output(found: Model, copies: int) -> None:
    (step,) = prepare(found).steps
    assert isinstance(step.function, CompiledPartition)
    kernels = [type(launch.kernel).__name__ for launch in step.function.plan.source_launches]
    assert kernels.count("StridedCopy") == copies
    assert_kernels_agree(found, runs=3)
