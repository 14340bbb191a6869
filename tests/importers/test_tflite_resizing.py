"""Inputs of other shapes than the file's: each operator's result is LiteRT's after `resize_tensor_input`."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.both_runners import Theirs, ours
from support.tflite_cases import CASES, Case
from support.tflite_files import CONV, Operator, Tensor, everything, floats, ints, quantized, single, writer

import nnfmq
from nnfmq.hal.errors import InvalidArgument, UnsupportedModel
from nnfmq.importers import load
from nnfmq.validation import validate_model

RECURRENT = {"RNN", "SVDF", "LSTM"}
X = Tensor("x", (1, 4))


def doubled(case: Case) -> Case:
    """Return the case with twice the first dimension of each input that has one."""
    sizes = [None if t is None or t.data is not None or t.extra or not t.shape else t for t in case.given]
    given = [
        old if t is None else replace(t, shape=(2 * t.shape[0], *t.shape[1:]))
        for old, t in zip(case.given, sizes, strict=True)
    ]
    return replace(case, given=given)


def is_resized_here_alone(case: Case) -> bool:
    """Return True for states, and for sizes that the model computes: LiteRT does not resize them with the batch."""
    return case.name == "TRANSPOSE_CONV" or any(name in case.name for name in RECURRENT)


@pytest.mark.parametrize("case", [c for c in CASES if not c.optimized and c.name != "FILL"], ids=str)
def test_an_operator_with_resized_inputs_is_litert_s(case: Case) -> None:
    pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")
    content, resized = case.content(), doubled(case)
    shapes = {i: tensor.shape for i, tensor in enumerate(resized.inputs()) if tensor.shape}
    inputs = resized.draw(np.random.default_rng(len(content)))
    try:
        expected = Theirs(content, shapes=shapes)(inputs)
    except (RuntimeError, ValueError):
        if not is_resized_here_alone(case):
            with pytest.raises(UnsupportedModel, match=r"operator 0 "):
                load(content, shapes=dict(shapes))
        return
    for found, theirs in zip(ours(content, dict(shapes))(inputs), expected, strict=True):
        tolerance = 1e-5 if theirs.dtype == np.float32 else 0
        assert found.shape == theirs.shape
        np.testing.assert_allclose(found.astype(float), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "name",
    ["mobilenet_v1_0.25_128_quant", "micro/micro_speech_quantized", "micro/trained_lstm", "micro/person_detect"],
)
def test_a_model_with_a_batch_computes_each_of_its_images(data_dir: Path, name: str) -> None:
    content = (data_dir / "models" / f"{name}.tflite").read_bytes()
    one = load(content)
    plain = one.inputs
    shapes: dict[str | int, Any] = {info.name: (3, *info.shape[1:]) for info in plain}
    batch, rng = load(content, shapes=shapes), np.random.default_rng(3)
    validate_model(batch.model)
    assert [info.shape[0] for info in (*batch.inputs, *batch.outputs)] == [3] * (len(batch.inputs) + len(batch.outputs))
    given = [rng.integers(-100, 100, (3, *t.shape[1:])).astype(t.dtype) for t in plain]
    found = ours(content, shapes)(given)
    for image in range(3):
        expected = ours(content)([array[image : image + 1] for array in given])
        for batched, alone in zip(found, expected, strict=True):
            np.testing.assert_allclose(batched[image : image + 1].astype(float), alone, rtol=1e-5, atol=1e-6)


def test_an_image_of_another_size_runs_through_convolutions() -> None:
    w, b = Tensor("w", (3, 3, 3, 2), data=floats(3, 3, 3, 2)), Tensor("b", (3,), data=floats(3))
    tensors = [Tensor("x", (1, 4, 4, 2)), w, b, Tensor("y", (1, 4, 4, 3))]
    content = single("CONV_2D", tensors, "Conv2DOptions", CONV)
    given = np.random.default_rng(2).random((2, 9, 7, 2), np.float32)
    (found,) = ours(content, {"x": (2, 9, 7, 2)})([given])
    (expected,) = Theirs(content, shapes={0: (2, 9, 7, 2)})([given])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert found.shape == (2, 9, 7, 3)


@pytest.mark.parametrize(
    ("target", "shape", "expected"),
    [((1, 8), (3, 2, 4), (3, 8)), ((-1, 8), (3, 2, 4), (3, 8)), ((1, -1), (1, 6, 4), (1, 24))],
)
def test_a_constant_shape_changes_with_the_batch(
    target: tuple[int, ...], shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    tensors = [Tensor("x", (1, 2, 4)), Tensor("s", (2,), "INT32", ints(*target)), Tensor("y", (1, 8))]
    content = single("RESHAPE", tensors, "ReshapeOptions")
    assert load(content, shapes={0: shape}).outputs[0].shape == expected


def test_a_constant_shape_that_does_not_fit_another_image_size_is_listed() -> None:
    tensors = [Tensor("x", (1, 2, 4)), Tensor("s", (2,), "INT32", ints(1, 8)), Tensor("y", (1, 8))]
    with pytest.raises(UnsupportedModel, match=r"operator 0 \(RESHAPE\): has a result of shape \[1, 8\]") as caught:
        load(single("RESHAPE", tensors, "ReshapeOptions"), shapes={0: (1, 6, 4)})
    assert str(caught.value).endswith("; this is for 0 of shape (1, 6, 4)")


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"y": (1, 4)}, r"no input 'y' to be resized: the inputs are 0 = 'x'"),
        ({1: (1, 4)}, r"no input 1 to be resized"),
        ({-1: (1, 4)}, r"no input -1 to be resized"),
        ({"x": (-1, 4)}, r"cannot have the shape \[-1, 4\]: dimensions are integers from 0 on"),
        ({"x": (2.0, 4)}, r"shapes: \(2.0, 4\) is no shape for input 'x'; give a size for each dimension"),
        ({"x": (1,) * 9}, r"rank 9"),
        ({"x": (1 << 16, 1 << 16)}, r"more than 4294967295 bytes"),
    ],
)
def test_other_shapes_are_rejected(shapes: dict[str | int, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        load(single("RELU", [X, X]), shapes=shapes)


def test_every_operator_that_does_not_accept_the_new_shapes_is_listed() -> None:
    tensors = [X, Tensor("c", (1, 4), data=floats(1, 4)), X, X, X]
    operators = [
        Operator("MUL", (0, 1), (2,)),
        Operator("RELU", (2,), (3,)),
        Operator("ADD", (0, 1), (4,), "AddOptions"),
    ]
    with pytest.raises(UnsupportedModel, match="2 operators are not supported") as caught:
        load(writer.write(tensors, operators, (0,), (3, 4)), shapes={0: (1, 5)})
    assert [(problem.index, problem.operator) for problem in caught.value.problems] == [(0, "MUL"), (2, "ADD")]


@pytest.mark.parametrize("make", [everything, quantized])
def test_corrupt_files_with_new_shapes_do_no_harm(make: Any) -> None:
    data, rng = make(), random.Random(9)
    shape = load(data).inputs[0].shape
    for _ in range(300):
        at = rng.randrange(len(data))
        changed = data[:at] + bytes([rng.choice((0, 1, 127, 128, 255))]) + data[at + 1 :]
        try:
            validate_model(load(changed, shapes={0: (2, *shape[1:])}).model)
        except InvalidArgument:
            pass


@pytest.mark.parametrize("case", CASES, ids=str)
def test_corrupt_operators_with_new_shapes_do_no_harm(case: Case) -> None:
    data, rng = case.content(), random.Random(4)
    shapes: dict[str | int, Any] = {i: t.shape for i, t in enumerate(doubled(case).inputs()) if t.shape}
    for _ in range(15):
        at = rng.randrange(len(data))
        changed = data[:at] + bytes([rng.choice((0, 1, 127, 128, 255))]) + data[at + 1 :]
        try:
            load(changed, shapes=shapes)
        except InvalidArgument:
            pass


def test_a_driver_executes_a_batch() -> None:
    with np.load(nnfmq.example_path("digits.npz")) as digits:
        images, labels = digits["images"][:50].reshape(-1, 8, 8, 1).astype(np.float32) / 16, digits["labels"][:50]
    batch = load(nnfmq.example_path("digits.tflite"), shapes={"image": (50, 8, 8, 1)})
    with nnfmq.connect(embedded=True) as client, client.prepare(batch) as model, model.burst() as burst:
        (scores,) = burst.execute(images)
    assert scores.shape == (50, 10)
    assert (scores.argmax(axis=1) == labels).mean() > 0.9
