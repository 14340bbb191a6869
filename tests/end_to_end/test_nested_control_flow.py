"""Deeply nested IF, through a driver process: it runs up to the limit, and is rejected beyond it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.control_flow_models import B8, REAL, TRUTH, Parts, inputs, named, output

import nnfmq
from nnfmq.hal.types import LifeTime, Model, Operand, Operation, OperationType
from nnfmq.operations.called_subgraphs import NESTING_MAX

ALWAYS = Operand(B8, (1,), lifetime=LifeTime.CONSTANT_COPY)


@pytest.fixture(scope="module")
def client() -> Iterator[nnfmq.Client]:
    with nnfmq.connect(embedded=True) as made:
        yield made


def nested(depth: int) -> Model:
    """Return a model of `depth` nested IFs: x + y if its first input is true, else x * y."""
    parts = Parts()
    then, otherwise = parts.binary(OperationType.ADD), parts.binary(OperationType.MUL)
    step = [Operation(OperationType.IF, (0, 1, 2, 3, 4), (5,))]
    for _ in range(depth - 1):
        operands = [ALWAYS, named(then), named(otherwise), *inputs(REAL, REAL), output(REAL)]
        then = parts.add(operands, step, c0=b"\1")
    truth, x, y = inputs(TRUTH, REAL, REAL)
    return parts.model([truth, named(then), named(otherwise), x, y, output(REAL)], step)


@pytest.mark.parametrize("device", ["reference", "compiled"])
def test_ifs_nested_up_to_the_limit_run(device: str, client: nnfmq.Client) -> None:
    x, y = np.float32([1, 2]), np.float32([3, 4])
    with client.device(device).prepare(nested(NESTING_MAX)) as model, model.burst() as burst:
        for execute in (model.execute, burst.execute):
            assert np.array_equal(execute(np.array([True]), x, y)[0], x + y)
            assert np.array_equal(execute(np.array([False]), x, y)[0], x * y)


@pytest.mark.parametrize("device", ["reference", "compiled"])
@pytest.mark.parametrize("depth", [NESTING_MAX + 1, 400, 3000])
def test_ifs_nested_deeper_are_rejected_with_the_limit(depth: int, device: str, client: nnfmq.Client) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match=f"nested {depth} deep; at most {NESTING_MAX} are possible"):
        client.device(device).prepare(nested(depth))
    assert client.devices()
