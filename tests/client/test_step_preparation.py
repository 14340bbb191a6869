"""The steps of a plan are prepared driver by driver, and closed if one of them fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
from support.drivers import LIMIT_S, InThread, until

from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.client.partitioned.compilation import StepCall, prepare_steps
from nnfmq.hal.errors import GeneralFailure


class Prepared:
    """In place of a prepared model: notes that it is closed, and who has prepared it."""

    def __init__(self) -> None:
        self.is_closed = False
        self.thread = threading.get_ident()

    def close(self) -> None:
        self.is_closed = True


def call(driver: str, prepare: Callable[[], Any] = Prepared) -> StepCall:
    return StepCall(driver, cast("Callable[[], PreparedModel]", prepare))


def fail() -> None:
    raise GeneralFailure("as the test wants")


def test_the_steps_of_one_driver_are_prepared_in_order_on_the_caller_s_thread() -> None:
    models = [Prepared() for _ in range(3)]
    left = iter(models)
    assert prepare_steps([call("one", lambda: next(left))] * 3) == models
    assert {model.thread for model in models} == {threading.get_ident()}


def test_the_steps_of_different_drivers_are_prepared_at_the_same_time_and_returned_in_order() -> None:
    both, progress = threading.Barrier(2), []
    made: list[Prepared] = []

    def prepare() -> Prepared:
        both.wait(LIMIT_S)  # passes only if the other driver prepares, too
        made.append(Prepared())
        return made[-1]

    steps = [call("one", prepare), call("two", prepare), call("one", prepare), call("two", prepare)]
    found = cast("list[Prepared]", prepare_steps(steps, lambda *counts: progress.append(counts)))
    assert set(map(id, found)) == set(map(id, made))
    assert (found[0].thread, found[1].thread) == (found[2].thread, found[3].thread)
    assert progress == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_failed_step_ends_the_call_and_closes_the_steps_before_it() -> None:
    first, never = Prepared(), Prepared()
    with pytest.raises(GeneralFailure, match="as the test wants"):
        prepare_steps([call("one", lambda: first), call("one", fail), call("one", lambda: never)])
    assert (first.is_closed, never.is_closed) == (True, False)


def test_nobody_waits_for_the_steps_of_other_drivers_after_a_failure_and_they_are_closed_later() -> None:
    started, go, late, never = threading.Event(), threading.Event(), Prepared(), Prepared()

    def prepare_late() -> Prepared:
        started.set()
        go.wait(LIMIT_S)
        return late

    def fail_after_start() -> None:
        started.wait(LIMIT_S)
        fail()

    steps = [call("slow", prepare_late), call("bad", fail_after_start), call("slow", lambda: never)]
    failed = InThread.start(lambda: prepare_steps(steps)).wait()
    assert isinstance(failed.error, GeneralFailure)
    assert not late.is_closed
    go.set()
    until(lambda: late.is_closed, "the late model is closed")
    assert not never.is_closed


def test_an_exception_of_the_progress_callback_closes_all() -> None:
    models = [Prepared(), Prepared()]
    left = iter(models)

    def stop(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_steps([call("one", lambda: next(left))] * 2, stop)
    assert [model.is_closed for model in models] == [True, False]
