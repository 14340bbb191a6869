"""The sections of isolation_bench.py. Each returns its part of the report.

*connections*: how much silent connections of one process delay the connects of others. *kills*: the time from SIGKILL
of a client to the exit of its worker, and to the return of the memory, in each phase. *neighbour*: p99 of a client's
burst while another client is in each phase, on other CPUs.
"""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench_processes import receive_result, started_processes
from bench_targets import failed, upper_limit
from isolation_actions import PhaseJob, connect_main, neighbour_main, phase_main, silent_main
from process_tree import has_exited, opened_pidfd

from nnfmq.measure import cpu_pinning
from nnfmq.measure.failures import BenchmarkFailed
from nnfmq.measure.listening_driver import Daemon
from nnfmq.measure.percentiles import percentile
from nnfmq.observe.process_usage import descendants

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
    context: Any  # of multiprocessing
    say: Say


# ---- connections


def connections(plan: IsolationPlan) -> dict[str, Any]:
    """Measure connects without and with silent connections, alternately."""
    alone: list[list[float]] = []
    beside: list[list[float]] = []
    errors: list[str] = []
    opened: list[int] = []
    entry = (connect_main, (plan.daemon.socket, plan.limit_s))
    with started_processes([entry], duplex=True, context=plan.context) as (talking,):
        _connect(talking, 1, plan)  # imports
        for number in range(plan.rounds):
            plan.say(f"connections: round {number + 1} of {plan.rounds}")
            alone.append(_connect(talking, plan.connects, plan)[0])
            times, failures, count = _beside_silent(talking, plan)
            beside.append(times)
            errors += failures
            opened.append(count)
    return {
        "silent": plan.silent, "opened": opened, "connects": plan.connects, "errors": errors[:5],
        "failed": len(errors), "alone_ms": _milliseconds(alone), "beside_ms": _milliseconds(beside),
        "targets": [_connect_target(alone, beside, len(errors))],
    }  # fmt: skip


def _connect(talking: Connection, count: int, plan: IsolationPlan) -> tuple[list[float], list[str]]:
    talking.send(count)
    times, errors = receive_result(talking, plan.limit_s)
    return times, errors


def _beside_silent(talking: Connection, plan: IsolationPlan) -> tuple[list[float], list[str], int]:
    """Connect while another process has half of its silent connections open and opens the other half."""
    entry = (silent_main, (plan.daemon.socket, plan.silent, plan.limit_s))
    with started_processes([entry], duplex=True, context=plan.context) as (silent,):
        receive_result(silent, plan.limit_s)
        times, errors = _connect(talking, plan.connects, plan)
        return times, errors, receive_result(silent, plan.limit_s)


def _connect_target(alone: Sequence[list[float]], beside: Sequence[list[float]], errors: int) -> dict[str, Any]:
    text = "delay of the slowest connect, over the median without silent connections"
    if errors or not all(beside):
        return failed(text, CONNECT_LIMIT_MS, "ms")
    usual = statistics.median(time for times in alone for time in times)
    delays = [(max(times) - usual) * 1000 for times in beside]
    return upper_limit(text, delays, max(delays), CONNECT_LIMIT_MS, "ms")


def _milliseconds(rounds: Sequence[Sequence[float]]) -> dict[str, float] | None:
    """Return p50, p99 and the maximum of all rounds in ms; None without a value."""
    ordered = sorted(int(seconds * 1e9) for times in rounds for seconds in times)
    if not ordered:
        return None
    percents = {"p50": 50.0, "p99": 99.0, "max": 100.0}
    return {name: percentile(ordered, percent) / 1e6 for name, percent in percents.items()} | {"count": len(ordered)}


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
    with _started(plan, phase) as (connection, _, _):
        times, status = _work(connection, 0, plan.limit_s)
        return _Usual(times[0], status)


def _work(connection: Connection, seconds: float, limit_s: int) -> tuple[list[float], str]:
    """Let a client work for some seconds, at least once."""
    connection.send(True)
    receive_result(connection, limit_s)
    time.sleep(seconds)
    connection.send(True)
    times, status = receive_result(connection, limit_s)
    return times, status


@contextmanager
def _started(plan: IsolationPlan, phase: str, cpus: tuple[int, ...] = ()) -> Iterator[tuple[Connection, int, int]]:
    """Start a client in a phase; yield its connection, its pid and that of its worker."""
    job = replace(plan.job, phase=phase, cpus=cpus)
    with started_processes([(phase_main, (job,))], duplex=True, context=plan.context) as (connection,):
        client_pid, worker_pid = receive_result(connection, plan.limit_s)
        yield connection, client_pid, worker_pid


def _kill_once(plan: IsolationPlan, phase: str, delay_s: float) -> _Kill:
    """Kill a client `delay_s` after its work has begun.

    Raises:
        BenchmarkFailed: If the client's work failed before.
    """
    before = available_bytes()
    with _started(plan, phase) as (connection, client_pid, worker_pid), opened_pidfd(worker_pid) as worker:
        connection.send(True)
        receive_result(connection, plan.limit_s)
        if connection.poll(delay_s):
            receive_result(connection, plan.limit_s)  # raises the client's error
        used = before - available_bytes()
        begin = time.monotonic()
        os.kill(client_pid, signal.SIGKILL)
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
    cpus = cpu_pinning.two_cpus()
    if cpus is None or cpus.client is None or cpus.driver is None:
        raise BenchmarkFailed("section neighbour needs two CPUs")
    others, own = cpus.client, cpus.driver
    _pin_driver(plan, {others})
    cpu_pinning.pin_to(0, {others})
    try:
        job = replace(plan.job, cpus=(own,))
        with started_processes([(neighbour_main, (job,))], duplex=True, context=plan.context) as (connection,):
            worker = receive_result(connection, plan.limit_s)
            _execute_for(plan, connection, 0.5)
            _pin_all(descendants(worker), {others})
            return [_neighbour_row(plan, connection, phase, others) for phase in plan.phases if phase != "idle"]
    finally:
        cpu_pinning.pin_to(0, cpu_pinning.ALLOWED)
        _pin_driver(plan, cpu_pinning.ALLOWED)


def _pin_driver(plan: IsolationPlan, cpus: Iterable[int]) -> None:
    """Pin the driver's processes, and so those that it starts later."""
    _pin_all((plan.daemon.pid, *descendants(plan.daemon.pid)), cpus)


def _pin_all(pids: Iterable[int], cpus: Iterable[int]) -> None:
    for pid in pids:
        with suppress(FileNotFoundError):  # it has exited
            cpu_pinning.pin_to(pid, cpus)


def _neighbour_row(plan: IsolationPlan, connection: Connection, phase: str, others: int) -> dict[str, Any]:
    alone, beside, repetitions, status = [], [], 0, ""
    with _started(plan, phase, (others,)) as (other, _, _):
        for number in range(plan.rounds):
            plan.say(f"neighbour: {phase}, round {number + 1} of {plan.rounds}")
            alone.append(_execute_for(plan, connection, plan.seconds))
            other.send(True)
            receive_result(other, plan.limit_s)
            beside.append(_execute_for(plan, connection, plan.seconds))
            other.send(True)
            times, status = receive_result(other, plan.limit_s)
            repetitions += len(times)
    ratios = [b["p99"] / a["p99"] for a, b in zip(alone, beside, strict=True)]
    text = f"p99 of a neighbour's burst beside {phase}, over its p99 alone"
    return {
        "phase": phase, "rounds": plan.rounds, "seconds": plan.seconds, "repetitions": repetitions, "status": status,
        "alone_us": _medians(alone), "beside_us": _medians(beside),
        "targets": [upper_limit(text, ratios, statistics.median(ratios), NEIGHBOUR_LIMIT, "×")],
    }  # fmt: skip


def _execute_for(plan: IsolationPlan, connection: Connection, seconds: float) -> dict[str, float]:
    """Let the neighbour execute for some seconds; return p50, p99 and p99.9 in µs, and the number of executions."""
    connection.send(seconds)
    ordered = sorted(receive_result(connection, plan.limit_s))
    percents = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9}
    return {name: percentile(ordered, each) / 1000 for name, each in percents.items()} | {"count": len(ordered)}


def _medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
