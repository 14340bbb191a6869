"""Devices and prepared models as the application uses them, against a real session over a socketpair."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support import models
from support.executors import LIMIT_S, Held, until
from support.protocol import ProtocolPeer

from nnfmq.base.memory import Memory
from nnfmq.client.connection.client import Client
from nnfmq.client.connection.connection import Connection
from nnfmq.client.connection.device import Device
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.driver.execution.prepared_model import DriverPreparedModel
from nnfmq.driver.session.session import Session
from nnfmq.hal.errors import (
    BadState,
    DeadObject,
    DeviceUnavailable,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    ProtocolError,
)
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.timing import NO_TIME, NO_TIMING
from nnfmq.hal.types import DataLocation, DeviceStatus, DeviceType, Model, Request, RequestArgument
from nnfmq.serialize import messages

Start = Callable[..., Future[Any]]
ONE, TEN = np.array([1, 2, 3, 4], np.float32), np.array([10, 20, 30, 40], np.float32)
SUM = [11, 22, 33, 44]


def hold(session: Session, prepared: PreparedModel, model: Model) -> Held:
    """Make the driver's executions of a model wait until they are let go."""
    held = Held(model)
    session.models.insert(DriverPreparedModel(model, held), prepared.model_id)  # type: ignore[arg-type]
    return held


# ------------------------------------------------------------------------------------------------ client, device


def test_a_client_lists_its_driver_s_devices(client: Client) -> None:
    assert client.devices()[0].name == "reference"
    assert client.device("reference").info.name == "reference"


def test_an_unknown_device_is_rejected_with_the_names_of_the_known_ones(client: Client) -> None:
    with pytest.raises(InvalidArgument, match=r"no device 'gpu'; this driver has: compiled, .*reference"):
        client.device("gpu")


def test_a_device_returns_the_operations_that_it_supports(device: Device) -> None:
    assert device.supported_operations(models.add_model()) == [True]
    assert device.supported_operations(models.unsupported_model()) == [False]


def test_the_operations_of_an_invalid_model_are_an_error(device: Device) -> None:
    with pytest.raises(InvalidArgument, match="N-MOD-12"):
        device.supported_operations(models.invalid_model())


class DescribingOnce:
    """A connection to a driver that describes one device, when it is asked first."""

    def __init__(self, connection: Connection, info: messages.DeviceInfo) -> None:
        self._connection = connection
        self._infos = [info]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def exchange(self, message: Any, reply_type: Any, *arguments: Any, **options: Any) -> Any:
        if self._infos:
            return messages.DeviceList(message.call, (self._infos.pop(),))
        return self._connection.exchange(message, reply_type, *arguments, **options)


INFO = messages.DeviceInfo("fake", DeviceType.CPU, "1", 8, DeviceStatus.AVAILABLE, ())


@pytest.mark.parametrize(
    ("changed", "is_lost"),
    [
        ({"version": "2"}, True),
        ({"type": DeviceType.GPU}, True),
        ({"feature_level": 7}, True),
        ({"extensions": (messages.ExtensionData("com.example.more", ()),)}, True),
        ({"name": "other"}, True),
        ({"status": DeviceStatus.BUSY}, False),
    ],
    ids=lambda value: str(*value) if isinstance(value, dict) else "",
)
def test_LIFE_6_a_device_that_differs_after_a_recovery_stays_unavailable(
    changed: dict[str, Any],
    is_lost: bool,
    connection: Connection,
    driver: ProtocolPeer,
    real: tuple[Connection, Session],
    start: Start,
) -> None:
    fresh = SimpleNamespace(_connection=DescribingOnce(real[0], replace(INFO, **changed)), _process=None)
    client = Client(connection, None, lambda _deadline_ns, _wait: fresh, recovers=True)  # type: ignore[arg-type,return-value]
    known = start(client.device, "fake")
    driver.send(messages.DeviceList(driver.receive(messages.ListDevices).call, (INFO,)))
    assert known.result(LIMIT_S).info == INFO
    driver.close()
    until(lambda: not connection.is_open)
    assert client.devices()[0].name == "reference"
    with pytest.raises(DeviceUnavailable if is_lost else InvalidArgument):  # the second driver has no such device
        client.device("fake")
    assert client.device("reference").supported_operations(models.add_model()) == [True]


@pytest.mark.parametrize("model", [None, 7, object(), models.add_model().main])
def test_N_VAL_24_an_object_that_is_no_model_is_rejected_before_it_is_sent(model: Any, device: Device) -> None:
    for ask in (device.supported_operations, device.prepare):
        with pytest.raises(InvalidArgument, match=f"^{type(model).__name__} is not a model: give the path of a"):
            ask(model)


def test_an_invalid_model_is_rejected_with_the_driver_s_message(device: Device) -> None:
    with pytest.raises(InvalidArgument, match="N-MOD-12"):
        device.prepare(models.invalid_model())


def test_a_model_that_the_device_cannot_run_fails_with_the_operation_s_name(device: Device) -> None:
    with pytest.raises(GeneralFailure, match="OEM_OPERATION"):
        device.prepare(models.unsupported_model())


def test_N_QOS_2_a_preparation_with_a_timeout_of_zero_misses_its_deadline(device: Device) -> None:
    with pytest.raises(MissedDeadline):
        device.prepare(models.add_model(), timeout=0)


def test_a_model_whose_pools_cannot_be_sent_is_rejected(device: Device) -> None:
    class Plain:
        size_bytes = 4
        view = memoryview(bytes(4))

    model = models.add_model()
    with pytest.raises(InvalidArgument, match="must be nnfmq memory to be sent, not Plain"):
        device.prepare(Model(model.main, (), model.operand_values, (Plain(),)))


def test_a_prepared_model_describes_its_inputs_and_outputs(adding: PreparedModel) -> None:
    assert adding.inputs == (TensorInfo("input 0", (4,), "float32"), TensorInfo("input 1", (4,), "float32"))
    assert adding.outputs == (TensorInfo("output 0", (4,), "float32"),)


# ------------------------------------------------------------------------------------------------ executing


def test_an_execution_returns_new_arrays(adding: PreparedModel) -> None:
    first, second = adding.execute(ONE, TEN), adding.execute(TEN, TEN)
    assert first[0].tolist() == SUM
    assert second[0].tolist() == [20, 40, 60, 80]
    assert first[0].dtype == np.float32


def test_an_execution_accepts_lists_and_wider_floats(adding: PreparedModel) -> None:
    assert adding.execute([1, 2, 3, 4], TEN.astype(np.float64))[0].tolist() == SUM


def test_an_execution_fills_the_arrays_that_it_is_given(adding: PreparedModel) -> None:
    out = np.zeros(4, np.float32)
    assert adding.execute(ONE, TEN, out=[out])[0] is out
    assert out.tolist() == SUM


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((ONE,), r"2 inputs \('input 0', 'input 1'\); 1 was given"),
        ((ONE, TEN[:3]), "input 'input 1' has shape 4; the given array has 3"),
        ((ONE, np.zeros(4, np.complex64)), "input 'input 1' holds float32; the given array is complex64"),
    ],
)
def test_arrays_that_do_not_fit_are_rejected(given: tuple[Any, ...], said: str, adding: PreparedModel) -> None:
    with pytest.raises(InvalidArgument, match=said):
        adding.execute(*given)


def test_SHP_5_an_output_of_unknown_size_is_returned_whole(device: Device) -> None:
    model = device.prepare(models.unsized_relu_model((4,)))
    assert model.outputs[0].shape == (0,)
    assert model.execute(np.array([-1, 2, -3, 4], np.float32))[0].tolist() == [0, 2, 0, 4]


def test_TIM_4_a_measured_execution_has_times(adding: PreparedModel) -> None:
    adding.execute(ONE, TEN, measure=True)
    assert 0 < adding.last_timing.time_on_device_ns <= adding.last_timing.time_in_driver_ns
    adding.execute(ONE, TEN)
    assert adding.last_timing.time_on_device_ns == NO_TIME


def test_QOS_2_an_execution_with_a_timeout_of_zero_misses_its_deadline(adding: PreparedModel) -> None:
    with pytest.raises(MissedDeadline):
        adding.execute(ONE, TEN, timeout=0)
    assert adding.execute(ONE, TEN)[0].tolist() == SUM


def test_EXE_8_many_threads_may_execute_concurrently(adding: PreparedModel, start: Start) -> None:
    futures = [start(adding.execute, ONE * number, TEN) for number in range(50)]
    for number, future in enumerate(futures):
        assert future.result(LIMIT_S)[0].tolist() == (ONE * number + TEN).tolist()


def test_the_exit_of_the_driver_during_an_execution_raises_dead_object(
    adding: PreparedModel, real: tuple[Connection, Session], start: Start
) -> None:
    held = hold(real[1], adding, models.add_model())
    waiting = start(adding.execute, ONE, TEN)
    assert held.begun.wait(LIMIT_S)
    real[1].stop()
    assert isinstance(waiting.exception(LIMIT_S), DeadObject)
    held.go.set()


# ------------------------------------------------------------------------------------------------ lies

KNOWN, OPEN = TensorInfo("known", (2,), "float32"), TensorInfo("open", (0,), "float32")
GIVEN = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("output", "status", "stated"),
    [
        (KNOWN, ErrorStatus.NONE, [(3,)]),
        (KNOWN, ErrorStatus.NONE, [(1,)]),
        (KNOWN, ErrorStatus.NONE, [(2,), (2,)]),
        (KNOWN, ErrorStatus.NONE, [(2, 1)]),
        (OPEN, ErrorStatus.NONE, [(1000,)]),
        (OPEN, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, []),
        (OPEN, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, [(7, 7)]),
        (OPEN, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, [(2**32 - 1,)]),
        (TensorInfo("any", (), "float32"), ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, [(2**31, 2**31, 4)]),
        (OPEN, ErrorStatus.NONE, []),
    ],
)
def test_VAL_7_a_driver_that_states_impossible_shapes_breaks_the_protocol(
    output: TensorInfo,
    status: ErrorStatus,
    stated: list[tuple[int, ...]],
    connection: Connection,
    driver: ProtocolPeer,
    start: Start,
) -> None:
    model = PreparedModel(connection, 1, (KNOWN,), (output,))
    running = start(model.execute, GIVEN)
    call = driver.receive(messages.Execute).call
    shapes = tuple(messages.ShapeData(shape, status is ErrorStatus.NONE) for shape in stated)
    driver.send(messages.Executed(call, status, "", shapes))
    assert isinstance(running.exception(LIMIT_S), ProtocolError)


def test_VAL_7_a_driver_that_states_impossible_times_breaks_the_protocol(
    connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    running = start(PreparedModel(connection, 1, (KNOWN,), (KNOWN,)).execute, GIVEN, measure=True)
    call = driver.receive(messages.Execute).call
    driver.send(messages.Executed(call, ErrorStatus.NONE, "", (), 5, 4))

    assert isinstance(running.exception(LIMIT_S), ProtocolError)


def test_VAL_7_times_that_were_not_requested_violate_the_protocol(
    connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    running = start(PreparedModel(connection, 1, (KNOWN,), (KNOWN,)).execute, GIVEN)
    driver.send(messages.Executed(driver.receive(messages.Execute).call, ErrorStatus.NONE, "", (), 1, 2))

    assert isinstance(running.exception(LIMIT_S), ProtocolError)


def test_VAL_7_shapes_and_times_of_an_error_reply_are_ignored(
    connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    model = PreparedModel(connection, 1, (KNOWN,), (KNOWN,))
    running = start(model.execute, GIVEN)
    shapes = (messages.ShapeData((9, 9), True),) * 2
    driver.send(
        messages.Executed(driver.receive(messages.Execute).call, ErrorStatus.GENERAL_FAILURE, "broken", shapes, 9, 3)
    )

    error = running.exception(LIMIT_S)
    assert (type(error), str(error), model.last_timing) == (GeneralFailure, "broken", NO_TIMING)


def test_VAL_7_the_shapes_of_a_request_s_result_are_validated_against_the_request(
    connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    output = RequestArgument(location=DataLocation(0, 0, 8), dimensions=(2,))
    with Memory.create(16) as pool:
        request = Request((), (output,), (pool,))
        running = start(PreparedModel(connection, 1, (), (OPEN,)).execute_request, request)
        call = driver.receive(messages.Execute).call
        driver.send(messages.Executed(call, ErrorStatus.NONE, "", (messages.ShapeData((1,), True),)))

        assert isinstance(running.exception(LIMIT_S), ProtocolError)


def test_VAL_7_a_status_that_no_driver_can_have_ends_the_connection(
    connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    running = start(PreparedModel(connection, 1, (KNOWN,), (KNOWN,)).execute, GIVEN)
    driver.send(messages.Executed(driver.receive(messages.Execute).call, ErrorStatus.DEAD_OBJECT, "I am dead"))

    error = running.exception(LIMIT_S)
    assert isinstance(error, DeadObject)
    assert "closed: the driver replied with the status DEAD_OBJECT" in str(error)


def test_VAL_7_a_reply_for_another_number_of_operations_violates_the_protocol(
    connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    model = models.add_model()
    info = messages.DeviceInfo("fake", DeviceType.CPU, "1", 8, DeviceStatus.AVAILABLE, ())
    device = Device(info, connection)
    running = start(device.supported_operations, model)
    driver.send(messages.SupportedOperations(driver.receive(messages.GetSupportedOperations).call, (True, True)))

    assert isinstance(running.exception(LIMIT_S), ProtocolError)


def test_an_output_without_elements_is_a_valid_result(
    connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    running = start(PreparedModel(connection, 1, (KNOWN,), (OPEN,)).execute, GIVEN)
    call = driver.receive(messages.Execute).call
    driver.send(messages.Executed(call, ErrorStatus.NONE, "", (messages.ShapeData((0,), True),)))
    assert running.result(LIMIT_S)[0].shape == (0,)


# ------------------------------------------------------------------------------------------------ the end


def test_a_closed_model_is_released_in_the_driver_and_cannot_be_used(
    adding: PreparedModel, real: tuple[Connection, Session]
) -> None:
    adding.close()
    adding.close()
    assert real[1].models.values() == []
    with pytest.raises(InvalidArgument, match="this prepared model is closed"):
        adding.execute(ONE, TEN)
    with pytest.raises(InvalidArgument, match="this prepared model is closed"):
        adding.burst()


def test_a_model_of_a_closed_client_can_still_be_closed(adding: PreparedModel, client: Client) -> None:
    client.close()
    with pytest.raises(BadState, match="this client is closed"):
        adding.execute(ONE, TEN)
    adding.close()
    with pytest.raises(BadState, match="this prepared model is closed"):
        adding.execute(ONE, TEN)


def test_models_are_released_at_the_end_of_their_with_block(device: Device, real: tuple[Connection, Session]) -> None:
    with device.prepare(models.add_model()), device.prepare(models.relu_model()):
        assert len(real[1].models.values()) == 2
    assert real[1].models.values() == []
