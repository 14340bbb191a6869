"""The HAL's general rules of executions: the client library against a real session over a socketpair."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace
from support import models
from support.executors import LIMIT_S, Held, floats
from support.hints import with_extension
from support.protocol import ProtocolPeer
from support.small_models import nothing_left_model, one_operation, two_adds

from nnfmq.base.memory import Memory
from nnfmq.client.connection.client import Client
from nnfmq.client.connection.connection import Connection
from nnfmq.client.connection.device import Device
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.driver.execution.prepared_model import DriverPreparedModel, run_bound
from nnfmq.driver.session.session import Session
from nnfmq.engines import interpreter
from nnfmq.engines.steps import ResolvedOp
from nnfmq.hal.errors import (
    DeviceUnavailable,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    NnfmqError,
    OutputInsufficientSize,
    error_for_status,
)
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.timing import NO_TIMING
from nnfmq.hal.types import (
    DataLocation,
    DeviceStatus,
    ExecutionConfig,
    ExecutionPreference,
    ExtensionNameAndPrefix,
    MeasureTiming,
    Model,
    Operand,
    OperandType,
    OperationType,
    OutputShape,
    Priority,
    Request,
    RequestArgument,
    TokenValuePair,
)
from nnfmq.serialize import messages
from nnfmq.serialize.models import encode_model

Start = Callable[..., Future[Any]]
ADD = models.add_model()
SUM = [11.0, 22.0, 33.0, 44.0]
F32, I32 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_INT32
MEASURED = ExecutionConfig(MeasureTiming.YES)
ALLOWED = {  # EXE-9, of executeSynchronously
    ErrorStatus.NONE,
    ErrorStatus.DEVICE_UNAVAILABLE,
    ErrorStatus.GENERAL_FAILURE,
    ErrorStatus.OUTPUT_INSUFFICIENT_SIZE,
    ErrorStatus.INVALID_ARGUMENT,
    ErrorStatus.MISSED_DEADLINE_TRANSIENT,
    ErrorStatus.MISSED_DEADLINE_PERSISTENT,
    ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT,
    ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT,
}


@pytest.fixture
def session(real: tuple[Connection, Session]) -> Session:
    return real[1]


@pytest.fixture
def device(client: Client) -> Iterator[Device]:
    yield client.device("reference")
    client.set_device_status(
        "reference", DeviceStatus.AVAILABLE
    )  # the devices are shared by all sessions of this process


def put(session: Session, prepared: PreparedModel, model: Model, program: Any) -> None:
    """Let the driver execute `program` instead of the prepared `model`."""
    session.models.insert(DriverPreparedModel(model, program), prepared.model_id)


class Failing:
    """A program whose executions fail with one error."""

    def __init__(self, error: NnfmqError) -> None:
        self._error = error

    def bind(self, _inputs: Any, _outputs: Any) -> Any:
        return self

    def run(self, _limits: Any) -> Any:
        raise self._error


# ------------------------------------------------------------------------------------------------ inputs, outputs

IN_PLACE = {  # their results could overwrite an input, or are views of it
    "RELU": models.relu_model(),
    "ADD": ADD,
    "two ADDs": two_adds(),
    "RESHAPE": models.null_model(),
    "QUANTIZE": one_operation(
        OperationType.QUANTIZE, [Operand(F32, (4,))], Operand(OperandType.TENSOR_QUANT8_ASYMM, (4,), 0.5, 3)
    ),
    "CAST to the same type": one_operation(OperationType.CAST, [Operand(F32, (4,))], Operand(F32, (4,))),
    "CONCATENATION of one": one_operation(OperationType.CONCATENATION, [Operand(F32, (2, 2)), 0], Operand(F32, (2, 2))),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_EXE_2_writable_inputs_are_not_written(name: str, device: Device, resources: ExitStack) -> None:
    model = IN_PLACE[name]
    sizes = models.pool_bytes(model)
    source, sink = (resources.enter_context(Memory.create(size)) for size in sizes)
    values = np.random.default_rng(1).normal(size=sizes[0] // 4).astype(np.float32)
    source.view[: values.nbytes] = values.tobytes()
    before = bytes(source.view)
    request = models.request_for(model, (source, sink))
    with device.prepare(model) as prepared:
        for _ in range(2):
            prepared.execute_request(request)
            with prepared.request_burst() as burst:
                burst.execute_request(request)
            assert bytes(source.view) == before
    assert any(sink.view)


@pytest.mark.parametrize("path", ["synchronous", "burst"])
def test_EXE_12_outputs_without_elements_occupy_one_byte_each_and_are_valid(
    path: str, device: Device, resources: ExitStack
) -> None:
    source, sink = resources.enter_context(Memory.create(256)), resources.enter_context(Memory.create(256))
    np.frombuffer(source.view, np.float32, 4)[:] = [0.1, 0.2, 0.3, 0.4]  # all below the threshold
    places = [DataLocation(0, 0, 16), DataLocation(0, 64, 64), DataLocation(0, 192, 8)]
    inputs = tuple(RequestArgument(location=place) for place in places)
    outputs = tuple(RequestArgument(location=DataLocation(1, 64 * number, 1)) for number in range(4))
    request = Request(inputs, outputs, (source, sink))
    sink.view[:] = b"\x77" * 256
    with device.prepare(nothing_left_model()) as model, model.request_burst() as burst:
        shapes = (burst if path == "burst" else model).execute_request(request).shapes
        assert [shape.dimensions for shape in shapes] == [(0,), (0, 4), (0,), (0,)]
        assert all(shape.is_sufficient for shape in shapes)
        assert bytes(sink.view) == b"\x77" * 256
        np.frombuffer(source.view, np.float32, 4)[3] = (
            1  # now one box is above it, and its output does not fit into a byte
        )
        with pytest.raises(OutputInsufficientSize):
            (burst if path == "burst" else model).execute_request(request)


def test_EXE_3_a_synchronous_execution_returns_shapes_and_times_when_it_is_done(
    device: Device, session: Session, request_: Request, pools: tuple[Memory, Memory], start: Start
) -> None:
    prepared, held = device.prepare(ADD), Held(ADD)
    put(session, prepared, ADD, held)
    begin = time.monotonic_ns()
    waiting = start(prepared.execute_request, request_, MEASURED)
    assert held.begun.wait(LIMIT_S)
    assert not waiting.done()
    held.go.set()
    outcome = waiting.result(LIMIT_S)
    assert floats(pools[1]) == SUM
    assert outcome.shapes == (OutputShape((4,)),)
    assert 0 < outcome.timing.time_on_device_ns <= outcome.timing.time_in_driver_ns <= time.monotonic_ns() - begin


def test_EXE_4_an_execution_is_one_synchronous_call_by_default(
    start: Start, connection: Connection, driver: ProtocolPeer
) -> None:
    info = TensorInfo("x", (2,), "float32")
    running = start(PreparedModel(connection, 7, (info,), (info,)).execute, np.zeros(2, np.float32))
    call = driver.receive(messages.Execute)
    assert (call.model_id, call.config.measure, call.deadline_ns) == (7, MeasureTiming.NO, -1)
    driver.send(messages.Executed(call.call, ErrorStatus.NONE, "", ()))
    assert running.result(LIMIT_S)[0].tolist() == [0, 0]
    assert driver.has_no_message()


# ------------------------------------------------------------------------------------------------ statuses


def test_EXE_7_a_valid_request_succeeds_whatever_failed_before(
    device: Device, client: Client, session: Session, request_: Request, pools: tuple[Memory, Memory]
) -> None:
    prepared = device.prepare(ADD)

    def succeeds() -> bool:
        pools[1].view[:16] = bytes(16)
        prepared.execute_request(request_, timeout=LIMIT_S)
        return floats(pools[1]) == SUM

    assert succeeds()
    with pytest.raises(InvalidArgument):
        prepared.execute_request(replace(request_, inputs=request_.inputs[:1]))
    assert succeeds()
    with pytest.raises(MissedDeadline):
        prepared.execute_request(request_, timeout=0)
    assert succeeds()
    client.set_device_status("reference", DeviceStatus.BUSY)
    with pytest.raises(DeviceUnavailable):  # the only error that a valid request may cause
        prepared.execute_request(request_)
    client.set_device_status("reference", DeviceStatus.AVAILABLE)
    assert succeeds()


@pytest.mark.parametrize("status", [status for status in ErrorStatus if status], ids=lambda status: status.name)
def test_EXE_9_SHP_3_every_engine_error_has_an_execution_status_and_only_a_short_output_has_shapes(
    status: ErrorStatus, device: Device, session: Session, request_: Request, start: Start
) -> None:
    prepared = device.prepare(ADD)
    error = error_for_status(status, "said the engine")
    if isinstance(error, OutputInsufficientSize):
        error.output_shapes = (OutputShape((4,), is_sufficient=False),)
    model = DriverPreparedModel(ADD, Failing(error))  # type: ignore[arg-type]
    result = model.execute_synchronously(request_, MEASURED)
    assert result.status in ALLOWED
    assert bool(result.output_shapes) == (status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE)
    assert result.timing == NO_TIMING
    put(session, prepared, ADD, Failing(error))
    expected = GeneralFailure if status is ErrorStatus.DEAD_OBJECT else type(error)
    with pytest.raises(expected, match="said the engine"):
        prepared.execute_request(request_, MEASURED)
    assert device.supported_operations(ADD) == [True]  # the connection is still open


def gathering() -> Model:
    """GATHER along axis 0 of three floats, by indices from the request."""
    return one_operation(OperationType.GATHER, [Operand(F32, (3,)), 0, Operand(I32, (2,))], Operand(F32, (2,)))


@pytest.mark.parametrize("path", ["synchronous", "burst"])
def test_N_REQ_5_an_index_out_of_range_is_an_error_without_shapes_and_times(
    path: str, device: Device, session: Session
) -> None:
    values, inside, outside = np.array([1, 2, 3], np.float32), np.array([2, 0], np.int32), np.array([2, 3], np.int32)
    with device.prepare(gathering()) as model, model.burst() as burst:
        execute = model.execute if path == "synchronous" else burst.execute
        assert execute(values, inside)[0].tolist() == [3, 1]
        with pytest.raises(GeneralFailure, match="GATHER") as caught:
            execute(values, outside, measure=True)
        assert not hasattr(caught.value, "output_shapes")
        assert model.last_timing == NO_TIMING
        assert execute(values, inside)[0].tolist() == [3, 1]


def test_EXT_6_hints_of_an_execution_are_validated_and_unknown_ones_ignored(
    device: Device, request_: Request, pools: tuple[Memory, Memory]
) -> None:
    named = (ExtensionNameAndPrefix("com.example.hints", 3),)
    hint = TokenValuePair(3 << 16 | 7, b"fast")
    with with_extension(device, "com.example.hints").prepare(ADD) as prepared:
        prepared.execute_request(request_, ExecutionConfig(hints=(hint,), extensions=named))
        assert floats(pools[1]) == SUM
        wrong = {
            "a token is given twice": ExecutionConfig(hints=(hint, hint), extensions=named),
            "the prefix of token 0x30007 is not declared": ExecutionConfig(hints=(hint,)),
            "malformed extension name": ExecutionConfig(extensions=(ExtensionNameAndPrefix("no name", 3),)),
        }
        for said, config in wrong.items():
            with pytest.raises(InvalidArgument, match=rf"{said}.*\(N-VAL-22\)"):
                prepared.execute_request(request_, config)


# ------------------------------------------------------------------------------------------------ shapes


def open_relu() -> Model:
    """RELU whose input and output have an unknown dimension."""
    return one_operation(OperationType.RELU, [Operand(F32, (0, 2))], Operand(F32, (0, 0)))


def test_PREP_7_one_prepared_model_executes_different_shapes_concurrently(device: Device, start: Start) -> None:
    prepared = device.prepare(open_relu())
    given = {rows: np.arange(-rows, rows, dtype=np.float32).reshape(rows, 2) for rows in range(1, 9)}
    running = [(rows, start(prepared.execute, given[rows])) for rows in [*given, *reversed(given)] * 4]
    for rows, future in running:
        assert np.array_equal(future.result(LIMIT_S)[0], np.maximum(given[rows], 0)), rows


def test_SHP_5_the_application_gets_rank_and_dimensions_after_success_and_after_a_short_output(
    device: Device, resources: ExitStack
) -> None:
    source, sink = (resources.enter_context(Memory.create(64)) for _ in range(2))
    argument = RequestArgument(location=DataLocation(0, 0, 24), dimensions=(3, 2))
    short, enough = (RequestArgument(location=DataLocation(1, 0, length)) for length in (8, 24))
    with device.prepare(open_relu()) as prepared:
        with pytest.raises(OutputInsufficientSize) as caught:
            prepared.execute_request(Request((argument,), (short,), (source, sink)))
        assert caught.value.output_shapes == (OutputShape((3, 2), is_sufficient=False),)
        outcome = prepared.execute_request(Request((argument,), (enough,), (source, sink)))
        assert outcome.shapes == (OutputShape((3, 2)),)


# ------------------------------------------------------------------------------------------------ preparing, releasing


@pytest.mark.parametrize("preference", ExecutionPreference)
def test_PREP_4_every_preference_prepares_a_model_that_computes_the_same(
    preference: ExecutionPreference, device: Device
) -> None:
    with device.prepare(ADD, preference=preference) as model:
        assert model.execute([1, 2, 3, 4], [10, 20, 30, 40])[0].tolist() == SUM


@pytest.mark.parametrize("code", [-1, 3])
def test_PREP_4_an_unknown_preference_is_rejected(device: Device, code: int) -> None:
    with pytest.raises(InvalidArgument, match=f"preference {code}: allowed are 'low_power', 'fast_single_answer', "):
        device.prepare(ADD, preference=code)  # type: ignore[arg-type]
    (data, pools), unchecked = encode_model(ADD), cast("Any", code)
    with pytest.raises(InvalidArgument, match=f"ExecutionPreference {code} is unknown"):  # by the driver
        device.prepare_encoded(
            cast("Any", ADD),
            data,
            pools,
            preference=unchecked,
            priority=Priority.LOW,
            deterministic=False,
            deadline_ns=None,
            name="",
            version=0,
        )


def test_PREP_9_weights_are_prepared_before_the_first_execution(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def noting(owner: object, name: str) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *arguments: (done.append(name), real(*arguments))[1])

    noting(interpreter, "match")  # choosing kernels
    noting(ResolvedOp, "infer_shapes")  # binding them
    noting(interpreter, "load_constant")  # copying constants
    slow = models.slow_model(operations=3, side=4, channels=2)
    image = np.ones((1, 4, 4, 2), np.float32)
    with device.prepare(slow) as model:
        assert set(done) == {"match", "infer_shapes", "load_constant"}
        done.clear()
        for _ in range(3):
            model.execute(image)
    assert done == []


def test_LIFE_1_a_released_model_is_gone_from_the_driver(device: Device, session: Session) -> None:
    prepared = device.prepare(ADD)
    program = weakref.ref(session.models.lookup(prepared.model_id).program)
    charged = session.quota.charged_bytes
    prepared.execute([1, 2, 3, 4], [10, 20, 30, 40])
    gc.collect()
    assert program() is not None and session.quota.charged_bytes == charged > 0
    prepared.close()
    gc.collect()
    assert program() is None
    assert session.quota.charged_bytes == 0


# ------------------------------------------------------------------------------------------------ times


@pytest.mark.parametrize("measure", [MeasureTiming.NO, MeasureTiming.YES])
def test_TIM_8_measuring_reads_the_clock_no_more_often(
    measure: MeasureTiming, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is read three times in any case, for the driver's statistics."""
    bound = DriverPreparedModel(ADD, interpreter.prepare(ADD)).bind(request_)
    taken: list[int] = []

    def clock() -> int:
        taken.append(time.monotonic_ns())
        return taken[-1]

    monkeypatch.setattr("nnfmq.driver.execution.prepared_model.monotonic_ns", clock)
    assert run_bound(bound, measure, time.monotonic_ns()).status is ErrorStatus.NONE
    assert len(taken) == 3
