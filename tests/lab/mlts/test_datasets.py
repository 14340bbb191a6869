"""The list of models and their data: what is there is used, and what is not is named."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.importers import load
from nnfmq.lab.mlts.models import MODELS, DataMissing, ScoringModel, load_data, model_path

BY_NAME = {model.name: model for model in MODELS}
IMAGE = TensorInfo("image", (1, 2, 2, 3), "uint8")


def test_TST_10_the_list_has_the_thirty_tests_of_mlts() -> None:
    assert len(BY_NAME) == len(MODELS) == 30
    on_photos = [model for model in MODELS if model.runs_on_photos]
    assert len(on_photos) == 13 and all(model.name == f"{model.file}_topk" for model in on_photos)
    assert sum(len(model.golden) == 2 for model in MODELS) == 13
    assert {model.name for model in MODELS if model.golden_folder} == {
        "ssd_mobilenet_v1_coco_float", "ssd_mobilenet_v1_coco_quantized", "tts_float", "asr_float",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "expected"), [
    ("mobilenet_v1_1.0_224_topk", 0.617), ("mobilenet_v1_0.75_192_topk", 0.604), ("mobilenet_v1_0.5_160_topk", 0.582),
    ("mobilenet_v1_0.25_128_topk", 0.444), ("mobilenet_v1_1.0_224_quant_topk", 0.596),
    ("mobilenet_v1_0.75_192_quant_topk", 0.582), ("mobilenet_v1_0.5_160_quant_topk", 0.55),
    ("mobilenet_v1_0.25_128_quant_topk", 0.402), ("mobilenet_v2_1.0_224_topk", 0.639),
    ("mobilenet_v2_0.75_192_topk", 0.617), ("mobilenet_v2_0.5_160_topk", 0.583), ("mobilenet_v2_0.35_128_topk", 0.516),
    ("mobilenet_v2_1.0_224_quant_topk", 0.617),
])  # fmt: skip
def test_the_expected_rates_are_those_of_mlts(name: str, expected: float) -> None:
    assert BY_NAME[name].expected_top1 == expected


def test_the_golden_files_of_the_data_are_those_of_the_list(data_dir: Path) -> None:
    import json

    listed = json.loads((data_dir / "models" / "models.json").read_text())["models"]
    for entry in listed:
        if not (model := BY_NAME[entry["name"]]).golden_folder:
            assert model.golden == tuple((pair["input"], pair["output"]) for pair in entry["inputOutputs"])


def test_the_pixel_is_what_mlts_truncates_for_quantized_inputs(data_dir: Path) -> None:
    files = [model.file for model in MODELS if model.runs_on_photos and model.file.endswith("quant")]
    there = [path for file in files if (path := data_dir / "models" / f"{file}.tflite").is_file()]
    assert there
    for path in there:
        info = load(path).inputs[0]
        for pixel in range(256):
            real = Fraction(2 * pixel, 255) - 1
            assert min(int(real / Fraction(info.scale) + info.zero_point), 255) == pixel, (path.name, pixel)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match=r"there is no .*/asr_float\.tflite"):
        model_path(tmp_path, BY_NAME["asr_float"])


def test_golden_sequences_have_a_row_for_each_step_and_missing_ones_are_left(tmp_path: Path) -> None:
    model = ScoringModel("test", "test", "group", golden_folder="golden", total=3)
    folder = tmp_path / "golden"
    folder.mkdir()
    with pytest.raises(DataMissing, match=r"golden/\*\.input"):
        load_data(tmp_path, model, TensorInfo("x", (1, 2), "float32"))
    np.arange(6, dtype="<f4").tofile(folder / "b.input")
    np.arange(9, dtype="<f4").tofile(folder / "b.output")
    np.zeros(2, "<f4").tofile(folder / "a.input")  # without an output
    (sequence,) = load_data(tmp_path, model, TensorInfo("x", (1, 2), "float32")).sequences
    assert [step.tolist() for step in sequence.steps] == [[[0, 1]], [[2, 3]], [[4, 5]]]
    assert [row.tolist() for row in sequence.golden] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_speech_needs_the_mean_and_deviation_of_its_outputs(tmp_path: Path) -> None:
    folder = tmp_path / "tts_float"
    folder.mkdir()
    np.zeros(334, "<f4").tofile(folder / "arctic_a0001.input")
    np.zeros(196, "<f4").tofile(folder / "arctic_a0001.output")
    with pytest.raises(DataMissing, match="output_mean_std_dev"):
        load_data(tmp_path, BY_NAME["tts_float"], TensorInfo("x", (1, 334), "float32"))
    np.arange(392, dtype="<f4").tofile(folder / "tts_float.output_mean_std_dev")
    found = load_data(tmp_path, BY_NAME["tts_float"], TensorInfo("x", (1, 334), "float32")).mean_std_dev
    assert found is not None and found[1].tolist() == [2, 3]


def test_photos_have_the_class_of_their_label_and_gaps_are_skipped(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "image_classification"
    folder.mkdir()
    model = BY_NAME["mobilenet_v1_0.25_128_quant_topk"]
    with pytest.raises(DataMissing, match=r"labels\.txt"):
        load_data(tmp_path, model, IMAGE)
    (folder / "labels.txt").write_text("cat\ndog\nfox\n")
    (folder / "ground_truth_labels.txt").write_text("dog\nfox\ncat\n")
    with pytest.raises(DataMissing, match="nor another photo"):
        load_data(tmp_path, model, IMAGE)
    for number, shade in ((0, 0), (2, 255)):
        image.fromarray(np.full((8, 8, 3), shade, np.uint8)).save(folder / f"image-{number}.jpeg")
    found = load_data(tmp_path, model, IMAGE).sequences
    assert [sequence.expected_class for sequence in found] == [1, 0]
    assert [int(sequence.steps[0].mean()) for sequence in found] == [0, 255]
    assert len(load_data(tmp_path, model, IMAGE, photos=1).sequences) == 1
