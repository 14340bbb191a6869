"""The device that the documents show: installed beside a driver, and judged by `nnfmq conformance`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.drivers import LIMIT_S, Daemon, one, running_daemon, short_folder
from support.models import add_model, null_model, relu_model
from support.places import ROOT, data_path
from support.plugins import add_example, path_with

import nnfmq

DATA = data_path()
EXAMPLE = ROOT / "docs" / "examples" / "driver"
DOCUMENT = (ROOT / "docs" / "devices.md").read_text()


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    site = tmp_path_factory.mktemp("site")
    add_example(site, EXAMPLE)
    with short_folder() as made, running_daemon(made / "d.sock", environment=path_with(site)) as daemon:
        yield daemon


def test_the_document_shows_the_package_s_file() -> None:
    assert (EXAMPLE / "nnfmq_mine.py").read_text().rstrip() in DOCUMENT


def test_it_has_about_forty_lines() -> None:
    assert len((EXAMPLE / "nnfmq_mine.py").read_text().splitlines()) <= 44


def test_it_computes_on_both_paths(driver: Daemon) -> None:
    with driver.connect() as client, client.device("mine").prepare(add_model()) as model, model.burst() as burst:
        numbers = [[1, 2, 3, 4], [10, 20, 30, 40]]
        for execute in (model.execute, burst.execute):
            assert execute(*numbers)[0].tolist() == [11, 22, 33, 44]


def test_what_it_declines_is_refused_and_it_goes_on(driver: Daemon) -> None:
    with driver.connect() as client:
        device = client.device("mine")
        assert device.supported_operations(relu_model()) == [True]
        with pytest.raises(nnfmq.GeneralFailure, match="'mine' does not support operation 0"):
            device.prepare(null_model(), timeout=LIMIT_S)
        with device.prepare(relu_model((1,))) as model:
            assert model.execute(-one(3))[0].tolist() == [0]


@pytest.mark.skipif(not (DATA / "vts").is_dir(), reason="no test models in $NNFMQ_DATA")
def test_conformance_passes_for_what_it_supports(driver: Daemon, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "nnfmq", "conformance", str(DATA / "vts" / "V1_0"), "--device", "mine"]
    options = ["--connect", str(driver.path), "--path", "burst", "--jobs", "1", "--filter", "^(add|relu)"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = (line.split() for line in done.stdout.splitlines() if line.split()[:1] == ["model"])
    total, passed, failed, skipped = map(int, row[1:])
    assert passed >= 2 and failed == 0 and passed + skipped == total


def test_workers_have_the_devices_that_were_configured_when_their_driver_started(tmp_path: Path) -> None:
    listed = tmp_path / "devices.toml"
    listed.write_text('[[device]]\nname = "first"\n')
    variables = {"NNFMQ_DEVICES": str(listed)}
    with short_folder() as made, running_daemon(made / "d.sock", environment=variables) as daemon:
        listed.write_text('[[device]]\nname = "second"\n')
        with daemon.connect() as client:
            assert [device.name for device in client.devices()] == ["first"]
