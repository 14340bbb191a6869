"""Slices of operations: both engines record one for each step or launch, in order, and compute the same. (OBS-7)"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from support.control_flow_models import branching

import nnfmq
from nnfmq.engines import interpreter
from nnfmq.engines.compiled import partition
from nnfmq.engines.execution import RunOptions
from nnfmq.engines.program import BoundSteps, FrameExecution, Program
from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import Model
from nnfmq.observe.trace_files import RingReader, Slice
from nnfmq.observe.trace_layout import ring_bytes
from nnfmq.observe.trace_points import TRACING, TraceRecorder

OPERATIONS = ["0 CONV_2D", "1 MAX_POOL_2D", "2 CONV_2D", "3 MAX_POOL_2D", "4 FULLY_CONNECTED", "5 SOFTMAX"]
PREPARATIONS = {"reference": interpreter.prepare, "compiled": partition.prepare}


@pytest.fixture(scope="module")
def model() -> Model:
    return nnfmq.load(nnfmq.example_path("digits.tflite")).model


@pytest.fixture(scope="module", params=PREPARATIONS)
def program(request: pytest.FixtureRequest, model: Model) -> Program:
    return PREPARATIONS[request.param](model)


@pytest.fixture
def ring() -> Iterator[bytearray]:
    memory = bytearray(ring_bytes(256))
    TRACING.start(TraceRecorder(memory, "a test"))
    yield memory
    TRACING.stop()


def slices_in(memory: bytearray) -> list[Slice]:
    reader = RingReader(memoryview(memory))
    reader.poll()
    return reader.trace().slices


def bound(program: Program) -> tuple[FrameExecution, np.ndarray]:
    image = np.random.default_rng(5).random((1, 8, 8, 1), np.float32)
    output = np.zeros((1, 10), np.float32)
    return program.bind([image], [output]), output


def operations_in(memory: bytearray) -> list[str]:
    return [one.name.removeprefix("[NN_LC_PCO]") for one in slices_in(memory)]


def test_OBS_7_operations_are_recorded_in_their_order(program: Program, ring: bytearray) -> None:
    execution, _ = bound(program)
    for _ in range(2):
        execution.run()
    names = operations_in(ring)
    assert names == names[: len(names) // 2] * 2
    assert list(dict.fromkeys(names)) == OPERATIONS


def test_OBS_7_slices_of_one_run_follow_each_other(program: Program, ring: bytearray) -> None:
    execution, _ = bound(program)
    execution.run()
    slices = slices_in(ring)
    assert all(before.end_ns == after.begin_ns for before, after in pairwise(slices))


def test_a_traced_run_computes_the_same(program: Program, ring: bytearray) -> None:
    execution, traced = bound(program)
    execution.run()
    TRACING.stop()
    execution, untraced = bound(program)
    execution.run()
    assert np.array_equal(traced, untraced)
    assert traced.any()


def test_OBS_7_runs_with_a_deadline_record_the_same(program: Program, ring: bytearray) -> None:
    execution, _ = bound(program)
    execution.run()
    names = operations_in(ring)
    execution.run(RunOptions(deadline_ns=1 << 62))
    assert operations_in(ring) == names * 2


def test_a_traced_run_is_cancelled(program: Program, ring: bytearray) -> None:
    execution, _ = bound(program)
    with pytest.raises(GeneralFailure, match="cancelled"):
        execution.run(RunOptions(is_cancelled=lambda: True))
    assert slices_in(ring) == []


def test_an_execution_follows_the_recorder(program: Program, ring: bytearray) -> None:
    execution, _ = bound(program)
    execution.run()
    count = len(slices_in(ring))
    TRACING.stop()
    execution.run()
    other = bytearray(ring_bytes(256))
    TRACING.start(TraceRecorder(other, "another"))
    execution.run()
    assert len(slices_in(ring)) == count
    assert operations_in(other) == operations_in(ring)


def test_a_program_from_the_cache_has_the_same_names(model: Model, ring: bytearray) -> None:
    program = partition.prepare(model)
    cached = partition.prepare(model, program.prepacked)
    for one in (program, cached):
        bound(one)[0].run()
    names = operations_in(ring)
    assert names == names[: len(names) // 2] * 2


@pytest.mark.parametrize("prepare", PREPARATIONS.values(), ids=PREPARATIONS)
def test_an_operation_with_subgraphs_is_one_slice_of_the_interpreter(prepare: object, ring: bytearray) -> None:
    model = branching()
    program = prepare(model)  # type: ignore[operator]
    main = model.main
    inputs = [
        np.zeros(main.operands[index].dimensions or (), interpreter.dtype_of(main.operands[index]))
        for index in main.input_indexes
    ]
    outputs = [np.zeros(shape or (), np.float32) for shape in (program.shapes[i] for i in main.output_indexes)]
    program.execute(inputs, outputs)
    names = operations_in(ring)
    assert sum(name.endswith(" IF") for name in names) == 1


def test_steps_without_names_are_numbered(ring: bytearray) -> None:
    execution = BoundSteps([None, None, None], [lambda _: None, lambda _: None], lambda _: ())
    execution.run()
    assert operations_in(ring) == ["step 0", "step 1"]
