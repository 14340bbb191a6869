"""A client process of `driver_bench.py memory` and `hosting`: execute a model, then wait for what to do.

    python memory_client.py connected MODEL EXECUTIONS SOCKET
    python memory_client.py nnfmq MODEL EXECUTIONS SOCKET
    python memory_client.py litert MODEL EXECUTIONS
    python memory_client.py hosted MODEL EXECUTIONS SOCKET
    python memory_client.py onnxruntime MODEL EXECUTIONS

`connected` prepares no model. `nnfmq` uses the device `compiled` over a burst, `litert` LiteRT with its default
delegate and one thread, with the model's path; `hosted` the device `onnxruntime` over a burst, `onnxruntime` ONNX
Runtime in this process, both with one thread. All import NumPy and their runtime, nothing else. The process prints a
JSON object when all executions are done. For each empty line on stdin it executes once more and prints another object,
so that the memory that an execution uses is present when it is measured. For the line "BEGIN_NS SECONDS" it executes
from that time of the monotonic clock on for so long, and prints how often. It exits when stdin is closed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

Execute = Callable[[], object]
_CONNECT_S = 60.0  # all clients connect at once


def main(words: Sequence[str]) -> None:
    """Run the client."""
    with ExitStack() as stack:
        execute, details = START[words[0]](stack, words[1], *words[3:])
        for _ in range(int(words[2])):
            execute()
        _print(details)
        for line in sys.stdin:
            words_of_line = line.split()
            if words_of_line:
                _print({"executions": _executions(execute, int(words_of_line[0]), float(words_of_line[1]))})
            else:
                execute()
                _print(details)


def _executions(execute: Execute, begin_ns: int, seconds: float) -> int:
    """Return how many executions end within some seconds."""
    time.sleep(max(0, begin_ns - time.monotonic_ns()) / 1e9)
    end_ns, count = begin_ns + round(seconds * 1e9), 0
    while time.monotonic_ns() < end_ns:
        execute()
        count += 1
    return count


def _print(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def _random(shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    return (np.random.default_rng(7).random(shape) * 100).astype(dtype)


def _start_connected(stack: ExitStack, _model: str, socket: str) -> tuple[Execute, dict[str, Any]]:
    import nnfmq

    client = stack.enter_context(nnfmq.connect(socket, timeout=_CONNECT_S))
    return lambda: None, {"worker_pid": client.worker_pid}


def _start_nnfmq(stack: ExitStack, model: str, socket: str) -> tuple[Execute, dict[str, Any]]:
    import nnfmq

    client = stack.enter_context(nnfmq.connect(socket, timeout=_CONNECT_S))
    prepared = stack.enter_context(client.device("compiled").prepare(nnfmq.load(model)))
    burst = stack.enter_context(prepared.burst())
    inputs = [_random(info.shape, info.dtype) for info in prepared.inputs]
    return lambda: burst.execute(*inputs), {"worker_pid": client.worker_pid}


def _start_litert(_: ExitStack, model: str) -> tuple[Execute, dict[str, Any]]:
    from ai_edge_litert.interpreter import Interpreter  # type: ignore[import-not-found, import-untyped, unused-ignore]

    interpreter = Interpreter(model_path=model, num_threads=1)
    interpreter.allocate_tensors()
    inputs = [(each["index"], _random(each["shape"], each["dtype"])) for each in interpreter.get_input_details()]
    outputs = [each["index"] for each in interpreter.get_output_details()]

    def execute() -> object:
        for index, array in inputs:
            interpreter.set_tensor(index, array)
        interpreter.invoke()
        return [interpreter.get_tensor(index) for index in outputs]

    return execute, {"worker_pid": None}


def _start_hosted(stack: ExitStack, model: str, socket: str) -> tuple[Execute, dict[str, Any]]:
    import nnfmq

    client = stack.enter_context(nnfmq.connect(socket, timeout=_CONNECT_S))
    device = client.device("onnxruntime")
    prepared = stack.enter_context(device.prepare(model, runtime_options={"threads": 1}))
    burst = stack.enter_context(prepared.burst())
    inputs = [_random(info.shape, info.dtype) for info in prepared.inputs]
    return lambda: burst.execute(*inputs), {"worker_pid": client.worker_pid}


def _start_onnxruntime(_: ExitStack, model: str) -> tuple[Execute, dict[str, Any]]:
    import onnxruntime  # type: ignore[import-not-found, import-untyped, unused-ignore]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    dtypes = {"tensor(float)": "float32", "tensor(int64)": "int64", "tensor(int32)": "int32"}
    inputs = {each.name: _random(each.shape, dtypes[each.type]) for each in session.get_inputs()}
    return lambda: session.run(None, inputs), {"worker_pid": None}


START: dict[str, Callable[..., tuple[Execute, dict[str, Any]]]] = {
    "connected": _start_connected, "nnfmq": _start_nnfmq, "litert": _start_litert, "hosted": _start_hosted,
    "onnxruntime": _start_onnxruntime,
}  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
