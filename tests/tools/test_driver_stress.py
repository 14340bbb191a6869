"""`tools/driver_stress.py`: a short run without failures and leaks, and the detection of failures."""

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


def test_LIFE_7_TST_11_random_clients_leak_nothing() -> None:
    command = [sys.executable, str(ROOT / "tools" / "driver_stress.py"), "--json", "--kill"]
    options = ["--processes", "3", "--threads", "2", "--seconds", "5"]
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"
    }  # the script imports its client module
    asked = [*command, *options]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert (done.returncode, report["failures"], report["worker_deaths"]) == (0, [], []), report
    assert report["before"] == report["after"]
    assert report["calls"]["prepare"] > 0 and report["calls"]["execute"] > 0 and report["calls"]["burst"] > 0


@pytest.fixture
def module() -> Any:
    import driver_stress

    return driver_stress


def test_a_wrong_output_is_a_failure(module: Any) -> None:
    client = module.StressClient("nowhere", 1)
    right: Callable[[Any, Any], Any] = lambda a, b: (a + b,)  # noqa: E731
    client._check("execute", OperationType.ADD, 7, right)
    assert client.tally.failures == []
    client._check("execute", OperationType.ADD, 7, lambda a, b: (np.nextafter(a + b, np.float32(9)),))
    assert client.tally.failures == ["execute: wrong output of ADD of 7"]


def test_an_unexpected_status_is_a_failure(module: Any) -> None:
    client = module.StressClient("/nowhere/d.sock", 1)
    client.call_at_random()
    assert [text.partition(": ")[0] for text in client.tally.failures] == ["connect"]
    assert "DeviceUnavailable" in client.tally.failures[0]


def test_a_client_releases_all_when_it_ends(module: Any) -> None:
    with short_folder() as folder, running_daemon(folder / "d.sock") as daemon:
        assert isinstance(daemon, Daemon)
        client = module.StressClient(str(daemon.path), 3, stays_connected=True)
        for _ in range(60):
            client.call_at_random()
        assert client.tally.failures == []
        client.run(0)
