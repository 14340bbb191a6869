"""`nnfmq run` on real models: the outputs are the golden ones, through a driver process, over a burst.

Inputs and outputs are of Android's Machine Learning Test Suite; the quantized ones come from TFLite's reference
kernels.
"""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnfmq
from nnfmq.cli import main

FLOAT_TOLERANCE = 1e-5
FLOAT = "mobilenet_v1_0.25_128"
QUANTIZED = ("mobilenet_v1_0.25_128_quant", "mobilenet_v1_0.75_192_quant", "mobilenet_v2_1.0_224_quant")
OBJECTS = ("cup", "banana")


def golden(data_dir: Path, model: str, thing: str) -> dict[str, Path]:
    """Return the golden input and output of one model and one thing."""
    models = json.loads((data_dir / "models" / "models.json").read_text())["models"]
    pairs = next(entry["inputOutputs"] for entry in models if entry["name"] == model)
    pair = next(pair for pair in pairs if f"/{thing}_" in pair["input"])
    return {kind: data_dir / "models" / name for kind, name in pair.items()}


def run(data_dir: Path, model: str, thing: str, folder: Path) -> np.ndarray[Any, Any]:
    """Run the command and return the output that it saved."""
    path, saved = data_dir / "models" / f"{model}.tflite", folder / "scores.npy"
    files = ["--input", str(golden(data_dir, model, thing)["input"]), "--output", str(saved)]
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["run", str(path), *files, "--connect", "embedded", "--json"]) == 0
    report = json.loads(printed.getvalue())
    if find_spec("llvmlite") is not None:
        assert report["device"] == "compiled"
        assert report["program"] in ("compiled", "cached")
        assert report["compiled_operations"] == len(nnfmq.load(path).model.main.operations)
    loaded: np.ndarray[Any, Any] = np.load(saved)
    return loaded


@pytest.mark.parametrize("thing", OBJECTS)
@pytest.mark.parametrize("model", QUANTIZED)
def test_a_quantized_model_returns_the_golden_bytes(data_dir: Path, tmp_path: Path, model: str, thing: str) -> None:
    expected = golden(data_dir, model, thing)["output"].read_bytes()
    assert run(data_dir, model, thing, tmp_path).tobytes() == expected


@pytest.mark.parametrize("thing", OBJECTS)
def test_a_float_model_returns_the_golden_scores(data_dir: Path, tmp_path: Path, thing: str) -> None:
    expected = np.fromfile(golden(data_dir, FLOAT, thing)["output"], "<f4")
    np.testing.assert_allclose(
        run(data_dir, FLOAT, thing, tmp_path).reshape(-1), expected, rtol=0, atol=FLOAT_TOLERANCE
    )


@pytest.mark.parametrize("steps", [1, 3])
def test_a_recurrent_model_carries_its_states_through_the_driver(data_dir: Path, tmp_path: Path, steps: int) -> None:
    words = ["--output", str(tmp_path / "frames.npy"), "--connect", "embedded", "--json"]
    for step in range(steps):
        path = tmp_path / f"{step}.bin"
        path.write_bytes(golden_step(data_dir, "input", 334, step).tobytes())
        words += ["--input", str(path)]
    assert main(["run", str(data_dir / "models" / "tts_float.tflite"), *words]) == 0
    expected = golden_step(data_dir, "output", 196, steps - 1)
    np.testing.assert_allclose(np.load(tmp_path / "frames.npy")[0], expected, rtol=0, atol=FLOAT_TOLERANCE)


def golden_step(data_dir: Path, kind: str, width: int, step: int) -> np.ndarray[Any, Any]:
    content = np.fromfile(data_dir / "models" / "tts_float" / f"arctic_a0001.{kind}", "<f4")
    return content.reshape(-1, width)[step]


def test_the_split_of_a_real_run_adds_up(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, thing = data_dir / "models" / f"{FLOAT}.tflite", golden(data_dir, FLOAT, "cup")["input"]
    assert main(["run", str(path), "--input", str(thing), "--connect", "embedded", "--json"]) == 0
    split = json.loads(capsys.readouterr().out)["p50_ns"]
    assert split["latency"] == split["queue"] + split["driver"] + split["engine"]
    assert min(split.values()) >= 0


def test_a_photo_is_classified_with_its_label(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = data_dir / "models" / "image_classification"
    labels = folder / "labels.txt"
    path = data_dir / "models" / "mobilenet_v2_1.0_224_quant.tflite"
    words = ["--input", str(folder / "image-0.jpeg"), "--labels", str(labels), "--connect", "embedded", "--json"]
    assert main(["run", str(path), *words]) == 0
    top = json.loads(capsys.readouterr().out)["outputs"][0]["top"]
    assert len(top) == 5
    assert {entry["label"] for entry in top} <= set(labels.read_text().splitlines())
