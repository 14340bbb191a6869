"""Operators of ONNX Runtime's own domain, com.microsoft, on floats: nnfmq's result is ONNX Runtime's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.onnx_files import OnnxCase, assert_close, expected, file_of, results
from support.onnx_runtime import onnx, runtime

import nnfmq
from nnfmq.importers.onnx.operators import attention, fused, quantization, quantized, skip_normalization

RNG = np.random.default_rng(21)


def real(*shape: int, low: float = -2.0, high: float = 2.0) -> Any:
    return RNG.uniform(low, high, shape).astype(np.float32)


def ints(values: Any) -> Any:
    return np.array(values, np.int32)


def case(name: str, *inputs: Any, constants: tuple[int, ...] = (), outputs: int = 1, **attributes: Any) -> OnnxCase:
    domain = "" if name.startswith("Simplified") else "com.microsoft"
    return OnnxCase(name, inputs, {"domain": domain, **attributes}, frozenset(constants), outputs)


X, TOKENS = real(2, 3, 8), real(2, 5, 8)
WORDS = (ints([[1, 4, 0], [2, 2, 3]]), ints([[0, 1, 1], [0, 0, 1]]), real(6, 8), real(4, 8), real(2, 8), real(8),
         real(8))  # fmt: skip
HEADS = (real(2, 3, 8), real(2, 4, 8), real(2, 4, 8))
PROJECTION = (real(8, 24), real(24))
COS, SIN = real(7, 4), real(7, 4)

CASES = [
    case("Gelu", X),
    case("FastGelu", X),
    case("FastGelu", X, real(8), constants=(1,)),
    case("BiasGelu", X, real(8), constants=(1,)),
    case("QuickGelu", X),
    case("QuickGelu", X, alpha=1.0),
    case("FusedMatMul", X, real(8, 4), constants=(1,), alpha=0.5),
    case("FusedMatMul", X, real(4, 8), constants=(1,), alpha=0.5, transB=1),
    case("FusedMatMul", real(2, 3, 4), real(2, 3, 5), alpha=0.25, transA=1),
    case("FusedMatMul", real(2, 4, 3), real(2, 5, 3), transB=1),
    case("FusedMatMul", real(3, 2, 4), real(2, 4, 5), transBatchA=1),
    case("FusedMatMul", real(2, 3, 4), real(4, 2, 5), transBatchB=1),
    case("FusedMatMul", real(3, 2, 4), real(5, 2, 3), transBatchA=1, transBatchB=1, transA=1, transB=1),
    case("TransposeMatMul", real(2, 3, 4), real(2, 5, 4), transB=1, alpha=0.5),
    case("FusedGemm", real(3, 8), real(8, 4), real(4), constants=(1, 2), activation="Relu"),
    case("FusedGemm", real(3, 8), real(4, 8), real(4), constants=(1, 2), transB=1, alpha=0.5,
         activation="LeakyRelu", activation_alpha=0.1),
    case("FusedConv", real(1, 4, 5, 6), real(3, 4, 3, 3), real(3), constants=(1, 2), pads=[1, 1, 1, 1],
         activation="Relu"),
    case("FusedConv", real(1, 4, 5, 6), real(3, 4, 3, 3), constants=(1,), activation="Clip",
         activation_params=[-1.0, 1.5]),
    case("FusedConv", real(1, 4, 5, 6), real(3, 4, 1, 1), real(3), real(1, 3, 5, 6), constants=(1, 2),
         activation="HardSigmoid", activation_params=[0.2, 0.5]),
    case("FusedConv", real(1, 4, 5, 6), real(3, 4, 1, 1), real(3), constants=(1, 2), activation="LeakyRelu",
         activation_params=[0.2]),
    *(case("FusedConv", real(1, 4, 5, 6), real(3, 4, 1, 1), real(3), constants=(1, 2), activation=name)
      for name in ("Sigmoid", "Tanh")),
    case("SimplifiedLayerNormalization", X, real(8), constants=(1,), axis=-1, epsilon=1e-6),
    case("SkipLayerNormalization", X, real(2, 3, 8), real(8), real(8), constants=(2, 3), epsilon=1e-5),
    case("SkipLayerNormalization", X, real(1, 3, 8), real(8), real(8), real(8), constants=(2, 3, 4)),
    case("SkipSimplifiedLayerNormalization", X, real(2, 3, 8), real(8), constants=(2,), epsilon=1e-5),
    case("EmbedLayerNormalization", *WORDS, constants=(2, 3, 4, 5, 6), outputs=2),
    case("EmbedLayerNormalization", *WORDS, ints([[1, 1, 0], [1, 1, 1]]), constants=(2, 3, 4, 5, 6), outputs=2),
    case("EmbedLayerNormalization", WORDS[0], None, *WORDS[2:4], None, *WORDS[5:], None, ints([[0, 2, 1], [3, 0, 0]]),
         constants=(2, 3, 5, 6), outputs=3),
    case("Attention", TOKENS, *PROJECTION, constants=(1, 2), num_heads=2),
    case("Attention", TOKENS, *PROJECTION, num_heads=2, unidirectional=1, scale=0.3),
    case("Attention", TOKENS, *PROJECTION, ints([3, 5]), constants=(1, 2), num_heads=2),
    case("Attention", TOKENS, *PROJECTION, ints([4, 5, 1, 0]), constants=(1, 2), num_heads=2),
    case("Attention", TOKENS, *PROJECTION, ints([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]]), constants=(1, 2), num_heads=4,
         mask_filter_value=-3.0),
    case("Attention", TOKENS, *PROJECTION, ints(np.tri(5)[None].repeat(2, 0)), constants=(1, 2), num_heads=2),
    case("Attention", TOKENS, real(8, 20), real(20), None, None, real(2, 2, 5, 5), constants=(1, 2), num_heads=2,
         qkv_hidden_sizes=[8, 8, 4]),
    case("Attention", TOKENS, *PROJECTION, None, real(2, 2, 2, 3, 4), constants=(1, 2), num_heads=2, outputs=2,
         unidirectional=1),
    case("Attention", TOKENS, *PROJECTION, ints([0, 2]), constants=(1, 2), num_heads=2, unidirectional=1,
         mask_filter_value=float(np.finfo(np.float32).min)),
    case("MultiHeadAttention", *HEADS, num_heads=2),
    case("MultiHeadAttention", *HEADS, real(24), constants=(3,), num_heads=4, scale=0.4),
    case("MultiHeadAttention", *HEADS, None, ints([2, 4]), num_heads=2),
    case("MultiHeadAttention", *HEADS, None, ints([[1, 1, 1, 0], [1, 1, 1, 1]]), num_heads=2),
    case("MultiHeadAttention", *HEADS, None, None, real(1, 2, 3, 4), num_heads=2),
    case("MultiHeadAttention", HEADS[0], real(2, 2, 4, 4), real(2, 2, 4, 4), num_heads=2),
    case("MultiHeadAttention", HEADS[0], real(2, 3, 8), real(2, 3, 8), real(24), None, None, real(2, 2, 5, 4),
         real(2, 2, 5, 4), constants=(3,), num_heads=2, unidirectional=1, outputs=3),
    case("Pad", real(2, 3), np.int64([[0, 1, 2, 0]]), np.float32([1.5]), constants=(1, 2)),
    case("Pad", real(3, 4), np.int64([0, 1, 2, 0]), constants=(1,), mode="reflect"),
    case("Trilu", real(2, 3, 4), np.int64(1), constants=(1,), upper=0),
    case("GatherND", real(3, 4, 2), np.int64([[0, 3], [2, 1]])),
    case("RotaryEmbedding", real(2, 3, 16), np.int64([0]), COS, SIN, constants=(1, 2, 3)),
    case("RotaryEmbedding", real(2, 3, 16), np.int64([[0, 1, 2], [4, 5, 6]]), COS, SIN, constants=(2, 3),
         interleaved=1),
    case("RotaryEmbedding", real(2, 2, 3, 8), np.int64([2]), COS, SIN, constants=(2, 3)),
    case("RotaryEmbedding", real(2, 2, 3, 12), np.int64([[0, 1, 2], [4, 5, 6]]), COS, SIN, constants=(2, 3),
         num_heads=2, rotary_embedding_dim=8),
]  # fmt: skip


def numbers(dtype: Any, *shape: int) -> Any:
    limits = np.iinfo(dtype)
    return RNG.integers(limits.min, limits.max + 1, shape).astype(dtype)


def scales(*shape: int) -> Any:
    return real(*shape, low=0.001, high=0.01)


def weights(*shape: int) -> Any:
    """Return int8 of 7 bits: ONNX Runtime saturates sums of two products with uint8 on x86 without VNNI."""
    return RNG.integers(-64, 64, shape).astype(np.int8)


BYTES, WEIGHTS = numbers(np.uint8, 2, 3, 8), weights(8, 6)
TABLES = [numbers(np.uint8, *shape) for shape in ((6, 8), (4, 8), (2, 8), (8,), (8,))]
ONE = np.float32(0.01)
INTEGER_CASES = [
    case("MatMulNBits", real(2, 3, 40), numbers(np.uint8, 5, 3, 8), scales(15), constants=(1, 2), K=40, N=5, bits=4,
         block_size=16),
    case("MatMulNBits", real(3, 32), numbers(np.uint8, 5, 2, 8), scales(10), numbers(np.uint8, 5), None, real(5),
         constants=(1, 2, 3, 5), K=32, N=5, bits=4, block_size=16),
    case("MatMulNBits", real(3, 32), numbers(np.uint8, 5, 2, 8), scales(10), real(10, low=3, high=9),
         constants=(1, 2, 3), K=32, N=5, bits=4, block_size=16),
    case("MatMulNBits", real(3, 32), numbers(np.uint8, 5, 2, 8), scales(10), None, ints([1, 0] * 16),
         constants=(1, 2, 4), K=32, N=5, bits=4, block_size=16),
    case("MatMulNBits", real(3, 32), numbers(np.uint8, 5, 2, 16), scales(10), numbers(np.uint8, 5, 2),
         constants=(1, 2, 3), K=32, N=5, bits=8, block_size=16),
    case("GatherBlockQuantized", numbers(np.uint8, 5, 16), ints([[0, 4], [2, 2]]), scales(5, 2), constants=(0, 2),
         block_size=16, quantize_axis=1),
    case("GatherBlockQuantized", numbers(np.uint8, 5, 16), ints([3]), scales(5, 2), numbers(np.uint8, 5, 1),
         constants=(0, 2, 3), block_size=16, quantize_axis=1),
    case("DynamicQuantizeMatMul", X, WEIGHTS, ONE, np.int8(3), constants=(1, 2, 3)),
    case("DynamicQuantizeMatMul", X, WEIGHTS, scales(6), None, real(6), constants=(1, 2, 4)),
    case("MatMulIntegerToFloat", BYTES, WEIGHTS, ONE, ONE, np.uint8(120), np.int8(-3), constants=(1, 2, 3, 4, 5)),
    case("MatMulIntegerToFloat", BYTES, WEIGHTS, ONE, scales(6), None, None, real(6), constants=(1, 3, 6)),
    case("QAttention", BYTES, weights(8, 24), real(24), ONE / 4, ONE / 9, ints([[1, 1, 0], [1, 1, 1]]),
         np.uint8(120), np.int8(0), constants=(1, 2, 3, 4, 6, 7), num_heads=2),
    case("QEmbedLayerNormalization", *WORDS[:2], *TABLES, None, *[ONE] * 5, *[np.uint8(99)] * 5,
         constants=(*range(2, 7), *range(8, 18)), outputs=2),
    case("MatMulNBits", real(2, 70), numbers(np.uint8, 9, 3, 8), scales(9, 3), constants=(1, 2), K=70, N=9, bits=2,
         block_size=32, accuracy_level=1),
    case("MatMulNBits", real(70), numbers(np.uint8, 9, 3, 16), scales(9, 3), numbers(np.uint8, 9, 2),
         constants=(1, 2, 3), K=70, N=9, bits=4, block_size=32),
    case("MatMulNBits", real(2, 70), numbers(np.uint8, 9, 3, 16), scales(9, 3), None, None, real(9), constants=(1, 2),
         K=70, N=9, bits=4, block_size=32),
    case("MatMulNBits", real(2, 70).astype(np.float16), numbers(np.uint8, 9, 3, 16), scales(9, 3).astype(np.float16),
         constants=(1, 2), K=70, N=9, bits=4, block_size=32),
    case("MatMulNBits", real(3, 2, 600), numbers(np.uint8, 4, 2, 512), scales(4, 2), constants=(1, 2), K=600, N=4,
         bits=8, block_size=512),
]  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, *INTEGER_CASES], ids=str)
def test_an_imported_operator_is_onnx_runtime_s(case: OnnxCase) -> None:
    content, fed = case.content(), case.fed()
    assert_close(results(content, fed), expected(content, fed))


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_in_blocks_stay_as_packed_as_in_the_file(bits: int) -> None:
    blocks = numbers(np.uint8, 48, 4, 4 * bits)
    inputs = real(1, 128), blocks, scales(48, 4), numbers(np.uint8, 48, bits // 2)
    options = {"K": 128, "N": 48, "bits": bits, "block_size": 32}
    content = case("MatMulNBits", *inputs, constants=(1, 2, 3), **options).content()
    assert len(nnfmq.load(content).model.operand_values) < 1.1 * len(content)


def test_every_operator_of_these_modules_is_tested() -> None:
    qualified = [f"{each.attributes['domain']}.{each.operator}" for each in (*CASES, *INTEGER_CASES)]
    named = {name.removeprefix(".") for name in qualified}
    tables = (
        attention.CONVERTERS,
        quantization._BLOCKWISE_CONVERTERS,
        fused._FUSED_CONVERTERS,
        quantized._INTEGER_PRODUCTS_CONVERTERS,
        skip_normalization.CONVERTERS,
    )
    without_reference = {"com.microsoft.BiasSplitGelu", "com.microsoft.GroupNorm"}  # on the CPU
    of_onnx = {"com.microsoft.GatherND", "com.microsoft.Pad", "com.microsoft.Trilu"}  # with the same meaning
    elsewhere = {"RMSNormalization"}  # with the operators of ONNX
    assert named | without_reference | elsewhere == of_onnx | {name for table in tables for name in table}


def test_split_gelu_is_that_of_its_definition() -> None:
    x, bias = real(2, 3, 8), real(8)
    left, right = np.split((x + bias).astype(float), 2, axis=-1)
    gelu = 0.5 * right * (1 + np.vectorize(math.erf)(right / math.sqrt(2)))
    found = case("BiasSplitGelu", x, bias, constants=(1,))
    assert_close(results(found.content(), found.fed()), [(left * gelu).astype(np.float32)])


@pytest.mark.parametrize("channels_last", [0, 1])
def test_a_group_is_normalized_as_its_definition_says(channels_last: int) -> None:
    x, scale, bias = real(2, 6, 4, 5), real(6), real(6)
    groups = x.astype(float).reshape(2, 3, -1)
    normal = (groups - groups.mean(-1, keepdims=True)) / np.sqrt(groups.var(-1, keepdims=True) + 1e-5)
    wanted = normal.reshape(x.shape) * scale[:, None, None] + bias[:, None, None]
    wanted = (wanted / (1 + np.exp(-wanted))).astype(np.float32)
    given, wanted = (np.moveaxis(each, 1, -1) if channels_last else each for each in (x, wanted))
    options = {"groups": 3, "activation": 1, "channels_last": channels_last}
    found = case("GroupNorm", np.ascontiguousarray(given), scale, bias, constants=(1, 2), **options)
    assert_close(results(found.content(), found.fed()), [wanted])


REFUSED = [
    (case("Attention", TOKENS, *PROJECTION, constants=(1, 2), num_heads=2, do_rotary=1), "do_rotary is not supported"),
    (case("Attention", TOKENS, *PROJECTION, constants=(1, 2), num_heads=3), "cannot be split into 3 heads"),
    (case("Attention", TOKENS, *PROJECTION, ints([[1, 1]]), constants=(1, 2), num_heads=2), r"mask of the shape \(1"),
    (case("MultiHeadAttention", real(2, 3, 2, 3, 4), num_heads=2), "packed queries"),
    (case("MultiHeadAttention", *HEADS, num_heads=2, unidirectional=1), "as many keys as queries"),
    (case("RotaryEmbedding", real(2, 2, 3, 8), np.int64([0]), COS, SIN, num_heads=2, rotary_embedding_dim=1 << 31),
     "2147483648 of 8 elements cannot be rotated"),
    (case("FusedGemm", real(3, 8), real(8, 4), real(4), activation="Sin"), "the activation 'Sin'"),
    (case("MatMulNBits", real(3, 32), numbers(np.uint8, 5, 2, 8), scales(10), constants=(1, 2), K=32, N=5, bits=3,
          block_size=16), "numbers of 3 bits"),
    (case("MatMulNBits", real(3, 32), numbers(np.uint8, 5, 2, 8), scales(10), constants=(1, 2), K=1 << 40, N=5, bits=4,
          block_size=16), "80 bytes do not have 5"),
    (case("GatherBlockQuantized", numbers(np.uint8, 5, 16), ints([3]), scales(5, 2), constants=(0, 2),
          block_size=1 << 40), "for blocks of 1099511627776"),
    (case("QLinearAveragePool", BYTES, ONE, np.uint8(9), ONE, np.uint8(9), constants=(1, 2, 3, 4), kernel_shape=[3],
          strides=[3], ceil_mode=1, count_include_pad=1), "counts pixels beyond the padding"),
    (case("MatMulIntegerToFloat", BYTES, WEIGHTS, scales(6), ONE, constants=(1, 2, 3)), "6 scales of the first matrix"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "message"), REFUSED, ids=str)
def test_an_operator_that_would_be_computed_wrongly_is_refused(case: OnnxCase, message: str) -> None:
    with pytest.raises(nnfmq.UnsupportedModel, match=message):
        nnfmq.load(case.content())


def test_an_operator_that_is_not_known_is_listed_with_its_domain() -> None:
    with pytest.raises(nnfmq.UnsupportedModel, match=r"com.microsoft.Sampling.*is not supported"):
        nnfmq.load(case("Sampling", TOKENS).content())


def test_a_file_whose_layout_fits_one_machine_is_refused_with_the_reason(tmp_path: Path) -> None:
    path, options = tmp_path / "optimized.onnx", runtime.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 3
    image = {"x": real(1, 16, 8, 8)}
    conv = onnx.helper.make_node("Conv", ["x", "w"], ["y"])
    runtime.InferenceSession(file_of([conv], image, ["y"], {"w": real(16, 16, 3, 3)}), options)
    with pytest.raises(nnfmq.UnsupportedModel, match=r"nchwc.Conv.*ORT_ENABLE_EXTENDED"):
        nnfmq.load(path)


def test_a_file_that_onnx_runtime_has_optimized_is_computed_by_a_driver(tmp_path: Path) -> None:
    node, path = onnx.helper.make_node, tmp_path / "optimized.onnx"
    nodes = [
        node("MatMul", ["x", "w"], ["product"]),
        node("Add", ["product", "b"], ["shifted"]),
        node("Div", ["shifted", "root"], ["scaled"]),
        node("Erf", ["scaled"], ["erf"]),
        node("Add", ["erf", "one"], ["half"]),
        node("Mul", ["shifted", "half"], ["twice"]),
        node("Mul", ["twice", "point_five"], ["gelu"]),
        node("Add", ["gelu", "x"], ["sum"]),
        node("LayerNormalization", ["sum", "gamma", "beta"], ["y"]),
    ]
    numbers = {"root": np.float32(math.sqrt(2)), "one": np.float32(1), "point_five": np.float32(0.5)}
    constants = {"w": real(8, 8), "b": real(8), "gamma": real(8), "beta": real(8), **numbers}
    plain = file_of(nodes, {"x": X}, ["y"], constants)
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 3
    runtime.InferenceSession(plain, options, providers=["CPUExecutionProvider"])
    written = [each.op_type for each in onnx.load(path).graph.node]
    assert {"Gelu", "SkipLayerNormalization"} <= set(written)
    with nnfmq.connect(embedded=True) as client, client.prepare(nnfmq.load(path)) as model:
        assert_close(model.execute(X), expected(plain, {"x": X}))


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint16])
def test_numbers_of_8_and_16_bits_are_quantized_in_this_domain(kind: Any) -> None:
    """ONNX Runtime's optimizer writes these before ONNX has the types."""
    node, x, limits = onnx.helper.make_node, real(3, 8), np.iinfo(kind)
    step, zero = np.float32(4.5 / (limits.max - limits.min)), kind(limits.min // 2 + limits.max // 2)
    nodes = [
        node("QuantizeLinear", ["x", "step", "zero"], ["q"], domain="com.microsoft"),
        node("DequantizeLinear", ["q", "step", "zero"], ["y"], domain="com.microsoft"),
    ]
    content = file_of(nodes, {"x": x}, ["y"], {"step": step, "zero": zero})
    (found,), (wanted,) = results(content, {"x": x}), expected(content, {"x": x})
    np.testing.assert_allclose(found, wanted, atol=1.01 * float(step))
    assert (np.abs(found - wanted) > step / 2).mean() < 0.05
    assert np.abs(found - x).max() < 0.51 * step or kind in (np.int16, np.uint16)
