"""Executions in several modes: functions of the model and the value of its one input, or of the model and a request."""

from __future__ import annotations

import asyncio
from typing import Any

import nnfmq
from nnfmq.hal.types import Request
from support.drivers import LIMIT_S


def fenced(model: nnfmq.PreparedModel, value: Any) -> Any:
    """Return the outputs of a fenced execution."""
    with model.execute_fenced(value) as launched:
        return launched.result(LIMIT_S)


def of_a_pool(model: nnfmq.PreparedModel, value: Any) -> Any:
    """Return the outputs of an execution over a burst of a pool."""
    with model.burst_pool(2) as pool:
        return pool.execute(value)


def reusable(model: nnfmq.PreparedModel, value: Any) -> Any:
    """Return the outputs of a reusable execution."""
    with model.create_reusable_execution() as execution:
        return execution.compute(value)


def in_a_task(model: nnfmq.PreparedModel, value: Any) -> Any:
    """Return the outputs that a task of an event loop awaits."""

    async def main() -> Any:
        return await model.execute_async(value)

    return asyncio.run(main())


# ----------------------------------------------------------------------------------------------------------------------
# The HAL's requests.


def request_asynchronously(model: nnfmq.PreparedModel, request: Request) -> object:
    """Return the result of an asynchronous execution of a request."""
    return model.execute_request_async(request).result(LIMIT_S)


def request_fenced(model: nnfmq.PreparedModel, request: Request) -> object:
    """Return the result of a fenced execution of a request."""
    with model.execute_request_fenced(request) as launched:
        return launched.result(LIMIT_S)


def request_reusable(model: nnfmq.PreparedModel, request: Request) -> object:
    """Return the result of a reusable execution of a request."""
    with model.create_reusable_request(request) as execution:
        return execution.compute(timeout=LIMIT_S)


def request_reusable_and_fenced(model: nnfmq.PreparedModel, request: Request) -> object:
    """Return the result of a reusable execution of a request with fences."""
    with model.create_reusable_request(request) as execution, execution.compute_fenced() as launched:
        return launched.result(LIMIT_S)


def request_in_an_aidl_burst(model: nnfmq.PreparedModel, request: Request) -> object:
    """Return the result of an execution of a request over an AIDL burst."""
    with model.aidl_burst() as burst:
        return burst.execute_synchronously(request, timeout=LIMIT_S)
