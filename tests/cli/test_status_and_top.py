"""`nnfmq status` and `nnfmq top` over statistics of a driver that does not exist; `top` also in a virtual terminal."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.activity import MIB, NO_PID, FakeClient, burst, client, counted, driver, model
from support.drivers import LIMIT_S, Daemon, running_daemon, short_folder

import nnfmq
from nnfmq.base.channel import Listener
from nnfmq.base.paths import models_socket
from nnfmq.cli import main, status
from nnfmq.cli.statistics import Activity, served_activities, take_sample
from nnfmq.cli.statistics_tables import (
    burst_rows,
    client_rows,
    duration_text,
    model_rows,
    rate_text,
    size_text,
    times_rows,
)
from nnfmq.hal.client_class import ClientClass
from nnfmq.hal.errors import DeadObject, DeviceUnavailable, GeneralFailure, MissedDeadlineTransient, NnfmqError
from nnfmq.serialize.repository_protocol import ModelEntry, ModelState

Connect = Callable[..., FakeClient]


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Connect:
    """Let `nnfmq.connect` return a client with the readings of a test."""

    def use(*readings: Any) -> FakeClient:
        made = FakeClient(*readings)

        def connected(_path: object, *, embedded: bool, recover: bool = False, monitor: bool) -> FakeClient:
            assert not embedded and monitor
            made.recovers = recover
            return made

        monkeypatch.setattr(nnfmq, "connect", connected, raising=False)
        return made

    return use


def words_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


# ------------------------------------------------------------------------------------------------ what is computed


def activity(*readings: Any) -> Activity:
    fake = FakeClient(*readings)
    samples = [take_sample(fake) for _ in readings]  # type: ignore[arg-type]
    return Activity(samples[-1], samples[0] if len(samples) > 1 else None)


def test_without_an_earlier_sample_there_are_counts_since_the_start_and_no_rates() -> None:
    found = activity(driver(client(50), read_s=11, past=(model(7, id=0),)))
    assert (found.per_s, found.models[0].per_s, found.bursts[0].per_s) == (None, None, None)
    assert found.models[0].engine_share == 0.5
    (row,) = found.times
    assert (row.key.name, row.counts.executions, row.counts.client.total) == ("face.tflite", 57, 57)


def test_a_percentile_is_shown_from_the_number_of_executions_on_that_supports_it() -> None:
    for executions, shown in ((1, [False, False, False]), (99, [True, False, False]), (1000, [True, True, True])):
        (row,) = activity(driver(client(executions))).times
        times = row.as_json()["times"]["client"]
        assert [times[name] is not None for name in ("p50_ns", "p99_ns", "p99_9_ns")] == shown
        assert times["max_ns"] == pytest.approx(16_000, rel=0.0625)


def test_rates_and_times_are_those_between_two_samples() -> None:
    late = counted(20, 4_000)
    found = activity(driver(client(10), read_s=11), driver(client(30), read_s=15))
    assert (found.per_s, found.models[0].per_s, found.bursts[0].per_s) == (5, 5, 5)
    assert found.models[0].counts == found.times[0].counts == late
    assert (found.bursts[0].polled, found.bursts[0].slept, found.bursts[0].polled_share) == (20, 0, 1)


def test_a_new_client_and_a_new_model_count_from_zero() -> None:
    old = client(10)
    new = client(40, worker_pid=7, started_ns=13 * 10**9)
    grown = client(10, models=(model(10), model(8, id=5, name="new")))
    found = activity(driver(old, read_s=11), driver(grown, new, read_s=15))
    assert [row.per_s for row in found.clients] == [0, 10]
    assert [row.per_s for row in found.models] == [0, 2, 10]


def test_counts_that_went_back_are_no_rate() -> None:
    found = activity(driver(client(30), read_s=11), driver(client(10), read_s=15))
    assert (found.per_s, found.models[0].per_s, found.bursts[0].per_s) == (0, 0, 0)
    assert found.models[0].engine_share is None
    assert found.times == []


def test_a_burst_of_a_released_model_is_shown_with_its_id() -> None:
    found = activity(driver(client(1, models=())))
    assert burst_rows(found, 80)[1][0][2] == "model 1"
    assert found.bursts[0].as_json()["model"] is None


def test_the_reader_itself_is_no_client_of_the_driver() -> None:
    other_client_of_this_process = client(2, pid=os.getpid())
    found = activity(driver(client(1, worker_pid=FakeClient.worker_pid), other_client_of_this_process))
    assert found.times[0].counts.executions == 2


def test_cpu_and_memory_of_a_worker_come_from_proc() -> None:
    mine = client(1, worker_pid=os.getpid())
    found = activity(driver(mine, read_s=11), driver(mine, read_s=12))
    (row,) = found.clients
    assert row.usage is not None and row.usage.resident_bytes > MIB
    assert row.cpu_share is not None and 0 <= row.cpu_share < 2  # nearly nothing, in a second that did not pass
    assert activity(driver(client(1))).clients[0].usage is None


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(0, "0 s"), (59.9, "59 s"), (61, "1 min 1 s"), (3 * 3600 + 59, "3 h 0 min"), (90000, "1 d 1 h")],
)
def test_a_duration_is_shown_in_two_units(duration_s: float, text: str) -> None:
    assert duration_text(int(duration_s * 10**9)) == text


LONG = model(50, name="mobilenet_v1_0.25_128_quant.tflite")
"""A model whose name leaves little space in 80 columns."""


def widths(rows: tuple[tuple[str, ...], list[tuple[str, ...]]]) -> int:
    """Return how wide a table is, with two characters between columns and one at each edge."""
    headings, cells = rows
    columns = zip(*(tuple(heading.lstrip(">") for heading in headings), *cells), strict=True)
    return sum(max(map(len, column)) + 2 for column in columns)


@pytest.mark.parametrize("make", [client_rows, model_rows, times_rows, burst_rows], ids=lambda make: make.__name__)
@pytest.mark.parametrize("readings", [1, 2], ids=["since the start", "of an interval"])
def test_a_table_lacks_columns_until_it_fits(make: Callable[[Activity, int], Any], readings: int) -> None:
    found = activity(*[driver(client(50 * n, models=(LONG,)), read_s=n) for n in range(readings)])
    assert found.models[0].model.name == LONG.name
    whole = make(found, 500)
    for width in (*range(72, 100), widths(whole)):
        shown = make(found, width)
        assert widths(shown) <= width
        assert set(shown[0]) <= set(whole[0])
        if width == widths(whole):
            assert shown == whole


def test_the_largest_times_are_shown_in_80_columns_beside_a_long_name() -> None:
    headings, _ = times_rows(activity(driver(client(50, models=(LONG,)))), 80)
    assert headings == ("model", "time, µs", ">p50", ">p99", ">p99.9", ">max")


def test_the_client_is_shown_where_two_have_models_of_the_same_name() -> None:
    others = replace(LONG, program="doorbell.py")
    headings, rows = times_rows(
        activity(driver(client(1, models=(LONG,)), client(1, models=(others,), worker_pid=7))), 80
    )
    assert headings == ("model", "client", "time, µs", ">p50", ">p99", ">max")
    assert [row[1] for row in rows if row[1]] == ["camera.py", "doorbell.py"]
    assert widths((headings, rows)) <= 80


def test_columns_that_are_not_left_out_stay_on_any_screen() -> None:
    assert burst_rows(activity(driver(client(50))), 1)[0] == (">burst", "model", ">per s", ">polled")


def test_rates_and_sizes_are_short() -> None:
    assert [rate_text(rate) for rate in (0, 0.1234, 99.94, 123456.7)] == ["0", "0.123", "99.9", "123,457"]
    assert [size_text(size) for size in (None, MIB // 2, 2048 * MIB)] == ["-", "0.5 MiB", "2,048 MiB"]


# ------------------------------------------------------------------------------------------------ status


def test_status_shows_driver_clients_and_models(connect: Connect, capsys: pytest.CaptureFixture[str]) -> None:
    made = connect(driver(client(50, failures=3, client_class=ClientClass.BATCH)))
    assert main(["status"]) == 0
    lines = words_of(capsys.readouterr().out)
    assert any("batch" in line and "50" in line for line in lines)
    assert ["driver", "pid", str(2**22 + 3), "up", "10", "s"] == [word.rstrip(",") for word in lines[0]]
    assert ["version", "1.2.3,", "compiled", "core,", "Python", "3.12.1,", "riscv64"] in lines
    assert ["clients", "1", "of", "64,", "2", "rejected", "so", "far"] in lines
    assert ["workers", "1", "died", "so", "far:", "1", "killed"] in lines
    assert ["compiler", "not", "running"] in lines
    assert ["programs", "3", "shared,", "6.0", "MiB", "of", "512", "MiB;", "7", "found", "in", "10", "lookups"] in lines
    assert ["face.tflite", "compiled", "50", "50", "%", "0"] in [line[1:] for line in lines]
    assert ["face.tflite", "compiled", "camera.py", "client", "17.0", "17.0", "-", "-", "17.0"] in lines
    for name, text in {"queue": "8.5", "driver": "4.2", "engine": "2.1"}.items():
        assert [name, text, text, "-", "-", text] in lines
    assert made.is_closed


def test_status_on_a_low_terminal_has_the_times_of_the_clients_only_and_says_how_to_see_the_others(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = tuple(model(50, id=number, name=f"model{number}") for number in range(2))
    for height, arguments in ((60, []), (24, []), (24, ["--times"])):
        connect(driver(client(50, models=several)))
        screen = Console(width=80, height=height, force_terminal=True, no_color=True, file=io.StringIO())
        monkeypatch.setattr(status, "console", lambda _no_color, screen=screen: screen)
        assert main(["status", *arguments]) == 0
        text = screen.file.getvalue()  # type: ignore[attr-defined]
        assert text.count(" client ") - text.count("pid   client ") == 2
        assert text.count(" engine ") == (2 if height == 60 or arguments else 0)
        assert ("nnfmq status --times" in text) is (height == 24 and not arguments)
        assert len(text.splitlines()) <= height


def test_status_of_a_driver_without_clients(connect: Connect, capsys: pytest.CaptureFixture[str]) -> None:
    connect(driver(compile_server_pid=os.getpid(), version=""))
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert f"compiler  pid {os.getpid()}, " in out and "workers   1 died so far: 1 killed" in out
    assert "pid   client" not in out


def test_times_of_a_driver_that_has_executed_nothing_say_so(
    connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    connect(driver())
    assert main(["status", "--times"]) == 0
    assert capsys.readouterr().out == "no executions\n"


def test_status_json_has_everything(connect: Connect, capsys: pytest.CaptureFixture[str]) -> None:
    connect(driver(client(50)))
    assert main(["status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["driver"]["uptime_ns"] == 10 * 10**9
    assert found["driver"]["cache"] == {
        "programs": 3,
        "size_bytes": 6 * MIB,
        "limit_bytes": 512 * MIB,
        "lookups": 10,
        "hits": 7,
    }
    assert found["per_s"] is None
    assert found["clients"][0]["charged_bytes"] == MIB
    (row,) = found["models"]
    assert (row["executions"], row["per_s"], row["engine_share"]) == (50, None, 0.5)
    assert row["times"]["driver"] == {
        "count": 50,
        "p50_ns": 4250,
        "p90_ns": 4250,
        "p99_ns": None,
        "p99_9_ns": None,
        "max_ns": 4250,
    }
    assert found["times"][0]["times"] == row["times"]
    assert found["bursts"][0]["polled_share"] == 1


def test_status_without_a_driver_fails_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def connected(*_: object, **__: object) -> None:
        raise DeviceUnavailable("no driver listens there")

    monkeypatch.setattr(nnfmq, "connect", connected, raising=False)
    assert main(["status"]) == 1
    assert capsys.readouterr().err == "nnfmq: error: no driver listens there\n"


# ------------------------------------------------------------------------------------------------ models by name


SERVED = [
    ModelEntry("digits", ModelState.READY, 2, "compiled", 3, "model.tflite: this is an empty file", 1_700_000_000.0),
    ModelEntry("empty", ModelState.UNAVAILABLE, 0, "", 0, "there is no version of it", 0.0),
]


@pytest.fixture
def repository(tmp_path: Path, connect: Connect) -> Iterator[FakeClient]:
    """Return a client of a driver whose path is in `tmp_path`, which serves models by name."""
    with Listener.create(models_socket(tmp_path / "d.sock")):
        made = connect(driver())
        made.served = SERVED
        yield made


@pytest.mark.usefixtures("repository")
def test_status_shows_the_models_by_name_and_why_versions_are_not_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--connect", str(tmp_path / "d.sock")]) == 0
    out = capsys.readouterr().out
    assert ["served", "2", "by", "name"] in words_of(out)
    changed = str(datetime.fromtimestamp(1_700_000_000)).split()
    assert ["digits", "2", "READY", "compiled", *changed] in words_of(out)
    assert ["empty", "-", "UNAVAILABLE", "-", "-"] in words_of(out)
    assert "not served: digits, version 3: model.tflite: this is an empty file\n" in out
    assert "not served: empty: there is no version of it\n" in out


@pytest.mark.usefixtures("repository")
def test_status_json_has_the_models_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json", "--connect", str(tmp_path / "d.sock")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["served_problem"] is None
    assert found["served"] == [
        {
            "name": "digits",
            "state": "READY",
            "version": 2,
            "device": "compiled",
            "changed": "2023-11-14T22:13:20+00:00",
            "failed_version": 3,
            "reason": "model.tflite: this is an empty file",
        },
        {
            "name": "empty",
            "state": "UNAVAILABLE",
            "version": None,
            "device": None,
            "changed": None,
            "failed_version": None,
            "reason": "there is no version of it",
        },
    ]


def test_status_of_a_repository_that_does_not_reply(
    tmp_path: Path, repository: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.served = MissedDeadlineTransient("the deadline passed")
    assert main(["status", "--connect", str(tmp_path / "d.sock")]) == 0
    assert "served    unknown: the deadline passed\n" in capsys.readouterr().out
    assert main(["status", "--json", "--connect", str(tmp_path / "d.sock")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["served"], found["served_problem"]) == (None, "the deadline passed")


def test_status_of_a_driver_without_models_by_name_does_not_ask(
    tmp_path: Path, connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    connect(driver())
    assert main(["status", "--json", "--connect", str(tmp_path / "d.sock")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["served"], found["served_problem"]) == (None, None)


DIGITS, OLD = model(30, name="digits", version=2), model(6, 8_000, id=4, name="digits", version=1)
USERS = (
    client(30, models=(DIGITS,), bursts=(burst(20), burst(10, id=3))),
    client(36, models=(DIGITS, OLD), bursts=(burst(6, model_id=4), burst(1, id=8, model_id=77)), worker_pid=7),
    client(0, models=(model(id=1, name="empty", version=5), model(id=2, name="digits")), bursts=(), worker_pid=8),
)
"""Clients of SERVED: of version 2, of both versions, and the repository with a version that it will serve next."""


def test_activities_of_served_models_are_those_of_all_clients_by_version() -> None:
    rows = served_activities(SERVED, activity(driver(read_s=1), driver(*USERS, read_s=11)))
    found = [(row.name, row.version, row.state, row.per_s, row.bursts, row.counts.client.total) for row in rows]
    assert found == [
        ("digits", 2, "READY", 6, 2, 60),
        ("digits", 1, "", 0.6, 1, 6),
        ("empty", 0, "UNAVAILABLE", 0, 0, 0),
    ]
    assert rows[1].as_json()["times"]["driver"]["p50_ns"] == pytest.approx(8_000, rel=0.0625)


def test_failures_of_a_served_model_are_added_up() -> None:
    failing = [client(1, models=(model(1, failures=failures, name="digits", version=2),)) for failures in (4, 5)]
    (row, _) = served_activities(SERVED, activity(driver(read_s=1), driver(*failing)))
    assert (row.failures, row.as_json()["failures_per_s"]) == (9, 0.9)


# ------------------------------------------------------------------------------------------------ top


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    from nnfmq.cli import top

    monkeypatch.setattr(top.time, "sleep", lambda _seconds: None)


@pytest.mark.usefixtures("no_waiting")
def test_top_once_prints_what_happened_in_the_interval(connect: Connect, capsys: pytest.CaptureFixture[str]) -> None:
    connect(driver(client(10), read_s=11), driver(client(30), read_s=15))
    assert main(["top", "--once"]) == 0
    lines = [line[1:] for line in words_of(capsys.readouterr().out)]
    assert ["face.tflite", "compiled", "5", "50", "%", "0"] in lines
    assert ["compiled", "camera.py", "client", "17.0", "17.0", "-", "-", "17.0"] in lines
    assert ["2", "face.tflite", "5", "0", "100", "%", "0", "0"] in lines


@pytest.mark.usefixtures("no_waiting")
def test_the_clients_of_top_are_one_table_in_80_columns(
    connect: Connect, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = {"program": "nnfmq.repository", "client_class": 2}
    connect(driver(client(10, **long), read_s=11), driver(client(30, **long), read_s=15))
    assert main(["top", "--once"]) == 0
    headings = ["pid", "client", "class", "per", "s", "failed", "calls", "CPU", "memory", "charged"]
    assert headings in words_of(capsys.readouterr().out)


@pytest.mark.usefixtures("no_waiting")
def test_top_once_shows_less_in_a_narrow_terminal(
    connect: Connect, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    connect(driver(client(10), read_s=11), driver(client(30, bursts=()), read_s=15))
    assert main(["top", "--once"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 50  # the first line is text
    assert [str(NO_PID + 1), "face.tflite", "5", "50", "%"] in words_of(out)
    assert "no bursts" in out


@pytest.mark.usefixtures("no_waiting")
def test_top_once_json(connect: Connect, capsys: pytest.CaptureFixture[str]) -> None:
    connect(driver(client(10), read_s=11), driver(client(10), read_s=15))
    assert main(["top", "--once", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["models"]
    assert (row["executions"], row["per_s"], row["times"]["client"]["max_ns"], row["engine_share"]) == (
        10,
        0,
        None,
        None,
    )


@pytest.mark.usefixtures("no_waiting")
def test_top_once_shows_the_served_models(
    tmp_path: Path, repository: FakeClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.readings = [driver(*USERS, read_s=11)]
    assert main(["top", "--once", "--connect", str(tmp_path / "d.sock")]) == 0
    lines = words_of(capsys.readouterr().out)
    heading = ["served", "model", "version", "state", "per", "s", "client", "p50", "client", "p99", "bursts", "failed"]
    assert heading in lines
    assert ["digits", "2", "READY", "0", "-", "-", "2", "0"] in lines
    assert ["digits", "1", "-", "0", "-", "-", "1", "0"] in lines
    assert ["empty", "-", "UNAVAILABLE", "0", "-", "-", "0", "0"] in lines
    assert "digits/1" in [line[1] for line in lines if len(line) > 1]  # in the tables of models and of bursts
    assert ["not", "served:", "digits,", "version", "3:", "model.tflite:", "this", "is", "an", "empty", "file"] in lines
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["top", "--once", "--connect", str(tmp_path / "d.sock")]) == 0
    assert ["digits", "2", "0", "-"] in words_of(capsys.readouterr().out)


@pytest.mark.usefixtures("no_waiting")
def test_top_once_json_has_the_served_models(
    tmp_path: Path, repository: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.readings = [driver(client(0), read_s=1), driver(*USERS, read_s=11)]
    assert main(["top", "--once", "--json", "--connect", str(tmp_path / "d.sock")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["served"][0] == {
        "name": "digits",
        "version": 2,
        "state": "READY",
        "per_s": 6,
        **found["served"][0],
        "bursts": 2,
        "failures": 0,
        "failures_per_s": 0,
    }
    assert [(row["version"], row["state"]) for row in found["served"][1:]] == [(1, None), (None, "UNAVAILABLE")]
    assert [row["version"] for row in found["models"]] == [2, 2, 1, 5, None]
    assert found["served_problem"] is None


@pytest.mark.usefixtures("no_waiting")
def test_top_once_of_a_repository_that_does_not_reply(
    tmp_path: Path, repository: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.served = MissedDeadlineTransient("the deadline passed")
    assert main(["top", "--once", "--connect", str(tmp_path / "d.sock")]) == 0
    assert "served models unknown: the deadline passed\n" in capsys.readouterr().out
    assert main(["top", "--once", "--json", "--connect", str(tmp_path / "d.sock")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["served"], found["served_problem"]) == (None, "the deadline passed")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--json"], "--json needs --once"),
        ([], "needs a terminal"),
        (["--interval", "0"], "is not between 0.1 and 3600"),
        (["--interval", "soon"], "is not between 0.1 and 3600"),
    ],
)
def test_wrong_usage_of_top(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_the_live_view_without_textual_names_the_remedy(
    connect: Connect, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(driver())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name in [name for name in sys.modules if name == "textual" or name.startswith("textual.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "nnfmq.cli.top_screen", raising=False)
    monkeypatch.setitem(sys.modules, "textual", None)
    assert main(["top"]) == 1
    assert "pip install 'nnfmq[top]'" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ the live view


def seen(
    fake: FakeClient, steps: Callable[[Any, Any], Any], size: tuple[int, int] = (100, 30), socket: Path | None = None
) -> None:
    """Run the live view over `fake`, in a virtual terminal, and call `steps` with it and its pilot."""
    pytest.importorskip("textual")
    from nnfmq.cli.top_screen import TopScreen

    async def run() -> None:
        screen = TopScreen(fake, 3600.0, socket)  # type: ignore[arg-type]
        async with screen.run_test(size=size) as pilot:
            await pilot.pause()
            await steps(screen, pilot)

    asyncio.run(run())


def cells(screen: Any, name: str) -> list[list[str]]:
    listing = screen.query_one(f"#{name}")
    return [[str(cell) for cell in listing.get_row_at(row)] for row in range(listing.row_count)]


def headline(screen: Any) -> str:
    return str(screen.query_one("#driver").render())


def test_the_live_view_shows_rates_of_the_last_interval() -> None:
    async def steps(screen: Any, pilot: Any) -> None:
        screen.refresh_statistics()
        await pilot.pause()
        assert cells(screen, "models")[0][1:] == ["face.tflite", "compiled", "5", "50 %", "0"]
        assert [row[3:6] for row in cells(screen, "times")] == [
            ["client", "17.0", "17.0"],
            ["queue", "8.5", "8.5"],
            ["driver", "4.2", "4.2"],
            ["engine", "2.1", "2.1"],
        ]
        assert cells(screen, "bursts")[0][1:] == ["2", "face.tflite", "5", "0", "100 %", "0", "0"]
        assert "5 executions per s" in headline(screen)

    seen(FakeClient(driver(client(10), read_s=11), driver(client(30), read_s=15)), steps)


def test_the_live_view_shows_less_in_a_narrow_terminal() -> None:
    async def steps(screen: Any, pilot: Any) -> None:
        assert cells(screen, "models") == [["face.tflite", "50", "50 %"]]
        assert len(cells(screen, "times")[0]) == 5
        await pilot.resize_terminal(100, 30)
        await pilot.pause()
        assert (len(cells(screen, "models")[0]), len(cells(screen, "times")[0])) == (6, 9)

    seen(FakeClient(driver(client(50))), steps, size=(40, 20))


def test_the_live_view_pauses_and_quits() -> None:
    fake = FakeClient(driver(client(10), read_s=11), driver(client(30), read_s=15), driver(client(90), read_s=25))

    async def steps(screen: Any, pilot: Any) -> None:
        await pilot.press("space")
        screen.refresh_statistics()
        await pilot.pause()
        assert headline(screen).endswith("paused")
        assert len(fake.readings) == 2  # nothing was read
        await pilot.press("space")
        screen.refresh_statistics()
        await pilot.pause()
        assert len(fake.readings) == 1
        await pilot.press("q")

    seen(fake, steps)


def test_the_live_view_waits_for_the_next_driver() -> None:
    fake = FakeClient(driver(client(10)), DeadObject("the driver has exited"), driver(client(20)))

    async def steps(screen: Any, pilot: Any) -> None:
        screen.refresh_statistics()
        await pilot.pause()
        screen.refresh_statistics()
        await pilot.pause()
        assert "executions per s" in headline(screen)  # of the next driver

    seen(fake, steps)


@pytest.mark.parametrize("error", [DeadObject, DeviceUnavailable])
def test_the_live_view_shows_nothing_of_a_driver_that_is_gone(error: type[NnfmqError]) -> None:
    fake = FakeClient(driver(client(10)), error("the driver has exited"))

    async def steps(screen: Any, pilot: Any) -> None:
        screen.refresh_statistics()
        await pilot.pause()
        assert headline(screen) == "the driver has exited; waiting for the next driver"
        assert [cells(screen, name) for name in ("clients", "models", "bursts")] == [[], [], []]

    seen(fake, steps)


def test_the_live_view_leaves_a_killed_driver_whose_workers_go_on_for_the_next_one() -> None:
    pytest.importorskip("textual")
    from nnfmq.cli.top_screen import TopScreen

    with short_folder() as folder:
        socket = folder / "d.sock"

        async def watch(screen: Any, first: Daemon) -> None:
            async with screen.run_test() as pilot:
                await pilot.pause()
                assert f"driver {first.process.pid}" in headline(screen)
                first.kill()
                screen.refresh_statistics()
                await pilot.pause()
                assert f"driver {first.process.pid} has ended, only workers of it go on" in headline(screen)
                assert headline(screen).endswith("waiting for the next driver")
                with running_daemon(socket) as second:
                    screen.refresh_statistics()
                    await pilot.pause()
                    assert f"driver {second.process.pid}" in headline(screen)

        connect = partial(nnfmq.connect, socket, embedded=False, timeout=LIMIT_S)
        with running_daemon(socket) as first, connect() as client:
            asyncio.run(watch(TopScreen(client, 3600.0, str(socket), connect), first))


def test_the_live_view_shows_other_errors() -> None:
    async def steps(screen: Any, _pilot: Any) -> None:
        assert headline(screen) == "uid 5 does not administer this driver"

    seen(FakeClient(GeneralFailure("uid 5 does not administer this driver")), steps)


def test_the_live_view_shows_served_models_above_the_others(tmp_path: Path, repository: FakeClient) -> None:
    repository.readings = [driver(*USERS, read_s=11)]

    async def steps(screen: Any, pilot: Any) -> None:
        assert cells(screen, "served")[0] == ["digits", "2", "READY", "-", "17.0", "-", "2", "0"]
        failures = str(screen.query_one("#failures").render())
        assert failures.startswith("not served: digits, version 3: model.tflite: this is an empty file\n")
        await pilot.resize_terminal(40, 20)
        await pilot.pause()
        assert cells(screen, "served")[0] == ["digits", "2", "-", "-"]
        repository.served = GeneralFailure("the list is missing")
        screen.refresh_statistics()
        await pilot.pause()
        assert headline(screen).endswith("served models unknown: the list is missing")
        assert not screen.query_one("#served").display
        assert not screen.query_one("#failures").display

    seen(repository, steps, socket=tmp_path / "d.sock")


def test_the_live_view_forgets_why_versions_are_not_served_with_the_driver(
    tmp_path: Path, repository: FakeClient
) -> None:
    repository.readings = [driver(), DeadObject("the driver has exited")]

    async def steps(screen: Any, pilot: Any) -> None:
        assert screen.query_one("#failures").display
        screen.refresh_statistics()
        await pilot.pause()
        assert not screen.query_one("#failures").display

    seen(repository, steps, socket=tmp_path / "d.sock")


def test_the_live_view_scrolls_with_keys_to_what_a_small_terminal_does_not_show() -> None:
    fake = FakeClient(driver(*[client(50, worker_pid=pid) for pid in range(1, 10)]))

    async def steps(screen: Any, pilot: Any) -> None:
        bursts = screen.query_one("#bursts")
        assert bursts.region.bottom > screen.size.height
        await pilot.press("pagedown", "pagedown", "pagedown")
        screen.refresh_statistics()
        await pilot.pause()
        assert 0 < bursts.region.bottom < screen.size.height
        await pilot.press("home")
        await pilot.pause()
        assert screen.query_one("#driver").region.y == 0

    seen(fake, steps, size=(80, 24))


def test_the_live_view_has_headings_of_numbers_above_their_last_digits() -> None:
    async def steps(screen: Any, _pilot: Any) -> None:
        headings = [column.label for column in screen.query_one("#clients").ordered_columns]
        found = {heading.plain: heading.justify for heading in headings}
        assert (found["pid"], found["client"], found["executed"]) == ("right", "left", "right")

    seen(FakeClient(driver(client(50))), steps)


def test_the_live_view_of_a_driver_without_served_models_has_no_table_of_them() -> None:
    async def steps(screen: Any, _pilot: Any) -> None:
        assert not screen.query_one("#served").display

    seen(FakeClient(driver()), steps)


def test_an_unused_burst_has_no_share_of_polls() -> None:
    found = activity(driver(client(0, bursts=(burst(0),))))
    assert found.bursts[0].polled_share is None
    assert found.bursts[0].as_json()["polled_share"] is None


def test_client_list_says_that_there_are_none(connect: Connect, capsys: pytest.CaptureFixture[str]) -> None:
    connect(driver())
    assert main(["client", "list"]) == 0
    assert capsys.readouterr().out == "no clients\n"
