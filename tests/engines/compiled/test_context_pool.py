"""Arenas from one execution to the next: used again, never by two at once, given back when asked, no input kept."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from support.small_models import F32, one_operation

from nnfmq.engines import idle_trim
from nnfmq.engines.compiled import executor
from nnfmq.engines.compiled.partition import prepare
from nnfmq.engines.compiled.thread_pool import default_thread_pool
from nnfmq.engines.execution import BoundSteps
from nnfmq.engines.interpreter import Program
from nnfmq.hal.types import Operand, OperationType

SHAPE = (1000,)
ONES = np.ones(SHAPE, np.float32)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the states that were made, weakly."""
    found: list[Any] = []
    real = executor.ExecutionContext

    def noted(*arguments: Any) -> Any:
        state = real(*arguments)
        found.append(weakref.ref(state))
        return state

    monkeypatch.setattr(executor, "ExecutionContext", noted)
    return found


def adding() -> Program:
    """Return a program that adds 1 to its input."""
    tensor = Operand(F32, SHAPE)
    return prepare(one_operation(OperationType.ADD, [tensor, (tensor, ONES.tobytes()), 0], tensor))


@pytest.fixture
def program() -> Program:
    return adding()


def run(program: Program, value: float) -> tuple[BoundSteps, float]:
    output = np.zeros(SHAPE, np.float32)
    execution = program.bind([ONES * np.float32(value)], [output])
    execution.run()
    assert (output == output[0]).all()
    return execution, float(output[0])


def test_one_execution_after_the_other_has_the_same_arena(program: Program, made: list[Any]) -> None:
    assert [run(program, value)[1] for value in range(5)] == [1, 2, 3, 4, 5]
    assert len(made) == 1


def test_executions_that_are_bound_at_once_have_arenas_of_their_own(program: Program, made: list[Any]) -> None:
    first, second = run(program, 1), run(program, 2)
    assert (first[1], second[1], len(made)) == (2, 3, 2)


def test_what_no_execution_has_is_given_back_when_asked_and_comes_again(program: Program, made: list[Any]) -> None:
    kept, _ = run(program, 1)
    run(program, 2)
    idle_trim.trim_memory()
    assert [state() is None for state in made] == [False, True]
    assert run(program, 3)[1] == 4
    assert len(made) == 3
    kept.run()


def test_no_more_are_kept_than_a_few(program: Program, made: list[Any]) -> None:
    held = [run(program, value) for value in range(executor._MAX_POOLED_CONTEXTS + 3)]
    held.clear()
    assert sum(state() is not None for state in made) == executor._MAX_POOLED_CONTEXTS


def test_a_state_that_waits_keeps_no_input(program: Program) -> None:
    gc.collect()
    gc.disable()
    try:
        given, output = ONES * 3, np.zeros(SHAPE, np.float32)
        gone = weakref.ref(given)
        execution = program.bind([given], [output])
        execution.run()
        del execution, given
        assert gone() is None
    finally:
        gc.enable()


def test_a_program_s_states_go_with_it(made: list[Any]) -> None:
    run(adding(), 1)
    gc.collect()
    (state,) = made
    assert state() is None


def test_an_arena_made_while_fewer_threads_helped_serves_all(program: Program, made: list[Any]) -> None:
    team = default_thread_pool()
    usual = team.worker_count
    team.set_worker_count(0)
    try:
        execution, _ = run(program, 1)
    finally:
        team.set_worker_count(usual)
    state = made[0]()
    memory = state._arena.base
    areas = memory.ctypes.data + memory.nbytes - state.scratch
    assert areas >= (usual + 1) * state._plan.scratch_bytes
    del execution
