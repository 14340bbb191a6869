"""Products and LSTMs of inputs that are quantized when the model runs: what ONNX Runtime computes from integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.onnx_files import OnnxCase, expected, file_of, results
from support.onnx_runtime import onnx

import nnfmq
from nnfmq.compat import onnxruntime as compatible
from nnfmq.engines.compiled import partition
from nnfmq.hal.errors import UnsupportedModel

quantization: Any = pytest.importorskip("onnxruntime.quantization")
F32 = np.float32
make = onnx.helper.make_node
RNG = np.random.default_rng(8)
RANGES = {
    "both signs": F32([[1, -2, 0.3, 0]]),
    "zeros": np.zeros((2, 3), F32),
    "negative zeros": np.full((1, 2), -0.0, F32),
    "positive": F32([[1, 2, 3.3]]),
    "negative": F32([[-1, -2, -3.3]]),
    "one element": F32([[0.7]]),
    "one negative element": F32([[-0.7]]),
    "halves": F32([[0, 255, 127.5, 1.5, 2.5, 0.5]]),
    "halves around a zero point": F32([[-127, 128, 0.5, 1.5, -0.5, -1.5]]),
    "NaN": F32([[np.nan, 1, 2, np.nan]]),
    "infinity": F32([[np.inf, 1, -2]]),
    "beyond float32": F32([[3e38, -3e38]]),
    "five dimensions": np.linspace(-1, 2, 12, dtype=F32).reshape(2, 1, 3, 1, 2),
}


@pytest.fixture(autouse=True)
def _numbers_that_no_other_test_decides() -> None:
    RNG.bit_generator.state = np.random.default_rng(8).bit_generator.state


def real(*shape: int, scale: float = 1.0) -> Any:
    return (RNG.standard_normal(shape) * scale).astype(F32)


def integers(dtype: Any, *shape: int) -> Any:
    return RNG.integers(0, 256, shape).astype(np.uint8).view(dtype)


def weights_of(dtype: Any, *shape: int) -> Any:
    """Return weights, int8 of 7 bits: ONNX Runtime saturates sums of two products with uint8 on x86 without VNNI."""
    return RNG.integers(-64, 64, shape).astype(np.int8) if dtype == np.int8 else integers(dtype, *shape)


def everywhere(client: nnfmq.Client, content: bytes, fed: dict[str, Any]) -> list[Any]:
    """Return the outputs on both devices and from the interface of ONNX Runtime."""
    found: list[Any] = []
    for device in ("reference", "compiled"):
        with client.device(device).prepare(nnfmq.load(content)) as model:
            found.append(model.execute(*(x.astype(i.dtype) for x, i in zip(fed.values(), model.inputs, strict=True))))
    return [*found, compatible.InferenceSession(content).run(None, fed)]


@pytest.mark.parametrize("values", RANGES)
def test_the_range_of_the_elements_decides_scale_and_zero_point(client: nnfmq.Client, values: str) -> None:
    fed = {"x": RANGES[values]}
    content = file_of([make("DynamicQuantizeLinear", ["x"], ["y", "s", "z"])], fed, ["y", "s", "z"])
    wanted = expected(content, fed)
    for found in everywhere(client, content, fed):
        for ours, theirs in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(np.reshape(ours, theirs.shape), theirs)


@pytest.mark.parametrize("weights", [np.int8, np.uint8])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("count", [64, 3000])
def test_products_of_integers_are_exact_whatever_their_number_of_terms(
    client: nnfmq.Client, count: int, dtype: Any, weights: Any
) -> None:
    """float32 does not have all sums of 3,000 products."""
    fed = {"a": integers(dtype, 5, count)}
    known = {"w": weights_of(weights, count, 7), "az": dtype(90), "bz": integers(weights, 7)}
    content = file_of([make("MatMulInteger", ["a", "w", "az", "bz"], ["y"])], fed, ["y"], known)
    wanted = fed["a"].astype(int) - 90
    wanted = wanted @ (known["w"].astype(int) - known["bz"])
    np.testing.assert_array_equal(expected(content, fed)[0], wanted)
    for (found,) in everywhere(client, content, fed):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("channels", [3, 200])
def test_convolutions_of_integers_are_exact(client: nnfmq.Client, channels: int) -> None:
    fed = {"a": integers(np.uint8, 1, channels, 6, 5)}
    known = {"w": np.full((4, channels, 3, 3), 255, np.uint8), "az": np.uint8(0), "wz": np.uint8(1)}
    known["w"][1:] = integers(np.uint8, 3, channels, 3, 3)
    content = file_of([make("ConvInteger", ["a", "w", "az", "wz"], ["y"], pads=[1, 0, 1, 0])], fed, ["y"], known)
    (wanted,) = expected(content, fed)
    for (found,) in everywhere(client, content, fed):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("is_constant", [False, True])
@pytest.mark.parametrize("shape", [(4,), (4, 1), (2, 4, 1)])
def test_each_row_may_have_a_zero_point(client: nnfmq.Client, shape: tuple[int, ...], is_constant: bool) -> None:
    """ONNX Runtime does not compute it."""
    fed = {"a": integers(np.int8, *(shape[:-2] or ()), 4, 70), "az": integers(np.int8, *shape)}
    known = {"w": integers(np.uint8, 70, 3), "wz": integers(np.uint8, 3)}
    rows = fed["az"].reshape(*shape[:-2], 4, 1).astype(int)
    wanted = (fed["a"].astype(int) - rows) @ (known["w"].astype(int) - known["wz"])
    if is_constant:
        known["az"] = fed.pop("az")
    content = file_of([make("MatMulInteger", ["a", "w", "az", "wz"], ["y"])], fed, ["y"], known)
    for (found,) in everywhere(client, content, fed):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("shape", [(3,), (4, 4)])
def test_zero_points_that_fit_no_rows_are_refused(shape: tuple[int, ...]) -> None:
    fed = {"a": integers(np.uint8, 4, 4)}
    known = {"w": integers(np.uint8, 4, 4), "az": integers(np.uint8, *shape)}
    content = file_of([make("MatMulInteger", ["a", "w", "az"], ["y"])], fed, ["y"], known)
    with pytest.raises(UnsupportedModel, match="zero points"):
        results(content, fed)


@pytest.mark.parametrize("is_per_column", [False, True])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_a_product_quantizes_its_input(client: nnfmq.Client, dtype: Any, is_per_column: bool) -> None:
    """The input has an outlier, as those of transformers: its other elements become few steps."""
    fed = {"x": real(5, 64)}
    fed["x"][2, 7] = 60
    shape = (9,) if is_per_column else ()
    known = {"w": weights_of(dtype, 64, 9), "s": np.full(shape, 0.015, F32), "b": real(9)}
    known["z"] = np.full(shape, 128 if dtype is np.uint8 else 0, dtype)
    node = make("DynamicQuantizeMatMul", ["x", "w", "s", "z", "b"], ["y"], domain="com.microsoft")
    content = file_of([node], fed, ["y"], known)
    (wanted,) = expected(content, fed)
    floats = fed["x"] @ ((known["w"].astype(F32) - known["z"]) * known["s"]) + known["b"]
    assert np.abs(floats - wanted).max() > 0.3
    for (found,) in everywhere(client, content, fed):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("is_per_column", [False, True])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_an_lstm_quantizes_its_inputs_and_hidden_states(
    client: nnfmq.Client, dtype: Any, is_per_column: bool, directions: int
) -> None:
    steps, batch, size, units = 9, 2, 12, 20
    fed = {"x": real(steps, batch, size)}
    fed["x"][3, 0, 5] = 25  # an outlier: the other inputs become few steps
    columns = (directions, 4 * units) if is_per_column else (directions,)
    known = {"B": real(directions, 8 * units, scale=0.2)}
    for name, count in (("W", size), ("R", units)):
        known[name] = weights_of(dtype, directions, count, 4 * units)
        known[f"{name}s"] = RNG.uniform(0.004, 0.008, columns).astype(F32)
        known[f"{name}z"] = np.full(columns, 128 if dtype is np.uint8 else 0, dtype)
    names = ["x", "W", "R", "B", "", "", "", "", "Ws", "Wz", "Rs", "Rz"]
    attributes = {"hidden_size": units, "direction": "bidirectional" if directions == 2 else "forward"}
    node = make("DynamicQuantizeLSTM", names, ["y", "h", "c"], domain="com.microsoft", **attributes)
    content = file_of([node], fed, ["y", "h", "c"], known)
    wanted = expected(content, fed)
    for found in everywhere(client, content, fed):
        for ours, theirs in zip(found, wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-3)


def float_model(kind: str) -> tuple[bytes, dict[str, Any]]:
    """Return a float model that ONNX Runtime's quantizer is to quantize."""
    if kind == "LSTM":
        x = real(7, 1, 10, scale=2)
        known = {"W": real(1, 64, 10), "R": real(1, 64, 16), "B": real(1, 128)}
        nodes = [make("LSTM", ["x", "W", "R", "B"], ["y", "h"], hidden_size=16)]
        return file_of(nodes, {"x": x}, ["y", "h"], known), {"x": x}
    if kind == "Conv":
        x, known = real(1, 3, 9, 9), {"w": real(4, 3, 3, 3), "b": real(4)}
        return file_of([make("Conv", ["x", "w", "b"], ["y"])], {"x": x}, ["y"], known), {"x": x}
    x, known = real(3, 32), {"w": real(32, 24), "b": real(24), "v": real(24, 5)}
    nodes = [
        make("MatMul", ["x", "w"], ["a"]),
        make("Add", ["a", "b"], ["c"]),
        make("Relu", ["c"], ["d"]),
        make("MatMul", ["d", "v"], ["y"]),
    ]
    return file_of(nodes, {"x": x}, ["y"], known), {"x": x}


@pytest.mark.parametrize("weights", ["QInt8", "QUInt8"])
@pytest.mark.parametrize("kind", ["MatMul", "Conv", "LSTM"])
def test_what_the_dynamic_quantizer_writes_has_onnx_runtime_s_results(
    client: nnfmq.Client, kind: str, weights: str, tmp_path: Path
) -> None:
    content, fed = float_model(kind)
    model = onnx.shape_inference.infer_shapes(onnx.ModelProto.FromString(content))
    to = str(tmp_path / "quantized.onnx")
    is_signed = weights == "QInt8" or kind == "LSTM"  # the quantizer writes signed weights of an LSTM in any case
    quantization.quantize_dynamic(model, to, weight_type=quantization.QuantType[weights], reduce_range=is_signed)
    quantized = Path(to).read_bytes()
    operators = {node.op_type for node in onnx.ModelProto.FromString(quantized).graph.node}
    assert operators & {"MatMulInteger", "ConvInteger", "DynamicQuantizeLSTM"}
    wanted = expected(quantized, fed)
    for found in everywhere(client, quantized, fed):
        for ours, theirs in zip(found, wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-3 * np.abs(theirs).max())


PRODUCTS = {
    "one row": (real(1, 64), real(64, 32), real(32)),
    "sizes that fill no vector": (real(5, 33), real(33, 7), None),
    "three dimensions": (real(2, 3, 130), real(130, 19), real(19)),
    "a 3x3 window with padding": (real(1, 3, 9, 8), real(5, 3, 3, 3), real(5)),
    "a window without a bias": (real(1, 4, 7, 11), real(8, 4, 3, 2), None),
    "NaN": (F32([[np.nan, 1, 2, -1]]), real(4, 3), real(3)),
    "zeros": (np.zeros((2, 4), F32), real(4, 3), real(3)),
    "large numbers": (F32([[3e37, -1e30, 2, 1]]), real(4, 3), real(3)),
    "subnormal numbers": (F32([[3e-38, -1e-38, 2e-39, 0]]), real(4, 3), real(3)),
}


def quantized_products(to: Path, weights: str, per_channel: bool) -> tuple[bytes, dict[str, Any]]:
    """Return what the dynamic quantizer writes for all products, in one model, and its inputs."""
    nodes, fed, known = [], {}, {}
    for n, (x, w, b) in enumerate(PRODUCTS.values()):
        constants = {f"w{n}": w} if b is None else {f"w{n}": w, f"b{n}": b}
        fed[f"x{n}"], product = x, [f"y{n}" if b is None or w.ndim == 4 else f"h{n}"]
        if w.ndim == 4:
            pads = [1, 0, 1, 0] if w.shape[3] == 3 else [0] * 4
            nodes.append(make("Conv", [f"x{n}", *constants], product, name=f"node{n}", pads=pads))
        else:
            nodes.append(make("MatMul", [f"x{n}", f"w{n}"], product, name=f"node{n}"))
            nodes += [] if b is None else [make("Add", [f"h{n}", f"b{n}"], [f"y{n}"])]
        known.update(constants)
    content = file_of(nodes, fed, [f"y{n}" for n in range(len(PRODUCTS))], known)
    model = onnx.shape_inference.infer_shapes(onnx.ModelProto.FromString(content))
    kind = quantization.QuantType[weights]
    is_signed = weights == "QInt8"
    quantization.quantize_dynamic(
        model, str(to), weight_type=kind, per_channel=per_channel, reduce_range=is_signed
    )  # as `weights_of`
    return to.read_bytes(), fed


@pytest.mark.parametrize("weights", ["QUInt8", "per channel"])
def test_products_of_what_is_quantized_when_the_model_runs_have_the_bits_of_onnx_runtime(
    client: nnfmq.Client, weights: str, tmp_path: Path
) -> None:
    is_per_channel = weights == "per channel"
    kind = "QInt8" if is_per_channel else weights
    content, fed = quantized_products(tmp_path / "quantized.onnx", kind, is_per_channel)
    wanted = expected(content, fed)
    for found in everywhere(client, content, fed):
        for name, ours, theirs in zip(PRODUCTS, found, wanted, strict=True):
            np.testing.assert_array_equal(ours.reshape(theirs.shape), theirs, err_msg=name)


def test_weights_of_products_stay_bytes(tmp_path: Path) -> None:
    content, _ = quantized_products(tmp_path / "quantized.onnx", "QUInt8", per_channel=False)
    model = nnfmq.load(content).model
    products = [operation for operation in model.main.operations if "DYNAMIC" in operation.type.name]
    assert len(products) == len(PRODUCTS)
    types = {model.main.operands[operation.inputs[1]].type.name for operation in products}
    assert types == {"TENSOR_QUANT8_ASYMM"}


def trained(*shape: int) -> Any:
    """Return weights as trained ones are: most of them are small."""
    return (np.random.default_rng(9).normal(size=shape) * 28).clip(-127, 127).round().astype(np.int8)


def with_many_weights() -> list[OnnxCase]:
    """Return a case of each operator with weights of 4 or 8 bits, nearly all of whose file are weights."""
    scale, zero, ours = np.full(1, 0.01, F32), np.zeros(1, np.int8), {"domain": "com.microsoft"}
    blocks = {"K": 1024, "N": 512, "block_size": 32, **ours}
    lstm = [
        np.zeros((4, 1, 256), F32),
        trained(1, 256, 1024),
        trained(1, 256, 1024),
        *[None] * 5,
        scale,
        zero,
        scale,
        zero,
    ]
    product, scales = [trained(1024, 512), scale[0], zero[0]], np.ones((512, 32), F32)
    return [
        OnnxCase("MatMulInteger", [np.zeros((1, 1024), np.uint8), trained(1024, 512)], {}, frozenset((1,))),
        OnnxCase("ConvInteger", [np.zeros((1, 128, 9, 9), np.uint8), trained(256, 128, 3, 3)], {}, frozenset((1,))),
        OnnxCase("DynamicQuantizeMatMul", [np.zeros((1, 1024), F32), *product], ours, frozenset((1, 2, 3))),
        OnnxCase("DynamicQuantizeLSTM", lstm, {"hidden_size": 256, **ours}, frozenset(range(1, 12))),
        *(
            OnnxCase("MatMulNBits", [np.zeros((1, 1024), F32), trained(512, 32, 4 * bits).view(np.uint8), scales],
                {"bits": bits, **blocks}, frozenset((1, 2)))
            for bits in (4, 8)
        ),
    ]  # fmt: skip


@pytest.mark.parametrize("case", with_many_weights(), ids=str)
def test_a_program_takes_hardly_more_memory_than_the_file(case: OnnxCase) -> None:
    pytest.importorskip("llvmlite")
    content = case.content()
    program = partition.prepare(nnfmq.load(content).model)
    assert sum(array.nbytes for arrays in program.prepacked for array in arrays) <= 1.1 * len(content)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16])
def test_scale_and_zero_point_may_be_computed(client: nnfmq.Client, dtype: Any) -> None:
    fed = {"x": F32([0.25, 0.75, -1.25, 3.5, 400, -400, np.nan]), "s": F32([0.5]), "f": F32([3])}
    nodes = [
        make("Cast", ["f"], ["z"], to=onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))),
        make("Squeeze", ["s"], ["scale"]),
        make("Squeeze", ["z"], ["zero"]),
        make("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        make("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    model = onnx.ModelProto.FromString(file_of(nodes, fed, ["q", "y"], opset=21))
    model.ir_version = 10
    content = bytes(model.SerializeToString())
    wanted = expected(content, fed)
    for found in everywhere(client, content, fed):
        for ours, theirs in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_what_was_quantized_when_the_model_runs_is_dequantized(client: nnfmq.Client) -> None:
    fed = {"x": real(3, 9)}
    nodes = [
        make("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        make("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    content = file_of(nodes, fed, ["y"])
    (wanted,) = expected(content, fed)
    for (found,) in everywhere(client, content, fed):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("bits", [4, 8])
def test_accuracy_level_4_rounds_the_input_in_blocks(client: nnfmq.Client, bits: int) -> None:
    fed = {"x": real(3, 200)}
    fed["x"][1, 70] = 60  # an outlier: the other elements of its block become few steps
    known = {"w": integers(np.uint8, 33, 7, 4 * bits), "s": RNG.uniform(0.1, 0.2, (33, 7)).astype(F32) / 2**bits}
    options = {"K": 200, "N": 33, "bits": bits, "block_size": 32}
    contents = [
        file_of([make("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", **options, accuracy_level=level)],
            fed, ["y"], known) for level in (0, 4)
    ]  # fmt: skip
    ((floats,), (wanted,)) = (expected(content, fed) for content in contents)
    assert np.abs(floats - wanted).max() > 0.02
    for (found,) in everywhere(client, contents[1], fed):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=5e-3)


@pytest.mark.parametrize("bits", [4, 8])
def test_accuracy_level_4_rounds_the_levels_of_a_quantized_table_as_onnx_runtime_does(
    client: nnfmq.Client, bits: int
) -> None:
    levels = np.arange(-8, 8, dtype=F32)[RNG.integers(0, 16, (5, 64))]
    levels[:, ::32] = -8  # the largest of each block: half of it is 63.5 / 127
    fed = {"x": levels * F32(0.37)}
    known = {"w": integers(np.uint8, 33, 2, 4 * bits), "s": RNG.uniform(0.1, 0.2, (33, 2)).astype(F32) / 2**bits}
    options = {"K": 64, "N": 33, "bits": bits, "block_size": 32, "accuracy_level": 4}
    node = make("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", **options)
    content = file_of([node], fed, ["y"], known)
    (wanted,) = expected(content, fed)
    for (found,) in everywhere(client, content, fed):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
