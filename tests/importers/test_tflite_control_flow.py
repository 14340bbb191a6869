"""IF and WHILE of .tflite files: subgraphs become referenced subgraphs of the model, with LiteRT's results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.both_runners import Theirs, ours
from support.tflite_files import Operator, Tensor, floats, ints, writer

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers import load

Subgraph: Any = writer.Subgraph
X = Tensor("x", (2, 3))
ADD, MUL = (("ADD", "AddOptions"), ("MUL", "MulOptions"))


def binary(name: tuple[str, str]) -> Any:
    """Return a subgraph of one operator on two inputs."""
    operator = Operator(name[0], (0, 1), (2,), name[1])
    return Subgraph([X, Tensor("y", (2, 3)), Tensor("z", (2, 3))], [operator], (0, 1), (2,))


def branching(then: Any, otherwise: Any, options: tuple[int, int] = (1, 2)) -> bytes:
    """Return IF(c, x, y) of two subgraphs."""
    tensors = [Tensor("c", (), "BOOL"), X, Tensor("y", (2, 3)), Tensor("z", (2, 3))]
    fields = {"ThenSubgraphIndex": options[0], "ElseSubgraphIndex": options[1]}
    operator = Operator("IF", (0, 1, 2), (3,), "IfOptions", fields)
    content: bytes = writer.write(tensors, [operator], (0, 1, 2), (3,), more=[then, otherwise])
    return content


@pytest.mark.parametrize("truth", [False, True])
def test_if_takes_a_branch_by_the_condition(truth: bool) -> None:
    content = branching(binary(ADD), binary(MUL))
    x, y = np.arange(6, dtype=np.float32).reshape(2, 3), np.full((2, 3), 5, np.float32)
    (found,) = ours(content)([np.array([truth]), x, y])
    np.testing.assert_array_equal(found, Theirs(content)([np.array(truth), x, y])[0])
    np.testing.assert_array_equal(found, x + y if truth else x * y)


def test_a_branch_may_return_its_input() -> None:
    content = branching(binary(ADD), Subgraph([X, Tensor("y", (2, 3))], [], (0, 1), (1,)))
    x, y = np.zeros((2, 3), np.float32), np.full((2, 3), 5, np.float32)
    (found,) = ours(content)([np.array([False]), x, y])
    np.testing.assert_array_equal(found, y)


@pytest.mark.parametrize("truth", [False, True])
def test_branches_have_constants_that_they_are_given(truth: bool) -> None:
    """So kernels compute products with weights of the caller."""
    given = [Tensor("x", (2, 3)), Tensor("w", (4, 3)), Tensor("b", (4,)), Tensor("z", (2, 4))]
    options = {"FusedActivationFunction": 1}
    dense = [Operator("FULLY_CONNECTED", (0, 1, 2), (3,), "FullyConnectedOptions", each) for each in ({}, options)]
    branches = [Subgraph(given, [operator], (0, 1, 2), (3,)) for operator in dense]
    weights = [Tensor("w", (4, 3), data=floats(4, 3)), Tensor("b", (4,), data=floats(4))]
    operator = Operator("IF", (0, 1, 2, 3), (4,), "IfOptions", {"ThenSubgraphIndex": 1, "ElseSubgraphIndex": 2})
    tensors = [Tensor("c", (), "BOOL"), given[0], *weights, given[3]]
    content: bytes = writer.write(tensors, [operator], (0, 1), (4,), more=branches)
    model = load(content).model
    assert [len(model.main.operations[0].inputs), *(len(each.input_indexes) for each in model.referenced)] == [4, 1, 1]
    x = np.arange(6, dtype=np.float32).reshape(2, 3) - 3
    (found,) = ours(content)([np.array([truth]), x])
    np.testing.assert_allclose(found, Theirs(content)([np.array(truth), x])[0], 1e-6)


def looping(limit: int = 5) -> bytes:
    """Return a WHILE over a counter i, a sum and a factor: while i < limit, add factor · COS(sum) to the sum."""
    counter = Tensor("i", (), "INT32")
    loop = [counter, X, Tensor("factor", (2, 3))]
    condition = Subgraph(
        [*loop, Tensor("limit", (), "INT32", ints(limit)), Tensor("more", (), "BOOL")],
        [Operator("LESS", (0, 3), (4,))], (0, 1, 2), (4,),
    )  # fmt: skip
    body = Subgraph(
        [*loop, Tensor("one", (), "INT32", ints(1)), Tensor("next", (), "INT32"), Tensor("cos", (2, 3)),
            Tensor("step", (2, 3)), Tensor("sum", (2, 3))],
        [
            Operator("ADD", (0, 3), (4,), "AddOptions"), Operator("COS", (1,), (5,)),
            Operator("MUL", (5, 2), (6,), "MulOptions"), Operator("ADD", (1, 6), (7,), "AddOptions"),
        ],
        (0, 1, 2), (4, 7, 2),
    )  # fmt: skip
    results = [Tensor("i'", (), "INT32"), Tensor("x'", (2, 3)), Tensor("factor'", (2, 3))]
    start = Tensor("start", (), "INT32", ints(0))
    options = {"CondSubgraphIndex": 1, "BodySubgraphIndex": 2}
    operator = Operator("WHILE", (0, 1, 2), (3, 4, 5), "WhileOptions", options)
    content: bytes = writer.write([start, *loop[1:], *results], [operator], (1, 2), (3, 4), more=[condition, body])
    return content


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_while_runs_its_body_until_the_condition_is_false(limit: int) -> None:
    content = looping(limit)
    x, factor = np.arange(6, dtype=np.float32).reshape(2, 3), np.full((2, 3), 0.25, np.float32)
    count, total = ours(content)([x, factor])
    expected = Theirs(content)([x, factor])
    assert count.tolist() == limit == int(expected[0])
    np.testing.assert_allclose(total, expected[1], rtol=1e-6)


def test_equal_subgraphs_share_the_bytes_of_constants() -> None:
    weights = Tensor("w", (2, 3), data=floats(2, 3))
    branch = Subgraph([X, Tensor("y", (2, 3)), weights, Tensor("z", (2, 3))],
        [Operator("ADD", (0, 2), (3,), "AddOptions")], (0, 1), (3,))  # fmt: skip
    loaded = load(branching(branch, branch, (1, 1)))
    assert len(loaded.model.referenced) == 2


def nested(depth: int) -> bytes:
    """Return an IF whose branches call subgraph 1, which calls itself, or `depth` subgraphs."""
    tensors = [Tensor("c", (), "BOOL"), X, Tensor("z", (2, 3))]

    def call(index: int) -> Any:
        fields = {"ThenSubgraphIndex": index, "ElseSubgraphIndex": index}
        return Subgraph(tensors, [Operator("IF", (0, 0, 1), (2,), "IfOptions", fields)], (0, 1), (2,))

    graphs = [call(min(number + 2, depth)) for number in range(depth)]
    first = call(1)
    content: bytes = writer.write(tensors, first.operators, (0, 1), (2,), more=graphs)
    return content


@pytest.mark.parametrize("depth", [1, 40])
def test_endless_or_deep_calls_are_rejected(depth: int) -> None:
    with pytest.raises(InvalidArgument, match="more than 64 subgraphs are called, or deeper than 8"):
        load(nested(depth))


def rejected() -> Sequence[tuple[str, bytes, str]]:
    other = Subgraph([X, Tensor("y", (2, 3)), Tensor("z", (3, 2)), Tensor("s", (2,), "INT32", ints(3, 2))],
        [Operator("RESHAPE", (0, 3), (2,))], (0, 1), (2,))  # fmt: skip
    unknown = Subgraph([X, Tensor("y", (2, 3)), Tensor("z", (2, 3))], [Operator("SKIP_GRAM", (0,), (2,))], (0, 1), (2,))
    few = Subgraph([X, Tensor("z", (2, 3))], [Operator("COS", (0,), (1,))], (0,), (1,))
    typed = Subgraph([Tensor("x", (2, 3), "INT32"), Tensor("y", (2, 3)), Tensor("z", (2, 3))],
        [Operator("COS", (1,), (2,))], (0, 1), (2,))  # fmt: skip
    return [
        ("shapes", branching(binary(ADD), other), "its branches differ in number, type, shape"),
        ("operator", branching(binary(ADD), unknown), r"subgraph 2: operator 0 \(SKIP_GRAM\): is not supported"),
        ("inputs", branching(binary(ADD), few), "2 values for a subgraph of 1 inputs"),
        ("type", branching(binary(ADD), typed), "gets a value of another type"),
        ("index", branching(binary(ADD), few, (1, 7)), r"subgraph 7 is not in 0\.\.2"),
    ]


@pytest.mark.parametrize(("content", "reason"), [case[1:] for case in rejected()], ids=[case[0] for case in rejected()])
def test_subgraphs_that_do_not_fit_are_a_problem_of_the_operator(content: bytes, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"operator 0 \(IF\): .*{reason}"):
        load(content)
