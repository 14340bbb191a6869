"""Limits of clients are settings of the driver. `nnfmq status` shows them, and an error names the one it is about."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from support.drivers import Daemon, Program, one, running_daemon, short_folder
from support.models import null_model

import nnfmq
from nnfmq.base import settings
from nnfmq.cli import main
from nnfmq.cli.limits import limits_json
from nnfmq.observe.limits import LIMITS

SET = {
    settings.PROCESS_CLIENTS: 7,
    settings.CLIENT_MODELS: 2,
    settings.CLIENT_BURSTS: 1,
    settings.CLIENT_OBJECTS: 1,
    settings.CLIENT_CALLS: 9,
    settings.COMPILE_PROCESSES: 3,
    settings.EXECUTION_LIMIT_S: 5,
    settings.COMPILE_MEMORY_MIB: 100,
}
SHOWN = {"ms": 1000, "bytes": 1 << 20, "": 1}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    environment = {setting.variable: str(value) for setting, value in SET.items()}
    with short_folder() as folder, running_daemon(folder / "d.sock", environment=environment) as started:
        yield started


def test_the_driver_s_statistics_have_its_limits(daemon: Daemon) -> None:
    with daemon.connect() as client:
        values = client.statistics().limits
    shown = {limit.variable: (value, limit.unit) for limit, value in zip(LIMITS, values, strict=True)}
    for setting, value in SET.items():
        found, unit = shown[setting.variable]
        assert found == value * SHOWN[unit], setting.name
    assert set(shown) - {""} <= {setting.variable for setting in settings.table().values()}


def test_a_client_beyond_a_limit_is_told_which_setting_it_is(daemon: Daemon) -> None:
    with daemon.connect() as client, ExitStack() as stack:
        models = [stack.enter_context(client.device("reference").prepare(null_model())) for _ in range(2)]
        with reached(settings.CLIENT_MODELS):
            client.device("reference").prepare(null_model())
        stack.enter_context(models[0].burst())
        with reached(settings.CLIENT_BURSTS):
            models[1].burst()
        stack.enter_context(models[0].create_reusable_execution())
        with reached(settings.CLIENT_OBJECTS):
            models[0].create_reusable_execution()
        assert models[0].execute(one(3)) == (one(3),)
        used = {(row["name"], row["of"]): row["use"] for row in limits_json(client.statistics())}
        assert (used["models", "client"], used["bursts", "client"], used["threads", "client"]) == (2, 1, 1)


def test_status_shows_the_limits_and_what_is_in_use_of_them(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    other = "import nnfmq, sys; kept = nnfmq.connect(sys.argv[1], timeout=60); print(flush=True); sys.stdin.read()"
    with Program.start(["-P", "-c", other, daemon.path]) as client:
        client.line()
        assert main(["status", "--limits", "--connect", str(daemon.path)]) == 0
        shown = capsys.readouterr().out.splitlines()
        client.end_input()
        client.wait()
    assert ["clients", "process", "1", "7", "NNFMQ_PROCESS_CLIENTS"] in [line.split() for line in shown]
    assert max(map(len, shown)) <= 80


def test_status_without_the_option_shows_the_limits_that_are_half_used(
    daemon: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    with daemon.connect() as client, ExitStack() as stack:
        for _ in range(2):  # of 2 models; of 7 clients of a process there are two
            stack.enter_context(client.device("reference").prepare(null_model()))
        assert main(["status", "--connect", str(daemon.path)]) == 0
    limits = [line.split() for line in capsys.readouterr().out.partition("of each")[2].splitlines()]
    assert ["models", "client", "2", "2", settings.CLIENT_MODELS.variable] in limits
    assert all(line[:2] != ["clients", "process"] for line in limits)


def reached(setting: settings.Setting[int]) -> pytest.RaisesExc[nnfmq.ResourceExhaustedTransient]:
    text = f"the limit that ${setting.variable} of the driver sets"
    return pytest.raises(nnfmq.ResourceExhaustedTransient, match=re.escape(text))
