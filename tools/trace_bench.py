"""What a trace costs: null bursts of a traced and of an untraced application, in interleaved pairs.

Each application is a process with an embedded driver of its own. A pair asks both, in alternating order, for the time
of an execution: the minimum over many short batches, because whatever else runs on the machine only adds to it. The
reported interval is that of the mean difference over all pairs (95 %, normal). Pin the process to two CPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from nnfmq.hal.types import LifeTime, Model, Operand, OperandType, Operation, OperationType, Subgraph

_BATCHES, _EXECUTIONS, _WARM_UP = 200, 10, 2000
_POLL_US = 1e6


def serve(device: str, operations: int) -> None:
    """Answer each line of stdin with the time of an execution in ns, of a model of so many operations."""
    import nnfmq

    model = _model(operations)
    with (
        nnfmq.connect(embedded=True) as client,
        client.device(device).prepare(model) as prepared,
        prepared.burst(polling_window_us=_POLL_US) as burst,
    ):
        burst.inputs[0][...] = np.float32(1)
        outputs = burst.outputs
        for _ in range(_WARM_UP):
            burst.execute(out=outputs)
        print("ready", flush=True)
        for _ in sys.stdin:
            print(min(_batches(burst, outputs)), flush=True)


def _batches(burst: object, outputs: object) -> Iterator[float]:
    execute, clock = burst.execute, time.perf_counter_ns  # type: ignore[attr-defined]
    for _ in range(_BATCHES):
        begin_ns = clock()
        for _ in range(_EXECUTIONS):
            execute(out=outputs)
        yield (clock() - begin_ns) / _EXECUTIONS


def _model(operations: int) -> Model:
    """Return a model of `operations` LOGISTICs, one after the other, of one float."""
    lifetimes = [LifeTime.SUBGRAPH_INPUT, *[LifeTime.TEMPORARY_VARIABLE] * (operations - 1), LifeTime.SUBGRAPH_OUTPUT]
    operands = tuple(Operand(OperandType.TENSOR_FLOAT32, (1,), lifetime=lifetime) for lifetime in lifetimes)
    steps = tuple(Operation(OperationType.LOGISTIC, (index,), (index + 1,)) for index in range(operations))
    return Model(Subgraph(operands, steps, (0,), (operations,)))


@contextmanager
def application(device: str, operations: int, trace: Path | None) -> Iterator[subprocess.Popen[str]]:
    """Start a process that runs `serve`, and wait until it is ready."""
    environment = {name: value for name, value in os.environ.items() if name != "NNFMQ_TRACE"}
    if trace is not None:
        environment["NNFMQ_TRACE"] = str(trace)
    command = [sys.executable, __file__, "--serve", "--device", device, "--operations", str(operations)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise OSError(f"the application ended with status {process.wait()}")
        yield process
        process.stdin.close()


def ask(process: subprocess.Popen[str]) -> float:
    """Return the time of an execution."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def measure(device: str, operations: int, pairs: int) -> dict[str, object]:
    """Return the times of untraced and traced executions, and of their differences, in ns."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        with application(device, operations, None) as plain, application(device, operations, trace) as traced:
            times = [_pair(plain, traced, number) for number in range(pairs)]
    differences = [on - off for off, on in times]
    return {
        "device": device,
        "operations": operations,
        "pairs": pairs,
        "off_ns": min(off for off, _ in times),
        "on_ns": min(on for _, on in times),
        "median_difference_ns": statistics.median(differences),
        "mean_difference_ns": statistics.mean(differences),
        "interval_ns": 1.96 * statistics.pstdev(differences) / math.sqrt(pairs),
    }


def _pair(plain: subprocess.Popen[str], traced: subprocess.Popen[str], number: int) -> tuple[float, float]:
    if number % 2:
        on = ask(traced)
        return ask(plain), on
    return ask(plain), ask(traced)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as the arguments say, and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="reference", help="default: reference")
    parser.add_argument("--operations", type=int, default=1, help="operations of the model (default: 1)")
    parser.add_argument("--pairs", type=int, default=30, help="default: 30")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.serve:
        serve(arguments.device, arguments.operations)
        return 0
    print(json.dumps(measure(arguments.device, arguments.operations, arguments.pairs), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
