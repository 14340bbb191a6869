"""Models on several devices, with real drivers: synchronous executions of plans that are written by hand."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from support.control_flow_models import branching, counting, rotating
from support.drivers import LIMIT_S, Process
from support.partitioned import MODES, Runtime, device_failing_with
from support.plans import control_flow_plan, linear_plan
from support.small_models import two_adds

import nnfmq
from nnfmq.base.channel import Channel
from nnfmq.client.partitioned.model import PartitionedModel
from nnfmq.hal.types import DataLocation, Request, RequestArgument
from nnfmq.planning.plan import ExecutionPlan

Prepare = Callable[[ExecutionPlan], PartitionedModel]


@pytest.fixture
def prepare(runtime: Runtime) -> Prepare:
    return runtime.prepare


FAILING = device_failing_with("GENERAL_FAILURE")
A = np.array([[1, 2], [3, 4]], np.float32)
B = np.array([[10, 20], [30, 40]], np.float32)


class SentMemories:
    """The memories that this process sends to drivers. Owns copies of their descriptors."""

    def __init__(self, stack: ExitStack) -> None:
        self.receivers: dict[int, set[int]] = {}  # fds of channels, by inode
        self.temporaries: dict[int, int] = {}  # fds of what the runtime makes for values between steps, by inode
        self._stack = stack

    def note(self, receiver: int, fds: Sequence[int]) -> None:
        """Note what is sent over a channel."""
        for fd in fds:
            inode = os.fstat(fd).st_ino
            self.receivers.setdefault(inode, set()).add(receiver)
            if "nnfmq-temporaries" in os.readlink(f"/proc/self/fd/{fd}") and inode not in self.temporaries:
                self.temporaries[inode] = os.dup(fd)
                self._stack.callback(os.close, self.temporaries[inode])


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[SentMemories]:
    send = Channel.send
    with ExitStack() as stack:
        noted = SentMemories(stack)

        def noting(channel: Channel, data: bytes, fds: Sequence[int] = (), deadline_ns: int | None = None) -> None:
            noted.note(channel.fileno(), fds)
            send(channel, data, fds, deadline_ns)

        monkeypatch.setattr(Channel, "send", noting)
        yield noted


@pytest.mark.parametrize("mode", MODES)
def test_PART_5_a_value_between_two_drivers_is_in_memory_of_the_runtime(
    runtime: Runtime, sent: SentMemories, mode: str
) -> None:
    model = runtime.prepare(linear_plan(two_adds(), [0], [1]))
    channels = {client.connection._channel.fileno() for client in runtime.clients[:2]}
    for k in range(3):
        (result,) = MODES[mode](model, A + k, B)
        assert result.tolist() == (A + k + 2 * B).tolist()
    assert sent.temporaries
    assert all(sent.receivers[inode] == channels for inode in sent.temporaries)
    values = [os.pread(fd, A.nbytes, 0) for fd in sent.temporaries.values()]
    assert values[-1] == (A + 2 + B).tobytes()  # what step 0 has written, and step 1 has read


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("condition", [True, False])
def test_PART_4_an_interpreted_IF_executes_one_branch(prepare: Prepare, condition: bool, mode: str) -> None:
    model = prepare(control_flow_plan(branching()))
    x, y = np.array([3, 4], np.float32), np.array([5, 6], np.float32)
    (result,) = MODES[mode](model, np.array([condition]), x, y)
    assert result.tolist() == ([8, 10] if condition else [15, 24])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rounds", [0, 1, 5])
def test_PART_4_an_interpreted_WHILE_repeats_its_body(prepare: Prepare, rounds: int, mode: str) -> None:
    model = prepare(control_flow_plan(counting()))
    for _ in range(2):
        total, x = np.array([1, 2], np.float32), np.array([10, 20], np.float32)
        (result,) = MODES[mode](model, total, np.array([rounds], np.int32), x)
        assert result.tolist() == [1 + 10 * rounds, 2 + 20 * rounds]


def test_PART_4_the_values_of_a_WHILE_change_places(prepare: Prepare) -> None:
    model = prepare(control_flow_plan(rotating()))
    a, b, c = (np.array([v, -v], np.float32) for v in (1, 10, 100))
    results = model.execute(a, b, c, np.array([3], np.int32))
    for _ in range(3):
        a, b, c = b, c, a + c
    assert [result.tolist() for result in results] == [a.tolist(), b.tolist(), c.tolist()]


def test_an_asynchronous_execution_continues_with_the_next_step(prepare: Prepare) -> None:
    model = prepare(linear_plan(two_adds(), [0], [1]))
    pending = [model.execute_async(A + k, B) for k in range(5)]
    assert [p.result(LIMIT_S)[0].tolist() for p in pending] == [(A + k + 2 * B).tolist() for k in range(5)]


def test_an_asynchronous_WHILE_is_interpreted_between_callbacks(prepare: Prepare) -> None:
    model = prepare(control_flow_plan(counting()))
    total, x = np.array([1, 2], np.float32), np.array([10, 20], np.float32)
    (result,) = model.execute_async(total, np.array([4], np.int32), x).result(LIMIT_S)
    assert result.tolist() == [41, 82]


def test_PART_10_a_burst_of_a_plan_has_a_burst_for_each_step(prepare: Prepare) -> None:
    model = prepare(linear_plan(two_adds(), [0], [1]))
    with model.burst() as burst:
        for k in range(5):
            assert burst.execute(A + k, B)[0].tolist() == (A + k + 2 * B).tolist()
        burst.inputs[0][:] = 5
        assert burst.execute(out=burst.outputs)[0].tolist() == (5 + 2 * B).tolist()
        info = burst.last
        assert info.latency_ns == info.queue_ns + info.driver_ns + info.engine_ns


def test_PART_10_the_durations_of_a_request_are_sums_over_the_steps_as_those_of_an_execution(prepare: Prepare) -> None:
    model = prepare(linear_plan(two_adds(), [0], [1]))
    with model.burst() as burst, nnfmq.Memory.create(48) as memory:
        places = [RequestArgument(location=DataLocation(0, 16 * index, 16)) for index in range(3)]
        request = Request(tuple(places[:2]), (places[2],), (memory,))
        for execute in (lambda: burst.execute(A, B), lambda: burst.execute_request(request)) * 2:
            execute()
            info = burst.last
            assert min(info.queue_ns, info.driver_ns, info.engine_ns) > 0
            assert info.latency_ns == info.queue_ns + info.driver_ns + info.engine_ns
        before = burst.last
        burst.execute(A, B)
        with pytest.raises(nnfmq.InvalidArgument):
            burst.execute_request(Request((), (), ()))
        assert burst.last != before
        assert burst.last.driver_ns > 0


def test_PART_10_a_burst_interprets_a_WHILE(prepare: Prepare) -> None:
    model = prepare(control_flow_plan(counting()))
    with model.burst() as burst:
        for rounds in (3, 0, 1):
            total, x = np.array([1, 2], np.float32), np.array([10, 20], np.float32)
            (result,) = burst.execute(total, np.array([rounds], np.int32), x)
            assert result.tolist() == [1 + 10 * rounds, 2 + 20 * rounds]


def test_PART_11_fenced_steps_wait_for_each_other_s_fences(prepare: Prepare) -> None:
    model = prepare(linear_plan(two_adds(), [0], [1]))
    with nnfmq.Fence.create() as gate, model.execute_fenced(A, B, wait_for=[gate]) as execution:
        assert not execution.done()
        with model.execute_fenced(A + 1, B, wait_for=[execution.fence]) as after:
            gate.signal()
            assert execution.result(LIMIT_S)[0].tolist() == (A + 2 * B).tolist()
            assert after.result(LIMIT_S)[0].tolist() == (A + 1 + 2 * B).tolist()
        assert execution.info().launched.time_in_driver_ns == -1


def test_PART_11_a_fenced_WHILE_is_interpreted_after_the_fences(prepare: Prepare) -> None:
    model = prepare(control_flow_plan(counting()))
    total, x = np.array([1, 2], np.float32), np.array([10, 20], np.float32)
    with (
        nnfmq.Fence.create() as gate,
        model.execute_fenced(total, np.array([2], np.int32), x, wait_for=[gate]) as execution,
    ):
        assert not execution.done()
        gate.signal()
        assert execution.result(LIMIT_S)[0].tolist() == [21, 42]


def test_reusable_executions_of_the_steps_are_computed_in_turn(prepare: Prepare) -> None:
    model = prepare(linear_plan(two_adds(), [0], [1]))
    with model.create_reusable_execution() as execution:
        for k in range(3):
            assert execution.compute(A + k, B)[0].tolist() == (A + k + 2 * B).tolist()
        with execution.compute_fenced(A, B) as fenced:
            assert fenced.result(LIMIT_S)[0].tolist() == (A + 2 * B).tolist()
        assert execution.compute(A, A)[0].tolist() == (3 * A).tolist()
    with model.create_execution() as once:
        assert once.compute(A, B)[0].tolist() == (A + 2 * B).tolist()
        with pytest.raises(nnfmq.BadState, match="not reusable"):
            once.compute(A, B)


@pytest.mark.parametrize("devices", [("reference", "reference"), ("reference", FAILING), (FAILING, "reference")])
def test_tasks_of_asyncio_execute_in_every_mode(runtime: Runtime, devices: tuple[str, str]) -> None:
    model = runtime.prepare(linear_plan(two_adds(), [0], [1]), devices=devices)

    async def execute_all() -> list[Any]:
        with model.burst() as burst, model.execute_fenced(A, B) as fenced:
            return [await model.execute_async(A, B), await fenced, await burst.execute_async(A, B),
                    await burst.execute_async(out=burst.outputs)]  # fmt: skip

    for (result,) in asyncio.run(execute_all()):
        assert result.tolist() == (A + 2 * B).tolist()


def test_a_task_of_asyncio_executes_a_burst_with_a_loop(runtime: Runtime) -> None:
    model = runtime.prepare(control_flow_plan(counting()))
    total, x = np.array([1, 2], np.float32), np.array([10, 20], np.float32)

    async def execute() -> list[Any]:
        with model.burst() as burst:
            return [await burst.execute_async(total, np.array([n], np.int32), x) for n in (3, 0)]

    assert [result.tolist() for (result,) in asyncio.run(execute())] == [[31, 62], [1, 2]]


class MayBlock:
    """Lets each wait block, and counts those that ended with the result."""

    ended = 0

    async def begin(self) -> int:
        return time.monotonic_ns() + int(LIMIT_S * 1e9)

    def end(self, has_result: bool) -> None:
        self.ended += has_result


def test_BUR_4_the_wait_for_each_step_may_block_the_event_loop(runtime: Runtime) -> None:
    allowed = MayBlock()
    with runtime.prepare(linear_plan(two_adds(), [0], [1])).burst() as burst:
        assert asyncio.run(burst.execute_async(A, B, blocking=allowed))[0].tolist() == (A + 2 * B).tolist()
    assert allowed.ended == 2


def test_a_cancelled_task_does_not_mix_up_results(runtime: Runtime) -> None:
    model = runtime.prepare(linear_plan(two_adds(), [0], [1]))
    with Process(runtime.clients[1].worker_pid) as worker, model.burst() as burst:

        async def execute() -> Any:
            with worker.stopped():
                task = asyncio.create_task(burst.execute_async(A + 7, B))
                while not burst.peer._bursts[1].channel.in_flight:  # type: ignore[union-attr]
                    await asyncio.sleep(0)
                with pytest.raises(nnfmq.BadState):
                    await burst.execute_async(A, B)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            return await burst.execute_async(A, B)

        for _ in range(2):
            assert asyncio.run(execute())[0].tolist() == (A + 2 * B).tolist()
        assert burst.execute(A, B)[0].tolist() == (A + 2 * B).tolist()
