"""Generated transformer blocks and products: their arithmetic, and that the runtimes compute the same."""

from __future__ import annotations

from pathlib import Path

import generated_models
import numpy as np
import pytest
from support.litert_models import reference
from support.oracles import Array

import nnfmq
from nnfmq.engines import interpreter
from nnfmq.hal.errors import InvalidArgument


def run(content: bytes, source: Array) -> Array:
    """Return the interpreter's output."""
    loaded = nnfmq.load(content)
    output = np.empty(loaded.outputs[0].shape, loaded.outputs[0].dtype)
    interpreter.prepare(loaded.model).execute([source], [output])
    return output


def constants(content: bytes) -> list[Array]:
    """Return the float constants of a file in their order: weights and bias of each layer."""
    from quantize import read

    tensors = [tensor for tensor in read(content).tensors if tensor.data is not None and tensor.type == "FLOAT32"]
    return [np.frombuffer(tensor.data or b"", np.float32).reshape(tuple(tensor.shape)) for tensor in tensors]


def test_a_block_is_attention_and_two_layers_each_with_a_residual() -> None:
    content = generated_models.block(128, 5)
    source = np.random.default_rng(2).normal(size=(5, 128)).astype(np.float32)
    queries, keys, values, output, inner, last = (
        lambda x, w=weights, b=bias: x @ w.T + b
        for weights, bias in zip(*[iter(constants(content))] * 2, strict=True)  # pairs
    )
    heads = [slice(0, 64), slice(64, 128)]
    joined = []
    for head in heads:
        scores = queries(source)[:, head] @ keys(source)[:, head].T
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        joined.append(weights / weights.sum(axis=1, keepdims=True) @ values(source)[:, head])
    attended = source + output(np.concatenate(joined, axis=1))
    expected = attended + last(np.maximum(inner(attended), 0))
    np.testing.assert_allclose(run(content, source), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["block_64x3_float32", "block_64x3_int8", "product_24x40x3_int8"])
def test_litert_computes_the_same(name: str) -> None:
    litert = pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")
    content = generated_models.generate(name)
    info = nnfmq.load(content).inputs[0]
    random = np.random.default_rng(3)
    if info.dtype == "float32":
        source = random.normal(size=info.shape).astype(np.float32)
        np.testing.assert_allclose(run(content, source), reference(litert, content)(source)[0], rtol=1e-4, atol=1e-4)
    else:
        source = random.integers(-128, 128, info.shape).astype(np.int8)
        difference = run(content, source).astype(int) - reference(litert, content)(source)[0]
        assert abs(difference).max() <= 1


@pytest.mark.parametrize("name", ["block_64_int8", "block_64x3_uint8", "layer_1x1x1_int8", "product_1xax1_int8", ""])
def test_a_name_of_another_form_is_rejected(name: str) -> None:
    with pytest.raises(InvalidArgument, match="is neither block_WIDTHxLENGTH_DTYPE nor product_"):
        generated_models.generate(name)


def test_the_command_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generated_models.main(["product_8x4x2_float32", "--out", str(tmp_path)]) == 0
    loaded = nnfmq.load(tmp_path / "product_8x4x2_float32.tflite")
    assert (loaded.inputs[0].shape, loaded.outputs[0].shape) == ((2, 8), (2, 4))
    assert generated_models.main(["product", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("generated_models: error: 'product' is neither")


def test_the_float_model_has_the_weights_that_were_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "float.tflite"
    file.write_bytes(generated_models.float_model(14_000_000))
    assert 14_000_000 <= file.stat().st_size < 20_000_000
    model = nnfmq.load(file)
    assert [info.dtype for info in (*model.inputs, *model.outputs)] == ["float32", "float32"]


def test_a_convolution_keeps_the_size_of_the_image() -> None:
    content = generated_models.convolution(6, 3)
    weights, bias = constants(content)
    source = np.random.default_rng(2).normal(size=(1, 6, 6, 3)).astype(np.float32)
    padded = np.pad(source[0], ((1, 1), (1, 1), (0, 0)))
    expected = [[[np.sum(padded[y : y + 3, x : x + 3] * one) for one in weights] for x in range(6)] for y in range(6)]
    np.testing.assert_allclose(run(content, source)[0], np.array(expected) + bias, rtol=1e-4, atol=1e-4)
