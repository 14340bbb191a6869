"""Measure the start: `tools/start_bench.py [--rounds N] [--model FILE]`, milliseconds to a first result.

Each round starts one Python process with an embedded driver and one that connects to a running driver; both find the
model's program in the driver's cache. Printed are the median and the minimum of each step, as the application sees it:
the imports of nnfmq and NumPy, `connect`, `prepare` and the first `execute`. Python's own start is not counted. Byte
code is in a folder of the benchmark, which a first round fills: $PYTHONDONTWRITEBYTECODE has no effect.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from nnfmq.measure.listening_driver import started_daemon

ROUNDS = 15
MODEL = Path(__file__).parents[1] / "nnfmq" / "data" / "digits.tflite"
STEPS = ("import", "connect", "prepare", "execute", "total")
APPLICATION = """
import time
times = [time.perf_counter_ns()]
import json, sys
import numpy
import nnfmq
times.append(time.perf_counter_ns())
path = json.loads(sys.argv[1])
with nnfmq.connect(path, embedded=path is None) as client:
    times.append(time.perf_counter_ns())
    model = client.prepare(sys.argv[2])
    times.append(time.perf_counter_ns())
    model.execute(*(numpy.zeros(tensor.shape, tensor.dtype) for tensor in model.inputs))
    times.append(time.perf_counter_ns())
print(json.dumps(times))
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds (default: {ROUNDS})")
    parser.add_argument("--model", type=Path, default=MODEL, help="model file (default: the digits' of the package)")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        environment = {"PYTHONPYCACHEPREFIX": f"{folder}/bytecode", "XDG_CACHE_HOME": f"{folder}/cache"}
        with started_daemon(Path(folder), environment) as daemon:
            rows = measure({"embedded": None, "daemon": daemon.socket}, arguments.model, arguments.rounds, environment)
    print(f"median (minimum) of {arguments.rounds} rounds, ms")
    print("".join(f"{name:>16}" for name in ("", *STEPS)))
    for name, times in rows.items():
        print(f"{name:>16}" + "".join(f"{statistics.median(t):10.0f} ({min(t):3.0f})" for t in times))
    return 0


def measure(
    drivers: Mapping[str, str | None], model: Path, rounds: int, environment: Mapping[str, str]
) -> dict[str, list[list[float]]]:
    """Return the milliseconds of each of STEPS by round, for each driver: a socket's path, or None to embed one."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    results: dict[str, list[list[float]]] = {name: [] for name in drivers}
    for path in drivers.values():
        run_once(path, model, {**inherited, **environment})  # the program is in the cache then
    for _ in range(rounds):
        for name, path in drivers.items():
            results[name].append(run_once(path, model, {**inherited, **environment}))
    return {name: [list(times) for times in zip(*found, strict=True)] for name, found in results.items()}


def run_once(path: str | None, model: Path, environment: Mapping[str, str]) -> list[float]:
    """Return the milliseconds of each of STEPS in a new process."""
    command = [sys.executable, "-P", "-c", APPLICATION, json.dumps(path), str(model)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    times = json.loads(done.stdout)
    steps = [after - before for before, after in itertools.pairwise(times)]
    return [step / 1e6 for step in (*steps, times[-1] - times[0])]


if __name__ == "__main__":
    sys.exit(main())
