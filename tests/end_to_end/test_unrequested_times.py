"""Times that nobody requested, and those of failed executions: what a driver process replies, in every form (TIM-3).

The replies are noted as they arrive, because the client rejects or omits times that should not be there. Executions
over queues are in `test_malformed_packets`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from support.drivers import LIMIT_S
from support.models import add_model, gather_model, pool_bytes, request_for
from support.partitioned import error_of

import nnfmq
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.types import ExecutionConfig, MeasureTiming, Model, Request
from nnfmq.serialize import control_protocol, messages

Run = Callable[[nnfmq.PreparedModel, Request, ExecutionConfig], object]
ADD, GATHER = add_model(), gather_model()
RESULTS = messages.Executed, messages.ExecutionFinished, messages.FencedExecutionInfo


def _fenced(model: nnfmq.PreparedModel, request: Request, config: ExecutionConfig) -> object:
    with model.execute_request_fenced(request, config) as launched:
        launched.wait(LIMIT_S)
        return launched.info()


def _reusable(model: nnfmq.PreparedModel, request: Request, config: ExecutionConfig) -> object:
    with model.create_reusable_request(request, config) as execution:
        return execution.compute(timeout=LIMIT_S)


def _reusable_fenced(model: nnfmq.PreparedModel, request: Request, config: ExecutionConfig) -> object:
    with model.create_reusable_request(request, config) as execution, execution.compute_fenced() as launched:
        launched.wait(LIMIT_S)
        return launched.info()


def _aidl_burst(model: nnfmq.PreparedModel, request: Request, config: ExecutionConfig) -> object:
    with model.aidl_burst() as burst:
        return burst.execute_synchronously(request, config, timeout=LIMIT_S)


FORMS: dict[str, Run] = {
    "synchronous": lambda model, *arguments: model.execute_request(*arguments),
    "asynchronous": lambda model, *arguments: model.execute_request_async(*arguments).result(LIMIT_S),
    "fenced": _fenced,
    "reusable": _reusable,
    "reusable fenced": _reusable_fenced,
    "AIDL burst": _aidl_burst,
}


@pytest.fixture
def requested(client: nnfmq.Client) -> Iterator[Callable[[Model], tuple[nnfmq.PreparedModel, Request]]]:
    """Return what prepares a model, and makes a request of it over new memory of zeros."""
    with ExitStack() as stack:

        def prepare(model: Model) -> tuple[nnfmq.PreparedModel, Request]:
            pools = [stack.enter_context(nnfmq.Memory.create(size)) for size in pool_bytes(model)]
            return stack.enter_context(client.device("reference").prepare(model)), request_for(model, pools)

        yield prepare


@pytest.fixture
def replied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ErrorStatus, list[int]]]:
    """Return the status and the times of each result that arrives in this process."""
    found: list[tuple[ErrorStatus, list[int]]] = []
    decode = control_protocol.decode

    def noting(*arguments: Any, **named: Any) -> Any:
        message = decode(*arguments, **named)
        if isinstance(message, RESULTS):
            names = [name for name in message.__struct_fields__ if name.endswith("_ns") and name != "driver_ns"]
            times = [getattr(message, name) for name in names]  # driver_ns is for statistics, and no caller gets it
            found.append((message.status, times))
        return message

    monkeypatch.setattr(control_protocol, "decode", noting)
    return found


Requested = Callable[[Model], tuple[nnfmq.PreparedModel, Request]]
Replied = list[tuple[ErrorStatus, list[int]]]


@pytest.mark.parametrize("form", FORMS)
def test_TIM_3_a_driver_replies_times_only_if_they_were_requested(
    form: str, requested: Requested, replied: Replied
) -> None:
    model, request = requested(ADD)
    for measure in (MeasureTiming.NO, MeasureTiming.YES, MeasureTiming.NO):
        FORMS[form](model, request, ExecutionConfig(measure))
    assert [status for status, _ in replied] == [ErrorStatus.NONE] * 3
    (first, measured, last) = (times for _, times in replied)
    assert set(first + last) == {-1}
    assert len(measured) == (4 if "fenced" in form else 2) and min(measured) >= 0


@pytest.mark.parametrize("form", FORMS)
def test_TIM_3_a_driver_replies_no_times_of_an_execution_that_fails(
    form: str, requested: Requested, replied: Replied
) -> None:
    model, request = requested(GATHER)
    (_, indices) = request.inputs
    pool = request.pools[indices.location.pool_index]
    assert isinstance(pool, nnfmq.Memory)
    np.frombuffer(pool.view, np.int32, 1, indices.location.offset)[:] = 9  # of four values
    error = error_of(lambda: FORMS[form](model, request, ExecutionConfig(MeasureTiming.YES)))
    assert isinstance(error, nnfmq.GeneralFailure)
    ((status, times),) = replied
    assert status is ErrorStatus.GENERAL_FAILURE
    assert set(times) == {-1}
