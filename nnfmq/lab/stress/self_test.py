"""The self-test of the attribution: cause what it should name, at seeded times, and compare blindly.

Each run has one disturbance, or two, or none. Right is a run for which exactly its disturbances are named. In a run
without one, other processes must have used less CPU time than a cause must explain to be named; it is repeated until
they have.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from nnfmq.lab import placement
from nnfmq.lab.child_processes import BenchmarkFailed
from nnfmq.lab.stress.attribution import NAMED_MIN_NS, SlowRequest, largest_part, named_causes
from nnfmq.lab.stress.clients import StressClient
from nnfmq.lab.stress.counters import PERIOD_US, limited_group
from nnfmq.lab.stress.disturbances import can_reclaim, draw_plan
from nnfmq.lab.stress.trial import TrialRecords, TrialSetup, run_trial
from nnfmq.observe.causes import CAUSES

__all__ = ["ConfusionMatrix", "NamedCause", "combinations_of", "run_self_test", "unavailable_causes"]

NONE = "none"
RUN_S = 1.2
_REPETITIONS_MAX = 9


def combinations_of(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return no disturbance, each of `names`, and each pair of them."""
    return [(), *((name,) for name in names), *combinations(names, 2)]


class NamedCause(NamedTuple):
    """The time in ns that a cause explains in a run, and its evidence for the request of which it explains most."""

    explained_ns: int
    evidence: str


@dataclass(slots=True)
class ConfusionMatrix:
    """The causes that were named in runs with each disturbance.

    `unexpected` has the causes that were named without having been brought about, with the evidence: of another program
    on the machine, or of an error of the analysis. `repeated` counts the runs that were repeated, because other
    processes disturbed them, and `excluded` those that they disturbed each time.
    """

    rows: dict[tuple[str, ...], list[tuple[str, ...]]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    unexpected: list[dict[str, Any]] = field(default_factory=list)
    repeated: int = 0
    excluded: int = 0

    def add(self, disturbances: Iterable[str], named: Mapping[str, NamedCause] | None, repetitions: int = 0) -> None:
        """Add a run, and the causes that were named for it; None: other processes disturbed it each time."""
        key = _ordered(disturbances)
        runs = self.rows.setdefault(key, [])
        self.repeated += repetitions
        if named is None:
            self.excluded += 1
            return
        runs.append(_ordered(named))
        for name in sorted(named.keys() - key):
            self.unexpected.append({"disturbances": list(key), "cause": name, **named[name]._asdict()})

    def counts(self, disturbances: Iterable[str]) -> Counter[str]:
        """Return in how many runs with these disturbances each cause was named; `none` counts runs without one."""
        runs = self.rows.get(_ordered(disturbances), [])
        return Counter(name for named in runs for name in (named or (NONE,)))

    def right(self, disturbances: Iterable[str]) -> tuple[int, int]:
        """Return how many runs with these disturbances were right, and how many there were."""
        key = _ordered(disturbances)
        runs = self.rows.get(key, [])
        return sum(named == key for named in runs), len(runs)

    def share(self) -> float:
        """Return the share of right runs among all with disturbances; 1 if there are none."""
        found = [self.right(key) for key in self.rows if key]
        total = sum(count for _, count in found)
        return sum(right for right, _ in found) / total if total else 1.0

    def report(self) -> dict[str, Any]:
        """Return the matrix for JSON."""
        rows = []
        for key in self.rows:
            right, runs = self.right(key)
            rows.append({"disturbances": list(key), "runs": runs, "right": right, "named": dict(self.counts(key))})
        return {
            "rows": rows,
            "right_share": self.share(),
            "unexpected": self.unexpected,
            "repeated": self.repeated,
            "excluded": self.excluded,
            "skipped": self.skipped,
        }


def _ordered(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names), key=list(CAUSES).index))


def unavailable_causes(folder: Path, pid: int) -> dict[str, str]:
    """Return the causes that cannot be brought about here, with the reasons. A CPU limit is tried on process `pid`."""
    found = {}
    if placement.two_cpus() is None:
        found["cpu-worker"] = "client and worker need a CPU each, and this process may use one only"
    if not can_reclaim(folder):
        found["memory"] = f"the kernel does not reclaim mapped files in {folder}; set TMPDIR to a folder on a disk"
    try:
        with limited_group(pid) as group:
            group.limit(PERIOD_US)
    except (BenchmarkFailed, OSError) as reason:
        found["throttling"] = str(reason)
    return found


def run_self_test(
    client: StressClient, setup: TrialSetup, plans: Sequence[tuple[str, ...]], runs: int, seed: int,
    progress: Callable[[str], object],
) -> Iterator[tuple[tuple[str, ...], dict[str, NamedCause] | None, int]]:  # fmt: skip
    """Yield the arguments of `ConfusionMatrix.add` for each run. Blocks for each run."""
    cpus = setup.cpus[0].client, setup.cpus[0].driver
    numbered = [(run, number, names) for run in range(runs) for number, names in enumerate(plans)]
    for position, (run, number, names) in enumerate(numbered):
        text = f"run {position + 1} of {len(numbered)}: {', '.join(names) or NONE}"
        progress(text)
        plan = draw_plan(names, RUN_S, cpus, random.Random(f"{seed} {run} {number}"))
        trial = partial(run_trial, [client], setup, plan, RUN_S, position, partial(progress, text))
        yield names, *(_undisturbed(trial) if not names else (_named(trial().slow_requests()), 0))


def _undisturbed(trial: Callable[[], TrialRecords]) -> tuple[dict[str, NamedCause] | None, int]:
    """Return the causes named in the first trial that other processes leave alone, and how many were before it.

    Whether a trial counts does not depend on what is named in it.
    """
    for repetitions in range(_REPETITIONS_MAX + 1):
        found = trial()
        if found.others_ns < NAMED_MIN_NS:
            return _named(found.slow_requests()), repetitions
    return None, _REPETITIONS_MAX


def _named(slow: Sequence[SlowRequest]) -> dict[str, NamedCause]:
    causes = named_causes(slow)
    return {name: NamedCause(explained, largest_part(slow, name).evidence) for name, explained in causes.items()}
