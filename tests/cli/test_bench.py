"""`nnfmq bench` for users: options and their other names, and errors that are found before anything is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnfmq
from nnfmq.cli import command_parser, main

DIGITS = str(nnfmq.example_path("digits.tflite"))


def bench(*words: str) -> int:
    return main(["bench", DIGITS, *words])


def error(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def parsed(*words: str) -> dict[str, Any]:
    return vars(command_parser("bench").parse_args([DIGITS, *words]))


# ---- options


@pytest.mark.parametrize(
    ("peer_words", "words"),
    [
        ("--concurrency-range 1:4:2", "--clients 1:4:2"),
        ("--request-rate-range 100:300:100", "--rate 100:300:100"),
        ("--request-distribution poisson", "--arrivals poisson"),
        ("--measurement-interval 200", "--window 200"),
        ("-p 200 -s 5 -l 3", "--window 200 --stability 5 --latency-threshold 3"),
        ("--stability-percentage 5", "--stability 5"),
        ("--request-count 50 --warmup-request-count 5", "--count 50 --warm-up 5"),
        ("-f out.csv", "--csv out.csv"),
        ("--random-seed 3", "--seed 3"),
        ("--num_runs=50 --warmup_runs=5 --num_threads=2", "--count 50 --warm-up 5 --threads 2"),
        ("--enable_op_profiling=true", "--enable_op_profiling"),
        ("--enable_op_profiling=false", ""),
    ],
)
def test_the_peers_names_of_an_option_mean_the_same(peer_words: str, words: str) -> None:
    assert parsed(*peer_words.split()) == parsed(*words.split())


@pytest.mark.parametrize(("text", "expected"), [("3", (3,)), ("1:3", (1, 2, 3)), ("1:8:3", (1, 4, 7)), ("2:2:5", (2,))])
def test_clients_are_a_number_or_a_range(text: str, expected: tuple[int, ...]) -> None:
    assert parsed("--clients", text)["clients"] == expected


def test_rates_may_be_fractions() -> None:
    assert parsed("--rate", "0.5:1:0.25")["rate"] == (0.5, 0.75, 1.0)


def test_peers_have_the_names_of_their_packages() -> None:
    assert parsed("--against", "openvino,litert")["against"] == ("OpenVINO", "LiteRT")


@pytest.mark.parametrize(
    "words",
    [
        "--mode none", "--against none", "--clients 0", "--clients 1.5", "--clients many", "--clients 3:1",
        "--clients 1:2:0", "--clients 1:2:1:1", "--clients 1:1000", "--rate 0", "--rate nan", "--duration 0",
        "--duration x", "--count 0", "--warm-up -1", "--tolerance -1", "--tolerance x", "--percentile 42",
        "--arrivals normal", "--threads 99999", "--threads 0",
        "--latency-threshold 0", "--html none/page.html", "--enable_op_profiling=maybe",
    ],
)  # fmt: skip
def test_wrong_usage_is_status_2(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*words.split()) == 2
    assert "error: argument" in capsys.readouterr().err


def test_a_range_that_is_wrong_is_reported_with_what_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    bench("--clients", "x")
    assert "'x': give a positive number, or START:END:STEP as in 1:8:1" in capsys.readouterr().err


# ---- failures


def test_a_device_that_cannot_be_profiled_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--device", "sample-float_fast", "--enable_op_profiling") == 1
    assert "only compiled and reference can be profiled, not sample-float_fast" in error(capsys)


def test_a_missing_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "none.tflite"]) == 1
    assert "none.tflite: No such file" in error(capsys)


@pytest.mark.parametrize(("text", "reason"), [("{", "is no report of nnfmq bench --json"), (None, "No such file")])
def test_a_baseline_that_cannot_be_read_is_found_before_measuring(
    text: str | None, reason: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "base.json"
    if text is not None:
        path.write_text(text)
    assert bench("--baseline", str(path)) == 1
    assert reason in error(capsys)


def test_inputs_that_do_not_fit_are_found_before_measuring(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 2), np.float32))
    assert bench("--input-data", str(tmp_path / "x.npy")) == 1
    assert "the input needs 1x8x8x1 float32" in error(capsys)
