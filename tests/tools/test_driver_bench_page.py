"""The page with the results of memory_bench.py, isolation_bench.py and sharing_bench.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import driver_bench_page
import pytest
from bench_targets import failed, lower_limit, upper_limit
from model_bench_page import DOCS

MIB = 1 << 20
SIZES = {"pss": 3 * MIB, "private_dirty": 2 * MIB, "anonymous": MIB, "file": MIB, "shared": MIB}
FOUND = {"kinds": {"worker": {"count": 2, **SIZES}}, "total": SIZES}
MEMORY: dict[str, Any] = {
    "conditions": {"clients": 2, "load_before": [0.1, 0.2], "together": False},
    "sections": [
        {"section": "quantized", "nnfmq": FOUND, "litert": FOUND, "idle": {"before any client": FOUND},
         "targets": [upper_limit("ratio", (1.4, 1.6), 1.45, 1.5, "×")]},
    ],
}  # fmt: skip
TIMES = {"p50": 1.0, "p99": 2.0, "max": 3.0, "p99.9": 2.5, "count": 4}
ISOLATION: dict[str, Any] = {
    "conditions": {"cpu": "x"},
    "connections": {"silent": 2000, "failed": 4, "alone_ms": TIMES, "beside_ms": None,
                    "targets": [failed("delay", 50, "ms")]},
    "kills": [{"phase": "copying", "kills": 4, "work_s": 0.5, "status": "NONE", "used_bytes": 5 * MIB, "exit_ms": TIMES,
               "memory_ms": TIMES, "targets": [upper_limit("exit", (2.0,), 2.0, 100, "ms")]}],
    "neighbour": [{"phase": "copying", "repetitions": 7, "status": "NONE", "alone_us": TIMES, "beside_us": TIMES,
                   "targets": []}],
}  # fmt: skip


def test_the_tables_have_every_kind_of_process_and_every_outcome() -> None:
    text = driver_bench_page.memory(MEMORY)
    assert "| ratio | 1.45 × | 0.20 × | at most 1.50 × | not measured |" in text
    assert "| nnfmq: worker | 2 | 3.0 | 2.0 | 1.0 | 1.0 | 1.0 |" in text
    assert "| idle, before any client: all | 2 | 3.0 | 2.0 | 1.0 | 1.0 | 1.0 |" in text
    assert "* load before: 0.1, 0.2" in text and "* together: no" in text


def test_sharing_has_medians_of_the_rounds_and_sums_of_the_misses() -> None:
    def each(rate: float) -> dict[str, Any]:
        return {"per_second": rate, "fewest": 9, "most": 11, "ms": TIMES}

    def missed(count: int) -> dict[str, Any]:
        return {"executions": 16, "best": 1, "missed": {"nnfmq": count, "LiteRT": 8}}

    report = {
        "conditions": {"clients": 2},
        "throughput": [{"nnfmq": each(rate), "LiteRT": each(5)} for rate in (10, 30, 20)],
        "deadlines": [{"2 ×": missed(count)} for count in (2, 3)],
        "targets": [lower_limit("throughput", (1.9, 2.0), 1.95, 1.8, "×")],
    }
    text = driver_bench_page.sharing(report)
    assert "| throughput | 1.95 × | 0.10 × | at least 1.80 × | met |" in text
    assert "| nnfmq | 20 | 9 | 11 | 1.00 | 2.00 | 2.50 |" in text
    assert "| 2 × | 32 | 2 | 5 | 16 |" in text


def test_what_failed_has_no_value() -> None:
    text = driver_bench_page.isolation(ISOLATION)
    assert "| delay | - | 0 ms | at most 50 ms | **missed** |" in text
    assert "| beside 2,000 silent connections | - | 4 | - | - | - |" in text
    assert "| copying | 4 | 0.50 | NONE | 1 | 2 | 3 | 5 | 2 |" in text
    assert "| copying | 7 | NONE | 1 | 2 | 1 | 2 | 2.50 |" in text


def test_the_page_is_rewritten_between_its_markers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory, isolation, page = (tmp_path / name for name in ("memory.json", "isolation.json", "page.md"))
    memory.write_text(json.dumps(MEMORY), encoding="utf-8")
    isolation.write_text(json.dumps(ISOLATION), encoding="utf-8")
    page.write_text((DOCS / "explanation" / "driver-performance.md").read_text("utf-8"), encoding="utf-8")
    words = ["--memory", str(memory), "--isolation", str(isolation), "--page", str(page)]
    assert driver_bench_page.main(words) == 0
    made = page.read_text("utf-8")
    assert made.index("| nnfmq: worker |") < made.index("## Isolation") < made.index("| exit | 2 ms |")
    assert driver_bench_page.main(words) == 0
    assert page.read_text("utf-8") == made
    page.write_text("nothing", encoding="utf-8")
    assert driver_bench_page.main(words) == 1
    assert capsys.readouterr().err.startswith("driver_bench_page: error: ValueError: the page has no ")
