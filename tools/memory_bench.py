"""Measure the memory of a driver with its clients, beside LiteRT in as many processes, and that of an idle driver.

    python tools/memory_bench.py                                  # 8 clients, 1,000 executions each: some minutes
    python tools/memory_bench.py --clients 2 --executions 20 --sections quantized --json

`quantized` runs MobileNet v2 uint8 of $NNFMQ_DATA, `float` a generated model of 100 MB, `busy` clients that come and
go. Each section starts a driver of its own. All processes are found in the process tree. Their PSS (proportional set
size) and Private_Dirty are read from /proc/PID/smaps_rollup, right after one more execution of every client. No other
Python program should be running: pages of the interpreter that it maps, too, count for less. This program itself
imports neither NumPy nor nnfmq before all is measured.
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

from bench_program import model_file, parse, parser_for, positive, run, some_of
from bench_targets import upper_limit

from nnfmq.measure.failures import BenchmarkFailed
from nnfmq.measure.listening_driver import Daemon, started_daemon
from nnfmq.measure.process_memory import ProcessMemory, command_of, memory_of, open_memfd_bytes
from nnfmq.observe.process_usage import descendants

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


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status as `bench_program.run`."""
    options = parse(_parser(), argv)
    return run(options, measure, _print, "memory_bench")


def _parser() -> argparse.ArgumentParser:
    parser = parser_for(__doc__)
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
    return parser


# ---- sections


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the report, as --json prints it. `folder` is for the driver's files and the generated model.

    Raises:
        BenchmarkFailed: If the driver or a client fails, or a step takes longer than its limit.
    """
    load = os.getloadavg()
    sections = [_SECTION[name](options, _new_folder(folder, name)) | {"section": name} for name in options.sections]
    targets = [target for section in sections for target in section["targets"]]
    return {
        "conditions": _conditions(options, load),
        "sections": sections,
        "missed": [target["target"] for target in targets if target["met"] is False],
    }


def _new_folder(folder: Path, name: str) -> Path:
    made = folder / name
    made.mkdir()
    return made


def _conditions(options: argparse.Namespace, load: tuple[float, ...]) -> dict[str, Any]:
    return {
        "clients": options.clients, "executions": options.executions, "together": options.together,
        "busy_s": options.busy, "settle_s": options.settle, "kernel": os.uname().release,
        "python": sys.version.split()[0],
        "cpus": len(os.sched_getaffinity(0)), "load_before": [round(value, 2) for value in load],
    }  # fmt: skip


def _quantized(options: argparse.Namespace, folder: Path) -> Section:
    return _compare("quantized", options, folder, model_file(options, QUANTIZED, "section quantized"))


def _float(options: argparse.Namespace, folder: Path) -> Section:
    path = folder / "float.tflite"
    _say(f"float: writing a model with {options.float_mb} MB of weights")
    command = [sys.executable, str(HERE / "memory_models.py"), str(path), "--megabytes", str(options.float_mb)]
    subprocess.run(command, check=True, timeout=options.limit, stdin=subprocess.DEVNULL)
    return _compare("float", options, folder, path)


def _compare(name: str, options: argparse.Namespace, folder: Path, model: Path) -> Section:
    """Measure the driver with its clients, then LiteRT in as many processes, with the same model."""
    arena = _arena_bytes(model, options.limit)
    with started_daemon(folder) as daemon:
        before = _settled(daemon, options)
        _say(f"{name}: {options.clients} clients of the driver, {options.executions} executions each")
        with started_clients("nnfmq", model, options, daemon.socket) as clients:
            subject = [_reading(clients, daemon) for _ in range(READINGS)]
        after = _settled(daemon, options)
    _say(f"{name}: {options.clients} LiteRT processes, {options.executions} executions each")
    with started_clients("litert", model, options) as clients:
        baseline = [_reading(clients, None) for _ in range(READINGS)]
    idle = {"before any client": before, "after the last client": after}
    return {
        "model": model.name, "model_bytes": model.stat().st_size, "arena_bytes": arena,
        "nnfmq": _summary(subject), "litert": _summary(baseline), "idle": idle,
        "targets": [
            _ratio_target(name, subject, baseline), _worker_target(name, subject, arena), *_idle_targets(name, idle),
        ],
    }  # fmt: skip


def _arena_bytes(model: Path, limit_s: int) -> int:
    command = [sys.executable, str(HERE / "memory_client.py"), "arena", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    if done.returncode:
        raise BenchmarkFailed(f"the arena of {model.name} is unknown: {done.stderr.strip()[-500:]}")
    return int(json.loads(done.stdout)["arena_bytes"])


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
    stress = [sys.executable, str(HERE / "driver_stress_client.py"), daemon.socket]
    with ExitStack() as stack:
        random = []
        for seed in ("1", "2"):
            process = subprocess.Popen([*stress, seed, str(max(1, int(options.busy))), "2"], stdout=subprocess.PIPE)
            stack.callback(_end, process)
            stack.callback(process.kill)  # they run until their time is over; does nothing if they have exited
            random.append(process)
        with suppress(BenchmarkFailed):
            model = model_file(options, QUANTIZED, "section quantized")
            while time.monotonic() < end:
                with started_clients("nnfmq", model, options, daemon.socket, clients=2, executions=10):
                    pass
        for process in random:
            output, _ = process.communicate(timeout=options.limit)
            if process.returncode or json.loads(output)["failures"]:
                raise BenchmarkFailed(f"a random client failed: {output.decode()[-500:]}")


_SECTION: dict[str, Callable[[argparse.Namespace, Path], Section]] = {
    "quantized": _quantized, "float": _float, "busy": _busy,
}  # fmt: skip


# ---- clients


@dataclass(frozen=True, slots=True)
class _Client:
    process: subprocess.Popen[str]
    worker_pid: int | None
    errors: IO[str]

    def execute_once(self, limit_s: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        _receive(self.process, self.errors, limit_s)


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

    def __enter__(self) -> list[_Client]:
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

    def _ready(self, process: subprocess.Popen[str], errors: IO[str]) -> _Client:
        return _Client(process, _receive(process, errors, self._limit_s)["worker_pid"], errors)

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


def _reading(clients: Sequence[_Client], daemon: Daemon | None) -> _Reading:
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
    return _summary(readings) | {"open_memfd_bytes": open_memfd_bytes(readings[-1].memory)}


def _summary(readings: Sequence[_Reading]) -> dict[str, Any]:
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


def _worker_target(name: str, readings: Sequence[_Reading], arena: int) -> dict[str, Any]:
    text = f"{name}: Private_Dirty of the largest worker less its arena"
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


# ---- printing


def _say(text: str) -> None:
    print(f"memory_bench: {text}", file=sys.stderr, flush=True)


def _print(report: dict[str, Any], no_color: bool) -> None:
    from bench_targets import print_targets

    from nnfmq.cli.console import console

    screen = console(no_color, at_least=110)
    for section in report["sections"]:
        screen.print(f"{section['section']}: {section['model'] or 'random clients'}", style="bold")
        if section["model"]:
            screen.print(f"model {section['model_bytes'] / MIB:.1f} MiB, arena {section['arena_bytes'] / MIB:.1f} MiB")
        _print_processes(screen, section)
        print_targets(screen, section["targets"])
    for name, value in report["conditions"].items():
        screen.print(f"{name}: {value}")


def _print_processes(screen: Any, section: Section) -> None:
    from nnfmq.cli.console import table

    rows = table("processes", ">count", ">PSS MiB", ">Private_Dirty", ">anonymous", ">of files", ">shared memory")
    groups: dict[str, Any] = {name: section[name] for name in ("nnfmq", "litert") if name in section}
    groups |= {f"idle, {when}": found for when, found in section["idle"].items()}
    for group, found in groups.items():
        total = {"count": sum(kind["count"] for kind in found["kinds"].values()), **found["total"]}
        for kind, memory in {**found["kinds"], "all": total}.items():
            sizes = (memory[name] for name in ("pss", "private_dirty", "anonymous", "file", "shared"))
            rows.add_row(f"{group}: {kind}", str(memory["count"]), *(f"{size / MIB:.1f}" for size in sizes))
    screen.print(rows)
    for when, found in section["idle"].items():
        size = found["open_memfd_bytes"] / MIB
        screen.print(f"shared memory that the driver has open, {when}, mapped or not: {size:.1f} MiB")


if __name__ == "__main__":
    sys.exit(main())
