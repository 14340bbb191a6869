"""The runners of model_bench.py, each in a process of its own, and the trials of all of them, interleaved.

A runner loads a model once, then runs trials on request. If a runtime has several API variants, all are tried before
first trial and the fastest is used; the report has its name. A runner is pinned to its CPUs before it creates
threads, which decides their number.

One runner computes, the processes of all others sleep. The runtimes' threads poll for some time after a run, and would
compete with the next runner: so a trial begins only when no runner's process has used the CPU in two consecutive polls.
A round is several trials of each runner, so that a period in which the machine is slower affects all of them, and the
order is rotated. A baseline that is not installed is reported as missing.

The runner `nnfmq shared memory` is the least that two processes can do: the engine runs in a process of its own, with
its inputs and outputs in memory that both processes map. Each side polls a counter of the other's in Python; there is
no queue, no packet and no driver. So its time above that of the engine in process is what it costs to move the arrays
between the caches of two CPUs, and a burst's time above this runner's is what the burst itself costs. The stores are
ordered as x86-64 orders them; elsewhere results may be wrong.
"""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from bench_support import (
    CLIENT_WINDOW,
    REPORTED_PERCENTILES,
    SERVER_WINDOW,
    receive_result,
    set_time_limit,
    started_processes,
)
from generated_models import GeneratedModel

import nnfmq
from nnfmq.cli.console import open_client
from nnfmq.hal.errors import NnfmqError
from nnfmq.hal.preparation import require_machine_code
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import ExecutionPreference
from nnfmq.lab import placement
from nnfmq.lab.bench.measurement import rotated
from nnfmq.lab.bench.peers import PEERS, PeerJob, opened_peer
from nnfmq.lab.bench.runner_protocol import BenchmarkFailed, RunnerUnavailable
from nnfmq.lab.bench.steps import Array, Runner, fastest_variant, make_step, random_input, states_of, timed
from nnfmq.lab.placement import wait_until_idle
from nnfmq.lab.statistics import percentile

if TYPE_CHECKING:
    pass


# ---- what runners are given and return


_SEED = 7


@dataclass(frozen=True, slots=True)
class RunnerJob:
    """One runner; sent to its process. It computes on `cpus`, one thread per CPU."""

    kind: str
    source: Path | GeneratedModel
    cpus: tuple[int, ...]
    client_cpus: tuple[int, ...] = ()
    window_us: int | None = None  # None: the default window
    connect: str = "embedded"
    limit_s: int = 120


@dataclass(frozen=True, slots=True)
class Trial:
    """A request to a runner: `count` steps that are timed, after `warm_up` steps that are not."""

    count: int
    warm_up: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The first message of a runner: its processes, its details, and the outputs of its first step."""

    pids: tuple[int, ...]
    details: dict[str, Any]
    outputs: list[Array]


def load_source(source: Path | GeneratedModel) -> Any:
    """Return the generated model itself, or the loaded file."""
    return source if isinstance(source, GeneratedModel) else nnfmq.load(source)


def inputs_for(infos: Sequence[TensorInfo]) -> list[Array]:
    """Return random arrays, the same for every runner."""
    random = np.random.default_rng(_SEED)
    return [random_input(info, random) for info in infos]


# ---- the runner `nnfmq shared memory`


_LINE = 128  # bytes between values that two CPUs write
_POLLING_NS = 100_000_000  # after a request; then the engine's process sleeps, so that it is idle during other trials
_POLLS = 1000  # between two looks at the clock
_IDLE_S = 0.01
_END = 2**63 - 1


@dataclass(frozen=True, slots=True)
class _SharedArrays:
    """Counters of requests and results, and the model's inputs and outputs, states included, in shared memory."""

    requests: memoryview
    results: memoryview
    inputs: list[Array]
    outputs: list[Array]

    @classmethod
    def for_arrays(cls, inputs: Sequence[Array], outputs: Sequence[Array]) -> _SharedArrays:
        arrays = [*inputs, *outputs]
        sizes = [-(-array.nbytes // _LINE) * _LINE for array in arrays]
        memory = mmap.mmap(-1, 2 * _LINE + sum(sizes))
        offsets = np.cumsum([2 * _LINE, *sizes])
        views = [
            np.frombuffer(memory, array.dtype, array.size, int(offset)).reshape(array.shape)
            for array, offset in zip(arrays, offsets, strict=False)
        ]
        words = memoryview(memory).cast("q")
        return cls(words[:1], words[_LINE // 8 : _LINE // 8 + 1], views[: len(inputs)], views[len(inputs) :])


@contextmanager
def shared_memory(job: RunnerJob) -> Iterator[Runner]:
    """The engine in another process; its arrays are in shared memory."""
    model = load_source(job.source)
    inputs, states = inputs_for(model.inputs), states_of(model)
    outputs = [*(np.zeros(i.shape, i.dtype) for i in model.outputs), *map(np.zeros_like, states)]
    shared = _SharedArrays.for_arrays([*inputs, *states], outputs)
    child = os.fork()
    if not child:
        _compute(job, model, shared)
    try:
        _wait_for_engine(shared, child, job.limit_s)
        step = make_step(len(inputs), shared.inputs, shared.outputs, lambda: _request(shared))
        for buffer, state in zip(shared.inputs[len(inputs) :], states, strict=True):
            buffer[...] = state
        yield Runner({"in place": step}, (child,), {"threads": len(job.cpus)})
    finally:
        shared.requests[0] = _END
        os.waitpid(child, 0)


def _wait_for_engine(shared: _SharedArrays, child: int, limit_s: int) -> None:
    """Wait until the engine has computed once.

    Raises:
        BenchmarkFailed: If it does not within `limit_s`, or its process ends.
    """
    deadline = time.monotonic() + limit_s
    shared.requests[0] = 1
    while shared.results[0] != 1:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) or time.monotonic() > deadline:
            raise BenchmarkFailed("the engine's process has ended, or is too slow")
        time.sleep(_IDLE_S)


def _request(shared: _SharedArrays) -> None:
    requests, results = shared.requests, shared.results
    number = requests[0] + 1
    requests[0] = number
    while results[0] != number:
        pass


def _compute(job: RunnerJob, model: Any, shared: _SharedArrays) -> None:
    """Execute the model for each request until the parent ends. Does not return."""
    from nnfmq.engines.compiled.partition import prepare

    parent, status = os.getppid(), 1
    try:
        placement.pin_to(0, job.cpus)
        execution = prepare(model.model).bind(shared.inputs, shared.outputs)
        seen = 0
        with np.errstate(all="ignore"):
            while (seen := _next_request(shared.requests, seen, parent)) != _END:
                execution.run()
                shared.results[0] = seen
        status = 0
    finally:
        os._exit(status)


def _next_request(requests: memoryview, seen: int, parent: int) -> int:
    """Return the number of the next request, or _END if the parent has ended."""
    polling_until = time.monotonic_ns() + _POLLING_NS
    while True:
        for _ in range(_POLLS):
            if requests[0] != seen:
                return requests[0]
        if os.getppid() != parent:
            return _END
        if time.monotonic_ns() > polling_until:
            time.sleep(_IDLE_S)


# ---- runners


SUSTAINED = ExecutionPreference.SUSTAINED_SPEED  # machine code, without a baseline program that runs first


def child_main(connection: Connection, job: RunnerJob) -> None:
    """Report that the runner is ready, then run the requested trials and send their times in ns. Entry point."""
    set_time_limit(job.limit_s)
    try:
        placement.pin_to(0, job.client_cpus or job.cpus)
        with RUNNERS[job.kind](job) as runner:
            _serve(connection, job, runner)
    except RunnerUnavailable as missing:
        connection.send(missing)
    except (BenchmarkFailed, NnfmqError, ImportError, OSError) as error:
        connection.send(BenchmarkFailed(f"{job.kind}: {type(error).__name__}: {error}"))
    finally:
        connection.close()


def _serve(connection: Connection, job: RunnerJob, runner: Runner) -> None:
    inputs = inputs_for(load_source(job.source).inputs)
    outputs = [np.array(array) for array in next(iter(runner.variants.values()))(inputs)]
    connection.send(Ready((os.getpid(), *runner.pids), runner.details, outputs))
    step = None
    while True:
        set_time_limit(0)  # no limit while other runners compute; the connection closes when the benchmark ends
        try:
            trial = connection.recv()
        except EOFError:
            return
        set_time_limit(job.limit_s)
        with np.errstate(all="ignore"):
            if step is None:
                step, runner.details["api_variant"] = fastest_variant(runner.variants, inputs)
            timed(step, inputs, trial.warm_up)
            connection.send((timed(step, inputs, trial.count), runner.details))


@contextmanager
def _in_process(job: RunnerJob) -> Iterator[Runner]:
    """The compiling engine, called directly."""
    from nnfmq.engines.compiled.partition import prepare
    from nnfmq.engines.compiled.thread_pool import default_thread_pool

    model = load_source(job.source)
    inputs = inputs_for(model.inputs)
    states = states_of(model)
    input_buffers = [*(array.copy() for array in inputs), *states]
    output_buffers = [*(np.zeros(i.shape, i.dtype) for i in model.outputs), *map(np.zeros_like, states)]
    begin = time.perf_counter()
    program = prepare(model.model)
    details = {"prepare_s": time.perf_counter() - begin, "threads": default_thread_pool().worker_count + 1}
    execution = program.bind(input_buffers, output_buffers)
    try:
        yield Runner({"bound": make_step(len(inputs), input_buffers, output_buffers, execution.run)}, (), details)
    finally:
        default_thread_pool().stop()


@contextmanager
def _burst(job: RunnerJob) -> Iterator[Runner]:
    """The device `compiled` of a driver process, over a burst; arrays are written to and read from its memory."""
    if job.window_us is not None:
        os.environ[CLIENT_WINDOW] = os.environ[SERVER_WINDOW] = str(job.window_us)
    model = load_source(job.source)
    with ExitStack() as stack:
        client = stack.enter_context(open_client(job.connect))
        placement.pin_to(client.worker_pid, job.cpus)  # the size of its thread pool follows its affinity
        device = client.device("compiled")
        begin = time.perf_counter()
        prepared = stack.enter_context(device.prepare(model, preference=SUSTAINED, timeout=job.limit_s))
        require_machine_code(prepared.device, prepared.program, prepared.compiled_operations)
        details = {"prepare_s": time.perf_counter() - begin, "threads": len(job.cpus)}
        # When a burst is created, each process decides by the number of its allowed CPUs whether it polls.
        for pid in (0, client.worker_pid):
            placement.pin_process(pid, None)
        burst = stack.enter_context(prepared.burst())
        inputs = inputs_for(model.inputs)
        for buffer, array in zip(burst.inputs, inputs, strict=True):
            buffer[...] = array
        placement.pin_to(client.worker_pid, job.cpus)
        placement.pin_to(0, job.client_cpus)
        outputs = burst.outputs

        def run() -> None:
            burst.execute(out=outputs, timeout=job.limit_s)

        step = make_step(len(inputs), burst.inputs, outputs, run)
        yield Runner({"in place": step}, (client.worker_pid,), details)


def _peer(name: str, job: RunnerJob) -> AbstractContextManager[Runner]:
    assert isinstance(job.source, Path)
    return opened_peer(name, PeerJob(job.source, load_source(job.source), len(job.cpus)))


RUNNERS: dict[str, Callable[[RunnerJob], Any]] = {
    "nnfmq burst": _burst,
    "nnfmq in process": _in_process,
    "nnfmq shared memory": shared_memory,
    **{name: partial(_peer, name) for name in PEERS},
}


# ---- interleaved trials


T = TypeVar("T")
Samples = list[list[int]]
"""Times in ns, by trial or by round."""
TRIALS_PER_ROUND = 5  # of each runner


@dataclass(slots=True)
class Measurements:
    """Times in ns by runner and trial; details and first outputs by runner; the reason for each missing runner."""

    samples: dict[str, Samples] = field(default_factory=dict)
    details: dict[str, dict[str, Any]] = field(default_factory=dict)
    outputs: dict[str, list[Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics of all executions of each runner, in µs."""
        return {name: metrics_of(trials) for name, trials in self.samples.items()}

    def metrics_by_round(self) -> list[dict[str, dict[str, float]]]:
        """Return the metrics of each runner in each round, in µs."""
        rounds = {name: _by_round(trials) for name, trials in self.samples.items()}
        count = min(map(len, rounds.values()), default=0)
        return [{name: metrics_of([each[number]]) for name, each in rounds.items()} for number in range(count)]

    def differences_us(self, first: str, second: str) -> list[float]:
        """Return p50 of one runner's trials minus p50 of another's, in pairs that are adjacent in time."""
        pairs = zip(self.samples[first], self.samples[second], strict=True)
        return [(percentile(sorted(a), 50) - percentile(sorted(b), 50)) / 1000 for a, b in pairs]


def batched(values: Sequence[T], size: int) -> list[Sequence[T]]:
    """Return `values` in consecutive parts of `size`; the last may be shorter."""
    return [values[first : first + size] for first in range(0, len(values), size)]


def _by_round(trials: Samples) -> Samples:
    return [[*itertools.chain(*batch)] for batch in batched(trials, TRIALS_PER_ROUND)]


def metrics_of(samples: Samples) -> dict[str, float]:
    """Return the percentiles of all times together, in µs."""
    ordered = sorted(itertools.chain(*samples))
    return {name: percentile(ordered, percent) / 1000 for name, percent in REPORTED_PERCENTILES.items()}


def run_interleaved(
    jobs: Mapping[str, RunnerJob], trials: Mapping[str, Trial] | Trial, rounds: int, advance: Callable[[str], object]
) -> Measurements:
    """Run `rounds` rounds of TRIALS_PER_ROUND trials of all runners.

    Raises:
        BenchmarkFailed: If a runner fails, or does not become idle.
    """
    measured, present = Measurements(), {}
    with ExitStack() as stack:
        for name, job in jobs.items():  # one after the other, because preparing occupies a CPU and its time is reported
            (connection,) = stack.enter_context(started_processes([(child_main, (job,))], duplex=True))
            try:
                present[name] = connection, receive_result(connection, job.limit_s)
            except RunnerUnavailable as reason:
                measured.missing[name] = str(reason)
        pids = [pid for _, ready in present.values() for pid in ready.pids]
        for name, (_, ready) in present.items():
            measured.outputs[name], measured.samples[name] = ready.outputs, []
        for number in range(rounds * TRIALS_PER_ROUND):
            for name in rotated(list(jobs), number):
                advance(name)
                if name in present:
                    trial = trials if isinstance(trials, Trial) else trials[name]
                    wait_until_idle(pids)
                    times, measured.details[name] = _run_trial(present[name][0], trial, jobs[name].limit_s)
                    measured.samples[name].append(times)
    return measured


def _run_trial(connection: Connection, trial: Trial, limit_s: int) -> Any:
    connection.send(trial)
    return receive_result(connection, limit_s)
