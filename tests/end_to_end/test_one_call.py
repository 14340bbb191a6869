"""`nnfmq.run`: one client and a bounded number of prepared models for each process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import LIMIT_S
from support.models import plus_model

import nnfmq
from nnfmq.client import run

DIGITS, QUANTIZED = nnfmq.example_path("digits.tflite"), nnfmq.example_path("digits_quant.tflite")
DIGIT = np.load(nnfmq.example_path("digits.npz"))["images"][0].astype(np.float32).reshape(1, 8, 8, 1) / 16
QUANTIZED_DIGIT = np.zeros((1, 8, 8, 1), np.int8)
LABEL = int(np.load(nnfmq.example_path("digits.npz"))["labels"][0])


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Return the models that are prepared, in order; nothing is kept after the test."""
    calls: list[Any] = []
    prepare = nnfmq.Client.prepare

    def noting(self: nnfmq.Client, model: Any, **options: Any) -> nnfmq.CompiledModel:
        calls.append(model)
        return prepare(self, model, **options)

    monkeypatch.setattr(nnfmq.Client, "prepare", noting)
    yield calls
    run.close_kept()


def test_a_model_is_prepared_once_for_each_file_content_and_shape(prepared: list[Any], tmp_path: Path) -> None:
    content, loaded = DIGITS.read_bytes(), nnfmq.load(DIGITS)
    os.symlink(DIGITS, tmp_path / "link.tflite")
    several = {"image": (2, 8, 8, 1)}
    for _ in range(2):
        for same in (str(DIGITS), DIGITS):
            assert nnfmq.run(same, {"image": DIGIT})["probabilities"].argmax() == LABEL
        for same in (content, bytearray(content), memoryview(content)):
            assert nnfmq.run(same, DIGIT)[0].argmax() == LABEL
        assert nnfmq.run(loaded, DIGIT)[0].argmax() == LABEL
        assert nnfmq.run(DIGITS, np.repeat(DIGIT, 2, axis=0), shapes=several)[0].shape == (2, 10)
        assert nnfmq.run(tmp_path / "link.tflite", DIGIT)[0].argmax() == LABEL
    names = [each if isinstance(each, bytes) else Path(getattr(each, "file_name", each)).name for each in prepared]
    assert names == ["digits.tflite", content, "digits.tflite", "digits.tflite", "link.tflite"]


def test_a_file_that_has_changed_is_prepared_again(prepared: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "model.tflite"
    shutil.copy(DIGITS, path)
    assert nnfmq.run(path, DIGIT)[0].dtype == np.float32
    shutil.copy(QUANTIZED, path)
    info = nnfmq.load(path).inputs[0]
    assert nnfmq.run(path, np.zeros(info.shape, info.dtype))[0].dtype == np.int8
    assert len(prepared) == 2


def test_a_file_whose_weights_have_changed_is_prepared_again(prepared: list[Any], tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")

    def save(value: float) -> None:
        info = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [600]) for name in ("x", "y")]
        weights = onnx.numpy_helper.from_array(np.full(600, value, np.float32), "w")
        node = onnx.helper.make_node("Add", ["x", "w"], ["y"])
        model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", info[:1], info[1:], [weights]))
        (tmp_path / "w.bin").unlink(missing_ok=True)
        fresh, kept = tmp_path / "fresh.onnx", tmp_path / "m.onnx"
        onnx.save_model(model, fresh, save_as_external_data=True, location="w.bin", size_threshold=100)
        if not kept.exists():
            fresh.rename(kept)

    x = np.zeros(600, np.float32)
    for value in (1, 2, 3):
        save(value)
        for _ in range(2):
            assert nnfmq.run(tmp_path / "m.onnx", x)["y"][599] == value
    assert len(prepared) == 3


def test_signatures_are_different_models(prepared: list[Any]) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match="signature"):
        nnfmq.run(DIGITS, DIGIT, signature="none such")
    with pytest.raises(nnfmq.InvalidArgument, match="is no shape for input 'image'"):
        nnfmq.run(DIGITS, DIGIT, shapes={"image": 8})


def test_the_models_that_were_used_last_are_kept(prepared: list[Any]) -> None:
    models = [plus_model(value) for value in range(9)]
    for model in (*models[:8], models[0], models[8], models[0]):  # the second one is closed for the ninth
        nnfmq.run(model, np.float32([1]))
    assert len(prepared) == 9
    assert nnfmq.run(models[1], np.float32([1]))[0] == 2
    assert len(prepared) == 10


def test_threads_share_the_client_and_the_models(prepared: list[Any]) -> None:
    models = [plus_model(value) for value in range(12)]
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda at: nnfmq.run(models[at % 12], np.float32([at])), range(48)))
    assert [float(result[0][0]) for result in results] == [at + at % 12 for at in range(48)]


def test_a_timeout_holds_while_another_thread_prepares(prepared: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    nnfmq.run(QUANTIZED, QUANTIZED_DIGIT)
    prepare, is_preparing, may_go_on = nnfmq.Client.prepare, threading.Event(), threading.Event()

    def slowly(self: nnfmq.Client, model: Any, **options: Any) -> nnfmq.CompiledModel:
        is_preparing.set()
        assert may_go_on.wait(LIMIT_S)
        return prepare(self, model, **options)

    monkeypatch.setattr(nnfmq.Client, "prepare", slowly)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(nnfmq.run, DIGITS, DIGIT)
        assert is_preparing.wait(LIMIT_S)
        with pytest.raises(nnfmq.MissedDeadlineTransient, match="another thread prepared a model"):
            nnfmq.run(plus_model(1), DIGIT, timeout=0.001)
        assert nnfmq.run(QUANTIZED, QUANTIZED_DIGIT, timeout=LIMIT_S)[0].shape == (1, 10)  # which is prepared already
        may_go_on.set()
        assert first.result()[0].argmax() == LABEL


def test_a_prepared_model_is_executed_itself(prepared: list[Any], model: nnfmq.PreparedModel) -> None:
    assert nnfmq.run(model, np.float32([3]))[0] == 3
    assert prepared == []


def test_errors_are_those_of_the_file_and_of_the_inputs(prepared: list[Any], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        nnfmq.run(tmp_path / "absent.tflite", DIGIT)
    with pytest.raises(nnfmq.InvalidArgument, match=r"no input is called 'imgae'.*; did you mean 'image'"):
        nnfmq.run(DIGITS, {"imgae": DIGIT})
    with pytest.raises(nnfmq.MissedDeadline):
        nnfmq.run(DIGITS, DIGIT, timeout=0)


def test_the_client_is_closed_at_exit_and_a_forked_child_has_its_own(tmp_path: Path) -> None:
    code = f"""
import os, warnings
import numpy as np
import nnfmq
from nnfmq.client import run
warnings.simplefilter("ignore")
image = np.zeros((1, 8, 8, 1), np.float32)
nnfmq.run({str(DIGITS)!r}, image)
driver = run._process.kept._client.driver_pid
child = os.fork()
if not child:
    nnfmq.run({str(DIGITS)!r}, image)
    os._exit(run._process.kept._client.driver_pid == driver)
print(os.waitpid(child, 0)[1], driver)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.stderr == ""
    status, driver = map(int, done.stdout.split())
    assert status == 0
    assert not Path(f"/proc/{driver}").exists()
