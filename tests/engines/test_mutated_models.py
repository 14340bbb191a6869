"""Every operation with mutated random arguments: rejected with a HAL status or computed, never anything else.

Nothing warns (that would be an error), and no execution may take more memory than a driver of a small machine has.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from msgspec.structs import replace
from support.mutated_test_models import Draft, MutatedTest, mutated_tests
from support.tiers import IS_DEEP
from support.vts_models import one_of_each

from nnfmq.engines import interpreter
from nnfmq.hal.errors import (
    GeneralFailure,
    InvalidArgument,
    MissedDeadlineTransient,
    OutputInsufficientSize,
    ResourceExhaustedTransient,
)
from nnfmq.hal.types import DataLocation, LifeTime, OperationType, is_scalar
from nnfmq.lab.conformance.testmodels import TestModel
from nnfmq.operations import HAL_DECLARATIONS
from nnfmq.validation import validate_model

EXAMPLES = 500 if IS_DEEP else 20
ADDRESS_SPACE_BYTES = 2 << 30  # more than the process uses at the start
LOOP_NS = 5_000_000
OUTPUT_BYTES = 1 << 18


@contextmanager
def limited_memory() -> Iterator[None]:
    """Make allocations beyond ADDRESS_SPACE_BYTES fail in this process, instead of using up the machine's memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ADDRESS_SPACE_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def run_all_steps(test: MutatedTest) -> None:
    """Validate, prepare and execute the model until a step rejects it; each step has its own errors."""
    try:
        validate_model(test.model, allow_unspecified_boundaries=True)
    except InvalidArgument:
        return
    try:
        program = interpreter.prepare(test.model)
    except (GeneralFailure, ResourceExhaustedTransient):
        return
    outputs = [bytearray(OUTPUT_BYTES) for _ in test.model.main.output_indexes]
    try:
        shapes = program.execute(list(test.inputs), outputs, loop_timeout_ns=LOOP_NS)
    except (GeneralFailure, InvalidArgument, OutputInsufficientSize):
        return
    except (MissedDeadlineTransient, ResourceExhaustedTransient):
        return

    assert len(shapes) == len(outputs)
    assert all(shape.is_sufficient for shape in shapes)


@pytest.mark.parametrize("code", HAL_DECLARATIONS, ids=lambda code: code.name)
def test_VAL_1_mutated_arguments_are_rejected_or_computed(code: OperationType, data_dir: Path) -> None:
    @given(mutated_tests([code]))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=not IS_DEEP,  # the deep run searches at random
        suppress_health_check=[HealthCheck.too_slow],
    )
    def run(test: MutatedTest) -> None:
        run_all_steps(test)

    with limited_memory():
        run()


@pytest.mark.parametrize("shape", [(), (0,), (1,) * 5, (1,) * 32], ids=str)
def test_VAL_1_inputs_of_unexpected_ranks_are_rejected_or_computed(shape: tuple[int, ...], data_dir: Path) -> None:
    for test in one_of_each():
        for index in sorted(Draft.of(test).arrays):
            if not is_scalar(test.model.main.operands[index].type):
                run_all_steps(with_shape(test, index, shape))


def with_shape(test: TestModel, index: int, shape: tuple[int, ...]) -> MutatedTest:
    """Return the test with one argument as an input of unknown rank, which the request gives the shape `shape`."""
    draft = Draft.of(test)
    operand = draft.operands[index]
    is_open = operand.channel_quant is None  # per-channel scales need a known rank
    for other in test.model.main.output_indexes:
        draft.operands[other] = replace(draft.operands[other], dimensions=())
    draft.operands[index] = replace(
        operand,
        dimensions=() if is_open else operand.dimensions,
        lifetime=LifeTime.SUBGRAPH_INPUT,
        location=DataLocation(),
    )
    draft.arrays[index] = np.ones(shape, draft.arrays[index].dtype)
    model, inputs = draft.finished()
    return MutatedTest(test.name, (("shape", index),), model, tuple(inputs))
