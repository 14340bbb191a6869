"""A driver and clients that share only the folder of the socket, as containers do: memory crosses by descriptor.

Each side sees other pids than the other one, so no pid of one means anything to the other.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.drivers import LIMIT_S, Process, Program, until
from support.namespaces import isolated, needs_namespaces
from support.page_blocks import blocks
from support.places import ROOT

from nnfmq import cli
from nnfmq.base import settings

CLIENT = """
import os, sys, time
import nnfmq
from support.drivers import one
from support.models import null_model
with nnfmq.connect(sys.argv[1], embedded=False, recover=False, timeout=30) as client:
    with client.device("reference").prepare(null_model()) as model, model.burst() as burst:
        print(os.getpid(), os.listdir("/dev/shm"), *model.execute(one(1)), client.worker_pid, flush=True)
        for line in sys.stdin:
            try:
                print(*burst.execute(one(float(line))), flush=True)
            except nnfmq.DeadObject as error:
                print(f"{time.monotonic_ns()} {error}", flush=True)
                break
"""
COMMANDS = """
import contextlib, io, json, sys
from nnfmq.cli import main
for command in sys.argv[2:]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([*command.split(), "--connect", sys.argv[1]]) == 0
    print(json.dumps(printed.getvalue()), flush=True)
"""
LOG = {"NNFMQ_LOG_LEVEL": "info", "NNFMQ_LOG_FORMAT": "json"}
CONTAINERS = ROOT / "docs" / "examples" / "containers"


@pytest.fixture(autouse=True)
def _with_namespaces() -> None:
    needs_namespaces()


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "d.sock"


@contextmanager
def started_driver(path: Path) -> Iterator[Program]:
    """Run a driver in namespaces of its own, which a test ends."""
    with isolated(["-P", "-m", "nnfmq", "serve", "--socket", path], LOG) as program:
        assert program.line() == f"nnfmq: listening on {path}"
        yield program


@contextmanager
def driver_at(path: Path) -> Iterator[Program]:
    """Run a driver in namespaces of its own; SIGTERM must end it properly."""
    with started_driver(path) as program:
        yield program
        program.popen.send_signal(signal.SIGTERM)
        assert (program.wait(), "Traceback" in program.errors()) == (0, False)


@contextmanager
def client_of(path: Path) -> Iterator[Program]:
    """Run a client in namespaces of its own that has executed a request."""
    with isolated(["-P", "-c", CLIENT, path]) as program:
        found = re.fullmatch(r"1 \[\] \[1\.\] (\d+)", program.line())
        assert found is not None
        assert int(found[1]) > 1  # its worker: a pid in the driver's container
        yield program


def first_process(program: Program) -> Process:
    """Return the first process in the namespaces of a program."""
    (pid,) = map(int, Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split())
    return Process(pid)


def request(program: Program, value: int) -> str:
    program.tell(str(value))
    return program.line()


def printed(path: Path, *commands: str) -> list[str]:
    """Return what commands print in namespaces of their own, one after the other in one process."""
    with isolated(["-P", "-c", COMMANDS, path, *commands]) as program:
        found = [json.loads(program.line()) for _ in commands]
        assert program.wait() == 0, program.errors()
        return found


# ----------------------------------------------------------------------------------------------------------------------
# Requests and deaths.


def test_a_burst_and_a_call_work_and_the_end_of_the_client_is_seen(path: Path) -> None:
    with driver_at(path) as driver:
        with client_of(path) as client, first_process(driver) as supervisor:
            assert request(client, 2) == "[2.]"
            assert len(supervisor.children()) == 1
            with first_process(client) as killed:
                killed.kill()
            until(lambda: supervisor.children() == [], "the worker of the killed client has ended")
        with client_of(path) as client:
            assert request(client, 3) == "[3.]"
            client.end_input()
            assert client.wait() == 0


def test_a_client_sees_the_death_of_its_worker_and_of_the_whole_container(path: Path) -> None:
    with started_driver(path) as driver, first_process(driver) as supervisor:
        for victim in ("worker", "container"):
            with client_of(path) as client:
                (worker,) = supervisor.children()
                with Process(worker) as process:
                    killed_ns = process.kill() if victim == "worker" else supervisor.kill()
                    process.wait_for_end()
                ended_ns, _, reason = request(client, 2).partition(" ")
                assert reason.startswith("the driver ")
                assert int(ended_ns) - killed_ns < LIMIT_S * 1e9
                assert client.wait() == 0


# ----------------------------------------------------------------------------------------------------------------------
# Pids.


def test_the_log_and_the_commands_tell_no_pid_of_another_container(path: Path) -> None:
    with driver_at(path) as driver, client_of(path):
        lines = [json.loads(line) for line in driver.errors().splitlines()]
        connected = next(line for line in lines if line["message"].startswith("client connected"))
        worker = connected["client"]["worker"]
        assert connected["client"].pop("program").startswith("python")
        assert connected["client"] == {"uid": 0, "worker": worker}
        status, rows, _ = printed(path, "status --json", "client list", f"client set {worker} --class batch")
        found = json.loads(status)
        assert [client["pid"] for client in found["clients"]] == [0]  # the command itself is not among them
        assert found["driver"]["pid"] == 1
        assert found["driver"]["resident_bytes"] is None  # of the first process in the command's namespace
        (row,) = (line.split() for line in rows.splitlines() if "normal" in line)
        assert row[:2] + row[3:4] == [str(worker), "-", "0"]


def test_a_driver_that_is_the_first_process_reaps_the_children_of_others(path: Path) -> None:
    """Of a process that exits before its child, the first process becomes the parent."""
    nsenter = shutil.which("nsenter")
    if nsenter is None or os.getuid():
        pytest.skip("only root enters the namespaces of another process, by nsenter")
    with driver_at(path) as driver, first_process(driver) as supervisor:
        script = "sh -c 'kill -STOP $$' >/dev/null 2>&1 & echo $!"
        orphan = [nsenter, "-t", str(supervisor.pid), "--pid", "--mount", "sh", "-c", script]
        done = subprocess.run(orphan, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        assert int(done.stdout) > 1
        until(lambda: len(supervisor.children()) == 1, "the orphan has a new parent")
        (pid,) = supervisor.children()
        with Process(pid) as process:
            process.kill()
        until(lambda: supervisor.children() == [], "the orphan is reaped")


STARTED_BY_INIT = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))"


def test_a_driver_with_which_its_container_would_end_starts_no_successor(path: Path) -> None:
    """The init of a container (`--init`) ends with the process that it has started."""
    serve = ["-P", "-m", "nnfmq", "serve", "--socket", path]
    for arguments in (serve, ["-P", "-c", STARTED_BY_INIT, *serve]):
        with isolated(arguments) as driver:
            assert driver.line() == f"nnfmq: listening on {path}"
            with Program.start([*serve[:4], "--restart", *serve[4:]]) as command:
                assert (command.wait(), "its container would end with it" in command.errors()) == (1, True)
        path.unlink()


# ----------------------------------------------------------------------------------------------------------------------
# The files.


@pytest.mark.parametrize("name", ["driver", "client"])
def test_a_Containerfile_names_files_settings_and_commands_that_exist(name: str) -> None:
    text = (CONTAINERS / f"{name}.Containerfile").read_text(encoding="utf-8")
    for source in re.findall(r"^COPY (docs\S+)", text, re.MULTILINE):
        assert (ROOT / source).is_file()
    assert set(re.findall(r"NNFMQ_\w+", text)) <= {setting.variable for setting in settings.table().values()}
    for words in map(json.loads, re.findall(r"CMD (\[.*\])$", text, re.MULTILINE)):
        if words[0] in ("nnfmq", "serve"):
            parses(words[words[0] == "nnfmq" :])


def parses(words: list[str]) -> None:
    cli.command_parser(words[0]).parse_args(words[1:])


def test_the_pod_names_settings_and_commands_that_exist() -> None:
    (pod,) = (block.code for block in blocks(ROOT / "docs/how-to/containers.md") if block.language == "yaml")
    commands = re.findall(r"command: \[nnfmq, (.*)\]", pod)
    assert len(commands) == 2
    for words in commands:
        parses(words.split(", "))
    named = set(re.findall(r"NNFMQ_\w+", pod))
    assert named and named <= {setting.variable for setting in settings.table().values()}


def test_the_program_of_the_client_classifies_digits(path: Path) -> None:
    with driver_at(path), isolated([CONTAINERS / "client.py", "1"], {"NNFMQ_SOCKET": str(path)}) as client:
        assert re.fullmatch(r"\d in \d+ µs", client.line())
        assert client.wait() == 0
