"""The sum of a run: counts by kind, what failed and why, what was skipped and why, and the matrix.

Results are added as they come, and only failures and skips keep their names. `total`, `passed`, `failed` and `skipped`
are about the test models of the data; `variants` holds the same four for each derived kind.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from nnfmq.conformance.cases import FAILED, MODEL, PASSED, SKIPPED, Result, Verdict
from nnfmq.conformance.variants import KINDS

SLOWEST = 5


@dataclass(slots=True)
class Tally:
    """One kind of test."""

    passed: int = 0
    failed: list[tuple[str, Verdict]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Return how many were judged."""
        return self.passed + len(self.failed) + len(self.skipped)

    def add(self, name: str, verdict: Verdict) -> None:
        """Count one verdict."""
        if verdict.outcome == PASSED:
            self.passed += 1
        elif verdict.outcome == FAILED:
            self.failed.append((name, verdict))
        else:
            self.skipped.append((name, verdict.reason))

    def as_json(self) -> dict[str, Any]:
        """Return the four entries."""
        return {
            "total": self.total,
            "passed": self.passed,
            "failed": [_failure(name, verdict) for name, verdict in self.failed],
            "skipped": [{"name": name, "reason": reason} for name, reason in self.skipped],
        }


def _failure(name: str, verdict: Verdict) -> dict[str, Any]:
    differences = [asdict(found) for complaint in verdict.complaints for found in complaint.differences]
    return {"name": name, "reason": verdict.reason, "differences": differences}


@dataclass(slots=True)
class Summary:
    """All kinds of a run, and its matrix: outcomes of each operation with each operand type."""

    kinds: dict[str, Tally] = field(default_factory=lambda: {kind: Tally() for kind in (MODEL, *KINDS)})
    matrix: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    slowest: list[tuple[int, str]] = field(default_factory=list)
    dumped: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Return True if nothing failed."""
        return not any(tally.failed for tally in self.kinds.values())

    def add(self, result: Result) -> None:
        """Count one test model and its variants."""
        for verdict in result.verdicts:
            self.kinds[verdict.kind].add(result.name, verdict)
        for cell in result.cells:
            self.matrix.setdefault(cell, Counter()).update(verdict.outcome for verdict in result.verdicts)
        self.dumped += [result.dumped] if result.dumped else []
        self.slowest = heapq.nlargest(SLOWEST, [*self.slowest, (result.duration_ns, result.name)])

    def as_json(self) -> dict[str, Any]:
        """Return the report, without what only the command knows."""
        slowest = [{"name": name, "duration_ns": duration_ns} for duration_ns, name in self.slowest]
        return {
            **self.kinds[MODEL].as_json(),
            "variants": {kind: self.kinds[kind].as_json() for kind in KINDS},
            "slowest": slowest,
            "dumped": self.dumped,
        }


__all__ = ["FAILED", "MODEL", "PASSED", "SKIPPED", "Summary", "Tally"]
