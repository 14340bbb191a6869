"""Baselines for the round trips of a burst: a C ping-pong over the same ring, and a multiprocessing.Pipe.

Used by latency_stress.py and queue_bench.py. Both exchange 512 bytes for 64, which is about the size of a burst's
packets. The C program is compiled with `cc` against the queue's own header; it measures the least time that two
processes need. The pipe is the means of the Python standard library. Processes that wait for either have a time limit
instead of a poll before each receive, because that poll would be measured too.
"""

from __future__ import annotations

import multiprocessing
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from bench_processes import set_time_limit

import nnfmq.queue
from nnfmq.measure import cpu_pinning
from nnfmq.measure.failures import RunnerUnavailable
from nnfmq.measure.percentiles import distribution

REQUEST_BYTES = 512
REPLY_BYTES = 64
_C_SOURCE = Path(__file__).with_name("c_pingpong.c")
_C_HEADERS = Path(nnfmq.queue.__file__).parent


@dataclass(frozen=True, slots=True)
class Comparison:
    """p50 of each candidate in each round, the medians over the rounds, and the ratios of the medians."""

    rounds: int
    p50_ns: dict[str, list[int]]
    median_ns: dict[str, float]
    nnfmq_over_c: float | None
    pipe_over_nnfmq: float
    missing: str

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dict for JSON."""
        return asdict(self)


def compare(
    burst: Callable[[], list[int]], *, count: int, warm_up: int, rounds: int, cpus: cpu_pinning.Cpus, folder: Path,
    limit_s: int,
) -> Comparison:  # fmt: skip
    """Run `rounds` rounds, each with the burst, the C program and the pipe in turn; return the comparison.

    `burst` runs one round and returns its round trips in ns. If the C program cannot run, `missing` has the reason.
    """
    candidates: dict[str, Callable[[], list[int]]] = {"nnfmq": burst}
    missing = ""
    try:
        candidates["c"] = _c_candidate(folder, count, warm_up, limit_s)
    except RunnerUnavailable as reason:
        missing = str(reason)
    with PipeServer.start(cpus.driver, limit_s) as pipe:
        candidates["pipe"] = lambda: pipe.round(count, warm_up)
        p50_ns: dict[str, list[int]] = {name: [] for name in candidates}
        for _ in range(rounds):
            for name, candidate in candidates.items():
                p50_ns[name].append(distribution(candidate())["p50"])
    return _comparison(p50_ns, rounds, missing)


def _comparison(p50_ns: dict[str, list[int]], rounds: int, missing: str) -> Comparison:
    medians = {name: float(statistics.median(values)) for name, values in p50_ns.items()}
    over_c = medians["nnfmq"] / medians["c"] if "c" in medians else None
    return Comparison(rounds, p50_ns, medians, over_c, medians["pipe"] / medians["nnfmq"], missing)


def _c_candidate(folder: Path, count: int, warm_up: int, limit_s: int) -> Callable[[], list[int]]:
    """Return a function that runs one round of the C program, with a CPU for each side.

    Raises:
        RunnerUnavailable: If the program cannot be compiled, or only one CPU is allowed.
    """
    program = compile_c_pingpong(folder)
    cpus = cpu_pinning.two_cpus()
    if cpus is None:
        raise RunnerUnavailable("the C ping-pong spins on two cores; one is allowed here")
    return lambda: run_c_pingpong(program, count, warm_up, cpus, limit_s)


def compile_c_pingpong(folder: Path) -> Path:
    """Compile the C ping-pong into `folder` and return the program's path.

    Raises:
        RunnerUnavailable: If there is no C compiler, or compiling fails.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RunnerUnavailable("no C compiler (cc, gcc, clang) for the C ping-pong")
    program = folder / "c_pingpong"
    command = [compiler, "-O3", "-std=gnu11", "-I", str(_C_HEADERS), "-o", str(program), str(_C_SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RunnerUnavailable(f"{compiler} failed: {done.stderr.strip()}")
    return program


def run_c_pingpong(
    program: Path, count: int, warm_up: int, cpus: cpu_pinning.Cpus, limit_s: int, mode: str = "spin"
) -> list[int]:  # fmt: skip
    """Run the C ping-pong once and return its `count` round trips in ns.

    `mode` is `spin`, which needs two CPUs, or `futex`, which sleeps and wakes for each message.

    Raises:
        RunnerUnavailable: If the program fails.
    """
    words = [mode, count, warm_up, cpus.client, cpus.driver, limit_s]
    command = [str(program), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s + 5, check=False)
    if done.returncode:
        raise RunnerUnavailable(f"the C ping-pong ended with {done.returncode}: {done.stderr.strip()}")
    return [int(line) for line in done.stdout.split()]


class PipeServer:
    """A process that replies to 512 bytes with 64 over a multiprocessing.Pipe. Close it, or use `with`."""

    def __init__(self, process: multiprocessing.process.BaseProcess, connection: Connection) -> None:
        self._process = process
        self._connection = connection

    @classmethod
    def start(cls, cpu: int | None, limit_s: int) -> Self:
        """Start the process on `cpu` (None: any). It exits when the pipe is closed, or after `limit_s` seconds."""
        context = multiprocessing.get_context("spawn")
        connection, server_end = context.Pipe()
        process = context.Process(target=_serve_pipe, args=(server_end, cpu, limit_s), daemon=True)
        process.start()
        server_end.close()
        return cls(process, connection)

    def round(self, count: int, warm_up: int) -> list[int]:
        """Return `count` round trips in ns; `warm_up` more come first and are not recorded."""
        for _ in range(warm_up):
            self._trip()
        return [self._trip() for _ in range(count)]

    def _trip(self) -> int:
        begin = time.perf_counter_ns()
        self._connection.send_bytes(_REQUEST)
        self._connection.recv_bytes()
        return time.perf_counter_ns() - begin

    def close(self) -> None:
        """End the process and reap it."""
        self._connection.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_REQUEST = bytes(REQUEST_BYTES)
_REPLY = bytes(REPLY_BYTES)


def _serve_pipe(connection: Connection, cpu: int | None, limit_s: int) -> None:
    set_time_limit(limit_s)
    cpu_pinning.pin_process(0, cpu)
    try:
        while True:
            connection.recv_bytes()
            connection.send_bytes(_REPLY)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        connection.close()
