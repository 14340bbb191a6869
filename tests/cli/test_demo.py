"""`nnfmq demo`: the digits, their drawings, and the whole command with an embedded driver."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import nnfmq
from nnfmq.cli import demo, main
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.queue.core import core_name

BEST = "reference" if find_spec("llvmlite") is None else "compiled"
SQUARE = np.float32([[1, 0], [0, 1], [1, 1], [0, 0]])


def test_two_rows_of_pixels_share_a_line() -> None:
    assert demo.draw(SQUARE, in_color=False).plain == "▀▄\n▀▀"


def test_with_colors_every_pixel_is_a_shade_of_grey() -> None:
    drawn = demo.draw(np.float32([[0.0], [1.0]]), in_color=True)
    assert drawn.plain == "▀"
    assert [str(span.style) for span in drawn.spans] == ["rgb(0,0,0) on rgb(255,255,255)"]


@pytest.fixture
def one_seven(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that takes every digit for a 7, and four digits, three of them 7."""
    fake.inputs = (TensorInfo("image", (1, 8, 8, 1), "float32"),)
    fake.results = (np.eye(10, dtype=np.float32)[None, 7],)
    images = np.random.default_rng(1).random((4, 8, 8)).astype(np.float32)
    monkeypatch.setattr(demo, "load_digits", lambda: (images, np.int64([7, 7, 1, 7])))


@pytest.mark.usefixtures("one_seven")
def test_results_are_compared_with_the_labels_of_the_digits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["digits"], report["correct"], report["accuracy"]) == (4, 3, 0.75)
    assert report["predictions"] == [7, 7, 7, 7]


@pytest.mark.usefixtures("one_seven")
def test_a_wrong_classification_is_shown_with_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    printed = capsys.readouterr().out
    assert "= 7, is 1" in printed
    assert "75.0 % (3 of 4 digits)" in printed
    assert "Next steps" in printed


@pytest.mark.usefixtures("one_seven")
def test_the_demo_starts_an_embedded_driver(fake: Any) -> None:
    main(["demo", "--json"])
    assert fake.connected == [(None, True)]


@pytest.mark.usefixtures("one_seven")
def test_the_quantized_model_is_measured_beside_the_float_one(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--quantized"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"result +float32 +int8", printed)
    assert printed.count("75.0 % (3 of 4 digits)") == 2
    assert fake.connected == [(None, True)] * 2


@pytest.mark.parametrize(("dtype", "zero_point"), [("int8", -128), ("uint8", 0)])
def test_a_quantized_model_gets_the_nearest_quantized_values(dtype: str, zero_point: int) -> None:
    info = TensorInfo("image", (1, 2, 2, 1), dtype, 1 / 255, zero_point)
    given = demo.as_inputs(np.float32([[[0, 1], [0.55, 0.7 / 255]], [[2, -1], [0.2, 0.4]]]), info)
    expected = [0, 255, 140, 1, 255, 0, 51, 102]
    assert given.shape == (2, 1, 2, 2, 1)
    assert (given.ravel().astype(int) - zero_point).tolist() == expected
    assert given.dtype == dtype


def test_a_float_model_gets_the_images() -> None:
    given = demo.as_inputs(SQUARE[None], TensorInfo("image", (1, 4, 2, 1), "float32"))
    np.testing.assert_array_equal(given, SQUARE.reshape(1, 1, 4, 2, 1), strict=True)


def test_every_digit_is_classified_by_a_real_driver() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "nnfmq", "demo", "--quantized", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    ran = report["ran"]
    assert (ran["device"], ran["core"], ran["driver_core"]) == (BEST, core_name, core_name)
    assert (ran["program"] in ("compiled", "cached"), ran["compiled_operations"] > 3) == (BEST == "compiled",) * 2
    with np.load(nnfmq.example_path("digits.npz")) as data:
        assert report["labels"] == data["labels"].tolist()
        assert report["correct"] == int(data["correct_count"])
    assert abs(report["quantized"]["correct"] - report["correct"]) <= 0.01 * report["digits"]
    assert 0 < report["latency_ns"]["p50"] <= report["latency_ns"]["p99"] <= report["latency_ns"]["max"]


def test_the_demo_draws_and_ends_with_the_next_steps() -> None:
    command = [sys.executable, "-P", "-m", "nnfmq", "demo", "--no-color"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(part in done.stdout for part in ("█", "accuracy", "p99", "Next steps"))
