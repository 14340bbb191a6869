"""Tiered programs: executions switch at their next run, and the baseline is released."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from support.executors import LIMIT_S
from support.models import null_model

from nnfmq.driver.compilation.jobs import tier_up
from nnfmq.engines import interpreter
from nnfmq.engines.execution import PreparedProgram, TieredProgram
from nnfmq.engines.function import FunctionProgram
from nnfmq.hal.errors import GeneralFailure

MODEL = null_model()
ONE = np.ones(1, np.float32)


def hundred() -> PreparedProgram:
    """Return a program whose result is 100 more than the model's."""
    return FunctionProgram(MODEL, lambda inputs: [inputs[0] + 100])


def never() -> PreparedProgram:
    raise AssertionError("compiled although the program was released")


@pytest.fixture
def program() -> TieredProgram:
    return TieredProgram(interpreter.prepare(MODEL), hundred)


def run(execution: Any, output: np.ndarray) -> float:
    execution.run()
    return float(output[0])


def test_an_execution_switches_at_its_next_run_and_a_new_one_immediately(program: TieredProgram) -> None:
    output = np.zeros(1, np.float32)
    execution = program.bind([ONE], [output])
    assert run(execution, output) == 1
    tier_up(weakref.ref(program))
    assert run(execution, output) == run(execution, output) == run(program.bind([ONE], [output]), output) == 101


def test_an_execution_that_has_never_run_switches_too(program: TieredProgram) -> None:
    output = np.zeros(1, np.float32)
    execution = program.bind([ONE], [output])
    tier_up(weakref.ref(program))
    assert run(execution, output) == 101


@pytest.mark.parametrize("error", [GeneralFailure("too wide"), RuntimeError("of the generator")])
def test_if_compilation_fails_the_baseline_stays_and_the_reason_is_logged(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> PreparedProgram:
        raise error

    program = TieredProgram(interpreter.prepare(MODEL), fail)
    output = np.zeros(1, np.float32)
    execution = program.bind([ONE], [output])
    tier_up(weakref.ref(program))
    assert run(execution, output) == run(program.bind([ONE], [output]), output) == 1
    assert "a model stays on its baseline program" in caplog.text and str(error) in caplog.text
    assert program.compile_program is None


def test_nothing_is_compiled_for_a_released_program() -> None:
    gone = weakref.ref(TieredProgram(interpreter.prepare(MODEL), never))
    assert gone() is None
    tier_up(gone)


def test_a_program_released_during_compilation_is_freed_immediately() -> None:
    begun, go = threading.Event(), threading.Event()

    def held() -> PreparedProgram:
        begun.set()
        assert go.wait(LIMIT_S)
        return hundred()

    program = TieredProgram(interpreter.prepare(MODEL), held)
    inner, wanted = weakref.ref(program.program), weakref.ref(program)
    thread = threading.Thread(target=tier_up, args=(wanted,))
    thread.start()
    try:
        assert begun.wait(LIMIT_S)
        del program
        assert wanted() is None and inner() is None
    finally:
        go.set()
        thread.join()


def test_after_the_switch_neither_the_baseline_nor_buffers_of_released_executions_are_kept() -> None:
    gc.collect()
    gc.disable()  # a reference cycle would keep the objects alive
    try:
        program = TieredProgram(interpreter.prepare(MODEL), hundred)
        old, output = weakref.ref(program.program), np.zeros(1, np.float32)
        execution = program.bind([ONE], [output])
        tier_up(weakref.ref(program))
        assert run(execution, output) == 101
        assert old() is None
        held = weakref.ref(output)
        del execution, output
        assert held() is None
    finally:
        gc.enable()
