"""The values of a driver's limits, for its statistics."""

from __future__ import annotations

from nnfmq.base import settings
from nnfmq.driver.compilation.process import processes_max
from nnfmq.driver.memory.quota import quota_limit_bytes, total_limit_bytes
from nnfmq.driver.process.admission import CLIENTS_MAX
from nnfmq.driver.process.statistics_area import StatisticsArea
from nnfmq.observe import statistics_layout as layout
from nnfmq.observe.limits import BYTES, LIMITS, MILLISECONDS

__all__ = ["limit_values", "publish_limits"]

_COMPUTED = {
    "": lambda: CLIENTS_MAX,
    settings.MEMORY_MIB.variable: total_limit_bytes,
    settings.CLIENT_MEMORY_MIB.variable: quota_limit_bytes,
    settings.COMPILE_PROCESSES.variable: processes_max,
}
_SCALES = {BYTES: 1 << 20, MILLISECONDS: 1000}


def limit_values() -> list[int]:
    """Return the value of each limit, in the order of `LIMITS` and its unit; 0: none."""
    by_variable = {setting.variable: setting for setting in settings.table().values()}
    return [
        _COMPUTED[limit.variable]()
        if limit.variable in _COMPUTED
        else int(by_variable[limit.variable].value() * _SCALES.get(limit.unit, 1))
        for limit in LIMITS
    ]


def publish_limits(statistics: StatisticsArea) -> None:
    """Write the values into the statistics."""
    for word, value in enumerate(limit_values(), layout.LIMITS):
        statistics.set(word, value)
