"""The models that a driver serves by name, and what its clients execute of them, for `nnfmq status` and `nnfmq top`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nnfmq.observe.latency_histogram import LatencyHistogram

if TYPE_CHECKING:
    from nnfmq.cli.statistics_sample import Activity
    from nnfmq.runtime.client import Client
    from nnfmq.serialize.repository_protocol import ModelEntry

__all__ = ["ServedActivity", "ServedModels", "read_served_models", "served_activities"]

_Key = tuple[str, int]  # name and version


class ServedModels(NamedTuple):
    """The list of a driver's model repository, None if the driver has none; and why the list is missing, or nothing."""

    entries: list[ModelEntry] | None = None
    problem: str = ""


def read_served_models(client: Client, socket: str | None, timeout: float) -> ServedModels:
    """Return the models that the driver at `socket` serves by name; blocks up to `timeout` seconds."""
    from nnfmq.cli import describe
    from nnfmq.hal.errors import NnfmqError
    from nnfmq.paths import default_socket, models_socket

    if not models_socket(default_socket() if socket is None else Path(socket)).exists():
        return ServedModels()
    try:
        return ServedModels(client.models(timeout=timeout))
    except NnfmqError as error:
        return ServedModels(None, describe(error))


@dataclass(slots=True)
class ServedActivity:
    """What all clients execute of one version of a served model between two samples.

    `state` is empty for a version that the repository does not serve any more, or not to those that ask for none.
    """

    name: str
    version: int
    state: str = ""
    per_s: float = 0.0
    failures: int = 0
    failures_per_s: float = 0.0
    bursts: int = 0
    latency: LatencyHistogram = field(default_factory=LatencyHistogram)

    def as_json(self) -> dict[str, Any]:
        """Return it as printed in JSON."""
        return {
            "name": self.name,
            "version": self.version or None,
            "state": self.state or None,
            "per_s": round(self.per_s, 3),
            "p50_ns": self.latency.quantile_ns(0.5),
            "p99_ns": self.latency.quantile_ns(0.99),
            "bursts": self.bursts,
            "failures": self.failures,
            "failures_per_s": round(self.failures_per_s, 3),
        }


def served_activities(entries: Iterable[ModelEntry], activity: Activity) -> list[ServedActivity]:
    """Return a row for the served version of each model, and for each other version that clients use, by name."""
    served = {
        (entry.name, entry.version): ServedActivity(entry.name, entry.version, entry.state.value) for entry in entries
    }
    used: dict[_Key, ServedActivity] = {}
    bursts = _open_bursts(activity)
    for row in activity.models:
        key = row.model.name, row.model.version
        if not row.model.version or not (key in served or row.model.executions or row.model.failures or bursts[key]):
            continue  # not of the repository; or it has it prepared and serves it in a moment
        found = served.get(key) or used.setdefault(key, ServedActivity(*key))
        found.per_s += row.per_s
        found.failures += row.model.failures
        found.failures_per_s += row.failures_per_s
        found.latency += row.latency
        found.bursts = bursts[key]
    rows = [*served.values(), *used.values()]
    return sorted(rows, key=lambda row: (row.name, not row.state, -row.version))  # the served version before others


def _open_bursts(activity: Activity) -> Counter[_Key]:
    """Return the number of open bursts of each model."""
    found: Counter[_Key] = Counter()
    for client in activity.now.statistics.clients:
        models = {model.id: (model.name, model.version) for model in client.models}
        found.update(models[burst.model_id] for burst in client.bursts if burst.model_id in models)
    return found
