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
        (looped([SAME, *SCALED], ["c_next", "v_next"], ["", "true", "x"]), "more than 4096 times, or indefinitely"),
        (looped([SAME, node("NonZero", ["v"], ["v_next"])], ["c_next", "v_next"]), r"NonZero\): is"),
    ],
)
def test_a_loop_that_is_not_supported_is_refused_with_the_reason(content: bytes, message: str) -> None:
    with pytest.raises(nnfmq.UnsupportedModel, match=message):
        nnfmq.load(content)


MANY = {"n": np.array(300, np.int64)}
STEPS = {"k": np.array([7], np.int64)}
GROWS = [node("ReduceMax", ["v"], ["top"], keepdims=0), node("Less", ["top", "x_top"], ["c_next"]),
         node("Add", ["v", "half"], ["v_next"])]  # fmt: skip
COMPUTED = [node("ReduceSum", ["x"], ["x_sum"], keepdims=0), node("Add", ["x_sum", "x_sum"], ["twice"]),
            node("Abs", ["twice"], ["x_size"]), node("Add", ["x_size", "five"], ["x_top"])]  # fmt: skip
WEIGHTS = RNG.uniform(-0.5, 0.5, (3, 3)).astype(np.float32)


def counted(nodes: Sequence[Any], outputs: Sequence[str], passed: Sequence[str] = ()) -> bytes:
    """Return a model whose Loop of 300 iterations carries v, and values that it passes through."""
    described = [info(name, BOOL if name.startswith(("c_", "is_")) else FLOAT, None) for name in outputs]
    inputs = [*HEAD, info("v", FLOAT, [1, 3]), *(info(f"{name}_in", FLOAT, None) for name in passed)]
    names = [f"y{place}" for place in range(len(outputs) - 1)]
    loop = node("Loop", ["n", "true", "x", *passed], names, body=graph(nodes, inputs, described, **ONE))
    return file_of([loop], ROW, names, {**COUNT, **MANY, "w": WEIGHTS})


MIXED = [SAME, node("MatMul", ["v", "w_in"], ["p"]), node("Add", ["p", "x"], ["q"]), node("Sin", ["q"], ["v_next"]),
         node("Identity", ["w_in"], ["w_out"])]  # fmt: skip
ROUND = [SAME, node("Cast", ["i"], ["f"], to=1), node("Sin", ["f"], ["g"]), node("Add", ["v", "g"], ["v_next"]),
         node("Less", ["v", "x"], ["is_less"])]  # fmt: skip
WHILES: Mapping[str, bytes] = {
    "values that it passes through": counted(MIXED, ["c_next", "v_next", "w_out", "q"], ["w"]),
    "results of truths": counted(ROUND, ["c_next", "v_next", "is_less", "g"]),
}


@pytest.mark.parametrize("name", WHILES)
def test_a_loop_of_many_iterations_becomes_while(name: str) -> None:
    content = WHILES[name]
    assert [each.type.name for each in nnfmq.load(content).model.main.operations].count("WHILE") == 1
    assert_close(results(content, ROW), expected(content, ROW))


@pytest.mark.parametrize(("rows", "is_around"), [(300, True), (301, False)])
def test_products_of_a_sequence_s_elements_are_one_product_around_the_loop(rows: int, is_around: bool) -> None:
    """Unless that has more elements than there are iterations."""
    ramp = np.linspace(-1, 1, rows, dtype=np.float32).reshape(rows, 1, 1)
    cell = [
        node("Gather", ["sequence", "i"], ["element"]), node("MatMul", ["element", "w_in"], ["p"]),
        node("Add", ["p", "v"], ["q"]), node("Tanh", ["q"], ["v_next"]), node("Identity", ["w_in"], ["w_out"]),
    ]  # fmt: skip
    described = [info("c_next", BOOL, []), *(info(name, FLOAT, None) for name in ("v_next", "w_out", "p"))]
    inputs = [*HEAD, info("v", FLOAT, [1, 3]), info("w_in", FLOAT, None)]
    loop = node("Loop", ["n", "true", "x", "w"], ["y", "w_last", "all"], body=graph([SAME, *cell], inputs, described))
    constants = {**COUNT, **MANY, "w": WEIGHTS, "ramp": ramp}
    content = file_of([node("Mul", ["x", "ramp"], ["sequence"]), loop], ROW, ["y", "all"], constants)
    model = nnfmq.load(content).model
    products = [sum("MATMUL" in each.type.name or "FULLY_CONNECTED" in each.type.name for each in graph.operations)
                for graph in (model.main, *model.referenced)]  # fmt: skip
    assert products == ([1, 0, 0] if is_around else [0, 1, 0])
    assert_close(results(content, ROW), expected(content, ROW))


@pytest.mark.parametrize(
    "attributes",
    [{}, {"scan_input_directions": [1], "scan_output_directions": [1]}, {"scan_output_axes": [1]}],
    ids=str,
)
def test_a_scan_of_many_elements_becomes_while(attributes: dict[str, Any]) -> None:
    vector = [info(name, FLOAT, [2]) for name in ("sum", "element", "next", "out")]
    body = graph([node("Add", ["sum", "element"], ["next"]), node("Tanh", ["next"], ["out"])], vector[:2], vector[2:])
    scan = node("Scan", ["start", "x"], ["last", "all"], body=body, num_scan_inputs=1, **attributes)
    fed = {"x": RNG.uniform(-1, 1, (600, 2)).astype(np.float32)}
    content = file_of([scan], fed, ["last", "all"], {"start": np.float32([0.5, -0.5])})
    assert_close(results(content, fed), expected(content, fed))


@pytest.mark.parametrize("first", ["", "m"])
def test_a_condition_that_the_model_computes_ends_a_loop(first: str) -> None:
    body = graph(GROWS, [*HEAD, info("v", FLOAT, [1, 3])], [info("c_next", BOOL, []), info("v_next", FLOAT, [1, 3])],
                 half=np.float32(0.5))  # fmt: skip
    nodes = [
        *COMPUTED,
        node("Less", ["five", "x_top"], ["begins"]),
        node("Loop", [first, "begins", "x"], ["y"], body=body),
    ]
    content = file_of(nodes, ROW, ["y"], {**COUNT, "five": np.float32(5)})
    assert_close(results(content, ROW), expected(content, ROW))
    with nnfmq.connect(embedded=True) as client, client.prepare(nnfmq.load(content)) as model:
        assert_close(model.execute(*ROW.values()), expected(content, ROW))


def test_a_number_of_iterations_that_is_an_input_is_respected() -> None:
    body = graph([SAME, *SCALED], [*HEAD, info("v", FLOAT, [1, 3])],
                 [info("c_next", BOOL, []), info("v_next", FLOAT, [1, 3])])  # fmt: skip
    fed = {**ROW, **STEPS}
    content = file_of([node("Loop", ["k", "", "x"], ["y"], body=body)], fed, ["y"])
    for count in (0, 1, 7):
        fed["k"] = np.array([count], np.int64)
        assert_close(results(content, fed), expected(content, fed))


@pytest.mark.parametrize(
    ("nodes", "outputs", "message"),
    [
        ([SAME, node("Concat", ["v", "x"], ["v_next"], axis=0)], ["c_next", "v_next"], "is float32 of the shape"),
        ([SAME, *SCALED], ["c_next", "v_next", "w"], "a result's size, depends on the model's inputs"),
    ],
)
def test_a_size_that_the_number_of_iterations_decides_is_refused(
    nodes: list[Any], outputs: list[str], message: str
) -> None:
    described = [info(outputs[0], BOOL, []), *(info(name, FLOAT, None) for name in outputs[1:])]
    body = graph(nodes, [*HEAD, info("v", FLOAT, [1, 3])], described)
    names = [f"y{place}" for place in range(len(outputs) - 1)]
    content = file_of([node("Loop", ["k", "", "x"], names, body=body)], {**ROW, **STEPS}, names)
    with pytest.raises(nnfmq.UnsupportedModel, match=message):
        nnfmq.load(content)


def test_equal_constants_of_subgraphs_are_stored_once() -> None:
    weights = RNG.uniform(-1, 1, (300, 300)).astype(np.float32)
    fed = {"x": np.ones((1, 300), np.float32)}
    branches = {
        f"{name}_branch": graph(
            [node("MatMul", ["x", "w"], ["product"]), node(operator, ["product"], ["out"])],
            [],
            [info("out", FLOAT, [1, 300])],
        )
        for name, operator in (("then", "Tanh"), ("else", "Neg"))
    }
    nodes = [node("ReduceMax", ["x"], ["top"], keepdims=0), node("Less", ["top", "five"], ["is_small"]),
             node("If", ["is_small"], ["y"], **branches)]  # fmt: skip
    content = file_of(nodes, fed, ["y"], {"w": weights, "five": np.float32(5)})
    assert weights.nbytes < len(nnfmq.load(content).model.operand_values) < 1.2 * weights.nbytes
    assert_close(results(content, fed), expected(content, fed))


def test_work_on_conditions_of_loops_is_limited() -> None:
    """The nodes are few, and the iterations many: time must not grow with their product."""
    chain = [node("Add", ["i" if at == 0 else f"s{at - 1}", "one"], [f"s{at}"]) for at in range(20_000)]
    ends = node("Less", ["i", "s19999"], ["c_next"])
    content = looped([*chain, ends, *SCALED], ["c_next", "v_next"], ["", "true", "x"])
    with pytest.raises(nnfmq.UnsupportedModel, match="take more than 40000 nodes to evaluate"):
        nnfmq.load(content)


def test_loops_in_loops_are_limited_together() -> None:
    def nested(depth: int) -> Any:
        inside = [node("Concat", ["v0", "x"], ["v_next"], axis=0)]
        if depth:
            inside = [node("Loop", ["hundred", "true", f"v{depth}"], [f"w{depth}"], body=nested(depth - 1))]
        names = [f"{name}{depth}" for name in ("i", "c", "v", "d")]
        head = [info(names[0], INT, []), info(names[1], BOOL, []), info(names[2], FLOAT, None)]
        tail = [info(names[3], BOOL, []), info(f"w{depth}" if depth else "v_next", FLOAT, None)]
        return graph([node("Identity", [names[1]], [names[3]]), *inside], head, tail)

    loop = node("Loop", ["hundred", "true", "x"], ["y"], body=nested(3))
    content = file_of([loop], ROW, ["y"], {**COUNT, "hundred": np.array(100, np.int64)})
    with pytest.raises(nnfmq.UnsupportedModel, match="is float32 of the shape"):
        nnfmq.load(content)
