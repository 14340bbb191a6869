"""A model whose operations are all compiled runs as its launches; with other operations it is a sequence of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.control_flow_models import branching
from support.small_models import F32, one_operation

import nnfmq
from nnfmq.engines import program as programs
from nnfmq.engines.compiled.executor import CompiledExecution, CompiledPartition
from nnfmq.engines.compiled.partition import prepare
from nnfmq.engines.compiled.thread_pool import ThreadPool
from nnfmq.engines.program import BoundSteps, ExecutionFrame, Program
from nnfmq.hal.errors import ResourceExhaustedTransient
from nnfmq.hal.types import Operand, OperationType

SHAPE = (3, 5)
ONES = np.ones(SHAPE, np.float32)


@pytest.fixture
def add_one() -> Program:
    """Return a program that adds 1 to its input."""
    tensor = Operand(F32, SHAPE)
    return prepare(one_operation(OperationType.ADD, [tensor, (tensor, ONES.tobytes()), 0], tensor))


def unexpected(*_: Any) -> Any:
    raise AssertionError("called")


@pytest.mark.parametrize("output", [np.zeros(SHAPE, np.float32), bytearray(ONES.nbytes)], ids=["array", "bytes"])
def test_later_runs_are_neither_steps_nor_look_at_the_frame(
    add_one: Program, output: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.zeros(SHAPE, np.float32)
    execution = add_one.bind([x], [output])
    for _ in range(2):
        execution.run()
    monkeypatch.setattr(CompiledPartition, "__call__", unexpected)
    monkeypatch.setattr(programs, "_run_steps", unexpected)
    for value in (2, 3):
        x[...] = value
        assert execution.run()[0].dimensions == SHAPE
        assert (np.frombuffer(output, np.float32) == value + 1).all()


def test_an_operation_that_is_not_compiled_makes_a_program_a_sequence_of_steps() -> None:
    model = branching()
    main = model.main
    program = prepare(model)
    inputs = [
        np.zeros(main.operands[i].dimensions or (), programs.dtype_of(main.operands[i])) for i in main.input_indexes
    ]
    outputs = [np.zeros(main.operands[i].dimensions or (), np.float32) for i in main.output_indexes]
    assert isinstance(program.bind(inputs, outputs), BoundSteps)


def test_an_input_that_is_not_contiguous_is_read_in_each_run(add_one: Program) -> None:
    x, output = np.zeros((3, 10), np.float32)[:, ::2], np.zeros(SHAPE, np.float32)
    execution = add_one.bind([x], [output])
    for value in range(5):
        x[...] = value
        execution.run()
        assert (output == value + 1).all()


def test_the_verbose_log_has_a_line_for_each_run(add_one: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(programs, "vlog_is_on", lambda tag: tag == "cpuexe")
    monkeypatch.setattr(programs, "vlog", lambda _, form, *values: lines.append(form % values))
    program = prepare(nnfmq.load(nnfmq.example_path("digits.tflite")).model)
    execution = program.bind([np.zeros((1, 8, 8, 1), np.float32)], [np.zeros((1, 10), np.float32)])
    for _ in range(4):
        execution.run()
    assert lines == ["operations 0 to 5, compiled"] * 4


@pytest.mark.parametrize("runs_before", range(4))
def test_a_run_that_needs_too_much_memory_fails_alone(
    add_one: Program, runs_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = np.zeros(SHAPE, np.float32)
    execution = add_one.bind([ONES], [output])
    assert isinstance(execution, CompiledExecution)
    for _ in range(runs_before):
        execution.run()
    with monkeypatch.context() as patch:
        patch.setattr(ThreadPool, "run", _without_memory)
        with pytest.raises(ResourceExhaustedTransient, match="out of memory"):
            execution.run()
    output[...] = 0
    execution.run()
    assert (output == 2).all()


def _without_memory(*_: Any) -> None:
    raise MemoryError


def test_a_frame_keeps_the_memory_of_an_execution(add_one: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[Any] = []
    release: Callable[..., None] = CompiledPartition.release
    monkeypatch.setattr(CompiledPartition, "release", lambda *given: (released.append(given[1]), release(*given)))
    execution = add_one.bind([ONES], [np.zeros(SHAPE, np.float32)])
    for _ in range(3):
        execution.run()
    frame: ExecutionFrame = execution.frame
    del execution
    assert not released
    del frame
    assert len(released) == 1
