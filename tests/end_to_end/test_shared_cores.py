"""How the workers of a driver process divide the cores, as the page shows in which they say that they compute."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from support.core_page import SLOTS, Page, opened_page
from support.drivers import LIMIT_S, Daemon, InThread, Process, running_daemon, short_folder, until
from support.models import slow_model

import nnfmq
from nnfmq.engines.compiled import thread_pool
from nnfmq.hal.types import ExecutionPreference

pytest.importorskip("llvmlite", exc_type=ImportError)

MODEL = slow_model(8, 64)
INPUT = np.ones((1, 64, 64, 32), np.float32)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with short_folder() as folder, running_daemon(folder / "d.sock") as started:
        yield started


@pytest.fixture
def page(daemon: Daemon) -> Iterator[Page]:
    with opened_page(daemon) as opened:
        yield opened


@contextmanager
def opened_burst(daemon: Daemon) -> Iterator[tuple[nnfmq.Burst, Process]]:
    """Yield a burst of a new client, and the client's worker."""
    with ExitStack() as stack:
        client = stack.enter_context(daemon.connect())
        worker = stack.enter_context(Process(client.worker_pid))
        sustained = ExecutionPreference.SUSTAINED_SPEED
        prepared = stack.enter_context(client.device("compiled").prepare(MODEL, preference=sustained))
        yield stack.enter_context(prepared.burst()), worker


def cpu_times(pid: int) -> dict[str, int]:
    """Return the CPU time of each thread of a process, in ns."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            found[task.name] = int((task / "schedstat").read_text().split()[0])
    return found


def second_thread_part(worker: Process, work: Callable[[], object]) -> float:
    """Return the CPU time of the thread that computes second most during `work`, over that of the first."""
    before = cpu_times(worker.pid)
    work()
    used = sorted((after - before.get(task, 0) for task, after in cpu_times(worker.pid).items()), reverse=True)
    return used[1] / used[0]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) != 2, reason="needs two CPUs")
@pytest.mark.skipif(thread_pool.core_name != "compiled", reason="only the compiled core has a thread pool")
def test_LIFE_7_a_worker_computes_with_its_share_of_the_cores(daemon: Daemon, page: Page) -> None:
    with opened_burst(daemon) as (burst, worker):

        def execute() -> None:
            for _ in range(10):
                burst.execute(INPUT, timeout=LIMIT_S)

        execute()
        until(lambda: second_thread_part(worker, execute) > 0.5, "a worker alone computes with both cores")
        page.set_busy(SLOTS // 2, 1)  # as if another worker computed
        assert second_thread_part(worker, execute) < 0.2
        page.set_busy(SLOTS // 2, 0)
        until(lambda: second_thread_part(worker, execute) > 0.5, "it uses both cores again")


@pytest.mark.skipif(thread_pool.core_name != "compiled", reason="only the compiled core has a thread pool")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_LIFE_7_a_worker_that_is_killed_while_it_computes_leaves_its_share_to_the_others(
    daemon: Daemon, page: Page
) -> None:
    with opened_burst(daemon) as (burst, worker):
        burst.execute(INPUT, timeout=LIMIT_S)
        assert not any(page.busy)
        calling = InThread.start(lambda: [burst.execute(INPUT, timeout=LIMIT_S) for _ in range(100_000)])
        until(lambda: stopped_while_busy(worker, page), "the worker is stopped while it computes")
        worker.kill()
        assert isinstance(calling.wait().error, nnfmq.DeadObject)
        until(lambda: not any(page.busy), "nobody computes")


def stopped_while_busy(worker: Process, page: Page) -> bool:
    """Stop the worker, and return whether it computed then; let it run again if not."""
    worker.stop()
    if any(page.busy):
        return True
    worker.resume()
    return False
