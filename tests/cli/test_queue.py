"""`nnfmq queue`: make, list, look at, watch, measure and remove queues with a name."""

from __future__ import annotations

import json
import os
import platform
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from support.commands import LIMIT_S, started
from support.named import fresh_name

from nnfmq.base import posix_shm
from nnfmq.cli import main, queue_bench
from nnfmq.cli.queue_snapshot import QueueSnapshot, bits_text
from nnfmq.hal.errors import DeadObject, MissedDeadlineTransient
from nnfmq.queue import UNSYNCHRONIZED, MessageQueue, create_named, open_named

ACTIONS = ["create", "list", "info", "write", "read", "watch", "bench", "remove"]
Capture = pytest.CaptureFixture[str]

# 4 records of 8 bytes as libfmq lays them out, in one page.
FOUR_OF_EIGHT = {
    "flavor": "synchronized",
    "record_bytes": 8,
    "count": 4,
    "memory_bytes": os.sysconf("SC_PAGESIZE"),
    "read_counter": {"offset": 0, "extent": 8},
    "write_counter": {"offset": 8, "extent": 8},
    "ring": {"offset": 16, "extent": 32},
    "event_word": {"offset": 48, "extent": 4},
}


@pytest.fixture
def name() -> Iterator[str]:
    with fresh_name() as made:
        yield made


def create(name: str, *more: str) -> int:
    return main(["queue", "create", name, "--record-bytes", "8", "--count", "4", *more])


def printed(capsys: Capture, *words: str) -> Any:
    capsys.readouterr()
    assert main(["queue", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def complaint(capsys: Capture) -> str:
    """Return what stderr has: one line."""
    line = capsys.readouterr().err
    assert line.startswith("nnfmq: error: ") and line.count("\n") == 1
    return line.removeprefix("nnfmq: error: ").rstrip()


def is_there(name: str) -> bool:
    return name in posix_shm.names()


# ---- help ----


@pytest.mark.parametrize("action", ACTIONS)
def test_help_of_an_action_fits_one_screen(action: str, capsys: Capture) -> None:
    assert main(["queue", action, "--help"]) == 0
    assert len(capsys.readouterr().out.splitlines()) <= 36


def test_help_names_the_programs_that_must_be_trusted(capsys: Capture) -> None:
    assert main(["queue", "--help"]) == 0
    text = capsys.readouterr().out
    assert "trust each other" in text and "SIGBUS" in text
    assert all(f"\n    {action} " in text for action in ACTIONS)


@pytest.mark.parametrize(
    "words",
    [
        [], ["fly"], ["create", "/a"], ["create", "/a", "--record-bytes", "x", "--count", "4"], ["info"],
        ["read", "/a", "-n", "0"], ["read", "/a", "--hex", "--raw"], ["read", "/a", "--wait", "nan"],
        ["write", "/a", "b", "--wait", "1", "--no-wait"], ["watch", "/a", "--interval", "-1"],
    ],
)  # fmt: skip
def test_wrong_usage_is_status_2(words: list[str], capsys: Capture) -> None:
    assert main(["queue", *words]) == 2
    assert "usage: nnfmq queue" in capsys.readouterr().err


# ---- create, info, list, remove ----


def test_create_prints_the_descriptor(name: str, capsys: Capture) -> None:
    assert create(name, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found.pop("conditions")["host"] == platform.node()
    assert found == {"name": name, "path": f"/dev/shm{name}", **FOUR_OF_EIGHT}


def test_create_prints_the_same_as_tables(name: str, capsys: Capture) -> None:
    assert create(name) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    expected = [f"path /dev/shm{name}", "records 4 of 8 bytes", "write counter 8 8", "ring 16 32", "event word 48 4"]
    assert [line for line in expected if line not in lines] == []


def test_create_makes_the_requested_flavor(name: str) -> None:
    assert create(name, "--unsynchronized") == 0
    with open_named(name) as queue:
        assert queue.flavor == UNSYNCHRONIZED


def test_create_rejects_a_name_in_use(name: str, capsys: Capture) -> None:
    assert [create(name), create(name)] == [0, 1]
    assert "already" in complaint(capsys)


def test_create_can_replace_a_queue_and_attached_processes_keep_the_old_one(name: str) -> None:
    with create_named(name, 16, 2) as old:
        assert create(name, "--replace") == 0
        assert old.write(bytes(16))
        with open_named(name) as new:
            assert (new.quantum, new.available_to_read()) == (8, 0)


def test_create_replaces_a_half_created_queue(name: str) -> None:
    posix_shm.create(name, 4096).close()
    assert create(name, "--replace") == 0


@pytest.mark.parametrize("words", [["--record-bytes", "0", "--count", "4"], ["--record-bytes", "8", "--count", "-1"]])
def test_create_names_the_allowed_sizes(name: str, words: list[str], capsys: Capture) -> None:
    assert main(["queue", "create", name, *words]) == 1
    assert "allowed are" in complaint(capsys)
    assert not is_there(name)


def test_info_has_the_descriptor_and_the_counters(name: str, capsys: Capture) -> None:
    create(name)
    with open_named(name) as queue:
        queue.send(bytes(24))
        queue.read(1)
    found = printed(capsys, "info", name)
    assert found.pop("conditions")["host"] == platform.node()
    assert found == {
        "name": name, "path": f"/dev/shm{name}", **FOUR_OF_EIGHT, "counters": {"write": 24, "read": 8}, "readable": 2,
        "writable": 2, "fill": 0.5, "event_bits": 2, "state": "ok",
    }  # fmt: skip


def test_info_of_an_unsynchronized_queue_has_no_reader(name: str, capsys: Capture) -> None:
    create(name, "--unsynchronized")
    with open_named(name) as queue:
        assert queue.write(bytes(32)) and queue.write(bytes(8))
    found = printed(capsys, "info", name)
    assert found["counters"] == {"write": 40, "read": None}
    assert (found["readable"], found["writable"], found["state"]) == (4, 4, "ok; records overwritten: 1")


def test_info_reports_impossible_counters(name: str, capsys: Capture) -> None:
    create(name)
    with open_named(name) as queue:
        queue.memory.view[8:16] = (40).to_bytes(8, "little")
    assert printed(capsys, "info", name)["state"] == "corrupted: more bytes are unread than the ring has"


@pytest.mark.parametrize(
    ("w", "r", "state"),
    [
        (32, 0, "ok"), (40, 8, "ok"), (40, 0, "corrupted: more bytes are unread than the ring has"),
        (8, 16, "corrupted: the read counter is ahead of the write counter"),
        (12, 8, "corrupted: the write counter is not a multiple of the record size"),
        (16, 4, "corrupted: the read counter is not a multiple of the record size"),
        (40, None, "ok; records overwritten: 1"),
        (4, None, "corrupted: the write counter is not a multiple of the record size"),
    ],
)  # fmt: skip
def test_the_state_follows_from_the_counters(w: int, r: int | None, state: str) -> None:
    assert QueueSnapshot(w, r, 0, 32, 8).state == state


@pytest.mark.parametrize(
    ("bits", "text"),
    [(None, "no event flag word"), (0, "none"), (1, "NOT_FULL"), (3, "NOT_FULL NOT_EMPTY"), (6, "NOT_EMPTY 0x4")],
)
def test_event_bits_have_names(bits: int | None, text: str) -> None:
    assert bits_text(bits) == text


def test_list_prints_only_queues(name: str, capsys: Capture) -> None:
    create(name)
    posix_shm.create(f"{name}-other", 4096).close()
    found = [one for one in printed(capsys, "list")["queues"] if one["name"].startswith(name)]
    posix_shm.unlink(f"{name}-other")
    assert [(one["name"], one["count"], one["state"]) for one in found] == [(name, 4, "ok")]


def test_list_as_a_table_has_a_line_for_each(name: str, capsys: Capture) -> None:
    create(name)
    capsys.readouterr()
    assert main(["queue", "list"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if name in line]
    assert line.split()[1:] == ["synchronized", "8", "4", "0", "ok"]


def test_an_empty_list_names_the_create_command(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(posix_shm, "FOLDER", Path("/nowhere"))
    assert main(["queue", "list"]) == 0
    assert "nnfmq queue create" in capsys.readouterr().out


def test_remove_removes_the_name(name: str) -> None:
    create(name)
    assert main(["queue", "remove", name]) == 0
    assert not is_there(name)


@pytest.mark.parametrize("action", [["info"], ["remove"], ["read"], ["write", "--hex"], ["watch"]])
def test_a_missing_queue_is_one_line_with_the_remedy(name: str, action: list[str], capsys: Capture) -> None:
    assert main(["queue", *action, name]) == 1
    assert "nnfmq queue create" in complaint(capsys)


# ---- watch ----


def test_watch_prints_rates_fill_and_counters_and_changes_nothing(name: str, capsys: Capture) -> None:
    with create_named(name, 8, 4) as queue:
        queue.send(bytes(16))
        assert main(["queue", "watch", name, "--count", "2", "--interval", "0.001", "--json"]) == 0
        first, second = map(json.loads, capsys.readouterr().out.splitlines())
        assert (first["written_per_s"], second["written_per_s"], second["read_per_s"]) == (None, 0.0, 0.0)
        assert (second["fill"], second["counters"], second["event_bits"]) == (0.5, {"write": 16, "read": 0}, 2)
        assert second["monotonic_ns"] > first["monotonic_ns"]
        assert queue.receive(None, 0) == bytes(16)


def test_watch_writes_a_line_for_each_snapshot_to_a_file(name: str, capsys: Capture) -> None:
    create(name)
    capsys.readouterr()
    assert main(["queue", "watch", name, "--count", "3", "--interval", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all("records/s" in line and line.endswith("ok") for line in lines)


def test_watch_on_a_terminal_draws_a_table(name: str) -> None:
    create(name)
    controller, terminal_fd = pty.openpty()
    try:
        words = [sys.executable, "-m", "nnfmq", "queue", "watch", name, "--count", "1"]
        subprocess.run(words, stdin=subprocess.DEVNULL, stdout=terminal_fd, timeout=LIMIT_S, check=True)
        screen = os.read(controller, 1 << 16).decode()
    finally:
        os.close(controller)
        os.close(terminal_fd)
    assert "░░░░" in screen and "0 of 4" in screen


def test_watch_counts_records_a_second(name: str) -> None:
    words = ("queue", "watch", name, "--json", "--interval", "0.01")
    with create_named(name, 8, 4) as queue, started(*words) as process:
        assert process.stdout is not None
        process.stdout.readline()
        queue.send(bytes(24))
        rates = (json.loads(line)["written_per_s"] for line in process.stdout)
        assert next(rate for rate in rates if rate) <= 3 / 0.01
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert process.returncode == 130


# ---- bench ----

TINY = ["--round-trips", "20", "--messages", "600", "--record-bytes", "16"]


@pytest.mark.parametrize("placement", ["apart", "same", "free"])
def test_bench_measures_and_removes_its_queues(name: str, placement: str, capsys: Capture) -> None:
    before = os.sched_getaffinity(0)
    found = printed(capsys, "bench", name, *TINY, "--placement", placement)
    times = found["round_trip_ns"]
    assert 0 < times["p50"] <= times["p99"] <= times["p99_9"] <= times["max"]
    assert found["messages_per_s"] > 0
    assert (found["conditions"]["placement"], found["conditions"]["record_bytes"]) == (placement, 16)
    assert not [left for left in posix_shm.names() if left.startswith(name)]
    assert os.sched_getaffinity(0) == before


def test_bench_prints_figures_and_conditions(capsys: Capture) -> None:
    assert main(["queue", "bench", *TINY]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("p50", "p99.9", "messages per second", "16 bytes", "20 round trips"))
    assert not [left for left in posix_shm.names() if left.startswith(f"/nnfmq-bench-{os.getpid()}")]


def test_bench_ends_when_the_other_process_cannot_start(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(queue_bench, "_serve", lambda _connection, *_: os._exit(1))
    assert main(["queue", "bench", name, *TINY]) == 1
    text = complaint(capsys)
    assert "exited before it was ready" in text and "ended with status 1" in text
    assert not [left for left in posix_shm.names() if left.startswith(name)]


class Silent:
    """A queue into which nobody writes."""

    def receive(self, deadline_ns: int, window_ns: int) -> None:
        assert deadline_ns > time.monotonic_ns()


def test_bench_ends_when_the_other_process_does_not_reply(name: str) -> None:
    with create_named(name, 8, 4) as one, pytest.raises(MissedDeadlineTransient, match="did not reply"):
        queue_bench._round_trips(one, cast(MessageQueue, Silent()), 1, 0)


def test_bench_detects_a_reply_of_another_process(name: str) -> None:
    with pytest.raises(DeadObject, match="another program"):
        queue_bench._check(b"other", b"mine")
