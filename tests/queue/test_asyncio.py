"""Queues in event loops: order, cancellation, time-outs, death, closing, many queues, several loops, old kernels.

On every core, and both with futex_waitv and with a thread for each queue. Other processes are `peer_program.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import astuple
from support.forking import fork
from support.places import ROOT

from nnfmq.base import watcher
from nnfmq.hal.errors import DeadObject, InvalidArgument, QueueCorrupted
from nnfmq.queue import NOT_EMPTY, UNSYNCHRONIZED, MessageQueue, aio, futex

MakeQueue = Callable[..., MessageQueue]
Start = Callable[..., "Future[Any]"]
Until = Callable[[Callable[[], object]], None]
Stop = Callable[[], tuple[threading.Event, threading.Event]]

PROGRAM = Path(__file__).with_name("peer_program.py")
LIMIT_S = 20
HAS_WAITV = futex.has_waitv()


@pytest.fixture(params=[pytest.param(True, marks=pytest.mark.skipif(not HAS_WAITV, reason="Linux before 5.16")), False])
def has_waitv(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Wait with futex_waitv, then as on a kernel without it."""
    waiters = aio._WaiterPool()
    waiters.has_waitv = request.param
    monkeypatch.setattr(aio, "_waiter_pool", waiters)
    return bool(request.param)


@pytest.fixture
def queue(make_queue: MakeQueue, has_waitv: bool) -> MessageQueue:
    """An empty queue of 4 records of 8 bytes."""
    return make_queue(8, 4)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on a new loop; hangs become errors."""

    async def limited() -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await main

    return asyncio.run(limited())


def number(i: int) -> bytes:
    return i.to_bytes(8, "little")


def waiter_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == aio.THREAD_NAME]


async def is_waiting(*queues: MessageQueue) -> None:
    """Give way until a thread is asleep for every queue."""
    while not (
        all(queue.waiters for queue in queues) and all(map(sleeps, [*aio._waiter_pool._registrations.values()]))
    ):
        await asyncio.sleep(0)


def sleeps(wait: aio._Registration) -> bool:
    """Return True where, by the kernel, the wait's thread is in futex_waitv or in futex(2) on the queue's word."""
    if wait.thread is None or not Path("/proc/self/syscall").exists():
        return wait.thread is not None
    call = Path(f"/proc/self/task/{wait.thread.thread.native_id}/syscall").read_text().split()
    return call[0] == "449" or call[:2] in (["202", hex(wait.address)], ["98", hex(wait.address)])


async def nobody_waits(*queues: MessageQueue) -> None:
    while any(queue.waiters for queue in queues):
        await asyncio.sleep(0)


def status(thread: threading.Thread) -> str:
    return Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()[0]


def switches(thread: threading.Thread) -> tuple[int, int]:
    """Return how often a thread slept, and the clock ticks of CPU that it used."""
    folder = Path(f"/proc/self/task/{thread.native_id}")
    lines = dict(line.split(":\t") for line in (folder / "status").read_text().splitlines() if ":\t" in line)
    used = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
    return int(lines["voluntary_ctxt_switches"]), sum(map(int, used))


@contextmanager
def peer(role: str, queue: MessageQueue, *options: object) -> Iterator[subprocess.Popen[str]]:
    """Start another process that is attached to the queue; end it."""
    fd = queue.memory.fileno()
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), role], pass_fds=[fd], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        grantors = [astuple(grantor) for grantor in queue.descriptor.grantors]
        place = {"fd": fd, "grantors": grantors, "quantum": queue.quantum, "reset": True}
        print(json.dumps({"queues": [place], "options": options}), file=process.stdin, flush=True)
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


# ---- records ----


def test_records_of_a_thread_arrive_in_order(queue: MessageQueue, start: Start, limit_ns: int) -> None:
    async def main() -> list[bytes | None]:
        return [await queue.read_async() for _ in range(10_000)]

    written = start(lambda: all(queue.write_blocking(number(i), limit_ns) for i in range(10_000)))
    assert run(main()) == [number(i) for i in range(10_000)]
    assert written.result()


def test_records_of_a_process_arrive_in_order(queue: MessageQueue) -> None:
    async def main() -> list[bytes | None]:
        return [await queue.read_async() for _ in range(10_000)]

    with peer("write_numbers", queue, 10_000):
        assert run(main()) == [number(i) for i in range(10_000)]


def test_writes_wait_for_space_and_arrive_in_order(queue: MessageQueue, start: Start, limit_ns: int) -> None:
    async def main() -> bool:
        return all([await queue.write_async(number(i)) for i in range(2000)])

    read = start(lambda: [queue.read_blocking(1, limit_ns) for _ in range(2000)])
    assert run(main())
    assert read.result() == [number(i) for i in range(2000)]


def test_two_tasks_of_one_loop_are_both_ends_of_a_queue(queue: MessageQueue) -> None:
    async def write() -> None:
        for i in range(0, 300, 3):
            assert await queue.write_async(number(i) + number(i + 1) + number(i + 2))

    async def main() -> list[bytes | None]:
        task = asyncio.create_task(write())
        records = [await queue.read_async(2) for _ in range(150)]
        await task
        return records

    assert run(main()) == [number(i) + number(i + 1) for i in range(0, 300, 2)]


def test_a_read_waits_for_all_its_records(queue: MessageQueue) -> None:
    async def main() -> bytes | None:
        task = asyncio.create_task(queue.read_async(3))
        await is_waiting(queue)
        queue.send(number(0) + number(1))
        assert (await asyncio.wait([task], timeout=0.02))[1] == {task}
        queue.send(number(2))
        return await task

    assert run(main()) == number(0) + number(1) + number(2)


def test_a_read_that_succeeds_immediately_starts_no_thread(queue: MessageQueue) -> None:
    queue.send(number(7))
    before = waiter_threads()
    assert run(queue.read_async()) == number(7)
    assert waiter_threads() == before


def test_the_loop_runs_other_tasks_during_a_wait(queue: MessageQueue) -> None:
    async def main() -> int:
        task, turns = asyncio.create_task(queue.read_async()), 0
        await is_waiting(queue)
        while turns < 100:
            await asyncio.sleep(0)
            turns += 1
        queue.send(number(1))
        await task
        return turns

    assert run(main()) == 100


# ---- time-outs ----


def test_a_timeout_ends_a_read_and_not_before(queue: MessageQueue) -> None:
    begin = time.monotonic_ns()
    assert run(queue.read_async(timeout=0.03)) is None
    assert time.monotonic_ns() - begin >= 30_000_000


def test_a_timeout_of_0_means_one_try(queue: MessageQueue) -> None:
    before = waiter_threads()
    assert run(queue.read_async(timeout=0)) is None
    queue.send(number(1))
    assert run(queue.read_async(timeout=0)) == number(1)
    assert waiter_threads() == before


def test_a_timeout_ends_a_write(queue: MessageQueue) -> None:
    queue.write(bytes(32))
    assert run(queue.write_async(number(1), timeout=0.01)) is False
    assert run(queue.write_async(number(1), timeout=0)) is False
    assert queue.available_to_read() == 4


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_negative_timeout_is_rejected(queue: MessageQueue, timeout: float) -> None:
    with pytest.raises(InvalidArgument, match="0 or more seconds"):
        run(queue.read_async(timeout=timeout))


def test_a_timeout_beyond_the_clock_s_range_is_no_limit(queue: MessageQueue) -> None:
    async def main() -> bytes | None:
        task = asyncio.create_task(queue.read_async(timeout=float("inf")))
        await is_waiting(queue)
        queue.send(number(1))
        return await task

    assert run(main()) == number(1)


def test_more_records_than_fit_are_rejected_immediately(queue: MessageQueue) -> None:
    assert run(queue.read_async(5)) is None
    assert run(queue.write_async(bytes(40))) is False


def test_after_a_timeout_a_smaller_read_succeeds(queue: MessageQueue) -> None:
    async def main() -> list[bytes | None]:
        received = []
        for i in range(200):
            task = asyncio.create_task(queue.read_async(2, timeout=0.0001))
            await asyncio.sleep(0)
            queue.send(number(i))
            assert await task is None
            received.append(await queue.read_async())
        return received

    assert run(main()) == [number(i) for i in range(200)]


# ---- cancelling ----


def test_a_cancelled_read_takes_nothing_and_leaves_no_waiter(queue: MessageQueue) -> None:
    async def main() -> bytes | None:
        task = asyncio.create_task(queue.read_async())
        await is_waiting(queue)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await nobody_waits(queue)
        queue.send(number(5))
        return await queue.read_async()

    assert run(main()) == number(5)


def test_a_read_cancelled_after_it_was_woken_takes_nothing(queue: MessageQueue, until: Until) -> None:
    async def main() -> bytes | None:
        task = asyncio.create_task(queue.read_async())
        await is_waiting(queue)
        queue.send(number(5))
        until(lambda: queue.waiters == 0)  # the thread has told the loop, which does not run here
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await queue.read_async(timeout=0)

    assert run(main()) == number(5)


def test_asyncio_timeout_works(queue: MessageQueue) -> None:
    async def main() -> None:
        async with asyncio.timeout(0.01):
            await queue.read_async()

    with pytest.raises(TimeoutError):
        run(main())
    assert queue.send(bytes(32))


@pytest.mark.parametrize("seed", range(4))
def test_cancelling_at_any_point_loses_nothing(queue: MessageQueue, seed: int) -> None:
    chance, count, cancelled = random.Random(seed), 500, 0

    async def main() -> list[int]:
        nonlocal cancelled
        got: list[int] = []
        while len(got) < count:
            task = asyncio.create_task(queue.read_async(chance.choice([1, 1, 2]), timeout=0.2))
            for _ in range(chance.randrange(6)):
                await asyncio.sleep(chance.choice([0, 0, 0.0001]))
            task.cancel()
            await asyncio.wait([task])
            cancelled += task.cancelled()
            if not task.cancelled():
                data = task.result() or b""
                got += [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
        return got

    with peer("write_numbers", queue, count):
        assert run(main()) == list(range(count))
    assert cancelled > 10


# ---- death, closing, misuse ----


def test_the_peer_death_flag_ends_a_wait(queue: MessageQueue) -> None:
    async def main() -> None:
        task = asyncio.create_task(queue.read_async())
        await is_waiting(queue)
        queue.peer_death.set()
        while queue.wake_all() >= 0 and queue.waiters:
            await asyncio.sleep(0)
        await task

    with pytest.raises(DeadObject, match="gone"):
        run(main())


def test_after_peer_death_the_ring_is_not_read(queue: MessageQueue) -> None:
    queue.send(number(1))
    queue.peer_death.set()
    with pytest.raises(DeadObject):
        run(queue.read_async(timeout=0))


def test_the_watcher_ends_a_wait_when_the_writer_is_killed(queue: MessageQueue, has_waitv: bool) -> None:
    grave = watcher.DeathRecipients(queue.peer_death)
    grave.add(queue)

    async def main(process: subprocess.Popen[str]) -> None:
        task = asyncio.create_task(queue.read_async())
        await is_waiting(queue)
        process.send_signal(signal.SIGKILL)
        await task

    with ExitStack() as stack:
        process = stack.enter_context(peer("wait_for_input", queue))
        pidfd = os.pidfd_open(process.pid)
        stack.callback(os.close, pidfd)

        def on_exit() -> None:
            watcher.remove_reader(watch)
            watcher.notify_peer_death(grave)

        watch = watcher.add_reader(pidfd, on_exit)
        with pytest.raises(DeadObject):
            run(main(process))
        assert queue.waiters == 0
        grave.discard(queue)


def test_closing_ends_a_wait_and_the_thread_releases_the_queue(queue: MessageQueue, until: Until) -> None:
    async def main() -> None:
        task = asyncio.create_task(queue.read_async())
        await is_waiting(queue)
        queue.close()
        await task

    with pytest.raises(InvalidArgument, match="closed"):
        run(main())
    until(lambda: queue.memory.closed)


def test_closing_after_a_cancelled_wait_unmaps_the_queue(queue: MessageQueue, until: Until) -> None:
    async def main() -> None:
        task = asyncio.create_task(queue.read_async())
        await is_waiting(queue)
        task.cancel()
        await asyncio.wait([task])
        queue.close()

    run(main())
    until(lambda: queue.memory.closed)


def test_impossible_counters_end_a_wait(queue: MessageQueue) -> None:
    async def main() -> None:
        task = asyncio.create_task(queue.read_async())
        await is_waiting(queue)
        queue.memory.view[8:16] = number(3)
        assert queue.event_flag is not None
        queue.event_flag.wake(NOT_EMPTY)
        await task

    with pytest.raises(QueueCorrupted, match="write counter 3"):
        run(main())


def test_a_second_reader_is_rejected_and_the_first_is_not_affected(queue: MessageQueue) -> None:
    async def main() -> bytes | None:
        task = asyncio.create_task(queue.read_async())
        await is_waiting(queue)
        with pytest.raises(InvalidArgument, match="another task waits to read"):
            await queue.read_async()
        queue.send(number(9))
        return await task

    assert run(main()) == number(9)


def test_a_closed_queue_and_one_without_waits_reject(make_queue: MakeQueue, has_waitv: bool) -> None:
    closed, unsynchronized, bare = make_queue(), make_queue(flavor=UNSYNCHRONIZED), make_queue(event_flag=False)
    closed.close()
    for queue, why in [(closed, "closed"), (unsynchronized, "unsynchronized"), (bare, "no event flag word")]:
        with pytest.raises(InvalidArgument, match=why):
            run(queue.read_async())


def test_a_peer_that_overwrites_the_event_flag_word_cannot_extend_a_timeout(queue: MessageQueue, start: Start) -> None:
    word = queue.memory.view[queue.descriptor.grantors[3].offset :][:4].cast("I")
    over = threading.Event()

    def scribble() -> None:
        chance = random.Random(1)
        while not over.is_set():
            word[0] = chance.getrandbits(32)
            os.sched_yield()

    begin, scribbling = time.monotonic(), start(scribble)
    try:
        assert run(queue.read_async(timeout=0.1)) is None
    finally:
        over.set()
        scribbling.result()
        word.release()
    assert 0.1 <= time.monotonic() - begin < 5


# ---- many queues, many loops ----


def test_300_queues_are_awaited_concurrently(make_queue: MakeQueue, has_waitv: bool) -> None:
    queues = [make_queue(8, 4) for _ in range(300)]

    async def main() -> list[bytes | None]:
        tasks = [asyncio.create_task(queue.read_async()) for queue in queues]
        await is_waiting(*queues)
        assert len(waiter_threads()) == (3 if has_waitv else 300)
        for i in random.Random(1).sample(range(300), 300):
            queues[i].send(number(i))
        return list(await asyncio.gather(*tasks))

    assert run(main()) == [number(i) for i in range(300)]


def test_two_loops_in_two_threads_wait_concurrently(make_queue: MakeQueue, has_waitv: bool, start: Start) -> None:
    there, back = make_queue(8, 4), make_queue(8, 4)

    async def echo() -> bool:
        return all([await back.write_async(await there.read_async() or b"") for _ in range(500)])

    async def call() -> list[bytes | None]:
        received = []
        for i in range(500):
            await there.write_async(number(i))
            received.append(await back.read_async())
        return received

    echoing = start(run, echo())
    assert run(call()) == [number(i) for i in range(500)]
    assert echoing.result()


def test_a_loop_that_is_closed_with_a_wait_outstanding_does_not_affect_others(
    queue: MessageQueue, until: Until
) -> None:
    loop = asyncio.new_event_loop()
    abandoned = loop.create_task(queue.read_async())
    loop.run_until_complete(is_waiting(queue))
    loop.close()
    queue.send(number(1))  # nobody can be told
    until(lambda: queue.waiters == 0)
    assert run(queue.read_async()) == number(1)
    abandoned._log_destroy_pending = False  # type: ignore[attr-defined]


def test_another_loop_may_read_after_one_that_was_closed(queue: MessageQueue) -> None:
    loop = asyncio.new_event_loop()
    abandoned = loop.create_task(queue.read_async())
    loop.run_until_complete(is_waiting(queue))
    loop.close()

    async def main() -> bytes | None:
        task = asyncio.create_task(queue.read_async())
        await asyncio.sleep(0)
        queue.send(number(2))
        return await task

    assert run(main()) == number(2)
    abandoned._log_destroy_pending = False  # type: ignore[attr-defined]


# ---- the thread ----


def test_the_thread_ends_when_no_task_waits(queue: MessageQueue, until: Until) -> None:
    assert run(queue.read_async(timeout=0.001)) is None
    until(lambda: not waiter_threads())
    assert queue.waiters == 0


def test_a_series_of_waits_is_served_by_one_thread(queue: MessageQueue, until: Until) -> None:
    until(lambda: not waiter_threads())
    seen: set[int | None] = set()

    async def main() -> None:
        for i in range(20):
            task = asyncio.create_task(queue.read_async())
            await is_waiting(queue)
            seen.update(thread.native_id for thread in waiter_threads())
            queue.send(number(i))
            await task

    run(main())
    assert len(seen) == 1


def test_the_thread_takes_no_signals(queue: MessageQueue, until: Until) -> None:
    until(lambda: not waiter_threads())

    async def main() -> str:
        task = asyncio.create_task(queue.read_async())
        await is_waiting(queue)
        (thread,) = waiter_threads()
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        task.cancel()
        return status

    blocked = next(line for line in run(main()).splitlines() if line.startswith("SigBlk"))
    assert int(blocked.split()[1], 16) >> signal.SIGINT - 1 & 1


def test_waiting_costs_no_cpu_and_no_wake_ups(queue: MessageQueue, until: Until) -> None:
    until(lambda: not waiter_threads())

    async def main() -> tuple[tuple[int, int], tuple[int, int]]:
        task = asyncio.create_task(queue.read_async(timeout=10))
        await is_waiting(queue)
        (thread,) = waiter_threads()
        while status(thread) != "S":
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)  # it may have slept for the interpreter lock only
        before = switches(thread)
        assert (await asyncio.wait([task], timeout=0.5))[1] == {task}
        after = switches(thread)
        task.cancel()
        return before, after

    before, after = run(main())
    assert before == after


def test_a_forked_child_has_no_waiter_and_can_wait_again(queue: MessageQueue, until: Until) -> None:
    async def main() -> None:
        task = asyncio.create_task(queue.read_async())
        await is_waiting(queue)
        child = fork()
        if child == 0:
            aio._waiter_pool.reset_after_fork()  # the fixture's; the module's own is registered with the interpreter
            os._exit(queue.waiters + 2 * len(aio._waiter_pool._registrations) + 4 * len(aio._waiter_pool._threads))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert queue.waiters == 1
        task.cancel()

    run(main())


def test_if_the_thread_cannot_sleep_its_tasks_get_the_error(
    queue: MessageQueue, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    def reject(*_: object) -> int:
        raise OSError(12, "no memory for that")

    until(lambda: not waiter_threads())
    monkeypatch.setattr(futex, "futex_waitv", reject)
    monkeypatch.setattr(futex, "futex_wait", reject)
    with pytest.raises(OSError, match="no memory"):
        run(queue.read_async())
    assert queue.waiters == 0


# ---- what happens at the worst moment ----


@pytest.fixture
def before_sleep(
    monkeypatch: pytest.MonkeyPatch, until: Until
) -> Callable[[], tuple[threading.Event, threading.Event]]:
    """Stop the next sleep just before the system call: one event says that it came there, the other lets it go on."""

    def stop() -> tuple[threading.Event, threading.Event]:
        until(lambda: not waiter_threads())
        here, go = threading.Event(), threading.Event()

        def held(call: Callable[..., Any]) -> Callable[..., Any]:
            def hold(*arguments: Any) -> Any:
                here.set()
                assert go.wait(LIMIT_S)
                return call(*arguments)

            return hold

        monkeypatch.setattr(futex, "futex_waitv", held(futex.futex_waitv))
        monkeypatch.setattr(futex, "futex_wait", held(futex.futex_wait))
        return here, go

    return stop


def test_a_queue_awaited_just_before_the_thread_sleeps_is_not_forgotten(
    queue: MessageQueue, make_queue: MakeQueue, before_sleep: Stop
) -> None:
    here, go = before_sleep()
    other = make_queue(8, 4)

    async def main() -> bytes | None:
        first = asyncio.create_task(queue.read_async())
        await asyncio.to_thread(here.wait, LIMIT_S)
        second = asyncio.create_task(other.read_async())
        await asyncio.sleep(0)
        go.set()
        await is_waiting(other)
        other.send(number(4))
        first.cancel()
        return await second

    assert run(main()) == number(4)


def test_a_read_cancelled_just_before_the_thread_sleeps_leaves_no_waiter(
    queue: MessageQueue, before_sleep: Stop
) -> None:
    here, go = before_sleep()

    async def main() -> None:
        task = asyncio.create_task(queue.read_async())
        await asyncio.to_thread(here.wait, LIMIT_S)
        task.cancel()
        await asyncio.wait([task])
        go.set()
        await nobody_waits(queue)

    run(main())


def test_a_record_that_comes_just_before_the_thread_sleeps_is_read(queue: MessageQueue, before_sleep: Stop) -> None:
    here, go = before_sleep()

    async def main() -> bytes | None:
        task = asyncio.create_task(queue.read_async())
        await asyncio.to_thread(here.wait, LIMIT_S)
        queue.send(number(6))
        go.set()
        return await task

    assert run(main()) == number(6)


async def wait_by_hand(queue: MessageQueue, size: int) -> tuple[aio._Registration, aio._Request]:
    """Return a wait that no thread has, and its request."""
    assert queue.event_flag is not None and queue._ring is not None
    loop = asyncio.get_running_loop()
    wait = aio._Registration(queue._ring, queue.event_flag, NOT_EMPTY)
    wait.request = aio._Request(loop, loop.create_future(), size)
    return wait, wait.request


def test_a_registration_reused_for_fewer_bytes_is_checked_again(queue: MessageQueue) -> None:
    async def main() -> tuple[bool, bool]:
        wait, _ = await wait_by_hand(queue, 16)
        queue.send(number(1))
        first = wait.prepare_to_wait()
        wait.request = (await wait_by_hand(queue, 8))[1]
        return first, wait.prepare_to_wait()

    assert run(main()) == (True, False)


def test_a_wakeup_during_the_check_keeps_a_thread_of_one_queue_awake(
    queue: MessageQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The thread that wakes it has set the awaited bit as well, which the check may have cleared.
    slept: list[object] = []
    monkeypatch.setattr(futex, "futex_wait", lambda *arguments: slept.append(arguments) or 0)

    async def main() -> None:
        wait, _ = await wait_by_hand(queue, 8)
        thread = aio._WaiterThread(aio._waiter_pool, False)
        wakeup_value = thread._wakeup_word.value
        thread.wakeup(wait)
        assert wait.prepare_to_wait()
        thread._sleep([wait], wakeup_value)
        assert slept == []
        thread._sleep([wait], thread._wakeup_word.value)
        assert len(slept) == 1

    run(main())


def test_the_thread_has_stopped_waiting_when_the_loop_is_notified(
    queue: MessageQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiters = []

    async def main() -> None:
        wait, _ = await wait_by_hand(queue, 8)
        wait.ring.begin_wait()
        monkeypatch.setattr(aio._Request, "complete", lambda *_: waiters.append(queue.waiters))
        wait.finish()

    run(main())
    assert waiters == [0]


def test_completing_a_wait_twice_has_no_effect(queue: MessageQueue) -> None:
    complaints: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        _, request = await wait_by_hand(queue, 8)
        request.complete()
        request.complete(OSError("too late"))
        await request.future
        await asyncio.sleep(0)

    run(main())
    assert complaints == []


# ---- the document ----


def test_the_example_of_the_document_runs_as_printed(tmp_path: Path) -> None:
    section = (ROOT / "docs" / "reference" / "queue.md").read_text(encoding="utf-8").partition("\n## asyncio\n")[2]
    example = section.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "example.py").write_text(example, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "example.py")], cwd=tmp_path, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.decode(), done.stderr.decode()) == (0, "one \ntwo \nlast\n", "")
