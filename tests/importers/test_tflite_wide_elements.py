"""INT64 in TFLite files: every operator computes it as LiteRT's reference kernels do, or is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.both_runners import Theirs, ours
from support.tflite_cases import Case
from support.tflite_files import Tensor

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers import load

WIDE = [1 << 40, -(1 << 40), 100_000, 3 << 30, (1 << 63) - 1, -(1 << 63), 0, 1, -1, 5 << 33, 7, -7]
SMALL = [1, 2, 3, -4, 5, -6, 7, 8, -9, 10, 11, 12]


def x(*shape: int, kind: str = "INT64", name: str = "x") -> Any:
    return Tensor(name, shape, kind)


def constant(values: Any, kind: str = "INT64", shape: tuple[int, ...] | None = None, name: str = "c") -> Any:
    array = np.array(values, {"INT64": np.int64, "INT32": np.int32}[kind])
    return Tensor(name, array.shape if shape is None else shape, kind, array.tobytes())


def option(name: str) -> str:
    return f"{name.title()}Options"


GIVEN, OTHER = x(3, 4), x(3, 4, name="other")
AXES = constant([1], "INT32", name="axes")
CASES = [
    *(Case(name, [GIVEN, OTHER], [x(3, 4)], option(name)) for name in ("ADD", "SUB", "MUL")),
    Case("FLOOR_MOD", [GIVEN, constant(SMALL[:4], shape=(4,))], [x(3, 4)]),
    *(Case(name, [GIVEN, OTHER], [x(3, 4)], "MaximumMinimumOptions") for name in ("MAXIMUM", "MINIMUM")),
    *(Case(name, [GIVEN, constant([WIDE[:4]])], [x(3, 4, kind="BOOL")], table)
      for name, table in (("EQUAL", "EqualOptions"), ("NOT_EQUAL", "NotEqualOptions"), ("LESS", "LessOptions"),
                          ("LESS_EQUAL", "LessEqualOptions"), ("GREATER", "GreaterOptions"),
                          ("GREATER_EQUAL", "GreaterEqualOptions"))),
    *(Case(name, [GIVEN, AXES], [x(3)], "ReducerOptions")
      for name in ("SUM", "REDUCE_PROD", "REDUCE_MAX", "REDUCE_MIN")),
    Case("NEG", [GIVEN], [x(3, 4)], "NegOptions"),
    *(Case("CAST", [GIVEN], [x(3, 4, kind=kind)], note=kind) for kind in ("FLOAT32", "INT32", "UINT8", "BOOL")),
    *(Case("CAST", [x(3, 4, kind=kind)], [GIVEN], note=f"from {kind}") for kind in ("FLOAT32", "INT32", "BOOL")),
    Case("RESHAPE", [GIVEN, constant([2, 6], "INT32")], [x(2, 6)]),
    Case("TRANSPOSE", [GIVEN, constant([1, 0], "INT32")], [x(4, 3)]),
    Case("CONCATENATION", [GIVEN, OTHER], [x(3, 8)], "ConcatenationOptions", {"Axis": 1}),
    Case("PACK", [GIVEN, OTHER], [x(2, 3, 4)], "PackOptions", {"ValuesCount": 2, "Axis": 0}),
    Case("SLICE", [GIVEN, constant([1, 0]), constant([2, -1])], [x(2, 4)], note="wide limits"),
    Case("STRIDED_SLICE", [GIVEN, constant([0, 1], "INT32"), constant([3, 3], "INT32"), constant([1, 1], "INT32")],
         [x(3, 2)], "StridedSliceOptions"),
    Case("TILE", [GIVEN, constant([2, 1])], [x(6, 4)]),
    Case("PAD", [GIVEN, constant([[1, 0], [0, 2]])], [x(4, 6)]),
    Case("PADV2", [GIVEN, constant([[1, 0], [0, 2]]), constant([0], name="zero")], [x(4, 6)]),
    Case("FILL", [constant([2, 3], "INT32"), x(name="value")], [x(2, 3)]),
    Case("SELECT_V2", [x(3, 4, kind="BOOL"), OTHER, constant([WIDE[:4]])], [x(3, 4)]),
    Case("EXPAND_DIMS", [GIVEN, constant([1], "INT32")], [x(3, 1, 4)]),
    Case("REVERSE_V2", [GIVEN, constant([1], "INT32")], [x(3, 4)]),
    Case("ARG_MAX", [x(3, 4, kind="FLOAT32"), AXES], [x(3)], "ArgMaxOptions", {"OutputType": 4}),
    Case("GATHER", [GIVEN, constant([0, 2])], [x(2, 4)], "GatherOptions"),
    Case("GATHER", [x(3, 4, kind="FLOAT32"), x(2, name="indices")], [x(2, 4, kind="FLOAT32")], "GatherOptions",
         note="computed indices"),
    Case("GATHER_ND", [GIVEN, constant([[0, 1], [2, 3]])], [x(2)]),
    Case("ONE_HOT", [x(4), constant([4], "INT32", ()), constant([WIDE[0]], shape=(), name="on"),
                     constant([0], shape=(), name="off")], [x(4, 4)], "OneHotOptions", {"Axis": -1}),
    Case("SHAPE", [GIVEN], [x(2)], "ShapeOptions", {"OutType": 4}),
    Case("ZEROS_LIKE", [GIVEN], [x(3, 4)]),
]  # fmt: skip


def drawn(case: Case) -> list[Any]:
    """Return the inputs: integers of 64 bits, indices, or numbers around them."""
    values: dict[str, Any] = {
        "INT64": WIDE,
        "INT32": [n % 1000 - 500 for n in WIDE],
        "BOOL": [n % 2 == 0 for n in WIDE],
        "FLOAT32": [1e12, -1.5, 2.5, -3e9, 0.0, 1e18, 7, 8, 9, 10, 11, 12],
    }
    dtypes = {"INT64": np.int64, "INT32": np.int32, "BOOL": bool, "FLOAT32": np.float32}
    found = [
        np.resize(np.array(values[t.type], dtypes[t.type]), t.shape)
        if t.name != "indices" and case.name != "ONE_HOT"
        else np.resize(np.array([2, 0, 1, 7][: t.shape[0]]), t.shape)
        for t in case.inputs()
    ]
    return [np.roll(array, place) for place, array in enumerate(found)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_operator_computes_64_bits_as_litert_does(case: Case) -> None:
    content, inputs = case.content(), drawn(case)
    for found, wanted in zip(ours(content)(inputs), Theirs(content)(inputs), strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted.reshape(found.shape))


def test_inputs_and_outputs_are_int64() -> None:
    loaded = load(CASES[0].content())
    assert {info.dtype for info in (*loaded.inputs, *loaded.outputs)} == {"int64"}


def test_an_index_beyond_32_bits_is_outside() -> None:
    case = Case("GATHER", [x(3, 4, kind="FLOAT32"), x(2, name="indices")], [x(2, 4, kind="FLOAT32")], "GatherOptions")
    with pytest.raises(Exception, match=r"an index is outside \[0, 3\)"):
        ours(case.content())([np.ones((3, 4), np.float32), np.array([0, 1 << 32])])


def test_an_operator_that_has_no_integers_of_64_bits_is_refused() -> None:
    case = Case("PADV2", [GIVEN, constant([[1, 0], [0, 2]]), constant([1 << 40], name="value")], [x(4, 6)])
    with pytest.raises(InvalidArgument, match="is INT64, which is not supported here"):
        load(case.content())
