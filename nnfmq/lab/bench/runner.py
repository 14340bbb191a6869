"""Runner processes: each loads a model once, then runs trials on request; a group has one for each client.

A runner is one client of the driver, or a process with a peer's runtime, or calls a function that it was given. It ends
when the group does, or the process that started it.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nnfmq.base.processes import allowed_cores, cpus_by_core
from nnfmq.client.connection.connect import connect
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.preparation import require_machine_code
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.types import ExecutionPreference, Model
from nnfmq.importers import load
from nnfmq.lab import placement
from nnfmq.lab.bench.loops import RequestTimes, closed_loop, intended_starts, open_loop
from nnfmq.lab.bench.peers import PEERS, PeerJob, opened_peer
from nnfmq.lab.bench.steps import STAGES, Array, Stages, Step, fastest_variant, opened_mode
from nnfmq.lab.child_processes import BenchmarkFailed, ChildEnded, FunctionProcess, set_time_limit, started_child

__all__ = [
    "Load",
    "LoadResult",
    "OpenRunner",
    "OpenedFile",
    "OwnRunner",
    "RunnerGroup",
    "RunnerJob",
    "Trial",
    "started_group",
]

Times = npt.NDArray[np.int64]
Tick = Callable[[], object]
OwnRunner = Callable[[Path], Step]
"""Loads the model of this file, and returns what executes it: inputs in, outputs out. May be a closure."""
Details = dict[str, str | int | float]
_SUSTAINED = ExecutionPreference.SUSTAINED_SPEED  # machine code, without a baseline program that runs first
_PREPARE_S = 600.0
READY_S = 600.0
"""How long a runner may take to load its model."""
_LEAD_NS = 20_000_000  # from the request for a trial to its begin, so that all clients have received it
TRIAL_LIMIT_S = 60.0
"""How much longer than its load a trial may take: the backlog of an open loop, and the last request."""
BACKLOG_S = 20.0
"""For how long the backlog of an open loop is executed after the last intended start."""


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """A model file that a hosted runtime opens, with these options, and what that found in it.

    Stands for the model that `nnfmq.load` returns, but has no operations.
    """

    runtime_options: Mapping[str, Any]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    states: tuple[StateInfo, ...] = ()

    @property
    def model(self) -> Model:
        """Raises InvalidArgument: a peer that does not read the file gets no export of it."""
        raise InvalidArgument("it does not read such files, and what a hosted runtime opens cannot be exported")


@dataclass(frozen=True, slots=True)
class RunnerJob:
    """The work of a runner: `runner` is an execution mode or the name of a peer, or that of `own`, if there is one.

    `inputs` has one or several sets of inputs, which the requests use in turn. `threads` is the number of computing
    threads; None leaves it to the runtime. `connect` is the socket of a driver, `embedded`, or None for any.
    """

    runner: str
    model: Path
    shapes: Mapping[str | int, tuple[int, ...]]
    signature: str | None
    inputs: Sequence[Sequence[Array]]
    device: str | None
    threads: int | None
    connect: str | None
    own: OwnRunner | None = None
    hosted: OpenedFile | None = None
    """Set if `device` hosts the runtime that opens the file."""
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one client: requests in a closed loop, or `rate` per second of all `clients` in an open loop."""

    seconds: float
    count: int | None = None
    rate: float | None = None
    distribution: str = "constant"
    seed: int = 0
    client: int = 0
    clients: int = 1


@dataclass(frozen=True, slots=True)
class Trial:
    """A request for a load that begins at `begin_ns` of the monotonic clock; with `stages`, executions after it."""

    begin_ns: int
    load: Load
    stages: int = 0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The requests of one client or of all in one trial, in ns: intended and real start from its begin, and latency.

    `unsent` requests of an open loop were not begun, because the backlog was too long. `wall_ns` is the time from the
    begin to the last client's end. `stages_ns` has the mean of each of `STAGES` over the executions after the trial; it
    is empty if they were not measured.
    """

    intended: Times
    started: Times
    latencies: Times
    unsent: int
    wall_ns: int
    client_cpu_ns: int
    driver_cpu_ns: int
    stages_ns: list[float]


# ----------------------------------------------------------------------------------------------------------------------
# The group: processes that are started, begin each trial and are ended together.


class RunnerGroup:
    """The clients of one candidate, each of which has loaded the model. `details` are those of the first."""

    def __init__(self, processes: Sequence[FunctionProcess], runners: Sequence[tuple[list[int], Details]]) -> None:
        self._processes = processes
        self.pids = sorted({pid for pids, _ in runners for pid in pids})
        self.details = dict(runners[0][1])

    def run(self, load: Load, *, stages: int = 0, tick: Tick = lambda: None) -> LoadResult:
        """Run one trial with all clients together and return its times; blocks until it is done.

        Raises:
            BenchmarkFailed: If a client fails.
        """
        begin_ns, count = time.monotonic_ns() + _LEAD_NS, len(self._processes)
        for number, process in enumerate(self._processes):
            own = replace(load, client=number, clients=count, count=_share(load.count, number, count))
            process.send(Trial(begin_ns, own, stages))
        return _merged([_result(process, load.seconds + 2 * TRIAL_LIMIT_S, tick) for process in self._processes])

    def wait_until_idle(self) -> None:
        """Return when no process of the group computes.

        Raises:
            BenchmarkFailed: If one still computes after 10 s.
        """
        placement.wait_until_idle(self.pids)

    def pss_bytes(self) -> int:
        """Return the proportional set size of all processes of the group: clients, workers and driver."""
        return sum(memory.pss for pid in self.pids if (memory := placement.memory_of(pid)) is not None)


def _share(count: int | None, number: int, clients: int) -> int | None:
    """Return how many of `count` requests the client with this number makes."""
    return None if count is None else len(range(number, count, clients))


def _result(process: FunctionProcess, limit_s: float, tick: Tick) -> LoadResult:
    try:
        result: LoadResult = process.receive(limit_s, tick)
    except ChildEnded as ended:
        if ended.status == -signal.SIGALRM:
            raise BenchmarkFailed(f"{ended}: a request took more than {TRIAL_LIMIT_S:g} s") from None
        raise
    return result


def _merged(results: Sequence[LoadResult]) -> LoadResult:
    def joined(name: str) -> Times:
        return np.concatenate([getattr(result, name) for result in results])

    order = np.argsort(joined("intended"), kind="stable")
    return LoadResult(
        joined("intended")[order],
        joined("started")[order],
        joined("latencies")[order],
        sum(result.unsent for result in results),
        max(result.wall_ns for result in results),
        sum(result.client_cpu_ns for result in results),
        sum(result.driver_cpu_ns for result in results),
        results[0].stages_ns,
    )


@contextmanager
def started_group(name: str, jobs: Sequence[RunnerJob], tick: Tick = lambda: None) -> Iterator[RunnerGroup]:
    """Start a process for each job, and yield them when all have loaded the model; at exit they are ended and reaped.

    The jobs load one after the other, because a preparation occupies CPUs. After an error the processes are killed.

    Raises:
        RunnerUnavailable: If the runner cannot run here.
        BenchmarkFailed: If a process fails.
    """
    with ExitStack() as stack:
        processes, runners = [], []
        for job in jobs:
            process = stack.enter_context(started_child(_serve, job, name=name))
            processes.append(process)
            runners.append(process.receive(READY_S, tick))
        yield RunnerGroup(processes, runners)


# ----------------------------------------------------------------------------------------------------------------------
# The runner: loads the model, and runs the trials.


def _serve(connection: Any, job: RunnerJob) -> None:
    with opened(job) as runner, np.errstate(all="ignore"):
        connection.send((runner.pids, runner.details))
        while True:
            trial = connection.recv()
            set_time_limit(trial.load.seconds + TRIAL_LIMIT_S)
            connection.send(run_trial(runner, job.inputs, trial))
            set_time_limit(0)


@dataclass(frozen=True, slots=True)
class OpenRunner:
    """A loaded model: its step, the worker that computes for it (None for a peer), and a burst's stages."""

    step: Step
    worker_pid: int | None
    stages: Stages | None
    pids: list[int]
    details: Details = field(default_factory=dict)


@contextmanager
def opened(job: RunnerJob) -> Iterator[OpenRunner]:
    """Load the job's model, and execute it once; yield it.

    Raises:
        RunnerUnavailable: If a peer is not installed or cannot load the model.
        NnfmqError: If the driver or the model cannot be used.
    """
    if job.own is not None:
        opening: Any = _opened_own(job, job.own)
    else:
        opening = (_opened_peer if job.runner in PEERS else _opened_driver)(job)
    with opening as runner:
        runner.step(job.inputs[0])
        yield runner


@contextmanager
def _opened_own(job: RunnerJob, own: OwnRunner) -> Iterator[OpenRunner]:
    begin = time.perf_counter_ns()
    step = own(job.model)
    yield OpenRunner(step, None, None, [os.getpid()], {"prepared_ns": time.perf_counter_ns() - begin})


def _loaded(job: RunnerJob) -> Any:
    return job.hosted or load(job.model, shapes=job.shapes, signature=job.signature)


@contextmanager
def _opened_peer(job: RunnerJob) -> Iterator[OpenRunner]:
    model, threads, begin = _loaded(job), job.threads or allowed_cores(), time.perf_counter_ns()
    with opened_peer(job.runner, PeerJob(job.model, model, threads)) as peer:
        prepared_ns = time.perf_counter_ns() - begin
        step, variant = fastest_variant(peer.variants, job.inputs[0])
        details: Details = {"api_variant": variant, "threads": threads, "prepared_ns": prepared_ns}
        yield OpenRunner(step, None, None, [os.getpid()], details)


@contextmanager
def _opened_driver(job: RunnerJob) -> Iterator[OpenRunner]:
    model = _loaded(job)
    with ExitStack() as stack:
        is_embedded = job.connect == "embedded"
        path = None if is_embedded else job.connect
        client = stack.enter_context(connect(path, embedded=is_embedded or None, recover=False))
        worker, begin = client.worker_pid, time.perf_counter_ns()
        with _limited(worker, job.threads):  # the size of its thread pool follows its affinity
            target = client if job.device is None else client.device(job.device)
            if job.hosted is not None:
                model = client.device(str(job.device)).load(
                    job.model, shapes=job.shapes, signature=job.signature, runtime_options=job.hosted.runtime_options
                )
            prepared = stack.enter_context(
                target.prepare(model, preference=_SUSTAINED, timeout=_PREPARE_S, deterministic=job.deterministic)
            )
            if isinstance(prepared, PreparedModel):
                require_machine_code(prepared.device, prepared.program, prepared.compiled_operations)
        details: Details = {"device": prepared.device, "prepared_ns": time.perf_counter_ns() - begin}
        # A process with one CPU does not poll, which it decides when a burst is created: limit it afterwards.
        step, stages = stack.enter_context(opened_mode(job.runner, prepared))
        if job.threads is not None:
            details["threads"] = job.threads
            stack.enter_context(_limited(worker, job.threads))
        yield OpenRunner(step, worker, stages, [os.getpid(), worker, client.driver_pid], details)


@contextmanager
def _limited(pid: int, threads: int | None) -> Iterator[None]:
    """Limit a process to one CPU of as many cores as it may have threads, meanwhile; None: no limit."""
    if threads is None:
        yield
        return
    before = os.sched_getaffinity(pid)
    placement.pin_to(pid, [core[0] for core in cpus_by_core(before)][:threads])
    try:
        yield
    finally:
        try:
            placement.pin_to(pid, before)
        except (FileNotFoundError, ProcessLookupError):
            pass  # the worker has exited


def run_trial(runner: OpenRunner, sets: Sequence[Sequence[Array]], trial: Trial) -> LoadResult:
    """Run one trial and return its times. Blocks until its last request is done."""
    inputs, due = itertools.cycle(sets), _due(trial)
    load, begin_ns = trial.load, trial.begin_ns
    run: Callable[[], RequestTimes]
    if load.rate is None:
        until_ns = begin_ns + round(load.seconds * 1e9)
        run = lambda: closed_loop(runner.step, inputs, until_ns, load.count)  # noqa: E731
    else:
        backlog_until_ns = begin_ns + round((load.seconds + BACKLOG_S) * 1e9)
        run = lambda: open_loop(runner.step, inputs, due, backlog_until_ns)  # noqa: E731
    time.sleep(max(0, begin_ns - time.monotonic_ns()) / 1e9)
    before = _cpu_ns(runner)
    times = run()
    wall_ns, after = time.monotonic_ns() - begin_ns, _cpu_ns(runner)
    client_cpu_ns, driver_cpu_ns = (late - early for early, late in zip(before, after, strict=True))
    intended, started = (np.array(each, np.int64) - begin_ns for each in (times.intended, times.started))
    latencies = np.array(times.latencies, np.int64)
    stages_ns = _mean_stages(runner, sets[0], trial.stages)
    return LoadResult(
        intended,
        started,
        latencies,
        max(0, len(due) - latencies.size),
        wall_ns,
        client_cpu_ns,
        driver_cpu_ns,
        stages_ns,
    )


def _due(trial: Trial) -> list[int]:
    """Return the intended starts of this client's requests; none in a closed loop."""
    load = trial.load
    if load.rate is None:
        return []
    starts = intended_starts(
        load.rate, load.seconds, load.distribution, load.client, load.clients, load.seed, load.count
    )  # fmt: skip
    return [trial.begin_ns + start for start in starts.tolist()]


def _cpu_ns(runner: OpenRunner) -> tuple[int, int]:
    return placement.cpu_ns(0), 0 if runner.worker_pid is None else placement.cpu_ns(runner.worker_pid)


def _mean_stages(runner: OpenRunner, inputs: Sequence[Array], count: int) -> list[float]:
    if runner.stages is None or not count:
        return []
    found = [runner.stages(inputs) for _ in range(count)]
    return [sum(values) / count for values in zip(*found, strict=True)][: len(STAGES)]
