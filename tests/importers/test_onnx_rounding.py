"""Operators that round: ONNX Runtime's values at halves, beyond the range, for NaN, folded and executed alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.onnx_files import expected, file_of, results
from support.onnx_runtime import onnx

import nnfmq
from nnfmq.compat import onnxruntime as compatible

F32, F16 = np.float32, np.float16
make = onnx.helper.make_node
HALVES = np.arange(-9.5, 10, 0.5)
EDGES = [1e9, -1e9, 3e38, -3e38, np.inf, -np.inf, np.nan, -0.0, 126.5, 127.5, 255.5, -128.5, 32767.5, 65536.5]
TARGETS = {
    "uint8": np.uint8(3),
    "int8": np.int8(-3),
    "uint16": np.uint16(3),
    "int16": np.int16(-3),
}
NARROW = {"uint4": np.array(3, ml_dtypes.uint4), "int4": np.array(-1, ml_dtypes.int4)}


def everywhere(client: nnfmq.Client, content: bytes, fed: Mapping[str, Any]) -> list[Any]:
    """Return the first output on both devices and from the interface of ONNX Runtime."""
    return [outputs[0] for outputs in all_everywhere(client, content, fed)]


def all_everywhere(client: nnfmq.Client, content: bytes, fed: Mapping[str, Any]) -> list[Any]:
    """Return all outputs of both devices and of the interface of ONNX Runtime."""
    found: list[Any] = []
    for device in ("reference", "compiled"):
        with client.device(device).prepare(nnfmq.load(content)) as model:
            arrays = zip(fed.values(), model.inputs, strict=True)
            found.append(model.execute(*(x.astype(info.dtype).reshape(info.shape) for x, info in arrays)))
    return [*found, compatible.InferenceSession(content).run(None, dict(fed))]


def with_format(content: bytes, opset: int) -> bytes:
    """Return a file in which ONNX Runtime takes the types of an opset."""
    model = onnx.ModelProto.FromString(content)
    model.ir_version = 10 if opset > 18 else 8
    return bytes(model.SerializeToString())


def folded(content: bytes, fed: Mapping[str, Any]) -> bytes:
    """Return the model with its inputs as constants; its output is added to a new input of zeros, as int32 or float."""
    model = onnx.ModelProto.FromString(content)
    graph = model.graph
    for name, array in fed.items():
        graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    graph.node.append(make("Cast", [graph.output[0].name], ["as_float"], to=1))
    graph.node.append(make("Add", ["as_float", "nothing"], ["found"]))
    del graph.input[:], graph.output[:]
    graph.input.append(onnx.helper.make_tensor_value_info("nothing", 1, [1]))
    graph.output.append(onnx.helper.make_empty_tensor_value_info("found"))
    return bytes(model.SerializeToString())


def assert_same_folded(content: bytes, fed: Mapping[str, Any], wanted: Any) -> None:
    (found,) = results(folded(content, fed), {"nothing": np.zeros(1, F32)})
    np.testing.assert_array_equal(found.reshape(wanted.shape), wanted.astype(F32))


def quantizing(x: Any, scale: Any, zero_point: Any, opset: int = 19, **attributes: Any) -> bytes:
    names = ["x", "s", *([] if zero_point is None else ["z"])]
    constants = {"s": scale, **({} if zero_point is None else {"z": zero_point})}
    content = file_of([make("QuantizeLinear", names, ["y"], **attributes)], {"x": x}, ["y"], constants, opset)
    return with_format(content, opset)


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("scale", [1.0, 0.5, 0.03])
def test_quantization_rounds_halves_to_the_even_step_before_it_adds_the_zero_point(
    client: nnfmq.Client, scale: float, target: str, dtype: Any
) -> None:
    with np.errstate(over="ignore"):
        x = np.concatenate([HALVES * scale, EDGES]).astype(dtype)
    content = quantizing(x, dtype(scale), TARGETS[target], 21)
    (wanted,) = expected(content, {"x": x})
    for found in everywhere(client, content, {"x": x}):
        np.testing.assert_array_equal(found, wanted)
    assert_same_folded(content, {"x": x}, wanted)


@pytest.mark.parametrize("target", NARROW)
def test_quantization_to_four_bits_is_that_of_the_definition(target: str) -> None:
    x, zero_point = np.concatenate([HALVES, [99, -99]]).astype(F32), NARROW[target]
    limits = (0, 15) if target == "uint4" else (-8, 7)
    wanted = np.clip(np.rint(x) + int(zero_point), *limits)
    content = quantizing(x, F32(1), zero_point, 21)
    np.testing.assert_array_equal(results(content, {"x": x})[0], wanted)
    assert_same_folded(content, {"x": x}, wanted)


@pytest.mark.parametrize("opset", [10, 13, 19])
def test_quantization_without_a_zero_point_gives_bytes(opset: int) -> None:
    x = np.concatenate([HALVES, EDGES]).astype(F32)
    content = quantizing(x, F32(0.5), None, opset)
    np.testing.assert_array_equal(results(content, {"x": x})[0], expected(content, {"x": x})[0])


@pytest.mark.parametrize("target", [np.uint8, np.int8])
def test_quantization_along_an_axis_rounds_in_the_same_way(client: nnfmq.Client, target: Any) -> None:
    x = np.tile(HALVES, (2, 3, 1)).astype(F32)
    scales, zeros = F32([1, 0.5, 0.25]), np.array([3, 100, 7]).astype(target)
    content = quantizing(x, scales, zeros, 13, axis=1)
    (wanted,) = expected(content, {"x": x})
    for found in everywhere(client, content, {"x": x}):
        np.testing.assert_array_equal(found, wanted)
    assert_same_folded(content, {"x": x}, wanted)


def test_a_negative_zero_stays_one_in_eight_bit_floats() -> None:
    x = F32([-0.0, 0.0, -1.0])
    content = quantizing(x, F32(1), np.array(0, ml_dtypes.float8_e4m3fn), 19)
    np.testing.assert_array_equal(np.signbit(results(content, {"x": x})[0]), [True, False, True])


OPERATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "QLinearAdd": ("a as az b bs bz ys yz", {}),
    "QLinearMul": ("a as az b bs bz ys yz", {}),
    "QLinearAveragePool": ("a as az ys yz", {"kernel_shape": [2, 2]}),
    "QLinearAveragePool channels_last": ("a as az ys yz", {"kernel_shape": [2, 2], "channels_last": 1}),
    "QLinearGlobalAveragePool": ("a as az ys yz", {}),
    "QLinearLeakyRelu": ("a as az ys yz", {"alpha": 0.5}),
    "QLinearConcat": ("ys yz a as az b bs bz", {"axis": 1}),
    "QLinearWhere": ("c a as az b bs bz ys yz", {}),
}


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("is_quantized", [False, True], ids=["integers", "quantized"])
@pytest.mark.parametrize("name", OPERATORS)
def test_quantized_arithmetic_has_onnx_runtime_s_results_at_halves(
    client: nnfmq.Client, name: str, is_quantized: bool, dtype: Any
) -> None:
    """Scales are powers of 2, so that many results are halfway between two steps, and the zero point is odd."""
    names, attributes = OPERATORS[name]
    rng, low = np.random.default_rng(3), np.iinfo(dtype).min
    steps = {place: rng.integers(0, 256, (1, 4, 9, 11)).astype(np.uint8).view(dtype) for place in "ab"}
    known = {"as": F32(0.25), "az": dtype(low + 101), "bs": F32(0.125), "bz": dtype(low + 77)}
    known |= {"ys": F32(0.5), "yz": dtype(low + 103), "c": rng.integers(0, 2, (1, 4, 9, 11)).astype(bool)}
    fed = {place: array for place, array in steps.items() if place in names.split()}
    nodes = [make(name.split()[0], names.split(), ["y"], domain="com.microsoft", **attributes)]
    if is_quantized:
        before = [make("QuantizeLinear", [f"{place}f", f"{place}s", f"{place}z"], [place]) for place in fed]
        fed = {
            f"{place}f": ((array.astype(F32) - known[f"{place}z"]) * known[f"{place}s"]).astype(F32)
            for place, array in fed.items()
        }
        nodes = [*before, *nodes]
    content = file_of(nodes, fed, ["y"], {key: each for key, each in known.items() if key in " ".join(names.split())})
    (wanted,) = expected(content, fed)
    for found in everywhere(client, content, fed):
        np.testing.assert_array_equal(found, wanted)


def test_a_sum_between_quantized_tensors_is_rounded_as_the_nodes_say(client: nnfmq.Client) -> None:
    rng = np.random.default_rng(4)
    fed = {name: (rng.integers(-40, 40, (3, 50)) * 0.25).astype(F32) for name in ("a", "b")}
    nodes = [
        *(make("QuantizeLinear", [name, "s", "z"], [f"{name}q"]) for name in fed),
        *(make("DequantizeLinear", [f"{name}q", "s", "z"], [f"{name}f"]) for name in fed),
        make("Add", ["af", "bf"], ["f"]),
        make("QuantizeLinear", ["f", "sy", "zy"], ["y"]),
    ]
    known = {"s": F32(0.25), "z": np.uint8(100), "sy": F32(0.5), "zy": np.uint8(101)}
    content = file_of(nodes, fed, ["y"], known)
    (wanted,) = expected(content, fed)
    for found in everywhere(client, content, fed):
        np.testing.assert_array_equal(found, wanted)


REALS = [0.0, -0.0, 0.4, 0.5, 1.5, -1.5, 2.5, 126.5, 128, 200, 255.5, 256, 300, -128.5, -129, 32767.5, 32768, 65535,
         65536, 1e6, -1e6, 3e9, -3e9, 1e10, 1e20, -1e20, np.inf, -np.inf, np.nan, 65519, 65520, 6e-8, 3e-8,
         2.98e-8]  # fmt: skip
WHOLE = [0, 1, -1, 127, 128, 255, 256, -128, -129, 32767, 32768, 65536, -32769, 2**24 + 1, 2**31 - 1, -(2**31)]
NUMBERS = ["float32", "float16", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "bool"]


def extremes(dtype: str) -> Any:
    with np.errstate(all="ignore"):
        if dtype.startswith("float"):
            return np.array(REALS).astype(dtype)
        return np.array([0, 1] if dtype == "bool" else WHOLE).astype(dtype)


@pytest.mark.parametrize("target", NUMBERS)
def test_a_cast_has_onnx_runtime_s_value_for_numbers_that_the_type_does_not_have(
    client: nnfmq.Client, target: str
) -> None:
    to = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(target))
    fed = {source: extremes(source) for source in NUMBERS}
    nodes = [make("Cast", [source], [f"y{source}"], to=to) for source in fed]
    content = file_of(nodes, fed, [f"y{source}" for source in fed], opset=19)
    wanted = expected(content, fed)
    for outputs in all_everywhere(client, content, fed):
        for source, found, theirs in zip(NUMBERS, outputs, wanted, strict=True):
            np.testing.assert_array_equal(found.astype(float), theirs.astype(float), source)
    for source, x in fed.items():
        alone = file_of([make("Cast", ["x"], ["y"], to=to)], {"x": x}, ["y"], opset=19)
        assert_same_folded(alone, {"x": x}, wanted[NUMBERS.index(source)])


INTEGERS = {
    "Div": ([7, -7, 7, -7, -8, 0, 2**31 - 1, -(2**31)], [2, 2, -2, -2, 3, 5, -1, 3], {}),
    "Mod": ([7, -7, 7, -7, -8, 0, 2**31 - 1, -(2**31)], [2, 2, -2, -3, 3, 5, -2, 3], {}),
    "Mod fmod": ([7, -7, 7, -7, -8, 0, 2**31 - 1, -(2**31)], [2, 2, -2, -3, 3, 5, -2, 3], {"fmod": 1}),
    "Mul": ([2**30, 65536, -(2**31)], [4, 65536, -1], {}),
}


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("name", INTEGERS)
def test_arithmetic_of_integers_is_the_same_folded_and_executed(client: nnfmq.Client, name: str, dtype: Any) -> None:
    first, second, attributes = INTEGERS[name]
    fed = {"a": np.array(first, dtype), "b": np.array(second, dtype)}
    content = file_of([make(name.split()[0], ["a", "b"], ["y"], **attributes)], fed, ["y"])
    (wanted,) = expected(content, fed)
    for found in everywhere(client, content, fed):
        np.testing.assert_array_equal(found, wanted)
    assert_same_folded(content, fed, wanted)


@pytest.mark.parametrize("name", ["Round", "Floor", "Ceil"])
def test_floats_are_rounded_to_integers_as_their_operator_says(client: nnfmq.Client, name: str) -> None:
    x = np.array([*HALVES, 0.49999997, -0.49999997, 8388609, 4194304.5, np.nan, np.inf, -np.inf, -0.0], F32)
    content = file_of([make(name, ["x"], ["y"])], {"x": x}, ["y"])
    (wanted,) = expected(content, {"x": x})
    for found in everywhere(client, content, {"x": x}):
        np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))
    assert_same_folded(content, {"x": x}, wanted)


@pytest.mark.parametrize("saturate", [0, 1])
@pytest.mark.parametrize("target", ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"])
def test_floats_are_rounded_to_those_of_a_narrower_type(target: str, saturate: int) -> None:
    """The definition is that of ml_dtypes, which overflows where the type does; ONNX says what saturation means."""
    dtype = np.dtype(getattr(ml_dtypes, target))
    limit, rng = float(ml_dtypes.finfo(dtype).max), np.random.default_rng(6)
    x = np.concatenate([rng.standard_normal(300) * 10.0 ** rng.integers(-6, 3, 300), [limit, -limit, 0.0]]).astype(F32)
    x = x[np.abs(x) <= limit]
    attributes = {} if target == "bfloat16" else {"saturate": saturate}
    number = onnx.helper.np_dtype_to_tensor_dtype(dtype)
    nodes = [make("Cast", ["x"], ["n"], to=number, **attributes), make("Cast", ["n"], ["y"], to=1)]
    content = file_of(nodes, {"x": x}, ["y"], opset=19)
    np.testing.assert_array_equal(results(content, {"x": x})[0], x.astype(dtype).astype(F32))


PRODUCTS: dict[str, str] = {
    "QLinearConv": "a as az w ws wz ys yz bias",
    "QLinearMatMul": "a as az v ws wz ys yz",
    "QGemm": "a as az v ws wz bias ys yz",
}


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("name", PRODUCTS)
def test_quantized_products_are_rounded_once_if_many_are_halfway_between_two_steps(
    client: nnfmq.Client, name: str, dtype: Any
) -> None:
    rng, names, low = np.random.default_rng(9), PRODUCTS[name].split(), np.iinfo(dtype).min
    x = (rng.integers(0, 256, (1, 3, 8, 7) if "w" in names else (9, 7)) * 0.25 - 30).astype(F32)
    known = {"as": F32(0.25), "az": dtype(low + 120), "ws": F32(0.125), "wz": dtype(low + 128)}
    known |= {"ys": F32(4), "yz": dtype(low + 101), "bias": rng.integers(-900, 900, 3).astype(np.int32)}
    known |= {"w": rng.integers(low, low + 256, (3, 3, 3, 3)).astype(dtype)}
    known |= {"v": rng.integers(low, low + 256, (7, 3)).astype(dtype)}
    domain = "com.microsoft" if name == "QGemm" else ""
    nodes = [make("QuantizeLinear", ["x", "as", "az"], ["a"]), make(name, names, ["y"], domain=domain)]
    content = file_of(nodes, {"x": x}, ["y"], {key: known[key] for key in {*names} - {"a"}})
    (wanted,) = expected(content, {"x": x})
    for found in everywhere(client, content, {"x": x}):
        np.testing.assert_array_equal(found, wanted)
