"""The tools that measure what a trace costs and draw one."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml
from pathlib import Path

import draw_trace
import pytest
import trace_bench

from nnfmq.observe.chrome_trace import write_trace
from nnfmq.observe.trace_layout import request_base
from nnfmq.observe.trace_model import Slice, Trace


def test_the_cost_is_the_difference_of_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    assert trace_bench.main(["--pairs", "2", "--operations", "3"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["pairs"], report["operations"], report["device"]) == (2, 3, "reference")
    assert report["off_ns"] > 0
    assert report["on_ns"] > 0


def test_an_application_that_cannot_start_is_an_error() -> None:
    with pytest.raises(OSError, match="the application ended with status 1"):
        trace_bench.measure("no such device", 1, 1)


def test_a_request_is_drawn_with_its_slices_and_arrows(tmp_path: Path) -> None:
    request = request_base(2, 1) | 1
    trace = Trace(
        [
            Slice(1, 1, 0, 10_000, "[NN_LR_PE]execute", request),
            Slice(1, 1, 0, 1_000, "[NN_LR_PIO]write", request),
            Slice(1, 1, 1_000, 9_000, "[NN_LI_PE]wait", request),
            Slice(2, 2, 2_000, 8_000, "[NN_LD_PE]request", request),
            Slice(2, 2, 3_000, 3_100, "[NN_LC_PCO]0 <ADD>"),
            Slice(2, 2, 20_000, 30_000, "later"),
        ]
    )
    write_trace(trace, tmp_path / "in.json")
    assert draw_trace.main([str(tmp_path / "in.json"), str(tmp_path / "out.svg")]) == 0
    root = xml.parse(tmp_path / "out.svg").getroot()
    titles = [node.text for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert [title.partition(":")[0] for title in titles if title] == [one.name for one in trace.slices[:5]]
    assert len(list(root.iter("{http://www.w3.org/2000/svg}line"))) == 2
    trace.slices = [one for one in trace.slices if one.name != "[NN_LI_PE]wait"]
    assert "<line" not in draw_trace.draw(draw_trace.chosen(trace))


def test_a_trace_without_requests_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match="no burst requests"):
        draw_trace.chosen(Trace())
