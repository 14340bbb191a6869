"""Write OpenVINO files, with inputs and what OpenVINO computes in this process with one thread."""

from __future__ import annotations

import io
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

ov: Any = import_module("openvino")
op: Any = import_module("openvino.opset13")

FOLDER = Path(sys.argv[1])
RANDOM = np.random.default_rng(1)


def constant(*shape: int) -> Any:
    return op.constant((RANDOM.standard_normal(shape) / 4).astype(np.float32))


def write(name: str, results: list[Any], parameters: list[Any], *cases: list[Any]) -> None:
    model = ov.Model([op.result(node, name=f"out{i}") for i, node in enumerate(results)], parameters, name)
    ov.save_model(model, FOLDER / f"{name}.xml", compress_to_fp16=False)
    config = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}
    compiled = ov.Core().compile_model(FOLDER / f"{name}.xml", "CPU", config)
    for case, inputs in enumerate(cases):
        outputs = list(compiled(list(inputs)).values())
        arrays = {f"in{i}": array for i, array in enumerate(inputs)}
        np.savez(FOLDER / f"{name}{case or ''}.npz", **arrays, **{f"out{i}": array for i, array in enumerate(outputs)})


def floats(*shape: int) -> Any:
    return RANDOM.standard_normal(shape).astype(np.float32)


def vision() -> None:
    x = op.parameter([1, 3, 16, 16], ov.Type.f32, name="image")
    y = op.relu(op.convolution(x, constant(8, 3, 3, 3), [2, 2], [1, 1], [1, 1], [1, 1]))
    y = op.reduce_mean(y, op.constant([2, 3]), False)
    write("vision", [op.softmax(op.matmul(y, constant(8, 5), False, False), 1)], [x], [floats(1, 3, 16, 16)])


def transformer() -> None:
    """Attention over embeddings of int64 tokens; batch and length are open."""
    tokens = op.parameter([-1, -1], ov.Type.i64, name="tokens")
    x = op.gather(constant(20, 8), tokens, op.constant(0))
    q, k, v = (op.matmul(x, constant(8, 8), False, False) for _ in range(3))
    weights = op.softmax(op.matmul(q, k, False, True), -1)
    longest = op.topk(op.matmul(weights, v, False, False), op.constant(1), -1, "max", "value", ov.Type.i64)
    cases = [[RANDOM.integers(0, 20, shape)] for shape in ((1, 4), (3, 7))]
    write("transformer", [op.matmul(weights, v, False, False), longest.output(1)], [tokens], *cases)


def types() -> None:
    """What crosses as it is: rank 0, bool, float64, uint8."""
    a = op.parameter([], ov.Type.f32, name="a")
    b = op.parameter([2], ov.Type.boolean, name="b")
    c = op.parameter([2], ov.Type.f64, name="c")
    d = op.parameter([2], ov.Type.u8, name="d")
    results = [op.add(a, op.constant(np.float32(1))), op.logical_not(b), op.multiply(c, c), op.add(d, d)]
    write(
        "types",
        results,
        [a, b, c, d],
        [np.float32(3).reshape(()), [True, False], np.array([1e-9, 3]), np.array([1, 200], np.uint8)],
    )


def found() -> None:
    """An output whose size is known only afterwards."""
    x = op.parameter([6], ov.Type.f32, name="x")
    write("found", [op.non_zero(x, "i64")], [x], [np.array([0, 1, 0, 2, 0, 3], np.float32)])


def half() -> None:
    x = op.parameter([4], ov.Type.bf16, name="x")
    model = ov.Model([op.result(op.relu(x), name="y")], [x], "half")
    ov.save_model(model, FOLDER / "half.xml", compress_to_fp16=False)


def text() -> None:
    x = op.parameter([1], ov.Type.string, name="words")
    model = ov.Model([op.result(op.shape_of(x))], [x], "text")
    ov.save_model(model, FOLDER / "text.xml")


def long() -> None:
    """Takes seconds."""
    y = x = op.parameter([1200, 1200], ov.Type.f32, name="x")
    for _ in range(60):
        y = op.matmul(y, x, False, False)
    ov.save_model(ov.Model([op.result(y)], [x], "long"), FOLDER / "long.xml")


def huge() -> None:
    """Needs 10 GiB for a product."""
    x = op.parameter([51200, 1], ov.Type.f32, name="x")
    y = op.reduce_max(op.matmul(x, x, False, True), op.constant([1]), False)
    ov.save_model(ov.Model([op.result(y)], [x], "huge"), FOLDER / "huge.xml")


def reshaped() -> None:
    """Fails in an execution if the shape is not of as many elements."""
    x, shape = op.parameter([4], ov.Type.f32, name="x"), op.parameter([2], ov.Type.i64, name="shape")
    ov.save_model(ov.Model([op.result(op.reshape(x, shape, False))], [x, shape], "reshaped"), FOLDER / "reshaped.xml")


def stateful() -> None:
    """Sums of all inputs so far: from 5 and 7 on, from the first input on, and of any number of elements."""
    start, begin = op.parameter([2], ov.Type.f32, name="x"), op.constant(np.array([5, 7], np.float32))
    for name, first, size in (("stateful", begin, 2), ("started", start, 2), ("growing", begin, -1)):
        value = op.add(op.read_value(first, "memory", ov.Type.f32, ov.PartialShape([size])), start)
        model = ov.Model([op.result(value)], [op.assign(value, "memory")], [start], name)
        ov.save_model(model, FOLDER / f"{name}.xml")


def onnx_net() -> None:
    onnx: Any = import_module("onnx")

    helper = onnx.helper
    x, y = (helper.make_tensor_value_info(name, 1, [2, 3]) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Sin", ["x"], ["y"])], "net", [x], [y])
    data = as_bytes(graph)
    (FOLDER / "net.onnx").write_bytes(data)
    inputs = floats(2, 3)
    compiled = ov.Core().compile_model(ov.Core().read_model(io.BytesIO(data)), "CPU")
    np.savez(FOLDER / "onnx.npz", in0=inputs, out0=compiled([inputs])[0])
    file = onnx.TensorProto(name="w", data_type=1, dims=[3], data_location=onnx.TensorProto.EXTERNAL)
    file.external_data.add(key="location", value="pyproject.toml")
    add = helper.make_node("Add", ["x", "w"], ["y"])
    (FOLDER / "external.onnx").write_bytes(as_bytes(helper.make_graph([add], "net", [x], [y], [file])))
    branch = helper.make_graph(
        [helper.make_node("Constant", [], ["c"], value=file)], "b", [], [helper.make_tensor_value_info("c", 1, [3])]
    )
    nodes = [
        helper.make_node("If", ["b"], ["d"], then_branch=branch, else_branch=branch),
        helper.make_node("Add", ["x", "d"], ["y"]),
    ]
    b = helper.make_tensor_value_info("b", 9, [])
    (FOLDER / "external_in_branch.onnx").write_bytes(as_bytes(helper.make_graph(nodes, "net", [x, b], [y])))


def as_bytes(graph: Any) -> Any:
    onnx: Any = import_module("onnx")

    return onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8
    ).SerializeToString()


for write_one in (vision, transformer, types, found, half, text, long, huge, reshaped, stateful, onnx_net):
    write_one()
