"""Bursts and execution objects of models whose shapes are not all known, against a real session in the same process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from support import models
from support.executors import LIMIT_S, Held, until

from nnfmq.base.memory import Memory
from nnfmq.client.burst.burst import Burst
from nnfmq.client.burst.channel import BurstChannel
from nnfmq.client.connection.client import Client
from nnfmq.client.connection.connection import Connection
from nnfmq.client.connection.device import Device
from nnfmq.client.model.array_layouts import FIRST_OUTPUT_BYTES, LAYOUTS_KEPT
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.driver.execution.prepared_model import DriverPreparedModel
from nnfmq.driver.session.session import Session
from nnfmq.hal.errors import (
    BadState,
    InvalidArgument,
    MissedDeadline,
    OutputInsufficientSize,
    ResourceExhaustedTransient,
)
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.types import DataLocation, Request, RequestArgument
from nnfmq.importers.loaded_model import LoadedModel
from nnfmq.serialize.packets import RequestPacket

Start = Callable[..., Future[Any]]
Real = tuple[Connection, Session]
FIRST = FIRST_OUTPUT_BYTES // 4  # floats that an output of unknown size has space for at first
SIZES = [2, 3, 2, FIRST + 1, 1, 5 * FIRST, 3]


@pytest.fixture
def adding(device: Device) -> PreparedModel:
    """Adds two tensors of any number of rows of four floats."""
    return device.prepare(models.add_model((0, 4)))


@pytest.fixture
def tiling(device: Device) -> PreparedModel:
    """Repeats floats as often as an integer says."""
    return device.prepare(models.tile_model())


@pytest.fixture
def counting(client: Client) -> PreparedModel:
    """Returns a state of four floats as often as an integer says; each execution adds one to it."""
    state = TensorInfo("state", (4,), "float32")
    model = LoadedModel(
        models.counting_tile_model(),
        (TensorInfo("times", (1,), "int32"),),
        (TensorInfo("repeated", (0,), "float32"),),
        states=(StateInfo(state),),
    )
    return client.device("reference").prepare(model)


@pytest.fixture
def packets(real: Real, monkeypatch: pytest.MonkeyPatch) -> list[RequestPacket]:
    """The requests that the driver's bursts have bound."""
    from nnfmq.driver.execution.burst import CachingBurstExecutor

    bound: list[RequestPacket] = []
    bind = CachingBurstExecutor.bind

    def record(self: CachingBurstExecutor, request: RequestPacket) -> Any:
        bound.append(request)
        return bind(self, request)

    monkeypatch.setattr(CachingBurstExecutor, "bind", record)
    return bound


def rows(count: int) -> np.ndarray[Any, Any]:
    return np.arange(count * 4, dtype=np.float32).reshape(count, 4)


def times(count: int) -> np.ndarray[Any, Any]:
    return np.array([count], np.int32)


# ------------------------------------------------------------------------------------------------ shapes of inputs


def test_a_burst_executes_inputs_of_any_size_one_after_the_other(adding: PreparedModel) -> None:
    with adding.burst() as burst:
        for count in SIZES:
            (found,) = burst.execute(rows(count), rows(count))
            np.testing.assert_array_equal(found, rows(count) * 2)
            assert burst.execute()[0].tolist() == found.tolist()


def test_equal_shapes_send_the_same_packet_and_other_shapes_another(
    adding: PreparedModel, packets: list[RequestPacket]
) -> None:
    with adding.burst() as burst:
        for count in (2, 2, 2):
            burst.execute(rows(count), rows(count))
        assert len(packets) == 1
        burst.execute(rows(1), rows(1))
    assert [[argument.dimensions for argument in packet.inputs] for packet in packets] == [[(2, 4)] * 2, [(1, 4)] * 2]
    assert packets[0].slots == packets[1].slots


def test_alternating_shapes_use_the_same_memory_and_a_few_layouts_are_kept(adding: PreparedModel, real: Real) -> None:
    with adding.burst() as burst:
        burst.execute(rows(9), rows(9))
        server = next(iter(real[1].bursts.values())).server
        version = server._executor.version  # type: ignore[attr-defined]
        kept = set()
        for count in [1, 2, 3, 1, 2, 3]:
            burst.execute(rows(count), rows(count))
            kept.add(id(burst._arrays.prepared[0]))  # type: ignore[union-attr]
        assert server._executor.version == version  # type: ignore[attr-defined]
        assert len(kept) <= 3 + 3  # an object more where the driver reported the outputs' shapes first
        for count in range(1, 9):
            burst.execute(rows(count), rows(count))
        assert len(burst._layouts._layouts) == LAYOUTS_KEPT  # type: ignore[attr-defined]


def test_the_driver_binds_alternating_shapes_once(adding: PreparedModel, packets: list[RequestPacket]) -> None:
    with adding.burst() as burst:
        for count in [4, 1, 2, 3] * 3:
            assert burst.execute(rows(count), rows(count))[0].tolist() == (rows(count) * 2).tolist()
        assert len(packets) == 4
        for count in (1000, 4, 1000):
            assert burst.execute(rows(count), rows(count))[0].shape == (count, 4)
    assert len(packets) == 4 + 3  # they are more than the memory had space for: bound again, and once with more space


def test_memory_that_is_too_small_is_replaced_and_the_driver_unmaps_it(adding: PreparedModel, real: Real) -> None:
    with adding.burst() as burst:
        burst.execute(rows(2), rows(2))
        server = next(iter(real[1].bursts.values())).server
        memories = server._executor._memories  # type: ignore[attr-defined]
        before = dict(memories)
        for count in (1000, 5000):
            burst.execute(rows(count), rows(count))
        until(lambda: len(memories) == 2)
        assert not set(before) & set(memories)
        assert all(memory.closed for memory in before.values())
        until(lambda: all(each.version == server._executor.version for each in server._responder.kept.values()))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (rows(2)[:0], r"input 'input 0' has shape any x 4; the given array has 0x4: to the HAL 0 .*N-RQX-7"),
        (rows(2)[:, :3], "input 'input 0' has shape any x 4; the given array has 2x3"),
        (rows(2).astype(np.complex64), "input 'input 0' holds float32"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_and_the_burst_stays_usable(
    given: Any, said: str, adding: PreparedModel
) -> None:
    with adding.burst() as burst, adding.create_reusable_execution() as execution:
        for call in (burst.execute, execution.compute, adding.execute, adding.execute_async):
            with pytest.raises(InvalidArgument, match=said):
                call(given, rows(2))  # type: ignore[operator]
        assert burst.execute(rows(3), rows(3))[0].tolist() == (rows(3) * 2).tolist()
        with pytest.raises(InvalidArgument, match=said):
            burst.execute(given, rows(2))
        assert burst.execute(rows(3), rows(3))[0].tolist() == (rows(3) * 2).tolist()


def test_a_scalar_for_an_input_of_unknown_rank_is_refused_by_name(device: Device) -> None:
    model = device.prepare(models.relu_model(()))
    with model.burst() as burst:
        with pytest.raises(InvalidArgument, match=r"'input 0' has an unknown rank; .* is a scalar.*N-RQX-7"):
            burst.execute(np.float32(1))
        for shape in ((3,), (2, 2), (1, 2, 3)):
            assert burst.execute(-np.ones(shape, np.float32))[0].tolist() == np.zeros(shape).tolist()


def test_the_arrays_of_a_burst_exist_once_an_execution_has_laid_them_out(adding: PreparedModel) -> None:
    with adding.burst() as burst, adding.create_reusable_execution() as execution:
        for each in (burst, execution):
            with pytest.raises(InvalidArgument, match="input 'input 0' has the shape any x 4, and the first execution"):
                _ = each.inputs
            with pytest.raises(InvalidArgument, match="`outputs` has no arrays yet"):
                _ = each.outputs[0]
        with pytest.raises(InvalidArgument, match="never written: write them, or pass 2 arrays"):
            burst.execute()
        assert burst.execute(rows(2), rows(2), out=burst.outputs) is burst.outputs
        assert burst.outputs[0].tolist() == (rows(2) * 2).tolist()
        before, burst.inputs[1][...] = burst.outputs, 1
        assert burst.execute(out=burst.outputs) is before
        assert before[0].tolist() == (rows(2) + 1).tolist()
        assert burst.execute(rows(3), rows(3), out=burst.outputs) is burst.outputs is not before
        out = np.zeros((3, 4), np.float32)
        assert burst.execute(out=[out])[0] is out
        assert out.tolist() == (rows(3) * 2).tolist()
        with pytest.raises(InvalidArgument, match=r"output 0 has shape \(2, 4\), `out` has \(3, 4\)"):
            burst.execute(rows(2), rows(2), out=[out])


def test_a_batch_dimension_of_one_may_be_missing(adding: PreparedModel) -> None:
    with adding.burst() as burst:
        assert burst.execute(rows(1)[0], rows(1)[0].tolist())[0].tolist() == (rows(1) * 2).tolist()


# ------------------------------------------------------------------------------------------------ sizes of outputs


def test_an_output_larger_than_its_memory_is_executed_twice_once(
    tiling: PreparedModel, packets: list[RequestPacket]
) -> None:
    given = np.arange(8, dtype=np.float32)
    with tiling.burst() as burst:
        for count in (FIRST // 4, FIRST // 4, 1, 3):
            assert burst.execute(given, times(count))[0].tolist() == given.tolist() * count
    assert len(packets) == 2  # the first execution, and the repeated one with more space; all others are equal
    assert [packet.outputs[0].location.length for packet in packets] == [FIRST * 4, FIRST * 8]


def test_the_space_of_an_output_is_remembered_for_other_inputs(
    tiling: PreparedModel, packets: list[RequestPacket]
) -> None:
    with tiling.burst() as burst:
        burst.execute(np.zeros(4, np.float32), times(FIRST))
        packets.clear()
        assert burst.execute(np.ones(8, np.float32), times(FIRST // 2))[0].shape == (4 * FIRST,)
    assert len(packets) == 1


def test_a_repeated_execution_advances_the_states_once(counting: PreparedModel) -> None:
    with counting.burst() as burst, counting.create_reusable_execution() as execution:
        for execute in (burst.execute, execution.compute):
            for number, count in enumerate((1, FIRST, 2, 3 * FIRST)):
                (found,) = execute(times(count))  # type: ignore[operator]
                assert found.tolist() == [float(number)] * 4 * count
        assert burst.state[0].tolist() == execution.state[0].tolist() == [4] * 4
        burst.state = [np.full(4, 7, np.float32)]
        assert burst.execute(times(FIRST * 9))[0][0] == 7
        burst.reset_state()
        assert burst.execute(times(1))[0].tolist() == [0] * 4
    assert burst.state[0].tolist() == [1] * 4


def test_states_follow_to_the_layout_of_other_shapes(client: Client) -> None:
    state = TensorInfo("state", (4,), "float32")
    model = LoadedModel(
        models.add_and_count_model(),
        (TensorInfo("x", (0,), "float32"),),
        (TensorInfo("y", (0,), "float32"),),
        states=(StateInfo(state),),
    )
    with client.device("reference").prepare(model).burst() as burst:
        for number, count in enumerate((1, 2, 5000, 1, 2)):
            assert burst.execute(np.zeros(count, np.float32))[0].tolist() == [0] * count
            assert burst.state[0].tolist() == [number + 1] * 4


def test_an_output_that_grows_again_meanwhile_is_reported_and_the_next_call_continues(
    tiling: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiling.burst() as burst:
        source = np.ones(4, np.float32)
        burst.execute(source, times(1))
        repeat = type(burst)._repeat

        def with_more(self: Any, *arguments: Any) -> Any:
            self._arrays.inputs[1][...] = 3 * FIRST
            return repeat(self, *arguments)

        monkeypatch.setattr(type(burst), "_repeat", with_more)
        with pytest.raises(OutputInsufficientSize):
            burst.execute(source, times(FIRST))
        monkeypatch.undo()
        assert burst.execute(source, times(3 * FIRST))[0].shape == (12 * FIRST,)


@pytest.mark.parametrize("failing", ["nnfmq-inputs", "nnfmq-outputs"])
def test_a_memory_that_cannot_be_had_is_an_error_and_the_burst_stays_usable(
    failing: str, adding: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(size_bytes: int, label: str, **named: Any) -> Memory:
        if label == failing:
            raise ResourceExhaustedTransient("no memory")
        return create(size_bytes, label, **named)

    create = Memory.create
    with adding.burst() as burst:
        burst.execute(rows(2), rows(2))
        with monkeypatch.context() as patch:
            patch.setattr(Memory, "create", fail)
            with pytest.raises(ResourceExhaustedTransient):
                burst.execute(rows(5000), rows(5000))
        assert burst.execute(rows(2), rows(2))[0].tolist() == (rows(2) * 2).tolist()
        assert burst.execute(rows(5000), rows(5000))[0].shape == (5000, 4)


def test_a_packet_that_cannot_be_sent_is_executed_over_the_control_channel(
    tiling: PreparedModel, counting: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def in_a_task(burst: Burst) -> None:
        assert (await burst.execute_async(np.ones(3, np.float32), times(3 * FIRST)))[0].shape == (9 * FIRST,)

    async def not_sent(*_arguments: Any) -> None:
        pass

    monkeypatch.setattr(BurstChannel, "exchange", lambda *_arguments: None)
    monkeypatch.setattr(BurstChannel, "exchange_in_task", not_sent)
    with tiling.burst() as burst, counting.burst() as counter:
        for count in (2, 2 * FIRST, 1):
            found = burst.execute(np.ones(2, np.float32), times(count), out=burst.outputs)
            assert found is burst.outputs
            assert found[0].tolist() == [1] * 2 * count
        asyncio.run(in_a_task(burst))
        assert [counter.execute(times(count))[0][0] for count in (1, FIRST, 2)] == [0, 1, 2]
        monkeypatch.undo()
        assert burst.execute(np.ones(3, np.float32), times(2))[0].tolist() == [1] * 6
        assert counter.execute(times(2))[0].tolist() == [3] * 8


def test_an_output_without_elements_is_returned(tiling: PreparedModel) -> None:
    with tiling.burst() as burst:
        assert burst.execute(np.ones(4, np.float32), times(0))[0].shape == (0,)
        assert burst.execute(np.ones(4, np.float32), times(2))[0].tolist() == [1] * 8


# ------------------------------------------------------------------------------------------------ other forms


def test_a_task_executes_inputs_and_outputs_of_any_size(adding: PreparedModel, tiling: PreparedModel) -> None:
    async def execute() -> None:
        with adding.burst() as burst, tiling.burst() as tiles:
            for count in SIZES:
                (found,) = await burst.execute_async(rows(count), rows(count), timeout=LIMIT_S)
                np.testing.assert_array_equal(found, rows(count) * 2)
                assert (await tiles.execute_async(np.ones(2, np.float32), times(count)))[0].shape == (2 * count,)

    asyncio.run(execute())


def test_the_bursts_of_a_pool_lay_out_their_own_memory(adding: PreparedModel, start: Start) -> None:
    with adding.burst_pool(2) as pool:
        started = {count: start(pool.execute, rows(count), rows(count)) for count in SIZES}
        for count, future in started.items():
            np.testing.assert_array_equal(future.result(LIMIT_S)[0], rows(count) * 2)


@pytest.mark.parametrize("interface", ["HIDL 1.2", "HIDL 1.3", "AIDL v1", "AIDL v4"])
def test_every_form_of_execution_binds_shapes_for_each_request(interface: str, speaking: Callable[[str], Real]) -> None:
    device = Client(speaking(interface)[0], None).device("reference")
    adding, tiling = device.prepare(models.add_model((0, 4))), device.prepare(models.tile_model())
    for count in (2, FIRST):
        given, wanted = (rows(count), rows(count)), (rows(count) * 2).tolist()
        assert adding.execute(*given)[0].tolist() == wanted
        assert adding.execute_async(*given).result(LIMIT_S)[0].tolist() == wanted
        with adding.create_execution() as once, tiling.create_execution() as tile:
            assert once.compute(*given)[0].tolist() == wanted
            assert tile.compute(np.ones(2, np.float32), times(count))[0].shape == (2 * count,)
    with adding.create_reusable_execution() as execution:
        for count in SIZES:
            assert execution.compute(rows(count), rows(count))[0].tolist() == (rows(count) * 2).tolist()


def test_BUR_19_an_AIDL_burst_takes_the_shapes_of_each_request(adding: PreparedModel, resources: ExitStack) -> None:
    with adding.aidl_burst() as burst:
        source, sink = (resources.enter_context(Memory.create(size)) for size in (64, 32))
        source.view[:64] = np.tile(rows(2), 2).tobytes()
        places = [RequestArgument(False, DataLocation(0, offset, 32), (2, 4)) for offset in (0, 32)]
        request = Request(tuple(places), (RequestArgument(False, DataLocation(1, 0, 32), (2, 4)),), (source, sink))
        assert burst.execute_synchronously(request).shapes[0].dimensions == (2, 4)


def test_FEN_7_a_fenced_execution_needs_outputs_of_known_shape_but_no_inputs(device: Device) -> None:
    unknown, known = device.prepare(models.add_model((0, 4))), device.prepare(models.reduced_model())
    with known.create_reusable_execution() as execution:
        for count in (2, 5, 2):
            with execution.compute_fenced(rows(count)) as launched, known.execute_fenced(rows(count)) as other:
                assert launched.result(LIMIT_S)[0].tolist() == other.result(LIMIT_S)[0].tolist() == [rows(count).sum()]
    with unknown.create_reusable_execution() as execution:
        for launch in (execution.compute_fenced, unknown.execute_fenced):
            with pytest.raises(InvalidArgument, match="N-RQX-8"):
                launch(rows(2), rows(2))  # type: ignore[operator]
        assert execution.compute(rows(2), rows(2))[0].tolist() == (rows(2) * 2).tolist()


def test_the_time_for_binding_counts_from_the_computation_that_needs_it(
    adding: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines: list[int] = []
    bind = PreparedModel._bind

    def record(self: PreparedModel, request: Request, config: Any, deadline_ns: int, is_reusable: bool) -> Any:
        deadlines.append(deadline_ns)
        return bind(self, request, config, deadline_ns, is_reusable)

    monkeypatch.setattr(PreparedModel, "_bind", record)
    with adding.create_reusable_execution(timeout=60) as execution:
        for count in (1, 2, 1, 3):
            execution.compute(rows(count), rows(count))
    assert len(set(deadlines)) == 3 == len(deadlines)
    assert deadlines == sorted(deadlines)


# ------------------------------------------------------------------------------------------------ abandoned executions


@pytest.fixture
def held(adding: PreparedModel, real: Real) -> Iterator[Held]:
    """Makes the driver's executions wait."""
    model = models.add_model((0, 4))
    held = Held(model)
    real[1].models.insert(DriverPreparedModel(model, held), adding.model_id)  # type: ignore[arg-type]
    yield held
    held.go.set()


def test_memory_is_not_replaced_while_an_abandoned_execution_uses_it(held: Held, adding: PreparedModel) -> None:
    with adding.burst() as burst:
        held.go.set()
        burst.execute(rows(2), rows(2))
        held.go.clear()
        with pytest.raises(MissedDeadline):
            burst.execute(rows(3), rows(3), timeout=0.05)
        before = burst._arrays
        with pytest.raises(MissedDeadline):  # waits for the one that was abandoned
            burst.execute(rows(5000), rows(5000), timeout=0.05)
        assert burst._arrays is before
        held.go.set()
        assert burst.execute(rows(5000), rows(5000))[0].tolist() == (rows(5000) * 2).tolist()


def test_a_burst_that_another_thread_closes_keeps_no_memory(held: Held, adding: PreparedModel, start: Start) -> None:
    burst: Burst = adding.burst()
    executing = start(burst.execute, rows(2), rows(2))
    assert held.begun.wait(LIMIT_S)
    closing = start(burst.close)
    held.go.set()
    closing.result(LIMIT_S)
    executing.exception(LIMIT_S)  # if there is one: whether the result or the end of the burst is first
    assert burst._arrays is None
    with pytest.raises(BadState):
        burst.execute(rows(2), rows(2))
