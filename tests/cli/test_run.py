"""`nnfmq run` over a fake driver: printed and saved outputs, and rejected arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnfmq.cli import main
from nnfmq.hal.tensor_info import StateInfo, TensorInfo

Run = Callable[..., int]


@pytest.fixture
def run(fake: Any, tmp_path: Path) -> Run:
    """Run the command on a file, which the fake does not read, and an input that fits, with more options."""
    path, model = tmp_path / "input.npy", tmp_path / "model.tflite"
    np.save(path, np.zeros((1, 2, 2, 3), np.float32))
    model.write_bytes(b"a model")
    return lambda *more: main(["run", str(model), "--input", str(path), *more])


def report(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def labels(path: Path, *names: str) -> list[str]:
    path.write_text("\n".join(names))
    return ["--labels", str(path)]


def test_the_top_classes_come_best_first(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--top", "2", "--json") == 0
    top = report(capsys)["outputs"][0]["top"]
    assert [entry["class"] for entry in top] == [1, 3]
    assert [entry["score"] for entry in top] == pytest.approx([0.5, 0.3])


def test_equal_scores_keep_the_order_of_their_classes(run: Run, fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake.results = (np.zeros((1, 4), np.float32),)
    run("--json")
    assert [entry["class"] for entry in report(capsys)["outputs"][0]["top"]] == [0, 1, 2, 3]


def test_labels_stand_beside_their_classes(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*labels(tmp_path / "labels.txt", "cup", "banana", "dog", "cat")) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["0.5000", "1", "banana"] in lines
    assert ["0.3000", "3", "cat"] in lines


def test_quantized_scores_are_printed_as_real_numbers(run: Run, fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake.outputs = (TensorInfo("scores", (1, 4), "uint8", scale=0.5, zero_point=10),)
    fake.results = (np.uint8([[10, 12, 8, 11]]),)
    run("--json", "--top", "1")
    assert report(capsys)["outputs"][0]["top"] == [{"class": 1, "score": 1.0}]


def test_an_output_that_is_not_a_row_of_scores_is_summarized(
    run: Run, fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.results = (np.arange(-4, 16, dtype=np.float32).reshape(2, 10),)
    assert run() == 0
    assert "scores: 2x10 float32, from -4 to 15" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (np.float32([[0.1, 2.0], [-np.inf, np.nan]]), "2x2 float32, [[0.1, 2], [-inf, nan]]"),
        (np.int64([[0, 0, 2**60]]), "1x3 int64, [[0, 0, 1152921504606846976]]"),  # indices, not scores
        (np.array([True, False]), "2 bool, [True, False]"),
        (np.zeros((0, 4), np.float32), "0x4 float32, []"),
        (np.float64(1e300), "scalar float64, 1e+300"),
        (np.complex64([1 + 2j]), "1 complex64, [[1], [2]]"),
        (np.full(17, 1j, np.complex64), "17 complex64, complex numbers"),
    ],
)
def test_a_small_output_that_is_no_row_of_scores_is_printed(
    result: Any, text: str, run: Run, fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.results = (np.asarray(result),)
    assert run() == 0
    assert f"scores: {text}\n" in capsys.readouterr().out
    assert run("--json") == 0
    shown = report(capsys)["outputs"][0]
    assert "top" not in shown
    assert ("values" in shown) == (np.asarray(result).size <= 16)


def test_json_has_only_numbers_that_json_has(run: Run, fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake.results = (np.float32([[np.nan, 2.0], [-np.inf, np.inf]]),)
    assert run("--json") == 0
    text = capsys.readouterr().out
    output = json.loads(text, parse_constant=pytest.fail)["outputs"][0]
    assert output["values"] == [["NaN", 2.0], ["-Infinity", "Infinity"]]


def test_times_are_the_p50_of_the_repeats(run: Run, fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake.latencies_ns = [90_000, 5_000, 7_000]
    assert run("--repeat", "3", "--json") == 0
    assert report(capsys)["p50_ns"] == {"latency": 7000, "queue": 1000, "driver": 2000, "engine": 4000}
    assert len(fake.executed) == 3


def test_the_split_is_printed_in_microseconds(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run()
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    expected = [["latency", "9.0"], ["queue", "1.0"], ["driver", "2.0"], ["engine", "6.0"]]
    assert [line for line in lines if line in expected] == expected


def test_outputs_are_saved_unchanged(run: Run, fake: Any, tmp_path: Path) -> None:
    fake.results = (np.uint8([[3, 4]]),)
    assert run("--output", str(tmp_path / "out.npy")) == 0
    saved = np.load(tmp_path / "out.npy")
    assert (saved.dtype, saved.tolist()) == (np.uint8, [[3, 4]])


def test_several_outputs_are_saved_together(run: Run, fake: Any, tmp_path: Path) -> None:
    fake.outputs = (TensorInfo("a", (1,), "uint8"), TensorInfo("b", (1,), "uint8"))
    fake.results = (np.uint8([3]), np.uint8([4]))
    assert run("--output", str(tmp_path / "out.npz")) == 0
    with np.load(tmp_path / "out.npz") as saved:
        assert [saved[name].tolist() for name in saved] == [[3], [4]]


@pytest.mark.parametrize(
    ("words", "connected"),
    [
        ([], (None, None)),
        (["--connect", "embedded"], (None, True)),
        (["--connect", "/run/x.sock"], ("/run/x.sock", None)),
    ],
)
def test_connect_selects_the_driver(run: Run, fake: Any, words: list[str], connected: tuple[Any, Any]) -> None:
    assert run(*words) == 0
    assert fake.connected == [connected]


def test_a_wrong_number_of_labels_is_rejected(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*labels(tmp_path / "labels.txt", "cup", "banana")) == 1
    assert capsys.readouterr().err == "nnfmq: error: there are 2 labels; the model has 4 classes\n"


def test_labels_that_are_not_text_are_rejected(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "labels.txt"
    path.write_bytes(b"\xff\xfe")
    assert run("--labels", str(path)) == 1
    assert "is not a UTF-8 text file" in capsys.readouterr().err


def test_no_driver_is_called_if_the_input_does_not_fit(
    fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "input.npy", np.zeros((1, 3), np.float32))
    assert main(["run", "model.tflite", "--input", str(tmp_path / "input.npy")]) == 1
    assert "an array of 1x3 float32; the input needs 1x2x2x3 float32" in capsys.readouterr().err
    assert fake.connected == []


def test_outputs_that_do_not_fit_the_file_are_rejected(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--output", str(tmp_path / "out.txt")) == 1
    assert "saved as .npz or .npy" in capsys.readouterr().err


STATE = StateInfo(TensorInfo("memory", (2,), "int8", 0.5, 7))


def test_each_set_of_inputs_is_a_step_of_a_model_with_states(run: Run, fake: Any, tmp_path: Path) -> None:
    fake.states = (STATE,)
    for number in (1, 2):
        np.save(tmp_path / f"{number}.npy", np.full((1, 2, 2, 3), number, np.float32))
    more = [word for number in (1, 2) for word in ("--input", str(tmp_path / f"{number}.npy"))]
    assert run(*more, "--repeat", "2") == 0
    assert [given[0].flat[0] for given in fake.executed] == [0, 1, 2, 0, 1, 2]


def test_more_inputs_than_a_model_without_states_has_are_rejected(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "input.npy")
    assert run("--input", path, "--input", path) == 1
    assert "--input was given 3 times; the model has 1 input: image" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--top", "--repeat"])
@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_a_count_below_one_is_wrong_usage(run: Run, option: str, value: str) -> None:
    assert run(option, value) == 2
