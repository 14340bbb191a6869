"""A worker loads and executes machine code without LLVM, which only compile processes need."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.compiled import outputs_of, random_inputs
from support.drivers import Process
from support.models import logistics_model
from support.small_models import two_adds

import nnfmq
from nnfmq.base import settings
from nnfmq.data import example_path
from nnfmq.engines import interpreter
from nnfmq.hal.types import ExecutionPreference, Model, OperandType

pytest.importorskip("llvmlite", exc_type=ImportError)

MODELS = {
    "float": logistics_model(3),
    "quantized": two_adds(OperandType.TENSOR_QUANT8_ASYMM, 0.5, 128),
    "digits": nnfmq.load(example_path("digits.tflite")).model,
    "digits_quant": nnfmq.load(example_path("digits_quant.tflite")).model,
}


def assert_computes(client: nnfmq.Client, model: Model) -> None:
    """Prepare a model as machine code and compare its results with the interpreter's."""
    inputs = random_inputs(model, 1)
    expected = outputs_of(interpreter.prepare(model), model, inputs)
    device = client.device("compiled")
    with device.prepare(model, preference=ExecutionPreference.SUSTAINED_SPEED) as prepared, prepared.burst() as burst:
        for found in (prepared.execute(*inputs), burst.execute(*inputs)):
            for array, wanted in zip(found, expected, strict=True):
                np.testing.assert_allclose(array, wanted, rtol=1e-5, atol=1e-6)


def has_llvm(pid: int) -> bool:
    """Return whether LLVM's library is mapped."""
    return "llvmlite" in Path(f"/proc/{pid}/maps").read_text()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drivers keep compiled programs in an empty folder."""
    monkeypatch.delenv(settings.CACHE_MIB.variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_worker_of_a_daemon_has_no_llvm_either(client: nnfmq.Client) -> None:
    for model in MODELS.values():
        assert_computes(client, model)
    assert not has_llvm(client.worker_pid)


def test_a_worker_prepares_and_executes_without_llvm(cache: None) -> None:
    """First everything is compiled; then another driver loads it from the driver's cache, and nothing has LLVM."""
    for compiles in (True, False):
        with nnfmq.connect(embedded=True) as client, Process(client.worker_pid) as worker:
            for model in MODELS.values():
                assert_computes(client, model)
            assert not has_llvm(client.worker_pid)
            assert [has_llvm(pid) for pid in worker.children()] == [compiles]
