"""Loop and Scan: nnfmq's results are ONNX Runtime's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from support.onnx_files import assert_close, expected, file_of, results
from support.onnx_runtime import onnx

import nnfmq

RNG = np.random.default_rng(33)
node, info = onnx.helper.make_node, onnx.helper.make_tensor_value_info
FLOAT, INT, BOOL = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.BOOL
HEAD = [info("i", INT, []), info("c", BOOL, [])]
ROW = {"x": RNG.uniform(-1, 1, (1, 3)).astype(np.float32)}
ROWS = {"x": RNG.uniform(-1, 1, (5, 3)).astype(np.float32)}
COUNT = {"n": np.array(4, np.int64), "true": np.array(True), "m": np.array(1000, np.int64)}
ONE = {"one": np.array(1, np.int64), "three": np.array(3, np.int64), "zero": np.array([0], np.int64)}


def graph(nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], **constants: Any) -> Any:
    initializers = [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    return onnx.helper.make_graph(list(nodes), "body", list(inputs), list(outputs), initializers)


def looped(nodes: Sequence[Any], outputs: Sequence[str], inputs: Sequence[str] = ("n", "true", "x")) -> bytes:
    """Return a model whose Loop carries v, from x on, with a body of these nodes and ONE as constants."""
    described = [info(outputs[0], BOOL, []), *(info(name, FLOAT, None) for name in outputs[1:])]
    body = graph(nodes, [*HEAD, info("v", FLOAT, [1, 3])], described, **ONE)
    names = [f"y{place}" for place in range(len(outputs) - 1)]
    return file_of([node("Loop", list(inputs), names, body=body)], ROW, names, COUNT)


SAME = node("Identity", ["c"], ["c_next"])
SCALED = [node("Cast", ["i"], ["f"], to=1), node("Add", ["v", "f"], ["w"]), node("Tanh", ["w"], ["v_next"])]
LIMITED = [node("Add", ["i", "one"], ["j"]), node("Less", ["j", "three"], ["c_next"])]
LOOPS: Mapping[str, bytes] = {
    "constant count": looped([SAME, *SCALED], ["c_next", "v_next"]),
    "scan output": looped([SAME, *SCALED], ["c_next", "v_next", "w"]),
    "condition that is counted": looped([*LIMITED, *SCALED], ["c_next", "v_next", "w"], ["m", "true", "x"]),
    "condition without a count": looped([*LIMITED, *SCALED], ["c_next", "v_next"], ["", "true", "x"]),
    "condition without a beginning": looped([*LIMITED, *SCALED], ["c_next", "v_next"], ["m", "", "x"]),
    "value that grows": looped([SAME, node("Concat", ["v", "x"], ["v_next"], axis=0)], ["c_next", "v_next"]),
    "value from around it": looped([SAME, node("Mul", ["v", "x"], ["v_next"])], ["c_next", "v_next"]),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_computes_what_onnx_runtime_computes(name: str) -> None:
    assert_close(results(LOOPS[name], ROW), expected(LOOPS[name], ROW))


def test_a_driver_iterates() -> None:
    content = LOOPS["scan output"]
    with nnfmq.connect(embedded=True) as client, client.prepare(nnfmq.load(content)) as model:
        assert_close(model.execute(*ROW.values()), expected(content, ROW))


def scanned(**attributes: Any) -> bytes:
    """Return a model of a Scan over x, whose carried value is the sum so far."""
    axis = attributes.get("scan_input_axes", [0])[0]
    width = ROWS["x"].shape[1 - axis]
    nodes = [node("Add", ["sum", "element"], ["next"]), node("Tanh", ["next"], ["out"])]
    vector = [info(name, FLOAT, [width]) for name in ("sum", "element", "next", "out")]
    body = graph(nodes, vector[:2], vector[2:])
    constants = {"start": np.linspace(-1, 1, width, dtype=np.float32)}
    scan = node("Scan", ["start", "x"], ["last", "all"], body=body, num_scan_inputs=1, **attributes)
    return file_of([scan], ROWS, ["last", "all"], constants)


@pytest.mark.parametrize(
    "attributes",
    [{}, {"scan_input_directions": [1]}, {"scan_output_directions": [1]}, {"scan_input_axes": [1]},
     {"scan_output_axes": [1]}],
    ids=str,
)  # fmt: skip
def test_a_scan_computes_what_onnx_runtime_computes(attributes: dict[str, Any]) -> None:
    content = scanned(**attributes)
    assert_close(results(content, ROWS), expected(content, ROWS))


def test_a_loop_in_a_loop_and_an_if_in_a_loop_are_converted() -> None:
    inner = graph(
        [node("Identity", ["c2"], ["c2_next"]), node("Mul", ["v2", "x"], ["v2_next"])],
        [info("i2", INT, []), info("c2", BOOL, []), info("v2", FLOAT, [1, 3])],
        [info("c2_next", BOOL, []), info("v2_next", FLOAT, [1, 3])],
    )
    branches = {
        f"{name}_branch": graph([node(operator, ["w"], ["out"])], [], [info("out", FLOAT, [1, 3])])
        for name, operator in (("then", "Tanh"), ("else", "Neg"))
    }
    nodes = [
        node("Loop", ["n", "true", "v"], ["w"], body=inner),
        node("Less", ["i", "one"], ["is_first"]),
        node("If", ["is_first"], ["v_next"], **branches),
        SAME,
    ]
    content = looped(nodes, ["c_next", "v_next"])
    assert_close(results(content, ROW), expected(content, ROW))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (looped([SAME, *SCALED], ["c_next", "v_next"], ["", "true", "x"]), "more than 4096 times, or for ever"),
        (looped([SAME, node("Det", ["v"], ["v_next"])], ["c_next", "v_next"]), r"Det\): is not supported"),
    ],
)
def test_a_loop_that_is_not_supported_is_refused_with_the_reason(content: bytes, message: str) -> None:
    with pytest.raises(nnfmq.UnsupportedModel, match=message):
        nnfmq.load(content)


def test_iterations_of_all_loops_are_limited() -> None:
    content = looped([SAME, *SCALED], ["c_next", "v_next"], ["large", "true", "x"])
    model = onnx.load_model_from_string(content)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1 << 40, np.int64), "large"))
    with pytest.raises(nnfmq.UnsupportedModel, match=r"1099511627776 iterations of 4 nodes"):
        nnfmq.load(model.SerializeToString())
