"""The isolation of a driver's clients: silent connections, killed clients, and a neighbour's bursts.

*connections* opens 2,000 connections that send nothing, from one process, while 100 clients connect. *kills* kills
clients while the driver copies a pool, decodes a large message, compiles, computes on either device, or waits, and
measures the time from SIGKILL to the exit of the worker and to the return of the memory. *neighbour* measures p99 of a
client's bursts, client and worker on one CPU, while everything else does the same things on another CPU. The machine
should do nothing else meanwhile. 100 kills in each phase take half an hour.

A phase is a generator function. It connects and prepares what it needs, yields the pid of its worker, and then the
name of a status after each repetition of its work. So the benchmark decides how often the work is done, and knows when
it has begun.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_support import (
    GRACE_S,
    Report,
    Table,
    Tables,
    failed,
    format_metrics,
    has_exited,
    medians,
    missed_targets,
    model_file,
    opened_pidfd,
    percentiles,
    positive,
    some_of,
    targets_table,
    upper_limit,
)
from generated_models import convolution

import nnfmq
from nnfmq.base.processes import descendants
from nnfmq.hal.errors import ErrorStatus, NnfmqError
from nnfmq.hal.types import (
    DataLocation,
    ExecutionPreference,
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
)
from nnfmq.lab import placement
from nnfmq.lab.child_processes import BenchmarkFailed, FunctionProcess, set_time_limit, started_child
from nnfmq.lab.listening_driver import Daemon, started_daemon

if TYPE_CHECKING:
    from nnfmq.client.connection.client import Client


# ---- what the clients do


Work = Generator[int | str, None, None]
_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class PhaseJob:
    """A phase and its sizes; sent to a client's process. `message` and `model` are files."""

    phase: str
    socket: str
    pool_bytes: int
    message: Path
    model: Path
    limit_s: int
    cpus: tuple[int, ...] = ()


def phase_main(connection: Connection, job: PhaseJob) -> None:
    """Send the pid of the worker; then work on request, until the parent closes the connection.

    After a message of the parent, "began" is sent, the work is repeated until the next message, and the times of the
    repetitions in seconds are sent, with the last status. Entry point of a client's process.
    """
    set_time_limit(job.limit_s)
    if job.cpus:
        placement.pin_to(0, job.cpus)
    work = PHASES[job.phase](job)
    connection.send(next(work))
    while connection.recv():
        set_time_limit(job.limit_s)
        connection.send("began")
        connection.send(_repeat(work, connection))


def _repeat(work: Work, connection: Connection) -> tuple[list[float], str]:
    times: list[float] = []
    status = ""
    while not times or not connection.poll():
        begin = time.monotonic()
        status = str(next(work))
        times.append(time.monotonic() - begin)
    connection.recv()
    return times, status


# ---- phases


def _connect(job: PhaseJob) -> Client:
    return nnfmq.connect(job.socket, timeout=_CONNECT_S)


def copying(job: PhaseJob) -> Work:
    """Prepare a model whose constants fill a pool of `pool_bytes`; the driver copies the pool."""
    with _connect(job) as client, nnfmq.Memory.create(job.pool_bytes, "isolation") as memory:
        memory.view[:] = bytes(1) * job.pool_bytes
        device, model = client.device("reference"), _add_constant(memory, job.pool_bytes // 4)
        yield client.worker_pid
        while True:
            device.prepare(model).close()
            yield "NONE"


def _add_constant(memory: Any, count: int) -> Model:
    """Return a model that adds `count` floats of a pool to its input."""
    tensor = OperandType.TENSOR_FLOAT32
    operands = (
        Operand(tensor, (1,), lifetime=LifeTime.SUBGRAPH_INPUT),
        Operand(tensor, (count,), lifetime=LifeTime.CONSTANT_REFERENCE, location=DataLocation(0, 0, 4 * count)),
        Operand(OperandType.INT32, lifetime=LifeTime.CONSTANT_COPY, location=DataLocation(0, 0, 4)),
        Operand(tensor, (count,), lifetime=LifeTime.SUBGRAPH_OUTPUT),
    )
    add = Operation(OperationType.ADD, (0, 1, 2), (3,))
    return Model(Subgraph(operands, (add,), (0,), (3,)), operand_values=bytes(4), pools=(memory,))


def decoding(job: PhaseJob) -> Work:
    """Send a large encoded model, of operands that no operation uses; the driver decodes and then rejects it."""
    from nnfmq.serialize import messages

    data = job.message.read_bytes()
    with _connect(job) as client:
        connection = client.connection
        yield client.worker_pid
        while True:
            message = messages.GetSupportedOperations(connection.next_call_id(), "reference", data)
            reply = connection.exchange(message, messages.SupportedOperations)
            if reply.status is not ErrorStatus.INVALID_ARGUMENT:
                raise BenchmarkFailed(f"the model was not decoded: {reply.status.name}: {reply.message}")
            yield reply.status.name


def write_message(path: Path, message_bytes: int) -> None:
    """Write an encoded model of at least `message_bytes` to `path`."""
    from nnfmq.serialize.models import encode_model

    operand = Operand(OperandType.TENSOR_FLOAT32, (1, 2, 3, 4), 0.0, 0, LifeTime.TEMPORARY_VARIABLE)

    def encoded(count: int) -> bytes:
        return bytes(encode_model(Model(Subgraph((operand,) * count, (), (), ())))[0])

    record_bytes = (len(encoded(2000)) - len(encoded(1000))) / 1000
    path.write_bytes(encoded(int(message_bytes / record_bytes) + 1))


def compiling(job: PhaseJob) -> Work:
    """Prepare the model on `compiled`; the driver must have no program cache."""
    with _connect(job) as client:
        device, model = client.device("compiled"), nnfmq.load(job.model)
        yield client.worker_pid
        while True:
            device.prepare(model, preference=ExecutionPreference.SUSTAINED_SPEED).close()
            yield "NONE"


def computing(job: PhaseJob) -> Work:
    """Execute a convolution of some tenths of a second on `compiled`."""
    yield from _execute(job, "compiled", 256, 128)


def interpreting(job: PhaseJob) -> Work:
    """Execute a convolution of some tenths of a second on `reference`."""
    yield from _execute(job, "reference", 128, 64)


def _execute(job: PhaseJob, device: str, size: int, channels: int) -> Work:
    with _connect(job) as client:
        model = nnfmq.load(convolution(size, channels))
        sustained = ExecutionPreference.SUSTAINED_SPEED
        with client.device(device).prepare(model, preference=sustained) as prepared, prepared.burst() as burst:
            yield client.worker_pid
            _clear(burst.inputs)
            while True:
                burst.execute(out=burst.outputs, timeout=job.limit_s)
                yield "NONE"


def idle(job: PhaseJob) -> Work:
    """Keep a burst of a small model open, and do nothing."""
    with _connect(job) as client, _small_burst(client) as burst:
        _clear(burst.inputs)
        burst.execute(out=burst.outputs)
        yield client.worker_pid
        while True:
            time.sleep(0.5)
            yield "NONE"


@contextmanager
def _small_burst(client: Client) -> Iterator[Any]:
    model = nnfmq.load(nnfmq.example_path("digits.tflite"))
    with client.device("compiled").prepare(model) as prepared, prepared.burst() as burst:
        yield burst


PHASES: dict[str, Callable[[PhaseJob], Work]] = {
    "copying": copying, "decoding": decoding, "compiling": compiling, "computing": computing,
    "interpreting": interpreting, "idle": idle,
}  # fmt: skip


# ---- connections


def silent_main(connection: Connection, socket: str, count: int, limit_s: int) -> None:
    """Open `count` connections that send nothing, and keep them until the parent closes its end. Entry point.

    The first half is opened at once; then "half" is sent, and the second half opened, while the parent goes on. At the
    end the number of the opened connections is sent.
    """
    from nnfmq.base.channel import Channel
    from nnfmq.base.deadlines import deadline_after

    set_time_limit(limit_s)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as channels:
        opened = 0
        for number in range(count):
            if number == count // 2:
                connection.send("half")
            with suppress(NnfmqError):
                channels.callback(Channel.connect(Path(socket), deadline_after(2)).close)
                opened += 1
        connection.send(opened)
        connection.recv()


def connect_main(connection: Connection, socket: str, limit_s: int) -> None:
    """For each number that the parent sends, connect that often; send the times in seconds, and the errors."""
    while True:
        set_time_limit(0)
        count = connection.recv()
        set_time_limit(limit_s)
        connection.send(_connect_often(socket, count))


def _connect_often(socket: str, count: int) -> tuple[list[float], list[str]]:
    times, errors = [], []
    for _ in range(count):
        begin = time.monotonic()
        try:
            client = nnfmq.connect(socket, timeout=_CONNECT_S)
        except NnfmqError as error:
            errors.append(f"{type(error).__name__}: {error}")
        else:
            times.append(time.monotonic() - begin)
            client.close()
    return times, errors


# ---- the neighbour


def neighbour_main(connection: Connection, job: PhaseJob) -> None:
    """Execute a burst of a small model, client and worker pinned to `job.cpus`. Entry point.

    Sends the worker's pid; then for each number of seconds that the parent sends, the times of the executions in ns.
    """
    set_time_limit(job.limit_s)
    with _connect(job) as client:
        placement.pin_to(0, job.cpus)
        placement.pin_to(client.worker_pid, job.cpus)
        with _small_burst(client) as burst:
            connection.send(client.worker_pid)
            while True:
                set_time_limit(0)
                seconds = connection.recv()
                set_time_limit(job.limit_s)
                connection.send(_burst_times(burst, seconds))


def _clear(arrays: Iterable[Any]) -> None:
    for array in arrays:
        array[...] = 0


def _burst_times(burst: Any, seconds: float) -> list[int]:
    clock, times, outputs = time.perf_counter_ns, [], burst.outputs
    _clear(burst.inputs)
    end = clock() + int(seconds * 1e9)
    while (begin := clock()) < end:
        burst.execute(out=outputs)
        times.append(clock() - begin)
    return times


# ---- sections


CONNECT_LIMIT_MS, EXIT_LIMIT_MS, MEMORY_LIMIT_MS, NEIGHBOUR_LIMIT = 50.0, 100.0, 1000.0, 1.5
MIB = 1 << 20
_TOLERANCE = 32 * MIB  # of MemAvailable: other processes use memory, too
_GIVE_UP_S = 60.0
_DELAY_S_MAX = 2.0  # from the beginning of a phase to the kill
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class IsolationPlan:
    """The driver, the phases, and how often each is measured."""

    daemon: Daemon
    job: PhaseJob
    phases: tuple[str, ...]
    kills: int
    silent: int
    connects: int
    seconds: float
    rounds: int
    limit_s: int
    say: Say

    def receive(self, client: FunctionProcess) -> Any:
        """Return what a client sends."""
        return client.receive(self.limit_s + GRACE_S)


# ---- connections


def connections(plan: IsolationPlan) -> dict[str, Any]:
    """Measure connects without and with silent connections, alternately."""
    alone: list[list[float]] = []
    beside: list[list[float]] = []
    errors: list[str] = []
    opened: list[int] = []
    with started_child(connect_main, plan.daemon.socket, plan.limit_s, name="connects") as talking:
        _ask_to_connect(talking, 1, plan)  # imports
        for number in range(plan.rounds):
            plan.say(f"connections: round {number + 1} of {plan.rounds}")
            alone.append(_ask_to_connect(talking, plan.connects, plan)[0])
            times, failures, count = _beside_silent(talking, plan)
            beside.append(times)
            errors += failures
            opened.append(count)
    return {
        "silent": plan.silent, "opened": opened, "connects": plan.connects, "errors": errors[:5],
        "failed": len(errors), "alone_ms": _milliseconds(alone), "beside_ms": _milliseconds(beside),
        "targets": [_connect_target(alone, beside, len(errors))],
    }  # fmt: skip


def _ask_to_connect(talking: FunctionProcess, count: int, plan: IsolationPlan) -> tuple[list[float], list[str]]:
    talking.send(count)
    times, errors = plan.receive(talking)
    return times, errors


def _beside_silent(talking: FunctionProcess, plan: IsolationPlan) -> tuple[list[float], list[str], int]:
    """Connect while another process has half of its silent connections open and opens the other half."""
    with started_child(silent_main, plan.daemon.socket, plan.silent, plan.limit_s, name="silent connections") as silent:
        plan.receive(silent)
        times, errors = _ask_to_connect(talking, plan.connects, plan)
        return times, errors, plan.receive(silent)


def _connect_target(alone: Sequence[list[float]], beside: Sequence[list[float]], errors: int) -> dict[str, Any]:
    text = "delay of the slowest connect, over the median without silent connections"
    if errors or not all(beside):
        return failed(text, CONNECT_LIMIT_MS, "ms")
    usual = statistics.median(time for times in alone for time in times)
    delays = [(max(times) - usual) * 1000 for times in beside]
    return upper_limit(text, delays, max(delays), CONNECT_LIMIT_MS, "ms")


def _milliseconds(rounds: Sequence[Sequence[float]]) -> dict[str, float] | None:
    """Return p50, p99 and the maximum of all rounds in ms; None without a value."""
    values = [int(seconds * 1e9) for times in rounds for seconds in times]
    found = percentiles(values, 1e6, {"p50": 50.0, "p99": 99.0, "max": 100.0})
    return found | {"count": len(values)} if found else None


# ---- kills


@dataclass(frozen=True, slots=True)
class _Kill:
    """Seconds from a kill to the worker's exit and to the return of the memory (None: not in time), and the memory."""

    exit_s: float | None
    memory_s: float | None
    used_bytes: int


@dataclass(frozen=True, slots=True)
class _Usual:
    """What a phase does without a kill: how long its work takes, and the status at its end."""

    seconds: float
    status: str


def kills(plan: IsolationPlan) -> list[dict[str, Any]]:
    """Kill clients in each phase; the phases alternate. Return a row for each phase."""
    usual = {phase: _without_kill(plan, phase) for phase in plan.phases}
    found: dict[str, list[list[_Kill]]] = {phase: [] for phase in plan.phases}
    chance, each = random.Random(14), -(-plan.kills // plan.rounds)
    for number in range(plan.rounds):
        for phase in plan.phases:
            plan.say(f"kills: {phase}, round {number + 1} of {plan.rounds}, {each} kills")
            longest = min(usual[phase].seconds, _DELAY_S_MAX)
            found[phase].append([_kill_once(plan, phase, chance.uniform(0.05, 0.9) * longest) for _ in range(each)])
    return [_kill_row(phase, usual[phase], rounds) for phase, rounds in found.items()]


def _without_kill(plan: IsolationPlan, phase: str) -> _Usual:
    plan.say(f"kills: {phase}, without a kill")
    with _started(plan, phase) as (client, _):
        client.send(True)
        plan.receive(client)
        client.send(True)
        times, status = plan.receive(client)
        return _Usual(times[0], status)


@contextmanager
def _started(plan: IsolationPlan, phase: str, cpus: tuple[int, ...] = ()) -> Iterator[tuple[FunctionProcess, int]]:
    """Start a client in a phase; yield it and the pid of its worker."""
    with started_child(phase_main, replace(plan.job, phase=phase, cpus=cpus), name=phase) as client:
        yield client, plan.receive(client)


def _kill_once(plan: IsolationPlan, phase: str, delay_s: float) -> _Kill:
    """Kill a client `delay_s` after its work has begun.

    Raises:
        BenchmarkFailed: If the client's work failed before.
    """
    before = available_bytes()
    with _started(plan, phase) as (client, worker_pid), opened_pidfd(worker_pid) as worker:
        client.send(True)
        plan.receive(client)
        if client.connection.poll(delay_s):
            plan.receive(client)  # raises the client's error
        used = before - available_bytes()
        begin = time.monotonic()
        client.kill()
        exit_s = _seconds_until(lambda: has_exited(worker, 0.001), begin, _GIVE_UP_S)
        memory_s = _seconds_until(lambda: available_bytes() >= before - _TOLERANCE, begin, (exit_s or 0.0) + 2.0)
        return _Kill(exit_s, memory_s, used)


def available_bytes() -> int:
    """Return MemAvailable of /proc/meminfo, and the free pages that each CPU keeps for itself.

    MemAvailable does not count those, up to hundreds of MiB; the kernel returns them to the others each second.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    counts = re.findall(r"^ +count: +([0-9]+)$", Path("/proc/zoneinfo").read_text(), re.MULTILINE)
    return available + sum(map(int, counts)) * os.sysconf("SC_PAGE_SIZE")


def _seconds_until(condition: Callable[[], bool], begin: float, limit_s: float) -> float | None:
    """Poll a condition; return the seconds from `begin` until it was true, None at the limit."""
    while not condition():
        if time.monotonic() - begin > limit_s:
            return None
        time.sleep(0.001)
    return time.monotonic() - begin


def _kill_row(phase: str, usual: _Usual, rounds: Sequence[Sequence[_Kill]]) -> dict[str, Any]:
    every = [kill for kills_of_round in rounds for kill in kills_of_round]
    used = statistics.median(kill.used_bytes for kill in every)
    exits = [[kill.exit_s for kill in each if kill.exit_s is not None] for each in rounds]
    memory = [[kill.memory_s for kill in each if kill.memory_s is not None] for each in rounds]
    text = f"{phase}: SIGKILL of the client to the exit of its worker, p99"
    targets = [_p99_target(text, exits, len(every), EXIT_LIMIT_MS)]
    if used >= 4 * _TOLERANCE:  # otherwise the memory of other processes varies as much
        targets.append(
            _p99_target(f"{phase}: SIGKILL to the return of memory, p99", memory, len(every), MEMORY_LIMIT_MS)
        )
    return {
        "phase": phase, "kills": len(every), "work_s": usual.seconds, "status": usual.status, "used_bytes": used,
        "exit_ms": _milliseconds(exits), "memory_ms": _milliseconds(memory), "targets": targets,
    }  # fmt: skip


def _p99_target(text: str, rounds: Sequence[Sequence[float]], kills_count: int, limit_ms: float) -> dict[str, Any]:
    found = _milliseconds(rounds)
    if found is None or found["count"] < kills_count:
        return failed(text, limit_ms, "ms")
    by_round = [each["p99"] for values in rounds if (each := _milliseconds([values])) is not None]
    return upper_limit(text, by_round, found["p99"], limit_ms, "ms")


# ---- the neighbour


def neighbour(plan: IsolationPlan) -> list[dict[str, Any]]:
    """Measure a burst alone and beside each phase, alternately. Client and worker have one CPU, all others another.

    Raises:
        BenchmarkFailed: If this process may use only one CPU.
    """
    cpus = placement.two_cpus()
    if cpus is None or cpus.client is None or cpus.driver is None:
        raise BenchmarkFailed("section neighbour needs two CPUs")
    others, own = cpus.client, cpus.driver
    _pin_driver(plan, {others})
    placement.pin_to(0, {others})
    try:
        job = replace(plan.job, cpus=(own,))
        with started_child(neighbour_main, job, name="neighbour") as client:
            worker = plan.receive(client)
            _execute_for(plan, client, 0.5)
            _pin_all(descendants(worker), {others})
            return [_neighbour_row(plan, client, phase, others) for phase in plan.phases if phase != "idle"]
    finally:
        placement.pin_to(0, placement.ALLOWED)
        _pin_driver(plan, placement.ALLOWED)


def _pin_driver(plan: IsolationPlan, cpus: Iterable[int]) -> None:
    """Pin the driver's processes, and so those that it starts later."""
    _pin_all((plan.daemon.pid, *descendants(plan.daemon.pid)), cpus)


def _pin_all(pids: Iterable[int], cpus: Iterable[int]) -> None:
    for pid in pids:
        with suppress(FileNotFoundError):  # it has exited
            placement.pin_to(pid, cpus)


def _neighbour_row(plan: IsolationPlan, client: FunctionProcess, phase: str, others: int) -> dict[str, Any]:
    alone, beside, repetitions, status = [], [], 0, ""
    with _started(plan, phase, (others,)) as (other, _):
        for number in range(plan.rounds):
            plan.say(f"neighbour: {phase}, round {number + 1} of {plan.rounds}")
            alone.append(_execute_for(plan, client, plan.seconds))
            other.send(True)
            plan.receive(other)
            beside.append(_execute_for(plan, client, plan.seconds))
            other.send(True)
            times, status = plan.receive(other)
            repetitions += len(times)
    ratios = [b["p99"] / a["p99"] for a, b in zip(alone, beside, strict=True)]
    text = f"p99 of a neighbour's burst beside {phase}, over its p99 alone"
    return {
        "phase": phase, "rounds": plan.rounds, "seconds": plan.seconds, "repetitions": repetitions, "status": status,
        "alone_us": medians(alone), "beside_us": medians(beside),
        "targets": [upper_limit(text, ratios, statistics.median(ratios), NEIGHBOUR_LIMIT, "×")],
    }  # fmt: skip


def _execute_for(plan: IsolationPlan, client: FunctionProcess, seconds: float) -> dict[str, float]:
    """Let the neighbour execute for some seconds; return p50, p99 and p99.9 in µs, and the number of executions."""
    client.send(seconds)
    times_ns = plan.receive(client)
    return percentiles(times_ns, 1000) | {"count": len(times_ns)}


# ---- the benchmark


SECTIONS: dict[str, Callable[[IsolationPlan], Any]] = {
    "connections": connections,
    "kills": kills,
    "neighbour": neighbour,
}
COMPILED = "models/mobilenet_v2_1.0_224_quant.tflite"
_MEMORY_MIB, _MEMORY_PER_MESSAGE, _MEMORY_PER_POOL = 1024, 64, 4  # that the driver may take: enough for the phases


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--sections", type=some_of(SECTIONS), default=tuple(SECTIONS), metavar="NAME,...",
                        help=", ".join(SECTIONS))  # fmt: skip
    parser.add_argument("--phases", type=some_of(PHASES), default=tuple(PHASES), metavar="NAME,...",
                        help=", ".join(PHASES))  # fmt: skip
    parser.add_argument("--kills", type=positive, default=100, help="in each phase (default: 100)")
    parser.add_argument("--silent", type=positive, default=2000, help="silent connections (default: 2000)")
    parser.add_argument("--connects", type=positive, default=100, help="of clients that send a hello (default: 100)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of one trial of the neighbour (default: 3)")
    parser.add_argument("--rounds", type=positive, default=5, help="interleaved rounds (default: 5)")
    parser.add_argument("--pool-mib", type=positive, default=1024, help="pool of phase copying (default: 1024)")
    parser.add_argument("--message-mib", type=positive, default=64, help="message of phase decoding (default: 64)")
    parser.add_argument("--model", type=Path, help=f"of phase compiling (default: {COMPILED} in $NNFMQ_DATA)")
    parser.add_argument("--limit", type=positive, default=120, metavar="S", help="time limit of each step in seconds")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the report, as --json prints it. `folder` is for the driver's files.

    Raises:
        BenchmarkFailed: If the driver or a client fails, or a step takes longer than its limit.
    """
    message = folder / "message"
    if "decoding" in options.phases and set(options.sections) & {"kills", "neighbour"}:
        _say(f"encoding a model of {options.message_mib} MiB")
        write_message(message, options.message_mib * MIB)
    memory_mib = str(max(_MEMORY_MIB, _MEMORY_PER_MESSAGE * options.message_mib, _MEMORY_PER_POOL * options.pool_mib))
    environment = {"NNFMQ_CACHE_MIB": "0", "NNFMQ_CLIENT_MEMORY_MIB": memory_mib, "NNFMQ_MEMORY_MIB": memory_mib}
    with started_daemon(folder, environment) as daemon:
        job = PhaseJob("", daemon.socket, options.pool_mib * MIB, message, _model(options), options.limit)
        plan = IsolationPlan(
            daemon, job, options.phases, options.kills, options.silent, options.connects, options.seconds,
            options.rounds, options.limit, _say,
        )  # fmt: skip
        found = {name: SECTIONS[name](plan) for name in options.sections}
        log = daemon.log.read_text().splitlines()
    return {
        "conditions": _conditions(options), **found, "missed": missed_targets(targets_of(found)), "log": log[-20:],
    }  # fmt: skip


def _model(options: argparse.Namespace) -> Path:
    """Return the model of phase compiling; an empty path if nothing needs it and it is not there."""
    is_needed = "compiling" in options.phases and bool(set(options.sections) & {"kills", "neighbour"})
    try:
        return model_file(options, COMPILED, "phase compiling")
    except BenchmarkFailed:
        if is_needed:
            raise
        return Path()


def _conditions(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "rounds": options.rounds, "kills": options.kills, "pool_mib": options.pool_mib,
        "message_mib": options.message_mib,
    }  # fmt: skip


def targets_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the targets of all sections."""
    rows = [row for name in SECTIONS if name in found for row in _rows(found[name])]
    return [target for row in rows for target in row["targets"]]


def _rows(section: Any) -> list[dict[str, Any]]:
    return section if isinstance(section, list) else [section]


# ---- results


def tables(report: Report) -> Tables:
    """Return a table of the targets, and one of each section that was measured."""
    makers: dict[str, Callable[[Any], Table]] = {
        "connections": _connections_table,
        "kills": _kills_table,
        "neighbour": _neighbour_table,
    }
    made = {name: make(report[name]) for name, make in makers.items() if name in report}
    return {"targets": targets_table(targets_of(report)), **made}


def _connections_table(found: Report) -> Table:
    beside = f"beside {found['silent']:,} silent connections"
    rows = [
        [
            text,
            *format_metrics(found[name], ["count"]),
            str(errors),
            *format_metrics(found[name], ("p50", "p99", "max")),
        ]
        for text, name, errors in (("alone", "alone_ms", 0), (beside, "beside_ms", found["failed"]))
    ]
    return Table("connects, ms", ("connects", ">count", ">failed", ">p50 ms", ">p99", ">max"), rows)


def _kills_table(found: list[Report]) -> Table:
    heads = ("killed while", ">kills", ">work s", "status", ">exit p50 ms", ">p99", ">max", ">memory MiB",
             ">returned p99 ms")  # fmt: skip
    return Table("killed clients", heads, [_kill_columns(row) for row in found])


def _kill_columns(row: Report) -> list[str]:
    used = f"{row['used_bytes'] / MIB:.0f}" if row["used_bytes"] > 0 else "-"
    exits, memory_ms = format_metrics(row["exit_ms"], ("p50", "p99", "max")), format_metrics(row["memory_ms"], ["p99"])
    return [row["phase"], str(row["kills"]), f"{row['work_s']:.2f}", row["status"], *exits, used, *memory_ms]


def _neighbour_table(found: list[Report]) -> Table:
    heads = ("beside", ">repetitions", "status", ">alone p50 µs", ">p99", ">beside p50", ">p99", ">p99.9")
    rows = [
        [row["phase"], str(row["repetitions"]), row["status"], *format_metrics(row["alone_us"], ("p50", "p99")),
         *format_metrics(row["beside_us"], ("p50", "p99", "p99.9"))]
        for row in found
    ]  # fmt: skip
    return Table("a neighbour's bursts", heads, rows)


def _say(text: str) -> None:
    print(f"isolation: {text}", file=sys.stderr, flush=True)
