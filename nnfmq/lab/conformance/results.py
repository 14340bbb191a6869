"""Summary of a run: counts for each kind of test, failures and skips with reasons, and the coverage matrix.

Results are added as they arrive; names are kept of failures and skips only. In JSON, `total`, `passed`, `failed` and
`skipped` count the test models of the data; `variants` has the same four for each derived kind.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from nnfmq.lab.conformance.cases import FAILED, MODEL, PASSED, SKIPPED, ConformanceResult, TestOutcome
from nnfmq.lab.conformance.targets import NO_PLANS, PlanCounts
from nnfmq.lab.conformance.testmodels import KINDS
from nnfmq.lab.page import html_page

__all__ = ["FAILED", "MODEL", "PASSED", "SKIPPED", "Summary", "Tally", "render"]

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


# ----------------------------------------------------------------------------------------------------------------------
# HTML report of a run: a matrix of operations and operand types with counts, and failures with differences.
#
# One self-contained page without scripts or external resources. A cell counts the tests, with their variants, in which
# the operation has an operand of that type.


_STYLE = """
:root { --skip: #8883; }
body { max-width: 72rem; }
table { margin: .5rem 0 1.5rem; font-size: inherit; }
th, td { border: 1px solid var(--line); white-space: normal; }
th:first-child, td.text { text-align: left; }
thead th { position: sticky; top: 0; background: Canvas; vertical-align: bottom; }
.types th:not(:first-child) { writing-mode: vertical-rl; text-align: left; padding: .5rem .2rem; font-size: .8rem; }
.bad { font-weight: 600; } .skip { background: var(--skip); }
.matrix tbody th { font-weight: 400; font-size: .85rem; text-align: left; }
details { margin: .4rem 0; } summary { cursor: pointer; }
.minus { background: var(--good); } .plus { background: var(--bad); }
code, .diff td { font-family: ui-monospace, monospace; font-size: .85rem; }
"""


def render(summary: Summary, subject: str) -> str:
    """Return the page. `subject` describes what was tested."""
    headline = "everything passed" if summary.has_passed else "something failed"
    parts = [f"<p>{escape(subject)}</p>", *_counts(summary), *_failures(summary), *_skips(summary), *_matrix(summary)]
    return html_page(f"Conformance: {headline}", parts, _STYLE)


def _counts(summary: Summary) -> Iterator[str]:
    yield "<table><thead><tr><th>tests</th><th>total</th><th>passed</th><th>failed</th><th>skipped</th></tr></thead>"
    for kind, tally in summary.kinds.items():
        failed = f'<td class="{"bad" if tally.failed else "good"}">{len(tally.failed):,}</td>'
        counts = f"<td>{tally.total:,}</td><td>{tally.passed:,}</td>{failed}<td>{len(tally.skipped):,}</td>"
        yield f'<tr><td class="text">{escape(kind.replace("_", " "))}</td>{counts}</tr>'
    yield "</table>"


def _failures(summary: Summary) -> Iterator[str]:
    if not summary.has_passed:
        yield "<h2>Failures</h2>"
    for kind, tally in summary.kinds.items():
        for name, outcome in tally.failed:
            title = f"<b>{escape(name)}</b> ({escape(kind.replace('_', ' '))})"
            summary_line = f"<summary>{title}: {escape(outcome.reason)}</summary>"
            yield f"<details open>{summary_line}{''.join(_diff(outcome))}</details>"


def _diff(outcome: TestOutcome) -> Iterator[str]:
    found = [difference for mismatch in outcome.mismatches for difference in mismatch.differences]
    if not found:
        return
    yield '<table class="diff"><thead><tr><th>operand</th><th>index</th><th>expected</th><th>actual</th></tr></thead>'
    for difference in found:
        position = f'<td class="text">{escape(difference.operand)}</td><td>{escape(str(list(difference.index)))}</td>'
        minus, plus = escape(difference.expected), escape(difference.actual)
        yield f'<tr>{position}<td class="minus">− {minus}</td><td class="plus">+ {plus}</td></tr>'
    yield "</table>"


def _skips(summary: Summary) -> Iterator[str]:
    reasons = Counter(reason for tally in summary.kinds.values() for _, reason in tally.skipped)
    if reasons:
        yield "<h2>Skipped</h2><ul>"
        yield from (f"<li>{number:,}: {escape(reason)}</li>" for reason, number in reasons.most_common())
        yield "</ul>"


def _matrix(summary: Summary) -> Iterator[str]:
    operations = sorted({operation for operation, _ in summary.matrix})
    types = sorted({operand_type for _, operand_type in summary.matrix})
    heads = "".join(f"<th>{escape(name.removeprefix('TENSOR_'))}</th>" for name in types)
    yield "<h2>Operations and operand types</h2>"
    yield "<p>Tests, with their variants, in which the operation has an operand of the type: passed of all.</p>"
    yield f'<table class="matrix"><thead class="types"><tr><th>operation</th>{heads}</tr></thead><tbody>'
    for operation in operations:
        cells = "".join(_cell(summary.matrix.get((operation, operand_type))) for operand_type in types)
        yield f"<tr><th>{escape(operation)}</th>{cells}</tr>"
    yield "</tbody></table>"


def _cell(outcomes: Counter[str] | None) -> str:
    if not outcomes:
        return "<td></td>"
    look = "bad" if outcomes[FAILED] else "good" if outcomes[PASSED] else "skip"
    shown = f"{outcomes[PASSED]:,}" + (f" / {outcomes.total():,}" if outcomes[PASSED] != outcomes.total() else "")
    title = f"{outcomes[PASSED]} passed, {outcomes[FAILED]} failed, {outcomes[SKIPPED]} skipped"
    return f'<td class="{look}" title="{title}">{shown}</td>'
