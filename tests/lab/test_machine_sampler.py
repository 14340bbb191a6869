"""The sampler of the machine sees who computes on which CPU, and who is stopped, in real processes."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import support
from support.drivers import Process, Program, until

from nnfmq.base.processes import set_name
from nnfmq.lab.machine_sampler import MachineSampler, role_name

BUSY_LOOP = Path(support.__path__[0]) / "busy_loop.py"
CPU = min(os.sched_getaffinity(0))


@pytest.fixture
def sampler() -> Iterator[MachineSampler]:
    made = MachineSampler()
    yield made
    made.close()


@pytest.fixture
def busy() -> Iterator[Program]:
    with Program.start(["-P", BUSY_LOOP, str(CPU)]) as program:
        program.line()
        yield program
        program.popen.kill()


def used_ns(sampler: MachineSampler, pid: int) -> int:
    return sum(use.used_ns for use in sampler.record.uses if use.pid == pid)


def test_a_program_that_computes_is_seen_with_its_name_time_and_cpu(sampler: MachineSampler, busy: Program) -> None:
    begin_ns = time.monotonic_ns()
    sampler.look_at_uses()
    before = used_ns(sampler, busy.pid)

    def has_computed() -> bool:
        sampler.look_at_uses()
        return used_ns(sampler, busy.pid) - before > 30_000_000

    until(has_computed, "it has computed for 30 ms")
    assert used_ns(sampler, busy.pid) - before <= time.monotonic_ns() - begin_ns
    uses = [use for use in sampler.record.uses if use.pid == busy.pid]
    assert {use.thread for use in uses} == {busy.pid}
    assert {use.cpus for use in uses} == {(CPU,)}
    assert all(use.begin_ns < use.end_ns for use in uses)
    assert sampler.record.name_of(busy.pid) == f"busy_loop.py ({busy.pid})"


def test_a_process_that_was_started_later_counts_from_its_begin(sampler: MachineSampler) -> None:
    sampler.look_at_uses()
    with Program.start(["-P", BUSY_LOOP, str(CPU)]) as program:
        program.line()
        sampler.look_at_uses()
        assert used_ns(sampler, program.pid) > 1_000_000  # the start of Python
        program.popen.kill()
        program.wait()
    sampler.look_at_uses()  # it is gone


def test_threads_are_named_by_their_role(sampler: MachineSampler) -> None:
    ended, tids = threading.Event(), []

    def compute() -> None:
        set_name("spinner")
        tids.append(threading.get_native_id())
        while not ended.is_set():
            pass

    thread = threading.Thread(target=compute)
    thread.start()
    try:

        def is_seen() -> bool:
            sampler.look_at_uses()
            return bool(tids) and any(use.thread == tids[0] and use.used_ns for use in sampler.record.uses)

        until(is_seen, "the thread has been seen")
    finally:
        ended.set()
        thread.join()
    assert sampler.record.name_of(os.getpid(), tids[0]).endswith(f" ({os.getpid()}), thread spinner")


def test_a_stop_is_seen_with_its_begin_and_end(sampler: MachineSampler, busy: Program) -> None:
    with Process(busy.pid) as process:
        sampler.watch([busy.pid])
        sampler.look_at_stops()
        begin_ns = time.monotonic_ns()
        with process.stopped():
            sampler.look_at_stops()
            middle_ns = time.monotonic_ns()
            sampler.look_at_stops()
        sampler.look_at_stops()
    (stop,) = sampler.record.stops
    assert (stop.pid, stop.how) == (busy.pid, "stopped")
    assert begin_ns < stop.begin_ns < middle_ns < stop.end_ns < time.monotonic_ns()


def test_a_stop_that_goes_on_ends_with_the_sampler(sampler: MachineSampler, busy: Program) -> None:
    sampler.watch([busy.pid, 2**22 - 1])  # there is no process with the other pid
    with Process(busy.pid) as process, process.stopped():
        sampler.look_at_stops()
        sampler.close()
    assert [stop.how for stop in sampler.record.stops] == ["stopped"]


def test_it_samples_on_a_thread_of_its_own_until_the_end(busy: Program) -> None:
    with MachineSampler() as sampler:
        until(lambda: used_ns(sampler, busy.pid) > 10_000_000, "the thread has seen it")
    count = len(sampler.record.uses)
    assert sampler.record.is_sampled
    sampler.stop()
    assert len(sampler.record.uses) == count


def test_the_name_of_a_process_is_its_role_its_script_or_its_program() -> None:
    assert role_name(os.getpid()) in ("pytest", Path(sys.argv[0]).name, "__main__.py", "python")
    assert role_name(2**22 - 1) == ""
