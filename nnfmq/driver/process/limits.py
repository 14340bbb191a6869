"""The values of a driver's limits, for its statistics; and the descriptors that its supervisor may need."""

from __future__ import annotations

import resource

from nnfmq.base import settings
from nnfmq.driver.cache.shared import ENTRIES_MAX
from nnfmq.driver.compilation.process import processes_max
from nnfmq.driver.memory.quota import quota_limit_bytes, total_limit_bytes, user_limit_bytes
from nnfmq.driver.process.admission import CLIENTS_MAX, MONITORS_MAX, user_clients
from nnfmq.driver.process.statistics_area import StatisticsArea
from nnfmq.observe import statistics_layout as layout
from nnfmq.observe.limits import BYTES, LIMITS, MILLISECONDS

__all__ = ["CLIENT_FDS", "USER_ENTRIES_MIN", "few_descriptors", "limit_values", "publish_limits", "worker_start"]

CLIENT_FDS = {"fork": 8, "exec": 10}
"""Descriptors of a supervisor for each client, by how its workers start."""
USER_ENTRIES_MIN = 8
"""Programs that the clients of one user share at least, of a driver that serves several; a descriptor each."""
_OWN_FDS = 64  # and those of processes that write to the cache

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


def worker_start(*, serves_several: bool) -> str:
    """Return how the workers of a driver start, `fork` or `exec`: as the setting says, or else by whom it serves."""
    return settings.WORKER_START.value() or ("exec" if serves_several else "fork")


def few_descriptors(*, serves_several: bool, clients_max: int = CLIENTS_MAX) -> str:
    """Return why a supervisor with this hard limit may lack descriptors, and the remedy; empty if it may not."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    entries = clients_max * USER_ENTRIES_MIN if serves_several else ENTRIES_MAX
    needed = _OWN_FDS + (clients_max + MONITORS_MAX) * CLIENT_FDS[worker_start(serves_several=serves_several)] + entries
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return ""
    return (
        f"{clients_max} clients with what they share may take {needed} descriptors, and the limit is {limit:,}: some "
        f"clients may be rejected; raise it (ulimit -Hn, or LimitNOFILE= of a systemd service)"
    )
