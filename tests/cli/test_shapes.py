"""`--shape`: inputs of other shapes than the file's, in `run` and `profile`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import nnfmq
from nnfmq.cli import main

DIGITS = str(nnfmq.example_path("digits.tflite"))


@pytest.mark.parametrize("shape", ["3x8x8x1", "image=3x8x8x1"])
def test_run_executes_a_batch(shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 8, 8, 1), np.float32))
    words = [DIGITS, "--shape", shape, "--input", str(tmp_path / "x.npy"), "--connect", "embedded", "--json"]
    assert main(["run", *words]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["shape"] == [3, 10]


def test_profile_times_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", DIGITS, "--shape", "2x8x8x1", "--device", "reference", "--runs", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("shape", ["", "3x", "0x8x8x1", "3,8,8,1", "image="])
def test_what_is_no_shape_is_a_usage_error(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", DIGITS, "--shape", shape]) == 2
    assert "is no shape; give positive numbers, as in 4x224x224x3" in capsys.readouterr().err


def test_an_unknown_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", DIGITS, "--shape", "photo=2x8x8x1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "no input 'photo' to be resized: the inputs are 0 = 'image'" in line
