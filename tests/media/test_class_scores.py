"""The best classes of a model's scores: order, real numbers, labels of files and of metadata."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import nnfmq
from nnfmq.hal.errors import InvalidArgument
from nnfmq.media.class_scores import ClassScore

SCORES = np.array([[0.25, 0.5, 0.125, 0.5]], np.float32)


def model_of(info: nnfmq.TensorInfo, labels: tuple[str, ...]) -> Any:
    metadata = nnfmq.ModelMetadata(outputs=(nnfmq.TensorMetadata(labels=labels),))
    return SimpleNamespace(outputs=(info,), metadata=metadata)


def test_the_best_classes_come_first_and_equal_ones_in_their_order() -> None:
    assert nnfmq.top_classes(SCORES, count=3) == [ClassScore(1, 0.5), ClassScore(3, 0.5), ClassScore(0, 0.25)]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_labels_are_given_or_read(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "labels.txt"
    path.write_bytes(ending.join(["a", "b", "c", "d", ""]).encode())
    assert nnfmq.read_labels(path) == list("abcd")
    for labels in (["a", "b", "c", "d"], path, str(path)):
        assert nnfmq.top_classes(SCORES, labels=labels, count=1) == [(1, 0.5, "b")]


def test_a_model_has_the_scale_and_the_labels() -> None:
    info = nnfmq.TensorInfo("scores", (1, 3), "uint8", scale=1 / 256, zero_point=0)
    scores = np.array([[0, 192, 64]], np.uint8)
    assert nnfmq.top_classes(scores, model_of(info, ("x", "y", "z")), count=2) == [(1, 0.75, "y"), (2, 0.25, "z")]
    assert nnfmq.top_classes(scores, model_of(info, ("x", "y")), count=1) == [(1, 0.75, "")]
    assert nnfmq.top_classes(scores, model_of(info, ("x", "y", "z")), labels=["1", "2", "3"])[0].label == "2"


def test_what_are_no_scores_or_no_labels_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="there are 3 labels; the model has 4 classes"):
        nnfmq.top_classes(SCORES, labels=["a", "b", "c"])
    for wrong in (np.float32(3), np.zeros((2, 2), np.float32)):
        with pytest.raises(InvalidArgument, match="class scores are along one dimension"):
            nnfmq.top_classes(np.asarray(wrong))
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(InvalidArgument, match=r"photo\.jpg is not a UTF-8 text file"):
        nnfmq.read_labels(tmp_path / "photo.jpg")


def test_digits_are_classified_as_by_the_command() -> None:
    with np.load(nnfmq.example_path("digits.npz")) as digits:
        images, labels = digits["images"][:5].reshape(-1, 1, 8, 8, 1).astype(np.float32) / 16, digits["labels"][:5]
    with nnfmq.connect(embedded=True) as client, client.prepare(nnfmq.example_path("digits.tflite")) as model:
        found = [nnfmq.top_classes(model(image)[0], model, count=1)[0].class_id for image in images]
    assert found == labels.tolist()


@pytest.mark.parametrize("scores", [(np.ones(4, np.float32),), [0.5, 0.5]], ids=["outputs", "list"])
def test_what_is_no_array_is_rejected_with_what_to_give(scores: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"not of the type (tuple|list): give one output, such as `outputs\[0\]`"):
        nnfmq.top_classes(scores)


def test_what_is_no_model_is_rejected_with_what_to_give() -> None:
    path: Any = "digits.tflite"
    with pytest.raises(InvalidArgument, match=r"a str is no model: give what nnfmq\.load or `prepare` returns"):
        nnfmq.top_classes(np.ones(4, np.float32), path)


@pytest.mark.parametrize("count", [0, -1])
def test_at_least_one_class_is_returned(count: int) -> None:
    with pytest.raises(InvalidArgument, match=f"count {count}: at least 1"):
        nnfmq.top_classes(np.ones(4, np.float32), count=count)
