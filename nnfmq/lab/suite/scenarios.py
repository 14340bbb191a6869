"""The scenarios of the suite: what happens beside the measured clients, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from nnfmq.base.processes import allowed_cpus
from nnfmq.lab.stress.machine_load import MachineLoad

__all__ = ["SCENARIOS", "SuiteScenario", "seconds_of"]

Loads = Callable[[float], list[MachineLoad]]


def _nothing(seconds: float) -> list[MachineLoad]:
    return []


def _busy_cores(seconds: float) -> list[MachineLoad]:
    return [MachineLoad("cpu", None, 0.0, seconds)] * allowed_cpus()


def _memory(seconds: float) -> list[MachineLoad]:
    churn = [MachineLoad("churn", None, 0.0, seconds)] * allowed_cpus()
    return [MachineLoad("fill", None, 0.0, seconds), *churn]


def _compile(seconds: float) -> list[MachineLoad]:
    return [MachineLoad("compilation", None, 0.0, seconds)]


class SuiteScenario(NamedTuple):
    """A scenario: `meaning` is what happens beside the measured clients, `share` its part of the suite's time."""

    name: str
    meaning: str
    share: int = 1
    loads: Loads = _nothing
    has_many_clients: bool = False
    has_deaths: bool = False


SCENARIOS = {
    each.name: each
    for each in (
        SuiteScenario("idle", "nothing"),
        SuiteScenario("busy-cores", "a process for each CPU computes", loads=_busy_cores),
        SuiteScenario(
            "memory",
            "one process takes half of the available memory; one for each CPU takes and returns 64 MiB again and again",
            loads=_memory,
        ),
        SuiteScenario("compile", "another client prepares one model after the other", loads=_compile),
        SuiteScenario("many-clients", "several measured clients share the load", has_many_clients=True),
        SuiteScenario("peer-death", "other clients, and workers of other clients, are killed", has_deaths=True),
        SuiteScenario("soak", "nothing, for long: does the latency or the memory grow?", share=4),
    )
}
"""By name, in the order in which they are measured."""


def seconds_of(names: Sequence[str], minutes: float) -> dict[str, float]:
    """Return the seconds of each of the scenarios, which take so many minutes together."""
    total = sum(SCENARIOS[name].share for name in names)
    return {name: 60 * minutes * SCENARIOS[name].share / total for name in names}
