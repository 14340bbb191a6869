"""What a thread asks of the kernel's scheduler, and the way back of a process without privileges."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable

import pytest

from nnfmq.base.scheduling import Scheduling, scheduling_of, set_scheduling

NOBODY = 65534
BATCH = Scheduling(os.SCHED_BATCH, 20_000_000)


def in_unprivileged_process(work: Callable[[], bool]) -> bool:
    """Return what `work` returns in a child that is nobody's if this process is root's, without privileges."""
    pid = os.fork()
    if pid == 0:
        status = 2
        try:
            resource.setrlimit(resource.RLIMIT_NICE, (0, 0))
            if not os.getuid():
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            status = 0 if work() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def there_and_back() -> bool:
    before = scheduling_of(0)
    set_scheduling(os.getpid(), BATCH)
    there = scheduling_of(0)
    set_scheduling(os.getpid(), before)
    return there.policy == os.SCHED_BATCH and scheduling_of(0) == before


def test_a_process_without_privileges_can_take_back_what_it_asked_for() -> None:
    assert in_unprivileged_process(there_and_back)


def test_all_threads_of_a_process_ask_for_it_and_keep_their_niceness() -> None:
    end, found = threading.Event(), []

    def in_child() -> bool:
        os.nice(3)
        threads = [threading.Thread(target=end.wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        set_scheduling(os.getpid(), BATCH)
        ids = [int(task) for task in os.listdir("/proc/self/task")]
        found.extend(scheduling_of(each).policy for each in ids)
        nices = {os.getpriority(os.PRIO_PROCESS, each) for each in ids}
        end.set()
        return found == [os.SCHED_BATCH] * 4 and nices == {os.nice(0)}

    assert in_unprivileged_process(in_child)


def test_an_exited_process_needs_nothing_and_an_unknown_thread_is_an_error() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    set_scheduling(pid, BATCH)
    with pytest.raises(OSError, match="the scheduling of a thread: No such process"):
        scheduling_of(pid)
