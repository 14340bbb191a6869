"""`nnfmq model`: descriptions, graphs and validation of model files and of test models."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support import model_lines
from support.control_flow_models import branching
from support.drivers import running_daemon, short_folder
from support.small_models import two_adds, with_operand

import nnfmq
from nnfmq.cli import main
from nnfmq.cli.model.inspection import InspectedModel
from nnfmq.cli.model.show import describe_model

DIGITS = nnfmq.example_path("digits.tflite")
OPERATIONS = ["CONV_2D", "MAX_POOL_2D", "CONV_2D", "MAX_POOL_2D", "FULLY_CONNECTED", "SOFTMAX"]


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["model", "show", *words, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_show_describes_a_model_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    report = shown(capsys, str(DIGITS))
    assert report["model"] == "digits.tflite"
    assert report["inputs"] == [{"name": "image", "dtype": "float32", "shape": [1, 8, 8, 1], "quantization": None}]
    assert [one["operation"] for one in report["operations"]] == OPERATIONS
    assert report["counts"] == {name: OPERATIONS.count(name) for name in dict.fromkeys(OPERATIONS)}
    first = report["operations"][0]
    assert first["inputs"] == [{"type": "TENSOR_FLOAT32", "dimensions": [1, 8, 8, 1]}]
    model = nnfmq.load(DIGITS).model
    assert report["operands"] == len(model.main.operands)
    assert report["constants_bytes"] == sum(operand.location.length for operand in model.main.operands)
    assert sum(one["constants_bytes"] for one in report["operations"]) >= report["constants_bytes"]
    assert (report["feature_level"], report["interface"]) == (1, "HIDL 1.0")
    assert report["devices"] == {}


@pytest.mark.parametrize("columns", [80, 40])
def test_show_prints_tables(columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["model", "show", str(DIGITS)]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    words = " ".join(text.split())
    assert "1x8x8x1" in words
    assert "6 operations: 2 CONV_2D, 2 MAX_POOL_2D, 1 FULLY_CONNECTED, 1 SOFTMAX." in words
    assert "needs feature level 1 (HIDL 1.0)." in words
    assert "not on" not in words


def test_show_asks_the_devices_of_a_driver(capsys: pytest.CaptureFixture[str]) -> None:
    devices = ["--connect", "embedded", "--device", "reference", "--device", "sample-minimal"]
    report = shown(capsys, str(DIGITS), *devices)
    with nnfmq.connect(embedded=True) as client:
        expected = client.device("sample-minimal").supported_operations(DIGITS)
    assert [one["supported_by"] for one in report["operations"]] == [
        ["reference", "sample-minimal"] if answer else ["reference"] for answer in expected
    ]
    assert report["devices"] == {
        "reference": {"supported": 6, "of": 6},
        "sample-minimal": {"supported": sum(expected), "of": 6},
    }
    assert main(["model", "show", str(DIGITS), *devices]) == 0
    text = capsys.readouterr().out
    assert "not on" in text
    assert "reference supports 6 of 6 operations." in text


def test_show_reports_an_unknown_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "show", str(DIGITS), "--connect", "embedded", "--device", "nothing"]) == 1
    assert capsys.readouterr().err.startswith("nnfmq: error: there is no device 'nothing'; this driver has: ")


def test_subgraphs_have_lists_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    report = describe_model(InspectedModel("branching", branching(), (), ()), {})
    assert [[one["operation"] for one in graph] for graph in report["subgraphs"]] == [["ADD"], ["MUL"]]
    assert report["counts"] == {"IF": 1, "ADD": 1, "MUL": 1}
    assert report["feature_level"] == 4


def test_a_model_that_is_not_valid_has_no_feature_level() -> None:
    report = describe_model(InspectedModel("broken", with_operand(two_adds(), 0, scale=2.0), (), ()), {})
    assert (report["feature_level"], report["interface"]) == (None, None)


# ---- plans ----

PLANNED = ["--plan", "--connect", "embedded", "--device", "sample-minimal", "--device", "reference"]
"""sample-minimal is faster, and has CONV_2D alone of the operations of the model."""
STEPS = [[0], [1], [2], [3, 4, 5]]


@pytest.fixture
def _no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("NNFMQ_SOCKET", raising=False)


@pytest.mark.usefixtures("_no_driver")
def test_show_has_the_plan_for_some_devices(capsys: pytest.CaptureFixture[str]) -> None:
    plan = shown(capsys, str(DIGITS), *PLANNED)["plan"]
    assert plan["kind"] == "compound"
    assert [step["device"] for step in plan["steps"]] == ["sample-minimal", "reference"] * 2
    assert [[one["index"] for one in step["operations"]] for step in plan["steps"]] == STEPS
    assert main(["model", "show", str(DIGITS), *PLANNED]) == 0
    assert "compound plan: 4 steps" in capsys.readouterr().out


@pytest.mark.usefixtures("_no_driver")
def test_show_plans_for_an_embedded_driver_if_none_runs(capsys: pytest.CaptureFixture[str]) -> None:
    plan = shown(capsys, str(DIGITS), "--plan")["plan"]
    assert (plan["kind"], len(plan["steps"])) == ("simple", 1)


def test_show_plans_for_a_driver_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with short_folder() as folder, running_daemon(folder / "d.sock") as driver:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        monkeypatch.setenv("NNFMQ_SOCKET", str(driver.path))
        by_default = shown(capsys, str(DIGITS), "--plan")["plan"]
        assert shown(capsys, str(DIGITS), "--plan", "--connect", str(driver.path))["plan"] == by_default
    assert by_default["kind"] == "simple"


@pytest.mark.usefixtures("_no_driver")
def test_UTL_6_a_graph_has_the_steps_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--operations"]):
        assert main(["model", "dot", str(DIGITS), *words, *PLANNED]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if "cluster_step" in line]
        devices = [line.split('label="')[1].split('"')[0] for line in lines]
        expected = [f"step {i}: {'reference' if i % 2 else 'sample-minimal'}" for i in (0, 1, 2, 3, 3, 3)]
        assert devices == expected


# ---- graphs ----


def test_UTL_6_dot_prints_the_graph_dump(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "dot", str(DIGITS)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["// digits.tflite", "digraph {"]
    boxes = [line for line in lines if "shape=box" in line]
    assert [box.split('label="')[1].split('"')[0] for box in boxes] == [f"{i}: {n}" for i, n in enumerate(OPERATIONS)]


def test_dot_without_constants_has_only_operations_inputs_and_outputs(tmp_path: Path) -> None:
    target = tmp_path / "digits.dot"
    assert main(["model", "dot", str(DIGITS), "--operations", "-o", str(target)]) == 0
    nodes = [line.split()[0] for line in target.read_text(encoding="utf-8").splitlines() if line.startswith("    s0_")]
    assert set(nodes) == {"s0_input0", "s0_output0", *(f"s0_n{number}" for number in range(6))}


def test_svg_writes_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("pygraphviz", reason="pygraphviz is not installed")
    target = tmp_path / "digits.svg"
    assert main(["model", "svg", str(DIGITS), "-o", str(target)]) == 0
    assert target.read_text(encoding="utf-8").startswith("<svg ")


def test_svg_names_the_extra_that_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "pygraphviz", None)
    assert main(["model", "svg", str(DIGITS)]) == 1
    assert "pip install 'nnfmq[graphs]'" in capsys.readouterr().err


# ---- validation ----


def test_validate_accepts_a_valid_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "validate", str(DIGITS)]) == 0
    assert capsys.readouterr().out == "digits.tflite is valid; it needs feature level 1.\n"


def bad_tests(folder: Path) -> str:
    """Return a file of two test models, of which the second violates two rules."""

    def scale_and_argument(line: model_lines.Line) -> None:
        line["name"] = "bad"
        line["main"]["operands"][0]["scale"] = 2.0
        line["main"]["operands"][3]["zeroPoint"] = 1

    return str(model_lines.write(folder / "two.jsonl", model_lines.add(), model_lines.changed(scale_and_argument)))


def test_validate_prints_every_violated_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "validate", bad_tests(tmp_path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["is_valid"] is False
    good, bad = report["models"]
    assert (good["model"], good["feature_level"], good["problems"]) == ("add", 1, [])
    assert bad["feature_level"] is None
    assert bad["problems"] == [
        {"rule": "N-MOD-4", "problem": "operand 0: scale 2.0, TENSOR_FLOAT32 requires scale 0"},
        {"rule": "N-MOD-5", "problem": "operand 3: zero point 1, TENSOR_FLOAT32 allows 0 to 0"},
    ]


def test_validate_prints_a_table_and_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "validate", bad_tests(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "N-MOD-4" in text
    assert "1 of 2 models are valid." in text
    assert main(["model", "validate", bad_tests(tmp_path), "--test", "add"]) == 0


def test_validate_reports_what_cannot_be_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    helper, real = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [helper.make_node("NoSuchOperator", ["x"], ["y"]), helper.make_node("NorThis", ["x"], ["z"])]
    ends = [helper.make_tensor_value_info(name, real, [1, 3]) for name in "xyz"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    path = tmp_path / "odd.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    assert main(["model", "validate", str(path), "--json"]) == 1
    (report,) = json.loads(capsys.readouterr().out)["models"]
    assert [problem["rule"] for problem in report["problems"]] == [None, None]
    assert "NoSuchOperator" in report["problems"][0]["problem"]
    assert main(["model", "validate", str(path)]) == 1
    assert "import" in capsys.readouterr().out


# ---- files ----


def test_a_test_model_is_shown_and_asked_for_with_its_pools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(model_lines.write(tmp_path / "add.jsonl", model_lines.add()))
    report = shown(capsys, path, "--connect", "embedded", "--device", "reference")
    assert report["model"] == "add"
    assert report["constants_bytes"] == 12 + 4
    assert report["operations"][0]["supported_by"] == ["reference"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["two.jsonl"], "two.jsonl: 2 test models; choose one with --test: add, bad"),
        (["two.jsonl", "--test", "no"], "there is no test model 'no' in it"),
        (["two.jsonl", "--shape", "1x2"], "--shape and --signature are for .tflite and .onnx files"),
        (["digits.tflite", "--test", "add"], "--test is for files of test models"),
        (["missing.tflite"], "No such file or directory"),
    ],
)
def test_errors_name_what_is_allowed(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad_tests(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["model", "show", *words]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
