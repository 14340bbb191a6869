"""The worker is killed or stopped while a real runtime computes: its client learns of it, its neighbour does not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.drivers import DEAD_WITHIN_NS, LIMIT_S, Daemon, InThread, Process, until, wait_until_waiting

import nnfmq

ENDLESS = 2**62


class Example(NamedTuple):
    """A file with inputs for an execution that takes seconds, and one with inputs for an execution that does not."""

    file: bytes
    inputs: Mapping[str, Any]
    short_file: bytes
    short_inputs: Mapping[str, Any]


def onnx_loop() -> Example:
    """Return a loop of as many iterations as the first input says."""
    onnx: Any = pytest.importorskip("onnx")
    helper, kinds = onnx.helper, onnx.TensorProto
    number = helper.make_tensor_value_info("n", kinds.INT64, [])
    flag, next_flag = (helper.make_tensor_value_info(name, kinds.BOOL, []) for name in ("c", "d"))
    x, v, w, y = (helper.make_tensor_value_info(name, kinds.FLOAT, [4]) for name in "xvwy")
    nodes = [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Neg", ["v"], ["w"])]
    index = helper.make_tensor_value_info("i", kinds.INT64, [])
    body = helper.make_graph(nodes, "body", [index, flag, v], [next_flag, w])
    loop = helper.make_node("Loop", ["n", "", "x"], ["y"], body=body)
    graph = helper.make_graph([loop], "loop", [number, x], [y])
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    content, ones = model.SerializeToString(), np.ones(4, np.float32)
    return Example(content, {"n": np.array(ENDLESS), "x": ones}, content, {"n": np.array(2), "x": ones})


def tflite_convolution() -> Example:
    """Return a convolution of 40 billion multiplications."""
    from support.tflite_files import CONV, Tensor, single

    shape, weights = (1, 256, 256, 64), (64, 12, 12, 64)
    tensors = [
        Tensor("x", shape),
        Tensor("w", weights, data=bytes(4 * math.prod(weights))),
        Tensor("b", (64,), data=bytes(4 * 64)),
        Tensor("y", shape),
    ]
    content = single("CONV_2D", tensors, "Conv2DOptions", CONV)
    short = Path(nnfmq.example_path("digits.tflite")).read_bytes()
    return Example(content, {"x": np.ones(shape, np.float32)}, short, {"image": np.zeros((1, 8, 8, 1), np.float32)})


RUNTIMES: dict[str, Callable[[], Example]] = {"onnxruntime": onnx_loop, "litert": tflite_convolution}


@pytest.fixture(params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> str:
    pytest.importorskip({"litert": "ai_edge_litert"}.get(request.param, request.param))
    return str(request.param)


@pytest.fixture
def example(runtime: str) -> Example:
    return RUNTIMES[runtime]()


@pytest.fixture
def neighbour(shared_daemon: Daemon, runtime: str, example: Example) -> Iterator[None]:
    """Let another client have a burst on the same runtime, which executes before and after the test."""
    with (
        shared_daemon.connect() as client,
        client.device(runtime).prepare(example.short_file) as model,
        model.burst() as burst,
    ):
        before = [array.copy() for array in burst.execute(example.short_inputs)]
        yield
        after = burst.execute(example.short_inputs, timeout=LIMIT_S)
        assert all(map(np.array_equal, before, after))


def running(client: nnfmq.Client, burst: nnfmq.Burst, example: Example, timeout: float | None = None) -> InThread:
    """Start a long execution, and return when the worker computes."""
    call = InThread.start(lambda: burst.execute(example.inputs, timeout=timeout))
    wait_until_waiting(burst)
    with Process(client.worker_pid) as worker:
        until(lambda: "R" in worker.states(), "the worker computes")
    return call


def test_SIGKILL_of_the_worker_in_a_run_is_DEAD_OBJECT_and_the_client_goes_on_with_another_worker(
    shared_daemon: Daemon, runtime: str, example: Example, neighbour: None
) -> None:
    with nnfmq.connect(shared_daemon.path, timeout=LIMIT_S, recover=True) as client:
        device = client.device(runtime)
        with device.prepare(example.file) as model, model.burst() as burst, device.prepare(example.short_file) as other:
            call = running(client, burst, example)
            with Process(client.worker_pid) as worker:
                killed_ns = worker.kill()
                assert isinstance(call.wait().error, nnfmq.DeadObject)
            print(f"DEAD_OBJECT {(call.ended_ns - killed_ns) / 1e6:.1f} ms after SIGKILL")
            assert call.ended_ns - killed_ns < 10 * DEAD_WITHIN_NS  # 100 ms on an otherwise idle machine
            other.execute(example.short_inputs, timeout=LIMIT_S)


def test_SIGSTOP_of_the_worker_in_a_run_is_a_missed_deadline(
    shared_daemon: Daemon, runtime: str, example: Example, neighbour: None
) -> None:
    with (
        shared_daemon.connect() as client,
        client.device(runtime).prepare(example.file) as model,
        model.burst() as burst,
        Process(client.worker_pid) as worker,
    ):
        call = running(client, burst, example, timeout=0.5)
        with worker.stopped():
            assert isinstance(call.wait().error, nnfmq.MissedDeadline)
            worker.kill()
