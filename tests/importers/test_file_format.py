"""Files that are no model: the error says what they are, whatever their name."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers import load
from nnfmq.importers.file_format import importer_of


def archive(*names: str) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as file:
        for name in names:
            file.writestr(name, b"content")
    return target.getvalue()


def npy() -> bytes:
    target = io.BytesIO()
    np.save(target, np.zeros(3))
    return target.getvalue()


def onnx_model(producer: str) -> bytes:
    onnx = pytest.importorskip("onnx")
    helper, x_type = onnx.helper, onnx.TensorProto.FLOAT
    x, y = (helper.make_tensor_value_info(name, x_type, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "graph", [x], [y])
    model = helper.make_model(graph, producer_name=producer)
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


OTHERS = {
    "empty": (b"", "this is an empty file"),
    "short": (b"\x1c\x00\x00\x00TF", "a file of 6 bytes, too short for a model and probably truncated"),
    "png": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "this is a PNG image"),
    "jpeg": (b"\xff\xd8\xff\xe0\0\x10JFIF\0", "this is a JPEG image"),
    "gif": (b"GIF89a\1\0\1\0", "this is a GIF image"),
    "npy": (npy(), "this is a NumPy array"),
    "zip": (archive("data.pkl"), "this is a zip archive, such as a PyTorch"),
    "task": (archive("a.tflite", "b.txt"), r"this is a zip archive with 'a\.tflite'; extract it first"),
    "truncated zip": (archive("a.tflite")[:-30], "this is a truncated or corrupt zip archive"),
    "html": (b"<!DOCTYPE html><html></html>", "this is an HTML page; the download has probably failed"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "this is a Git LFS pointer"),
    "safetensors": (b"\x40\0\0\0\0\0\0\0" + b'{"weight":{"dtype":"F32"}}' + bytes(99), "this is a safetensors file"),
    "other": (b"\x90\x91?" * 100, "a file of an unknown format; models are read from TensorFlow Lite files"),
    "text": (b"tench\ngoldfish\n" * 3, "a text file; models are read from"),
}


@pytest.mark.parametrize(("content", "message"), OTHERS.values(), ids=OTHERS)
def test_the_error_says_what_a_file_is_that_is_no_model(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.tflite"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=rf"model\.tflite: .*{message}"):
        load(path)


@pytest.mark.parametrize("cut", [0, 1, 20])
@pytest.mark.parametrize("producer", ["", "pytorch"])
def test_an_onnx_model_is_recognized_by_its_fields(producer: str, cut: int) -> None:
    content = onnx_model(producer)
    assert importer_of(content[: len(content) - cut]) == "nnfmq.importers.onnx.model"


def test_a_file_with_the_identifier_of_tensorflow_lite_is_imported_as_such() -> None:
    assert importer_of(b"\x1c\0\0\0TFL3") == "nnfmq.importers.tflite.model"
    with pytest.raises(InvalidArgument, match="corrupt or truncated file"):
        load(b"\x1c\0\0\0TFL3")
