"""What a report says of its subject: the digest of a model in one file or several, and the conditions."""

from __future__ import annotations

import hashlib
import os
import platform
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

import nnfmq
from nnfmq.lab.conditions import machine, machine_text, model_identity, subject_of

DIGITS = str(nnfmq.example_path("digits.tflite"))


def sha256(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def test_the_digest_of_one_file_is_that_of_its_content() -> None:
    assert model_identity(DIGITS) == {"model": DIGITS, "model_sha256": sha256(Path(DIGITS).read_bytes())}


def test_the_digest_of_an_onnx_model_changes_with_its_weights_in_another_file(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="ONNX is not installed")
    make, kinds = onnx.helper.make_tensor_value_info, onnx.TensorProto
    weights = onnx.numpy_helper.from_array(np.float32([1, 2, 3, 4]), "weights")
    node = onnx.helper.make_node("Mul", ["x", "weights"], ["y"])
    graph = onnx.helper.make_graph([node], "g", [make("x", kinds.FLOAT, [4])], [make("y", kinds.FLOAT, [4])], [weights])
    path, others = tmp_path / "model.onnx", tmp_path / "weights.bin"
    onnx.save_model(
        onnx.helper.make_model(graph), path, save_as_external_data=True, location=others.name, size_threshold=0
    )
    before = model_identity(path)["model_sha256"]
    assert before == sha256(path.read_bytes(), others.read_bytes())
    others.write_bytes(bytes(reversed(others.read_bytes())))
    assert model_identity(path)["model_sha256"] == sha256(path.read_bytes(), others.read_bytes()) != before


def test_the_digest_of_an_openvino_model_is_of_both_of_its_files(tmp_path: Path) -> None:
    path, weights = tmp_path / "model.xml", tmp_path / "model.bin"
    path.write_text("<?xml version='1.0'?><net name='m'></net>", encoding="utf-8")
    assert model_identity(path)["model_sha256"] == sha256(path.read_bytes())
    weights.write_bytes(b"weights")
    assert model_identity(path)["model_sha256"] == sha256(path.read_bytes(), b"weights")


def test_a_file_whose_other_files_cannot_be_read_without_doubt_has_its_own_digest(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\x08\x07\x3a\x7f")  # a graph that is longer than the file
    assert model_identity(path)["model_sha256"] == sha256(path.read_bytes())


def test_the_conditions_tell_date_host_and_build() -> None:
    found = subject_of(DIGITS)["conditions"]
    assert datetime.now(UTC) - datetime.fromisoformat(found["date"]) < timedelta(minutes=5)
    assert (found["host"], found["python"]) == (platform.node(), platform.python_version())
    assert found["cpus_allowed"] == sorted(os.sched_getaffinity(0))
    assert found["packages"]["nnfmq"] == nnfmq.__version__


def test_the_line_for_terminals_and_pages_has_them() -> None:
    found = machine() | {"packages": {"nnfmq": "1.2"}, "core": "python", "cpu": "a CPU", "cpus_allowed": [0, 3]}
    found |= {"load_before": [0.25, 1, 2], "date": "2026-11-30T12:00:00+00:00", "host": "lab"}
    line = "nnfmq 1.2, python core; a CPU, CPUs 0, 3; load 0.25 before; 2026-11-30T12:00:00+00:00, lab"
    assert machine_text(found) == line
