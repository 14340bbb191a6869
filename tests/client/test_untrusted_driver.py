"""Invalid results of a driver are rejected in every execution mode (VAL-7)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from support.executors import LIMIT_S
from support.protocol import ProtocolPeer

from nnfmq.base.channel import FenceSignaler, open_fence_pair
from nnfmq.base.memory import Memory
from nnfmq.client.connection.connection import Connection
from nnfmq.client.model.buffers import Buffer
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.hal.errors import ErrorStatus, GeneralFailure, ProtocolError
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.timing import NO_TIMING, Timing
from nnfmq.hal.types import (
    BufferToken,
    DataLocation,
    ExecutionConfig,
    FenceState,
    MeasureTiming,
    Request,
    RequestArgument,
)
from nnfmq.serialize import messages

Start = Callable[..., Future[Any]]
NONE, FAILED, SHORT = ErrorStatus.NONE, ErrorStatus.GENERAL_FAILURE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
KNOWN, OPEN = TensorInfo("known", (2,), "float32"), TensorInfo("open", (0,), "float32")
GIVEN = np.zeros(2, np.float32)
MEASURED = ExecutionConfig(MeasureTiming.YES)
Shapes = list[tuple[int, ...]]


class UntrustedDriver:
    """A driver that replies as each test specifies, and the client that calls it."""

    def __init__(
        self, driver: ProtocolPeer, connection: Connection, start: Start, pool: Memory, stack: ExitStack
    ) -> None:
        self.driver, self.connection, self.start, self.stack = driver, connection, start, stack
        self.pool = pool
        self._kept: list[PreparedModel] = []  # a dropped model would be released, by a message that no test expects

    def model(self, output: TensorInfo = KNOWN) -> PreparedModel:
        self._kept.append(PreparedModel(self.connection, 1, (KNOWN,), (output,)))
        return self._kept[-1]

    def request(self, shape: tuple[int, ...] = ()) -> Request:
        inside = RequestArgument(location=DataLocation(0, 0, 8))
        return Request((inside,), (RequestArgument(location=DataLocation(0, 8, 8), dimensions=shape),), (self.pool,))

    def executed(self, call_type: type[messages.Call], kind: type[Any], *reply: Any) -> None:
        """Reply to a call that requests an execution."""
        call = self.driver.receive(call_type).call
        if kind is messages.ExecutionFinished:
            self.driver.send(messages.Reply(call, NONE, ""))
        self.driver.send(kind(call, *reply))

    def made(self) -> None:
        """Reply that a reusable execution was created."""
        self.driver.send(messages.ExecutionCreated(self.driver.receive(messages.CreateExecution).call, NONE, "", 5))

    def launched(self, call_type: type[messages.Call], status: ErrorStatus = NONE) -> FenceSignaler:
        """Reply that a fenced execution was launched; return its fence's sender."""
        sender, fence = open_fence_pair()
        self.stack.callback(sender.close)
        fences = [] if status is not NONE else [fence]
        self.driver.send(
            messages.FencedLaunched(self.driver.receive(call_type).call, status, "", 7, len(fences)), fences
        )
        os.close(fence)
        return sender


@pytest.fixture
def untrusted(
    driver: ProtocolPeer, connection: Connection, start: Start, resources: ExitStack
) -> Iterator[UntrustedDriver]:
    with Memory.create(16) as pool:
        yield UntrustedDriver(driver, connection, start, pool, resources)


Path = Callable[[UntrustedDriver, TensorInfo, bool, tuple[Any, ...]], Future[Any]]


def asynchronous_arrays(
    untrusted: UntrustedDriver, output: TensorInfo, measure: bool, reply: tuple[Any, ...]
) -> Future[Any]:
    pending = untrusted.model(output).execute_async(GIVEN, measure=measure)
    untrusted.executed(messages.ExecuteAsynchronously, messages.ExecutionFinished, *reply)
    return untrusted.start(pending.result, LIMIT_S)


def asynchronous_request(
    untrusted: UntrustedDriver, output: TensorInfo, measure: bool, reply: tuple[Any, ...]
) -> Future[Any]:
    config = MEASURED if measure else ExecutionConfig()
    pending = untrusted.model(output).execute_request_async(untrusted.request(), config)
    untrusted.executed(messages.ExecuteAsynchronously, messages.ExecutionFinished, *reply)
    return untrusted.start(pending.result, LIMIT_S)


def reusable_request(
    untrusted: UntrustedDriver, output: TensorInfo, measure: bool, reply: tuple[Any, ...]
) -> Future[Any]:
    config = MEASURED if measure else ExecutionConfig()
    making = untrusted.start(untrusted.model(output).create_reusable_request, untrusted.request(), config)
    untrusted.made()
    running = untrusted.start(making.result(LIMIT_S).compute)
    untrusted.executed(messages.RunExecution, messages.Executed, *reply)
    return running


def reusable_arrays(
    untrusted: UntrustedDriver, output: TensorInfo, measure: bool, reply: tuple[Any, ...]
) -> Future[Any]:
    making = untrusted.start(lambda: untrusted.model(KNOWN).create_reusable_execution(measure=measure))
    untrusted.made()
    execution = untrusted.stack.enter_context(making.result(LIMIT_S))
    running = untrusted.start(execution.compute, GIVEN)
    untrusted.executed(messages.RunExecution, messages.Executed, *reply)
    return running


PATHS: dict[str, Path] = {
    "asynchronous": asynchronous_arrays,
    "asynchronous request": asynchronous_request,
    "reusable": reusable_arrays,
    "reusable request": reusable_request,
}
on_every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())


def shapes(*stated: tuple[int, ...], short: bool = False) -> tuple[messages.ShapeData, ...]:
    return tuple(messages.ShapeData(shape, not short) for shape in stated)


@on_every_path
@pytest.mark.parametrize(
    "reply",
    [
        (NONE, "", shapes((3,))),
        (NONE, "", shapes((2, 1))),
        (NONE, "", shapes((2,), (2,))),
        (NONE, "", shapes((2,), short=True)),
        (SHORT, "", ()),
        (SHORT, "", shapes((2,))),
        (SHORT, "", shapes((3,), short=True)),
    ],
    ids=["larger", "rank", "two", "success, too short", "no shapes", "all suffice", "another shape"],
)
def test_VAL_7_impossible_shapes_break_the_protocol(
    untrusted: UntrustedDriver, path: Path, reply: tuple[Any, ...]
) -> None:
    assert isinstance(path(untrusted, KNOWN, False, reply).exception(LIMIT_S), ProtocolError)


@pytest.mark.parametrize("path", [asynchronous_request, reusable_request])
@pytest.mark.parametrize("reply", [(NONE, "", ()), (NONE, "", shapes((1000,))), (SHORT, "", shapes((7, 7)))])
def test_VAL_7_dimensions_that_the_model_leaves_open_are_validated_against_the_request(
    untrusted: UntrustedDriver, path: Path, reply: tuple[Any, ...]
) -> None:
    assert isinstance(path(untrusted, OPEN, False, reply).exception(LIMIT_S), ProtocolError)


@on_every_path
@pytest.mark.parametrize(("measure", "times"), [(True, (5, 4)), (False, (1, 2))])
def test_VAL_7_TIM_3_TIM_4_impossible_times_break_the_protocol(
    untrusted: UntrustedDriver, path: Path, measure: bool, times: tuple[int, int]
) -> None:
    assert isinstance(path(untrusted, KNOWN, measure, (NONE, "", (), *times)).exception(LIMIT_S), ProtocolError)


@on_every_path
def test_VAL_7_shapes_and_times_of_an_error_reply_are_ignored(untrusted: UntrustedDriver, path: Path) -> None:
    error = path(untrusted, KNOWN, False, (FAILED, "broken", shapes((9, 9)), 9, 3)).exception(LIMIT_S)
    assert (type(error), str(error)) == (GeneralFailure, "broken")


@on_every_path
def test_a_valid_result_is_accepted(untrusted: UntrustedDriver, path: Path) -> None:
    assert path(untrusted, KNOWN, True, (NONE, "", shapes((2,)), 3, 4)).exception(LIMIT_S) is None


# -- fenced -----------------------------------------------------------------------------------------------------------


def fenced_request(
    untrusted: UntrustedDriver, output: TensorInfo, measure: bool
) -> tuple[Future[Any], type[messages.Call]]:
    config = MEASURED if measure else ExecutionConfig()
    return untrusted.start(
        untrusted.model(output).execute_request_fenced, untrusted.request(), config
    ), messages.ExecuteFenced


def fenced_arrays(
    untrusted: UntrustedDriver, output: TensorInfo, measure: bool
) -> tuple[Future[Any], type[messages.Call]]:
    return untrusted.start(
        lambda: untrusted.model(output).execute_fenced(GIVEN, measure=measure)
    ), messages.ExecuteFenced


def reusable_fenced(
    untrusted: UntrustedDriver, output: TensorInfo, measure: bool
) -> tuple[Future[Any], type[messages.Call]]:
    config = MEASURED if measure else ExecutionConfig()
    making = untrusted.start(untrusted.model(output).create_reusable_request, untrusted.request(), config)
    untrusted.made()
    return untrusted.start(making.result(LIMIT_S).compute_fenced), messages.RunExecutionFenced


LAUNCHES = {"fenced": fenced_arrays, "fenced request": fenced_request, "reusable fenced": reusable_fenced}
on_every_launch = pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES.keys())
Launch = Callable[[UntrustedDriver, TensorInfo, bool], tuple[Future[Any], type[messages.Call]]]


def ended(untrusted: UntrustedDriver, launch: Launch, measure: bool, *info: Any) -> Future[Any]:
    """Launch an execution that ends immediately, and reply to GetExecutionInfo with `info`."""
    launching, call_type = launch(untrusted, KNOWN, measure)
    sender = untrusted.launched(call_type)
    execution = untrusted.stack.enter_context(launching.result(LIMIT_S))
    sender.send(FenceState.SIGNALED)
    waiting = untrusted.start(execution.result, LIMIT_S)
    untrusted.driver.send(messages.FencedExecutionInfo(untrusted.driver.receive(messages.GetExecutionInfo).call, *info))
    return waiting


@on_every_launch
@pytest.mark.parametrize(
    ("measure", "times"),
    [(True, (5, 4, 3, 4)), (True, (3, 4, 5, 4)), (True, (3, 4, 3, 9)), (False, (1, 2, 1, 2))],
    ids=["launched", "fenced", "a part longer than all", "not requested"],
)
def test_VAL_7_TIM_7_impossible_times_of_a_fenced_execution_break_the_protocol(
    untrusted: UntrustedDriver, launch: Launch, measure: bool, times: tuple[int, ...]
) -> None:
    assert isinstance(ended(untrusted, launch, measure, NONE, "", *times).exception(LIMIT_S), ProtocolError)


@on_every_launch
@pytest.mark.parametrize("times", [(3, 9, 3, 4), (-1, 9, -1, 9), (3, -1, 3, 9), (-1, -1, -1, -1)])
def test_TIM_7_valid_times_are_accepted(untrusted: UntrustedDriver, launch: Launch, times: tuple[int, ...]) -> None:
    assert ended(untrusted, launch, True, NONE, "", *times).exception(LIMIT_S) is None


@on_every_launch
def test_VAL_7_EXE_9_no_fenced_execution_has_a_short_output(untrusted: UntrustedDriver, launch: Launch) -> None:
    assert isinstance(ended(untrusted, launch, False, SHORT, "").exception(LIMIT_S), ProtocolError)


@on_every_launch
def test_VAL_7_EXE_9_no_launch_fails_by_a_short_output(untrusted: UntrustedDriver, launch: Launch) -> None:
    launching, call_type = launch(untrusted, KNOWN, False)
    untrusted.launched(call_type, SHORT)
    assert isinstance(launching.exception(LIMIT_S), ProtocolError)


@pytest.mark.parametrize("launch", [fenced_request, reusable_fenced])
def test_VAL_7_FEN_7_launching_a_request_without_output_shapes_violates_the_protocol(
    untrusted: UntrustedDriver, launch: Launch
) -> None:
    launching, call_type = launch(untrusted, OPEN, False)
    untrusted.launched(call_type)
    assert isinstance(launching.exception(LIMIT_S), ProtocolError)


@on_every_launch
def test_FEN_4_a_driver_sends_no_fence_if_the_execution_is_done(untrusted: UntrustedDriver, launch: Launch) -> None:
    launching, call_type = launch(untrusted, KNOWN, False)
    untrusted.driver.send(messages.FencedLaunched(untrusted.driver.receive(call_type).call, NONE, "", 7, 0))
    with launching.result(LIMIT_S) as execution:
        assert execution.done()
        assert execution.wait() is FenceState.SIGNALED
        assert execution.fence.state is FenceState.SIGNALED  # it can be given to the next one
        waiting = untrusted.start(execution.info)
        untrusted.driver.send(
            messages.FencedExecutionInfo(untrusted.driver.receive(messages.GetExecutionInfo).call, NONE, "")
        )
        assert waiting.result(LIMIT_S) == (NO_TIMING, NO_TIMING)


@on_every_launch
def test_FEN_4_an_execution_that_failed_immediately_has_its_error(untrusted: UntrustedDriver, launch: Launch) -> None:
    launching, call_type = launch(untrusted, KNOWN, False)
    untrusted.driver.send(messages.FencedLaunched(untrusted.driver.receive(call_type).call, NONE, "", 7, 0))
    with launching.result(LIMIT_S) as execution:
        waiting = untrusted.start(execution.result)
        info = messages.FencedExecutionInfo(untrusted.driver.receive(messages.GetExecutionInfo).call, FAILED, "broken")
        untrusted.driver.send(info)
        error = waiting.exception(LIMIT_S)
    assert (type(error), str(error)) == (GeneralFailure, "broken")


# -- what a buffer holds ----------------------------------------------------------------------------------------------


def test_VAL_7_an_invalid_shape_of_a_buffer_s_content_is_not_recorded(untrusted: UntrustedDriver) -> None:
    buffer = Buffer(untrusted.connection, OPEN)
    buffer.on_allocated(messages.Allocated(1, NONE, "", 3, 4))
    buffer.begin_write(me := object())
    buffer.end_write(me, (2,))
    inside = RequestArgument(location=DataLocation(1))
    request = Request((untrusted.request().inputs[0],), (inside,), (untrusted.pool, BufferToken(4)))
    pending = untrusted.model(OPEN).execute_request_async(request)
    assert buffer.dimensions is None  # while it goes on nobody knows
    untrusted.executed(messages.ExecuteAsynchronously, messages.ExecutionFinished, NONE, "", shapes((7, 7)))
    assert isinstance(untrusted.start(pending.result, LIMIT_S).exception(LIMIT_S), ProtocolError)
    assert buffer.dimensions is None


def test_the_last_writer_of_a_buffer_determines_its_content(untrusted: UntrustedDriver) -> None:
    buffer = Buffer(untrusted.connection, OPEN)
    first, second = object(), object()
    buffer.begin_write(first)
    buffer.begin_write(second)
    buffer.end_write(second, (2,))
    buffer.end_write(first, None)
    assert buffer.dimensions == (2,)


def test_times_are_those_of_the_reply(untrusted: UntrustedDriver) -> None:
    outcome = asynchronous_request(untrusted, KNOWN, True, (NONE, "", shapes((2,)), 3, 4)).result(LIMIT_S)
    assert outcome.timing == Timing(3, 4)
