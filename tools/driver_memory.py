"""The memory of a driver with its clients, beside LiteRT in as many processes, and that of an idle driver.

*quantized* runs MobileNet v2 uint8 of $NNFMQ_DATA, *float* a generated model of 100 MB, *busy* clients that come and
go. Each section starts a driver of its own. All processes are found in the process tree. Their PSS (proportional set
size) and Private_Dirty are read from /proc/PID/smaps_rollup, right after one more execution of every client. No other
Python program should be running: pages of the interpreter that it maps, too, count for less. The benchmark itself
imports neither NumPy nor more of nnfmq than errors before all is measured. Clients are a program of their own,
memory_client.py, which imports nothing but its runtime: a child of `multiprocess` would have dill in its memory, too.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from bench_support import (
    Report,
    Table,
    Tables,
    missed_targets,
    model_file,
    positive,
    some_of,
    targets_table,
    upper_limit,
)

from nnfmq.base.processes import descendants
from nnfmq.lab import child_processes
from nnfmq.lab.child_processes import BenchmarkFailed, call_in_child, started_child
from nnfmq.lab.listening_driver import Daemon, started_daemon
from nnfmq.lab.placement import ProcessMemory, command_of, memory_of, open_memfd_bytes

HERE = Path(__file__).parent
MIB = 1 << 20
QUANTIZED = "models/mobilenet_v2_1.0_224_quant.tflite"
SECTIONS = ("quantized", "float", "busy")
RATIO_LIMITS = {"quantized": 1.5, "float": 0.5}
WORKER_LIMIT_MIB, IDLE_LIMIT_MIB = 8.0, 40.0
READINGS = 3
_END_S = 20.0
_BETWEEN_S = 0.2  # two readings of an idle driver
Section = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--sections", type=some_of(SECTIONS), default=SECTIONS, metavar="NAME,...", help=f"{', '.join(SECTIONS)}"
    )
    parser.add_argument("--clients", type=positive, default=8)
    parser.add_argument("--executions", type=positive, default=1000, help="of each client (default: 1000)")
    parser.add_argument("--model", type=Path, help=f"of section quantized (default: {QUANTIZED} in $NNFMQ_DATA)")
    parser.add_argument(
        "--together", action="store_true",
        help="start all clients at once, instead of the others when the first one's executions are done",
    )  # fmt: skip
    parser.add_argument("--float-mb", type=positive, default=100, help="weights of the float model (default: 100)")
    parser.add_argument("--busy", type=float, default=20.0, metavar="S", help="seconds of section busy (default: 20)")
    parser.add_argument(
        "--settle", type=float, default=5.0, metavar="S",
        help="seconds between the last client's exit and the reading of the idle driver (default: 5)",
    )  # fmt: skip
    parser.add_argument("--limit", type=positive, default=900, metavar="S", help="time limit of each step in seconds")


# ---- sections


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the report, as --json prints it. `folder` is for the driver's files and the generated model.

    Raises:
        BenchmarkFailed: If the driver or a client fails, or a step takes longer than its limit.
    """
    write_bytecode(options)
    sections = [_SECTION[name](options, _new_folder(folder, name)) | {"section": name} for name in options.sections]
    targets = [target for section in sections for target in section["targets"]]
    return {
        "conditions": _conditions(options),
        "sections": sections,
        "missed": missed_targets(targets),
    }


def _new_folder(folder: Path, name: str) -> Path:
    made = folder / name
    made.mkdir()
    return made


def _conditions(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "clients": options.clients, "executions": options.executions, "together": options.together,
        "busy_s": options.busy, "settle_s": options.settle,
    }  # fmt: skip


def _quantized(options: argparse.Namespace, folder: Path) -> Section:
    return _compare("quantized", options, folder, model_file(options, QUANTIZED, "section quantized"))


def _float(options: argparse.Namespace, folder: Path) -> Section:
    path = folder / "float.tflite"
    _say(f"float: writing a model with {options.float_mb} MB of weights")
    call_in_child(_write_float_model, path, options.float_mb, limit_s=options.limit)
    return _compare("float", options, folder, path)


def _compare(name: str, options: argparse.Namespace, folder: Path, model: Path) -> Section:
    """Measure the driver with its clients, then LiteRT in as many processes, with the same model."""
    arena = call_in_child(_arena_bytes, model, limit_s=options.limit)
    with started_daemon(folder) as daemon:
        before = _settled(daemon, options)
        with started_clients("connected", model, options, daemon.socket, clients=1) as clients:
            waiting = [reading(clients, daemon) for _ in range(READINGS)]
        _say(f"{name}: {options.clients} clients of the driver, {options.executions} executions each")
        with started_clients("nnfmq", model, options, daemon.socket) as clients:
            subject = [reading(clients, daemon) for _ in range(READINGS)]
        after = _settled(daemon, options)
    _say(f"{name}: {options.clients} LiteRT processes, {options.executions} executions each")
    with started_clients("litert", model, options) as clients:
        baseline = [reading(clients, None) for _ in range(READINGS)]
    idle = {"before any client": before, "after the last client": after}
    return {
        "model": model.name, "model_bytes": model.stat().st_size, "arena_bytes": arena,
        "nnfmq": summary(subject), "litert": summary(baseline), "idle": idle,
        "targets": [
            _ratio_target(name, subject, baseline),
            _worker_target(f"{name}: Private_Dirty of a worker without a model", waiting),
            _worker_target(f"{name}: Private_Dirty of the largest worker less its arena", subject, arena),
            *_idle_targets(name, idle),
        ],
    }  # fmt: skip


def _write_float_model(path: Path, megabytes: int) -> None:
    from generated_models import float_model

    path.write_bytes(float_model(megabytes * 10**6))


def _arena_bytes(model: Path) -> int:
    """Return the bytes that an execution of a model uses on `compiled` between its inputs and its outputs."""
    import nnfmq
    from nnfmq.engines.compiled.partition import prepare

    program = prepare(nnfmq.load(model).model)
    plans = [plan for step in program.steps if (plan := getattr(step.function, "plan", None)) is not None]
    return sum(plan.arena_bytes for plan in plans)


def _busy(options: argparse.Namespace, folder: Path) -> Section:
    """Measure the idle driver before and after a time in which clients make all kinds of calls, come and go."""
    with started_daemon(folder) as daemon:
        before = _settled(daemon, options)
        _say(f"busy: clients come and go for {options.busy:g} seconds")
        _keep_busy(options, daemon)
        idle = {"before any client": before, "after the busy time": _settled(daemon, options)}
    return {"model": None, "idle": idle, "targets": _idle_targets("busy", idle)}


def _keep_busy(options: argparse.Namespace, daemon: Daemon) -> None:
    """Run two processes of random clients, and clients with MobileNet v2 one after the other if its file is there."""
    end = time.monotonic() + options.busy
    with ExitStack() as stack:
        random = [
            stack.enter_context(started_child(_random_clients, daemon.socket, seed, max(1, int(options.busy))))
            for seed in (1, 2)
        ]
        with suppress(BenchmarkFailed):
            model = model_file(options, QUANTIZED, "section quantized")
            while time.monotonic() < end:
                with started_clients("nnfmq", model, options, daemon.socket, clients=2, executions=10):
                    pass
        for child in random:
            failures = child.receive(options.limit)["failures"]
            if failures:
                raise BenchmarkFailed(f"a random client failed: {failures[0]}")


def _random_clients(connection: Any, socket: str, seed: int, seconds: int) -> None:
    from driver_stress import run_client

    run_client(connection, socket, seed, seconds, 2)


_SECTION: dict[str, Callable[[argparse.Namespace, Path], Section]] = {
    "quantized": _quantized, "float": _float, "busy": _busy,
}  # fmt: skip


# ---- clients


@dataclass(frozen=True, slots=True)
class Client:
    """A process of memory_client.py."""

    process: subprocess.Popen[str]
    worker_pid: int | None
    errors: IO[str]

    def execute_once(self, limit_s: float) -> None:
        """Let it execute once more; blocks."""
        self.send("")
        self.receive(limit_s)

    def send(self, line: str) -> None:
        """Send what it shall do (`memory_client`)."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def receive(self, limit_s: float) -> dict[str, Any]:
        """Return its reply. Raises BenchmarkFailed if there is none in time."""
        return _receive(self.process, self.errors, limit_s)


class started_clients:
    """Start clients and wait until all have executed; at exit end them.

    Unless --together, the others start when the first one is done, so that they find its program in the driver's cache.
    """

    def __init__(
        self, kind: str, model: Path, options: argparse.Namespace, *words: str, clients: int = 0, executions: int = 0
    ) -> None:
        count = str(executions or options.executions)
        self._command = [sys.executable, str(HERE / "memory_client.py"), kind, str(model), count, *words]
        self._count = clients or options.clients
        self._is_together = options.together
        self._limit_s = options.limit
        self._stack = ExitStack()

    def __enter__(self) -> list[Client]:
        with self._stack:
            first = 0 if self._is_together else 1
            found = [self._ready(*self._start()) for _ in range(first)]
            started = [self._start() for _ in range(self._count - first)]
            found += [self._ready(*each) for each in started]
            self._stack = self._stack.pop_all()
        return found

    def _start(self) -> tuple[subprocess.Popen[str], IO[str]]:
        errors = self._stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115  the stack closes it
        process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
        )  # fmt: skip
        self._stack.callback(_end, process)
        return process, errors

    def _ready(self, process: subprocess.Popen[str], errors: IO[str]) -> Client:
        return Client(process, _receive(process, errors, self._limit_s)["worker_pid"], errors)

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _receive(process: subprocess.Popen[str], errors: IO[str], limit_s: float) -> dict[str, Any]:
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], limit_s)[0]:
        raise BenchmarkFailed(f"a client did not reply within {limit_s:g} seconds")
    line = process.stdout.readline()
    if not line:
        status = process.wait(limit_s)
        errors.seek(0)
        raise BenchmarkFailed(f"a client ended with status {status}: {errors.read()[-1000:]}")
    found: dict[str, Any] = json.loads(line)
    return found


def _end(process: subprocess.Popen[Any]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def write_bytecode(options: argparse.Namespace) -> None:
    """Compile nnfmq's modules, as pip does for an installed package: processes would keep what compiling takes."""
    folder = Path(child_processes.__file__).parents[1]
    subprocess.run([sys.executable, "-m", "compileall", "-q", folder], timeout=options.limit, check=True)


# ---- readings


@dataclass(frozen=True, slots=True)
class _Reading:
    """The memory of each process at one time, by pid; `kinds` are the kinds of the processes."""

    kinds: dict[int, str]
    memory: dict[int, ProcessMemory]

    def total(self, kind: str | None = None) -> ProcessMemory:
        """Return the sum of the processes of a kind, or of all."""
        chosen = [memory for pid, memory in self.memory.items() if kind in (None, self.kinds[pid])]
        return sum(chosen, ProcessMemory())


def reading(clients: Sequence[Client], daemon: Daemon | None) -> _Reading:
    """Return the memory of all processes after one more execution of every client.

    Raises:
        BenchmarkFailed: If a client or a worker has died.
    """
    for client in clients:
        client.execute_once(60)
    kinds = {client.process.pid: "client" for client in clients}
    own = {pid: "child of a client" for client in clients for pid in descendants(client.process.pid)}
    workers = {client.worker_pid: "worker" for client in clients if client.worker_pid is not None}
    found = read_kinds(daemon, kinds | own, workers) if daemon else read_kinds(None, kinds | own, {})
    if not (set(kinds) | set(workers)) <= set(found.memory):
        raise BenchmarkFailed("a client or a worker ended before its memory was read")
    return found


def read_kinds(daemon: Daemon | None, clients: dict[int, str], workers: dict[int, str]) -> _Reading:
    """Return the memory of the driver's processes and of clients. What has another parent now counts for the driver."""
    kinds = dict(clients)
    if daemon is not None:
        for pid in descendants(os.getpid()):
            kinds.setdefault(pid, workers.get(pid, "other process of the driver"))
        kinds[daemon.pid] = "supervisor"
    memory = {pid: found for pid in kinds if (found := memory_of(pid)) is not None and found.pss}
    return _Reading(kinds, memory)


def _settled(daemon: Daemon, options: argparse.Namespace) -> dict[str, Any]:
    """Return the memory of the driver without clients, some seconds after the last one has exited."""
    time.sleep(options.settle)
    readings = []
    for _ in range(READINGS):
        readings.append(read_kinds(daemon, {}, {}))
        time.sleep(_BETWEEN_S)
    return summary(readings) | {"open_memfd_bytes": open_memfd_bytes(readings[-1].memory)}


def summary(readings: Sequence[_Reading]) -> dict[str, Any]:
    """Return the reading with the median PSS, by kind and by process."""
    middle = sorted(readings, key=lambda reading: reading.total().pss)[len(readings) // 2]
    return _kinds_of(middle) | {"readings_pss": [reading.total().pss for reading in readings]}


def _kinds_of(reading: _Reading) -> dict[str, Any]:
    present = dict.fromkeys(reading.kinds[pid] for pid in reading.memory)
    processes = [
        {"pid": pid, "kind": reading.kinds[pid], "command": command_of(pid), **asdict(memory)}
        for pid, memory in reading.memory.items()
    ]
    kinds = {
        kind: {"count": sum(reading.kinds[pid] == kind for pid in reading.memory), **asdict(reading.total(kind))}
        for kind in present
    }
    return {"kinds": kinds, "total": asdict(reading.total()), "processes": processes}


# ---- targets


def _ratio_target(name: str, subject: Sequence[_Reading], baseline: Sequence[_Reading]) -> dict[str, Any]:
    ratios = [a.total().pss / b.total().pss for a, b in zip(subject, baseline, strict=True)]
    text = f"{name}: PSS of all processes over that of LiteRT's"
    return upper_limit(text, ratios, statistics.median(ratios), RATIO_LIMITS[name], "×")


def _worker_target(text: str, readings: Sequence[_Reading], arena: int = 0) -> dict[str, Any]:
    largest = [
        max((m.private_dirty for pid, m in reading.memory.items() if reading.kinds[pid] == "worker"), default=0)
        for reading in readings
    ]
    values = [(size - arena) / MIB for size in largest]
    return upper_limit(text, values, statistics.median(values), WORKER_LIMIT_MIB, "MiB")


def _idle_targets(name: str, idle: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    targets = []
    for when, found in idle.items():
        readings = [pss / MIB for pss in found["readings_pss"]]
        text = f"{name}: PSS of the idle driver {when}"
        targets.append(upper_limit(text, readings, found["total"]["pss"] / MIB, IDLE_LIMIT_MIB, "MiB"))
    return targets


# ---- results


def _say(text: str) -> None:
    print(f"memory: {text}", file=sys.stderr, flush=True)


def tables(report: Report) -> Tables:
    """Return a table of the targets, and one of the processes in each section."""
    made = {"targets": targets_table([target for part in report["sections"] for target in part["targets"]])}
    heads = ("processes", ">count", ">PSS MiB", ">Private_Dirty", ">anonymous", ">of files", ">shared memory")
    for part in report["sections"]:
        groups: dict[str, Any] = {
            title: part[name] for name, title in (("nnfmq", "nnfmq"), ("litert", "LiteRT")) if name in part
        }
        groups |= {f"idle, {when}": found for when, found in part["idle"].items()}
        rows = [row for title, found in groups.items() for row in memory_rows(title, found)]
        made[part["section"]] = Table(f"{part['section']}: {part.get('model') or 'random clients'}", heads, rows)
    return made


def memory_rows(title: str, found: Report) -> list[list[str]]:
    """Return the rows of a table: the memory by kind of process, and of all."""
    count = sum(kind["count"] for kind in found["kinds"].values())
    kinds = {**found["kinds"], "all": {"count": count, **found["total"]}}
    names = ("pss", "private_dirty", "anonymous", "file", "shared")
    return [
        [f"{title}: {kind}", str(sizes["count"]), *(f"{sizes[name] / MIB:.1f}" for name in names)]
        for kind, sizes in kinds.items()
    ]
