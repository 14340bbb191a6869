"""Execution contexts: pooled between executions, never shared by two, freed by a trim, without references to inputs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from support.small_models import F32, one_operation

from nnfmq.engines.compiled import executor
from nnfmq.engines.compiled.partition import prepare
from nnfmq.engines.compiled.thread_pool import default_thread_pool
from nnfmq.engines.memory import trim_memory
from nnfmq.engines.program import FrameExecution, Program
from nnfmq.hal.types import Operand, OperationType

SHAPE = (1000,)
ONES = np.ones(SHAPE, np.float32)


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Weak references to all contexts that have been created."""
    created: list[Any] = []
    real = executor.ExecutionContext

    def recorded(*arguments: Any) -> Any:
        context = real(*arguments)
        created.append(weakref.ref(context))
        return context

    monkeypatch.setattr(executor, "ExecutionContext", recorded)
    return created


def add_one() -> Program:
    """Return a program that adds 1 to its input."""
    tensor = Operand(F32, SHAPE)
    return prepare(one_operation(OperationType.ADD, [tensor, (tensor, ONES.tobytes()), 0], tensor))


@pytest.fixture
def program() -> Program:
    return add_one()


def run(program: Program, value: float) -> tuple[FrameExecution, float]:
    output = np.zeros(SHAPE, np.float32)
    execution = program.bind([ONES * np.float32(value)], [output])
    execution.run()
    assert (output == output[0]).all()
    return execution, float(output[0])


def test_consecutive_executions_use_one_context(program: Program, contexts: list[Any]) -> None:
    assert [run(program, value)[1] for value in range(5)] == [1, 2, 3, 4, 5]
    assert len(contexts) == 1


def test_executions_bound_at_the_same_time_have_separate_contexts(program: Program, contexts: list[Any]) -> None:
    first, second = run(program, 1), run(program, 2)
    assert (first[1], second[1], len(contexts)) == (2, 3, 2)


def test_a_trim_frees_pooled_contexts(program: Program, contexts: list[Any]) -> None:
    owner, _ = run(program, 1)
    run(program, 2)
    trim_memory()
    assert [context() is None for context in contexts] == [False, True]
    assert run(program, 3)[1] == 4
    assert len(contexts) == 3
    owner.run()


def test_the_pool_is_limited(program: Program, contexts: list[Any]) -> None:
    executions = [run(program, value) for value in range(executor._MAX_POOLED_CONTEXTS + 3)]
    executions.clear()
    assert sum(context() is not None for context in contexts) == executor._MAX_POOLED_CONTEXTS


def test_a_pooled_context_has_no_reference_to_an_input(program: Program) -> None:
    gc.collect()
    gc.disable()
    try:
        input, output = ONES * 3, np.zeros(SHAPE, np.float32)
        reference = weakref.ref(input)
        execution = program.bind([input], [output])
        execution.run()
        del execution, input
        assert reference() is None
    finally:
        gc.enable()


def test_a_program_s_contexts_are_freed_with_it(contexts: list[Any]) -> None:
    run(add_one(), 1)
    gc.collect()
    (context,) = contexts
    assert context() is None


def test_a_context_has_scratch_for_all_threads_even_if_created_with_fewer(
    program: Program, contexts: list[Any]
) -> None:
    pool = default_thread_pool()
    worker_count = pool.worker_count
    pool.set_worker_count(0)
    try:
        execution, _ = run(program, 1)
    finally:
        pool.set_worker_count(worker_count)
    context = contexts[0]()
    memory = context._arena.base
    scratch_bytes = memory.ctypes.data + memory.nbytes - context.scratch
    assert scratch_bytes >= (worker_count + 1) * context._plan.scratch_bytes
    del execution
