"""Execute a model with the nnfmq in PYTHONPATH, and print times: a version of `model_bench.py --against-ref`.

    PYTHONPATH=FOLDER python -P tools/version_runner.py trials MODEL CPU,... CPU,...
    PYTHONPATH=FOLDER python -P tools/version_runner.py start MODEL

Both versions run this file, so it uses only what a user of nnfmq imports. *trials*: the driver's worker computes on
the first CPUs and the client runs on the second ones. The first line on stdout describes the version; for each line on
stdin, a number of seconds, a line has the times in ns of the executions of each form in so many seconds, at least five.
*start*: from the import to the result of 20 executions.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

FORMS = ("burst in place", "burst", "execute")
START_EXECUTIONS = 20


def pin(pid: int, cpus: Iterable[int]) -> None:
    """Set the CPUs of every thread of a process; 0 is this one."""
    for thread in os.listdir(f"/proc/{pid or 'self'}/task"):
        os.sched_setaffinity(int(thread), set(cpus))


def inputs_of(model: Any) -> list[Any]:
    """Return random inputs, the same in each version."""
    import numpy as np

    random = np.random.default_rng(7)
    return [(random.random(info.shape) * (1 if np.dtype(info.dtype).kind == "f" else 100)).astype(info.dtype)
            for info in model.inputs]  # fmt: skip


def serve_trials(path: str, computing: list[int], client_cpus: list[int]) -> None:
    """Run the trials that stdin asks for, until it is closed."""
    import nnfmq
    from nnfmq.queue.core import core_name

    allowed = os.sched_getaffinity(0)
    with nnfmq.connect(embedded=True, recover=False) as client:
        pin(client.worker_pid, computing)  # its number of threads follows its CPUs
        sustained = nnfmq.ExecutionPreference.SUSTAINED_SPEED
        with client.device("compiled").prepare(path, preference=sustained) as model:
            for pid in (0, client.worker_pid):  # a burst polls if its process may use two CPUs
                pin(pid, allowed)
            with model.burst() as burst:
                pin(client.worker_pid, computing)
                pin(0, client_cpus)
                pids = [os.getpid(), client.worker_pid]
                print(json.dumps({"package": nnfmq.__file__, "core": core_name, "pids": pids}))
                forms = _forms(model, burst, inputs_of(model))
                for line in sys.stdin:
                    print(json.dumps([_times(form, float(line)) for form in forms]))


def _forms(model: Any, burst: Any, inputs: list[Any]) -> list[Callable[[], object]]:
    execute, outputs, buffers = burst.execute, burst.outputs, burst.inputs

    def in_place() -> None:
        for buffer, array in zip(buffers, inputs, strict=True):
            buffer[...] = array
        execute(out=outputs)

    return [in_place, lambda: execute(*inputs), lambda: model.execute(*inputs)]


def _times(form: Callable[[], object], seconds: float) -> list[int]:
    """Return times of executions, after a tenth of `seconds` in which they are not timed."""
    _timed(form, seconds / 10, 3)
    return _timed(form, seconds, 5)


def _timed(form: Callable[[], object], seconds: float, at_least: int) -> list[int]:
    clock = time.perf_counter_ns
    times: list[int] = []
    end = clock() + int(seconds * 1e9)
    while (begin := clock()) < end or len(times) < at_least:
        form()
        times.append(clock() - begin)
    return times


def start(path: str) -> None:
    """Do what a short script does, with an embedded driver."""
    import nnfmq

    with nnfmq.connect(embedded=True) as client, client.prepare(path) as model:
        inputs = inputs_of(model)
        for _ in range(START_EXECUTIONS):
            model.execute(*inputs)


if __name__ == "__main__":
    if sys.argv[1] == "start":
        start(sys.argv[2])
    else:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        serve_trials(sys.argv[2], *([int(cpu) for cpu in each.split(",")] for each in sys.argv[3:5]))
