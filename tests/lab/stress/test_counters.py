"""What the kernel reports: counters of a request and states; each with a real process."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.drivers import Process, until

from nnfmq.lab.child_processes import started_child
from nnfmq.lab.placement import cpu_ns
from nnfmq.lab.stress import counters
from nnfmq.lab.stress.clients import CollectorTime
from nnfmq.lab.stress.counters import (
    MEMORY_STALLS,
    NEWEST_PROCESS,
    OtherProcesses,
    RequestCounters,
    memory_stall_ns,
    newest_process,
    read_state,
    run_ns,
)
from nnfmq.lab.stress.disturbances import (
    ApplicationWork,
    DisturbancePlan,
    TimedAction,
    can_reclaim,
    prepared_actions,
    running_actions,
)
from nnfmq.lab.stress.records import RequestRecord
from nnfmq.lab.stress.sampler import Sampler, Watched

COUNTERS = [name for name in RequestRecord._fields[6:-2] if name != "worker_delay"]
PAGES = 16_384  # of 4 KiB; more than malloc takes from its heap


def counted(counters: RequestCounters) -> dict[str, int]:
    return dict(zip(COUNTERS, counters.read()[0], strict=True))


# ---- counters of a request


def test_new_memory_counts_as_minor_faults_of_the_client(child: Process) -> None:
    with RequestCounters(child.pid) as counters:
        before = counted(counters)
        np.empty(PAGES * 4096, np.uint8)[::4096] = 1
        after = counted(counters)
    assert after["client_minor_faults"] > before["client_minor_faults"]
    assert after["client_cpu"] > before["client_cpu"]


def test_the_workers_cpu_time_counts_while_it_computes(child: Process) -> None:
    with RequestCounters(child.pid) as counters:
        before = counted(counters)["worker_cpu"]
        until(lambda: counted(counters)["worker_cpu"] > before, "the worker has used the CPU")


def test_there_is_a_delay_for_each_thread_of_the_worker() -> None:
    with RequestCounters(os.getpid()) as counters:
        assert len(counters.read()[1]) == threading.active_count()


def test_a_thread_that_has_ended_has_no_delay() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    with RequestCounters(os.getpid()) as counters:
        ended.set()
        thread.join()
        until(lambda: 0 in counters.read()[1], "the thread has disappeared from /proc")


def test_the_time_of_a_thread_increases_while_it_computes(child: Process) -> None:
    fd = os.open(f"/proc/{child.pid}/task/{child.pid}/schedstat", os.O_RDONLY)
    try:
        before = run_ns(fd)
        until(lambda: run_ns(fd) > before, "the child has used the CPU")
    finally:
        os.close(fd)


def test_the_collector_counts_its_own_cpu_time() -> None:
    collector = CollectorTime()
    collector("start", {})
    until_ns = time.thread_time_ns() + 1_000_000
    while time.thread_time_ns() < until_ns:
        pass
    collector("stop", {})
    assert collector.total_ns >= 1_000_000


@pytest.mark.skipif(not MEMORY_STALLS.exists(), reason="the kernel has no PSI")
def test_memory_stalls_never_decrease() -> None:
    with MEMORY_STALLS.open() as file:
        assert 0 <= memory_stall_ns(file.fileno()) <= memory_stall_ns(file.fileno())


def test_the_newest_process_or_thread_is_known() -> None:
    with NEWEST_PROCESS.open() as file:
        before = newest_process(file.fileno())
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
        assert newest_process(file.fileno()) != before


# ---- other processes


def test_a_process_that_takes_no_part_counts_with_the_time_since_it_was_first_seen(
    child: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nnfmq.lab.stress.counters.descendants", lambda pid: [])
    others = OtherProcesses([])
    before_ns = cpu_ns(child.pid)
    until(lambda: others.used_ns() >= 2_000_000, "other processes have used 2 ms")
    until(lambda: others.used_ns() >= cpu_ns(child.pid) - before_ns, "the child is one of them")


def test_this_process_the_driver_and_what_they_have_started_take_part(child: Process) -> None:
    others = OtherProcesses([os.getpid()])
    seen = {pid for pid, _ in others._times()}
    assert seen and seen.isdisjoint({os.getpid(), child.pid})


# ---- the sampler


def test_a_process_whose_control_group_is_frozen_is_kept_from_running(
    child: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "_GROUPS", tmp_path)
    monkeypatch.setattr(counters, "_unified_group", lambda pid: "a")
    (tmp_path / "a").mkdir()
    events = tmp_path / "a" / "cgroup.events"
    events.write_text("populated 1\nfrozen 0\n")
    files = counters.StopFiles(child.pid)
    try:
        assert files.stop_kind() == ""
        events.write_text("populated 1\nfrozen 1\n")
        assert files.stop_kind() == "frozen"
        with child.stopped():
            assert files.stop_kind() == "stopped"
    finally:
        files.close()


def test_the_sampler_sees_a_stopped_process(child: Process) -> None:
    watched = Watched(os.getpid(), child.pid, None, None)
    with Sampler([watched], os.getpid()) as sampler:
        until(lambda: len(sampler.samples[0]) > 1, "samples")
        child.stop()
        until(lambda: sampler.samples[0][-1].worker_stop, "the stop has been sampled")
        child.resume()
        until(lambda: not sampler.samples[0][-1].worker_stop, "the end of the stop has been sampled")
    found = sampler.samples[0]
    assert not any(sample.client_stop for sample in found)
    assert all(early.time < late.time for early, late in pairwise(found))


def test_the_sampler_goes_on_when_a_process_has_exited() -> None:
    with (
        started_child(lambda connection: connection.recv()) as process,
        Sampler([Watched(os.getpid(), process.pid, None, None)], os.getpid()) as sampler,
    ):
        process.send("an end")
        process.wait()
        count = len(sampler.samples[0])
        until(lambda: len(sampler.samples[0]) > count + 1, "samples after the exit")
    assert not sampler.samples[0][-1].worker_stop


# ---- disturbances


def test_a_process_is_stopped_at_the_time_and_resumed_if_the_trial_ends_before(child: Process) -> None:
    state = os.open(f"/proc/{child.pid}/stat", os.O_RDONLY)
    try:
        plan = DisturbancePlan(stops=[(0.0, 600.0, "worker")])
        with prepared_actions(plan, os.getpid(), child.pid) as actions:
            assert [action.at_s for action in actions] == [0.0, 600.0]
            with running_actions(actions, time.monotonic_ns()):
                until(lambda: read_state(state).state == "T", "the child is stopped")
        until(lambda: read_state(state).state != "T", "the child is resumed")
    finally:
        os.close(state)


def test_actions_that_are_still_to_come_at_the_end_are_left_out() -> None:
    called: list[int] = []
    first = threading.Event()
    actions = [TimedAction(0.0, first.set), TimedAction(600.0, lambda: called.append(1))]
    with running_actions(actions, time.monotonic_ns()):
        assert first.wait(10)
    assert called == []


def test_work_is_due_once_at_its_time(tmp_path: Path) -> None:
    work = ApplicationWork([(20, "page-faults"), (10, "gc")], tmp_path)
    work.begin(1000)
    assert work.next_due(1009) is None
    assert all(work.next_due(1020) is not None for _ in range(2))
    assert work.next_due(1 << 60) is None


def test_mapped_pages_are_reclaimed_on_a_disk_and_not_in_shared_memory(tmp_path: Path) -> None:
    assert not can_reclaim(Path("/dev/shm"))
    file_system = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True)
    if file_system.stdout.strip() == "tmpfs":
        pytest.skip("the temporary folder is not on a disk")
    assert can_reclaim(tmp_path)
