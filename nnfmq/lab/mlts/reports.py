"""The results of `nnfmq mlts`, of its benchmark and of its crash tests, as self-contained HTML pages, and as CSV.

In the benchmark's page the first row of a model is the baseline; in the other rows its values are compared with the
baseline's, better ones green and worse ones red if they differ by 1 % or more.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from html import escape
from itertools import groupby
from typing import Any, TypeAlias

from nnfmq.lab.mlts.backends import FROM_CACHE, SAVING, WITHOUT_CACHE
from nnfmq.lab.mlts.crash_runner import CrashResult
from nnfmq.lab.mlts.crash_tests import CrashOutcome
from nnfmq.lab.mlts.scoring import OK, ScoringResult
from nnfmq.lab.page import html_page
from nnfmq.lab.statistics import BUCKETS, LatencyBlock

__all__ = ["crash_csv", "crash_page", "histogram", "scoring_columns", "scoring_csv", "scoring_page"]

_MIN_DIFFERENCE = 0.01  # smaller ones have no colour
_MANY_TIMES = 9.0  # an increase from which the factor is shown instead of the percentage
_METRIC_LABELS = {
    "max_mel_cep_distortion": "mel-cep distortion",
    "max_log_f0_error": "log F0 error",
    "max_phone_error_rate": "phone errors %",
}
_WIDTH, _HEIGHT = 320, 70
_STYLE = """
.scroll { margin: .5rem 0 1.5rem; }
th:first-child { text-align: left; }
.charts { grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); }
svg rect { fill: var(--bar); }
"""


def scoring_page(results: Sequence[Sequence[ScoringResult]], subject: str, litert_missing: str = "") -> str:
    """Return the page of the results of each test; `subject` describes time, version and machine.

    `litert_missing` is the reason why there is no baseline.
    """
    there = [test for test in results if any(result.status == OK for result in test)]
    failed = [result for test in results for result in test if result.has_failed]
    headline = f"{len(failed)} of {sum(map(len, there))} results failed" if failed else "no errors"
    parts = [f"<p>{escape(text)}</p>" for text in (subject, litert_missing) if text]
    parts += _errors(failed)
    for group, members in groupby(there, key=lambda test: test[0].model.group):
        tests = list(members)
        parts += [f"<h2>{escape(group)}</h2>", *_accuracy(tests), *_compilation(tests), *_histograms(tests)]
    return html_page(f"MLTS: {headline}", [*parts, *_missing(results)], _STYLE)


def _errors(failed: Sequence[ScoringResult]) -> Iterator[str]:
    if not failed:
        return
    yield "<h2>Errors</h2>"
    yield '<div class="scroll"><table><tr><th>test</th><th>backend</th><th class="text">error</th></tr>'
    for result in failed:
        for text in (*([result.reason] if result.reason else []), *result.accuracy.errors):
            cells = (result.model.name, result.backend, text)
            yield f'<tr class="bad">{"".join(f"<td class=text>{escape(cell)}</td>" for cell in cells)}</tr>'
    yield "</table></div>"


def _accuracy(tests: Sequence[Sequence[ScoringResult]]) -> Iterator[str]:
    """Yield a table for each test, with the columns for which it has values."""
    for test in tests:
        columns = _columns(test)
        heads = "".join(f"<th>{head}</th>" for head in ("backend", "data", *columns, "p50 ms", "p99 ms", "mean ms"))
        yield f'<h3>{escape(test[0].model.name)}</h3><div class="scroll"><table><tr>{heads}</tr>'
        for result in test:
            cells = [
                f"<td class=text>{escape(result.backend)}</td>",
                f"<td>{result.data_count:,} of {result.model.total:,}</td>" if result.data_count else "<td></td>",
                *(cell(result, test[0]) for cell in columns.values()),
                *(_time(result.latency, test[0].latency, name) for name in ("p50_ns", "p99_ns", "mean_ns")),
            ]
            yield f"<tr{' class=bad' if result.has_failed else ''}>{''.join(cells)}</tr>"
        yield "</table></div>"


_Cell: TypeAlias = Callable[[ScoringResult, ScoringResult], str]


def _columns(test: Sequence[ScoringResult]) -> dict[str, _Cell]:
    """Return the headings of the metrics that a test has, and the function that makes a cell of each."""
    metrics = dict.fromkeys(name for result in test for name in result.accuracy.metrics)
    columns: dict[str, _Cell] = {f"top-{k}": partial(_rate, name=f"top_{k}") for k in (1, 5) if f"top_{k}" in metrics}
    columns |= {label: partial(_metric, name=name) for name, label in _METRIC_LABELS.items() if name in metrics}
    if any(result.accuracy.max_error is not None for result in test):
        columns["largest error"] = _max_error
    return columns


def _metric(result: ScoringResult, _baseline: ScoringResult, name: str) -> str:
    value = result.accuracy.metrics.get(name)
    return f"<td>{'' if value is None else f'{value:.3g}'}</td>"


def _max_error(result: ScoringResult, _baseline: ScoringResult) -> str:
    error = result.accuracy.max_error
    return f"<td>{'' if error is None else f'{error:.3g}'}</td>"


def _rate(result: ScoringResult, baseline: ScoringResult, name: str) -> str:
    found, base = (one.accuracy.metrics.get(name) for one in (result, baseline))
    if found is None:
        return "<td></td>"
    difference = 0.0 if base is None else found - base
    style = "better" if difference >= _MIN_DIFFERENCE else "worse" if difference <= -_MIN_DIFFERENCE else ""
    text = f"{100 * found:.1f} %" + (f" ({100 * difference:+.1f})" if difference else "")
    return f'<td class="{style}">{text}</td>'


def _time(block: LatencyBlock | None, base: LatencyBlock | None, name: str) -> str:
    if block is None:
        return "<td></td>"
    found = getattr(block, name)
    text, style = f"{found / 1e6:,.3f}", ""
    if base is not None and base is not block:
        change = found / getattr(base, name) - 1
        text += f" ({change + 1:,.0f} ×)" if change >= _MANY_TIMES else f" ({100 * change:+.0f} %)"
        style = "better" if change <= -_MIN_DIFFERENCE else "worse" if change >= _MIN_DIFFERENCE else ""
    return f'<td class="{style}">{text}</td>'


def _compilation(tests: Sequence[Sequence[ScoringResult]]) -> Iterator[str]:
    kinds = list(dict.fromkeys(kind for test in tests for result in test for kind in result.compilation))
    if not kinds:
        return
    heads = "".join(f"<th>{kind}, ms</th>" for kind in (*kinds, "start"))
    yield "<h3>Compilation and start, p50</h3>"
    yield f'<div class="scroll"><table><tr><th>model</th><th>backend</th>{heads}<th>cache KB</th></tr>'
    for test in tests:
        for result in (result for result in test if result.compilation):
            blocks = [(result.compilation.get(kind), test[0].compilation.get(kind)) for kind in kinds]
            times = "".join(_time(*pair, "p50_ns") for pair in [*blocks, (result.start, test[0].start)])
            names = f"<td class=text>{escape(result.model.file)}</td><td class=text>{escape(result.backend)}</td>"
            size = f"{result.cache_bytes / 1000:,.0f}" if result.cache_bytes else ""
            yield f"<tr>{names}{times}<td>{size}</td></tr>"
    yield "</table></div>"


def _histograms(tests: Sequence[Sequence[ScoringResult]]) -> Iterator[str]:
    yield "<h3>Latencies</h3><div class=charts>"
    for test in tests:
        for result in test:
            if result.latency is not None:
                title = f"{result.model.name}, {result.backend}"
                yield f"<figure>{histogram(result.latency)}<figcaption>{escape(title)}</figcaption></figure>"
    yield "</div>"


def histogram(block: LatencyBlock) -> str:
    """Return a histogram as SVG: a bar for each bucket, the first and the last duration below."""
    width, highest = _WIDTH / len(block.counts), max(block.counts)
    bars = "".join(
        f'<rect x="{index * width:.1f}" y="{_HEIGHT * (1 - count / highest):.1f}" width="{width - 1:.1f}" '
        f'height="{_HEIGHT * count / highest:.1f}"/>'
        for index, count in enumerate(block.counts)
        if count
    )
    low, high = block.start_ns, block.start_ns + block.step_ns * len(block.counts)
    labels = (
        f'<text x="0" y="{_HEIGHT + 14}">{low / 1e6:,.3f} ms</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT + 14}" text-anchor="end">{high / 1e6:,.3f} ms</text>'
    )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 18}" role="img">{bars}{labels}</svg>'


def _missing(results: Sequence[Sequence[ScoringResult]]) -> Iterator[str]:
    absent = [test[0] for test in results if test and test[0].status not in (OK,) and not test[0].has_failed]
    if absent:
        yield f"<h2>Missing ({len(absent)})</h2><ul>"
        yield from (f"<li>{escape(result.model.name)}: {escape(result.reason)}</li>" for result in absent)
        yield "</ul>"


# ----------------------------------------------------------------------------------------------------------------------
# The benchmark's results as CSV: a comment with time and version, a comment with the columns, a line for each test.
#
# Unlike MLTS's program, a test that failed or is missing has its line, too, with its status and reason.


METRICS = (
    "top_1", "top_2", "top_3", "top_4", "top_5",
    "max_mel_cep_distortion", "max_log_f0_error", "max_phone_error_rate",
)  # fmt: skip
_BLOCK = ("iterations", "total_s", "mean_s", "std_dev_s", "p50_s", "p99_s", "histogram_start_s", "histogram_step_s")
_KINDS = {"latency": "", "compile": WITHOUT_CACHE, "compile_saving": SAVING, "compile_cached": FROM_CACHE, "start": ""}


def scoring_columns() -> list[str]:
    """Return the names of the columns, in their order."""
    known = ["name", "backend", "status", "reason", "data_count", "data_total", "mse", "max_error", *METRICS, "errors"]
    blocks = [f"{kind}_{name}" for kind in _KINDS for name in (*_BLOCK, "histogram")]
    return [*known, "cache_bytes", *blocks]


def scoring_csv(results: Iterable[ScoringResult], comment: str) -> str:
    """Return the text; `comment` has the time and the version."""
    return _csv(comment, scoring_columns(), map(_row, results))


def _csv(comment: str, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a comment, a comment with the columns, and a line for each row."""
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    sink.write(f"# {comment}\n# ")
    writer.writerow(columns)
    writer.writerows(rows)
    return sink.getvalue()


def _row(result: ScoringResult) -> Iterator[Any]:
    accuracy = result.accuracy
    yield from (result.model.name, result.backend, result.status, result.reason)
    yield from (result.data_count, result.model.total, _text(accuracy.mse), _text(accuracy.max_error))
    yield from (_text(accuracy.metrics.get(name)) for name in METRICS)
    yield "; ".join(accuracy.errors)
    yield result.cache_bytes
    blocks = {"latency": result.latency, "start": result.start}
    for kind, name in _KINDS.items():
        yield from _block(result.compilation.get(name) if name else blocks[kind])


def _block(block: LatencyBlock | None) -> Iterator[Any]:
    """Yield the fields of a block, times in seconds; the counts of the histogram are one field."""
    if block is None:
        yield from [""] * (len(_BLOCK) + 1)
        return
    yield block.iterations
    times = (block.total_ns, block.mean_ns, block.std_dev_ns, block.p50_ns, block.p99_ns, block.start_ns, block.step_ns)
    yield from (f"{time_ns / 1e9:.9f}" for time_ns in times)
    assert len(block.counts) == BUCKETS
    yield " ".join(map(str, block.counts))


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.9g}"


# ----------------------------------------------------------------------------------------------------------------------
# The results of the crash tests.


CRASH_COLUMNS = ("device", "target", "test", "outcome", "expected", "duration_s", "killed", "steps", "reason")


def crash_page(results: Sequence[CrashResult], subject: str) -> str:
    """Return the page: numbers of outcomes, a matrix of tests and devices, and the reasons of failures."""
    failed = [result for result in results if result.has_failed]
    headline = f"{len(failed)} of {len(results)} failed" if failed else "all as expected"
    parts = [f"<p>{escape(subject)}</p>", *_counts(results), *_matrix(results), *_reasons(failed)]
    return html_page(f"MLTS crash tests: {headline}", parts, _STYLE)


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


def crash_csv(results: Sequence[CrashResult], comment: str) -> str:
    """Return a comment with time and version, a comment with the columns, and a line for each result."""
    return _csv(comment, CRASH_COLUMNS, map(_crash_row, results))


def _crash_row(result: CrashResult) -> tuple[Any, ...]:
    steps = " ".join(f"{code.replace(' ', '_')}={number}" for code, number in sorted(result.codes.items()))
    return (
        result.device, result.test.target, result.test.name, result.outcome, result.test.expected,
        f"{result.duration_ns / 1e9:.3f}", result.killed, steps, result.reason,
    )  # fmt: skip
