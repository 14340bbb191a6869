"""NCHW operations: kernels compute in NHWC, with conversions around them in the same partition."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from support.chains import TYPES, tensor, weights
from support.compiled import assert_kernels_agree
from support.small_models import graph, one_operation, scalar

from nnfmq.engines.compiled import partition
from nnfmq.engines.compiled.memory_plan import PartitionPlan, plan_partition
from nnfmq.hal.types import LifeTime, Model, Operation, OperationType

pytestmark = pytest.mark.instruction_sets

SAME = 1


@pytest.mark.parametrize("channels", [1, 3, 12])
@pytest.mark.parametrize("kind", TYPES)
def test_convolutions_in_nchw_match_the_interpreter(kind: str, channels: int) -> None:
    constants = weights(kind, (17, 3, 3, channels), 17)
    arguments = [tensor(kind, 2, channels, 9, 7), *constants, SAME, 1, 1, 0, True]

    assert_kernels_agree(one_operation(OperationType.CONV_2D, arguments, tensor(kind, 2, 17, 9, 7)))


@pytest.mark.parametrize("kind", TYPES)
def test_depthwise_convolutions_in_nchw_match_the_interpreter(kind: str) -> None:
    arguments = [tensor(kind, 1, 12, 9, 7), *weights(kind, (1, 3, 3, 12), 12), SAME, 2, 2, 1, 0, True]

    assert_kernels_agree(one_operation(OperationType.DEPTHWISE_CONV_2D, arguments, tensor(kind, 1, 12, 5, 4)))


@pytest.mark.parametrize("code", [OperationType.RESIZE_BILINEAR, OperationType.RESIZE_NEAREST_NEIGHBOR])
@pytest.mark.parametrize("kind", TYPES)
def test_resizing_in_nchw_matches_the_interpreter(kind: str, code: OperationType) -> None:
    arguments = [tensor(kind, 2, 5, 6, 8), 11, 9, True]

    assert_kernels_agree(one_operation(code, arguments, tensor(kind, 2, 5, 9, 11)), tolerance=0)


@pytest.mark.parametrize("kind", TYPES)
def test_depth_to_space_in_nchw_matches_the_interpreter(kind: str) -> None:
    arguments = [tensor(kind, 1, 8, 5, 6), 2, True]

    assert_kernels_agree(one_operation(OperationType.DEPTH_TO_SPACE, arguments, tensor(kind, 1, 2, 10, 12)))


def two_convolutions(kind: str, *, between_is_read: bool) -> Model:
    """Return a model of two pointwise convolutions; the first one's result is an output, too, if `between_is_read`."""
    image = tensor(kind, 1, 8, 6, 6)
    filter, bias = weights(kind, (8, 1, 1, 8), 8)
    (zero, zero_bytes), (one, one_bytes), (yes, yes_bytes) = scalar(0), scalar(1), scalar(True)
    between = LifeTime.SUBGRAPH_OUTPUT if between_is_read else LifeTime.TEMPORARY_VARIABLE
    operands = [
        replace(image, lifetime=LifeTime.SUBGRAPH_INPUT),
        *(filter[0], bias[0], zero, one, yes),
        replace(image, lifetime=between),
        replace(image, lifetime=LifeTime.SUBGRAPH_OUTPUT),
    ]
    constants = {1: filter[1], 2: bias[1], 3: zero_bytes, 4: one_bytes, 5: yes_bytes}
    operations = [
        Operation(OperationType.CONV_2D, (source, 1, 2, 4, 4, 4, 3, 5), (made,)) for source, made in ((0, 6), (6, 7))
    ]
    return graph(operands, operations, constants)


@pytest.mark.parametrize(("between_is_read", "conversions"), [(False, 2), (True, 3)])
@pytest.mark.parametrize("kind", TYPES)
def test_intermediates_stay_nhwc_unless_they_are_read_in_nchw(
    monkeypatch: pytest.MonkeyPatch, kind: str, between_is_read: bool, conversions: int
) -> None:
    plans: list[PartitionPlan] = []

    def recorded(*arguments: Any) -> PartitionPlan:
        plans.append(plan_partition(*arguments))
        return plans[-1]

    monkeypatch.setattr(partition, "plan_partition", recorded)
    assert_kernels_agree(two_convolutions(kind, between_is_read=between_is_read), tolerance=1e-4)
    plan = plans[0]  # others are of this machine's instruction set

    assert sum(launch.function.startswith("TransposeKernel_") for launch in plan.launches) == conversions
    assert len(plan.outputs) == 1 + between_is_read
