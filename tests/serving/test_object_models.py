"""Models of the object store: their names, and how they are written into a repository's directory."""

from __future__ import annotations

from pathlib import Path

import pytest

import nnfmq
from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.serving.ray.object_models import ObjectModel, object_models, write_version

TFLITE = Path(nnfmq.example_path("digits.tflite")).read_bytes()


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_keys_are_names_with_or_without_a_version() -> None:
    assert object_models({"b": 1, "a/7": 2}) == [ObjectModel("a", 7, 2), ObjectModel("b", 1, 1)]


@pytest.mark.parametrize("key", ["", "/1", ".a", "../a", "a/b", "a/1/2", "a/0", "a/-1"])
def test_other_keys_are_rejected(key: str) -> None:
    with pytest.raises(InvalidArgument):
        object_models({key: b""})


def test_a_version_is_a_file_by_its_format_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_version(tmp_path, ObjectModel("digits", 2, TFLITE))
    write_version(tmp_path, ObjectModel("other", 1, b"\x08\x07 an ONNX model"))
    assert files(tmp_path) == ["digits/2/model.tflite", "other/1/model.onnx"]
    assert (tmp_path / "digits" / "2" / "model.tflite").read_bytes() == TFLITE


def test_the_same_version_again_has_no_effect_and_another_content_is_rejected(tmp_path: Path) -> None:
    write_version(tmp_path, ObjectModel("digits", 1, TFLITE))
    write_version(tmp_path, ObjectModel("digits", 1, TFLITE))
    for other in (TFLITE + b"\0", b"ONNX"):
        with pytest.raises(InvalidArgument, match="version 1 of model 'digits' exists with another content"):
            write_version(tmp_path, ObjectModel("digits", 1, other))
    assert files(tmp_path) == ["digits/1/model.tflite"]


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "digits").write_text("a file")
    with pytest.raises(GeneralFailure, match="model 'digits' cannot be written"):
        write_version(tmp_path, ObjectModel("digits", 1, TFLITE))
