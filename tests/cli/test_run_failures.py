"""`nnfmq run` with a real driver: whatever is wrong is one clear line and status 1."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import nnfmq
from nnfmq.cli import main


@pytest.fixture
def digits() -> str:
    return str(nnfmq.example_path("digits.tflite"))


def error_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run the command, which fails, and return the one line that it prints."""
    assert main(["run", *words, "--connect", "embedded"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("nnfmq: error: ")
    return line


def stored(path: Path, shape: tuple[int, ...]) -> str:
    np.save(path, np.zeros(shape, np.float32))
    return str(path)


def test_the_error_for_an_unknown_device_lists_the_known_ones(
    digits: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [digits, "--input", stored(tmp_path / "x.npy", (1, 8, 8, 1)), "--device", "tpu"]
    line = error_of(words, capsys)
    assert "'tpu'" in line
    assert "reference" in line


def test_the_error_for_a_wrong_shape_names_both_shapes(
    digits: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = error_of([digits, "--input", stored(tmp_path / "x.npy", (3, 3))], capsys)
    assert "3x3 float32" in line
    assert "1x8x8x1 float32" in line


def test_a_truncated_photo_is_one_line(digits: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "photo.jpg"
    image.fromarray(np.random.default_rng(1).integers(0, 255, (64, 64), dtype=np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:-300])
    assert "not a complete image" in error_of([digits, "--input", str(path)], capsys)


@pytest.mark.parametrize("kept", [0, 3, 8, 200, 4000])
def test_a_corrupt_model_is_one_line(
    digits: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: int
) -> None:
    path = tmp_path / "model.tflite"
    path.write_bytes(Path(digits).read_bytes()[:kept])
    assert "model.tflite" in error_of([str(path), "--input", "x.npy"], capsys)


@pytest.mark.parametrize("missing", ["model", "input", "labels"])
def test_a_missing_file_is_named(digits: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str) -> None:
    files = {"model": digits, "input": stored(tmp_path / "x.npy", (1, 8, 8, 1)), "labels": digits}
    files[missing] = str(tmp_path / "gone")
    words = [files["model"], "--input", files["input"], "--labels", files["labels"]]
    assert error_of(words, capsys) == f"nnfmq: error: {tmp_path / 'gone'}: No such file or directory"


def test_no_driver_at_a_path_is_one_line(digits: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", digits, "--input", stored(tmp_path / "x.npy", (1, 8, 8, 1))]
    assert main([*words, "--connect", str(tmp_path / "none.sock")]) == 1
    assert "no driver listens" in capsys.readouterr().err


def test_the_timeout_is_that_of_all_steps_of_a_divided_model(
    digits: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [digits, "--input", stored(tmp_path / "x.npy", (1, 8, 8, 1)), "--device", "sample-minimal,reference"]
    assert "the deadline passed" in error_of([*words, "--timeout", "0"], capsys)
    assert main(["run", *words, "--timeout", "60", "--connect", "embedded"]) == 0
