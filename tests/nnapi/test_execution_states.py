"""The states of NNAPI's objects without a driver: claims of executions, users of what is shared, attributes."""

from __future__ import annotations

import pytest
from support.drivers import InThread

import nnfmq
from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.timing import NO_TIMING
from nnfmq.nnapi.arguments import PendingResult
from nnfmq.nnapi.checks import ExtensionAttributes
from nnfmq.nnapi.compilation import UserCount
from nnfmq.nnapi.event import ExecutionOutcome, ExecutionProgress, RunningComputation

DONE = ExecutionOutcome.of_shapes([(2, 3)], NO_TIMING)


def pending(done: list[bool]) -> PendingResult:
    """Return a result that is there once `done` has an element."""
    return PendingResult(lambda: bool(done), lambda: None, lambda: pytest.fail("not collected"), lambda: None)


def test_N_API_27_a_claim_excludes_others_until_it_is_released() -> None:
    progress, claim = ExecutionProgress(), object()
    progress.begin("compute", claim)
    with pytest.raises(nnfmq.BadState, match=r"compute: this execution is running"):
        progress.begin("compute", object())
    assert not progress.release(object())
    assert progress.is_running()
    assert progress.release(claim)
    progress.require_preparation("set_input")  # a mistake is no computation


def test_N_API_40_only_the_claim_s_owner_completes_the_execution() -> None:
    progress, claim = ExecutionProgress(), object()
    progress.begin("compute", claim)
    progress.complete(object(), DONE)
    with pytest.raises(nnfmq.BadState, match="not completed"):
        progress.require_completed("get_duration")
    progress.complete(claim, DONE)
    assert progress.require_completed("get_duration") is DONE


@pytest.mark.parametrize("is_reusable", [False, True])
def test_RUX_5_a_completed_execution_is_claimed_again_if_it_is_reusable(is_reusable: bool) -> None:
    progress = ExecutionProgress()
    progress.is_reusable = is_reusable
    for claim in (object(), object()):
        progress.begin("compute", claim)
        progress.complete(claim, DONE)
        if not is_reusable:
            break
    with pytest.raises(nnfmq.BadState, match="a computation was started"):
        progress.require_preparation("set_input")
    late = object()
    if is_reusable:
        progress.begin("compute", late)
        return
    with pytest.raises(nnfmq.BadState, match="not reusable"):
        progress.begin("compute", late)
    assert progress.release(late)


def test_API_9_a_query_collects_what_nobody_has_waited_for() -> None:
    progress, claim, done = ExecutionProgress(), object(), list[bool]()
    progress.begin("start_compute", claim)
    progress.running = RunningComputation(pending(done), lambda: progress.complete(claim, DONE))
    with pytest.raises(nnfmq.BadState, match="not completed"):
        progress.require_completed("get_output_operand_rank")
    done.append(True)
    assert progress.require_completed("get_output_operand_rank") is DONE
    assert progress.running is None


def test_API_9_the_outcome_is_collected_once_by_any_number_of_threads() -> None:
    collected: list[int] = []
    failed = ExecutionOutcome.of_error(GeneralFailure("late"))

    def collect() -> ExecutionOutcome:
        collected.append(1)
        return failed

    running = RunningComputation(pending([True]), collect)
    threads = [InThread.start(running.outcome) for _ in range(4)]
    assert [thread.wait().value for thread in threads] == [failed] * 4
    assert collected == [1]
    assert running.done()


def test_API_9_an_interrupted_wait_collects_later() -> None:
    calls = []

    def collect() -> ExecutionOutcome:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return DONE

    running = RunningComputation(pending([True]), collect)
    with pytest.raises(KeyboardInterrupt):
        running.outcome()
    assert running.outcome() is DONE


def test_API_16_the_last_of_several_users_closes() -> None:
    closed: list[int] = []
    users = UserCount("memory", lambda: closed.append(1))
    users.acquire()
    users.release()
    assert closed == []
    users.release()
    assert closed == [1]
    with pytest.raises(nnfmq.InvalidArgument, match="this memory is closed"):
        users.acquire()


def test_EXT_6_each_extension_of_attributes_has_a_prefix_of_its_own() -> None:
    attributes = ExtensionAttributes()
    for name, code in (("a.b", 1), ("c.d", 1), ("a.b", 0xFFFF)):
        attributes.add(name, code, bytearray(b"value"))
    assert [hint.token for hint in attributes.hints] == [1 << 16 | 1, 2 << 16 | 1, 1 << 16 | 0xFFFF]
    assert {hint.value for hint in attributes.hints} == {b"value"}
    assert [(extension.name, extension.prefix) for extension in attributes.extensions] == [("a.b", 1), ("c.d", 2)]
