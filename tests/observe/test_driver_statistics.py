"""Reading an area that another process writes: what is displayed, what is left out, what is rejected."""

from __future__ import annotations

import os

import pytest

from nnfmq.observe import driver_statistics
from nnfmq.observe import statistics_layout as layout
from nnfmq.observe.driver_statistics import ClientCalls, client_calls, read_statistics
from nnfmq.observe.recorder_core import begin_change
from nnfmq.observe.statistics_writer import SlotWriter


def test_the_header_tells_of_the_driver(area: memoryview) -> None:
    words = area.cast("Q")
    for word in range(layout.MEMORY_LIMIT, layout.DEAD_WORKERS + 1):
        words[word] = 100 + word
    for word in range(layout.DEATHS, layout.DEATHS + len(layout.DEATH_CAUSES)):
        words[word] = 100 + word
    area[layout.DRIVER_VERSION * 8 : layout.DRIVER_VERSION * 8 + 5] = b"1.2.3"
    found = read_statistics(area)
    assert (found.pid, found.version, found.started_ns, found.clients) == (4321, "1.2.3", 1_000, ())
    assert found.uptime_ns == found.read_ns - 1_000
    assert (found.memory_limit_bytes, found.compile_server_pid, found.compile_requests) == (104, 110, 111)
    assert (found.rejected_clients, found.dead_workers) == (112, 113)
    assert found.deaths == {"killed": 124, "crashed": 125, "sandbox": 126, "ended": 127}
    cache = found.cache
    assert (cache.limit_bytes, cache.programs, cache.size_bytes, cache.lookups, cache.hits) == (105, 106, 107, 108, 109)


def test_a_slot_whose_owner_died_during_a_change_is_left_out(area: memoryview, writer: SlotWriter) -> None:
    other = SlotWriter(area, 0)
    other.open(78, 1000, 1)
    begin_change(area[layout.slot_at(1) * 8 :])
    assert [client.pid for client in read_statistics(area).clients] == [78]


def test_a_slot_that_is_freed_during_the_reading_is_left_out(
    area: memoryview, writer: SlotWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_statistics, "snapshot", lambda view: bytes(len(view)))
    assert read_statistics(area).clients == ()


def test_a_changed_slot_is_read_again(area: memoryview, writer: SlotWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([None, None, bytes(area[layout.slot_at(1) * 8 :])])
    monkeypatch.setattr(driver_statistics, "snapshot", lambda _view: next(answers))
    assert [client.pid for client in read_statistics(area).clients] == [77]


def test_control_characters_of_a_name_are_replaced(area: memoryview, writer: SlotWriter) -> None:
    recorder = writer.model(5, "a\x1b[2Jb\nc", "dev\x07ice")
    (model,) = read_statistics(area).clients[0].models
    assert (model.name, model.device) == ("a�[2Jb�c", "dev�ice")
    del recorder


def test_the_open_calls_are_those_of_used_slots(area: memoryview, writer: SlotWriter) -> None:
    other = SlotWriter(area, 0)
    other.open(78, 1000, 1)
    writer.set_calls(3, 0)
    own = os.getpid()
    assert client_calls(area) == [ClientCalls(78, own, 0), ClientCalls(77, own, 3)]
    area.cast("Q")[layout.slot_at(0) + layout.STATE] = layout.FREE
    assert client_calls(area) == [ClientCalls(77, own, 3)]


@pytest.mark.parametrize("size", [0, 8, 511])
def test_memory_without_a_header_is_rejected(area: memoryview, size: int) -> None:
    with pytest.raises(ValueError, match="less than their header"):
        read_statistics(area[:size])
    with pytest.raises(ValueError, match="less than their header"):
        client_calls(area[:size])


@pytest.mark.parametrize(
    ("word", "value"),
    [(layout.HEADER_MAGIC, layout.MAGIC + 2**56), (layout.HEADER_SLOTS, 3), (layout.HEADER_SLOTS, 2**40)],
    ids=["another version", "more slots than memory", "too many slots"],
)
def test_another_layout_is_rejected(area: memoryview, word: int, value: int) -> None:
    area.cast("Q")[word] = value
    with pytest.raises(ValueError, match="the same nnfmq release"):
        read_statistics(area)
    with pytest.raises(ValueError, match="the same nnfmq release"):
        client_calls(area)
