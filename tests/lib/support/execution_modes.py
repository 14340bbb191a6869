"""Executions of a model with one input in several modes: functions of the model and the value."""

from __future__ import annotations

import asyncio
from typing import Any

import nnfmq
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
