"""Deeply nested IF, through a driver process: it runs up to the limit, and is rejected beyond it."""

from __future__ import annotations

import numpy as np
import pytest
from support.control_flow_models import nested

import nnfmq
from nnfmq.operations.control_flow import NESTING_MAX


@pytest.mark.parametrize("device", ["reference", "compiled"])
def test_ifs_nested_up_to_the_limit_run(device: str, shared_client: nnfmq.Client) -> None:
    x, y = np.float32([1, 2]), np.float32([3, 4])
    with shared_client.device(device).prepare(nested(NESTING_MAX)) as model, model.burst() as burst:
        for execute in (model.execute, burst.execute):
            assert np.array_equal(execute(np.array([True]), x, y)[0], x + y)
            assert np.array_equal(execute(np.array([False]), x, y)[0], x * y)


@pytest.mark.parametrize("device", ["reference", "compiled"])
@pytest.mark.parametrize("depth", [NESTING_MAX + 1, 400, 3000])
def test_ifs_nested_deeper_are_rejected_with_the_limit(depth: int, device: str, shared_client: nnfmq.Client) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match=f"nested {depth} deep; at most {NESTING_MAX} are possible"):
        shared_client.device(device).prepare(nested(depth))
    assert shared_client.devices()
