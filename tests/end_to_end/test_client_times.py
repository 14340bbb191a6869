"""The times that clients measure themselves: a worker that stops, clients and workers that end, a client that lies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from support.drivers import Daemon, InThread, Process, kill_worker, one, until
from support.models import null_model

import nnfmq
from nnfmq.observe import statistics_layout as layout
from nnfmq.observe.driver_statistics import ModelCounts

STOPPED_NS = 100_000_000


def totals(client: nnfmq.Client, name: str) -> ModelCounts:
    """Return what all clients, past ones included, have executed of the models of a name."""
    found = [counts for key, counts in client.statistics().totals().items() if key.name == name]
    return sum(found, ModelCounts())


def test_a_worker_that_stops_for_100_ms_is_seen_in_the_times_of_its_client(client: nnfmq.Client) -> None:
    with (
        client.device("reference").prepare(null_model(), name="stopped") as model,
        model.burst() as burst,
        Process(client.worker_pid) as worker,
    ):
        for _ in range(1100):
            burst.execute(one(1))
        for _ in range(2):
            worker.stop()
            begin_ns = time.monotonic_ns()
            waiting = InThread.start(lambda: burst.execute(one(1)))
            until(lambda: time.monotonic_ns() - begin_ns > STOPPED_NS, "100 ms pass")  # noqa: B023
            worker.resume()
            waiting.wait()
        counts = totals(client, "stopped")
        assert (counts.client.total, counts.driver.total) == (1102, 1102)
        for fraction in (0.999, 1.0):
            client_ns, queue_ns = (times.supported_ns(fraction) for times in (counts.client, counts.queue))
            assert client_ns is not None and client_ns > 0.9 * STOPPED_NS
            assert queue_ns is not None and queue_ns > 0.9 * STOPPED_NS
        engine_ns = counts.engine.supported_ns(0.999)  # of both, without what one of them may have waited for a CPU
        assert engine_ns is not None and engine_ns < STOPPED_NS / 2


def test_a_call_whose_deadline_passes_counts_with_the_time_that_its_client_has_waited(client: nnfmq.Client) -> None:
    with (
        client.device("reference").prepare(null_model(), name="late") as model,
        model.burst() as burst,
        Process(client.worker_pid) as worker,
    ):
        burst.execute(one(1))
        with worker.stopped(), pytest.raises(nnfmq.MissedDeadlineTransient):
            burst.execute(one(1), timeout=0.05)
        counts = totals(client, "late")
        assert counts.client.total == 2
        assert (counts.client.supported_ns(1.0) or 0) > 45_000_000


def test_LIFE_the_counts_of_a_client_remain_when_it_has_left_and_when_its_worker_was_killed(
    daemon: Daemon, client: nnfmq.Client
) -> None:
    for number in (1, 2):
        with (
            daemon.connect() as other,
            other.device("reference").prepare(null_model(), name="gone") as model,
            model.burst() as burst,
        ):
            for _ in range(10):
                burst.execute(one(1))
            until(lambda: totals(client, "gone").executions == 10 * number, "all are counted")  # noqa: B023
            if number == 2:
                kill_worker(other)
        until(lambda: len(client.statistics().clients) == 1, "the other client's slot is free")
        counts = totals(client, "gone")
        assert (counts.executions, counts.client.total, counts.driver.total) == (10 * number,) * 3


def test_the_counts_of_a_model_remain_when_others_have_got_its_row(client: nnfmq.Client) -> None:
    device = client.device("reference")
    for number in range(layout.MODELS_MAX + 2):
        with device.prepare(null_model(), name="first" if number < 2 else "other") as model:
            model.execute(one(1))
        until(lambda: client.statistics().clients[0].models == (), "its row is free")
    assert totals(client, "first").executions == totals(client, "first").client.total == 2
    assert totals(client, "other").executions == totals(client, "other").client.total == layout.MODELS_MAX


def test_a_client_that_writes_anything_to_its_page_is_not_believed_and_breaks_no_status(
    daemon: Daemon, client: nnfmq.Client
) -> None:
    with daemon.connect() as other, other.device("reference").prepare(null_model(), name="lies") as model:
        model.execute(one(1))
        page = other.connection.page._memory
        assert page is not None
        with pytest.raises(PermissionError):
            os.ftruncate(page.fileno(), 0)
        page.view[:] = b"\xff" * layout.PAGE_BYTES
        counts = totals(client, "lies")
        assert (counts.executions, counts.client.total, counts.client_ns) == (1, 0, 0)
        page.view[:] = bytes(layout.PAGE_BYTES)
        with page.view.cast("Q") as words:  # one execution may be true, but not how long it took
            words[layout.CLIENT_NS], words[layout.CLIENT_HISTOGRAM + layout.BUCKETS - 1] = 2**64 - 1, 1
        command = [sys.executable, "-P", "-m", "nnfmq", "status", "--json", "--connect", str(daemon.path)]
        shown = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        (row,) = [row for row in shown["times"] if row["model"] == "lies"]
        assert (row["executions"], row["times"]["client"]["count"], row["times"]["driver"]["count"]) == (1, 1, 1)
    until(lambda: len(client.statistics().clients) == 1, "it has left")
    assert totals(client, "lies").executions == 1
