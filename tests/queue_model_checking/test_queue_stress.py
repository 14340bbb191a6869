"""The stress tool, with small counts: every pair of cores, and that it would notice."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import zlib
from typing import Any

import pytest
from support.places import ROOT

from nnfmq.queue import core as cores

TOOL = ROOT / "tools" / "queue_stress.py"
LIMIT_S = 60
PAIRS = [f"{writer}-{reader}" for writer in cores.CORES.available() for reader in cores.CORES.available()]


def stress(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), "--limit", "50", *words]
    environment = {**os.environ, "PYTHONPATH": str(TOOL.parent)}  # of its modules: the tests set PYTHONSAFEPATH
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)


def loaded() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TOOL.parent)
        return runpy.run_path(str(TOOL), run_name="queue_stress")


@pytest.mark.parametrize("pair", PAIRS)
def test_records_arrive_whole_and_in_order_between_processes(pair: str) -> None:
    done = stress("--pairs", pair, "--count", "30000", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    (report,) = json.loads(done.stdout)
    assert (report["pair"], report["records"]) == (pair, 30000)
    assert f"{report['writer_core']}-{report['core']}" == pair
    batch = loaded()["batch"]
    assert report["crc"] == zlib.crc32(batch(0, 30000, 1))


def test_ten_million_records_are_sent_for_every_pair_unless_a_count_is_given() -> None:
    tool = loaded()
    assert tool["_parser"]().parse_args([]).count == 10_000_000
    assert tool["_parser"]().parse_args([]).pairs == tool["_possible"]()


def test_every_record_differs_and_depends_on_the_seed() -> None:
    batch = loaded()["batch"]
    records = {batch(i, 1, seed) for i in range(100) for seed in (1, 2)}
    assert len(records) == 200
    assert batch(3, 2, 1) == batch(3, 1, 1) + batch(4, 1, 1)


def test_an_expired_time_limit_is_one_line_and_status_1() -> None:
    done = stress("--pairs", "python-python", "--count", "1000000000", "--limit", "1")
    assert done.returncode == 1
    assert done.stderr.startswith("queue_stress: error: ")
