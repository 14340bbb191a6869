"""`nnfmq why` names what made requests of real drivers slow: a stop, another program, a pause. (OBS-7)"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
from support.core_page import SLOTS, opened_page
from support.drivers import APPS, Daemon, InThread, Process, Program, one, until
from support.models import slow_model

import nnfmq
from nnfmq.base.processes import allowed_cores
from nnfmq.cli import main
from nnfmq.cli.trace_collection import traced_driver
from nnfmq.engines.compiled import thread_pool
from nnfmq.hal.client_class import ClientClass
from nnfmq.lab.machine_sampler import MachineSampler
from nnfmq.lab.placement import pin_to
from nnfmq.observe.slow_requests import explain, requests_of
from nnfmq.observe.trace_layout import PAUSED

STOP_NS, PAUSE_NS = 100_000_000, 50_000_000
OTHER = SLOTS // 2  # the entry of no worker of these tests
only_the_compiled_core_pauses = pytest.mark.skipif(
    thread_pool.core_name != "compiled", reason="only the compiled core has a thread pool"
)
BUSY_LOOP = Path(support.__path__[0]) / "busy_loop.py"


@contextmanager
def traced_application(daemon: Daemon, output: Path) -> Iterator[tuple[Program, int]]:
    """Run `nnfmq trace` with an application of the device compiled, and yield it and its worker's pid."""
    command = [sys.executable, "-P", APPS / "traced.py", daemon.path, "compiled"]
    with Program.start(["-P", "-m", "nnfmq", "trace", "-o", output, "--", *command]) as program:
        program.tell("50")
        yield program, int(program.line())
        program.end_input()
        assert program.wait() == 0


SLOWEST = 20  # to look at: some may have waited for a CPU that another process had


def why(capsys: pytest.CaptureFixture[str], output: Path) -> list[dict[str, Any]]:
    assert main(["why", str(output), "-n", str(SLOWEST), "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["slowest"]
    return found


def test_a_worker_that_was_stopped_for_100_ms_is_blamed_as_a_stop_and_no_operation_is(
    daemon: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with traced_application(daemon, tmp_path / "out.json") as (program, pid), Process(pid) as worker:
        program.tell("3000")
        with worker.stopped():
            end_ns = time.monotonic_ns() + STOP_NS
            until(lambda: time.monotonic_ns() >= end_ns, "the worker has been stopped for 100 ms")
        program.line()
    (slow,) = [slow for slow in why(capsys, tmp_path / "out.json") if slow["cause"] == "stops"]
    assert slow["total_ns"] >= STOP_NS
    stop = slow["causes"][0]
    assert stop["evidence"].startswith("the worker was stopped by a signal (state T) for at least")
    assert sum(cause["explained_ns"] for cause in slow["causes"]) <= slow["excess_ns"] <= slow["total_ns"]
    for operation in slow["operations"]:
        assert operation["duration_ns"] - operation["off_cpu_ns"] < STOP_NS / 4
    began = datetime.fromisoformat(slow["date"])
    assert 0 <= (datetime.now(UTC) - began).total_seconds() < 60


def test_a_busy_loop_on_the_workers_cpu_is_named(
    daemon: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu = min(os.sched_getaffinity(0))
    with traced_application(daemon, tmp_path / "out.json") as (program, worker), ExitStack() as stack:
        pin_to(worker, {cpu})
        for _ in range(3):
            loop = stack.enter_context(Program.start(["-P", BUSY_LOOP, str(cpu)]))
            loop.line()
            stack.callback(loop.popen.kill)
        program.tell("2000")
        program.line()
    evidence = [
        cause["evidence"]
        for slow in why(capsys, tmp_path / "out.json")
        for cause in slow["causes"]
        if cause["name"] == "cpu-worker"
    ]
    assert any("the worker's listener thread waited" in text and "busy_loop.py (" in text for text in evidence), (
        evidence
    )


def test_a_trace_of_a_running_driver_has_the_wake_up_for_a_request(
    daemon: Daemon, client: nnfmq.Client, model: nnfmq.PreparedModel
) -> None:
    with (
        model.burst() as burst,
        daemon.connect() as tracer,
        traced_driver(tracer) as rings,
        MachineSampler() as sampler,
        Process(client.worker_pid) as worker,
    ):
        for _ in range(20):
            burst.execute(one(1))
        sampler.watch([client.worker_pid])
        with worker.stopped():
            running = InThread.start(lambda: burst.execute(one(2)))
            end_ns = time.monotonic_ns() + STOP_NS
            until(lambda: time.monotonic_ns() >= end_ns, "the worker has been stopped for 100 ms")
        running.wait()
        burst.execute(one(3))

        def is_recorded() -> bool:
            rings.read()
            return len(requests_of(rings.trace())) >= 21

        until(is_recorded, "the worker has recorded the requests")
        sampler.stop()
        trace = rings.trace()
        trace.machine = sampler.record
    (slow,) = [slow for slow in explain(trace, SLOWEST) if slow.causes and slow.causes[0].name == "stops"]
    assert slow.request.stages["request wake-up"] >= STOP_NS


@only_the_compiled_core_pauses
def test_a_pause_for_clients_of_a_higher_class_is_in_the_trace_and_is_named(daemon: Daemon) -> None:
    with (
        nnfmq.connect(daemon.path, client_class="batch", recover=False) as client,
        client.device("compiled").prepare(slow_model(8, 64), preference="sustained_speed") as model,
        model.burst() as burst,
        opened_page(daemon) as page,
        daemon.connect() as tracer,
        traced_driver(tracer) as rings,
    ):
        image = np.ones((1, 64, 64, 32), np.float32)
        for _ in range(5):
            burst.execute(image)
        page.compute(OTHER, ClientClass.INTERACTIVE, allowed_cores())
        try:
            running = InThread.start(lambda: burst.execute(image))
            until(lambda: any(page.paused), "its worker pauses")
            end_ns = time.monotonic_ns() + PAUSE_NS
            until(lambda: time.monotonic_ns() >= end_ns, "it has paused for a while")
        finally:
            page.end(OTHER)
        running.wait()
        burst.execute(image)

        def is_recorded() -> bool:
            rings.read()
            return any(one.name.startswith(PAUSED) for one in rings.trace().slices)

        until(is_recorded, "the worker has recorded the pause")
        trace = rings.trace()
    found = [({cause.name: cause for cause in slow.causes}, slow) for slow in explain(trace, SLOWEST)]
    ((causes, slow),) = [each for each in found if "pause" in each[0]]
    assert causes["pause"].explained >= PAUSE_NS / 2
    assert causes["pause"].evidence.startswith("the worker paused for")
    assert "for interactive clients" in causes["pause"].evidence
    assert sum(operation.off_cpu_ns for operation in slow.operations) >= PAUSE_NS / 2
