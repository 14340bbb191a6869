"""Names of an ONNX model: which function a node calls, where a name is defined, and which outputs are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.onnx_files import IR_VERSION, assert_close, expected, file_of, results
from support.onnx_runtime import onnx

import nnfmq

helper, node = onnx.helper, onnx.helper.make_node
X = np.random.default_rng(3).uniform(-2, 2, (2, 3)).astype(np.float32)
IMAGE = np.random.default_rng(4).uniform(-2, 2, (1, 2, 6, 6)).astype(np.float32)
TRUE, FALSE = np.array(True), np.array(False)


def file_with(nodes: Sequence[Any], functions: Sequence[Any] = (), opsets: Sequence[Any] = (), **rest: Any) -> bytes:
    """Return the file of a model with functions, the results `y` and `z` if there are any, and further opsets."""
    outputs = [name for name in ("y", "z") if any(name in each.output for each in nodes)]
    inputs, constants = rest.pop("inputs", {"x": X}), rest.pop("constants", {})
    model = onnx.load_model_from_string(file_of(nodes, inputs, outputs, constants, **rest))
    model.functions.extend(functions)
    model.opset_import.extend([*opsets, helper.make_opsetid("own", 1)])
    model.ir_version = max(IR_VERSION, 10)  # the first with overloads
    content: bytes = model.SerializeToString()
    return content


def function(operator: str, domain: str = "own", name: str = "F", overload: str = "", opset: int = 17) -> Any:
    """Return a function of one node."""
    nodes, opsets = [node(operator, ["a"], ["b"])], [helper.make_opsetid("", opset)]
    return helper.make_function(domain, name, ["a"], ["b"], nodes, opsets, overload=overload)


def require_same(content: bytes, **fed: Any) -> None:
    assert_close(results(content, fed or {"x": X}), expected(content, fed or {"x": X}))


def test_functions_of_one_name_go_by_their_overload() -> None:
    calls = [node("F", ["x"], ["t"], domain="own"), node("F", ["t"], ["y"], domain="own", overload="second")]
    require_same(file_with(calls, [function("Relu"), function("Neg", overload="second")]))


def test_two_functions_of_one_name_and_overload_are_refused() -> None:
    content = file_with([node("F", ["x"], ["y"], domain="own")], [function("Relu"), function("Neg")])
    with pytest.raises(nnfmq.InvalidArgument, match="two functions 'F'"):
        nnfmq.load(content)


def test_an_operator_of_onnx_is_no_function_of_its_name() -> None:
    require_same(file_with([node("Relu", ["x"], ["y"])], [function("Neg", domain="", name="Relu")]))


def test_a_function_has_an_opset_in_which_its_operators_are_those_of_the_model() -> None:
    call = [node("F", ["x"], ["y"], domain="own")]
    require_same(file_with(call, [function("Relu", opset=13)]))
    require_same(file_with(call, [function("Softmax", opset=13)]))
    with pytest.raises(nnfmq.UnsupportedModel, match="of opset 11, in which Softmax is not that of 17"):
        nnfmq.load(file_with(call, [function("Softmax", opset=11)]))


@pytest.mark.parametrize("versions", [(17, 11), (11, 17)])
def test_two_opsets_of_onnx_are_refused(versions: tuple[int, int]) -> None:
    first, second = versions
    content = file_with([node("Softmax", ["x"], ["y"])], opset=first, opsets=[helper.make_opsetid("ai.onnx", second)])
    with pytest.raises(nnfmq.UnsupportedModel, match=f"opsets {first} and {second} of ONNX"):
        nnfmq.load(content)


def branch(*nodes: Any, output: str = "r", **constants: Any) -> Any:
    """Return a graph without inputs."""
    stored = [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()]
    return helper.make_graph(nodes, "branch", [], [helper.make_tensor_value_info(output, 1, None)], stored)


def selection(then: Any, otherwise: Any) -> Any:
    return node("If", ["c"], ["y"], then_branch=then, else_branch=otherwise)


NEGATED = branch(node("Neg", ["x"], ["r"]))
REDEFINED = {
    "two nodes": [node("Relu", ["x"], ["t"]), node("Neg", ["x"], ["t"]), node("Abs", ["t"], ["y"])],
    "a node and an input": [node("Relu", ["x"], ["t"]), node("Neg", ["t"], ["x"]), node("Abs", ["x"], ["y"])],
    "a node and a constant": [node("Relu", ["x"], ["c"]), node("Abs", ["c"], ["y"])],
    "a branch's node": [node("Exp", ["x"], ["t"]), selection(branch(node("Relu", ["x"], ["t"]), output="t"), NEGATED)],
    "a branch's constant": [
        node("Exp", ["x"], ["t"]),
        selection(branch(node("Add", ["x", "t"], ["r"]), t=X), NEGATED),
        node("Add", ["t", "y"], ["z"]),
    ],
}


@pytest.mark.parametrize("nodes", REDEFINED.values(), ids=REDEFINED)
def test_a_name_that_is_defined_twice_is_refused(nodes: list[Any]) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match="is defined twice"):
        nnfmq.load(file_with(nodes, constants={"c": TRUE}))


def test_functions_too_define_a_name_once() -> None:
    twice = function("Relu")
    twice.node.append(node("Neg", ["a"], ["b"]))
    with pytest.raises(nnfmq.InvalidArgument, match="'b' is defined twice"):
        nnfmq.load(file_with([node("F", ["x"], ["y"], domain="own")], [twice]))


@pytest.mark.parametrize("is_constant", [True, False])
@pytest.mark.parametrize("condition", [TRUE, FALSE])
def test_branches_have_names_of_their_own(condition: Any, is_constant: bool) -> None:
    then = branch(node("Relu", ["x"], ["t"]), node("Add", ["t", "w"], ["r"]), w=3 * X)
    otherwise = branch(node("Exp", ["x"], ["t"]), node("Sub", ["t", "w"], ["r"]), w=5 * X)
    later = [node("Abs", ["y"], ["t"]), node("Sin", ["x"], ["w"]), node("Sub", ["t", "w"], ["z"])]
    fed = {"x": X} if is_constant else {"x": X, "c": condition}
    constants = {"c": condition} if is_constant else {}
    require_same(file_with([selection(then, otherwise), *later], inputs=fed, constants=constants), **fed)


def test_the_inputs_of_a_loop_s_body_hide_what_is_around_it() -> None:
    infos = [helper.make_tensor_value_info(*info) for info in (("i", 7, []), ("going", 9, []), ("x", 1, None))]
    results = [helper.make_tensor_value_info(*info) for info in (("goes", 9, []), ("next", 1, None))]
    body = [node("Add", ["x", "w"], ["next"]), node("Identity", ["going"], ["goes"])]
    loop = node("Loop", ["n", "", "x"], ["y"], body=helper.make_graph(body, "body", infos, results))
    require_same(file_with([node("Exp", ["x"], ["w"]), loop], constants={"n": np.array(3)}))


def test_nodes_may_be_in_any_order() -> None:
    nodes = [node("Add", ["t", "w"], ["y"]), node("Neg", ["u"], ["t"]), node("Relu", ["x"], ["u"])]
    require_same(file_with(nodes, constants={"w": X}))
    own = [branch(node(operator, ["x"], ["t"]), output="t") for operator in ("Relu", "Neg")]
    nodes = [node("Add", ["t", "x"], ["z"]), node("Abs", ["y"], ["t"]), selection(*own)]
    require_same(file_with(nodes, inputs={"x": X, "c": TRUE}), x=X, c=TRUE)


def test_a_graph_with_a_cycle_is_refused() -> None:
    nodes = [node("Add", ["t", "x"], ["u"]), node("Relu", ["u"], ["t"]), node("Neg", ["u"], ["y"])]
    with pytest.raises(nnfmq.UnsupportedModel, match="'t' is the result of no earlier node"):
        nnfmq.load(file_with(nodes))


UNREAD: dict[str, tuple[Any, dict[str, Any]]] = {
    "MaxPool": (node("MaxPool", ["x"], ["y", "indices"], kernel_shape=[2, 2]), {}),
    "LayerNormalization": (node("LayerNormalization", ["x", "s"], ["y", "m", "v"]), {"s": np.ones(6, np.float32)}),
    "TopK": (node("TopK", ["x", "k"], ["values", "z"]), {"k": np.array([2])}),
}


@pytest.mark.parametrize("name", UNREAD)
def test_outputs_that_nothing_reads_need_no_support(name: str) -> None:
    call, constants = UNREAD[name]
    require_same(file_with([call], inputs={"x": IMAGE}, constants=constants), x=IMAGE)


def test_an_output_that_only_a_branch_reads_is_read() -> None:
    pool = node("MaxPool", ["x"], ["t", "indices"], kernel_shape=[2, 2])
    then = branch(node("Cast", ["indices"], ["r"], to=1))
    content = file_with([pool, selection(then, branch(node("Neg", ["t"], ["r"])))], inputs={"x": IMAGE, "c": TRUE})
    with pytest.raises(nnfmq.UnsupportedModel, match="the output of indices is not supported"):
        nnfmq.load(content)
