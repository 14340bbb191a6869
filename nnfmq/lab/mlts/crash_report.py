"""The results of the crash tests as one self-contained HTML page, and as CSV."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape

from nnfmq.lab.mlts.crash_runner import CrashResult
from nnfmq.lab.mlts.crash_tests import CrashOutcome
from nnfmq.lab.page import page

COLUMNS = ("device", "target", "test", "outcome", "expected", "duration_s", "killed", "steps", "reason")


def render(results: Sequence[CrashResult], subject: str) -> str:
    """Return the page: numbers of outcomes, a matrix of tests and devices, and the reasons of failures."""
    failed = [result for result in results if result.has_failed]
    headline = f"{len(failed)} of {len(results)} failed" if failed else "all as expected"
    parts = [f"<p>{escape(subject)}</p>", *_counts(results), *_matrix(results), *_reasons(failed)]
    return page(f"MLTS crash tests: {headline}", parts)


def _counts(results: Sequence[CrashResult]) -> Iterator[str]:
    counts = Counter(result.outcome for result in results)
    yield f"<p>{', '.join(f'{counts[outcome]} {outcome}' for outcome in CrashOutcome if counts[outcome])}</p>"


def _matrix(results: Sequence[CrashResult]) -> Iterator[str]:
    devices = list(dict.fromkeys(result.device for result in results))
    tests = list(dict.fromkeys(result.test.name for result in results))
    cells = {(result.test.name, result.device): result for result in results}
    heads = "".join(f"<th>{escape(device)}</th>" for device in devices)
    yield f'<div class="scroll"><table><tr><th>test</th>{heads}</tr>'
    for test in tests:
        row = "".join(_cell(cells.get((test, device))) for device in devices)
        yield f"<tr><td class=text>{escape(test)}</td>{row}</tr>"
    yield "</table></div>"
    if any(result.codes for result in results):
        yield "<p>Numbers are executions, preparations, or random graphs.</p>"


def _cell(result: CrashResult | None) -> str:
    if result is None:
        return "<td></td>"
    style = "bad" if result.has_failed else "good" if result.outcome is result.test.expected else ""
    steps, killed = sum(result.codes.values()), f", {result.killed} clients killed" if result.killed else ""
    title = f"{steps:,} steps in {result.duration_ns / 1e9:.1f} s{killed}"
    number = f" <small>{steps:,}</small>" if steps else ""
    return f'<td class="{style}" title="{title}">{result.outcome}{number}</td>'


def _reasons(failed: Sequence[CrashResult]) -> Iterator[str]:
    if failed:
        yield "<h2>Reasons</h2><ul>"
        for result in failed:
            where = f"{result.test.name} on {result.device}"
            reason = result.reason or f"expected was {result.test.expected}"
            yield f"<li><b>{result.outcome}</b> {escape(where)}: {escape(reason)}</li>"
        yield "</ul>"


def render_csv(results: Sequence[CrashResult], comment: str) -> str:
    """Return a comment with time and version, a comment with the columns, and a line for each result."""
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    sink.write(f"# {comment}\n# ")
    writer.writerow(COLUMNS)
    for result in results:
        steps = " ".join(f"{code.replace(' ', '_')}={number}" for code, number in sorted(result.codes.items()))
        writer.writerow(
            (
                result.device, result.test.target, result.test.name, result.outcome, result.test.expected,
                f"{result.duration_ns / 1e9:.3f}", result.killed, steps, result.reason,
            )
        )  # fmt: skip
    return sink.getvalue()
