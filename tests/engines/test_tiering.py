"""A program that another one replaces: executions go over at their next run, and nothing is kept that nobody needs."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from support.executors import LIMIT_S
from support.models import null_model

from nnfmq.engines import interpreter
from nnfmq.engines.execution import PreparedProgram, TieredProgram
from nnfmq.engines.function import FunctionProgram
from nnfmq.hal.errors import GeneralFailure
from nnfmq.service.background_compile import tier_up

MODEL = null_model()
ONE = np.ones(1, np.float32)


def hundred() -> PreparedProgram:
    """Return a program that answers 100 more than the model's own."""
    return FunctionProgram(MODEL, lambda inputs: [inputs[0] + 100])


def never() -> PreparedProgram:
    raise AssertionError("made although nobody wants it")


@pytest.fixture
def program() -> TieredProgram:
    return TieredProgram(interpreter.prepare(MODEL), hundred)


def run(execution: Any, output: np.ndarray) -> float:
    execution.run()
    return float(output[0])


def test_an_execution_goes_over_at_its_next_run_and_a_new_one_at_once(program: TieredProgram) -> None:
    output = np.zeros(1, np.float32)
    execution = program.bind([ONE], [output])
    assert run(execution, output) == 1
    tier_up(weakref.ref(program))
    assert run(execution, output) == run(execution, output) == run(program.bind([ONE], [output]), output) == 101


def test_what_was_bound_but_never_run_goes_over_too(program: TieredProgram) -> None:
    output = np.zeros(1, np.float32)
    execution = program.bind([ONE], [output])
    tier_up(weakref.ref(program))
    assert run(execution, output) == 101


@pytest.mark.parametrize("error", [GeneralFailure("too wide"), RuntimeError("of the generator")])
def test_where_the_better_one_cannot_be_made_the_program_stays_and_the_log_says_why(
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


def test_for_a_program_that_is_gone_nothing_is_made() -> None:
    gone = weakref.ref(TieredProgram(interpreter.prepare(MODEL), never))
    assert gone() is None
    tier_up(gone)


def test_a_program_that_is_released_meanwhile_goes_at_once() -> None:
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


def test_replaced_it_keeps_neither_the_old_program_nor_memory_of_executions_that_are_gone() -> None:
    gc.collect()
    gc.disable()  # so that a cycle would show
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
