"""A client process of `driver_bench.py memory`: execute a model, then wait until its memory was measured.

    python memory_client.py nnfmq MODEL EXECUTIONS SOCKET
    python memory_client.py litert MODEL EXECUTIONS

`nnfmq` uses the device `compiled` over a burst, `litert` LiteRT with its default delegate and one thread, with the
model's path. Both import NumPy and their runtime, nothing else. The process prints a JSON object when all executions
are done. For each line on stdin it executes once more and prints another object, so that the memory that an execution
uses is present when it is measured. It exits when stdin is closed.
"""

from __future__ import annotations

import json
import sys
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
        for _ in sys.stdin:
            execute()
            _print(details)


def _print(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def _random(shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    return (np.random.default_rng(7).random(shape) * 100).astype(dtype)


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


START: dict[str, Callable[..., tuple[Execute, dict[str, Any]]]] = {"nnfmq": _start_nnfmq, "litert": _start_litert}


if __name__ == "__main__":
    main(sys.argv[1:])
