"""nnfmq is upgraded under a running driver: no process of it loads code of the new version, and who looks is told."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.drivers import LIMIT_S, Process, one, running_daemon, until
from support.model_folders import RepositoryPeer, add_version, adder, running_repository
from support.models import null_model, relu_model
from support.places import ROOT

import nnfmq
from nnfmq.base import upgrades

INSTALLED = r"nnfmq .* while this driver ran, which goes on with the code that it has loaded: restart it"
POISON = "raise SystemExit('a process of the driver has loaded code of the new version')\n"


@pytest.fixture
def site(folder: Path) -> Path:
    """Return a folder with nnfmq, which a test upgrades."""
    shutil.copytree(ROOT / "nnfmq", folder / "site" / "nnfmq", ignore=shutil.ignore_patterns("*.c", "*.pyx"))
    return folder / "site"


def upgrade(site: Path) -> None:
    """Replace all of nnfmq by what must not be loaded, as an installer does: by new files."""
    (site / "nnfmq").rename(site / "old")
    for found in (site / "old").rglob("*.py"):
        new = site / "nnfmq" / found.relative_to(site / "old")
        new.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(POISON)


def test_a_driver_under_which_nnfmq_is_upgraded_goes_on_with_what_it_has_loaded(folder: Path, site: Path) -> None:
    models, socket = folder / "models", folder / "d.sock"
    models.mkdir()
    add_version(models, "adder", 1, adder(1))
    paths = [str(site), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "NNFMQ_LOG_LEVEL": "info", "NNFMQ_LOG_FORMAT": "text"}
    with running_daemon(socket, environment=environment, models=models) as daemon, RepositoryPeer(socket) as peer:
        peer.wait_for("adder", version=1)
        with daemon.connect() as client:
            assert not client.statistics().was_upgraded
        upgrade(site)
        with daemon.connect() as client:  # its worker is forked
            assert client.statistics().was_upgraded
            assert client.device("reference").prepare(null_model()).execute(one(1)) == (one(1),)
            if server := client.statistics().compile_server_pid:  # one that runs has loaded the compiler
                with Process(server) as process:
                    process.kill()
                    process.wait_for_end()
            with pytest.raises(nnfmq.DeviceUnavailable, match=INSTALLED):
                client.device("compiled").prepare(relu_model((12345,)))
            assert client.device("reference").prepare(null_model()).execute(one(2)) == (one(2),)
        add_version(models, "adder", 2, adder(2))
        entry = peer.wait_for("adder", failed_version=2)
        assert entry.version == 1 and "restart it" in entry.reason
        with running_repository(daemon) as process:
            process.kill()
        until(lambda: "the model repository cannot be started: nnfmq" in daemon.program.errors(), "it is not started")
        status = subprocess.run(
            [sys.executable, "-P", "-m", "nnfmq", "status", "--json", "--connect", socket],
            capture_output=True, text=True, timeout=LIMIT_S, check=True,
        )  # fmt: skip
        assert json.loads(status.stdout)["driver"]["was_upgraded"]
        errors = daemon.program.errors()
        assert errors.count(f"WARNING nnfmq.supervisor[{daemon.program.pid}]: nnfmq ") == 1
        assert "of the new version" not in errors
        daemon.process.send(signal.SIGTERM)
        assert daemon.program.wait() == 0


def test_no_worker_is_executed_after_an_upgrade_and_clients_are_told_what_to_do(folder: Path, site: Path) -> None:
    paths = [str(site), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "NNFMQ_WORKER_START": "exec"}
    with running_daemon(folder / "d.sock", environment=environment) as daemon, daemon.connect() as client:
        model = client.device("reference").prepare(null_model())
        upgrade(site)
        with pytest.raises(nnfmq.DeviceUnavailable, match=INSTALLED):
            daemon.connect()
        assert model.execute(one(1)) == (one(1),)
        assert "of the new version" not in daemon.program.errors()


def test_an_interpreter_that_is_started_during_an_upgrade_does_not_begin(folder: Path, site: Path) -> None:
    words = [sys.executable, "-P", "-m", "nnfmq.repository", "--import", "stamp of others", "2", "0", str(folder), ""]
    done = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 1
    assert upgrades.upgrade_text() in done.stderr
