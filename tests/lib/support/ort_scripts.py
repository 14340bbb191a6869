"""Pieces of scripts for ONNX Runtime, which get its module, or nnfmq's, as `ort`; and the models that they run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from support.onnx_files import IR_VERSION, OPSET
from support.onnx_runtime import onnx
from support.oracles import Array

Script = Callable[[Any], Any]
RNG = np.random.default_rng(7)
X = RNG.uniform(-1, 1, (2, 3, 4)).astype(np.float32)
S = np.array(2, np.float32)
FED = {"x": X, "s": S}


def symbolic_model(shape: Sequence[int | str | None] = ("N", 3, None), kind: int = 1) -> bytes:
    """Return a model with y = relu(x) and z = y + s; the shapes of the outputs are not declared."""
    helper = onnx.helper
    inputs = [helper.make_tensor_value_info("x", kind, shape), helper.make_tensor_value_info("s", 1, [])]
    outputs = [helper.make_empty_tensor_value_info(name) for name in "yz"]
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Add", ["y", "s"], ["z"])]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, doc_string="about the graph")
    opsets = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(graph, ir_version=IR_VERSION, opset_imports=opsets, producer_name="a producer")
    model.metadata_props.add(key="labels", value="cat,dog")
    content: bytes = model.SerializeToString()
    return content


def index_model() -> bytes:
    """Return a model with int64 inputs and outputs, one of rank 0: the classes of the largest of x's rows."""
    helper, int64 = onnx.helper, onnx.TensorProto.INT64
    inputs = [helper.make_tensor_value_info("x", 1, ["N", 5]), helper.make_tensor_value_info("add", int64, [])]
    outputs = [helper.make_tensor_value_info("y", int64, ["N"]), helper.make_tensor_value_info("top", 1, [])]
    nodes = [
        helper.make_node("ArgMax", ["x"], ["best"], axis=1, keepdims=0),
        helper.make_node("Add", ["best", "add"], ["y"]),
        helper.make_node("ReduceMax", ["x"], ["top"], keepdims=0),
    ]
    graph = helper.make_graph(nodes, "graph", inputs, outputs)
    opsets = [helper.make_opsetid("", OPSET)]
    content: bytes = helper.make_model(graph, ir_version=IR_VERSION, opset_imports=opsets).SerializeToString()
    return content


def rate_model() -> bytes:
    """Return a model that computes with 2·x if the integer `rate` is 8000, else with -x, and repeats it `times`."""
    helper, int64 = onnx.helper, onnx.TensorProto.INT64

    def branch(name: str, nodes: list[Any]) -> Any:
        return helper.make_graph(nodes, name, [], [helper.make_empty_tensor_value_info(f"{name}_y")])

    inputs = [
        helper.make_tensor_value_info("x", 1, ["N", 4]),
        helper.make_tensor_value_info("rate", int64, []),
        helper.make_tensor_value_info("times", int64, [2]),
    ]
    nodes = [
        helper.make_node("Equal", ["rate", "low"], ["is_low"]),
        helper.make_node(
            "If",
            ["is_low"],
            ["chosen"],
            then_branch=branch("low", [helper.make_node("Mul", ["x", "two"], ["low_y"])]),
            else_branch=branch("high", [helper.make_node("Neg", ["x"], ["high_y"])]),
        ),
        helper.make_node("Tile", ["chosen", "times"], ["y"]),
    ]
    constants = [
        onnx.numpy_helper.from_array(np.array(8000), "low"),
        onnx.numpy_helper.from_array(np.float32(2), "two"),
    ]
    outputs = [helper.make_tensor_value_info("y", 1, None)]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", OPSET)]
    content: bytes = helper.make_model(graph, ir_version=IR_VERSION, opset_imports=opsets).SerializeToString()
    return content


def changed(script: str) -> str:
    """Return a script with its first import of ONNX Runtime changed; others stay."""
    found = re.subn(
        r"^import onnxruntime$", "import nnfmq.compat.onnxruntime as onnxruntime", script, count=1, flags=re.M
    )
    if not found[1]:
        found = re.subn(r"^(import|from) onnxruntime\b", r"\1 nnfmq.compat.onnxruntime", script, count=1, flags=re.M)
    assert found[1], "no import"
    return found[0]


def session(ort: Any, content: bytes | None = None) -> Any:
    """Return a session that logs nothing."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(content or symbolic_model(), options, providers=["CPUExecutionProvider"])


def outcome(script: Script, ort: Any) -> Any:
    """Return what a script returns, or the names of the classes of what it raises."""
    try:
        return script(ort)
    except Exception as error:  # noqa: BLE001  any of them is compared
        return list(dict.fromkeys(kind.__name__ for kind in type(error).__mro__))


def answer(call: Callable[[], Any]) -> str:
    """Return what a call returns, or the class and the text of what it raises."""
    try:
        return repr(call())
    except Exception as error:  # noqa: BLE001  any of them is compared
        return f"{type(error).__name__}: {error}"


def assert_same(found: Any, wanted: Any) -> None:
    """Require equal values; floats within 1e-5 of the largest."""
    if isinstance(wanted, np.ndarray):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        scale = float(np.abs(wanted).max(initial=0)) if wanted.dtype.kind == "f" else 0
        np.testing.assert_allclose(found, wanted, 0, 1e-5 * scale)
    elif isinstance(wanted, (list, tuple)):
        assert type(found) is type(wanted) and len(found) == len(wanted), (found, wanted)
        for ours, theirs in zip(found, wanted, strict=True):
            assert_same(ours, theirs)
    else:
        assert found == wanted


def nodes_of(described: Any) -> list[Any]:
    """Return names, types, shapes and texts of inputs and outputs."""
    return [[node.name, node.type, list(node.shape), str(node)] for node in described]


def bound(ort: Any, **inputs: Array) -> Any:
    """Return a session and its binding with inputs."""
    made = session(ort)
    binding = made.io_binding()
    for name, array in inputs.items():
        binding.bind_cpu_input(name, array)
    return made, binding
