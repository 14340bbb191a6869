"""Metadata of TFLite files: normalization, labels and files; corrupt ones are ignored with a warning."""

from __future__ import annotations

import io
import json
import logging
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tflite_files import Tensor, single
from support.tflite_metadata import metadata, with_files

from nnfmq.cli import main
from nnfmq.importers import LoadedModel, load

LABELS = b"red\ngreen\nblue\n"
SQUARE = [[10, 20, 30], [10, 20, 30]]


def classifier(packed: bytes = b"", files: dict[str, bytes] | None = None, kind: str = "FLOAT32") -> bytes:
    """Return a model that sums an image's pixels per channel, with metadata and associated files."""
    quantization: dict[str, Any] = {} if kind == "FLOAT32" else {"scales": [0.5], "zero_points": [3]}
    tensors = [
        Tensor("x", (1, 2, 2, 3), kind, **quantization),
        Tensor("axes", (2,), "INT32", np.int32([1, 2]).tobytes()),
        Tensor("y", (1, 3), kind, **quantization),
    ]
    model = single("MEAN", tensors, "ReducerOptions", metadata=packed)
    return model if files is None else with_files(model, files)


def test_a_model_has_the_normalization_and_the_labels_of_its_file() -> None:
    packed = metadata(([127.5], [128.0]), [("labels.txt", "")])
    found = load(classifier(packed, {"labels.txt": LABELS, "readme.txt": b"text"})).metadata
    assert found is not None
    assert (found.name, found.description, found.version) == ("classifier", "of digits", "v1")
    assert (found.author, found.license) == ("somebody", "Apache-2.0")
    (photo,), (classes,) = found.inputs, found.outputs
    assert (photo.name, photo.mean, photo.std, photo.labels) == ("photo", (127.5,), (128.0,), ())
    assert (classes.name, classes.mean, classes.labels) == ("classes", (), ("red", "green", "blue"))
    assert dict(found.files) == {"labels.txt": LABELS, "readme.txt": b"text"}
    assert repr(found) == "<ModelMetadata: 'classifier', version 'v1', 2 files>"
    assert repr(photo) == "<TensorMetadata: 'photo', mean 127.5, std 128.0>"
    assert repr(classes) == "<TensorMetadata: 'classes', 3 labels>"


def test_labels_without_a_locale_come_first() -> None:
    packed = metadata(None, [("de.txt", "de"), ("labels.txt", ""), ("es.txt", "es")])
    found = load(classifier(packed, {"de.txt": b"rot", "labels.txt": LABELS, "es.txt": b"rojo"})).metadata
    assert found is not None
    assert found.outputs[0].labels == ("red", "green", "blue")


def test_a_label_file_that_is_missing_gives_no_labels() -> None:
    found = load(classifier(metadata(None, [("labels.txt", "")]))).metadata
    assert found is not None
    assert (found.outputs[0].labels, dict(found.files)) == ((), {})


def test_a_file_without_metadata_has_none() -> None:
    assert load(classifier()).metadata is None


def test_a_model_with_metadata_is_hashable_and_equal_to_itself() -> None:
    content = classifier(metadata(), {"labels.txt": LABELS})
    assert load(content) == load(content)
    assert hash(load(content)) == hash(load(content))


def bomb() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("labels.txt", bytes(50_000_000))
    return target.getvalue()


CORRUPT = {
    "another identifier": classifier(metadata().replace(b"M001", b"M002")),
    "no FlatBuffer": classifier(b"text"),
    "a std of 0": classifier(metadata(([0.0], [0.0]))),
    "means without stds": classifier(metadata(([1.0, 2.0], [1.0]))),
    "nan": classifier(metadata(([float("nan")], [1.0]))),
    "a corrupt archive": classifier(metadata(), {"l.txt": LABELS * 20}).replace(b"PK\x03\x04", b"PK\x03\x05"),
    "a large archive": classifier(metadata()) + bomb(),
}


@pytest.mark.parametrize("content", CORRUPT.values(), ids=CORRUPT)
def test_corrupt_metadata_are_ignored_with_a_warning(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "nnfmq.importers"):
        assert load(content).metadata is None
    assert "the model's metadata are not used: " in caplog.text


def test_any_byte_of_metadata_and_archive_may_be_wrong() -> None:
    packed = metadata(([127.5], [128.0]), [("labels.txt", "")])
    plain = classifier(packed)
    content = with_files(plain, {"labels.txt": LABELS})
    rng, begin = random.Random(3), plain.index(packed)
    for at in [*range(begin, begin + len(packed)), *range(len(plain), len(content))]:
        changed = content[:at] + bytes([content[at] ^ rng.choice((0x01, 0x80, 0xFF))]) + content[at + 1 :]
        assert isinstance(load(changed), LoadedModel)


# -- nnfmq run


@pytest.fixture
def photo(tmp_path: Path) -> str:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    image.fromarray(np.uint8([SQUARE, SQUARE])).save(tmp_path / "photo.png")
    return str(tmp_path / "photo.png")


def outcome(
    content: bytes, photo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> list[tuple[str | None, float]]:
    (tmp_path / "m.tflite").write_bytes(content)
    words = ["run", str(tmp_path / "m.tflite"), "--input", photo, "--connect", "embedded", "--json", *options]
    assert main(words) == 0
    (output,) = json.loads(capsys.readouterr().out)["outputs"]
    return [(entry.get("label"), entry["score"]) for entry in output["top"]]


def test_run_uses_the_labels_and_the_normalization_of_the_file(
    photo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = metadata(([0.0, 10.0, 50.0], [10.0, 10.0, 10.0]), [("labels.txt", "")])
    found = outcome(classifier(packed, {"labels.txt": LABELS}), photo, tmp_path, capsys)
    assert found == [("red", 1.0), ("green", 1.0), ("blue", -2.0)]  # 10, 20 and 30, normalized


def test_run_quantizes_the_normalized_photo(photo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = metadata(([0.0], [10.0]), [("labels.txt", "")])
    found = outcome(classifier(packed, {"labels.txt": LABELS}, "INT8"), photo, tmp_path, capsys)
    assert found == [("blue", 3.0), ("green", 2.0), ("red", 1.0)]


def test_options_of_run_take_precedence_over_metadata(
    photo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.txt").write_text("rot\ngrün\nblau\n", encoding="utf-8")
    content = classifier(metadata(([0.0], [10.0]), [("labels.txt", "")]), {"labels.txt": LABELS})
    options = ["--labels", str(tmp_path / "own.txt"), "--normalize", "0,5"]
    found = outcome(content, photo, tmp_path, capsys, *options)
    assert found == [("blau", 6.0), ("grün", 4.0), ("rot", 2.0)]


def test_labels_of_another_number_than_the_classes_are_not_used(
    photo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = classifier(metadata(([0.0], [10.0]), [("labels.txt", "")]), {"labels.txt": b"one\ntwo\n"})
    assert outcome(content, photo, tmp_path, capsys) == [(None, 3.0), (None, 2.0), (None, 1.0)]


@pytest.mark.parametrize("value", ["1", "1,0", "a,b", "1,2,3", "nan,1"])
def test_what_is_no_normalization_is_a_usage_error(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "m.tflite", "--input", "photo.png", "--normalize", value]) == 2


def test_a_normalization_of_other_channels_is_rejected(
    photo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.tflite").write_bytes(classifier(metadata(([0.0, 1.0], [1.0, 1.0]))))
    assert main(["run", str(tmp_path / "m.tflite"), "--input", photo]) == 1
    assert "a normalization of 2 channels; the input has 3" in capsys.readouterr().err
