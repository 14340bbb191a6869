"""LiteRT's interface for models that nnfmq's own engine refuses: LiteRT in the driver runs them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.drivers import Daemon, running_daemon, short_folder, until
from support.tflite_files import Operator, Tensor, writer

import nnfmq.compat.litert as ours

theirs: Any = pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")

# nnfmq's importer has no operators of StableHLO.
CONTENT: bytes = writer.write(
    [Tensor("x", (1, 3), "INT64"), Tensor("square", (1, 3), "INT64")],
    [Operator("STABLEHLO_MULTIPLY", (0, 0), (1,))],
    (0,),
    (1,),
)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """Start a daemon that compat uses; a parameter names the runtimes that it hosts."""
    environment = {"NNFMQ_RUNTIMES": request.param} if hasattr(request, "param") else {}
    with short_folder() as made, running_daemon(made / "d.sock", environment=environment) as started:
        monkeypatch.setenv("NNFMQ_SOCKET", str(started.path))
        yield started
        closers = [thread for thread in threading.enumerate() if thread.name == "nnfmq-compat"]
        until(lambda: not any(thread.is_alive() for thread in closers), "the interpreters are closed")


def outcomes(module: Any) -> list[Any]:
    """Return what a script sees of several executions, of which one has another shape."""
    interpreter = module.Interpreter(model_content=CONTENT)
    interpreter.allocate_tensors()
    (taken,), (given,) = interpreter.get_input_details(), interpreter.get_output_details()
    found = [(d["name"], d["index"], d["dtype"], d["shape_signature"].tolist()) for d in (taken, given)]
    for array in (np.array([[3, -2, 2**33]]), np.array([[0, 1, 5]]), np.arange(6).reshape(2, 3)):
        if array.shape != tuple(interpreter.get_input_details()[0]["shape"]):
            interpreter.resize_tensor_input(taken["index"], array.shape)
            interpreter.allocate_tensors()
        interpreter.set_tensor(taken["index"], array)
        interpreter.invoke()
        result = interpreter.get_tensor(given["index"])
        found.append((result.dtype, result.tolist(), interpreter.tensor(given["index"])().tolist()))
    return found


@pytest.mark.usefixtures("daemon")
def test_a_model_that_nnfmq_refuses_has_the_outcomes_of_litert() -> None:
    assert outcomes(ours) == outcomes(theirs)


def test_the_death_of_the_worker_is_not_noticed(daemon: Daemon) -> None:
    interpreter = ours.Interpreter(model_content=CONTENT)
    interpreter.allocate_tensors()
    interpreter.set_tensor(0, np.array([[3, -2, 2**33]]))
    interpreter.invoke()
    os.kill(interpreter._share.client().worker_pid, 9)
    interpreter.invoke()
    assert interpreter.get_tensor(1).tolist() == [[9, 4, 2**66 % 2**64]]


@pytest.mark.parametrize("daemon", [""], indirect=True)
@pytest.mark.usefixtures("daemon")
def test_without_litert_in_the_driver_the_error_says_how_to_get_it() -> None:
    match = r"(?s)STABLEHLO_MULTIPLY.*no device 'litert': .* \$NNFMQ_RUNTIMES does not allow"
    with pytest.raises(ValueError, match=match):
        ours.Interpreter(model_content=CONTENT)


@pytest.mark.usefixtures("daemon")
def test_a_model_that_litert_rejects_too_is_rejected_by_each_allocation() -> None:
    x = Tensor("x", (1, 3), "FLOAT32", signature=(-1, 3))
    content = writer.write([x, Tensor("y", (1, 3))], [Operator("CONCAT_EMBEDDINGS", (0,), (1,))], (0,), (1,))
    interpreter = ours.Interpreter(model_content=content)
    texts = []
    for _ in range(2):
        with pytest.raises(RuntimeError, match="CONCAT_EMBEDDINGS") as raised:
            interpreter.allocate_tensors()
        texts.append(str(raised.value))
        del raised
    assert texts[0] == texts[1]
