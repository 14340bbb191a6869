"""Requests that the HAL forbids, limits and fences, in every execution mode, through a driver process.

One client sends them all, and after each a valid request in the same mode.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any, TypeAlias

import numpy as np
import pytest
from msgspec.structs import replace
from support.control_flow_models import counting
from support.drivers import LIMIT_S, Daemon
from support.models import add_model, gather_model, pool_bytes, relu_model, request_for, unsized_relu_model
from support.small_models import F32, nothing_left_model, one_operation, with_operand

import nnfmq
from nnfmq.base.fence import Fence
from nnfmq.base.memory import Memory
from nnfmq.hal.timing import NO_TIMING
from nnfmq.hal.types import (
    BufferToken,
    DataLocation,
    ExecutionConfig,
    FenceState,
    MeasureTiming,
    Model,
    Operand,
    OperandType,
    OperationType,
    Priority,
    Request,
    RequestArgument,
)
from nnfmq.lab import hidl

ADD = add_model()
SUM = [11.0, 22.0, 33.0, 44.0]
BYTES = 16
NONE = RequestArgument(has_no_value=True)
Mode: TypeAlias = Callable[..., Any]


@pytest.fixture(scope="module")
def client(shared_daemon: Daemon) -> Iterator[nnfmq.Client]:
    """Return the client of all tests: rejected requests must not affect later calls."""
    with shared_daemon.connect() as made:
        yield made


@pytest.fixture(scope="module")
def device(client: nnfmq.Client) -> nnfmq.Device:
    return client.device("reference")


@pytest.fixture(scope="module")
def adding(device: nnfmq.Device) -> Iterator[nnfmq.PreparedModel]:
    with device.prepare(ADD) as made:
        yield made


# ------------------------------------------------------------------------------------------------ execution modes


def synchronous(model: nnfmq.PreparedModel, request: Request, config: ExecutionConfig, timeout: float | None) -> Any:
    return model.execute_request(request, config, timeout=timeout)


def asynchronous(model: nnfmq.PreparedModel, request: Request, config: ExecutionConfig, timeout: float | None) -> Any:
    return model.execute_request_async(request, config, timeout=timeout).result(LIMIT_S)


def fenced(model: nnfmq.PreparedModel, request: Request, config: ExecutionConfig, timeout: float | None) -> Any:
    with model.execute_request_fenced(request, config, timeout=timeout) as launched:
        return launched.result(LIMIT_S)


def reusable(model: nnfmq.PreparedModel, request: Request, config: ExecutionConfig, timeout: float | None) -> Any:
    with model.create_reusable_request(request, config) as execution:
        return execution.compute(timeout=timeout)


def burst(model: nnfmq.PreparedModel, request: Request, config: ExecutionConfig, timeout: float | None) -> Any:
    with model.request_burst() as made:
        return made.execute_request(request, config, timeout=timeout)


def aidl_burst(model: nnfmq.PreparedModel, request: Request, config: ExecutionConfig, timeout: float | None) -> Any:
    with model.aidl_burst() as made:
        return made.execute_synchronously(request, config, timeout=timeout)


MODES: list[Mode] = [synchronous, asynchronous, fenced, reusable, burst, aidl_burst]
in_every_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
not_fenced = pytest.mark.parametrize(
    "mode", [mode for mode in MODES if mode is not fenced], ids=lambda mode: mode.__name__
)


def create_request(stack: ExitStack, model: Model, *inputs: list[float]) -> Request:
    """Return a request of `model` over new memories, with floats in its first inputs."""
    source, sink = (stack.enter_context(Memory.create(max(size, 256))) for size in pool_bytes(model))
    request = request_for(model, (source, sink))
    for place, values in zip(request.inputs, inputs, strict=False):
        np.frombuffer(source.view, np.float32, len(values), place.location.offset)[:] = values
    return request


def good(stack: ExitStack) -> Request:
    return create_request(stack, ADD, [1, 2, 3, 4], [10, 20, 30, 40])


def run(
    mode: Mode, model: nnfmq.PreparedModel, request: Request, timeout: float | None = LIMIT_S, **config: Any
) -> Any:
    return mode(model, request, ExecutionConfig(**config), timeout)


def goes_on(mode: Mode, model: nnfmq.PreparedModel, stack: ExitStack) -> bool:
    """Return whether a valid request succeeds in the same mode."""
    request = good(stack)
    run(mode, model, request)
    found: list[float] = np.frombuffer(request.pools[1].view, np.float32, 4).tolist()  # type: ignore[union-attr]
    return found == SUM


# ------------------------------------------------------------------------------------------------ valid requests


@in_every_mode
def test_EXE_1_API_6_API_8_a_request_s_dimensions_complete_those_that_the_model_leaves_unknown(
    mode: Mode, device: nnfmq.Device, resources: ExitStack
) -> None:
    request = create_request(resources, relu_model(), [-1, 2, -3, 4])
    with device.prepare(relu_model((0, 0))) as model:
        for shape in ((4, 1), (2, 2), (1, 4)):
            sized = replace(
                request,
                inputs=(replace(request.inputs[0], dimensions=shape),),
                outputs=(replace(request.outputs[0], dimensions=shape),),
            )
            outcome = run(mode, model, sized)
            assert mode is fenced or [found.dimensions for found in outcome.shapes] == [shape]
            sink = request.pools[1]
            assert np.frombuffer(sink.view, np.float32, 4).tolist() == [0, 2, 0, 4]  # type: ignore[union-attr]
            sink.view[:BYTES] = bytes(BYTES)  # type: ignore[union-attr]
    with device.prepare(relu_model((0, 2))) as model, pytest.raises(nnfmq.InvalidArgument, match="N-RQX-6"):
        run(mode, model, first(request, dimensions=(4, 1)))


@in_every_mode
def test_EXE_1_API_6_an_input_without_a_value_is_omitted(
    mode: Mode, device: nnfmq.Device, resources: ExitStack
) -> None:
    transpose = one_operation(
        OperationType.TRANSPOSE, [Operand(F32, (2, 2)), Operand(OperandType.TENSOR_INT32, (2,))], Operand(F32, (2, 2))
    )
    request = create_request(resources, transpose, [1, 2, 3, 4])
    at = request.inputs[1].location.offset
    request.pools[0].view[at : at + 8] = struct.pack("<2i", 0, 1)  # type: ignore[union-attr]
    with device.prepare(transpose) as model:
        for inputs, expected in ((request.inputs, [1, 2, 3, 4]), ((request.inputs[0], NONE), [1, 3, 2, 4])):
            run(mode, model, replace(request, inputs=inputs))
            assert np.frombuffer(request.pools[1].view, np.float32, 4).tolist() == expected  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------------ requests


def first(request: Request, **changes: Any) -> Request:
    """Change the first input."""
    return replace(request, inputs=(replace(request.inputs[0], **changes), *request.inputs[1:]))


def placed(request: Request, *place: int) -> Request:
    return first(request, location=DataLocation(*place))


def result(request: Request, *place: int) -> Request:
    return replace(request, outputs=(RequestArgument(location=DataLocation(*place)),))


def in_buffer(request: Request, token: int, *place: int) -> Request:
    return replace(placed(request, 2, *place), pools=(*request.pools, BufferToken(token)))


INVALID_REQUESTS: dict[str, Callable[[Request], Request]] = {
    "N-REQ-1 first": lambda r: replace(r, inputs=r.inputs[1:]),
    "N-REQ-1 last": lambda r: replace(r, inputs=r.inputs[:1]),
    "N-REQ-1 one more": lambda r: replace(r, inputs=(*r.inputs, NONE)),
    "N-REQ-2 none": lambda r: replace(r, outputs=()),
    "N-REQ-2 one more": lambda r: replace(r, outputs=(*r.outputs, NONE)),
    "N-RQX-1 location": lambda r: first(r, has_no_value=True),
    "N-RQX-1 dimensions": lambda r: replace(r, inputs=(replace(NONE, dimensions=(4,)), r.inputs[1])),
    "N-RQX-2 next": lambda r: placed(r, 2, 0, BYTES),
    "N-RQX-2 far": lambda r: placed(r, (1 << 31) - 1, 0, BYTES),
    "N-RQX-3 length": lambda r: placed(r, 0, 248, BYTES),
    "N-RQX-3 padding": lambda r: placed(r, 0, 240, BYTES, 1),
    "N-RQX-3 sum": lambda r: placed(r, 0, (1 << 32) - 8, BYTES),
    "N-RQX-4 input": lambda r: placed(r, 0, 0, 0),
    "N-RQX-4 output": lambda r: result(r, 1, 0, 0),
    "N-RQX-5 shorter": lambda r: placed(r, 0, 0, BYTES - 1),
    "N-RQX-5 longer": lambda r: result(r, 1, 0, BYTES + 1),
    "N-RQX-6 rank": lambda r: first(r, dimensions=(4, 1)),
    "N-RQX-6 extent": lambda r: first(r, dimensions=(3,)),
    "N-RQX-9 none": lambda r: in_buffer(r, 0),
    "N-RQX-9 negative": lambda r: in_buffer(r, -7),
    "N-RQX-9 unknown": lambda r: in_buffer(r, 100),
    "N-RQX-13 over an input": lambda r: result(r, 0, 8, BYTES),
}  # fmt: skip


# A packet of a burst has no padding.
BOTH = [
    (name, mode) for name in INVALID_REQUESTS for mode in MODES if not (name == "N-RQX-3 padding" and mode is burst)
]


@pytest.mark.parametrize(("name", "mode"), BOTH, ids=[f"{name} {mode.__name__}" for name, mode in BOTH])
def test_a_request_that_the_hal_forbids_is_rejected_and_the_client_continues(
    name: str, mode: Mode, adding: nnfmq.PreparedModel, resources: ExitStack
) -> None:
    request = INVALID_REQUESTS[name](good(resources))
    with pytest.raises(nnfmq.InvalidArgument) as caught:
        run(mode, adding, request, measure=MeasureTiming.YES)
    assert not hasattr(caught.value, "output_shapes")
    assert not any(request.pools[1].view)  # type: ignore[union-attr]  # nothing was written
    assert goes_on(mode, adding, resources)


@in_every_mode
@pytest.mark.parametrize("place", [(4,), (0, BYTES), (0, 0, 4)], ids=["offset", "length", "padding"])
def test_N_RQX_10_a_part_of_an_existing_buffer_is_rejected_as_input_and_as_output(
    place: tuple[int, ...], mode: Mode, device: nnfmq.Device, adding: nnfmq.PreparedModel, resources: ExitStack
) -> None:
    role = [(adding, 0)]
    buffer = resources.enter_context(device.allocate(inputs=role, outputs=role))
    request = good(resources)
    pools = (*request.pools, buffer.pool)
    for where in ((), place):  # all of it, and then the part
        read = replace(placed(request, 2, *where), pools=pools)
        written = replace(result(request, 2, *where), pools=pools)
        buffer.copy_from(np.array([5, 6, 7, 8], np.float32))
        with pytest.raises(nnfmq.InvalidArgument, match="N-RQX-10") if where else nullcontext():
            run(mode, adding, read)
        with pytest.raises(nnfmq.InvalidArgument, match="N-RQX-10") if where else nullcontext():
            run(mode, adding, written)
    assert np.frombuffer(request.pools[1].view, np.float32, 4).tolist() == [15, 26, 37, 48]  # type: ignore[union-attr]
    assert goes_on(mode, adding, resources)


@in_every_mode
def test_N_RQX_7_an_input_of_unknown_shape_is_rejected(mode: Mode, device: nnfmq.Device, resources: ExitStack) -> None:
    with device.prepare(with_operand(relu_model(), 0, dimensions=(0,))) as model:
        request = create_request(resources, relu_model(), [-1, 2, -3, 4])
        with pytest.raises(nnfmq.InvalidArgument, match="N-RQX-7"):
            run(mode, model, request)
        run(mode, model, first(request, dimensions=(4,)))
        assert np.frombuffer(request.pools[1].view, np.float32, 4).tolist() == [0, 2, 0, 4]  # type: ignore[union-attr]


@not_fenced
def test_N_REQ_5_an_index_out_of_range_is_an_error_without_shapes_and_times(
    mode: Mode, device: nnfmq.Device, resources: ExitStack
) -> None:
    gather = gather_model()
    request = create_request(resources, gather, [1, 2, 3, 4])
    with device.prepare(gather) as model:
        for index, is_inside in ((9, False), (-1, False), (2, True)):
            at = request.inputs[1].location.offset
            request.pools[0].view[at : at + 4] = struct.pack("<i", index)  # type: ignore[union-attr]
            if is_inside:
                run(mode, model, request)
                assert np.frombuffer(request.pools[1].view, np.float32, 1)[0] == 3  # type: ignore[union-attr]
                continue
            with pytest.raises(nnfmq.GeneralFailure, match="GATHER") as caught:
                run(mode, model, request, measure=MeasureTiming.YES)
            assert not hasattr(caught.value, "output_shapes")
            assert model.last_timing == NO_TIMING


@pytest.mark.parametrize(
    "config", [{"loop_timeout_ns": -2}, {"loop_timeout_ns": 15_000_000_001}], ids=["below -1", "above the most"]
)
@in_every_mode
def test_N_RQX_14_an_invalid_loop_timeout_is_rejected(
    mode: Mode, config: dict[str, int], adding: nnfmq.PreparedModel, resources: ExitStack
) -> None:
    with pytest.raises(nnfmq.InvalidArgument):
        run(mode, adding, good(resources), **config)
    assert goes_on(mode, adding, resources)


# ------------------------------------------------------------------------------------------------ AIDL's bursts


BAD_TOKENS = [
    *(("N-REQ-6", tokens) for tokens in ((-2, -1), (-1, -2), (-(2**63), -1))),  # below -1
    *(("N-REQ-7", tokens) for tokens in ((), (-1,), (-1, -1, -1))),  # another number than of the pools
]


@pytest.mark.parametrize(("rule", "tokens"), BAD_TOKENS)
def test_a_token_below_minus_one_and_another_number_of_tokens_are_rejected(
    rule: str, tokens: tuple[int, ...], adding: nnfmq.PreparedModel, resources: ExitStack
) -> None:
    with adding.aidl_burst() as made:
        with pytest.raises(nnfmq.InvalidArgument, match=rule):
            made.execute_synchronously(good(resources), tokens=tokens)
        made.execute_synchronously(good(resources))


def test_N_REQ_8_releasing_an_invalid_token_is_rejected(adding: nnfmq.PreparedModel, resources: ExitStack) -> None:
    with adding.aidl_burst() as made:
        with pytest.raises(nnfmq.InvalidArgument):
            made.release_memory_resource(-2)
        made.execute_synchronously(good(resources))


# ------------------------------------------------------------------------------------------------ fences, short outputs


@pytest.mark.parametrize(
    "what", ["a pipe", "a file", "N-RQX-15 a fence in error"], ids=["N-RQX-15 pipe", "N-RQX-15 file", "N-RQX-15 error"]
)
def test_fds_that_are_not_fences_and_failed_fences_are_rejected(
    what: str, adding: nnfmq.PreparedModel, resources: ExitStack
) -> None:
    reader, writer = os.pipe()
    failed = resources.enter_context(Fence.create())
    failed.fail()
    for fd in (reader, writer):
        resources.callback(os.close, fd)
    memory = resources.enter_context(Memory.create(BYTES))
    given: Any = {"a pipe": reader, "a file": memory}.get(what, failed)
    with pytest.raises(nnfmq.InvalidArgument):
        adding.execute_request_fenced(good(resources), wait_for=[given])
    assert goes_on(fenced, adding, resources)


def test_N_REQ_3_a_hidl_handle_without_a_fence_is_rejected(shared_daemon: Daemon, resources: ExitStack) -> None:
    replies: list[Any] = []
    client = resources.enter_context(nnfmq.connect(shared_daemon.path, timeout=LIMIT_S, interface="HIDL 1.3"))
    device = hidl.IDevice(client, "reference")
    device.prepareModel_1_3(ADD, 1, Priority.MEDIUM, None, [], [], bytes(32), lambda *given: replies.append(given))
    client.devices()
    while not replies:
        client.devices()
    model = replies[0][1]
    request = good(resources)
    for wait_for in ([None], [request.pools[0]]):
        rejected = model.executeFenced(request, wait_for, MeasureTiming.NO, None, None, None)
        assert rejected == (nnfmq.ErrorStatus.INVALID_ARGUMENT, None, None)
    status, _, _ = model.executeSynchronously_1_3(request, MeasureTiming.NO, None, None)
    assert (status, np.frombuffer(request.pools[1].view, np.float32, 4).tolist()) == (nnfmq.ErrorStatus.NONE, SUM)
    model.close()


OPEN = {
    "N-FEN-1 N-RQX-8 unknown extent": unsized_relu_model(),
    "N-FEN-1 N-RQX-8 size 0, which is unknown": one_operation(
        OperationType.RELU, [Operand(F32, (4,))], Operand(F32, (0,))
    ),
    "N-FEN-1 N-RQX-8 unknown rank": with_operand(relu_model(), 1, dimensions=()),
}


@pytest.mark.parametrize("name", OPEN)
def test_a_fenced_execution_whose_output_is_not_fully_specified_is_rejected(
    name: str, device: nnfmq.Device, adding: nnfmq.PreparedModel, resources: ExitStack
) -> None:
    request = create_request(resources, relu_model(), [1, 2, 3, 4])
    with device.prepare(OPEN[name]) as model:
        with pytest.raises(nnfmq.InvalidArgument, match="N-RQX-8"):
            run(fenced, model, request)
        assert run(synchronous, model, request).shapes[0].dimensions == (4,)
    assert goes_on(fenced, adding, resources)


@in_every_mode
def test_N_FEN_2_EXE_12_an_output_without_elements_is_computed_in_every_mode_but_rejected_in_fenced_ones(
    mode: Mode, device: nnfmq.Device, adding: nnfmq.PreparedModel, resources: ExitStack
) -> None:
    source, sink = (resources.enter_context(Memory.create(256)) for _ in range(2))
    inputs = [DataLocation(0, 0, 16), DataLocation(0, 64, 64), DataLocation(0, 192, 8)]  # all scores are 0
    outputs = [DataLocation(1, 64 * number, 1) for number in range(4)]
    arguments = [tuple(RequestArgument(location=place) for place in places) for places in (inputs, outputs)]
    request = Request(arguments[0], arguments[1], (source, sink))
    with device.prepare(nothing_left_model()) as model:
        if mode is fenced:
            with pytest.raises(nnfmq.InvalidArgument, match="N-RQX-8"):
                run(mode, model, request)
        else:
            shapes = run(mode, model, request).shapes
            assert [shape.dimensions for shape in shapes] == [(0,), (0, 4), (0,), (0,)]
            assert all(shape.is_sufficient for shape in shapes)
    assert not any(sink.view)
    assert goes_on(mode, adding, resources)


SHORT = [
    (padding, mode) for padding in (0, 1) for mode in MODES if mode is not fenced and not (padding and mode is burst)
]


@pytest.mark.parametrize(
    ("padding", "mode"),
    SHORT,
    ids=[f"{'N-FEN-4' if padding else 'N-FEN-3'} {mode.__name__}" for padding, mode in SHORT],
)
def test_an_output_that_is_a_byte_short_is_insufficient_and_its_shape_is_reported(
    padding: int, mode: Mode, device: nnfmq.Device, resources: ExitStack
) -> None:
    request = create_request(resources, relu_model(), [1, 2, 3, 4])
    with device.prepare(unsized_relu_model()) as model:
        with pytest.raises(nnfmq.OutputInsufficientSize) as caught:
            run(mode, model, result(request, 1, 0, BYTES - 1, padding))
        told = [(shape.dimensions, shape.is_sufficient) for shape in caught.value.output_shapes]
        assert told == [((4,), False)]
        run(mode, model, request)
        assert np.frombuffer(request.pools[1].view, np.float32, 4).tolist() == [1, 2, 3, 4]  # type: ignore[union-attr]


def test_N_FEN_5_a_fenced_execution_with_a_short_output_is_rejected(
    adding: nnfmq.PreparedModel, resources: ExitStack
) -> None:
    with pytest.raises(nnfmq.InvalidArgument):
        run(fenced, adding, result(good(resources), 1, 0, BYTES - 1))
    assert goes_on(fenced, adding, resources)


def test_N_FEN_7_reading_execution_info_too_early_is_a_general_failure(
    adding: nnfmq.PreparedModel, resources: ExitStack
) -> None:
    with Fence.create() as own, adding.execute_request_fenced(good(resources), wait_for=[own]) as launched:
        for _ in range(2):
            with pytest.raises(nnfmq.GeneralFailure):
                launched.info()
        own.signal()
        assert launched.wait(LIMIT_S) is FenceState.SIGNALED
        launched.info()
    assert goes_on(fenced, adding, resources)


# ------------------------------------------------------------------------------------------------ quality of service


@pytest.mark.parametrize("priority", Priority, ids=lambda priority: priority.name)
def test_N_QOS_1_N_QOS_3_every_priority_and_no_limit_prepares(
    priority: Priority, device: nnfmq.Device, resources: ExitStack
) -> None:
    with device.prepare(ADD, priority=priority) as model:
        assert goes_on(synchronous, model, resources)


def missed(timeout: float) -> AbstractContextManager[object]:
    """A deadline that has passed is missed; one in a moment may be kept."""
    return suppress(nnfmq.MissedDeadline) if timeout else pytest.raises(nnfmq.MissedDeadline)


@pytest.mark.parametrize("timeout", [0, 0.005], ids=["now", "5 ms"])
def test_N_QOS_2_a_deadline_for_preparing_is_kept_or_missed(
    timeout: float, device: nnfmq.Device, adding: nnfmq.PreparedModel, resources: ExitStack
) -> None:
    with missed(timeout):
        device.prepare(ADD, timeout=timeout).close()
    assert goes_on(synchronous, adding, resources)


@in_every_mode
@pytest.mark.parametrize("timeout", [0, 0.005], ids=["now", "5 ms"])
def test_N_QOS_4_a_deadline_that_passes_before_the_end_is_missed_and_there_are_no_times(
    timeout: float, mode: Mode, device: nnfmq.Device, adding: nnfmq.PreparedModel, resources: ExitStack
) -> None:
    loop = counting()  # for hours: the default loop timeout would end it after 2 s, as a missed deadline, too
    request = create_request(resources, loop)
    at = request.inputs[1].location.offset
    request.pools[0].view[at : at + 4] = struct.pack("<i", 2**31 - 1)  # type: ignore[union-attr]
    with device.prepare(loop) as model:
        begin_ns = time.monotonic_ns()
        with pytest.raises(nnfmq.MissedDeadline):
            run(mode, model, request, timeout, measure=MeasureTiming.YES)
        assert time.monotonic_ns() - begin_ns < 1_500_000_000
        assert model.last_timing == NO_TIMING
    assert goes_on(mode, adding, resources)


@in_every_mode
def test_API_8_N_QOS_4_an_execution_before_its_deadline_succeeds_and_has_times(
    mode: Mode, adding: nnfmq.PreparedModel, resources: ExitStack
) -> None:
    request = good(resources)
    outcome = run(mode, adding, request, LIMIT_S, measure=MeasureTiming.YES)
    timing = outcome.launched if mode is fenced else outcome.timing
    assert 0 <= timing.time_on_device_ns <= timing.time_in_driver_ns
    assert np.frombuffer(request.pools[1].view, np.float32, 4).tolist() == SUM  # type: ignore[union-attr]


@in_every_mode
@pytest.mark.parametrize("timeout", [None, 9e9], ids=["none", "longest"])
def test_API_7_N_QOS_5_without_a_deadline_every_execution_mode_succeeds(
    timeout: float | None, mode: Mode, adding: nnfmq.PreparedModel, resources: ExitStack
) -> None:
    run(mode, adding, good(resources), timeout)
    assert goes_on(mode, adding, resources)


@in_every_mode
def test_API_12_N_QOS_6_an_endless_loop_misses_its_loop_timeout(
    mode: Mode, device: nnfmq.Device, adding: nnfmq.PreparedModel, resources: ExitStack
) -> None:
    loop = counting()
    request = create_request(resources, loop)
    at = request.inputs[1].location.offset
    request.pools[0].view[at : at + 4] = struct.pack("<i", 2**31 - 1)  # type: ignore[union-attr]
    with device.prepare(loop) as model, pytest.raises(nnfmq.MissedDeadline):
        run(mode, model, request, loop_timeout_ns=1_000_000)
    assert goes_on(mode, adding, resources)
