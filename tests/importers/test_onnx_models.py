"""ONNX models of several nodes: shapes, folded arithmetic, external data, what is refused, and corrupt files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.onnx_files import IR_VERSION, OPSET, assert_close, expected, file_of, results
from support.onnx_runtime import onnx

import nnfmq
from nnfmq.hal.errors import InvalidArgument, UnsupportedModel
from nnfmq.importers import load, load_source
from nnfmq.importers.file_format import ModelSource

RNG = np.random.default_rng(4)
node = onnx.helper.make_node


def real(*shape: int) -> Any:
    return RNG.uniform(-1, 1, shape).astype(np.float32)


def convolution() -> tuple[bytes, dict[str, Any]]:
    """Return a small classifier whose reshape computes the batch from its input."""
    nodes = [
        node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"]),
        node("Shape", ["r"], ["s"]),
        node("Gather", ["s", "zero"], ["batch"]),
        node("Unsqueeze", ["batch", "axes"], ["head"]),
        node("Concat", ["head", "rest"], ["shape"], axis=0),
        node("Reshape", ["r", "shape"], ["flat"]),
        node("Softmax", ["flat"], ["y"]),
    ]
    constants = {"w": real(3, 2, 3, 3), "zero": np.array(0), "axes": np.array([0]), "rest": np.array([-1])}
    fed = {"x": real(2, 2, 4, 4)}
    return file_of(nodes, fed, ["y"], constants), fed


def symbolic(*shape: Any) -> Any:
    """Return a model that adds 1 to its input, which has symbolic dimensions."""
    info = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, list(shape))
    second = onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, [shape[0]])
    output = onnx.helper.make_empty_tensor_value_info("y")
    nodes = [node("Add", ["x", "one"], ["t"]), node("ReduceSum", ["z"], ["u"]), node("Mul", ["t", "u"], ["y"])]
    one = onnx.numpy_helper.from_array(np.float32([1]), "one")
    graph = onnx.helper.make_graph(nodes, "graph", [info, second], [output], [one])
    opsets = [onnx.helper.make_opsetid("", OPSET)]
    return onnx.helper.make_model(graph, ir_version=IR_VERSION, opset_imports=opsets)


def test_arithmetic_on_shapes_leaves_only_constants() -> None:
    content, fed = convolution()
    kinds = [operation.type.name for operation in load(content).model.main.operations]
    assert kinds == ["CONV_2D", "RESHAPE", "SOFTMAX"]
    assert_close(results(content, fed), expected(content, fed))


def test_inputs_and_outputs_keep_their_names_and_int64_becomes_int32() -> None:
    loaded = load(file_of([node("ArgMax", ["x"], ["best"], axis=1)], {"x": real(2, 3)}, ["best"]))
    assert [(info.name, info.shape, info.dtype) for info in loaded.inputs] == [("x", (2, 3), "float32")]
    assert [(info.name, info.shape, info.dtype) for info in loaded.outputs] == [("best", (2, 1), "int32")]


def test_an_unknown_symbolic_dimension_is_named() -> None:
    with pytest.raises(
        InvalidArgument, match=r"input 'x' is \(batch, 3\); input 'z' is \(batch\); give them as `shapes`, for "
    ):
        load(symbolic("batch", 3).SerializeToString())


def conditional(condition: Any) -> tuple[bytes, dict[str, Any]]:
    """Return a model whose If has branches with constants and results of their own, and of the graph around it."""

    def branch(operator: str) -> Any:
        nodes = [node(operator, ["x", "k"], ["t"]), node("Add", ["t", "outer"], ["u"])]
        constant = onnx.numpy_helper.from_array(np.float32([2]), "k")
        return onnx.helper.make_graph(nodes, operator, [], [onnx.helper.make_empty_tensor_value_info("u")], [constant])

    nodes = [
        node("Abs", ["x"], ["outer"]),
        node("If", ["condition"], ["a"], then_branch=branch("Mul"), else_branch=branch("Sub")),
        node("Not", ["condition"], ["other"]),
        node("If", ["other"], ["b"], then_branch=branch("Mul"), else_branch=branch("Sub")),
        node("Mul", ["a", "b"], ["y"]),
    ]
    fed = {"x": real(2, 3)}
    return file_of(nodes, fed, ["y"], {"condition": np.array(condition)}), fed


@pytest.mark.parametrize("condition", [True, False])
def test_an_if_whose_condition_is_a_constant_becomes_its_branch(condition: bool) -> None:
    content, fed = conditional(condition)
    assert_close(results(content, fed), expected(content, fed))


def graph_of(nodes: list[Any], outputs: list[str], **constants: Any) -> Any:
    infos = [onnx.helper.make_empty_tensor_value_info(name) for name in outputs]
    initializers = [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()]
    return onnx.helper.make_graph(nodes, "branch", [], infos, initializers)


def selecting(then: Any, otherwise: Any, fed: dict[str, Any], outputs: list[str]) -> bytes:
    """Return a model that takes the first branch if the mean of x is positive."""
    nodes = [
        node("Abs", ["x"], ["outer"]),
        node("ReduceMean", ["x"], ["mean"], keepdims=0),
        node("Greater", ["mean", "zero"], ["condition"]),
        node("If", ["condition"], outputs, then_branch=then, else_branch=otherwise),
    ]
    return file_of(nodes, fed, outputs, {"zero": np.float32(0), "k": real(3)})


@pytest.mark.parametrize("sign", [1, -1])
def test_an_if_whose_condition_is_computed_takes_that_branch(sign: int) -> None:
    fed = {"x": sign * (real(2, 3) + 2), "n": np.array([4, -5], np.int64)}
    inner = node(
        "If",
        ["flag"],
        ["a"],
        then_branch=graph_of([node("Mul", ["outer", "k"], ["m"])], ["m"]),
        else_branch=graph_of([node("Sub", ["x", "own"], ["m"])], ["m"], own=real(3)),
    )
    flagged = [node("ReduceMax", ["n"], ["top"], keepdims=0), node("Less", ["top", "limit"], ["flag"]), inner]
    then = graph_of([*flagged, node("Neg", ["n"], ["b"])], ["a", "b"], limit=np.array(0))
    copied = node("Identity", ["n"], ["b"])  # a value from outside
    otherwise = graph_of([node("Add", ["x", "k"], ["a"]), copied], ["a", "b"])
    content = selecting(then, otherwise, fed, ["y", "z"])
    assert [operation.type.name for operation in load(content).model.main.operations][-1] == "IF"
    assert_close(results(content, fed), expected(content, fed))


@pytest.mark.parametrize("sign", [1, -1])
def test_branches_may_be_constants(sign: int) -> None:
    fed = {"x": sign * (real(2, 3) + 2)}
    content = selecting(graph_of([], ["c"], c=real(2)), graph_of([], ["d"], d=real(2)), fed, ["y"])
    assert_close(results(content, fed), expected(content, fed))


def test_branches_of_a_computed_if_whose_results_differ_in_shape_are_refused() -> None:
    fed = {"x": real(2, 3)}
    content = selecting(graph_of([], ["c"], c=real(2)), graph_of([], ["d"], d=real(3)), fed, ["y"])
    with pytest.raises(UnsupportedModel, match="the results of its branches differ"):
        load(content)


def test_problems_in_the_branches_of_a_computed_if_are_listed() -> None:
    fed = {"x": real(2, 2)}
    branches = [
        graph_of([node(operator, ["x"], ["c"])], ["c"]) for operator in ("RandomUniformLike", "StringNormalizer")
    ]
    with pytest.raises(UnsupportedModel, match=r"(?s)RandomUniformLike.*StringNormalizer"):
        load(selecting(*branches, fed, ["y"]))


def test_the_depth_of_computed_ifs_is_limited() -> None:
    graph = graph_of([node("Neg", ["x"], ["r"])], ["r"])
    for _ in range(9):
        graph = graph_of([node("If", ["condition"], ["r"], then_branch=graph, else_branch=graph)], ["r"])
    with pytest.raises(UnsupportedModel, match="nested more than 8 deep"):
        load(selecting(graph, graph, {"x": real(2, 3)}, ["y"]))


def test_dimensions_that_are_named_by_a_question_mark_may_differ() -> None:
    loaded = load(symbolic("?", "?").SerializeToString(), shapes={"x": (4, 3), "z": (5,)})
    assert [info.shape for info in loaded.inputs] == [(4, 3), (5,)]


def test_a_symbolic_dimension_has_the_size_that_one_input_gives_it() -> None:
    loaded = load(symbolic("batch", 3).SerializeToString(), shapes={"x": (4, 3)})
    assert [info.shape for info in loaded.inputs] == [(4, 3), (4,)]


def test_contradicting_sizes_of_a_dimension_are_rejected() -> None:
    with pytest.raises(InvalidArgument, match="'batch' is 4 and also 5"):
        load(symbolic("batch", 3).SerializeToString(), shapes={"x": (4, 3), "z": (5,)})


def test_what_is_not_supported_names_the_values_and_shapes_for_which_it_is_not() -> None:
    nodes = [node("RandomUniformLike", ["x"], ["y"]), node("Add", ["n", "n"], ["z"])]
    content = file_of(nodes, {"x": real(2, 2), "n": np.float32(0)}, ["y"])
    source = ModelSource(content, shapes={"x": (2, 2)}, values={"n": np.float32(8000)})
    with pytest.raises(
        UnsupportedModel, match=r"RandomUniformLike.*; this is for 'x' of shape \(2, 2\), 'n' = 8000\.0$"
    ):
        load_source(source)


def test_all_operators_that_are_not_supported_are_listed() -> None:
    nodes = [
        node("RandomUniformLike", ["x"], ["a"], name="first"),
        node("Sin", ["x"], ["b"]),
        node("StringNormalizer", ["b"], ["c"]),
        node("Add", ["a", "c"], ["y"]),
    ]
    with pytest.raises(UnsupportedModel) as raised:
        load(file_of(nodes, {"x": real(2, 2)}, ["y"]))
    assert [(problem.index, problem.operator) for problem in raised.value.problems] == [
        (0, "RandomUniformLike"),
        (2, "StringNormalizer"),
    ]
    assert "'first'" in str(raised.value) and "float32" in str(raised.value)


def test_an_attribute_that_the_importer_does_not_know_is_rejected() -> None:
    with pytest.raises(UnsupportedModel, match="opset 17 has no attribute 'future'"):
        load(file_of([node("Relu", ["x"], ["y"], future=1)], {"x": real(2)}, ["y"]))


def test_sequences_of_another_rank_are_refused_with_their_shape() -> None:
    for operator, gates in (("LSTM", 4), ("GRU", 3)):
        constants = {"w": real(1, 4 * gates, 3), "r": real(1, 4 * gates, 4)}
        nodes = [node(operator, ["x", "w", "r"], ["y"], hidden_size=4)]
        with pytest.raises(UnsupportedModel, match=r"of the shapes \(2, 3\), "):
            load(file_of(nodes, {"x": real(2, 3)}, ["y"], constants))


def test_a_large_constant_is_refused_before_it_is_computed() -> None:
    nodes = [node("ConstantOfShape", ["c"], ["big"]), node("Add", ["x", "big"], ["y"])]
    content = file_of(nodes, {"x": real(1)}, ["y"], {"c": np.int64([1 << 20, 1 << 20])})
    with pytest.raises(UnsupportedModel, match="1099511627776 elements"):
        load(content)


@pytest.mark.parametrize(
    ("operator", "constants"),
    [
        ("ScatterElements", (real(9000), RNG.permutation(9000), real(9000))),
        ("Mul", (real(9000), real(9000))),
        ("Where", (real(9000) > 0, real(9000), real(1))),
    ],
)
def test_constants_of_the_size_of_their_result_are_folded(operator: str, constants: Any) -> None:
    names = [f"c{place}" for place in range(len(constants))]
    nodes = [node(operator, names, ["folded"]), node("Add", ["x", "folded"], ["y"])]
    fed = {"x": real(9000)}
    content = file_of(nodes, fed, ["y"], dict(zip(names, constants, strict=True)))
    assert [operation.type.name for operation in load(content).model.main.operations] == ["ADD"]
    assert_close(results(content, fed), expected(content, fed))


@pytest.mark.parametrize(
    ("operator", "constants"),
    [
        ("Add", (real(5000, 1), real(1, 5000))),
        ("Gather", (real(2, 5000), np.zeros(5000, np.int64))),
        ("NonZero", (np.ones((1, 1, 1, 5000, 1000), bool),)),
    ],
)
def test_a_result_that_is_larger_than_its_constants_is_refused(operator: str, constants: Any) -> None:
    names = [f"c{place}" for place in range(len(constants))]
    nodes = [node(operator, names, ["folded"]), node("Cast", ["folded"], ["f"], to=1), node("Add", ["x", "f"], ["y"])]
    with pytest.raises(UnsupportedModel, match=r"its constant result would have \d+ elements"):
        load(file_of(nodes, {"x": real(1)}, ["y"], dict(zip(names, constants, strict=True))))


def test_an_output_that_is_an_input_is_copied() -> None:
    x = real(2, 3)
    content = file_of([node("Identity", ["x"], ["y"])], {"x": x}, ["y"])
    np.testing.assert_array_equal(results(content, {"x": x})[0], x)


def test_external_data_are_read_from_the_folder_of_the_model(tmp_path: Path) -> None:
    content, _ = convolution()
    path = tmp_path / "model.onnx"
    model = onnx.load_model_from_string(content)
    onnx.save_model(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert load(path).model == load(content).model
    with pytest.raises(InvalidArgument, match="load the model from a path"):
        load(path.read_bytes())
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(InvalidArgument, match=r"model\.onnx: the external data of tensor"):
        load(path)


def test_prepare_takes_the_path_of_an_onnx_file(tmp_path: Path) -> None:
    content, fed = convolution()
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with nnfmq.connect(embedded=True) as client, client.prepare(path) as model:
        assert_close(model.execute(*fed.values()), expected(content, fed))


def test_a_corrupt_file_is_rejected_or_loaded_but_never_fails_otherwise() -> None:
    content, _ = convolution()
    rng, rejected = np.random.default_rng(9), 0
    for _ in range(300):
        corrupt = bytearray(content)
        for at in rng.integers(0, len(corrupt), 2):
            corrupt[at] = rng.integers(0, 256)
        try:
            load(bytes(corrupt[: rng.integers(len(corrupt) // 2, 2 * len(corrupt))]))
        except InvalidArgument:
            rejected += 1
    assert rejected > 100


def test_infinite_factors_do_not_warn() -> None:
    gemm = node("Gemm", ["x", "w", "b"], ["y"], beta=3e38)
    content = file_of([gemm], {"x": real(2, 3)}, ["y"], {"w": real(3, 4), "b": np.full(4, 1e38, np.float32)})
    assert np.isinf(results(content, {"x": real(2, 3)})[0]).all()


def test_axes_that_are_no_integers_are_rejected() -> None:
    content = file_of([node("ReduceSum", ["x", "a"], ["y"])], {"x": real(2)}, ["y"], {"a": np.complex64([1])})
    with pytest.raises(UnsupportedModel, match=r"input 1 \(axes\) has elements of complex64"):
        load(content)


def test_a_result_of_a_type_that_the_opset_does_not_have_is_rejected() -> None:
    content = file_of([node("Cast", ["x"], ["y"], to=onnx.TensorProto.BFLOAT16)], {"x": real(2)}, ["y"], opset=12)
    with pytest.raises(UnsupportedModel, match=r"\(Cast\).*unsupported type tensor\(bfloat16\)"):
        load(content)


@pytest.mark.parametrize("sizes", [(0, -2), (0, 1 << 40, 1 << 40)])
def test_sizes_that_no_array_has_are_rejected(sizes: tuple[int, ...]) -> None:
    content = file_of([node("Expand", ["x", "s"], ["y"])], {"x": real(1)}, ["y"], {"s": np.array(sizes)})
    with pytest.raises(UnsupportedModel, match=r"operator 0 \(Expand\)"):
        load(content)
