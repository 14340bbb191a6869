"""The CPU time of compilations: which uses count, on synthetic logs and with real processes.

The uses of the synthetic logs are 1 ms each, so that what counts is told by its time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from support.drivers import Process, until

from nnfmq.lab.stress.counters import CompilerUsage, ThreadUse, UsageLog, compilation_uses
from nnfmq.observe import statistics_layout as layout
from nnfmq.observe.statistics_writer import SlotWriter

MS = 1_000_000
COMPILER, WORKER, CLIENT = 11, 12, 13
COMPUTE = "while True: pass"


def log(compiling: range, calls: range, *, executing: bool = False) -> UsageLog:
    """Return a log of 1 s: client and worker use the CPU all the time, a compile process and open calls at times."""
    found = UsageLog(times=[at * MS for at in range(1000)], compilers={COMPILER}, workers={WORKER})
    for at in found.times:
        pids = [WORKER, CLIENT, *([COMPILER] if at // MS in compiling else [])]
        found.uses += [ThreadUse(at, pid, MS, frozenset({0})) for pid in pids]
    if not executing:
        found.calls = {pid: [at * MS for at in calls] for pid in (WORKER, CLIENT)}
    return found


def counted(found: UsageLog, pid: int) -> tuple[int, int]:
    """Return the times in ms of the first and the last use that counts."""
    times = [use.time // MS for use in compilation_uses(found) if use.pid == pid]
    assert times == list(range(times[0], times[-1] + 1))
    return times[0], times[-1]


# ---- which uses count


def test_client_and_worker_count_around_a_call_in_which_compile_processes_computed() -> None:
    found = log(range(400, 500), range(300, 600))
    assert counted(found, COMPILER) == (400, 499)
    assert counted(found, CLIENT) == counted(found, WORKER) == (250, 649)


def test_calls_that_follow_each_other_closely_are_one() -> None:
    found = log(range(400, 410), range(300, 600, 50))
    assert counted(found, CLIENT) == (250, 600)


def test_calls_far_from_each_other_count_only_where_compile_processes_computed() -> None:
    found = log(range(400, 410), range(0))
    found.calls = {CLIENT: [at * MS for at in (*range(100, 200), *range(390, 420), *range(700, 800))]}
    assert counted(found, CLIENT) == (340, 469)


def test_a_client_without_open_calls_does_not_count_and_its_worker_just_after_the_compile_processes() -> None:
    """A model whose preparation has returned is compiled in the background; its client executes it meanwhile."""
    found = log(range(400, 500), range(0), executing=True)
    assert counted(found, WORKER) == (400, 549)
    assert CLIENT not in {use.pid for use in compilation_uses(found)}


def test_without_compile_processes_nothing_counts() -> None:
    assert not list(compilation_uses(log(range(0), range(300, 600))))


# ---- real processes


@contextmanager
def computing(**options: object) -> Iterator[Process]:
    process = subprocess.Popen([sys.executable, "-S", "-c", COMPUTE], **options)  # type: ignore[call-overload]
    try:
        with Process(process.pid) as found:
            yield found
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def worker() -> Iterator[Process]:
    """A child of this process, as a worker is one of the driver."""
    with computing() as found:
        yield found


def server() -> subprocess.Popen[bytes]:
    """Start a child in a session of its own, as the compile server is."""
    return subprocess.Popen([sys.executable, "-S", "-c", COMPUTE], start_new_session=True)


@contextmanager
def driver() -> Iterator[int]:
    """Yield the pid of a process with one child, which computes in a session of its own."""
    code = f"""
import subprocess, sys

child = subprocess.Popen([sys.executable, "-S", "-c", {COMPUTE!r}], start_new_session=True)
sys.stdin.read()
child.kill()
child.wait()
"""
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE) as process:
        yield process.pid


def reading(usage: CompilerUsage, condition: Callable[[], bool]) -> Callable[[], bool]:
    def is_fulfilled() -> bool:
        usage.find()
        usage.update()
        return condition()

    return is_fulfilled


def used(usage: CompilerUsage, pid: int) -> int:
    return sum(use.used for use in usage._log.uses if use.pid == pid)


def test_compile_time_is_that_of_descendants_in_another_session_in_total_and_by_cpu(worker: Process) -> None:
    usage = CompilerUsage(os.getpid(), [worker.pid])
    with ExitStack() as stack:
        stack.callback(usage.close)
        usage.find()
        usage.update()
        process = server()
        stack.callback(process.wait)
        stack.callback(process.kill)
        until(reading(usage, lambda: usage.totals()[-1][None] > 0), "CPU time of the server")
        assert process.pid in usage.pids() and worker.pid not in usage.pids()
        total = usage.totals()[-1]
        by_cpu = sum(time for cpu, time in total.items() if cpu is not None)
        assert 0 < total[None] <= by_cpu
        assert total[1 << 20] == 0
        assert usage.totals()[0][None] == 0
        process.kill()
        process.wait()
        usage.update()
        assert process.pid not in usage.pids()


def test_a_worker_counts_beside_a_compile_process_unless_it_executes_what_is_measured(worker: Process) -> None:
    usage, executing = CompilerUsage(os.getpid()), CompilerUsage(os.getpid(), [worker.pid])
    with ExitStack() as stack:
        for each in (usage, executing):
            stack.callback(each.close)
        until(reading(usage, lambda: used(usage, worker.pid) > 0), "CPU time of the worker")
        assert usage.totals()[-1][None] == 0
        process = server()
        stack.callback(process.wait)
        stack.callback(process.kill)
        until(reading(usage, lambda: usage.totals()[-1][None] > used(usage, process.pid) > 0), "both count")
        until(reading(executing, lambda: used(executing, process.pid) > 0), "CPU time of the server")
        assert used(executing, worker.pid) == 0


def test_a_client_counts_only_while_it_has_an_open_call() -> None:
    """The client is no descendant of the driver, whose only child is a compile process."""
    area = memoryview(bytearray(layout.area_bytes(1)))
    words = area.cast("Q")
    words[layout.HEADER_MAGIC], words[layout.HEADER_SLOTS] = layout.MAGIC, 1
    slot = SlotWriter(area, 0)
    with driver() as driver_pid, computing() as client, ExitStack() as stack:
        slot.open(client.pid, os.getuid(), 1)
        usage = CompilerUsage(driver_pid, statistics=area)
        stack.callback(usage.close)

        def both() -> bool:
            return used(usage, client.pid) > 0 and sum(used(usage, pid) for pid in usage.pids()) > 0

        until(reading(usage, both), "CPU time of the client and of the compile process")
        (compiler,) = usage.pids()
        assert usage.totals()[-1][None] == used(usage, compiler)
        slot.set_calls(1, 0)
        until(reading(usage, lambda: usage.totals()[-1][None] > used(usage, compiler)), "the client counts as well")


def test_threads_that_end_and_begin_are_noticed() -> None:
    usage = CompilerUsage(os.getpid())
    usage._executing.clear()
    usage._known.add(os.getpid())
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    try:
        thread.start()
        until(reading(usage, lambda: thread.native_id in usage._threads), "the thread is found")
        ended.set()
        thread.join()
        until(reading(usage, lambda: thread.native_id not in usage._threads), "its end is noticed")
    finally:
        ended.set()
        usage.close()
