"""Turns at the cores, in driver processes whose workers are killed or stopped while they have or await one.

The cores are kept from the workers by turns that a test writes into the driver's page, as if other workers had them.
With many that wait, nobody gives up waiting soon: an execution that may wait for seconds ends at once, or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.core_page import IDLE, RUNNING, SLOTS, WAITING, Page, opened_page
from support.drivers import LIMIT_S, Daemon, InThread, Process, running_daemon, until
from support.models import slow_model

import nnfmq
from nnfmq.base.processes import allowed_cpus
from nnfmq.hal.types import ExecutionPreference

pytest.importorskip("llvmlite", exc_type=ImportError)

CORES = allowed_cpus()
OTHERS, CROWD = range(SLOTS // 4, SLOTS // 4 + CORES), range(SLOTS // 2, SLOTS)
MODEL = slow_model(128, 128)  # tenths of a second
INPUT = np.ones((1, 128, 128, 32), np.float32)
SOON_S = 2.0  # much less than the limit of a wait beside the crowd
pytestmark = pytest.mark.skipif(max(OTHERS) >= min(CROWD), reason="the page has not enough slots for these cores")


@pytest.fixture
def daemon(folder: Path) -> Iterator[Daemon]:
    with running_daemon(folder / "d.sock") as started:
        yield started


@pytest.fixture
def page(daemon: Daemon) -> Iterator[Page]:
    with opened_page(daemon) as opened:
        yield opened


class Client:
    """A client with a burst of the model, whose executions are known to be long. `number` is its worker's entry."""

    def __init__(self, daemon: Daemon, stack: ExitStack, number: int) -> None:
        client = stack.enter_context(daemon.connect())
        self.worker = stack.enter_context(Process(client.worker_pid))
        sustained = ExecutionPreference.SUSTAINED_SPEED
        prepared = stack.enter_context(client.device("compiled").prepare(MODEL, preference=sustained))
        self.burst = stack.enter_context(prepared.burst())
        self.number = number
        self.execute()

    def execute(self, timeout_s: float | None = LIMIT_S) -> int:
        """Execute; return the time of the end (monotonic, ns)."""
        self.burst.execute(INPUT, timeout=timeout_s)
        return time.monotonic_ns()

    def start(self, timeout_s: float | None = LIMIT_S) -> InThread:
        """Execute on another thread."""
        return InThread.start(partial(self.execute, timeout_s))


def occupy_all_cores_but(page: Page, free: int) -> None:
    """Let other workers have turns, and many more wait."""
    for number in OTHERS[free:]:
        page.set_turn(number, RUNNING)
    for number in CROWD:
        page.set_turn(number, WAITING)


def waits(page: Page, client: Client) -> bool:
    return page.turns[client.number] == WAITING


def has_stopped_in_its_turn(page: Page, client: Client) -> bool:
    """Stop the client's worker, and return whether it had its turn then; let it run again if not."""
    client.worker.stop()
    if page.turns[client.number] == RUNNING:
        page.hold_forever(client.number)
        return True
    client.worker.resume()
    return False


def let_one_hold_and_one_wait(daemon: Daemon, page: Page, stack: ExitStack) -> tuple[Client, Client, InThread]:
    """Return a client whose worker was stopped in the only turn, one that waits for a turn, and its execution."""
    holder, other = Client(daemon, stack, 0), Client(daemon, stack, 1)
    occupy_all_cores_but(page, 1)
    stack.enter_context(ended(InThread.start(lambda: [holder.execute() for _ in range(1000)])))
    until(lambda: has_stopped_in_its_turn(page, holder), "a worker is stopped in its turn")
    waiting = other.start()
    until(lambda: waits(page, other), "another one waits")
    return holder, other, waiting


class ended:
    """Wait for a thread at the end of a block."""

    def __init__(self, thread: InThread) -> None:
        self._thread = thread

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._thread.wait()


def test_LIFE_7_the_turn_of_a_killed_worker_is_another_ones(daemon: Daemon, page: Page, resources: ExitStack) -> None:
    holder, _, waiting = let_one_hold_and_one_wait(daemon, page, resources)
    killed_ns = holder.worker.kill()
    assert waiting.wait().value - killed_ns < SOON_S * 1e9
    assert page.turns[:2] == bytes([IDLE, IDLE])


def test_LIFE_7_a_worker_that_is_killed_while_it_waits_gets_no_turn(
    daemon: Daemon, page: Page, resources: ExitStack
) -> None:
    killed, other = Client(daemon, resources, 0), Client(daemon, resources, 1)
    occupy_all_cores_but(page, 0)
    lost, waiting = killed.start(5), other.start()
    until(lambda: waits(page, killed) and waits(page, other), "both wait")
    killed.worker.kill()
    assert isinstance(lost.wait().error, nnfmq.DeadObject)
    until(lambda: page.turns[0] == IDLE, "the supervisor clears the entry")
    freed_ns = time.monotonic_ns()
    page.set_turn(OTHERS[0], IDLE)
    assert waiting.wait().value - freed_ns < SOON_S * 1e9


def test_LIFE_7_nobody_waits_for_a_turn_when_the_supervisor_was_killed(folder: Path, resources: ExitStack) -> None:
    daemon = resources.enter_context(Daemon.start(folder / "d.sock"))
    page = resources.enter_context(opened_page(daemon))
    client = Client(daemon, resources, 0)
    occupy_all_cores_but(page, 0)
    waiting = client.start()
    until(lambda: waits(page, client), "it waits")
    killed_ns = daemon.process.kill()
    daemon.program.wait()
    assert waiting.wait().value - killed_ns < SOON_S * 1e9
    begin_ns = time.monotonic_ns()
    assert client.execute() - begin_ns < SOON_S * 1e9


def test_the_earliest_deadline_among_all_clients_is_next(daemon: Daemon, page: Page, resources: ExitStack) -> None:
    clients = [Client(daemon, resources, number) for number in range(3)]
    occupy_all_cores_but(page, 0)
    executions = []
    for client, timeout_s in zip(clients, (LIMIT_S + 2, LIMIT_S, LIMIT_S + 1), strict=True):
        executions.append(client.start(timeout_s))
        until(partial(waits, page, client), "it waits")
    page.set_turn(OTHERS[0], IDLE)
    first, second, third = (execution.wait().value for execution in executions)
    assert second < third < first


def test_an_execution_waits_for_its_turn_no_longer_than_until_its_deadline(
    daemon: Daemon, page: Page, resources: ExitStack
) -> None:
    client = Client(daemon, resources, 0)
    occupy_all_cores_but(page, 0)
    with pytest.raises(nnfmq.MissedDeadline):
        client.execute(0.05)
    until(lambda: page.turns[0] == IDLE, "it has no turn")


def test_LIFE_7_times_that_no_client_can_have_end_no_worker(daemon: Daemon, page: Page, resources: ExitStack) -> None:
    client = Client(daemon, resources, 0)
    page.write_largest_times()
    client.execute()
    page.write_largest_times()
    client.execute()


def test_without_deadlines_nobody_waits_for_a_turn(daemon: Daemon, page: Page, resources: ExitStack) -> None:
    client = Client(daemon, resources, 0)
    begin_ns = time.monotonic_ns()
    for number in range(SLOTS // 4, SLOTS):
        page.set_turn(number, RUNNING)
        page.clear_deadline(number)
    assert client.execute(None) - begin_ns < SOON_S * 1e9


def test_an_execution_that_waits_for_too_long_begins_without_a_turn(
    daemon: Daemon, page: Page, resources: ExitStack
) -> None:
    client = Client(daemon, resources, 0)
    for number in OTHERS:
        page.set_turn(number, RUNNING)
    client.execute()
    assert page.turns[0] == IDLE and page.turns[OTHERS[0]] == RUNNING
