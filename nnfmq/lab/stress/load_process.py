"""A process that loads the machine: `python -m nnfmq.lab.stress.load_process KIND CPU SOCKET SEED`.

It prints `ready`, reads a line with begin and end on the monotonic clock in ns, and loads in between. `cpu` computes,
`churn` takes and returns memory, `compilation` is another client of the driver, which prepares one model after the
other. CPU is a number, or `-` for any.

Then it waits until it is killed or its parent ends: the exit of an interpreter, and that of a client's worker, would be
a load of its own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

__all__ = ["LOADS"]

_CHURN_BYTES = 64 << 20
_VARIANTS = 40


def _cpu(until_ns: int) -> None:
    while time.monotonic_ns() < until_ns:
        pass


def _churn(until_ns: int) -> None:
    while time.monotonic_ns() < until_ns:
        bytearray(_CHURN_BYTES)[::4096] = b"\1" * (_CHURN_BYTES // 4096)


def _compilation(socket: str, seed: int) -> Callable[[int], None]:
    """Return a load that compiles the packaged model for another batch each time, so that no cache has it."""
    from nnfmq.client.connection.connect import connect
    from nnfmq.data import example_path
    from nnfmq.importers import load as load_model

    client, path = connect(socket), example_path("digits.tflite")
    batches = range(2 + seed * _VARIANTS, 2 + (seed + 1) * _VARIANTS)
    models = iter([load_model(path, shapes={0: (batch, 8, 8, 1)}) for batch in batches])

    def load(until_ns: int) -> None:
        for model in models:
            if time.monotonic_ns() >= until_ns:
                break
            client.prepare(model, preference="sustained_speed").close()

    return load


LOADS = ("cpu", "churn", "compilation")


def main() -> int:
    """Load the machine as the arguments say; return 0."""
    kind, cpu, socket, seed = sys.argv[1:]
    if cpu != "-":
        os.sched_setaffinity(0, {int(cpu)})
    load = {"cpu": _cpu, "churn": _churn}.get(kind) or _compilation(socket, int(seed))
    print("ready", flush=True)
    line = sys.stdin.readline()
    if line:  # else the parent has ended
        begin_ns, until_ns = map(int, line.split())
        time.sleep(max(0, begin_ns - time.monotonic_ns()) / 1e9)
        load(until_ns)
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
