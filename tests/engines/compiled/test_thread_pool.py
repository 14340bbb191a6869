"""The thread team by itself: every unit is computed once, and who wakes late takes its part of what is left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support.drivers import until

from nnfmq.engines.compiled.jit import LoadedCode, compile_ir, host_target
from nnfmq.engines.compiled.memory_plan import ArraySpec, PartitionLaunch, plan_partition
from nnfmq.engines.compiled.roofline import CopyBandwidth
from nnfmq.engines.compiled.thread_pool import RECORD_WORDS, Parallelism, ThreadPool
from nnfmq.operations.signature import Array

UNITS_MOST = 1000
PATIENCE = 1 << 31  # looks at a word: some seconds

KERNELS = f"""
define void @count(ptr %table, i64 %begin, i64 %end, ptr %scratch) {{
entry:
  br label %unit
unit:
  %number = phi i64 [ %begin, %entry ], [ %next, %unit ]
  %at = getelementptr i64, ptr %table, i64 %number
  %before = atomicrmw add ptr %at, i64 1 seq_cst
  %next = add i64 %number, 1
  %more = icmp slt i64 %next, %end
  br i1 %more, label %unit, label %done
done:
  ret void
}}

; Unit 0 waits until the last one, whose number is the first word, has begun, and says in the second that it has.
define void @meet(ptr %table, i64 %begin, i64 %end, ptr %scratch) {{
entry:
  %met.at = getelementptr i64, ptr %table, i64 1
  %begun.at = getelementptr i64, ptr %table, i64 2
  %last = load i64, ptr %table
  %first = icmp eq i64 %begin, 0
  br i1 %first, label %look, label %other
look:
  %looks = phi i64 [ 0, %entry ], [ %more, %again ]
  %begun = load atomic i64, ptr %begun.at seq_cst, align 8
  %seen = icmp ne i64 %begun, 0
  br i1 %seen, label %met, label %again
again:
  %more = add i64 %looks, 1
  %long = icmp sgt i64 %more, {PATIENCE}
  br i1 %long, label %done, label %look
met:
  store atomic i64 1, ptr %met.at seq_cst, align 8
  br label %done
other:
  %is.last = icmp eq i64 %end, %last
  br i1 %is.last, label %begin.last, label %done
begin.last:
  store atomic i64 1, ptr %begun.at seq_cst, align 8
  br label %done
done:
  ret void
}}
"""


@pytest.fixture(scope="module")
def kernels() -> LoadedCode:
    return LoadedCode([compile_ir(KERNELS, host_target())], host_target())


@pytest.fixture
def make_team() -> Iterator[Callable[[int], ThreadPool]]:
    teams: list[ThreadPool] = []

    def make(helpers: int) -> ThreadPool:
        teams.append(ThreadPool(helpers))
        return teams[-1]

    yield make
    for team in teams:
        team.stop()


def run_steps(
    team: ThreadPool, kernel: int, tables: list[Array], units: int, sharing: int = Parallelism.PARALLEL_WAKE
) -> None:
    """Let the team run a step for each table."""
    steps = np.array([[kernel, table.ctypes.data, units, sharing] for table in tables], np.int64)
    assert steps.shape[1] == RECORD_WORDS
    scratch = np.zeros(64 * team.scratch_slots, np.uint8)
    team.run(steps.ctypes.data, 0, len(tables), scratch.ctypes.data, 64)


@pytest.mark.parametrize("sharing", Parallelism, ids=lambda sharing: sharing.name)
@pytest.mark.parametrize("helpers", [0, 1, 3])
@pytest.mark.parametrize("units", [1, 2, 7, 16, 17, 100, UNITS_MOST])
def test_every_unit_is_computed_once(
    kernels: LoadedCode, make_team: Callable[[int], ThreadPool], units: int, helpers: int, sharing: Parallelism
) -> None:
    team = make_team(helpers)
    tables = [np.zeros(UNITS_MOST + 1, np.int64) for _ in range(20)]
    for _ in range(50):
        run_steps(team, kernels.address("count"), tables, units, sharing)
    for table in tables:
        assert set(table[:units]) == {50}
        assert not table[units:].any()


def asleep(team: ThreadPool) -> int:
    """Return how many have said that they go to sleep since a leader woke them; who then found a step counts, too."""
    return int(team._words.view(np.int32)[2 * 32])


def test_a_helper_that_sleeps_joins_a_step_that_is_under_way(
    kernels: LoadedCode, make_team: Callable[[int], ThreadPool]
) -> None:
    team = make_team(1)
    run_steps(team, kernels.address("count"), [np.zeros(8, np.int64)], 8)
    until(lambda: asleep(team) >= 1, "the helper sleeps")
    table = np.array([8, 0, 0], np.int64)
    run_steps(team, kernels.address("meet"), [table], 8)
    assert table[1] == 1


def test_a_helper_that_sleeps_is_not_woken_for_a_little(
    kernels: LoadedCode, make_team: Callable[[int], ThreadPool]
) -> None:
    team, table = make_team(1), np.zeros(8, np.int64)
    run_steps(team, kernels.address("count"), [table], 8)
    until(lambda: asleep(team) >= 1, "the helper sleeps")
    sleepers = asleep(team)
    run_steps(team, kernels.address("count"), [table], 8, Parallelism.PARALLEL)
    assert asleep(team) == sleepers, "who rings the bell counts from 0 again"
    assert (table == 2).all()


def test_a_helper_takes_its_part_of_every_step(kernels: LoadedCode, make_team: Callable[[int], ThreadPool]) -> None:
    team = make_team(1)
    tables = [np.array([8, 0, 0], np.int64) for _ in range(100)]
    run_steps(team, kernels.address("meet"), tables, 8)
    assert all(table[1] == 1 for table in tables)


def test_who_finds_the_team_led_computes_alone(kernels: LoadedCode, make_team: Callable[[int], ThreadPool]) -> None:
    team = make_team(1)
    tables = [[np.zeros(64, np.int64) for _ in range(100)] for _ in range(4)]

    def lead(mine: list[Array]) -> None:
        for _ in range(20):
            run_steps(team, kernels.address("count"), mine, 64)

    leaders = [threading.Thread(target=lead, args=(mine,)) for mine in tables]
    for leader in leaders:
        leader.start()
    for leader in leaders:
        leader.join()
    assert all((table == 20).all() for mine in tables for table in mine)


def test_a_team_that_has_left_comes_back(kernels: LoadedCode, make_team: Callable[[int], ThreadPool]) -> None:
    team = make_team(2)
    table = np.zeros(16, np.int64)
    for _ in range(10):
        run_steps(team, kernels.address("count"), [table], 16)
        team.stop()
    run_steps(team, kernels.address("count"), [table], 16)
    assert (table == 11).all()


def test_a_team_without_threads_to_start_computes_with_those_that_there_are(
    kernels: LoadedCode, make_team: Callable[[int], ThreadPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    team, table = make_team(3), np.zeros(64, np.int64)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name != "nnfmq-pool-1":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        run_steps(team, kernels.address("count"), [table], 64)
    run_steps(team, kernels.address("count"), [table], 64)
    assert (table == 2).all()
    assert len(team._threads) == 1


def test_scratch_is_for_all_threads_even_while_fewer_help(
    kernels: LoadedCode, make_team: Callable[[int], ThreadPool]
) -> None:
    team = make_team(3)
    team.set_worker_count(1)
    assert (team.worker_count, team.scratch_slots) == (1, 4)
    table = np.zeros(64, np.int64)
    run_steps(team, kernels.address("count"), [table], 64)
    assert len(team._threads) == 1
    team.set_worker_count(3)
    run_steps(team, kernels.address("count"), [table], 64)
    assert len(team._threads) == 3
    assert (table == 2).all()


def test_limits_and_runs_at_once_leave_every_unit_computed_once(
    kernels: LoadedCode, make_team: Callable[[int], ThreadPool]
) -> None:
    team, tables = make_team(3), [np.zeros(64, np.int64) for _ in range(10)]

    def limit() -> None:
        for helpers in (1, 3, 0, 2) * 10:
            team.set_worker_count(helpers)

    limiter = threading.Thread(target=limit)
    limiter.start()
    runs = 0
    while limiter.is_alive() or runs < 10:
        run_steps(team, kernels.address("count"), tables, 64)
        runs += 1
    limiter.join()
    assert all((table == runs).all() for table in tables)


def test_near_the_end_of_a_segment_nobody_is_woken_any_more() -> None:
    kernel, works = CopyBandwidth(64, 1, 8), (100_000, 1000, 50_000, 40_000, 39_000)
    calls = [PartitionLaunch(kernel, (n,), (n + 1,), (), work_ns) for n, work_ns in enumerate(works)]
    values = {n + 1: ArraySpec(np.dtype(np.uint8), (512,)) for n in range(len(works))}
    plan = plan_partition(calls, values, {}, [0], [len(works)], host_target())
    assert [launch.parallelism for launch in plan.launches] == [
        Parallelism.PARALLEL_WAKE,
        Parallelism.SERIAL,
        Parallelism.PARALLEL_WAKE,
        Parallelism.PARALLEL,
        Parallelism.PARALLEL,
    ]
