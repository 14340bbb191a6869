"""The runners of model_bench.py: each loads a model once in its own process, then runs trials on request.

If a runtime has several API variants, all are tried before the first trial and the fastest is used; the report has its
name. A runner is pinned to its CPUs before it creates threads, which decides their number.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from bench_processes import set_time_limit
from latency_client import CLIENT_WINDOW, SERVER_WINDOW
from model_bench_jobs import Ready, RunnerJob, inputs_for, load_source
from model_bench_shared import shared_memory

from nnfmq.cli.console import open_client
from nnfmq.hal.errors import NnfmqError
from nnfmq.hal.program_kind import require_machine_code
from nnfmq.hal.types import ExecutionPreference
from nnfmq.measure import cpu_pinning
from nnfmq.measure.failures import BenchmarkFailed, RunnerUnavailable
from nnfmq.measure.peers import PEERS, PeerJob, opened_peer
from nnfmq.measure.steps import Runner, fastest_variant, make_step, states_of, timed

SUSTAINED = ExecutionPreference.SUSTAINED_SPEED  # machine code, without a baseline program that runs first


def child_main(connection: Connection, job: RunnerJob) -> None:
    """Report that the runner is ready, then run the requested trials and send their times in ns. Entry point."""
    set_time_limit(job.limit_s)
    try:
        cpu_pinning.pin_to(0, job.client_cpus or job.cpus)
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
        cpu_pinning.pin_to(client.worker_pid, job.cpus)  # the size of its thread pool follows its affinity
        device = client.device("compiled")
        begin = time.perf_counter()
        prepared = stack.enter_context(device.prepare(model, preference=SUSTAINED, timeout=job.limit_s))
        require_machine_code(prepared.device, prepared.program)
        details = {"prepare_s": time.perf_counter() - begin, "threads": len(job.cpus)}
        # When a burst is created, each process decides by the number of its allowed CPUs whether it polls.
        for pid in (0, client.worker_pid):
            cpu_pinning.pin_process(pid, None)
        burst = stack.enter_context(prepared.burst())
        inputs = inputs_for(model.inputs)
        for buffer, array in zip(burst.inputs, inputs, strict=True):
            buffer[...] = array
        cpu_pinning.pin_to(client.worker_pid, job.cpus)
        cpu_pinning.pin_to(0, job.client_cpus)
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
