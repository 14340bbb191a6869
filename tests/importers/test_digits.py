"""The demo's model and digits: small, free of pickles, and as good as the training tool message."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
from numpy.typing import NDArray

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import LifeTime
from nnfmq.importers import LoadedModel, example_path, load

Array = NDArray[np.float64]


@pytest.fixture(scope="module")
def digits() -> dict[str, NDArray[np.uint8]]:
    with np.load(example_path("digits.npz"), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(example_path("digits.tflite"))


def weights(loaded: LoadedModel) -> list[Array]:
    """Return the model's constants of rank 1 and more in the order in which its operations use them."""
    main, values = loaded.model.main, loaded.model.operand_values
    used = (main.operands[index] for operation in main.operations for index in operation.inputs)
    return [
        np.frombuffer(values, np.float32, np.prod(o.dimensions), o.location.offset).reshape(o.dimensions).astype(float)
        for o in used
        if o.lifetime == LifeTime.CONSTANT_COPY and o.dimensions
    ]


def convolution(x: Array, kernel: Array, bias: Array) -> Array:
    """Sum nine shifted products: nothing in common with how the tool or the engine does it."""
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    h, w = x.shape[1:3]
    taps = [padded[:, r : r + h, c : c + w] @ kernel[:, r, c].T for r in range(3) for c in range(3)]
    return np.maximum(sum(taps) + bias, 0)


def pooled(x: Array) -> Array:
    return np.maximum.reduce([x[:, r::2, c::2] for r in (0, 1) for c in (0, 1)])


def test_the_model_is_the_network_that_the_demo_describes(loaded: LoadedModel) -> None:
    operations = [operation.type for operation in loaded.model.main.operations]
    assert operations == [Op.CONV_2D, Op.MAX_POOL_2D, Op.CONV_2D, Op.MAX_POOL_2D, Op.FULLY_CONNECTED, Op.SOFTMAX]
    assert loaded.inputs == (TensorInfo("image", (1, 8, 8, 1), "float32"),)
    assert loaded.outputs == (TensorInfo("probabilities", (1, 10), "float32"),)


def test_the_model_is_as_accurate_as_the_tool_printed(
    loaded: LoadedModel, digits: dict[str, NDArray[np.uint8]]
) -> None:
    kernel1, bias1, kernel2, bias2, dense, dense_bias = weights(loaded)
    x = digits["images"][..., None] / 16
    features = pooled(convolution(pooled(convolution(x, kernel1, bias1)), kernel2, bias2))
    classes = (features.reshape(len(x), -1) @ dense.T + dense_bias).argmax(axis=1)
    correct = int((classes == digits["labels"]).sum())
    assert correct == int(digits["correct_count"])
    assert correct >= 0.96 * len(x)


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")
def test_the_digits_are_those_of_the_data_set(digits: dict[str, NDArray[np.uint8]]) -> None:
    # In a separate process: importing scikit-learn leaves threads of a second BLAS behind.
    program = (
        "import sys, sklearn.datasets as d; s = d.load_digits(); n = -int(sys.argv[1]);"
        "sys.stdout.buffer.write(s.images[n:].astype('u1').tobytes() + s.target[n:].astype('u1').tobytes())"
    )
    command = [sys.executable, "-c", program, str(len(digits["labels"]))]
    original = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
    assert original == digits["images"].tobytes() + digits["labels"].tobytes()


def test_the_files_are_small_and_credited() -> None:
    folder = example_path("CREDITS.md").parent
    assert sum(path.stat().st_size for path in folder.iterdir()) < 200_000
    credits = (folder / "CREDITS.md").read_text(encoding="utf-8")
    assert "CC BY 4.0" in credits
    assert "10.24432/C50P49" in credits


@pytest.mark.parametrize("name", ["absent.tflite", "../__init__.py", ""])
def test_only_the_packaged_files_are_examples(name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"there are CREDITS\.md, digits\.npz, digits\.tflite"):
        example_path(name)


def test_a_tflite_file_is_read_without_the_packages_of_its_schema() -> None:
    loads = "nnfmq.load(nnfmq.example_path('digits.tflite'))"
    program = f"import sys, nnfmq; {loads}; print({{'tflite', 'flatbuffers'}} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60).stdout
    assert printed == b"set()\n"
