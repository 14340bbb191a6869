"""Commands on files that a hosted runtime runs, in a real driver: which device, what is said, and to what end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import Daemon, running_daemon, short_folder

from nnfmq import importers
from nnfmq.cli import main

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def hosting() -> Iterator[Daemon]:
    with short_folder() as made, running_daemon(made / "d.sock", options=["--runtimes", "onnxruntime"]) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def without() -> Iterator[Daemon]:
    with short_folder() as made, running_daemon(made / "d.sock", options=["--runtimes"]) as daemon:
        yield daemon


@pytest.fixture
def align(tmp_path: Path) -> Path:
    """Return an ONNX file with an operator that nnfmq's own engine does not support, RoiAlign; files of its inputs."""
    helper, kinds = onnx.helper, onnx.TensorProto
    node = helper.make_node("RoiAlign", ["x", "rois", "batch"], ["y"], output_height=1, output_width=1)
    inputs = [("x", (1, 1, 4, 4)), ("rois", (1, 4))]
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info(name, kinds.FLOAT, shape) for name, shape in inputs],
        [helper.make_tensor_value_info("y", kinds.FLOAT, (1, 1, 1, 1))],
        [onnx.numpy_helper.from_array(np.int64([0]), "batch")],
    )  # fmt: skip
    path = tmp_path / "align.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    np.save(tmp_path / "x.npy", np.full((1, 1, 4, 4), 2, np.float32))
    np.save(tmp_path / "rois.npy", np.float32([[0, 0, 3, 3]]))
    return path


def run(model: Path, daemon: Daemon, *more: str) -> int:
    inputs = [f"--input={model.parent / name}.npy" for name in ("x", "rois")]
    return main(["run", str(model), *inputs, "--connect", str(daemon.path), "--json", *more])


def report(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "options",
    [(), ("--device", "onnxruntime"), ("--runtime-option", "threads=1"), ("--device", "compiled,onnxruntime")],
)
def test_run_executes_what_only_a_hosted_runtime_does(
    align: Path,
    hosting: Daemon,
    options: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imported = []
    load = importers.load_source
    monkeypatch.setattr(importers, "load_source", lambda source: imported.append(source) or load(source))
    assert run(align, hosting, *options) == 0
    found = report(capsys)
    assert (found["device"], found["outputs"][0]["min"]) == ("onnxruntime", 2)
    assert len(imported) == (not options or 2 * ("compiled" in options[-1]))


def test_run_says_which_operators_are_refused_and_why_no_runtime_runs_them(
    align: Path, hosting: Daemon, without: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    for daemon, options in ((without, ()), (hosting, ("--device", "compiled"))):
        assert run(align, daemon, *options) == 1
        first, *more = capsys.readouterr().err.splitlines()
        assert re.match(r"nnfmq: error: .*align\.onnx: operator 0 \(RoiAlign\): is not supported", first)
        assert bool(more) == (daemon is without)
    assert run(align, without) == 1
    assert "onnxruntime is installed, but $NNFMQ_RUNTIMES does not allow" in capsys.readouterr().err


def test_an_input_with_open_sizes_takes_an_array_of_any_and_rejects_other_files(
    tmp_path: Path, hosting: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    helper, kinds = onnx.helper, onnx.TensorProto
    values = [helper.make_tensor_value_info(name, kinds.FLOAT, ("n", 4)) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", values[:1], values[1:])
    model = tmp_path / "open.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), model)
    np.save(tmp_path / "x.npy", np.full((3, 4), -1, np.float32))
    assert main(["run", str(model), "--input", f"{tmp_path}/x.npy", "--connect", str(hosting.path), "--json"]) == 0
    assert report(capsys)["outputs"][0]["shape"] == [3, 4]
    np.save(tmp_path / "wrong.npy", np.zeros((2, 5), np.float32))
    (tmp_path / "raw.bin").write_bytes(bytes(16))
    for name, problem in (
        ("wrong.npy", "is an array of 2x5 float32; the input needs ?x4 float32"),
        ("raw.bin", "the model leaves sizes of input 'x' open: give a .npy file, or --shape"),
    ):
        assert main(["run", str(model), "--input", str(tmp_path / name), "--connect", str(hosting.path)]) == 1
        assert problem in capsys.readouterr().err
    assert main(["bench", str(model), "--connect", str(hosting.path)]) == 1
    assert "give them, for example, as --shape x=1x4" in capsys.readouterr().err


def test_model_show_names_the_refused_operators_and_the_device_that_runs_the_file(
    align: Path, hosting: Daemon, without: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model", "show", str(align), "--connect"]
    assert main([*words, str(hosting.path), "--json"]) == 0
    found = report(capsys)
    assert found["device"] == "onnxruntime"
    assert [problem["operator"] for problem in found["problems"]] == ["RoiAlign"]
    assert [tensor["name"] for tensor in (*found["inputs"], *found["outputs"])] == ["x", "rois", "y"]
    assert main([*words, str(hosting.path)]) == 0
    text = capsys.readouterr().out
    assert "RoiAlign" in text and "Device onnxruntime does, which hosts a runtime." in text
    assert main([*words, str(without.path)]) == 1
    assert "a hosted runtime may run it: there is no device 'onnxruntime'" in capsys.readouterr().err


def test_bench_measures_a_hosted_model_beside_its_runtime(
    align: Path, hosting: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--count", "3", "--warm-up", "1", "--against", "onnxruntime", "--runtime-option", "threads=1"]
    assert main(["bench", str(align), "--connect", str(hosting.path), "--json", *load]) == 0
    results = report(capsys)["results"]
    assert next(result for result in results if result["runner"] == "burst")["details"]["device"] == "onnxruntime"
    assert {result["runner"] for result in results} == {"burst", "ONNX Runtime"}


@pytest.mark.parametrize("options", [(), ("--device", "onnxruntime", "--runtime-option", "threads=1")])
def test_profile_times_a_hosted_model_as_one_operation(
    align: Path, hosting: Daemon, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", str(align), "--connect", str(hosting.path), "--runs", "5", *options]
    assert main([*words, "--json"]) == 0
    found = report(capsys)
    (operation,) = found["operations"]
    assert (found["device"], operation["operation"]) == ("onnxruntime", "nnfmq.hosted.RUN")
    assert (operation["files"], found["runs"]) == (["align.onnx"], 5)
    assert 0 < operation["min_ns"] <= operation["p50_ns"] < found["run_ns"]["p50"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "its runtime does not tell" in text and "align.onnx" in text
    assert main([*words, "--arena"]) == 1
    assert "--arena is about nnfmq's own engine" in capsys.readouterr().err


def test_profile_of_the_own_engine_names_what_it_refuses(
    align: Path, without: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in (["--device", "compiled"], []):
        assert main(["profile", str(align), "--connect", str(without.path), *options]) == 1
        assert "operator 0 (RoiAlign): is not supported" in capsys.readouterr().err


def test_graphs_of_a_hosted_model_have_one_operation_with_its_files(
    align: Path, hosting: Daemon, without: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(align), "--connect", str(hosting.path)]
    assert main(["model", "dot", *words]) == 0
    text = capsys.readouterr().out
    assert text.count("shape=box") == 1 and "nnfmq.hosted.RUN" in text
    assert len(re.findall(r'"1: REF\\nTQ8A\(\d+\)\\nalign\.onnx"', text)) == 1
    assert text.count("fillcolor=black") == 3  # two inputs and an output
    assert main(["model", "dot", "--operations", "--plan", *words]) == 0
    text = capsys.readouterr().out
    assert text.count('class="op device0"') == 1 and "align.onnx → 1x1x1x1" in text and "onnxruntime" in text
    assert main(["model", "dot", str(align), "--connect", str(without.path)]) == 1
    assert "RoiAlign" in capsys.readouterr().err


def test_devices_tells_which_files_a_hosting_device_runs(hosting: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--connect", str(hosting.path), "--json"]) == 0
    found = {device["name"]: device["runs_files"] for device in report(capsys)["devices"]}
    assert found["onnxruntime"] == ["onnx"] and found["compiled"] is None
    assert main(["devices", "--connect", str(hosting.path)]) == 0
    assert "runs onnx files" in capsys.readouterr().out


def test_doctor_lists_the_runtimes_and_how_to_install_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNFMQ_RUNTIMES", "litert")
    monkeypatch.setattr("nnfmq.cli.doctor.installed_version", lambda name: None if name == "openvino" else "1.0")
    main(["doctor", "--json"])
    found = {entry["name"]: entry for entry in report(capsys)["findings"] if entry["part"] == "runtimes"}
    assert found["litert"]["value"] == "1.0" and found["onnxruntime"]["value"] == "1.0, not hosted"
    assert found["openvino"]["value"] == "not installed"
    assert found["openvino"]["remedy"].endswith(": `pip install 'nnfmq[openvino]'`")


@pytest.mark.parametrize("options", [(), ("--device", "onnxruntime", "--runtime-option", "threads=1")])
def test_stress_measures_a_model_that_a_hosted_runtime_opens(
    align: Path, hosting: Daemon, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--load", "none", "--duration", "0.1", "--connect", str(hosting.path), "--json", *options]
    assert main(["stress", str(align), *words]) == 0
    (scenario,) = report(capsys)["scenarios"]
    assert scenario["requests"] > 0
