"""int64, uint32, uint64 and float64 in ONNX models: every operator computes them as they are, or is refused.

The expected values are those of ONNX's reference evaluator, which are NumPy's of these types.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator
from support.both_runners import Ours
from support.onnx_files import OnnxCase, file_of
from support.onnx_runtime import by_onnx, onnx

from nnfmq.hal.errors import UnsupportedModel
from nnfmq.hal.extensions import TENSOR_INT64
from nnfmq.importers import load

INTEGERS = ("int64", "uint64", "uint32")
WIDE = (*INTEGERS, "float64")


def numbers(kind: str, count: int = 24, seed: int = 0) -> Any:
    """Return elements of a type, its extremes and what 32 bits do not hold among them."""
    rng, dtype = np.random.default_rng(seed), np.dtype(kind)
    if dtype.kind == "f":
        special = [1e300, -1e300, 1e9 + 1, 2.0**53 + 2, 1e-300, -0.0, 1e60, 0.1]
        return np.concatenate([special, rng.uniform(-1e3, 1e3, count)])[:count]
    if dtype.kind == "b":
        return rng.integers(0, 2, count).astype(bool)
    limits = np.iinfo(dtype)
    special = [limits.max, limits.min, limits.max // 3, limits.max // 7 * 5, 1, limits.max - 1]
    special += [100_000 * 30_000, 3 << 30, 1 << 40][: 3 if limits.bits > 32 else 0]
    return np.array([*special, *rng.integers(0, min(1000, limits.max), count).tolist()][:count], dtype)


def few(kind: str, *shape: int, high: int = 9, seed: int = 1) -> Any:
    return np.random.default_rng(seed).integers(1, high, shape).astype(kind)


def ints(*values: int) -> Any:
    return np.array(values, np.int64)


def case(name: str, *inputs: Any, constants: tuple[int, ...] = (), outputs: int = 1, **attributes: Any) -> OnnxCase:
    return OnnxCase(name, inputs, attributes, frozenset(constants), outputs, 18)


def number_of(kind: str) -> int:
    return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind)))


def arithmetic(kind: str) -> list[OnnxCase]:
    x, y = numbers(kind).reshape(2, 3, 4), numbers(kind, seed=5)[::-1].copy().reshape(2, 3, 4)
    small, row = few(kind, 2, 3, 4), few(kind, 4, seed=3)
    rows, columns = few(kind, 3, 4, high=90_000), few(kind, 4, 2, high=90_000, seed=3)
    return [
        *(case(name, x, y) for name in ("Add", "Sub", "Mul", "Max", "Min", "Equal", "Less", "GreaterOrEqual")),
        *(case(name, x, row, constants=(1,)) for name in ("Add", "Sub", "Mul", "Div", "Greater", "LessOrEqual")),
        case("Div", x, small),
        *(case(name, x) for name in ("Abs", "Sign", "Identity")),
        *(case(name, small, ints(1), constants=(1,), keepdims=0)
          for name in ("ReduceSum", "ReduceProd", "ReduceL1", "ReduceL2")),
        *(case(name, x, ints(0, 2), constants=(1,)) for name in ("ReduceMax", "ReduceMin")),
        *(case(name, x, axis=1) for name in ("ArgMax", "ArgMin")),
        case("CumSum", x, np.int64(1), constants=(1,)),
        case("CumSum", x, np.int64(2), constants=(1,), exclusive=1, reverse=1),
        case("MatMul", rows, columns),
        case("MatMul", rows, columns, constants=(1,)),
        case("MatMul", few(kind, 2, 3, 4), few(kind, 2, 4, 3)),
        case("Clip", x, x[0, 0, 2], x[0, 0, 3], constants=(1, 2)),
        *([] if kind.startswith("u") else of_signed(kind)),
    ]  # fmt: skip


def of_signed(kind: str) -> list[OnnxCase]:
    x, small = numbers(kind).reshape(2, 3, 4), few(kind, 2, 3, 4)
    return [
        *(case(name, x) for name in ("Neg", "Relu")),
        case("Pow", small, few(kind, 2, 3, 4, high=30)),
        *(case("Pow", small, few(each, 2, 3, 4, high=5)) for each in ("int32", "int64", "float32", "float64")),
    ]


def movements(kind: str) -> list[OnnxCase]:
    x, y = numbers(kind).reshape(2, 3, 4), numbers(kind, seed=5)[::-1].copy().reshape(2, 3, 4)
    border = ints(0, 1, 0, 1, 0, 2)
    return [
        case("Reshape", x, ints(4, 6), constants=(1,)),
        case("Transpose", x, perm=[2, 0, 1]),
        case("Squeeze", x[:1], ints(0), constants=(1,)),
        case("Unsqueeze", x, ints(0, 4), constants=(1,)),
        case("Expand", x[:1], ints(5, 3, 4), constants=(1,)),
        case("Tile", x, ints(1, 2, 3), constants=(1,)),
        case("Concat", x, y, axis=1),
        case("Slice", x, ints(1, 3), ints(3, 0), ints(1, 2), ints(1, -1), constants=(1, 2, 3, 4)),
        case("Pad", x, border, constants=(1,)),
        case("Pad", x, border, x[0, 0, 0], constants=(1, 2)),
        case("Pad", x, border, x[0, 0, 3], constants=(1,)),
        case("Split", x, ints(1, 2), constants=(1,), outputs=2, axis=1),
        case("Gather", x, ints(0, -1, 2), axis=1),
        case("GatherElements", x, np.resize(ints(0, 1, 2, -1), (2, 3, 2)), axis=2),
        case("GatherND", x, ints(0, 1, 1, 2).reshape(2, 2)),
        *(case("ScatterElements", x, ints(0, 1, 2, 0).reshape(1, 1, 4), y[:1, :1], axis=2, reduction=each)
          for each in ("none", "add", "mul", "max", "min")),
        *(case("ScatterND", x, ints(0, 1, 1, 2, 0, 1).reshape(3, 2), y[0], reduction=each) for each in ("add", "max")),
        case("Where", np.array([True, False, True, True]), x, y),
        case("OneHot", ints(0, 2, -1, 9), np.int64(4), x[0, 0, :2], constants=(1, 2)),
        case("Trilu", x),
        case("ReverseSequence", x, ints(1, 2, 2), time_axis=0, batch_axis=1),
        case("TopK", x, ints(2), constants=(1,), outputs=2, axis=1),
        case("TopK", x, ints(3), constants=(1,), outputs=2, axis=-1, largest=0),
        case("DepthToSpace", x.reshape(1, 4, 2, 3), blocksize=2),
        case("DepthToSpace", x.reshape(1, 4, 2, 3), blocksize=2, mode="CRD"),
        case("SpaceToDepth", x.reshape(1, 1, 4, 6), blocksize=2),
    ]  # fmt: skip


def of_integers(kind: str) -> list[OnnxCase]:
    x, y, small = (each.reshape(2, 3, 4) for each in (numbers(kind), numbers(kind, seed=5)[::-1].copy(), few(kind, 24)))
    unsigned = [case("BitShift", x, few(kind, 2, 3, 4, high=31), direction=each) for each in ("LEFT", "RIGHT")]
    return [
        *(case(f"Bitwise{name}", x, y) for name in ("And", "Or", "Xor")),
        case("BitwiseNot", x),
        case("Mod", x, small),
        case("Mod", x, small, fmod=1),
        case("ReduceMean", small, ints(2), constants=(1,)),
        *(unsigned if kind.startswith("u") else []),
        case("CastLike", x, np.float32([1])),
    ]


def of_floats() -> list[OnnxCase]:
    x, some = numbers("float64").reshape(2, 3, 4), np.random.default_rng(3).uniform(-0.9, 0.9, (2, 3, 4))
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5])
    pairs = [each.reshape(6, 6) for each in np.meshgrid(special, special)]
    functions = ("Ceil", "Floor", "Round", "Exp", "Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sigmoid", "Tanh")
    return [
        *(case(name, some) for name in functions),
        *(case(name, x) for name in ("Asinh", "Tanh", "Sign", "Floor")),
        *(case(name, np.array([1e-300, -0.5, 300.0])) for name in ("Sinh", "Cosh")),
        case("Acosh", np.array([1.0, 1.5, 1e300])),
        case("Atanh", np.array([1e-300, 0.5, -1.0])),
        *(case(name, np.abs(some)) for name in ("Log", "Sqrt", "Reciprocal")),
        *(case(name, special) for name in ("Ceil", "Floor", "Round", "Exp", "Tanh", "IsNaN", "IsInf", "Abs", "Neg")),
        *(case(name, *pairs) for name in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Less", "Equal")),
        *(case(name, pairs[0], ints(1), constants=(1,)) for name in ("ReduceMax", "ReduceMin", "ReduceSum")),
        *(case(name, some, ints(1), constants=(1,)) for name in ("ReduceMean", "ReduceL2", "ReduceLogSumExp")),
        *(case(name, factor * some, axis=1) for name, factor in (("Softmax", 1000), ("LogSoftmax", 1))),
        case("Sum", x, some, some[0]),
        *(case("DFT", some[:, :, :parts], axis=1, inverse=parts - 1) for parts in (1, 2)),
        case("STFT", some.reshape(1, 24, 1), np.int64(4), None, np.int64(8), constants=(1, 3)),
        case("Mod", x, some, fmod=1),
        case("OneHot", np.array([0.0, 2.0, -1.0, 9.0]), np.int64(4), np.array([0.5, 1e60]), constants=(1,)),
        case("Pow", np.abs(some), some),
        case("LeakyRelu", some, alpha=0.25),
        case("PRelu", some, some[0, 0]),
        case("Gemm", some[0], some[1], np.float64([1, 2, 3]), constants=(1, 2), transB=1, alpha=0.5, beta=2.0),
    ]


def is_defined(given: OnnxCase) -> bool:
    """Return whether ONNX defines the operator for the type of its first input."""
    kind = onnx.TensorProto.DataType.Name(number_of(np.asarray(given.inputs[0]).dtype.name)).lower()
    return f"tensor({kind})" in onnx.defs.get_schema(given.operator, given.opset, "").inputs[0].types


CASES = [
    *((kind, each) for kind in WIDE for each in (*arithmetic(kind), *movements(kind)) if is_defined(each)),
    *((kind, each) for kind in INTEGERS for each in of_integers(kind) if is_defined(each)),
    *(("float64", each) for each in of_floats()),
]


@pytest.mark.parametrize(("kind", "given"), CASES, ids=str)
def test_an_operator_computes_elements_as_they_are(kind: str, given: OnnxCase) -> None:
    content = given.content()
    with np.errstate(all="ignore"):
        expected = ReferenceEvaluator(onnx.load_from_string(content)).run(None, given.fed())
    for found, wanted in zip(computed(content, given.fed()), map(np.asarray, expected), strict=True):
        require_same(found, wanted)


def computed(content: bytes, fed: dict[str, Any]) -> list[Any]:
    """Return what the interpreter computes, in the types of the model's outputs."""
    loaded = load(content)
    return Ours(loaded)([array.reshape(info.shape) for array, info in zip(fed.values(), loaded.inputs, strict=True)])


def require_same(found: Any, wanted: Any) -> None:
    """Require equal integers, and floats that differ by some of the last bits at most."""
    found = found.reshape(wanted.shape)
    if wanted.dtype.kind == "f":
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found, wanted, 1e-12)
    else:
        assert found.astype(object).tolist() == wanted.astype(object).tolist()


FLOATS = [np.nan, np.inf, -np.inf, 1e300, 2.0**63, 2.0**64, -(2.0**63), 1e19, -1.5, -1.0, 2.0**32, 3e9, -3e9, 1e12, 0.9]
REALS = {
    "float64": FLOATS,
    "float32": [each for each in FLOATS if each != 1e300],
    "float16": [-1.5, 0.9, 60000, -60000],
}
TYPES = (*WIDE, "int32", "int16", "uint8", "float32", "float16", "bool")


@pytest.mark.parametrize("target", TYPES)
@pytest.mark.parametrize("source", TYPES)
def test_a_cast_returns_what_onnx_runtime_returns(source: str, target: str) -> None:
    if source == target or not {source, target} & set(WIDE):
        return  # another test has casts of narrower types
    is_real = source.startswith("float")
    given = np.array(REALS[source], source) if is_real else numbers(source)
    if is_real and target == "uint32":  # beyond it, ONNX Runtime returns other values for one element than for many
        given = given[(given.astype(float) > -(2.0**31)) & (given.astype(float) < 2.0**32)]
    if is_real and target in ("int16", "uint8"):
        given = given[np.isfinite(given) & (np.abs(given) < 2**31)]  # beyond it, the standard leaves the result open
    given = given if target != "float16" else given[np.abs(given.astype(float)) < 60000]
    wanted = [by_onnx("Cast", [given[i : i + 1]], to=number_of(target))[0] for i in range(len(given))]
    content = case("Cast", given, to=number_of(target)).content()
    (found,) = computed(content, {"x0": given})
    require_same(found.astype(target), np.concatenate(wanted))


@pytest.mark.parametrize(
    ("operator", "kind", "reason"),
    [
        ("LpPool", "float64", "TENSOR_FLOAT64"),
        *((name, kind, "logarithms of integers") for name in ("ReduceLogSum", "ReduceLogSumExp") for kind in INTEGERS),
    ],
)
def test_an_operator_that_does_not_compute_a_type_is_refused(operator: str, kind: str, reason: str) -> None:
    x = np.ones((1, 1, 4, 4), kind)
    attributes = {"kernel_shape": [2, 2]} if operator == "LpPool" else {}
    with pytest.raises(UnsupportedModel, match=rf"\({operator}\): .*{reason}"):
        load(case(operator, x, **attributes).content())


def test_constants_are_computed_in_64_bits() -> None:
    nodes = [
        onnx.helper.make_node("Mul", ["c", "c"], ["squares"]),
        onnx.helper.make_node("Cast", ["squares"], ["real"], to=number_of("float64")),
        onnx.helper.make_node("Add", ["x", "real"], ["y"]),
        onnx.helper.make_node("Add", ["i", "squares"], ["z"]),
    ]
    fed = {"x": np.array([0.25, 0.5]), "i": ints(1, -1)}
    found = computed(file_of(nodes, fed, ["y", "z"], {"c": ints(100_000, 1 << 31)}), fed)
    assert found[0].tolist() == [1e10 + 0.25, 2.0**62 + 0.5]
    assert found[1].tolist() == [10**10 + 1, (1 << 62) - 1]


def test_indices_stay_in_32_bits_and_what_they_enter_does_not() -> None:
    nodes = [
        onnx.helper.make_node("Unsqueeze", ["ids", "zero"], ["rows"]),
        onnx.helper.make_node("Gather", ["table", "rows"], ["y"]),
        onnx.helper.make_node("Mul", ["ids", "big"], ["products"]),
    ]
    constants = {"table": np.float32([[1, 2], [3, 4]]), "big": ints(1 << 40), "zero": ints(0)}
    fed = {"ids": ints(1, 0, -1)}
    content = file_of(nodes, fed, ["y", "products"], constants)
    assert [info.dtype for info in load(content).inputs] == ["int32"]
    found = computed(content, fed)
    assert found[0].tolist() == [[[3, 4], [1, 2], [3, 4]]]
    assert found[1].tolist() == [1 << 40, 0, -1 << 40]


def positions(factor: int) -> bytes:
    """Return a model that counts tokens that are no padding, as encoders do for the ids of positions."""
    nodes = [
        onnx.helper.make_node("Equal", ["ids", "padding"], ["is_padding"]),
        onnx.helper.make_node("Not", ["is_padding"], ["is_token"]),
        onnx.helper.make_node("Cast", ["is_token"], ["tokens"], to=number_of("int64")),
        onnx.helper.make_node("CumSum", ["tokens", "axis"], ["count"]),
        onnx.helper.make_node("Mul", ["count", "tokens"], ["masked"]),
        onnx.helper.make_node("Mul", ["masked", "factor"], ["scaled"]),
        onnx.helper.make_node("Add", ["scaled", "padding"], ["positions"]),
        onnx.helper.make_node("Gather", ["words", "ids"], ["embedded"]),
    ]
    constants = {
        "padding": ints(1),
        "axis": np.int64(1),
        "factor": np.int64(factor),
        "words": np.ones((9, 1), np.float32),
    }
    return file_of(nodes, {"ids": ints(5, 4, 1, 2, 1).reshape(1, 5)}, ["positions", "embedded"], constants)


@pytest.mark.parametrize(("factor", "is_narrow"), [(1, True), (1 << 28, True), (1 << 29, False), (-1 << 40, False)])
def test_results_that_certainly_fit_32_bits_are_computed_in_32(factor: int, is_narrow: bool) -> None:
    content = positions(factor)
    kinds = {operand.type for operand in load(content).model.main.operands}
    assert (TENSOR_INT64 not in kinds) == is_narrow
    found = computed(content, {"ids": ints(5, 4, 1, 2, 1).reshape(1, 5)})[0]
    assert found.tolist() == [[factor + 1, 2 * factor + 1, 1, 3 * factor + 1, 1]]


@pytest.mark.parametrize("target", ["float32", "float16", "int32", "uint8"])
def test_a_mask_is_cast_before_it_is_expanded(target: str) -> None:
    nodes = [
        onnx.helper.make_node("Unsqueeze", ["mask", "axes"], ["rows"]),
        onnx.helper.make_node("Expand", ["rows", "shape"], ["expanded"]),
        onnx.helper.make_node("Transpose", ["expanded"], ["columns"], perm=[0, 1, 3, 2]),
        onnx.helper.make_node("Cast", ["columns"], ["y"], to=number_of(target)),
    ]
    constants = {"axes": ints(1, 2), "shape": ints(2, 1, 4, 3)}
    fed = {"mask": ints(1, 0, 5, (1 << 40) + 7, -1, 1).reshape(2, 3)}
    fed["mask"] = fed["mask"] if not target.startswith("float16") else fed["mask"] % 8
    content = file_of(nodes, fed, ["y"], constants, 18)
    model = load(content).model.main
    wide = [each for each in model.operations if model.operands[each.inputs[0]].type == TENSOR_INT64]
    assert len(wide) == 1  # the cast of the mask itself
    (expected,) = ReferenceEvaluator(onnx.load_from_string(content)).run(None, fed)
    assert computed(content, fed)[0].astype(target).tolist() == expected.tolist()


LIMITS = [np.iinfo(np.int32).min, np.iinfo(np.int32).max, -1, 0, 7]


@pytest.mark.parametrize("operator", ["Add", "Sub", "Mul", "Neg", "Abs", "ReduceSum", "CumSum", "Max", "Pad", "Concat"])
def test_what_leaves_32_bits_is_right_even_if_its_inputs_fit_them(operator: str) -> None:
    given = np.array(LIMITS, np.int32)
    others = {"CumSum": ["zero"], "Pad": ["border", "large"]}.get(operator, [])
    others = ["wide"] if operator in ("Add", "Sub", "Mul", "Max", "Concat") else others
    attributes = {"axis": 0} if operator == "Concat" else {}
    nodes = [
        onnx.helper.make_node("Cast", ["x"], ["wide"], to=number_of("int64")),
        onnx.helper.make_node(operator, ["wide", *others], ["y"], **attributes),
    ]
    constants = {"zero": np.int64(0), "border": ints(1, 0), "large": np.int64(1 << 40)}
    content = file_of(nodes, {"x": given}, ["y"], {name: constants[name] for name in others if name != "wide"}, 18)
    (expected,) = ReferenceEvaluator(onnx.load_from_string(content)).run(None, {"x": given})
    require_same(computed(content, {"x": given})[0], np.asarray(expected))


@pytest.mark.parametrize("kind", INTEGERS)
def test_an_index_beyond_32_bits_selects_nothing(kind: str) -> None:
    given = np.array([1, np.iinfo(kind).max, 3], kind)
    nodes = [onnx.helper.make_node("OneHot", ["i", "depth", "values"], ["y"])]
    content = file_of(nodes, {"i": given}, ["y"], {"depth": ints(4), "values": np.float32([0, 1])})
    assert computed(content, {"i": given})[0].tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]


def test_a_loop_carries_64_bits() -> None:
    helper = onnx.helper
    body = helper.make_graph(
        [
            helper.make_node("Mul", ["total", "factor"], ["next"]),
            helper.make_node("Identity", ["going"], ["goes_on"]),
            helper.make_node("Identity", ["next"], ["row"]),
        ],
        "body",
        [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in
         (("i", 7, ()), ("going", 9, ()), ("total", 7, (2,)))],
        [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in
         (("goes_on", 9, ()), ("next", 7, (2,)), ("row", 7, (2,)))],
    )  # fmt: skip
    node = helper.make_node("Loop", ["count", "", "x"], ["y", "rows"], body=body)
    fed = {"x": ints(3, -5), "factor": ints(1_000_000)}
    for count in (3, 600):  # unrolled, and a WHILE
        content = file_of([node], fed, ["y", "rows"], {"count": np.int64(count)})
        wanted = np.array([3, -5]) * np.cumprod(np.full(count, 1_000_000))[:, None]
        found = computed(content, fed)
        assert found[0].tolist() == wanted[-1].tolist()
        assert found[1].tolist() == wanted.tolist()
