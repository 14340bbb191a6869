"""The device of a client that no other one beats, by performance figures."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nnfmq.client.connection.client_compilation import best_of_all
from nnfmq.hal.capabilities import Capabilities, PerformanceInfo, uniform_capabilities, with_performance
from nnfmq.hal.types import DeviceStatus, DeviceType, OperandType
from nnfmq.serialize.messages import DeviceInfo

INFOS = [DeviceInfo(name, DeviceType.CPU, "1", 8, DeviceStatus.AVAILABLE, ()) for name in ("a", "b", "c")]
FLOAT = OperandType.TENSOR_FLOAT32


def uniform(exec_time: float, power: float = 1.0) -> Capabilities:
    return uniform_capabilities(PerformanceInfo(exec_time, power))


def faster(base: Capabilities, exec_time: float) -> Capabilities:
    """Return capabilities that differ for float32."""
    return with_performance(base, [FLOAT], PerformanceInfo(exec_time, 1.0))


@pytest.mark.parametrize(
    ("figures", "is_low_power", "best"),
    [
        ([uniform(1.0), uniform(0.5), uniform(2.0)], False, "b"),
        ([uniform(1.0), uniform(1.0), uniform(1.0)], False, "a"),
        ([uniform(1.0), faster(uniform(1.0), 0.2), uniform(1.0)], False, "b"),
        ([uniform(0.5), faster(uniform(1.0), 0.2), uniform(1.0)], False, None),
        ([uniform(1.0, 3.0), uniform(2.0, 1.0), uniform(3.0, 2.0)], True, "b"),
        ([Capabilities(), uniform(9.0), Capabilities()], False, "b"),
        ([uniform(1.0), uniform(1.0), replace(uniform(1.0), while_performance=PerformanceInfo(0.5, 1.0))], False, "c"),
        ([], False, None),
    ],
    ids=["fastest", "equal", "one type", "each at something", "power", "unlisted", "loops", "unknown"],
)
def test_PART_1_the_best_device_is_beaten_at_nothing(
    figures: list[Capabilities], is_low_power: bool, best: str | None
) -> None:
    found = best_of_all(INFOS, figures, is_low_power)
    assert (None if found is None else found.name) == best


def test_a_single_device_is_the_best() -> None:
    only = replace(INFOS[0], name="only")
    assert best_of_all([only], [uniform(9.0)], False) == only
