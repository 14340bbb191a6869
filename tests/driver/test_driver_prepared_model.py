"""The driver's prepared model: valid and invalid requests, and the results of executions."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support import models
from support.executors import LIMIT_S, Held, floats, prepared
from support.small_models import one_operation

from nnfmq.base.memory import Memory
from nnfmq.driver.execution.prepared_model import DriverPreparedModel, run_bound
from nnfmq.hal.errors import DeadObject, ErrorStatus, InvalidArgument, OutputInsufficientSize
from nnfmq.hal.timing import NO_TIMING
from nnfmq.hal.types import (
    DataLocation,
    ExecutionConfig,
    MeasureTiming,
    Operand,
    OperandType,
    OperationType,
    OutputShape,
    Request,
    RequestArgument,
)

ADD = models.add_model()
SUM = [11.0, 22.0, 33.0, 44.0]


@pytest.fixture
def pools(resources: ExitStack) -> tuple[Memory, Memory]:
    source, sink = (resources.enter_context(Memory.create(size)) for size in models.pool_bytes(ADD))
    np.frombuffer(source.view, np.float32, 4)[:] = [1, 2, 3, 4]
    np.frombuffer(source.view, np.float32, 4, offset=64)[:] = [10, 20, 30, 40]
    return source, sink


@pytest.fixture
def request_(pools: tuple[Memory, Memory]) -> Request:
    return models.request_for(ADD, pools)


class Raising:
    """A program whose executions fail with one error."""

    def __init__(self, error: type[Exception], *given: Any) -> None:
        self._error, self._given = error, given

    def bind(self, _inputs: Sequence[Any], _outputs: Sequence[Any]) -> Any:
        return self

    def run(self, _limits: Any) -> Any:
        raise self._error(*self._given)


def failing(error: type[Exception], *given: Any) -> DriverPreparedModel:
    return DriverPreparedModel(ADD, Raising(error, *given))  # type: ignore[arg-type]


def test_an_execution_returns_shapes_and_device_times(request_: Request, pools: tuple[Memory, Memory]) -> None:
    begin = time.monotonic_ns()
    bound = prepared(ADD).bind(request_)
    result = run_bound(bound, MeasureTiming.NO, begin)
    assert (result.status, result.output_shapes, result.timing) == (ErrorStatus.NONE, (OutputShape((4,)),), NO_TIMING)
    again = prepared(ADD).execute_synchronously(request_)
    assert (again.status, again.output_shapes, again.timing) == (result.status, result.output_shapes, result.timing)
    assert begin <= bound.engine_begin_ns <= bound.engine_end_ns <= time.monotonic_ns()
    assert floats(pools[1]) == SUM


def test_a_binding_can_be_run_again_and_reads_its_memory_again(request_: Request, pools: tuple[Memory, Memory]) -> None:
    bound = prepared(ADD).bind(request_)
    for first in (1.0, 5.0):
        np.frombuffer(pools[0].view, np.float32, 4)[:] = first
        assert run_bound(bound, MeasureTiming.NO, 0).status is ErrorStatus.NONE
        assert floats(pools[1]) == [first + 10, first + 20, first + 30, first + 40]


def test_BUR_21_a_binding_keeps_its_memory_after_that_is_closed(
    request_: Request, pools: tuple[Memory, Memory]
) -> None:
    bound = prepared(ADD).bind(request_)
    output = np.frombuffer(pools[1].view, np.float32, 4)
    for pool in pools:
        pool.close()
    assert run_bound(bound, MeasureTiming.NO, 0).status is ErrorStatus.NONE
    assert output.tolist() == SUM


def test_closed_memory_cannot_be_bound(request_: Request, pools: tuple[Memory, Memory]) -> None:
    pools[0].close()
    with pytest.raises(InvalidArgument, match="closed"):
        prepared(ADD).bind(request_)


def test_TIM_4_the_driver_s_time_includes_the_time_before_the_engine_started(request_: Request) -> None:
    earlier = time.monotonic_ns() - 1_000_000
    timing = (
        prepared(ADD).execute_synchronously(request_, ExecutionConfig(MeasureTiming.YES), received_ns=earlier).timing
    )
    assert timing.time_in_driver_ns >= timing.time_on_device_ns + 1_000_000


def test_QOS_2_a_deadline_that_has_passed_ends_the_execution_before_anything_is_written(
    request_: Request, pools: tuple[Memory, Memory]
) -> None:
    result = prepared(ADD).execute_synchronously(request_, ExecutionConfig(MeasureTiming.YES), deadline_ns=1)
    assert result.status is ErrorStatus.MISSED_DEADLINE_PERSISTENT
    assert (result.output_shapes, result.timing) == ((), NO_TIMING)
    assert floats(pools[1]) == [0.0] * 4


def test_N_RQX_12_an_output_in_read_only_memory_is_rejected(
    request_: Request, pools: tuple[Memory, Memory], resources: ExitStack
) -> None:
    writable = resources.enter_context(Memory.create(16, one_writer=True))
    read_only = resources.enter_context(Memory.adopt(os.dup(writable.fileno())))
    result = prepared(ADD).execute_synchronously(replace(request_, pools=(pools[0], read_only)))
    assert result.status is ErrorStatus.INVALID_ARGUMENT
    assert "output 0 is in pool 1, which is read-only" in result.message


def test_an_omitted_output_is_computed_and_discarded(request_: Request) -> None:
    result = prepared(ADD).execute_synchronously(replace(request_, outputs=(RequestArgument(has_no_value=True),)))
    assert result.status is ErrorStatus.NONE
    assert result.output_shapes == (OutputShape((4,)),)


def test_an_output_may_be_at_an_odd_address(request_: Request, resources: ExitStack, pools: Any) -> None:
    sink = resources.enter_context(Memory.create(32))
    outputs = (RequestArgument(location=DataLocation(1, 3, 16)),)
    result = prepared(ADD).execute_synchronously(Request(request_.inputs, outputs, (pools[0], sink)))
    assert result.status is ErrorStatus.NONE
    assert np.frombuffer(bytes(sink.view[3:19]), np.float32).tolist() == SUM


@pytest.mark.parametrize("given", [(), (0,), (4,)], ids=["nothing", "left open", "as in the model"])
def test_a_dimension_that_the_request_does_not_specify_is_the_model_s(
    given: tuple[int, ...], request_: Request, pools: tuple[Memory, Memory]
) -> None:
    inputs = tuple(replace(argument, dimensions=given) for argument in request_.inputs)
    outputs = tuple(replace(argument, dimensions=given) for argument in request_.outputs)
    result = prepared(ADD).execute_synchronously(Request(inputs, outputs, pools))
    assert result.status is ErrorStatus.NONE, result.message
    assert floats(pools[1]) == SUM


def test_any_nonzero_byte_is_true_as_a_boolean(resources: ExitStack) -> None:
    truths = Operand(OperandType.TENSOR_BOOL8, (4,))
    negation = one_operation(OperationType.LOGICAL_NOT, [truths], truths)
    source, sink = (resources.enter_context(Memory.create(size)) for size in models.pool_bytes(negation))
    source.view[:4] = bytes([0, 1, 2, 255])
    result = prepared(negation).execute_synchronously(models.request_for(negation, (source, sink)))
    assert (result.status, result.message) == (ErrorStatus.NONE, "")
    assert bytes(sink.view[:4]) == bytes([1, 0, 0, 0])


def test_SHP_3_SHP_4_the_shape_of_an_insufficient_output_is_reported(request_: Request) -> None:
    shapes = (OutputShape((9,), is_sufficient=False),)
    result = failing(OutputInsufficientSize, "too small", shapes).execute_synchronously(
        request_, ExecutionConfig(MeasureTiming.YES)
    )
    assert (result.status, result.output_shapes) == (ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, shapes)
    assert result.timing == NO_TIMING


@pytest.mark.parametrize("error", [ValueError, ZeroDivisionError, IndexError, TypeError, MemoryError])
def test_LIFE_8_an_unexpected_exception_of_a_kernel_is_a_general_failure_and_is_logged(
    error: type[Exception], request_: Request, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "nnfmq.execution"):
        result = failing(error, "numpy says").execute_synchronously(request_)
    assert result.status is ErrorStatus.GENERAL_FAILURE
    assert "numpy says" in result.message
    assert "a kernel failed" in caplog.text
    caplog.clear()  # the log records keep the frames alive, and these the memory


def test_EXE_9_a_driver_that_replies_is_not_dead(request_: Request) -> None:
    result = failing(DeadObject, "gone").execute_synchronously(request_)
    assert (result.status, result.message) == (ErrorStatus.GENERAL_FAILURE, "gone")


def test_several_threads_may_execute_one_model(start: Any, resources: ExitStack, pools: tuple[Memory, Memory]) -> None:
    held = Held(ADD)
    model = DriverPreparedModel(ADD, held)  # type: ignore[arg-type]
    sinks = [resources.enter_context(Memory.create(16)) for _ in range(4)]
    futures = [start(model.execute_synchronously, models.request_for(ADD, (pools[0], sink))) for sink in sinks]
    held.go.set()
    assert [future.result(LIMIT_S).status for future in futures] == [ErrorStatus.NONE] * 4
    assert [floats(sink) for sink in sinks] == [SUM] * 4
