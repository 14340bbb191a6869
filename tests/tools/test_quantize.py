"""The quantizer: single layers against their definition, the report, the command line, and rejected inputs."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import quantize as tool
from quantize import Calibrator, Range, calibration_samples, read
from support.interpreted import dequantize, interpreted, quantize
from support.tflite_files import CONV, POOL, Operator, Tensor, ints, single, writer

import nnfmq
from nnfmq.hal.errors import InvalidArgument

Array = npt.NDArray[Any]
SHAPE = (1, 4, 4, 2)
RELU6 = {"FusedActivationFunction": 3}
MIN_SQNR_DB = 38.0  # 8 bits of a uniformly distributed signal give 48; a layer rounds its inputs and its output
BATCH = np.random.default_rng(11).uniform(-2, 3, (40, *SHAPE)).astype(np.float32)


def constant(name: str, *shape: int) -> Tensor:
    values = np.random.default_rng(len(name) + sum(shape)).uniform(-1, 1, shape).astype(np.float32)
    return Tensor(name, shape, data=values.tobytes())


X, Y = Tensor("x", SHAPE), Tensor("y", SHAPE)
SMALL = Tensor("y", (1, 2, 2, 2))
WEIGHTS, BIAS = constant("w", 2, 3, 3, 2), constant("b", 2)
AXES = Tensor("axes", (2,), "INT32", ints(1, 2))
PADDINGS = Tensor("paddings", (4, 2), "INT32", ints(0, 0, 1, 1, 2, 0, 0, 0))
LAYERS = {
    "ADD": single("ADD", [X, constant("c", 2), Y], "AddOptions"),
    "ADD_RELU6": single("ADD", [X, constant("c", *SHAPE), Y], "AddOptions", RELU6),
    "AVERAGE_POOL_2D": single("AVERAGE_POOL_2D", [X, SMALL], "Pool2DOptions", POOL),
    "CONCATENATION": single(
        "CONCATENATION", [X, constant("c", *SHAPE), Tensor("y", (1, 4, 4, 4))], "ConcatenationOptions", {"Axis": 3}
    ),
    "CONV_2D": single("CONV_2D", [X, WEIGHTS, BIAS, Y], "Conv2DOptions", CONV),
    "CONV_2D_RELU6": single("CONV_2D", [X, WEIGHTS, BIAS, Y], "Conv2DOptions", CONV | RELU6),
    "DEPTHWISE_CONV_2D": single(
        "DEPTHWISE_CONV_2D", [X, constant("dw", 1, 3, 3, 2), BIAS, Y], "DepthwiseConv2DOptions", CONV
    ),
    "FULLY_CONNECTED": single(
        "FULLY_CONNECTED", [X, constant("fw", 3, 32), constant("fb", 3), Tensor("y", (1, 3))], "FullyConnectedOptions"
    ),
    "LOGISTIC": single("LOGISTIC", [X, Y]),
    "MAX_POOL_2D": single("MAX_POOL_2D", [X, SMALL], "Pool2DOptions", POOL),
    "MEAN": single("MEAN", [X, AXES, Tensor("y", (1, 1, 1, 2))], "ReducerOptions", {"KeepDims": True}),
    "MUL": single("MUL", [X, constant("c", *SHAPE), Y], "MulOptions"),
    "PAD": single("PAD", [X, PADDINGS, Tensor("y", (1, 6, 6, 2))]),
    "RELU": single("RELU", [X, Y]),
    "RESHAPE": single("RESHAPE", [X, Tensor("y", (1, 32))], "ReshapeOptions", {"NewShape": [1, 32]}),
    "SOFTMAX": single("SOFTMAX", [X, Y], "SoftmaxOptions", {"Beta": 1.0}),
    "SQUEEZE": single("SQUEEZE", [X, Tensor("y", (4, 4, 2))], "SqueezeOptions", {"SqueezeDims": [0]}),
}
MEAN_MIN_SQNR_DB = 20.0  # a mean of 16 values is a quarter as large, at the same scale, and the HAL truncates it


def quantized(model: bytes, dtype: str = "int8", **settings: Any) -> tool.QuantizationResult:
    calibrator = Calibrator(**settings)
    return tool.quantize(model, {"x": BATCH}, dtype=dtype, per_channel=dtype == "int8", calibrator=calibrator)


@cache
def outputs(model: bytes) -> tuple[Array, Array]:
    """Return a float model's outputs for BATCH, and its quantized model's outputs, dequantized."""
    result = quantized(model).content
    loaded, run, run_quantized = nnfmq.load(result), interpreted(model), interpreted(result)
    exact = [run(x)[0] for x in BATCH]
    coarse = [dequantize(run_quantized(quantize(x, loaded.inputs[0]))[0], loaded.outputs[0]) for x in BATCH]
    return np.asarray(exact, np.float64), np.asarray(coarse)


@pytest.mark.parametrize("name", LAYERS)
def test_a_quantized_layer_computes_nearly_what_the_float_one_does(name: str) -> None:
    exact, coarse = outputs(LAYERS[name])
    minimum = MEAN_MIN_SQNR_DB if name == "MEAN" else MIN_SQNR_DB
    assert 10 * np.log10(np.square(exact).sum() / np.square(exact - coarse).sum()) >= minimum


@pytest.mark.parametrize("name", LAYERS)
def test_the_reported_error_is_the_actual_error(name: str) -> None:
    exact, coarse = outputs(LAYERS[name])
    expected = 10 * np.log10(np.square(exact).sum() / np.square(exact - coarse).sum())
    layer = quantized(LAYERS[name]).layers[-1]
    assert layer.operator == f"operator 0 ({name.removesuffix('_RELU6')})"
    assert layer.sqnr_db == pytest.approx(expected, rel=1e-6)


def test_the_error_of_a_product_is_within_its_rounding_errors() -> None:
    """|Σ w·x − Σ ŵ·x̂| ≤ Σ (|w| Δx + |x̂| Δw) + Δb + Δy, each Δ half a scale; x̂ is the rounded input."""
    model = LAYERS["FULLY_CONNECTED"]
    exact, coarse = outputs(model)
    layers = quantized(model).layers
    weights = np.frombuffer(constant("fw", 3, 32).data or b"", np.float32).reshape(3, 32).astype(float)
    steps = layers[0].scale / 2, np.abs(weights).max() / 127 / 2, layers[1].scale / 2
    seen = np.abs(BATCH.reshape(-1, 32).astype(float)) + steps[0]
    bound = (
        np.abs(weights).sum(axis=1) * steps[0]
        + seen.sum(axis=1)[:, None] * steps[1]
        + 2 * steps[0] * steps[1]
        + steps[2]
    )
    assert (np.abs(exact - coarse).reshape(-1, 3) <= bound * 1.001).all()


@pytest.mark.parametrize("name", ["PAD", "RESHAPE", "SQUEEZE", "MAX_POOL_2D", "CONCATENATION"])
def test_an_operator_that_only_copies_values_adds_no_error(name: str) -> None:
    exact, coarse = outputs(LAYERS[name])
    assert np.abs(exact - coarse).max() <= quantized(LAYERS[name]).layers[0].scale / 2 * 1.001


@pytest.mark.parametrize("name", LAYERS)
def test_uint8_without_channels_is_int8_shifted(name: str) -> None:
    result = quantized(LAYERS[name], "uint8")
    signed = tool.quantize(LAYERS[name], {"x": BATCH}, per_channel=False, calibrator=Calibrator())
    assert nnfmq.load(result.content).inputs[0].dtype == "uint8"
    for layer, other in zip(result.layers, signed.layers, strict=True):
        assert (layer.scale, layer.zero_point, layer.low, layer.high) == (
            other.scale, other.zero_point + 128, other.low, other.high,
        )  # fmt: skip


def test_reported_ranges_are_the_ranges_of_the_values() -> None:
    layers = quantized(LAYERS["MUL"]).layers
    exact, _ = outputs(LAYERS["MUL"])
    for layer, values in zip(layers, (BATCH, exact), strict=True):
        assert layer.low == pytest.approx(values.min(), rel=2**-11)
        assert layer.high == pytest.approx(values.max(), rel=2**-11)
        assert layer.low <= values.min() < values.max() <= layer.high


def test_percentiles_are_averaged_over_executions() -> None:
    calibrator = Calibrator(percentile=90.0)
    one, other = (calibrator.observe(np.arange(101.0) * factor) for factor in (1, -3))
    assert (one, other) == ((10, 90), (-270, -30))
    assert calibrator.combine([one, other]) == Range(-130, 30)


def test_a_moving_average_weights_recent_executions_more() -> None:
    calibrator = Calibrator(momentum=0.75)
    bounds = [calibrator.observe(np.array(values)) for values in ([-8.0, 16.0], [-4.0, 0.0], [-4.0, 0.0])]
    assert calibrator.combine(bounds) == Range(-6.25, 9)  # 8 → 7 → 6.25, 16 → 12 → 9


def test_a_value_that_is_not_finite_is_rejected_with_its_tensor_s_name() -> None:
    broken = BATCH.copy()
    broken[3, 0, 1, 1, 0] = np.nan
    with pytest.raises(InvalidArgument, match=r"'x': .* a range must be finite"):
        tool.quantize(LAYERS["RELU"], {"x": broken}, per_channel=True, calibrator=Calibrator())


def test_only_int8_has_per_channel_scales() -> None:
    with pytest.raises(InvalidArgument, match="uint8 has no per-channel scales"):
        tool.quantize(LAYERS["RELU"], {"x": BATCH}, dtype="uint8", per_channel=True, calibrator=Calibrator())


@pytest.mark.parametrize("array", [BATCH, BATCH.reshape(40, 4, 4, 2), BATCH.astype(np.float64)])
def test_calibration_inputs_may_lack_a_leading_one_and_have_any_name_if_they_are_alone(array: Array) -> None:
    found = calibration_samples({"whatever": array}, read(LAYERS["RELU"]))
    np.testing.assert_array_equal(np.stack([x for (x,) in found]), BATCH, strict=True)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": BATCH[:, :, :2]}, r"shape \(40, 1, 2, 4, 2\), but must have \(n, 1, 4, 4, 2\)"),
        ({"x": BATCH.astype(np.uint8)}, "are uint8: they must be floats"),
        ({"x": BATCH[:0]}, r"of \[0\] executions"),
        ({"a": BATCH, "b": BATCH}, "no calibration values for x; there are a, b"),
    ],
)
def test_calibration_inputs_of_a_wrong_type_shape_or_name_are_rejected(arrays: dict[str, Array], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        calibration_samples(arrays, read(LAYERS["RELU"]))


def test_several_inputs_are_matched_by_name() -> None:
    tensors = [Tensor("left", (1, 2)), Tensor("right", (1, 2)), Tensor("y", (1, 2))]
    model = read(writer.write(tensors, [Operator("ADD", (0, 1), (2,), "AddOptions")], (0, 1), (2,)))
    left, right = np.float32([[[1, 2]]]), np.float32([[[3, 4]], [[5, 6]]])
    ((a, b),) = calibration_samples({"right": right[:1], "left": left}, model)
    assert (a.tolist(), b.tolist()) == ([[1, 2]], [[3, 4]])
    with pytest.raises(InvalidArgument, match=r"\[1, 2\] executions: each input needs the same number"):
        calibration_samples({"right": right, "left": left}, model)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Write a model and its calibration inputs; return the command's arguments for them and for out.tflite."""
    (tmp_path / "model.tflite").write_bytes(LAYERS["CONV_2D"])
    np.savez(tmp_path / "inputs.npz", x=BATCH)
    return [str(tmp_path / name) for name in ("model.tflite", "inputs.npz")] + ["-o", str(tmp_path / "out.tflite")]


def test_the_command_writes_what_the_function_returns(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([*files, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    result = quantized(LAYERS["CONV_2D"])
    assert (tmp_path / "out.tflite").read_bytes() == result.content
    assert report["quantized_bytes"] == len(result.content)
    assert report["float_bytes"] == len(LAYERS["CONV_2D"])
    assert [layer["operator"] for layer in report["layers"]] == ["input", "operator 0 (CONV_2D)"]
    assert report["layers"][1]["sqnr_db"] == result.layers[1].sqnr_db
    assert report["layers"][1]["weights_sqnr_db"] > MIN_SQNR_DB
    assert report["layers"][0]["weights_sqnr_db"] is None


def test_the_table_has_a_row_for_each_layer(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([*files, "--per-tensor", "--percentile", "99"]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    layer = quantized(LAYERS["CONV_2D"], percentile=99.0).layers[0]
    assert ["input", "x", f"{layer.low:.4g}", f"{layer.high:.4g}"] in [row[:4] for row in rows]
    assert ["0", "(CONV_2D)", "y"] in [row[:3] for row in rows]


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "file header"), (LAYERS["RELU"][:100], ""), (b"x" * 200, "identifier")]
)
def test_an_invalid_model_file_gives_one_error_line_and_status_1(
    files: list[str], content: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(files[0]).write_bytes(content)
    assert tool.main(files) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("quantize: error: ")
    assert message in printed.err
    assert (printed.err.count("\n"), printed.out) == (1, "")
    assert not Path(files[3]).exists()


def saved(save: Callable[..., None]) -> bytes:
    file = io.BytesIO()
    save(file, BATCH)
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [b"", b"nothing", saved(np.save), saved(np.savez)[:500], saved(np.savez)[:-5000].ljust(30_000, b"0")],
    ids=["empty", "text", "npy", "cut", "damaged"],
)
def test_an_invalid_calibration_file_gives_one_error_line_and_status_1(
    files: list[str], content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(files[1]).write_bytes(content)
    assert tool.main(files) == 1
    printed = capsys.readouterr().err
    assert "not an .npz file" in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    "args",
    [
        ["--percentile", "100"],
        ["--moving-average", "1"],
        ["--percentile", "99", "--moving-average", "0.5"],
        ["--per-channel", "--per-tensor"],
        ["--dtype", "int4"],
    ],
)
def test_usage_errors_give_status_2(files: list[str], args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        tool.main([*files, *args])
    assert "usage:" in capsys.readouterr().err
