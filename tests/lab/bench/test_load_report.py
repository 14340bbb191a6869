"""Reports, files and page, from requests with known times."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as xml
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from support.conditions import CONDITIONS, LINE, SUBJECT

from nnfmq.cli.bench import print_report
from nnfmq.lab.bench.measurement import LoadLevel, LoadMeasurements, LoadPlan, MeasuredLoad
from nnfmq.lab.bench.report import (
    BLOCKS,
    build_report,
    compare_runners,
    csv_text,
    hgrm_text,
    named_parts,
    profile_export,
    ratio_text,
    render_page,
    result_names,
    result_of,
    time_text,
)
from nnfmq.lab.bench.runner import LoadResult
from nnfmq.lab.page import percentile_chart, time_chart
from nnfmq.lab.statistics import WarmUpWindow

US, MS, SECOND = 1000, 1_000_000, 1_000_000_000
CSV_HEADER = (  # as perf_analyzer writes it
    "Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,Server Compute Input,"
    "Server Compute Infer,Server Compute Output,Client Recv,p50 latency,p90 latency,p95 latency,p99 latency"
)


def trial(count: int = 1000, late_ns: int = 0, unsent: int = 0, stages_ns: tuple[float, ...] = ()) -> LoadResult:
    """Return requests at equal distances within one second, which take 1, 2, 3, ... µs."""
    intended = np.arange(count, dtype=np.int64) * (SECOND // count)
    latencies = (np.arange(count, dtype=np.int64) + 1) * US
    return LoadResult(intended, intended + late_ns, latencies, unsent, SECOND, 2 * MS, 3 * MS, list(stages_ns))


def measured(*trials: LoadResult, runner: str = "burst", level: LoadLevel = LoadLevel(1, None)) -> MeasuredLoad:  # noqa: B008  immutable
    return MeasuredLoad(runner, level, {}, [WarmUpWindow(1.0, 2.0)], True, list(trials or (trial(),)), 3 << 20, 2)


PLAN = LoadPlan(Path("folder/net.tflite"), [[]], ("burst",), seconds=1.0)


def report(*loads: MeasuredLoad, plan: LoadPlan = PLAN, **more: Any) -> dict[str, Any]:
    found = LoadMeasurements(list(loads or (measured(),)), {"LiteRT": "not installed"})
    made = SUBJECT | build_report(plan, found, CONDITIONS)
    return made | {"ratios": compare_runners(made["results"])} | more


def test_a_result_has_the_figures_of_all_trials_together() -> None:
    found = result_of(measured(trial(500), trial(500)), rounds=2)
    assert (found["requests"], found["wall_ns"], found["throughput_per_s"]) == (1000, 2_000_000_000, 500.0)
    assert found["latency_ns"]["p50"] == 250 * US
    assert found["latency_ns"]["max"] == 500 * US
    assert found["cpu_ns"] == {"client": 4_000_000, "driver": 6_000_000}
    assert (found["pss_bytes"], found["processes"], found["is_stable"]) == (3 << 20, 2, True)
    assert found["wait_ns"] is None and found["stages_ns"] is None


def test_the_wait_in_an_open_loop_is_from_the_intended_to_the_real_start() -> None:
    found = result_of(measured(trial(late_ns=7), level=LoadLevel(1, 1000.0)), rounds=1)
    assert found["wait_ns"]["p50"] == found["wait_ns"]["max"] == 7


def test_blocks_are_equal_parts_of_the_time() -> None:
    blocks = result_of(measured(), rounds=1)["blocks"]
    assert len(blocks) == BLOCKS
    assert [block["max_ns"] for block in blocks] == [50 * US * (number + 1) for number in range(BLOCKS)]
    assert {block["throughput_per_s"] for block in blocks} == {1000.0}


def test_a_block_without_requests_is_omitted() -> None:
    assert len(result_of(measured(trial(3)), rounds=1)["blocks"]) == 3


def test_the_time_line_puts_the_trials_after_each_other() -> None:
    points = result_of(measured(trial(), trial()), rounds=2)["timeline"]
    assert len(points) == 100
    seconds = [point["at_ns"] / 1e9 for point in points]
    assert seconds == sorted(seconds)
    assert (seconds[0], seconds[-1]) == pytest.approx((0.01, 1.99))
    assert sum(point["requests"] for point in points) == 2000


def test_a_threshold_names_the_last_load_within_it() -> None:
    plan = LoadPlan(Path("net"), [[]], ("burst",), percentile="p50", threshold_ns=300 * US)
    loads = [measured(trial(count), level=LoadLevel(number, None)) for number, count in ((1, 100), (2, 500), (3, 1000))]
    assert report(*loads, plan=plan)["threshold"] == {
        "percentile": "p50", "limit_ns": 300 * US, "within": {"clients": 2, "rate": None},
    }  # fmt: skip
    assert report(loads[2], plan=plan)["threshold"]["within"] is None


def test_a_report_is_json() -> None:
    made = report()
    assert json.loads(json.dumps(made)) == made


# ---- files


def test_the_csv_has_the_columns_of_perf_analyzer() -> None:
    results = [result_of(measured(trial(stages_ns=(9000, 2000, 1500, 5500))), 1), result_of(measured(trial()), 1)]
    header, first, second = csv_text(results).splitlines()
    assert header == CSV_HEADER
    assert first == "1,1000.00,,2.0,,1.5,5.5,,,500.0,900.0,950.0,990.0"
    assert second == "1,1000.00,,,,,,,,500.0,900.0,950.0,990.0"


def test_the_csv_of_an_open_loop_begins_with_the_rate() -> None:
    text = csv_text([result_of(measured(level=LoadLevel(2, 1000.0)), 1)])
    assert text.startswith(CSV_HEADER.replace("Concurrency", "Request Rate"))
    assert text.splitlines()[1].startswith("1000,")


def test_the_hgrm_file_has_the_lines_of_hdrhistogram() -> None:
    lines = hgrm_text(result_of(measured(trial(10)), 1)).splitlines()
    assert lines[0].split() == ["Value", "Percentile", "TotalCount", "1/(1-Percentile)"]
    assert lines[2].split() == ["0.001000", "0.000000000000", "1", "1.00"]
    assert ["0.005000", "0.500000000000", "5", "2.00"] in [line.split() for line in lines]
    assert lines[-3].split() == ["0.010000", "1.000000000000", "10"]
    assert lines[-1] == "#[Max     =     0.010000, Total count    =           10]"


def test_the_export_has_each_request_with_its_response() -> None:
    loads = [measured(trial(2), trial(2)), measured(trial(2), level=LoadLevel(1, 5.0))]
    exported = json.loads(profile_export(loads, "0.1"))
    first, second = exported["experiments"]
    assert first["experiment"] == {"mode": "concurrency", "value": 1}
    assert second["experiment"] == {"mode": "request_rate", "value": 5.0}
    assert first["window_boundaries"] == [0, SECOND, 2 * SECOND]
    assert first["requests"][3] == {
        "timestamp": SECOND + SECOND // 2, "response_timestamps": [SECOND + SECOND // 2 + 2 * US],
    }  # fmt: skip


def test_further_runners_get_files_of_their_own() -> None:
    assert named_parts(Path("a/out.csv"), ["burst", "ONNX Runtime"]) == [
        Path("a/out.csv"),
        Path("a/out-onnx-runtime.csv"),
    ]


def test_a_name_has_what_differs() -> None:
    def row(clients: int, rate: float | None) -> dict[str, Any]:
        return {"runner": "burst", "clients": clients, "rate": rate}

    assert result_names([row(2, None)]) == ["burst"]
    assert result_names([row(1, None), row(2, None)]) == ["burst, 1 client", "burst, 2 clients"]
    assert result_names([row(1, 50.0), row(1, 1000.0)]) == ["burst, 50/s", "burst, 1000/s"]


# ---- page and tables


class Page(HTMLParser):
    """Collects what a page would load, and its texts; fails for an element that is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.loads += [tag for name, _ in attributes if name in ("src", "href")] + [tag] * (tag in ("script", "link"))
        if tag not in ("meta", "path", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("path", "polyline"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_is_closed_and_loads_nothing() -> None:
    text = render_page(report(measured(), measured(runner="LiteRT"), baseline=[
        {"runner": "burst", "clients": 1, "rate": None, "metric": "p50", "ratio": 1.2, "low": 1.1, "high": 1.3,
         "outcome": "regression"},
    ]))  # fmt: skip
    page = Page(text)
    assert (page.open, page.loads) == ([], [])
    assert "http" not in text and "@import" not in text
    for expected in ("Latency of net.tflite", "burst: p50", "regression", "LiteRT is missing: not installed", LINE):
        assert any(expected in found for found in page.texts), expected


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_charts_are_svg_whose_points_are_within_it(count: int) -> None:
    found = result_of(measured(trial(count)), 1)
    for text in (percentile_chart([found, found]), time_chart(found["timeline"])):
        svg = xml.fromstring(text)
        lines = [line.attrib["points"] for line in svg.iter("polyline")]
        assert len(lines) in (2, 3)
        for x, y in (map(float, point.split(",")) for line in lines for point in line.split()):
            assert 0 <= x <= 480 and 0 <= y <= 300


@pytest.mark.parametrize(("width", "has_all"), [(80, True), (40, False)])
def test_the_tables_fit_the_width(width: int, has_all: bool) -> None:
    out = io.StringIO()
    loads = [measured(runner="aidl-burst"), measured(runner="ONNX Runtime")]
    loads[0].is_stable = False
    loads[1].others_ns, loads[1].elapsed_ns = 3 * 10**9, 2 * 10**9
    print_report(Console(file=out, width=width, highlight=False, emoji=False, markup=False), report(*loads))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert ("p99.9" in out.getvalue()) is has_all
    text = " ".join(out.getvalue().split())
    assert "aidl-burst: not stable after 1 windows of warm-up." in text
    assert "ONNX Runtime: other programs used 150 % of a CPU meanwhile." in text
    assert text.count("other programs") == 1


@pytest.mark.parametrize(("rate", "is_overloaded"), [(1000.0, False), (1100.0, True), (None, False)])
def test_a_runner_that_cannot_sustain_the_rate_is_reported(rate: float | None, is_overloaded: bool) -> None:
    out = io.StringIO()
    made = report(measured(trial(unsent=1234 * is_overloaded), level=LoadLevel(1, rate)))
    print_report(Console(file=out, width=100, highlight=False, emoji=False, markup=False), made)
    assert ("burst: overloaded, 1,000 of 1100 requests/s" in out.getvalue()) is is_overloaded
    assert ("1,234 requests were not sent" in out.getvalue()) is is_overloaded


@pytest.mark.parametrize(("ratio", "text"), [(0.5, "0.500"), (9.9994, "9.999"), (12.34, "12.3"), (2693.2, "2,693.2")])
def test_ratios_have_as_many_decimals_as_they_need(ratio: float, text: str) -> None:
    assert ratio_text(ratio) == text


@pytest.mark.parametrize(
    ("time_ns", "text"), [(1234, "1.2"), (999_949, "999.9"), (999_950, "1,000"), (10**9, "1,000,000")]
)
def test_times_from_a_millisecond_on_have_no_decimals(time_ns: int, text: str) -> None:
    assert time_text(time_ns) == text


def test_the_threshold_is_printed() -> None:
    out = io.StringIO()
    plan = LoadPlan(Path("net"), [[]], ("burst",), percentile="p50", threshold_ns=600 * US)
    screen = Console(file=out, width=80, highlight=False, emoji=False, markup=False)
    print_report(screen, report(measured(level=LoadLevel(2, 1000.0)), plan=plan))
    print_report(screen, report(plan=LoadPlan(Path("net"), [[]], ("burst",), threshold_ns=US)))
    assert "The last load with a p50 of at most 0.6 ms: 2 clients, 1000 requests/s." in out.getvalue()
    assert "No load has a p99 of at most 0.001 ms." in out.getvalue()
    assert "open loop, 1000/s, constant arrivals" in out.getvalue()
