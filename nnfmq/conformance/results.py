"""Summary of a run: counts for each kind of test, failures and skips with reasons, and the coverage matrix.

Results are added as they arrive; names are kept of failures and skips only. In JSON, `total`, `passed`, `failed` and
`skipped` count the test models of the data; `variants` has the same four for each derived kind.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from nnfmq.conformance.cases import FAILED, MODEL, PASSED, SKIPPED, ConformanceResult, TestOutcome
from nnfmq.conformance.targets import NO_PLANS, PlanCounts
from nnfmq.conformance.variants import KINDS

SLOWEST = 5


@dataclass(slots=True)
class Tally:
    """Outcomes of one kind of test."""

    passed: int = 0
    failed: list[tuple[str, TestOutcome]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)

    @property
    def total(self) -> int:
        """The number of tests of this kind."""
        return self.passed + len(self.failed) + len(self.skipped)

    def add(self, name: str, outcome: TestOutcome) -> None:
        """Add one outcome."""
        if outcome.status == PASSED:
            self.passed += 1
        elif outcome.status == FAILED:
            self.failed.append((name, outcome))
        else:
            self.skipped.append((name, outcome.reason))

    def as_json(self) -> dict[str, Any]:
        """Return total, passed, failed and skipped."""
        return {
            "total": self.total,
            "passed": self.passed,
            "failed": [_failure(name, outcome) for name, outcome in self.failed],
            "skipped": [{"name": name, "reason": reason} for name, reason in self.skipped],
        }


def _failure(name: str, outcome: TestOutcome) -> dict[str, Any]:
    differences = [asdict(found) for mismatch in outcome.mismatches for found in mismatch.differences]
    return {"name": name, "reason": outcome.reason, "differences": differences}


@dataclass(slots=True)
class Summary:
    """Outcomes of a run by kind, and the matrix: outcomes of each operation with each operand type."""

    kinds: dict[str, Tally] = field(default_factory=lambda: {kind: Tally() for kind in (MODEL, *KINDS)})
    matrix: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    slowest: list[tuple[int, str]] = field(default_factory=list)
    dumped: list[str] = field(default_factory=list)
    compared_steps: int = 0
    plans: PlanCounts = NO_PLANS

    @property
    def has_passed(self) -> bool:
        """Return True if nothing failed."""
        return not any(tally.failed for tally in self.kinds.values())

    def add(self, result: ConformanceResult) -> None:
        """Add one test model and its variants."""
        for outcome in result.outcomes:
            self.kinds[outcome.kind].add(result.name, outcome)
        for entry in result.matrix_entries:
            self.matrix.setdefault(entry, Counter()).update(outcome.status for outcome in result.outcomes)
        self.compared_steps += result.compared_steps
        self.plans += result.plans
        self.dumped += [result.dumped] if result.dumped else []
        self.slowest = heapq.nlargest(SLOWEST, [*self.slowest, (result.duration_ns, result.name)])

    def as_json(self) -> dict[str, Any]:
        """Return the JSON report, without the entries that the command adds."""
        slowest = [{"name": name, "duration_ns": duration_ns} for duration_ns, name in self.slowest]
        return {
            **self.kinds[MODEL].as_json(),
            "variants": {kind: self.kinds[kind].as_json() for kind in KINDS},
            "slowest": slowest,
            "dumped": self.dumped,
            "compared_steps": self.compared_steps,
            "plans": asdict(self.plans),
        }


__all__ = ["FAILED", "MODEL", "PASSED", "SKIPPED", "Summary", "Tally"]
