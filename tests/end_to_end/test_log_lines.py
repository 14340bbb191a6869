"""The log of a real driver: clients, models, swaps and deaths, in the form that its stderr asks for."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.drivers import LIMIT_S, Daemon, Process, app, process_name, running_daemon, until
from support.model_folders import RepositoryPeer, add_version, adder

import nnfmq
from nnfmq.base.processes import command_name

ALL_JSON = {"NNFMQ_LOG_LEVEL": "info", "NNFMQ_LOG_FORMAT": ""}  # stderr is a file, so the lines are JSON
Line = dict[str, Any]


def lines(daemon: Daemon) -> list[Line]:
    """Return the lines that a driver has logged; each of them must be JSON."""
    return [json.loads(line) for line in daemon.program.errors().splitlines()]


def wait_for(daemon: Daemon, condition: Callable[[Line], bool], what: str) -> Line:
    """Return the first line that fulfils the condition, once it is there."""
    until(lambda: any(map(condition, lines(daemon))), what)
    return next(filter(condition, lines(daemon)))


def says(text: str) -> Callable[[Line], bool]:
    return lambda line: text in line["message"]


@pytest.fixture
def logging_driver(folder: Path) -> Iterator[Daemon]:
    with running_daemon(folder / "d.sock", environment=ALL_JSON) as daemon:
        yield daemon


def test_a_client_its_model_and_its_leaving_are_logged(logging_driver: Daemon) -> None:
    with logging_driver.connect() as client:
        worker = client.worker_pid
        client.device("reference").prepare(nnfmq.example_path("digits.tflite")).close()
    left = wait_for(logging_driver, says("client left after "), "the client has left")
    program = command_name(os.getpid())
    client_member = {"pid": os.getpid(), "uid": os.getuid(), "program": program, "worker": worker}
    connected = wait_for(logging_driver, says("client connected, class normal"), "the client has connected")
    assert connected["client"] == left["client"] == client_member
    assert (connected["logger"], connected["level"], connected["pid"]) == (
        "nnfmq.supervisor", "info", logging_driver.program.pid,
    )  # fmt: skip
    prepared = wait_for(logging_driver, says("model prepared on device reference in "), "the model was prepared")
    del client_member["worker"]  # it is the process of the line
    assert (prepared["client"], prepared["pid"], prepared["logger"]) == (client_member, worker, "nnfmq.models")
    assert prepared["model"] == "digits.tflite"


def test_the_deaths_of_a_client_and_of_a_worker_are_logged_with_the_client(logging_driver: Daemon) -> None:
    with app("traced", logging_driver.path, "reference") as program:
        program.tell("1")
        worker = int(program.line())
        program.popen.kill()
        # A process that is killed closes its socket before it has exited, and its worker may have ended in between.
        ended = ("client's process has exited after ", "client left after ")
        died = wait_for(logging_driver, lambda line: line["message"].startswith(ended), "the client's death is logged")
        assert (died["client"]["pid"], died["client"]["worker"]) == (program.pid, worker)
        assert died["client"]["program"] == "traced.py"
    with logging_driver.connect() as client, Process(client.worker_pid) as process:
        process.kill()
        died = wait_for(logging_driver, says(f"worker {process.pid} ended with status -9"), "the death is logged")
    assert (died["level"], died["client"]["pid"]) == ("error", os.getpid())


def test_a_swap_of_a_version_is_logged_with_its_model(folder: Path) -> None:
    (folder / "models").mkdir()
    add_version(folder / "models", "adder", 1, adder(1))
    with running_daemon(folder / "d.sock", environment=ALL_JSON, models=folder / "models") as daemon:
        with RepositoryPeer(daemon.path) as peer:
            peer.wait_for("adder", version=1)
            add_version(folder / "models", "adder", 2, adder(2))
            peer.wait_for("adder", version=2)
        swap = wait_for(daemon, says("version 2 of model adder is served on device "), "the swap is logged")
        assert swap["message"].endswith(" instead of version 1")
        assert (swap["model"], swap["logger"]) == ("adder", "nnfmq.repository")


WRITES_TO_STDERR = """
import os, sys

if "nnfmq.repository" in sys.orig_argv:
    os.write(2, b"starts " + sys.orig_argv[sys.orig_argv.index("nnfmq.repository") + 1].encode() + b"\\n")


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "llvmlite":
            os.write(2, b"imports llvmlite\\n")


sys.meta_path.insert(0, Finder())
"""
"""A module that Python imports at its start: processes of the driver write to stderr as a library would."""


def test_what_other_processes_of_the_driver_write_to_stderr_is_logged_as_well(folder: Path) -> None:
    (folder / "sitecustomize.py").write_text(WRITES_TO_STDERR)
    (folder / "models").mkdir()
    add_version(folder / "models", "adder", 1, adder(1))
    paths = [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = ALL_JSON | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "NNFMQ_CACHE_MIB": "0"}
    with running_daemon(folder / "d.sock", environment=environment, models=folder / "models") as daemon:
        with daemon.connect() as client:
            client.device("compiled").prepare(nnfmq.example_path("digits.tflite")).close()
        (repository,) = (pid for pid in daemon.process.children() if process_name(pid) == "nnfmq-models")
        for text, pid in {
            "the model repository wrote to stderr: starts --serve": daemon.program.pid,
            "an import wrote to stderr: starts --import": repository,
            "the compile server wrote to stderr: imports llvmlite": daemon.program.pid,
        }.items():
            line = wait_for(daemon, says(text), text)
            assert (line["logger"], line["level"], line["pid"]) == ("nnfmq.stderr", "warning", pid)


def test_levels_change_by_SIGHUP(folder: Path) -> None:
    file = folder / "nnfmq.toml"
    file.write_text('log_level = ["error"]\n')
    environment = {"NNFMQ_CONFIG": str(file), "NNFMQ_LOG_LEVEL": "", "NNFMQ_LOG_FORMAT": "json"}
    with running_daemon(folder / "d.sock", environment=environment) as daemon:
        daemon.connect().close()
        file.write_text('log_level = ["error", "supervisor=info"]\n')
        daemon.process.send(signal.SIGHUP)
        wait_for(daemon, says("the configuration is reloaded; settings that have changed: 1"), "it is reloaded")
        daemon.connect().close()
        wait_for(daemon, says("client connected"), "the second client's connection")
        assert sum(map(says("client connected"), lines(daemon))) == 1


def test_a_level_that_is_not_valid_is_reported_when_the_driver_starts(folder: Path) -> None:
    command = [sys.executable, "-P", "-m", "nnfmq", "serve", "--socket", folder / "d.sock", "--log-level", "loud"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2
    assert "error: argument --log-level: 'loud' is not allowed; allowed: LEVEL for all loggers" in done.stderr


# ----------------------------------------------------------------------------------------------------------------------
# The form.


def first_line(stderr: int, folder: Path, read: Callable[[], str], **environment: str) -> str:
    """Return the first line that a driver with this stderr logs, which is about its socket."""
    settings = {"NNFMQ_LOG_LEVEL": "info", "NNFMQ_LOG_FORMAT": ""} | environment
    command = [sys.executable, "-P", "-m", "nnfmq", "serve", "--socket", folder / "d.sock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=os.environ | settings) as driver:
        assert driver.stdout is not None
        driver.stdout.readline()
        found = read()
        driver.terminate()
        assert driver.wait(LIMIT_S) == 0
    return found.splitlines()[0]


def test_lines_on_a_terminal_are_texts(folder: Path) -> None:
    terminal, stderr = pty.openpty()
    try:
        line = first_line(stderr, folder, lambda: os.read(terminal, 4096).decode())
    finally:
        os.close(terminal)
        os.close(stderr)
    assert re.fullmatch(r"\S+Z INFO nnfmq\.supervisor\[\d+\]: nnfmq \S+ listens on \S+/d\.sock", line)


@pytest.mark.parametrize("form", ["", "json"])
def test_lines_of_the_journal_have_priorities(folder: Path, form: str) -> None:
    with tempfile.TemporaryFile("r+") as log:
        found = os.fstat(log.fileno())
        variables = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}", "NNFMQ_LOG_FORMAT": form}
        line = first_line(log.fileno(), folder, lambda: os.pread(log.fileno(), 4096, 0).decode(), **variables)
    if form:
        assert json.loads(line.removeprefix("<6>"))["level"] == "info"
    else:
        assert re.fullmatch(r"<6>INFO nnfmq\.supervisor\[\d+\]: nnfmq \S+ listens on \S+/d\.sock", line)
