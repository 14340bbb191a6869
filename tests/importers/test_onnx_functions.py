"""Operators that ONNX defines by functions, and functions of a model: their nodes are converted for each call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.onnx_files import IR_VERSION, OnnxCase, assert_close, expected, file_of, results
from support.onnx_runtime import onnx

import nnfmq

RNG = np.random.default_rng(7)
helper = onnx.helper


def real(*shape: int, low: float = -2.0) -> Any:
    return RNG.uniform(low, 2, shape).astype(np.float32)


def case(operator: str, *inputs: Any, opset: int = 18, **attributes: Any) -> OnnxCase:
    return OnnxCase(operator, inputs, attributes, frozenset(), 1, opset)


CASES = [
    case("Celu", real(2, 3), alpha=0.7),
    case("Selu", real(2, 3)),
    case("Mish", real(2, 3)),
    case("Softplus", real(2, 3)),
    case("Softsign", real(2, 3)),
    case("ThresholdedRelu", real(2, 3), alpha=0.5),
    case("Shrink", real(2, 3), lambd=0.5, bias=0.25),
    case("Gelu", real(2, 3), opset=20, approximate="tanh"),
    case("Gelu", real(2, 3), opset=20),
    case("MeanVarianceNormalization", real(2, 3, 4, 5)),
    case("GroupNormalization", real(2, 4, 3, 3), real(4), real(4), opset=21, num_groups=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_operator_that_is_a_function_is_onnx_runtime_s(case: OnnxCase) -> None:
    content, fed = case.content(), case.fed()
    assert_close(results(content, fed), expected(content, fed))


def model_of(functions: list[Any], nodes: list[Any], **fed: Any) -> bytes:
    """Return the file of a model that calls functions of the domain `own`."""
    model = onnx.load_model_from_string(file_of(nodes, fed, ["y"]))
    model.functions.extend(functions)
    model.opset_import.append(helper.make_opsetid("own", 1))
    model.ir_version = IR_VERSION
    content: bytes = model.SerializeToString()
    return content


def function(name: str, nodes: list[Any], attributes: tuple[str, ...] = ()) -> Any:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    return helper.make_function("own", name, ["a", "b"], ["r"], nodes, opsets, attributes)


def test_each_call_of_a_function_has_its_own_values_and_attributes() -> None:
    scaled = helper.make_node("LeakyRelu", ["t"], ["r"])
    scaled.attribute.add(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    inner = function("Inner", [helper.make_node("Sub", ["a", "b"], ["t"]), scaled], ("slope",))
    outer = function(
        "Outer",
        [
            helper.make_node("Inner", ["a", "b"], ["t"], domain="own", slope=0.5),
            helper.make_node("Inner", ["b", "a"], ["u"], domain="own", slope=0.25),
            helper.make_node("Mul", ["t", "u"], ["r"]),
        ],
    )
    nodes = [helper.make_node("Outer", ["x", "z"], ["t"], domain="own"), helper.make_node("Neg", ["t"], ["y"])]
    fed = {"x": real(2, 3), "z": real(3)}
    content = model_of([inner, outer], nodes, **fed)
    assert_close(results(content, fed), expected(content, fed))


@pytest.mark.parametrize(
    ("body", "inputs", "reason"),
    [
        (helper.make_node("Own", ["a", "b"], ["r"], domain="own"), ["x", "x"], "call each other"),
        (helper.make_node("Add", ["a", "b"], ["r"]), ["x", "x", "x"], "more inputs"),
    ],
    ids=["it calls itself without end", "the call has too many inputs"],
)
def test_a_function_is_refused_if(body: Any, inputs: list[str], reason: str) -> None:
    nodes = [helper.make_node("Own", inputs, ["y"], domain="own")]
    with pytest.raises(nnfmq.UnsupportedModel, match=reason):
        nnfmq.load(model_of([function("Own", [body])], nodes, x=real(2)))
