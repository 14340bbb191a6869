"""The four MobileNets with their golden inputs: float within 1e-5, quantized bit-exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nnfmq.engines import interpreter
from nnfmq.importers import load
from nnfmq.validation import validate_model

FLOAT, QUANTIZED = "mobilenet_float", "mobilenet_quantized"
GOLDEN = [
    ("mobilenet_v1_0.25_128", FLOAT, "128", "0.25_128"),
    ("mobilenet_v1_0.25_128_quant", QUANTIZED, "128", "0.25_128"),
    ("mobilenet_v1_0.75_192_quant", QUANTIZED, "192", "0.75_192"),
    ("mobilenet_v2_1.0_224_quant", QUANTIZED, "224", "v2_1.0_224"),
]


CASES = [
    pytest.param(model, f"{folder}/{image}_{size}.input", f"{folder}/{image}_{suffix}.output", id=f"{model}-{image}")
    for model, folder, size, suffix in GOLDEN
    for image in ("banana", "cup")
]


@pytest.mark.parametrize(("model", "input_file", "output_file"), CASES)
def test_a_mobilenet_returns_its_golden_output(data_dir: Path, model: str, input_file: str, output_file: str) -> None:
    loaded = load(data_dir / "models" / f"{model}.tflite")
    validate_model(loaded.model)
    program = interpreter.prepare(loaded.model)
    source, result = loaded.inputs[0], loaded.outputs[0]
    image = np.fromfile(data_dir / "models" / input_file, source.dtype).reshape(source.shape)
    expected = np.fromfile(data_dir / "models" / output_file, result.dtype).reshape(result.shape)
    found = np.empty(result.shape, result.dtype)

    shapes = program.execute([image], [found])

    assert [shape.dimensions for shape in shapes] == [expected.shape]
    if found.dtype == np.float32:
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    else:
        np.testing.assert_array_equal(found, expected)
