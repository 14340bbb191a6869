"""`tools/driver_stress.py`, the short form: nothing wrong, nothing left behind; and it sees what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.drivers import Daemon, running_daemon, short_folder
from support.places import ROOT

from nnfmq.hal.types import OperationType

LIMIT_S = 240


def test_LIFE_7_clients_at_random_leave_nothing_behind() -> None:
    command = [sys.executable, str(ROOT / "tools" / "driver_stress.py"), "--json", "--kill"]
    options = ["--processes", "3", "--threads", "2", "--seconds", "5"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}  # imports its client
    asked = [*command, *options]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert (done.returncode, report["wrong"], report["died"]) == (0, [], [])
    assert report["before"] == report["after"]
    assert report["calls"]["prepare"] > 0 and report["calls"]["execute"] > 0 and report["calls"]["burst"] > 0


@pytest.fixture
def client() -> Any:
    import driver_stress_client

    return driver_stress_client


def test_a_wrong_output_is_noticed(client: Any) -> None:
    actor = client.Actor("nowhere", 1)
    right: Callable[[Any, Any], Any] = lambda a, b: (a + b,)  # noqa: E731
    actor._check("execute", OperationType.ADD, 7, right)
    assert actor.tally.wrong == []
    actor._check("execute", OperationType.ADD, 7, lambda a, b: (np.nextafter(a + b, np.float32(9)),))
    assert actor.tally.wrong == ["execute: wrong output of ADD of 7"]


def test_a_status_that_nothing_explains_is_noticed(client: Any) -> None:
    actor = client.Actor("/nowhere/d.sock", 1)
    actor.act()
    assert [text.partition(": ")[0] for text in actor.tally.wrong] == ["connect"]
    assert "DeviceUnavailable" in actor.tally.wrong[0]


def test_what_an_actor_holds_ends_with_it(client: Any) -> None:
    with short_folder() as folder, running_daemon(folder / "d.sock") as daemon:
        assert isinstance(daemon, Daemon)
        actor = client.Actor(str(daemon.path), 3, stays=True)
        for _ in range(60):
            actor.act()
        assert actor.tally.wrong == []
        actor.run(0)
