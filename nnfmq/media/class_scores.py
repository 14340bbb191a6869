"""The best of a model's classes, with their labels."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.summaries import counted
from nnfmq.hal.tensor_info import TensorInfo

__all__ = ["ClassScore", "read_labels", "top_classes"]


class ClassScore(NamedTuple):
    """A class: its position among the scores, its score as a real number, and its label, "" if there are none."""

    class_id: int
    score: float
    label: str = ""


class DescribedClassifier(Protocol):
    """A model whose output is class scores: what `nnfmq.load` returns, or a prepared model."""

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """The outputs, in order."""
        ...

    @property
    def metadata(self) -> Any:
        """An `nnfmq.ModelMetadata`, or None."""
        ...


def top_classes(
    scores: np.ndarray[Any, Any],
    model: DescribedClassifier | None = None,
    *,
    labels: Sequence[str] | str | os.PathLike[str] | None = None,
    count: int = 5,
) -> list[ClassScore]:
    """Return the classes with the highest scores, the best first; of equal scores the first class.

    Args:
        scores: An output with one score for each class: all its elements are along its last dimension.
        model: The model, whose first output this is; its scale and zero point make quantized scores real numbers, and
            its metadata has labels, if `labels` are not given.
        labels: The labels, or the path of a file with one in each line.
        count: How many classes, at least 1.

    Raises:
        InvalidArgument: If these are no scores, `count` is less than 1, or the number of labels is another one.
        OSError: If the file of labels cannot be read.
    """
    if not isinstance(scores, np.ndarray):
        raise InvalidArgument(
            f"class scores are an array, not of the type {type(scores).__name__}: give one output, such as `outputs[0]`"
        )
    if count < 1:
        raise InvalidArgument(f"count {count}: at least 1 class is returned")
    if not scores.ndim or scores.size != scores.shape[-1]:
        raise InvalidArgument(f"class scores are along one dimension; these have the shape {scores.shape}")
    if model is not None and not hasattr(model, "outputs"):
        raise InvalidArgument(f"a {type(model).__name__} is no model: give what nnfmq.load or `prepare` returns")
    info = None if model is None else model.outputs[0]
    texts = read_labels(labels) if isinstance(labels, (str, os.PathLike)) else labels
    if texts is None and model is not None:
        texts = metadata_labels(model, 0)
    if texts is not None and len(texts) != scores.size:
        verb = "is" if len(texts) == 1 else "are"
        raise InvalidArgument(f"there {verb} {counted(len(texts), 'label')}; the model has {scores.size} classes")
    real = real_values(scores, info).reshape(-1)
    best = (-real.astype("float64")).argsort(kind="stable")[:count]
    return [ClassScore(int(index), float(real[index]), "" if texts is None else texts[index]) for index in best]


def real_values(array: np.ndarray[Any, Any], info: TensorInfo | None) -> np.ndarray[Any, Any]:
    """Return the real numbers of an output, which are quantized if `info` has a scale."""
    if info is None or not info.scale:
        return array
    return (array.astype("float64") - info.zero_point) * info.scale


def metadata_labels(model: DescribedClassifier, output: int) -> list[str] | None:
    """Return the labels of an output in the file's metadata; None if their number is not that of its elements."""
    described = model.metadata.outputs[output : output + 1] if model.metadata is not None else ()
    count = math.prod(model.outputs[output].shape)
    return next((list(tensor.labels) for tensor in described if len(tensor.labels) == count), None)


def read_labels(path: str | os.PathLike[str]) -> list[str]:
    """Return the labels of a file that has one in each line.

    Raises:
        InvalidArgument: If the file is not UTF-8 text.
        OSError: If it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as bad:
        raise InvalidArgument(f"{path} is not a UTF-8 text file: {bad.reason}") from bad
