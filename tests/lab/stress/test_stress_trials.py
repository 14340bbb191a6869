"""Trials with a real driver: what clients record, each disturbance, and the death of either side in the middle.

No latency is asserted. That a disturbance happened is seen in the counters of the records.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.drivers import Process

import nnfmq
from nnfmq.lab.bench.runner import RunnerJob
from nnfmq.lab.child_processes import BenchmarkFailed
from nnfmq.lab.listening_driver import Daemon, started_daemon
from nnfmq.lab.placement import Cpus
from nnfmq.lab.stress.clients import StressClient, started_clients
from nnfmq.lab.stress.disturbances import DisturbancePlan, draw_plan
from nnfmq.lab.stress.machine_load import MachineLoad, started_loads
from nnfmq.lab.stress.trial import TrialRecords, TrialSetup, run_trial

DIGITS = nnfmq.example_path("digits.tflite")
ONES = [np.ones((1, 8, 8, 1), np.float32)]
ANYWHERE = Cpus(None, None)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with started_daemon(tmp_path_factory.mktemp("driver")) as started:
        yield started


def job(daemon: Daemon, mode: str = "burst", device: str | None = "reference") -> RunnerJob:
    return RunnerJob(mode, DIGITS, {}, None, [ONES], device, None, daemon.socket)


@pytest.fixture
def client(daemon: Daemon) -> Iterator[StressClient]:
    with started_clients(job(daemon), 1) as (started,):
        yield started


@pytest.fixture
def setup(daemon: Daemon, tmp_path: Path) -> TrialSetup:
    return TrialSetup(daemon.socket, [ANYWHERE], tmp_path)


def trial(
    client: StressClient, setup: TrialSetup, *names: str, seconds: float = 0.3, tick: Callable[[], None] = lambda: None
) -> TrialRecords:
    plan = draw_plan(names, seconds, (None, None), random.Random(0))
    return run_trial([client], setup, plan, seconds, 0, tick)


def test_each_request_is_recorded_with_its_stages(client: StressClient, setup: TrialSetup) -> None:
    found = trial(client, setup)
    (records,) = found.clients
    for record in records:
        assert record.burst == record.queue + record.driver + record.engine
        assert 0 < record.engine <= record.burst <= record.latency
        assert min(record) >= 0
    assert all(early.end <= late.begin for early, late in pairwise(records))
    assert found.begin_ns <= records[0].begin and records[-1].begin < found.begin_ns + 300_000_000
    assert found.latencies().tolist() == [record.latency for record in records]


def test_the_samples_surround_the_requests(client: StressClient, setup: TrialSetup) -> None:
    found = trial(client, setup)
    samples = found.samples[0]
    assert samples[0].time < found.clients[0][0].begin
    assert not any(sample.client_stop or sample.worker_stop for sample in samples)


def test_requests_of_an_open_loop_begin_at_their_times_whatever_the_one_before_took(
    client: StressClient, setup: TrialSetup
) -> None:
    plan = draw_plan((), 0.3, (None, None), random.Random(0))
    found = run_trial([client], setup, plan, 0.3, 0, rate=100.0)
    (records,) = found.clients
    assert 1 <= len(records) <= 30
    assert all((record.begin - found.begin_ns) % 10_000_000 == 0 for record in records)
    assert all(record.latency >= record.burst + record.late >= record.late >= 0 for record in records)
    assert found.machine.is_sampled and found.watched[0].worker == client.worker


def test_a_mode_without_stages_has_none(daemon: Daemon, setup: TrialSetup) -> None:
    with started_clients(job(daemon, "sync"), 1) as (client,):
        (records,) = trial(client, setup).clients
    assert all(record[2:6] == (-1, -1, -1, -1) for record in records)


def test_several_clients_have_workers_of_their_own(daemon: Daemon, tmp_path: Path) -> None:
    with started_clients(job(daemon), 2) as clients:
        setup = TrialSetup(daemon.socket, [ANYWHERE, ANYWHERE], tmp_path)
        found = run_trial(clients, setup, DisturbancePlan(), 0.2, 0)
        assert len({client.worker for client in clients}) == 2
        assert {client.driver for client in clients} == {daemon.pid}
    assert all(found.clients) and all(found.samples)


def test_collections_happen_within_requests(client: StressClient, setup: TrialSetup) -> None:
    records = trial(client, setup, "gc").clients[0]
    assert max(record.gc for record in records) > 1_000_000  # 300,000 objects take several milliseconds


def test_new_frames_are_minor_faults_of_the_client(client: StressClient, setup: TrialSetup) -> None:
    """96 MiB are at least 47 huge pages."""
    records = trial(client, setup, "page-faults").clients[0]
    assert max(record.client_minor_faults for record in records) >= 47


def test_stops_are_sampled(client: StressClient, setup: TrialSetup) -> None:
    """Four stops of 15 ms and more, a sample every 2 ms."""
    found = trial(client, setup, "stops", seconds=0.5)
    assert any(sample.client_stop or sample.worker_stop for sample in found.samples[0])


def test_compilations_of_another_client_use_cpu_time(daemon: Daemon, setup: TrialSetup) -> None:
    pytest.importorskip("llvmlite")
    with started_clients(job(daemon), 1) as (client,):
        samples = trial(client, setup, "compilation", seconds=1.0).samples[0]
    assert samples[-1].compiling > samples[0].compiling


def test_a_trial_without_time_for_a_request_is_a_failure(client: StressClient, setup: TrialSetup) -> None:
    with pytest.raises(BenchmarkFailed, match="no request in 1e-09 s; give a longer --duration"):
        trial(client, setup, seconds=1e-9)


@pytest.mark.parametrize(("side", "reason"), [("pid", "status -9 before a result"), ("worker", "burst: ")])
def test_the_death_of_either_side_ends_the_trial_with_the_reason(
    daemon: Daemon, setup: TrialSetup, side: str, reason: str
) -> None:
    with (
        pytest.raises(BenchmarkFailed, match=reason),
        started_clients(job(daemon), 1) as (client,),
        Process(getattr(client, side)) as process,
    ):
        trial(client, setup, seconds=60.0, tick=process.kill)


def test_a_load_that_cannot_start_is_a_failure(setup: TrialSetup, tmp_path: Path) -> None:
    loads = [MachineLoad("compilation", None, 0.0, 1.0)]
    with (
        pytest.raises(BenchmarkFailed, match="the load compilation did not start"),
        started_loads(loads, str(tmp_path / "no.sock"), 0),
    ):
        pass


@pytest.mark.parametrize("kind", ["cpu", "churn", "fill"])
def test_a_load_is_ended_with_its_trial(kind: str, tmp_path: Path) -> None:
    with started_loads([MachineLoad(kind, 0, 0.0, 600.0)], str(tmp_path), 0) as loads:
        loads.begin(0)
