"""`tts_float`, a recurrent model, over its golden sequences; the caller carries the states from step to step.

A golden file has one row of input or output for each step of the sequence, which begins with states of zeros. MLTS
evaluates a sequence after undoing the normalization of the outputs (a mean and a standard deviation for each): 4 frames
of 49 values in a step, which are 40 amplitudes, 7 aperiodicities, the logarithm of f0 and a voicing; its evaluator
MelCepLogF0 allows a mel-cepstral distortion of 4, and an error of log f0 of 0.01 where both voices are on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.both_runners import Ours

from nnfmq.importers import load

Array = npt.NDArray[Any]

SEQUENCES = range(1, 9)
FRAME = (4, 49)
AMPLITUDES, LOG_F0, VOICING = slice(1, 40), 47, 48  # the first amplitude does not count
DISTORTION_LIMIT, LOG_F0_LIMIT = 4.0, 0.01
FLOAT_TOLERANCE = 1e-5  # of the HAL's tests


@pytest.fixture(scope="module")
def folder(data_dir: Path) -> Path:
    return data_dir / "models" / "tts_float"


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[int, tuple[Array, Array]]:
    """The outputs of the interpreter and the golden ones, each (steps, 196)."""
    loaded = load(folder.with_suffix(".tflite"))
    return {number: (spoken(Ours(loaded), golden(folder, number, "input", 334)), golden(folder, number, "output", 196))
            for number in SEQUENCES}  # fmt: skip


def golden(folder: Path, number: int, kind: str, width: int) -> Array:
    return np.fromfile(folder / f"arctic_a{number:04}.{kind}", "<f4").reshape(-1, width)


def spoken(run: Ours, steps: Array) -> Array:
    return np.concatenate([run([step[np.newaxis]])[0] for step in steps])


def frames(folder: Path, outputs: Array) -> Array:
    means, deviations = np.fromfile(folder / "tts_float.output_mean_std_dev", "<f4").reshape(-1, 2).T
    return (outputs * deviations + means).reshape(-1, *FRAME)


def test_models_json_names_these_sequences(data_dir: Path) -> None:
    models = json.loads((data_dir / "models" / "models.json").read_text())["models"]
    (entry,) = (model for model in models if model["name"] == "tts_float")
    assert entry["evaluator"]["className"] == "MelCepLogF0"
    assert [pair["input"] for pair in entry["inputOutputs"]] == [f"tts_float/arctic_a{n:04}.input" for n in SEQUENCES]


@pytest.mark.parametrize("number", SEQUENCES)
def test_a_sequence_is_within_the_error_limits_of_mlts(
    folder: Path, results: dict[int, tuple[Array, Array]], number: int
) -> None:
    found, expected = (frames(folder, outputs) for outputs in results[number])
    voiced = (found[..., VOICING] > 0) & (expected[..., VOICING] > 0)

    assert voiced.any()
    assert root_mean_square((found - expected)[..., AMPLITUDES]) <= DISTORTION_LIMIT
    assert root_mean_square((found - expected)[voiced][..., LOG_F0]) <= LOG_F0_LIMIT


@pytest.mark.parametrize("number", SEQUENCES)
def test_a_sequence_matches_the_golden_outputs_within_float_tolerance(
    results: dict[int, tuple[Array, Array]], number: int
) -> None:
    found, expected = results[number]
    np.testing.assert_allclose(found, expected, rtol=0, atol=FLOAT_TOLERANCE)


def test_outputs_are_wrong_without_carried_states(folder: Path) -> None:
    loaded = load(folder.with_suffix(".tflite"))
    forgetful = [Ours(loaded)([step[np.newaxis]])[0] for step in golden(folder, 1, "input", 334)[:10]]
    expected = golden(folder, 1, "output", 196)[:10]
    assert not np.allclose(np.concatenate(forgetful), expected, rtol=0, atol=FLOAT_TOLERANCE)


def root_mean_square(errors: Array) -> float:
    return float(np.sqrt(np.mean(np.square(errors.astype(np.float64)))))
