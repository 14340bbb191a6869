"""Rare values, scales and axes in TFLite files: LiteRT's results, folded and executed, or a refusal by `load`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flatbuffers
import numpy as np
import pytest
from support.both_runners import Theirs
from support.tflite_cases import DTYPES, Case
from support.tflite_files import Tensor

import nnfmq
from nnfmq.hal.errors import UnsupportedModel

SMALL, HUGE, INF, NAN = 1e-40, 1e38, np.inf, np.nan
DEVICES = ("reference", "compiled")


def x(*shape: int, kind: str = "FLOAT32", name: str = "x", scale: float = 0.0, zero_point: int = 0) -> Any:
    quantization = {"scales": (scale,), "zero_points": (zero_point,)} if scale else {}
    return Tensor(name, shape, kind, **quantization)


def codes(*shape: int, scale: float, name: str = "x", kind: str = "INT8", zero_point: int = 0) -> Any:
    return x(*shape, kind=kind, scale=scale, name=name, zero_point=zero_point)


def constant(values: Any, kind: str, name: str = "c", **quantization: Any) -> Any:
    array = np.array(values, DTYPES[kind])
    return Tensor(name, array.shape, kind, array.tobytes(), **quantization)


def run(client: nnfmq.Client, device: str, content: bytes, inputs: Sequence[Any]) -> Any:
    with client.device(device).prepare(nnfmq.load(content)) as prepared:
        return prepared.execute(*inputs)[0]


def require_litert_s(client: nnfmq.Client, case: Case, inputs: Sequence[Any]) -> None:
    (wanted,) = Theirs(case.content())(inputs)
    for device in DEVICES:
        found = run(client, device, case.content(), inputs)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_array_equal(found, wanted)


# each quotient of float32 below, but not that of float64, is rounded up to an integer or loses its sign
QUOTIENTS = [
    (0.3, 0.1),
    (-0.3, 0.1),
    (1.0, 0.1),
    (6.0, 0.3),
    (-7.0, 0.7),
    (-SMALL, HUGE),
    (INF, 3.0),
    (1.0, INF),
    (NAN, 1.0),
]
DIVIDENDS, DIVISORS = (np.array(side, np.float32) for side in zip(*QUOTIENTS, strict=True))


@pytest.mark.parametrize("is_folded", [False, True])
def test_floor_div_rounds_the_quotient_of_float64(shared_client: nnfmq.Client, is_folded: bool) -> None:
    divisors = constant(DIVISORS, "FLOAT32")
    first = constant(DIVIDENDS, "FLOAT32", "first") if is_folded else x(9)
    require_litert_s(
        shared_client, Case("FLOOR_DIV", [first, divisors], [x(9, name="y")]), [] if is_folded else [DIVIDENDS]
    )


FLOATS = np.array([2.0**63, 1e30, INF, -(2.0**63), -1e30, -INF, 2.0**62, -1.5, 0.5, -0.0, 3e9, SMALL], np.float32)


@pytest.mark.parametrize("is_folded", [False, True])
def test_floats_beyond_int64_become_its_limits(shared_client: nnfmq.Client, is_folded: bool) -> None:
    first = constant(FLOATS, "FLOAT32") if is_folded else x(12)
    require_litert_s(
        shared_client, Case("CAST", [first], [x(12, kind="INT64", name="y")]), [] if is_folded else [FLOATS]
    )


@pytest.mark.parametrize("device", DEVICES)
def test_nan_as_int64_is_0_as_it_is_of_other_integers(shared_client: nnfmq.Client, device: str) -> None:
    content = Case("CAST", [x(2)], [x(2, kind="INT64", name="y")]).content()
    assert run(shared_client, device, content, [np.array([NAN, -2.5], np.float32)]).tolist() == [0, -2]


@pytest.mark.parametrize("kind", ["UINT8", "INT8", "INT16", "INT32"])
@pytest.mark.parametrize("is_constant", [False, True])
def test_a_shift_of_all_bits_leaves_one(shared_client: nnfmq.Client, kind: str, is_constant: bool) -> None:
    scale = {"scale": 0.5} if kind != "INT32" else {}
    values = np.array([100, 100, 100, 100, 1], DTYPES[kind])
    if kind == "UINT8":
        values += 100
    bits = np.array([0, 3, 7, 100, 20], DTYPES[kind])
    quantization = {"scales": (0.5,), "zero_points": (0,)} if scale else {}
    second = constant(bits, kind, "bits", **quantization) if is_constant else x(5, kind=kind, name="bits", **scale)
    case = Case("RIGHT_SHIFT", [x(5, kind=kind, **scale), second], [x(5, kind=kind, name="y", **scale)])
    require_litert_s(shared_client, case, [values] if is_constant else [values, bits])


@pytest.mark.parametrize("kind", ["FLOAT32", "INT16", "INT64"])
@pytest.mark.parametrize("is_constant", [False, True])
def test_axes_count_from_the_end_also_at_run_time(shared_client: nnfmq.Client, kind: str, is_constant: bool) -> None:
    scale = {"scale": 0.5} if kind == "INT16" else {}
    data, shape = np.arange(24).reshape(2, 3, 4).astype(DTYPES[kind]), x(2, 3, 4, kind=kind, **scale)
    for name, axes, result in (("TRANSPOSE", [-1, 0, -2], (4, 2, 3)), ("REVERSE_V2", [-2], (2, 3, 4))):
        order = constant(axes, "INT32", "axes") if is_constant else x(len(axes), kind="INT32", name="axes")
        case = Case(name, [shape, order], [x(*result, kind=kind, name="y", **scale)])
        require_litert_s(shared_client, case, [data] if is_constant else [data, np.array(axes, np.int32)])


def test_several_axes_are_reversed(shared_client: nnfmq.Client) -> None:
    case = Case("REVERSE_V2", [x(2, 3, 4), constant([0, 1], "INT32")], [x(2, 3, 4, name="y")])
    require_litert_s(shared_client, case, [np.arange(24, dtype=np.float32).reshape(2, 3, 4)])


@pytest.mark.parametrize("kind", ["INT8", "UINT8"])
@pytest.mark.parametrize(("name", "scale", "middle"), [("TANH", 1 / 128, 128), ("LOGISTIC", 1 / 256, 0)])
@pytest.mark.parametrize("exponent", [-14, -10, -8, -5, -1])
def test_functions_of_8_bits_round_halves_as_litert_does(
    shared_client: nnfmq.Client, name: str, scale: float, middle: int, kind: str, exponent: int
) -> None:
    lowest = int(np.iinfo(DTYPES[kind]).min)
    given = codes(256, scale=2.0**exponent, kind=kind, zero_point=lowest)
    case = Case(name, [given], [codes(256, scale=scale, kind=kind, zero_point=lowest + middle, name="y")])
    require_litert_s(shared_client, case, [np.arange(lowest, lowest + 256).astype(DTYPES[kind])])


PLAIN = [
    *(("UINT8", name) for name in ("RELU", "RELU6", "RELU_N1_TO_1", "LOGISTIC", "TANH", "HARD_SWISH", "GELU")),
    *(("INT16", name) for name in ("RELU", "RELU6", "LOGISTIC", "TANH", "GELU", "EXP", "LOG", "SQRT", "RSQRT")),
]


@pytest.mark.parametrize(("kind", "name"), PLAIN)
def test_a_function_of_real_values_needs_a_scale(kind: str, name: str) -> None:
    with pytest.raises(UnsupportedModel, match="has no quantization scale, which is required here"):
        nnfmq.load(Case(name, [x(4, kind=kind)], [x(4, kind=kind, name="y")]).content())


@pytest.mark.parametrize("name", ["ADD", "SUB", "MUL", "DIV", "PRELU", "SQUARED_DIFFERENCE", "EQUAL", "NOT_EQUAL"])
@pytest.mark.parametrize("kind", ["UINT8", "INT16"])
def test_an_operator_of_two_real_values_needs_a_scale(kind: str, name: str) -> None:
    with pytest.raises(UnsupportedModel, match="has no quantization scale, which is required here"):
        nnfmq.load(Case(name, [x(4, kind=kind), x(4, kind=kind, name="b")], [x(4, kind=kind, name="y")]).content())


WEIGHTS = constant([[1, 2, 3, 4]], "INT8", "w", scales=(1e10,), zero_points=(0,))
EXTREME = [
    Case("MUL", [codes(4, scale=1.0), codes(4, scale=1.0, name="b")], [codes(4, scale=1.0, name="y")], "MulOptions"),
    Case("ADD", [codes(4, scale=1e9), codes(4, scale=1e9, name="b")], [codes(4, scale=1.0, name="y")], "AddOptions"),
    Case("SUB", [codes(4, scale=1e9), codes(4, scale=1.0, name="b")], [codes(4, scale=1.0, name="y")], "SubOptions"),
    Case("MUL", [codes(4, scale=1e9, kind="INT16"), codes(4, scale=1e9, kind="INT16", name="b")],
         [codes(4, scale=1e-9, kind="INT16", name="y")], "MulOptions", note="of 16 bits"),
    Case("QUANTIZE", [codes(4, scale=1e20)], [codes(4, scale=1e-9, name="y")]),
    Case("QUANTIZE", [x(4, kind="INT32")], [codes(4, scale=0.1, name="y")], note="of integers without a scale"),
    Case("RELU6", [codes(4, scale=1e20)], [codes(4, scale=1e-9, name="y")]),
    Case("LEAKY_RELU", [codes(4, scale=1e20)], [codes(4, scale=1e-9, name="y")], "LeakyReluOptions", {"Alpha": 0.5}),
    Case("FULLY_CONNECTED", [codes(1, 4, scale=1e9), WEIGHTS], [codes(1, 1, scale=1.0, name="y")],
         "FullyConnectedOptions"),
    Case("TANH", [codes(4, scale=0.1)], [codes(4, scale=0.1, name="y")]),
    Case("LOGISTIC", [codes(4, scale=0.1)], [codes(4, scale=0.1, name="y", zero_point=-128)]),
    Case("SOFTMAX", [codes(1, 4, scale=0.1)], [codes(1, 4, scale=0.1, name="y")], "SoftmaxOptions", {"Beta": 1.0}),
]  # fmt: skip


@pytest.mark.parametrize("case", EXTREME, ids=str)
def test_scales_that_no_device_takes_are_refused_by_load(case: Case) -> None:
    with pytest.raises(UnsupportedModel, match=r"\((?:Q|C)\d\)|has no quantization scale"):
        nnfmq.load(case.content())


LATE = [
    (Case("SPACE_TO_BATCH_ND", [x(2, 4, 3), x(1, kind="INT32", name="blocks"), constant([[0, 0]], "INT32")],
          [x(4, 2, 3, name="y")]), "an image of rank 3"),
    (Case("BATCH_TO_SPACE_ND", [x(4, 2, 3), x(1, kind="INT32", name="blocks"), constant([[0, 0]], "INT32")],
          [x(2, 4, 3, name="y")]), "an image of rank 3"),
    (Case("REVERSE_V2", [x(2, 3), x(2, kind="INT32", name="axes")], [x(2, 3, name="y")]), "or one axis"),
    *((Case(name, [x(2, 3), x(2, kind="INT32", name="axes")], [x(name="y")], "ReducerOptions"),
       "the rank of its result depends on") for name in ("SUM", "MEAN", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD")),
    (Case("REDUCE_ALL", [x(1, 2, 1, 2, 3, kind="BOOL"), x(1, kind="INT32", name="axes")],
          [x(2, 1, 2, 3, kind="BOOL", name="y")], "ReducerOptions"), "at most 4 is supported"),
    (Case("BUCKETIZE", [x(4)], [x(4, kind="INT32", name="y")], "BucketizeOptions"), "has no boundaries"),
    # TFLite reads the elements of such a table as INT8, without a zero point
    (Case("EMBEDDING_LOOKUP", [x(2, kind="INT32"), codes(3, 4, kind="UINT8", scale=0.1, name="table")],
          [x(2, 4, name="y")]), "must be INT8 with zero point 0"),
    (Case("EMBEDDING_LOOKUP", [x(2, kind="INT32"), codes(3, 4, scale=0.1, name="table", zero_point=3)],
          [x(2, 4, name="y")], note="zero point"), "must be INT8 with zero point 0"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "reason"), LATE, ids=str)
def test_what_cannot_be_computed_is_refused_by_load(case: Case, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        nnfmq.load(case.content())


def test_a_tensor_whose_elements_are_in_another_file_is_refused() -> None:
    schema = pytest.importorskip("ai_edge_litert.schema_py_generated", reason="ai-edge-litert is not installed")
    case = Case("MUL", [x(2), constant([2, 3], "FLOAT32")], [x(2, name="y")])
    model = schema.ModelT.InitFromPackedBuf(case.content(), 0)
    weights = model.subgraphs[0].tensors[1]
    weights.buffer, weights.externalBuffer = 0, 1
    group, piece = schema.ExternalBufferGroupT(), schema.ExternalBufferT()
    group.name, piece.id, piece.length = b"weights.bin", 1, 8
    model.externalBufferGroups, model.externalBuffers = [group], [piece]
    builder = flatbuffers.Builder()
    builder.Finish(model.Pack(builder), b"TFL3")
    with pytest.raises(UnsupportedModel, match=r"tensor 1 \('c'\): its elements are in another file"):
        nnfmq.load(bytes(builder.Output()))
