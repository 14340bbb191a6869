"""The values of a driver's limits, for its statistics."""

from __future__ import annotations

from nnfmq.base import settings
from nnfmq.driver.compilation.process import processes_max
from nnfmq.driver.memory.quota import quota_limit_bytes, total_limit_bytes, user_limit_bytes
from nnfmq.driver.process.admission import CLIENTS_MAX, user_clients
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
_OF_USERS = {
    settings.USER_CLIENTS.variable: lambda: user_clients(CLIENTS_MAX),
    settings.USER_MEMORY_MIB.variable: user_limit_bytes,
    settings.USER_MODELS.variable: settings.USER_MODELS.value,
    settings.USER_THREADS.variable: settings.USER_THREADS.value,
}
_SCALES = {BYTES: 1 << 20, MILLISECONDS: 1000}


def limit_values(serves_several: bool = False) -> list[int]:
    """Return the value of each limit, in the order of `LIMITS` and its unit; 0: none.

    `serves_several`: the driver serves several users, each of which has limits.
    """
    by_variable = {setting.variable: setting for setting in settings.table().values()}
    computed = _COMPUTED | (_OF_USERS if serves_several else dict.fromkeys(_OF_USERS, lambda: 0))
    return [
        computed[limit.variable]()
        if limit.variable in computed
        else int(by_variable[limit.variable].value() * _SCALES.get(limit.unit, 1))
        for limit in LIMITS
    ]


def publish_limits(statistics: StatisticsArea, serves_several: bool) -> None:
    """Write the values into the statistics."""
    for word, value in enumerate(limit_values(serves_several), layout.LIMITS):
        statistics.set(word, value)
