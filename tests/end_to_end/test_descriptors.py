"""A worker without free fds rejects the calls that need them, and continues."""

from __future__ import annotations

import resource
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from support.descriptors import no_more_descriptors_than
from support.drivers import LIMIT_S, one

import nnfmq

FEW = 80


def reusable(model: nnfmq.PreparedModel, held: ExitStack) -> None:
    held.enter_context(model.create_reusable_execution())


def burst(model: nnfmq.PreparedModel, held: ExitStack) -> None:
    held.enter_context(model.burst()).execute(one(1), timeout=LIMIT_S)


def fenced(model: nnfmq.PreparedModel, held: ExitStack) -> None:
    fence = held.enter_context(nnfmq.Fence.create())
    held.enter_context(model.execute_fenced(one(1), wait_for=[fence], timeout=LIMIT_S))


@pytest.mark.parametrize("count", range(FEW, FEW + 6))  # so that the last ones are missed at each of the call's steps
@pytest.mark.parametrize("more", [reusable, burst, fenced])
def test_LIFE_8_a_worker_without_free_fds_rejects_calls_and_survives(
    more: Callable[[nnfmq.PreparedModel, ExitStack], Any],
    count: int,
    client: nnfmq.Client,
    model: nnfmq.PreparedModel,
) -> None:
    pid = client.worker_pid
    with ExitStack() as held, no_more_descriptors_than(pid, count):
        with suppress(nnfmq.ResourceExhausted):
            for _ in range(count):
                more(model, held)
        for _ in range(3):  # whichever of its steps meets the limit, it is no bug
            with pytest.raises(nnfmq.ResourceExhausted):
                more(model, held)
    assert (client.worker_pid, model.execute(one(3))) == (pid, (one(3),))


def test_a_driver_raises_its_fd_limit_to_the_hard_limit() -> None:
    with no_more_descriptors_than(0, 512), nnfmq.connect(embedded=True) as client:
        soft, hard = resource.prlimit(client.worker_pid, resource.RLIMIT_NOFILE)
        assert soft == hard > 512
