"""Rows of a client's slot: who gets them, when they are free again, and what a reader sees."""

from __future__ import annotations

import gc
import os
import time

from nnfmq.observe import statistics_layout as layout
from nnfmq.observe.driver_statistics import ClientStatistics, read_statistics
from nnfmq.observe.statistics_writer import SlotWriter, unpublished_burst


def client_of(area: memoryview) -> ClientStatistics:
    (client,) = read_statistics(area).clients
    return client


def test_an_open_slot_shows_its_client(area: memoryview, writer: SlotWriter) -> None:
    before_ns = time.monotonic_ns()
    writer.set_calls(3, 1)
    writer.set_charged_bytes(4096)
    client = client_of(area)
    assert (client.pid, client.uid, client.worker_pid) == (77, 1000, os.getpid())
    assert 0 < client.started_ns <= before_ns
    assert (client.running_calls, client.in_flight) == (1, 1)
    assert (client.open_calls, client.charged_bytes, client.quota_bytes) == (3, 4096, 5_000_000)
    assert (client.models, client.bursts) == ((), ())


def test_the_executions_of_a_model_are_read_from_its_row(area: memoryview, writer: SlotWriter) -> None:
    recorder = writer.model(5, "face.tflite", "compiled")
    recorder.add(3_000, 2_000)
    recorder.add_failure()
    client = client_of(area)
    (model,) = client.models
    assert (model.id, model.name, model.device) == (5, "face.tflite", "compiled")
    counts = model.counts
    assert (model.executions, model.failures, counts.driver_ns, counts.engine_ns) == (1, 1, 3_000, 2_000)
    assert (counts.driver.total, counts.engine.total, counts.client.total) == (1, 1, 0)
    assert (client.executions, client.failures) == (1, 1)


def test_a_model_without_a_name_is_called_by_its_id(area: memoryview, writer: SlotWriter) -> None:
    recorder = writer.model(9, "", "reference")
    assert client_of(area).models[0].name == "model 9"
    del recorder


def test_the_row_of_a_model_ends_with_its_last_user(area: memoryview, writer: SlotWriter) -> None:
    recorder = writer.model(5, "first", "reference")
    recorder.add(1_000, 500)
    burst = writer.burst(6, 5, recorder)
    del recorder
    gc.collect()
    assert [model.name for model in client_of(area).models] == ["first"]
    burst.recorder.add(1_000, 500)
    writer.close_burst(burst)
    del burst
    gc.collect()
    client = client_of(area)
    assert (client.models, client.bursts, client.executions) == ((), (), 2)


def test_a_row_that_is_used_again_begins_with_zeros(area: memoryview, writer: SlotWriter) -> None:
    for name in ["first", *map(str, range(layout.MODELS_MAX - 2)), "again"]:  # "again" gets the row of "first"
        recorder = writer.model(5, name, "reference")
        recorder.add(1_000, 500)
        assert [(model.name, model.executions) for model in client_of(area).models] == [(name, 1)]
        assert client_of(area).models[0].counts.driver.total == 1
        del recorder
        gc.collect()


def test_models_beyond_the_rows_share_the_last_one(area: memoryview, writer: SlotWriter) -> None:
    recorders = [writer.model(number, f"m{number}", "reference") for number in range(1, 19)]
    for recorder in recorders:
        recorder.add(1_000, 500)
    models = client_of(area).models
    assert [(model.name, model.executions) for model in models[:15]] == [(f"m{number}", 1) for number in range(1, 16)]
    assert [(model.id, model.name, model.executions) for model in models[15:]] == [
        (layout.OTHER_MODELS_ID, "(other models)", 3)
    ]
    assert client_of(area).executions == 18


def test_a_burst_counts_its_executions_and_waits(area: memoryview, writer: SlotWriter) -> None:
    recorder = writer.model(5, "m", "reference")
    row = writer.burst(6, 5, recorder)
    row.waits.cast("Q")[:] = memoryview(bytes([2, *[0] * 7, 3, *[0] * 7, 4, *[0] * 7])).cast("Q")
    row.recorder.add(1_000, 500)
    (burst,) = client_of(area).bursts
    assert (burst.id, burst.model_id, burst.executions, burst.failures) == (6, 5, 1, 0)
    assert (burst.received, burst.polled, burst.slept, burst.in_flight) == (2, 3, 4, 1)
    row.recorder.add_failure()
    assert client_of(area).bursts[0].in_flight == 0
    assert client_of(area).models[0].failures == 1


def test_bursts_beyond_the_rows_count_for_their_model_only(area: memoryview, writer: SlotWriter) -> None:
    recorder = writer.model(5, "m", "reference")
    rows = [writer.burst(number, 5, recorder) for number in range(1, layout.BURSTS_MAX + 2)]
    for row in rows:
        row.recorder.add(1_000, 500)
    client = client_of(area)
    assert [burst.id for burst in client.bursts] == list(range(1, layout.BURSTS_MAX + 1))
    assert client.models[0].executions == layout.BURSTS_MAX + 1
    writer.close_burst(rows[-1])  # has no row to give back
    writer.close_burst(rows[3])
    writer.burst(99, 5, recorder)
    assert [burst.id for burst in client_of(area).bursts].count(99) == 1


def test_an_unpublished_burst_counts_for_its_model(area: memoryview, writer: SlotWriter) -> None:
    unpublished_burst(recorder := writer.model(5, "m", "reference")).recorder.add(1_000, 500)
    assert client_of(area).models[0].executions == 1
    assert client_of(area).bursts == ()
    del recorder


def test_a_slot_that_is_opened_again_counts_from_zero(area: memoryview, writer: SlotWriter) -> None:
    recorder = writer.model(5, "m", "reference")
    recorder.add(1_000, 500)
    again = SlotWriter(area, 1)
    again.open(78, 1000, 1)
    client = client_of(area)
    assert (client.pid, client.executions, client.models) == (78, 0, ())
    assert again.complete_copy(area) == bytes(area)
