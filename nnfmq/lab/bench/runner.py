"""A runner process: `python -m nnfmq.lab.bench.runner` loads a model once, then runs trials on request.

It is one client of the driver, or one process with a peer's runtime. It ends when its standard input is closed.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nnfmq.base.processes import allowed_cpus
from nnfmq.client.connection.connect import connect
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.hal.errors import NnfmqError
from nnfmq.hal.preparation import require_machine_code
from nnfmq.hal.types import ExecutionPreference
from nnfmq.importers import load
from nnfmq.lab import placement
from nnfmq.lab.bench.loops import RequestTimes, closed_loop, intended_starts, open_loop
from nnfmq.lab.bench.peers import PEERS, PeerJob, opened_peer
from nnfmq.lab.bench.runner_protocol import (
    BenchmarkFailed,
    MessagePipe,
    RunnerFailed,
    RunnerJob,
    RunnerReady,
    RunnerUnavailable,
    Trial,
    TrialResult,
)
from nnfmq.lab.bench.steps import STAGES, Array, Stages, Step, fastest_variant, opened_mode

_SUSTAINED = ExecutionPreference.SUSTAINED_SPEED  # machine code, without a baseline program that runs first
_PREPARE_S = 600.0
TRIAL_LIMIT_S = 60.0
"""How much longer than its load a trial may take: the backlog of an open loop, and the last request."""
BACKLOG_S = 20.0
"""For how long the backlog of an open loop is executed after the last intended start."""


@dataclass(frozen=True, slots=True)
class OpenRunner:
    """A loaded model: its step, the worker that computes for it (None for a peer), and a burst's stages."""

    step: Step
    worker_pid: int | None
    stages: Stages | None
    pids: list[int]
    details: dict[str, str | int | float] = field(default_factory=dict)


def main() -> int:
    """Serve the parent's requests until it closes the pipe; return 0."""
    replies = os.dup(1)
    os.dup2(2, 1)  # what a runtime prints must not get between the replies
    pipe = MessagePipe(0, replies, RunnerJob | Trial)
    try:
        _serve(pipe)
    except (EOFError, BrokenPipeError):
        pass  # the parent has ended, or does not need this runner any more
    except RunnerUnavailable as reason:
        pipe.send(RunnerFailed(str(reason), is_unavailable=True))
    except (NnfmqError, BenchmarkFailed, OSError, RuntimeError, ValueError) as error:
        pipe.send(RunnerFailed(" ".join(str(error).split()) or type(error).__name__))
    return 0


def _serve(pipe: MessagePipe) -> None:
    job = pipe.receive()
    assert isinstance(job, RunnerJob)
    sets = [[data.array() for data in arrays] for arrays in job.inputs]
    with opened(job, sets[0]) as runner, np.errstate(all="ignore"):
        pipe.send(RunnerReady(runner.pids, runner.details))
        while True:
            trial = pipe.receive()
            assert isinstance(trial, Trial)
            signal.setitimer(signal.ITIMER_REAL, trial.load.seconds + TRIAL_LIMIT_S)  # ends this process
            pipe.send(run_trial(runner, sets, trial))
            signal.setitimer(signal.ITIMER_REAL, 0)


# ---- loading


@contextmanager
def opened(job: RunnerJob, inputs: Sequence[Array]) -> Iterator[OpenRunner]:
    """Load the job's model, and execute it once; yield it.

    Raises:
        RunnerUnavailable: If a peer is not installed or cannot load the model.
        NnfmqError: If the driver or the model cannot be used.
    """
    model = load(Path(job.model), shapes=job.shapes, signature=job.signature)
    with (_opened_peer if job.runner in PEERS else _opened_driver)(job, model, inputs) as runner:
        runner.step(inputs)
        yield runner


@contextmanager
def _opened_peer(job: RunnerJob, model: Any, inputs: Sequence[Array]) -> Iterator[OpenRunner]:
    threads, begin = job.threads or allowed_cpus(), time.perf_counter()
    with opened_peer(job.runner, PeerJob(Path(job.model), model, threads)) as peer:
        prepare_s = time.perf_counter() - begin
        step, variant = fastest_variant(peer.variants, inputs)
        details: dict[str, str | int | float] = {"api_variant": variant, "threads": threads, "prepare_s": prepare_s}
        yield OpenRunner(step, None, None, [os.getpid()], details)


@contextmanager
def _opened_driver(job: RunnerJob, model: Any, inputs: Sequence[Array]) -> Iterator[OpenRunner]:
    with ExitStack() as stack:
        is_embedded = job.connect == "embedded"
        path = None if is_embedded else job.connect
        client = stack.enter_context(connect(path, embedded=is_embedded or None, recover=False))
        worker, begin = client.worker_pid, time.perf_counter()
        with _limited(worker, job.threads):  # the size of its thread pool follows its affinity
            target = client if job.device is None else client.device(job.device)
            prepared = stack.enter_context(target.prepare(model, preference=_SUSTAINED, timeout=_PREPARE_S))
            if isinstance(prepared, PreparedModel):
                require_machine_code(prepared.device, prepared.program, prepared.compiled_operations)
        details: dict[str, str | int | float] = {"device": prepared.device, "prepare_s": time.perf_counter() - begin}
        # A process with one CPU does not poll, which it decides when a burst is created: limit it afterwards.
        step, stages = stack.enter_context(opened_mode(job.runner, prepared))
        if job.threads is not None:
            details["threads"] = job.threads
            stack.enter_context(_limited(worker, job.threads))
        yield OpenRunner(step, worker, stages, [os.getpid(), worker, client.driver_pid], details)


@contextmanager
def _limited(pid: int, threads: int | None) -> Iterator[None]:
    """Limit a process to as many CPUs as it may have threads, meanwhile; None: no limit."""
    if threads is None:
        yield
        return
    before = os.sched_getaffinity(pid)
    placement.pin_to(pid, sorted(before)[:threads])
    try:
        yield
    finally:
        try:
            placement.pin_to(pid, before)
        except (FileNotFoundError, ProcessLookupError):
            pass  # the worker has exited


# ---- trials


def run_trial(runner: OpenRunner, sets: Sequence[Sequence[Array]], trial: Trial) -> TrialResult:
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
    return TrialResult(
        intended.tobytes(), started.tobytes(), latencies.tobytes(), max(0, len(due) - latencies.size), wall_ns,
        client_cpu_ns, driver_cpu_ns, stages_ns,
    )  # fmt: skip


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


if __name__ == "__main__":
    sys.exit(main())
