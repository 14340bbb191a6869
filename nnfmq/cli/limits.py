"""The limits of a driver, for `nnfmq status`: each with its value, its setting, and how much of it is in use."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from nnfmq.base.processes import children, process_usage
from nnfmq.cli.statistics_tables import size_text
from nnfmq.observe.limits import BYTES, LIMITS, MILLISECONDS, Limit

if TYPE_CHECKING:
    from nnfmq.cli.statistics_tables import Rows
    from nnfmq.observe.driver_statistics import DriverStatistics

__all__ = ["limit_rows", "limits_json"]


def _uses(statistics: DriverStatistics) -> dict[tuple[str, str], int]:
    """Return how much is in use now, by name and of whom: the most of any client, process or compile process."""
    clients = statistics.clients
    compilers = children(statistics.compile_server_pid) if statistics.compile_server_pid else []
    charged, models, threads = Counter[int](), Counter[int](), Counter[int]()
    for client in clients:
        charged[client.uid] += client.charged_bytes
        models[client.uid] += client.model_count
        threads[client.uid] += client.thread_count
    resident = [used.resident_bytes for pid in compilers if (used := process_usage(pid)) is not None]
    return {
        ("clients", "driver"): len(clients),
        ("clients", "process"): max(Counter(client.pid for client in clients if client.pid).values(), default=0),
        ("clients", "user"): max(Counter(client.uid for client in clients).values(), default=0),
        ("memory", "user"): max(charged.values(), default=0),
        ("memory", "driver"): sum(client.charged_bytes for client in clients),
        ("memory", "client"): max((client.charged_bytes for client in clients), default=0),
        ("models", "user"): max(models.values(), default=0),
        ("models", "client"): max((client.model_count for client in clients), default=0),
        ("bursts", "client"): max((client.burst_count for client in clients), default=0),
        ("threads", "user"): max(threads.values(), default=0),
        ("threads", "client"): max((client.thread_count for client in clients), default=0),
        ("calls", "client"): max((client.open_calls for client in clients), default=0),
        ("compilers", "driver"): len(compilers),
        ("memory", "compiler"): max(resident, default=0),
        ("programs", "driver"): statistics.cache.size_bytes,
    }


def limits_json(statistics: DriverStatistics) -> list[dict[str, Any]]:
    """Return all limits; `limit` is None without one, `use` if nobody counts it."""
    uses = _uses(statistics)
    return [
        {
            "name": limit.name,
            "of": limit.of,
            "use": uses.get((limit.name, limit.of)),
            "limit": value or None,
            "unit": limit.unit or None,
            "setting": limit.variable or None,
        }
        for limit, value in zip(LIMITS, statistics.limits, strict=False)
    ]


def limit_rows(statistics: DriverStatistics, *, min_share: float = 0.0) -> Rows:
    """Return headings and cells of a table of the limits of which so much is in use; no rows for an embedded driver."""
    uses = _uses(statistics)
    rows: list[tuple[str, ...]] = []
    for limit, value in zip(LIMITS, statistics.limits, strict=False):
        use = uses.get((limit.name, limit.of))
        if not min_share or (use and value and use >= min_share * value):
            rows.append((limit.name, limit.of, _text(limit, use), _text(limit, value or None), limit.variable or "-"))
    return ("limit", "of each", ">in use", ">at most", "setting"), rows


def _text(limit: Limit, value: int | None) -> str:
    if value is None:
        return "-"
    if limit.unit == BYTES:
        return size_text(value)
    return f"{value / 1000:g} s" if limit.unit == MILLISECONDS else f"{value:,}"
