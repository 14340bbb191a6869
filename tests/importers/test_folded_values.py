"""A node has the same values whether the importer computes it, because its inputs are constants, or an engine does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.float_values import numbers
from support.onnx_files import OnnxCase, file_of, results
from support.onnx_runtime import onnx
from support.oracles import Array

SPECIAL = [0, 1, 2, 3, 0.5, 1.5, 2.5, 7, 0.1, 1 / 3, 8, 300, 1000, np.inf, np.nan]
ROWS = [[1] * 7 + [np.nan], [np.inf, 0, *[1] * 6], [300, 1, -1, 1, -1, 1, -1, 0], [3e4] * 4 + [-3e4] * 4, [-np.inf] * 8]
ALONG, ONES = np.array([1]), np.ones((1, 5000))


def pairs(dtype: Any) -> tuple[Array, Array]:
    values = np.array([*SPECIAL, *np.negative(SPECIAL), float(np.finfo(dtype).max)]).astype(dtype)
    first, second = (np.ascontiguousarray(grid.reshape(-1)) for grid in np.meshgrid(values, values))
    return first, second


def cases(dtype: Any) -> list[OnnxCase]:
    def of(name: str, *inputs: Any, constants: tuple[int, ...] = (), outputs: int = 1, **attributes: Any) -> OnnxCase:
        arrays = [array.astype(dtype) if array.dtype.kind == "f" else array for array in map(np.asarray, inputs)]
        return OnnxCase(name, arrays, attributes, frozenset(constants), outputs, 18)

    two, x, rows = pairs(dtype), numbers(dtype), np.array(ROWS)
    return [
        *(of(name, x) for name in ("Abs", "Ceil", "Floor", "Neg", "Sign", "Sqrt")),
        *(of(name, *two) for name in ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Equal", "Greater", "Less")),
        of("Mod", *two, fmod=1),
        of("Clip", x, np.array(2.0), np.array(-1.0), constants=(1, 2)),
        *(of("Cast", x, to=int(kind)) for kind in (onnx.TensorProto.INT32, onnx.TensorProto.FLOAT)),
        *(of(name, rows, ALONG, constants=(1,)) for name in ("ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum")),
        *(of(name, rows, axis=1) for name in ("ArgMax", "ArgMin")),
        of("TopK", rows, np.array([8]), constants=(1,), outputs=2),
        *(of("CumSum", array, np.array(1), constants=(1,)) for array in (rows, ONES)),
        of("ReduceSum", ONES, ALONG, constants=(1,)),
        # forms that ONNX Runtime computes, and ONNX's evaluator rejects
        of("CumSum", rows, ALONG, constants=(1,), exclusive=1),
        of("OneHot", np.array([0, -1, 5]), np.array([3]), np.array([0.5, 1.0]), constants=(1, 2)),
        of("GatherElements", rows[:, :2], np.array([[1], [0]]), axis=1),
    ]


def folded(case: OnnxCase) -> list[Array]:
    """Return the values of a model in which all inputs of the case's node are constants."""
    names, outputs = [f"x{place}" for place in range(len(case.inputs))], [f"y{at}" for at in range(case.outputs)]
    nodes = [
        onnx.helper.make_node(case.operator, names, outputs, **case.attributes),
        onnx.helper.make_node("Identity", ["given"], ["copy"]),  # a model needs an input
    ]
    constants = {name: np.asarray(array) for name, array in zip(names, case.inputs, strict=True)}
    given = {"given": np.zeros(1, np.float32)}
    return results(file_of(nodes, given, [*outputs, "copy"], constants, case.opset), given)[:-1]


@pytest.mark.parametrize("case", [*cases(np.float32), *cases(np.float16)], ids=str)
def test_a_node_of_constants_has_the_values_of_its_operations(case: OnnxCase) -> None:
    for ours, executed in zip(folded(case), results(case.content(), case.fed()), strict=True):
        assert ours.dtype == executed.dtype
        if ours.dtype == np.float32:
            np.testing.assert_allclose(ours, executed, rtol=1e-6)  # other instructions of the same library
        else:
            np.testing.assert_array_equal(ours, executed)
