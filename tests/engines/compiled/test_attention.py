"""Attention as one operation: the bits of the separate kernels, without an array of all rows and all keys."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest
from support.compiled import assert_kernels_agree, outputs_of, random_inputs
from support.small_models import OUTPUT, TEMPORARY, graph, scalar, vector

from nnfmq.engines.compiled import partition
from nnfmq.engines.compiled.executor import CompiledPartition
from nnfmq.engines.compiled.partition import prepare
from nnfmq.engines.program import Program
from nnfmq.hal.types import LifeTime, Model, Operand, OperandType, Operation, OperationType

pytestmark = pytest.mark.instruction_sets

F32 = OperandType.TENSOR_FLOAT32
NONE, ADD, MUL_ADD, SECOND, VIEWS = "none", "add", "mul, add", "second input", "views"


class _Graph:
    """Operands and operations of a model, in order."""

    def __init__(self) -> None:
        self.operands: list[Operand] = []
        self.operations: list[Operation] = []
        self.constants: dict[int, bytes] = {}

    def add(self, shape: Sequence[int], lifetime: LifeTime = TEMPORARY) -> int:
        self.operands.append(Operand(F32, tuple(shape), lifetime=lifetime))
        return len(self.operands) - 1

    def constant(self, pair: tuple[Operand, bytes]) -> int:
        self.operands.append(pair[0])
        self.constants[len(self.operands) - 1] = pair[1]
        return len(self.operands) - 1

    def emit(self, code: OperationType, inputs: Sequence[int], shape: Sequence[int]) -> int:
        result = self.add(shape)
        self.operations.append(Operation(code, tuple(inputs), (result,)))
        return result


def attention(
    batch: Sequence[int],
    rows: int,
    columns: int,
    width: int,
    depth: int,
    between: str,
    mask: Sequence[int] = (),
    adjoint: bool = True,
    also_returned: str = "",
) -> Model:
    """Return the model: rows · keys, what is `between`, SOFTMAX, · values; `also_returned` names a further output."""
    g, inputs = _Graph(), LifeTime.SUBGRAPH_INPUT
    queries = g.add((*batch, rows, width), inputs)
    keys = g.add((*batch, columns, width) if adjoint else (*batch, width, columns), inputs)
    values = g.add((*batch, columns, depth), inputs)
    flags = g.constant(scalar(False)), g.constant(scalar(adjoint))
    none, shape = g.constant(scalar(0)), (*batch, rows, columns)
    scores = found = g.emit(OperationType.BATCH_MATMUL, (queries, keys, *flags), shape)
    if between == MUL_ADD:
        found = g.emit(OperationType.MUL, (found, g.add((1,), inputs), none), shape)
    if between == VIEWS:
        flat = (int(np.prod(batch)) * rows, columns)
        found = g.emit(OperationType.RESHAPE, (found, g.constant(vector(flat))), flat)
    elif between != NONE:
        pair = (found, g.add(mask or shape, inputs))
        found = g.emit(OperationType.ADD, (*(pair[::-1] if between == SECOND else pair), none), shape)
    shape = g.operands[found].dimensions
    softmax = g.emit(OperationType.SOFTMAX, (found, g.constant(scalar(0.5)), g.constant(scalar(-1))), shape)
    found = softmax
    if between == VIEWS:
        found = g.emit(
            OperationType.RESHAPE, (found, g.constant(vector((*batch, rows, columns)))), (*batch, rows, columns)
        )
    result = g.emit(
        OperationType.BATCH_MATMUL, (found, values, flags[0], g.constant(scalar(False))), (*batch, rows, depth)
    )
    g.operands[result] = Operand(F32, (*batch, rows, depth), lifetime=OUTPUT)
    if also_returned:
        index = scores if also_returned == "scores" else softmax
        g.operands[index] = Operand(F32, g.operands[index].dimensions, lifetime=OUTPUT)
    return graph(g.operands, g.operations, g.constants)


def kernels_of(program: Program) -> list[str]:
    found = [step.function for step in program.steps]
    assert len(found) == 1 and isinstance(found[0], CompiledPartition)
    return [launch.function.rpartition("_")[0] for launch in found[0].plan.launches]


def apart(model: Model) -> Program:
    """Return the program whose attention is separate operations."""
    with patch.object(partition, "fuse_attention", lambda ops, _: ops):
        return prepare(model)


CASES = [
    ((2,), 5, 7, 3, 4, NONE, ()),
    ((1,), 1, 300, 16, 16, ADD, (1, 1, 300)),
    ((2, 3), 33, 40, 8, 19, ADD, ()),
    ((2, 3), 9, 33, 8, 5, ADD, (2, 1, 1, 33)),
    ((2, 3), 9, 33, 8, 5, MUL_ADD, (9, 33)),
    ((2, 3), 9, 32, 8, 5, SECOND, (3, 9, 1)),
    ((1, 2), 130, 64, 32, 32, MUL_ADD, (1, 1, 130, 64)),
    ((3,), 6, 1, 4, 4, NONE, ()),
    ((2, 2), 17, 50, 12, 40, VIEWS, ()),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_one_kernel_with_the_bits_of_separate_ones(
    case: tuple[tuple[int, ...], int, int, int, int, str, tuple[int, ...]],
) -> None:
    model = attention(*case)
    assert_kernels_agree(model)
    program = prepare(model)
    names = kernels_of(program)
    assert names.count("Attention") == 1 and not {"FloatSoftmax", "GemmKernel"} & set(names)
    inputs = random_inputs(model, 3)
    (found,), (expected,) = outputs_of(program, model, inputs), outputs_of(apart(model), model, inputs)
    assert found.tobytes() == expected.tobytes()


def test_keys_that_are_transposed_already_are_not_transposed_again() -> None:
    model = attention((2,), 9, 20, 8, 8, ADD, adjoint=False)
    assert_kernels_agree(model)
    assert "Attention" in kernels_of(prepare(model))


@pytest.mark.parametrize("also_returned", ["scores", "softmax"])
def test_products_that_the_caller_also_gets_are_computed_by_separate_kernels(also_returned: str) -> None:
    model = attention((2,), 9, 20, 8, 8, NONE, also_returned=also_returned)
    assert_kernels_agree(model)
    assert "Attention" not in kernels_of(prepare(model))


def test_the_arena_has_no_array_of_all_rows_and_keys() -> None:
    model = attention((4,), 512, 512, 16, 16, ADD, (1, 512, 512))
    arenas = []
    for program in (prepare(model), apart(model)):
        (step,) = program.steps
        assert isinstance(step.function, CompiledPartition)
        arenas.append(step.function.plan.arena_bytes)
    fused, separate = arenas
    packed = 2 * 4 * 512 * 16 * 4
    assert packed <= fused < 3 * packed < 4 * 512 * 512 * 4 <= separate
