"""A model's own burst: which calls of `execute` and `execute_async` it takes, and that these remain what they are."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.code_steps import made_with_an_interrupt_at_every_line
from support.drivers import until
from support.executors import LIMIT_S
from support.models import accumulating_model, add_model, reduced_model, tile_model
from support.small_models import one_operation

from nnfmq.base.memory import Memory
from nnfmq.client.burst import own
from nnfmq.client.burst.channel import BurstChannel
from nnfmq.client.connection import garbage
from nnfmq.client.connection.client import Client
from nnfmq.client.connection.connection import Connection
from nnfmq.client.connection.device import Device
from nnfmq.client.model import prepared_model
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.driver.session.session import Session
from nnfmq.hal.errors import BadState, InvalidArgument
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.types import HalExecutionMode, Operand, OperandType, OperationType
from nnfmq.importers.loaded_model import LoadedModel

ONE, TWO = np.full(4, 1, np.float32), np.full(4, 2, np.float32)
THREE = np.full(4, 3, np.float32)
EACH = 40


@pytest.fixture(autouse=True)
def _calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls be in quick succession, and no burst be idle, however slow the machine is."""
    monkeypatch.setattr(prepared_model, "_QUICK_NS", 10**10)  # less than the time since the machine started
    monkeypatch.setattr(own, "_IDLE_NS", 10**12)


@pytest.fixture(autouse=True)
def packets(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The packets that clients of this process have sent, each of which had a reply."""
    sent: list[bytes] = []
    exchange = BurstChannel.exchange

    def record(self: BurstChannel, packet: bytes, deadline_ns: int | None, begin_ns: int) -> bytes | None:
        reply = exchange(self, packet, deadline_ns, begin_ns)
        if reply is not None:
            sent.append(packet)
        return reply

    monkeypatch.setattr(BurstChannel, "exchange", record)
    return sent


def with_burst(packets: list[bytes], model: PreparedModel, *inputs: np.ndarray[Any, Any]) -> PreparedModel:
    """Return the model, which executes over a burst of its own now."""
    packets.clear()
    until(lambda: bool(model.execute(*inputs) and packets), "the model has a burst")
    return model


@contextmanager
def only(packets: list[bytes], expected: int) -> Iterator[None]:
    """Require that clients exchange this many packets meanwhile."""
    packets.clear()
    yield
    assert len(packets) == expected


@pytest.fixture
def session(real: tuple[Connection, Session]) -> Session:
    return real[1]


@pytest.fixture
def quick(packets: list[bytes], adding: PreparedModel) -> PreparedModel:
    return with_burst(packets, adding, ONE, TWO)


def test_two_calls_make_no_burst_and_later_ones_use_a_burst(
    session: Session, packets: list[bytes], adding: PreparedModel
) -> None:
    for _ in range(2):
        adding.execute(ONE, TWO)
    assert not list(session.bursts.values())
    with_burst(packets, adding, ONE, TWO)
    with only(packets, EACH):
        for number in range(EACH):
            assert np.array_equal(adding.execute(ONE, ONE * number)[0], ONE + number)


def test_queues_are_as_large_as_the_packets_of_a_model_of_many_outputs(packets: list[bytes], device: Device) -> None:
    x, y = Operand(OperandType.TENSOR_FLOAT32, (600, 2)), Operand(OperandType.TENSOR_FLOAT32, (1, 2))
    model = device.prepare(one_operation(OperationType.SPLIT, [x, 0, 600], *[y] * 600))
    rows = np.arange(1200, dtype=np.float32).reshape(600, 2)
    with_burst(packets, model, rows)
    with model.burst() as burst:
        for found in (model.execute(rows), burst.execute(rows)):
            assert np.array_equal(np.concatenate(found), rows)


def test_an_interrupt_while_it_is_made_leaves_nothing_open(
    adding: PreparedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Some of these bursts are dropped, and the thread that closes them logs what fails."""
    make = lambda: own.OwnBurst.start(adding.handle, [ONE, TWO])  # noqa: E731
    assert made_with_an_interrupt_at_every_line(make, own) > 20
    until(lambda: not garbage._Current.process.waiting(), "all is closed")
    assert caplog.messages == []


def test_calls_far_apart_make_no_burst(
    session: Session, adding: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_model, "_QUICK_NS", 0)
    for _ in range(5):
        adding.execute(ONE, TWO)
    assert not list(session.bursts.values())


def test_results_are_new_arrays_with_names_or_those_of_out(packets: list[bytes], quick: PreparedModel) -> None:
    first, out = quick.execute(ONE, TWO), np.empty(4, np.float32)
    with only(packets, 2):
        (same,) = quick.execute(ONE, ONE, out=[out])
        quick.execute(TWO, TWO)
    assert same is out
    assert out[0] == 2
    assert np.array_equal(first[0], THREE)
    assert first.names == quick.execute(ONE, TWO, timeout=LIMIT_S, measure=True).names


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.execute(ONE, TWO, measure=True),
        lambda model: model.execute(ONE, TWO, loop_timeout=1),
        lambda model: model.execute_async(ONE, TWO, measure=True).result(LIMIT_S),
    ],
    ids=["times", "a loop timeout", "times of an asynchronous execution"],
)
def test_what_a_packet_cannot_carry_exactly_is_a_message(
    packets: list[bytes], quick: PreparedModel, call: Callable[[PreparedModel], Any]
) -> None:
    with only(packets, 0):
        assert np.array_equal(call(quick)[0], THREE)
    with only(packets, 1):
        quick.execute(ONE, TWO)


def test_wrong_arguments_raise_and_leave_the_burst(packets: list[bytes], quick: PreparedModel) -> None:
    with pytest.raises(InvalidArgument, match="2 inputs"):
        quick.execute(ONE)
    with pytest.raises(InvalidArgument, match="shape"):
        quick.execute(ONE, np.zeros(5, np.float32))
    with only(packets, 1):
        quick.execute(ONE, TWO)


def test_asynchronous_executions_use_the_burst_one_at_a_time_and_messages_beside_it(
    packets: list[bytes], quick: PreparedModel
) -> None:
    with only(packets, EACH):
        for number in range(EACH):
            (result,) = quick.execute_async(ONE, ONE * number).result(LIMIT_S)
            assert np.array_equal(result, ONE + number)
    pending = [quick.execute_async(ONE, ONE * number) for number in range(EACH)]
    for number, execution in enumerate(pending):
        assert np.array_equal(execution.result(LIMIT_S)[0], ONE + number)


def test_concurrent_threads_get_their_own_results(packets: list[bytes], quick: PreparedModel) -> None:
    def execute(number: int) -> bool:
        form = quick.execute if number % 3 else lambda *inputs: quick.execute_async(*inputs).result(LIMIT_S)
        return all(np.array_equal(form(ONE, ONE * number)[0], ONE + number) for _ in range(EACH))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(execute, range(8)))
    with only(packets, 1):
        quick.execute(ONE, TWO)


def test_QOS_1_a_call_goes_by_priority_while_the_driver_may_have_queued_others(
    packets: list[bytes], quick: PreparedModel
) -> None:
    pending = quick.connection._pending_calls
    others = [(number, None) for number in range(own._QUEUED_CALLS_MIN)]
    pending.update(dict.fromkeys(others, SimpleNamespace()))  # type: ignore[arg-type]
    try:
        with only(packets, 0):
            quick.execute(ONE, TWO)
    finally:
        for other in others:
            del pending[other]  # type: ignore[arg-type]


@pytest.mark.parametrize("end", ["close", "drop", "idle"])
def test_the_burst_ends_with_its_model_or_when_it_is_idle(
    session: Session, packets: list[bytes], device: Device, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    if end == "idle":
        monkeypatch.setattr(own, "_IDLE_NS", 200_000_000)
    model = with_burst(packets, device.prepare(add_model()), ONE, TWO)
    assert len(list(session.bursts.values())) == 1
    if end == "close":
        model.close()
    elif end == "drop":
        del model
        gc.collect()
    until(lambda: not list(session.bursts.values()), "the driver has no burst")
    if end == "idle":
        assert np.array_equal(model.execute(ONE, TWO)[0], THREE)
        with_burst(packets, model, ONE, TWO)
    elif end == "close":
        with pytest.raises(BadState):
            model.execute(ONE, TWO)


def test_closing_the_client_releases_the_burst_of_a_model_that_is_not_closed(
    client: Client, quick: PreparedModel
) -> None:
    client.close()
    (burst,) = quick._own_burst.values()
    assert burst._array_request._input_memory.closed
    with pytest.raises(BadState):
        quick.execute(ONE, TWO)


def test_a_burst_of_the_application_may_take_the_place_of_a_model_s_own(session: Session, quick: PreparedModel) -> None:
    session.bursts._limit._limit = 1
    with quick.burst() as burst:
        assert np.array_equal(burst.execute(ONE, TWO)[0], THREE)
        for _ in range(5):  # refused
            assert np.array_equal(quick.execute(ONE, TWO)[0], THREE)
        assert len(list(session.bursts.values())) == 1


def test_an_interface_version_without_bursts_has_none(speaking: Callable[[str], tuple[Connection, Session]]) -> None:
    connection, session = speaking("HIDL 1.1")
    model = Client(connection, None).device("reference").prepare(add_model())
    for _ in range(5):
        assert np.array_equal(model.execute(ONE, TWO)[0], THREE)
    assert not list(session.bursts.values())


def test_states_advance_once_with_each_call(packets: list[bytes], device: Device) -> None:
    tensors = (TensorInfo("x", (4,), "float32"),), (TensorInfo("sum", (4,), "float32"),)
    states = (StateInfo(TensorInfo("state", (4,), "float32")),)
    model = with_burst(packets, device.prepare(LoadedModel(accumulating_model(), *tensors, states=states)), ONE)
    model.reset_state()
    with only(packets, EACH):
        for number in range(1, EACH + 1):
            assert np.array_equal(model.execute(ONE)[0], ONE * number)
    assert np.array_equal(model.state[0], ONE * EACH)


def test_inputs_of_other_shapes_go_over_the_control_channel(packets: list[bytes], device: Device) -> None:
    rows = np.ones((3, 4), np.float32)
    model = with_burst(packets, device.prepare(reduced_model()), rows)
    with only(packets, 0):
        assert model.execute(rows[:2])[0].tolist() == [8]
    with only(packets, 1):
        assert model.execute(rows)[0].tolist() == [12]


def test_a_model_with_outputs_of_unknown_shape_has_no_burst(session: Session, device: Device) -> None:
    model = device.prepare(tile_model())
    for times in range(1, 8):
        assert model.execute(np.ones(2, np.float32), np.array([times], np.int32))[0].shape == (2 * times,)
    assert not list(session.bursts.values())


def test_observers_see_synchronous_and_asynchronous_executions(
    packets: list[bytes], quick: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[HalExecutionMode] = []
    (burst,) = quick._own_burst.values()
    begin = burst._run.begin
    monkeypatch.setattr(burst._run, "begin", lambda mode, limit: begun.append(mode) or begin(mode, limit))
    with only(packets, 2):
        quick.execute(ONE, TWO)
        quick.execute_async(ONE, TWO).result(LIMIT_S)
    assert begun == [HalExecutionMode.SYNCHRONOUS, HalExecutionMode.ASYNCHRONOUS]


def test_a_memory_of_many_mebibytes_is_not_kept(
    session: Session, adding: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_model, "_OWN_BURST_BYTES_MAX", 47)  # 16 for each of three arrays
    made: list[int] = []
    create = Memory.create
    monkeypatch.setattr(Memory, "create", lambda *args, **named: made.append(1) or create(*args, **named))
    for _ in range(5):
        adding.execute(ONE, TWO)
    assert len(made) == 2 * 5
    assert not list(session.bursts.values())
