"""Client processes of latency_stress.py: connect, prepare a model and a burst, pin both processes, measure.

Each process sends one result to its parent over a pipe, or the exception that explains why it has none. Models are
prepared and bursts created before anything is pinned, because a process that may use one CPU only does not poll.
"""

from __future__ import annotations

import os
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import TYPE_CHECKING, Any

import latency_baselines
import numpy as np
from bench_processes import set_time_limit

from nnfmq.cli.console import open_client
from nnfmq.hal.errors import NnfmqError
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
from nnfmq.measure import cpu_pinning
from nnfmq.measure.failures import BenchmarkFailed, RunnerUnavailable
from nnfmq.measure.steps import Array, Step, random_input, timed

if TYPE_CHECKING:
    from nnfmq.runtime.client import Client

PATHS = ("burst", "in-place", "ordinary")
CLIENT_WINDOW = "NNFMQ_BURST_CONTROLLER_POLLING_WINDOW"
SERVER_WINDOW = "NNFMQ_BURST_SERVER_POLLING_WINDOW"


@dataclass(frozen=True, slots=True)
class LatencyPlan:
    """The measurements and their conditions; sent to every client process."""

    connect: str | None
    device: str
    model: Path | None
    only: str | None
    counts: dict[str, int]
    warm_up: int
    clients: int
    placement: str
    window_us: int | None
    rounds: int
    limit_s: int


@dataclass(frozen=True, slots=True)
class LatencySeries:
    """One client's part of a series: every round trip, and the CPU time of client and driver."""

    model: str
    path: str
    samples_ns: list[int]
    wall_ns: int
    client_cpu_ns: int
    driver_cpu_ns: int


def null_model() -> Model:
    """Return the null model: RESHAPE of one float32 to one float32."""
    operands = (
        Operand(OperandType.TENSOR_FLOAT32, (1,), lifetime=LifeTime.SUBGRAPH_INPUT),
        Operand(OperandType.TENSOR_INT32, (1,), lifetime=LifeTime.CONSTANT_COPY, location=DataLocation(0, 0, 4)),
        Operand(OperandType.TENSOR_FLOAT32, (1,), lifetime=LifeTime.SUBGRAPH_OUTPUT),
    )
    reshape = Operation(OperationType.RESHAPE, (0, 1), (2,))
    return Model(Subgraph(operands, (reshape,), (0,), (2,)), operand_values=struct.pack("<i", 1))


@contextmanager
def _reporting(plan: LatencyPlan, results: Connection) -> Iterator[None]:
    """Limit the process's running time, set its polling windows, and send an exception of nnfmq to the parent."""
    set_time_limit(plan.limit_s)
    if plan.window_us is not None:
        os.environ[CLIENT_WINDOW] = os.environ[SERVER_WINDOW] = str(plan.window_us)
    try:
        yield
    except (NnfmqError, OSError, RunnerUnavailable) as error:
        results.send(BenchmarkFailed(f"{type(error).__name__}: {error}"))
    finally:
        results.close()


def client_main(results: Connection, plan: LatencyPlan, number: int, barrier: Barrier) -> None:
    """Send this client's conditions and its series. Entry point of a client process."""
    with _reporting(plan, results), open_client(plan.connect) as client:
        cpus = cpu_pinning.choose(plan.placement, number)
        own = _own_conditions(plan, client)
        series = [
            part
            for model in ("null", "real")
            if plan.only in (None, model)
            for part in _measure_model(plan, client, model, cpus, barrier)
        ]
        results.send((own, series))


def _own_conditions(plan: LatencyPlan, client: Client) -> dict[str, Any]:
    from nnfmq.queue import core
    from nnfmq.queue.hybrid_polling import PollingWindow

    # Only an embedded driver inherits the environment that the window is read from.
    server_ns = PollingWindow.server().ns if plan.connect == "embedded" else None
    return {
        "core": core.core_name,
        "driver_core": client.driver_core,
        "window_us": PollingWindow.controller().ns / 1000,
        "driver_window_us": None if server_ns is None else server_ns / 1000,
    }


def _measure_model(
    plan: LatencyPlan, client: Client, name: str, cpus: cpu_pinning.Cpus, barrier: Barrier
) -> Iterator[LatencySeries]:
    with _ready_burst(plan, client, name, cpus) as (prepared, burst):
        inputs = _random_inputs(prepared)
        steps = _steps(burst, plan.limit_s) | {
            "ordinary": lambda arrays: prepared.execute(*arrays, timeout=plan.limit_s)
        }
        for path in PATHS:
            barrier.wait(plan.limit_s)
            yield _series((name, path), steps[path], inputs, plan, client.worker_pid)


@contextmanager
def _ready_burst(plan: LatencyPlan, client: Client, name: str, cpus: cpu_pinning.Cpus) -> Iterator[tuple[Any, Any]]:
    """Prepare a model, create its burst, and pin both processes to their CPUs.

    Pinning comes last: when a burst is created, each process decides whether it polls, and with one CPU it does not.
    """
    import nnfmq

    cpu_pinning.pin_process(0, None)
    cpu_pinning.pin_process(client.worker_pid, None)
    model: Any = null_model() if name == "null" else nnfmq.load(plan.model or nnfmq.example_path("digits.tflite"))
    device, sustained = client.device(plan.device), ExecutionPreference.SUSTAINED_SPEED
    with device.prepare(model, preference=sustained, timeout=plan.limit_s) as prepared, prepared.burst() as burst:
        cpu_pinning.pin_process(0, cpus.client)
        cpu_pinning.pin_process(client.worker_pid, cpus.driver)
        yield prepared, burst


def _random_inputs(prepared: Any) -> list[Array]:
    random = np.random.default_rng(7)
    return [random_input(info, random) for info in prepared.inputs]


def _steps(burst: Any, limit_s: int) -> dict[str, Step]:
    """Return the steps of a burst's two paths."""
    return {
        "burst": lambda inputs: burst.execute(*inputs, timeout=limit_s),
        "in-place": lambda _: burst.execute(out=burst.outputs, timeout=limit_s),
    }


def _series(
    names: tuple[str, str], step: Step, inputs: Sequence[Array], plan: LatencyPlan, worker_pid: int
) -> LatencySeries:  # fmt: skip
    count = plan.counts[names[0]]
    timed(step, inputs, min(plan.warm_up, count))
    began = (time.perf_counter_ns(), cpu_pinning.cpu_ns(0), cpu_pinning.cpu_ns(worker_pid))
    samples = timed(step, inputs, count)
    ended = (time.perf_counter_ns(), cpu_pinning.cpu_ns(0), cpu_pinning.cpu_ns(worker_pid))
    return LatencySeries(*names, samples, *(after - before for before, after in zip(began, ended, strict=True)))


def null_burst(plan: LatencyPlan, path: str, count: int, cpus: cpu_pinning.Cpus) -> list[int]:
    """Return `count` round trips in ns of the null model over one of the burst's two paths; connects and closes."""
    with open_client(plan.connect) as client, _ready_burst(plan, client, "null", cpus) as (prepared, burst):
        inputs, step = _random_inputs(prepared), _steps(burst, plan.limit_s)[path]
        for target, array in zip(burst.inputs, inputs, strict=True):
            target[...] = array
        timed(step, inputs, plan.warm_up)
        return timed(step, inputs, count)


def compare_main(results: Connection, plan: LatencyPlan) -> None:
    """Interleave rounds of the null burst with the baselines, on the CPUs of the first client. Entry point."""
    cpus = cpu_pinning.choose(plan.placement, 0)
    count, folder = max(1, plan.counts["null"] // plan.rounds), tempfile.TemporaryDirectory(prefix="nnfmq-stress-")
    with (
        _reporting(plan, results),
        folder as name,
        open_client(plan.connect) as client,
        _ready_burst(plan, client, "null", cpus) as (prepared, burst),
    ):
        inputs, step = _random_inputs(prepared), _steps(burst, plan.limit_s)["burst"]

        def one_round() -> list[int]:
            timed(step, inputs, min(plan.warm_up, count))
            return timed(step, inputs, count)

        comparison = latency_baselines.compare(
            one_round, count=count, warm_up=min(plan.warm_up, count), rounds=plan.rounds, cpus=cpus,
            folder=Path(name), limit_s=plan.limit_s,
        )  # fmt: skip
        results.send(comparison.as_dict())
