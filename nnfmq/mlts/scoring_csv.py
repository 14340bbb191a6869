"""The benchmark's results as CSV: a comment with time and version, a comment with the columns, a line for each test.

Unlike MLTS's program, a test that failed or is missing has its line, too, with its status and reason.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from typing import Any

from nnfmq.mlts.backends import FROM_CACHE, SAVING, WITHOUT_CACHE
from nnfmq.mlts.latencies import BUCKETS, LatencyBlock
from nnfmq.mlts.scoring import ScoringResult

METRICS = (
    "top_1", "top_2", "top_3", "top_4", "top_5",
    "max_mel_cep_distortion", "max_log_f0_error", "max_phone_error_rate",
)  # fmt: skip
_BLOCK = ("iterations", "total_s", "mean_s", "std_dev_s", "p50_s", "p99_s", "histogram_start_s", "histogram_step_s")
_KINDS = {"latency": "", "compile": WITHOUT_CACHE, "compile_saving": SAVING, "compile_cached": FROM_CACHE, "start": ""}


def columns() -> list[str]:
    """Return the names of the columns, in their order."""
    known = ["name", "backend", "status", "reason", "data_count", "data_total", "mse", "max_error", *METRICS, "errors"]
    blocks = [f"{kind}_{name}" for kind in _KINDS for name in (*_BLOCK, "histogram")]
    return [*known, "cache_bytes", *blocks]


def render(results: Iterable[ScoringResult], comment: str) -> str:
    """Return the text; `comment` has the time and the version."""
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    sink.write(f"# {comment}\n# ")
    writer.writerow(columns())
    for result in results:
        writer.writerow(list(_row(result)))
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
