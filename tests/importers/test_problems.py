"""A model that cannot be imported: all its problems are listed at once, with operators, types, indexes and reasons."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tflite_files import Operator, Tensor, ints, writer

from nnfmq.cli import main
from nnfmq.hal.errors import InvalidArgument, ModelProblem, UnsupportedModel
from nnfmq.importers import load

X = Tensor("x", (1, 4))
TEXT = Tensor("c", (1, 4), "STRING")


def problems_of(data: bytes) -> UnsupportedModel:
    with pytest.raises(UnsupportedModel) as caught:
        load(data)
    return caught.value


def chain(*names: str, options: dict[int, tuple[str, dict[str, int]]] | None = None) -> bytes:
    """Return a model of operators with one input each, each of which reads the result of the one before."""
    tables = options or {}
    operators = [Operator(name, (i,), (i + 1,), *tables.get(i, ())) for i, name in enumerate(names)]
    data: bytes = writer.write([X] * (len(names) + 1), operators, (0,), (len(names),))
    return data


def test_every_operator_that_cannot_run_is_listed_and_no_other() -> None:
    error = problems_of(chain("CONCAT_EMBEDDINGS", "RELU", "My_op", "TANH", "CONCAT_EMBEDDINGS"))
    assert error.problems == (
        ModelProblem(0, "CONCAT_EMBEDDINGS", "FLOAT32 → FLOAT32", "is not supported"),
        ModelProblem(2, "CUSTOM 'My_op'", "FLOAT32 → FLOAT32", "is not supported"),
        ModelProblem(4, "CONCAT_EMBEDDINGS", "FLOAT32 → FLOAT32", "is not supported"),
    )
    assert str(error).splitlines() == [
        "3 operators are not supported:",
        "  operators 0, 4 (CONCAT_EMBEDDINGS): is not supported [FLOAT32 → FLOAT32]",
        "  operator 2 (CUSTOM 'My_op'): is not supported [FLOAT32 → FLOAT32]",
    ]


def test_a_single_problem_is_one_line() -> None:
    error = problems_of(chain("RELU", "CONCAT_EMBEDDINGS"))
    assert str(error) == "operator 1 (CONCAT_EMBEDDINGS): is not supported [FLOAT32 → FLOAT32]"
    assert isinstance(error, InvalidArgument)


def test_operators_whose_options_are_not_supported_are_listed_with_the_reason() -> None:
    tanh = {"FusedActivationFunction": 4}
    sums = [Operator("ADD", (i, i), (i + 1,), "AddOptions", tanh if i else {}) for i in range(3)]
    error = problems_of(writer.write([X] * 4, sums, (0,), (3,)))
    assert [(problem.index, problem.operator) for problem in error.problems] == [(1, "ADD"), (2, "ADD")]
    assert "operators 1, 2 (ADD): fused activation 4 is not supported" in str(error)
    assert str(error).endswith("[FLOAT32, FLOAT32 → FLOAT32]")


def test_problems_that_differ_only_in_the_tensors_are_one_line() -> None:
    late = [Tensor(f"late {i}", (1, 4)) for i in range(7)]
    sums = [Operator("MUL", (0, 1 + i), (8 + i,)) for i in range(7)]
    error = problems_of(writer.write([X, *late, *[X] * 7], sums, (0,), range(8, 15)))
    assert len(error.problems) == 7
    assert "tensor 3 ('late 2')" in error.problems[2].reason
    assert str(error) == (
        "operators 0, 1, 2, 3 and 3 more (MUL): a tensor is read before it is written [FLOAT32, FLOAT32 → FLOAT32]"
    )


def test_every_operator_of_a_tensor_of_an_unsupported_type_is_listed() -> None:
    operators = [Operator("SKIP_GRAM", (0,), (1,)), Operator("RELU", (1,), (2,)), Operator("ABS", (1,), (3,))]
    error = problems_of(writer.write([X, TEXT, X, X], operators, (0,), (2, 3)))
    assert [(p.index, p.operator, p.types) for p in error.problems] == [
        (0, "SKIP_GRAM", "FLOAT32 → STRING"),
        (1, "RELU", "STRING → FLOAT32"),
        (2, "ABS", "STRING → FLOAT32"),
    ]
    assert "tensor 1 ('c'): tensor type STRING is not supported" in error.problems[1].reason


def test_inputs_and_outputs_of_unsupported_types_are_listed_once() -> None:
    error = problems_of(writer.write([TEXT, X], [Operator("CONCAT_EMBEDDINGS", (0,), (1,))], (0,), (1,)))
    assert [(p.index, p.reason) for p in error.problems] == [
        (-1, "tensor 0 ('c'): tensor type STRING is not supported"),
        (0, "is not supported"),
    ]
    assert str(error).startswith("1 operator is not supported, 1 other problem:\n")


def test_element_types_that_no_device_takes_are_named_at_load() -> None:
    """TFLite has neither a SQRT of integers nor a maximum of truths."""
    number, truth = Tensor("n", (2,), "INT32"), Tensor("t", (2,), "BOOL")
    operators = [Operator("SQRT", (0,), (2,)), Operator("MAXIMUM", (1, 1), (3,)), Operator("ABS", (0,), (4,))]
    error = problems_of(writer.write([number, truth, number, truth, number], operators, (0, 1), (2, 3, 4)))
    assert [(p.index, p.operator, p.types) for p in error.problems] == [
        (0, "SQRT", "INT32 → INT32"),
        (1, "MAXIMUM", "BOOL, BOOL → BOOL"),
    ]
    reason = "no device can take its types: SQRT: argument 0 (input) has type TENSOR_INT32"
    assert error.problems[0].reason.startswith(reason)


def test_an_operator_that_computes_a_shape_of_an_unsupported_tensor_is_listed() -> None:
    size = Tensor("size", (2,), "INT32", ints(1, 4))
    error = problems_of(writer.write([X, size, TEXT], [Operator("RESHAPE", (0, 1), (2,))], (0,), (2,)))
    assert [p.index for p in error.problems if p.operator] == [0]


def test_a_file_of_nothing_but_problems_is_read_to_a_limit() -> None:
    error = problems_of(chain(*["CONCAT_EMBEDDINGS", "SKIP_GRAM"] * 1500))
    assert len(error.problems) == 1000
    assert len(str(error).splitlines()) == 3


def test_many_different_problems_are_cut() -> None:
    error = problems_of(chain(*(f"Operator_{number}" for number in range(100))))
    assert len(error.problems) == 100
    assert str(error).splitlines()[-1] == "  … 60 more"


def test_omitted_and_invalid_tensors_have_no_type() -> None:
    error = problems_of(writer.write([X, X], [Operator("CONCAT_EMBEDDINGS", (0, -1, 99), (1,))], (0,), (1,)))
    assert error.problems[0].types == "FLOAT32, none, none → FLOAT32"


def test_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.tflite"
    path.write_bytes(chain("CONCAT_EMBEDDINGS", "SKIP_GRAM"))
    with pytest.raises(UnsupportedModel, match=r"m\.tflite: 2 operators are not supported:") as caught:
        load(path)
    assert [problem.operator for problem in caught.value.problems] == ["CONCAT_EMBEDDINGS", "SKIP_GRAM"]


@pytest.mark.parametrize("words", [["run", "--input", "x.npy"], ["profile"]], ids=["run", "profile"])
def test_the_commands_print_a_table(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNFMQ_RUNTIMES", "")
    path = tmp_path / "m.tflite"
    path.write_bytes(chain("CONCAT_EMBEDDINGS", "RELU", "CONCAT_EMBEDDINGS", "SKIP_GRAM"))
    assert main([*words, str(path)]) == 1
    printed = capsys.readouterr()
    first, *table, last = printed.err.splitlines()
    assert (printed.out, first) == ("", f"nnfmq: error: {path}: 3 operators are not supported:")
    assert last.startswith("nnfmq: a hosted runtime may run it")
    rows = [line.split() for line in table if line.strip()]
    assert rows[0] == ["operator", "count", "indexes", "types", "reason"]
    assert rows[2:] == [
        ["CONCAT_EMBEDDINGS", "2", "0,", "2", "FLOAT32", "→", "FLOAT32", "is", "not", "supported"],
        ["SKIP_GRAM", "1", "3", "FLOAT32", "→", "FLOAT32", "is", "not", "supported"],
    ]
