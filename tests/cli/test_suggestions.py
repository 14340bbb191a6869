"""What the command line answers to words that are almost right, and to models whose inputs have no sizes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tflite_files import Operator, Tensor, writer

import nnfmq
from nnfmq.cli import COMMANDS, main
from nnfmq.importers.loaded_model import UnknownShapes

onnx = pytest.importorskip("onnx")

DIGITS = str(nnfmq.example_path("digits.tflite"))


def error_of(words: Sequence[str], capsys: pytest.CaptureFixture[str], status: int = 2) -> str:
    assert main(words) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rnu"], "invalid choice: 'rnu'; did you mean 'run'? (choose from demo, run, "),
        (["Model"], "invalid choice: 'Model'; did you mean 'model'? (choose"),
        (["model", "shwo", DIGITS], "invalid choice: 'shwo'; did you mean 'show'? (choose from show, dot, svg, "),
        (["queue", "creat", "q"], "invalid choice: 'creat'; did you mean 'create'?"),
        (["photo"], "invalid choice: 'photo' (choose from demo, "),
        (["mobilenet.tflite"], "did you mean `nnfmq run mobilenet.tflite --input FILE`?"),
        (["run", "--inptu", "x.npy", DIGITS], "nnfmq run: error: there is no option --inptu; did you mean '--input'?"),
        (["run", "--inputs=x.npy", DIGITS], "there is no option --inputs; did you mean '--input'?"),
        (["model", "show", DIGITS, "--jsn"], "there is no option --jsn; did you mean '--json'?"),
        (["--verison"], "nnfmq: error: there is no option --verison; did you mean '--version'?"),
        (["devices", "--fly"], "unrecognized arguments: --fly"),
        (["--json", "devices"], "unrecognized arguments: --json; options of a command follow its name"),
        (["completion", "bsh"], "invalid choice: 'bsh'; did you mean 'bash'?"),
    ],
)
def test_a_word_that_is_almost_right_gets_the_right_one(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in error_of(words, capsys)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_is_found_by_a_word_with_a_letter_less(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "; did you mean '" in error_of([command[:-1]], capsys)


def test_options_of_a_recorded_program_are_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["record", "-o", str(tmp_path / "r.nnr"), "true", "--outptu"]
    main(words)
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["reverence", "Compiled"])
def test_the_nearest_device_is_suggested(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", np.zeros((1, 8, 8, 1), np.float32))
    words = ["run", DIGITS, "--input", str(tmp_path / "x.npy"), "--device", name, "--connect", "embedded"]
    assert "; did you mean '" in error_of(words, capsys, 1)


# ------------------------------------------------------------------------------------------------ sizes left open


@pytest.fixture
def dynamic(tmp_path: Path) -> Path:
    """Return an ONNX file whose output is the sum of two inputs, of sizes that the file leaves open."""
    helper, kinds = onnx.helper, onnx.TensorProto
    inputs = [helper.make_tensor_value_info(name, kinds.FLOAT, ["batch", "seq"]) for name in ("ids", "my mask")]
    inputs.append(helper.make_tensor_value_info("fixed", kinds.FLOAT, [1]))
    output = helper.make_tensor_value_info("sum", kinds.FLOAT, ["batch", "seq"])
    nodes = [helper.make_node("Add", ["ids", "my mask"], ["t"]), helper.make_node("Add", ["t", "fixed"], ["sum"])]
    graph = helper.make_graph(nodes, "g", inputs, [output])
    path = tmp_path / "dynamic.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def test_model_show_lists_the_symbols_of_inputs(dynamic: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "show", str(dynamic), "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    declared = {tensor["name"]: (tensor["dtype"], tensor["shape"]) for tensor in report["inputs"] + report["outputs"]}
    open_shape = ("float32", ["batch", "seq"])
    assert declared == {"ids": open_shape, "my mask": open_shape, "fixed": ("float32", [1]), "sum": open_shape}
    assert main(["model", "show", str(dynamic)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("batch x seq") == 3
    assert f"nnfmq model show {dynamic} {report['shape_options']}" in printed


def test_the_sizes_that_commands_suggest_are_accepted(
    dynamic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNFMQ_RUNTIMES", "")  # a hosted runtime would take any sizes
    files = [tmp_path / "a.npy", tmp_path / "b.npy", tmp_path / "c.npy"]
    for file, shape in zip(files, [(1, 128), (1, 128), (1,)], strict=True):
        np.save(file, np.ones(shape, np.float32))
    inputs = [word for file in files for word in ("--input", str(file))]
    line = error_of(["run", str(dynamic), *inputs, "--connect", "embedded"], capsys, 1)
    assert "input 'ids' is (batch, seq); input 'my mask' is (batch, seq); give them" in line
    options = shlex.split(line.partition("for example, as ")[2].partition(";")[0])
    assert options == ["--shape", "ids=1x128", "--shape", "my mask=1x128"]
    assert main(["run", str(dynamic), *inputs, *options, "--connect", "embedded", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["shape"] == [1, 128]
    assert main(["model", "show", str(dynamic), *options]) == 0
    assert "2 operations: 2 ADD." in capsys.readouterr().out
    for action in ("validate", "dot"):
        assert "--shape ids=1x128" in error_of(["model", action, str(dynamic)], capsys, 1)


def test_the_shapes_that_an_error_suggests_are_accepted_by_prepare(dynamic: Path) -> None:
    with pytest.raises(UnknownShapes, match=r"dynamic\.onnx: sizes .*shapes=\{'ids': \(1, 128\), 'my mask'") as raised:
        nnfmq.load(dynamic)
    shapes = raised.value.example_shapes()
    with nnfmq.connect(embedded=True) as client, client.prepare(dynamic, shapes=shapes) as model:
        arrays = {info.name: np.ones(info.shape, np.float32) for info in model.inputs}
        assert model(arrays)["sum"].tolist() == np.full((1, 128), 3).tolist()


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({"idz": (1, 8)}, "there is no input 'idz'; the inputs are 'ids', 'my mask', 'fixed'; did you mean 'ids'?"),
        ({"ids": 8}, "8 is no shape for input 'ids'; give a size for each dimension, as in (1, 128)"),
        ({"ids": "1x8"}, "'1x8' is no shape for input 'ids'; give a size"),
        ({"ids": (1, 8.5)}, "(1, 8.5) is no shape for input 'ids'"),
        ((1, 8), "shapes are given by input, as in {'image': (1, 224, 224, 3)}, not as (1, 8)"),
        ({"ids": (1, 8, 3)}, "(1, 8, 3) is no shape for input 'ids', which is (batch, seq)"),
        ({"ids": (1, 8), "my mask": (1, 9)}, "dimension 'seq' is 8 and also 9"),
    ],
)
def test_shapes_that_are_none_are_rejected_with_what_is_allowed(dynamic: Path, shapes: Any, said: str) -> None:
    with pytest.raises(nnfmq.InvalidArgument) as raised:
        nnfmq.load(dynamic, shapes=shapes)
    assert said in str(raised.value)


def test_model_show_says_which_sizes_a_tflite_file_leaves_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = [Tensor("x", (1, 3), signature=(-1, 3)), Tensor("y", (1, 3), signature=(-1, 3))]
    (tmp_path / "open.tflite").write_bytes(writer.write(tensors, [Operator("RELU", (0,), (1,))], (0,), (1,)))
    words = ["model", "show", str(tmp_path / "open.tflite")]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["open_inputs"] == {"x": [None, 3]}
    assert main(words) == 0
    assert "x is ? x 3; resize it with --shape x=4x3." in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--shape", "x=4x3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["open_inputs"], report["inputs"][0]["shape"]) == ({}, [4, 3])


def test_unknown_dimensions_without_a_symbol_are_question_marks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    helper, kinds = onnx.helper, onnx.TensorProto
    infos = [helper.make_tensor_value_info(name, kinds.DOUBLE, [None, 3, "h", "w"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", infos[:1], infos[1:])
    onnx.save(helper.make_model(graph), tmp_path / "open.onnx")
    assert main(["model", "show", str(tmp_path / "open.onnx")]) == 0
    printed = capsys.readouterr().out
    assert "? x 3 x h x w" in printed
    assert "--shape x=1x3x224x224" in printed
