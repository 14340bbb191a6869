"""Signatures of .tflite files as models: their subgraphs, and the names and the order of their inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.stateful_models import handle
from support.tflite_files import Operator, Tensor, writer

import nnfmq
from nnfmq.cli import main
from nnfmq.hal.errors import InvalidArgument, UnsupportedModel

PLAIN = {"FusedActivationFunction": 0}


def elementwise(name: str, first: int, second: int, result: int) -> Any:
    return Operator(name, (first, second), (result,), f"{name.title()}Options", PLAIN)


def content() -> bytes:
    """Return a file with x + y in its first subgraph, and in the second the state s = s + x, and s - y.

    "total" names the first one's inputs in another order than the file has them; "steps" is the second one.
    """
    tensors = [Tensor("x", (1, 2)), Tensor("y", (1, 2)), Tensor("sum", (1, 2))]
    zeros, ones = np.zeros(2, np.float32).tobytes(), np.eye(2, dtype=np.float32).tobytes()
    second = writer.Subgraph(
        [*tensors, Tensor("w", (2, 2), data=ones), Tensor("b", (2,), data=zeros),
         Tensor("s", (1, 2), extra={"IsVariable": 1}), Tensor("after", (1, 2))],
        [Operator("RNN", (0, 3, 3, 4, 5), (6,), "RNNOptions", PLAIN), elementwise("SUB", 6, 1, 2)],
        (0, 1), (6, 2),
    )  # fmt: skip
    signatures = [
        writer.Signature("total", {"left": 1, "right": 0}, {"total": 2}, 0),
        writer.Signature("steps", {"x": 0, "y": 1}, {"difference": 2, "sum": 6}, 1),
    ]
    made: bytes = writer.write(
        tensors, [elementwise("ADD", 0, 1, 2)], (0, 1), (2,), more=[second], signatures=signatures
    )
    return made


def counting(initial: bool) -> bytes:
    """Return a file with two signatures of the variable v = v + x; with `initial`, v begins with 5 in both."""
    tensors = [Tensor("a", (), "RESOURCE"), Tensor("x", (1, 2)), Tensor("old", (1, 2)), Tensor("y", (1, 2))]
    first = [Operator("CALL_ONCE", (), (), "CallOnceOptions", {"InitSubgraphIndex": 2})] if initial else []
    operators = [
        *first,
        handle("a"),
        Operator("READ_VARIABLE", (0,), (2,)),
        elementwise("ADD", 2, 1, 3),
        Operator("ASSIGN_VARIABLE", (0, 3), ()),
    ]
    fives = Tensor("five", (1, 2), data=np.float32([[5, 5]]).tobytes())
    more = [
        writer.Subgraph(tensors, operators, (1,), (3,)),
        writer.Subgraph([tensors[0], fives], [handle("a"), Operator("ASSIGN_VARIABLE", (0, 1), ())], (), ()),
    ]
    signatures = [writer.Signature(name, {"x": 1}, {"y": 3}, index) for index, name in enumerate(("one", "other"))]
    made: bytes = writer.write(tensors, operators, (1,), (3,), more=more, signatures=signatures)
    return made


def test_signatures_are_prepared_and_executed_by_their_names() -> None:
    x, y = np.float32([[1, 2]]), np.float32([[3, 5]])
    with nnfmq.connect(embedded=True) as client:
        with client.prepare(content(), signature="total") as total:
            assert total({"left": y, "right": x})["total"].tolist() == [[4, 7]]
        with client.device("reference").prepare(memoryview(content()), signature="steps") as steps:
            for state in (x, 2 * x):
                result = steps({"y": y, "x": x})
                assert result.names == ("difference", "sum")
                assert result["sum"].tolist() == state.tolist()
                assert result["difference"].tolist() == (state - y).tolist()
        with pytest.raises(InvalidArgument, match=r"there is no signature 'totl'; .*did you mean 'total'"):
            client.prepare(content(), signature="totl")


def names(infos: Sequence[nnfmq.TensorInfo]) -> list[str]:
    return [info.name for info in infos]


def test_a_signature_is_a_model_with_its_names_in_its_order() -> None:
    file = nnfmq.load(content())
    assert file.signatures == ("total", "steps")
    assert (names(file.inputs), names(file.outputs)) == (["x", "y"], ["sum"])
    total, steps = (nnfmq.load(content(), signature=key) for key in file.signatures)
    assert (names(total.inputs), names(total.outputs)) == (["left", "right"], ["total"])
    assert (names(steps.inputs), names(steps.outputs), len(steps.states)) == (["x", "y"], ["difference", "sum"], 1)
    assert total.signatures == steps.signatures == file.signatures


def test_a_variable_of_two_signatures_is_a_state_of_each() -> None:
    x = np.float32([[1, 2]])
    one, other = (nnfmq.load(counting(initial=True), signature=key) for key in ("one", "other"))
    with (
        nnfmq.connect(embedded=True) as client,
        client.prepare(one) as first,
        client.prepare(other) as second,
        first.burst() as count,
        second.burst() as count_apart,
    ):
        assert [count.execute(x)[0].tolist() for _ in range(2)] == [[[6, 7]], [[7, 9]]]
        assert count_apart.execute(x)[0].tolist() == [[6, 7]]


def test_a_variable_that_another_signature_would_have_to_assign_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"READ_VARIABLE.*variable 'a' is read before a value is assigned to it"):
        nnfmq.load(counting(initial=False), signature="other")


def test_signatures_run_beside_each_other_in_one_driver_each_with_its_state() -> None:
    x, y = np.float32([[1, 2]]), np.float32([[10, 30]])
    total, steps = (nnfmq.load(content(), signature=key) for key in ("total", "steps"))
    with (
        nnfmq.connect(embedded=True) as client,
        client.prepare(total) as adding,
        client.prepare(steps) as stepping,
        adding.burst() as add,
        stepping.burst() as step,
    ):
        for number in range(1, 4):
            np.testing.assert_array_equal(add.execute(y, x)[0], x + y)
            difference, after = (result.copy() for result in step.execute(x, y))
            np.testing.assert_array_equal(after, number * x)
            np.testing.assert_array_equal(difference, number * x - y)


def test_inputs_of_a_signature_are_resized_by_its_names() -> None:
    batch = nnfmq.load(content(), signature="total", shapes={"left": (3, 2), 1: (3, 2)})
    assert [info.shape for info in (*batch.inputs, *batch.outputs)] == [(3, 2)] * 3


def test_a_signature_that_the_file_lacks_is_rejected_with_those_that_it_has() -> None:
    with pytest.raises(InvalidArgument, match="no signature 'train'; those of the file: 'total', 'steps'"):
        nnfmq.load(content(), signature="train")
    with pytest.raises(InvalidArgument, match="those of the file: none"):
        nnfmq.load(nnfmq.example_path("digits.tflite"), signature="train")


def test_onnx_files_have_no_signatures() -> None:
    helper = pytest.importorskip("onnx", reason="onnx is not installed").helper
    value = [helper.make_tensor_value_info(name, 1, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", value[:1], value[1:])
    with pytest.raises(InvalidArgument, match="only TensorFlow Lite files have signatures"):
        nnfmq.load(helper.make_model(graph).SerializeToString(), signature="s")


def test_nnfmq_run_takes_a_signature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, inputs = tmp_path / "two.tflite", []
    path.write_bytes(content())
    for name, value in (("x", 2.0), ("y", 0.5)):
        np.save(tmp_path / f"{name}.npy", np.full((1, 2), value, np.float32))
        inputs += ["--input", str(tmp_path / f"{name}.npy")]
    assert main(["run", str(path), "--signature", "steps", "--device", "reference", *inputs]) == 0
    assert "1.5000" in capsys.readouterr().out  # the first output
    assert main(["run", str(path), "--signature", "train", *inputs]) != 0
    assert "those of the file: 'total', 'steps'" in " ".join(capsys.readouterr().err.split())
