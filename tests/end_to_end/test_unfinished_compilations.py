"""Compilations whose client leaves: a process of its own fills the cache, within bounds, and leaves nothing else."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support.drivers import LIMIT_S, Daemon, Process, running_daemon, until
from support.models import logistics_model

import nnfmq
from nnfmq.hal.preparation import ProgramKind

pytest.importorskip("llvmlite", exc_type=ImportError)

LARGE = logistics_model(24)  # some seconds of LLVM
FAST: Any = "fast_single_answer"
APPLICATION = """
import sys
import nnfmq
from support.models import logistics_model
with nnfmq.connect(embedded=True) as client:
    model = client.device("compiled").prepare(logistics_model(24), preference="fast_single_answer")
    print(model.program.name, client.driver_pid, flush=True)
    if sys.argv[1:]:
        sys.stdin.read()
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of the cache, of drivers that let compilations go on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NNFMQ_COMPILE_AFTER_EXIT_S", "60")
    return tmp_path / "cache" / "nnfmq"


@pytest.fixture
def daemon(folder: Path, cache: Path) -> Iterator[Daemon]:
    with running_daemon(folder / "d.sock") as started:
        yield started


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("*") if path.is_file())


def is_compiling(cache: Path) -> bool:
    """Return whether a process holds the lock of the cache."""
    fd = os.open(cache, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def compilers(cache: Path) -> list[int]:
    """Return the pids of the processes that compile for `cache` without a client."""
    variable = b"XDG_CACHE_HOME=" + os.fsencode(cache.parent)
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_compiler = b"--compile" in (process / "cmdline").read_bytes().split(b"\0")
            if is_compiler and variable in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


@contextmanager
def the_compiler(cache: Path) -> Iterator[Process]:
    """Wait for the process that compiles without a client, and yield it."""
    until(lambda: bool(compilers(cache)), "a process compiles")
    (pid,) = compilers(cache)
    with Process(pid) as process:
        yield process


def wait_for_program(cache: Path) -> None:
    """Wait until the process has filled the cache and ended; nothing but the program is left."""
    until(lambda: bool(entries(cache)) and not is_compiling(cache), "the cache has the program", 60)
    assert len(entries(cache)) == 1
    assert not entries(cache)[0].startswith(".")


def kind_of(client: nnfmq.Client, model: Any = LARGE) -> ProgramKind:
    with client.device("compiled").prepare(model, timeout=LIMIT_S) as prepared:
        return prepared.program


def test_the_models_of_a_short_program_are_in_the_cache_at_its_next_start(cache: Path) -> None:
    command = [sys.executable, "-c", APPLICATION]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "lib")}
    first = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert first.stdout.startswith("BASELINE")  # and its output has ended: no process has it any more
    wait_for_program(cache)
    second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert second.stdout.startswith("CACHED")


def test_a_killed_application_leaves_no_driver_and_a_compilation_that_ends(cache: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "lib")}
    command = [sys.executable, "-c", APPLICATION, "wait"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as app:
        assert app.stdout is not None
        _, driver_pid = app.stdout.readline().split()
        with Process(int(driver_pid)) as driver:
            app.kill()
            driver.wait_for_end()
    wait_for_program(cache)


@pytest.mark.parametrize("closes_model", [False, True], ids=["closes", "closes its model and itself"])
def test_a_compilation_goes_on_when_its_client(closes_model: bool, daemon: Daemon, cache: Path) -> None:
    with daemon.connect() as client:
        model = client.device("compiled").prepare(LARGE, preference=FAST)
        if closes_model:
            model.close()
    wait_for_program(cache)
    with daemon.connect() as client:
        assert kind_of(client) is ProgramKind.CACHED


def test_a_deadline_ends_the_wait_and_not_the_compilation(daemon: Daemon, cache: Path) -> None:
    with daemon.connect() as client:
        with pytest.raises(nnfmq.MissedDeadline):
            client.device("compiled").prepare(logistics_model(1200), timeout=0.5)
        with the_compiler(cache) as process:
            process.kill()
            process.wait_for_end()


def test_a_client_that_dies_while_it_waits_leaves_a_compilation_that_fills_the_cache(
    daemon: Daemon, cache: Path
) -> None:
    program = f"import nnfmq; from support.models import logistics_model; c = nnfmq.connect({str(daemon.path)!r}); "
    program += "print(c.worker_pid, flush=True); c.device('compiled').prepare(logistics_model(24))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "lib")}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True) as app:
        assert app.stdout is not None
        with Process(int(app.stdout.readline())) as worker:
            until(lambda: bool(daemon.compile_servers()), "it compiles")
            app.kill()
            worker.wait_for_end()
    wait_for_program(cache)


def test_at_most_one_process_compiles_without_a_client_with_low_priority_and_without_files_of_the_driver(
    daemon: Daemon, cache: Path
) -> None:
    for number in (1200, 1201):
        with daemon.connect() as client, Process(client.worker_pid) as worker:
            _model = client.device("compiled").prepare(logistics_model(number), preference=FAST)
            client.close()
            worker.wait_for_end()
    with the_compiler(cache) as process:
        assert os.getsid(process.pid) == process.pid
        assert "socket" not in process.descriptors()
        assert {os.readlink(f"/proc/{process.pid}/fd/{stream}") for stream in range(3)} == {"/dev/null"}
        process.kill()
        process.wait_for_end()
    assert entries(cache) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_driver_that_ends_or_is_killed_leaves_no_compilation(
    number: signal.Signals, folder: Path, cache: Path
) -> None:
    with (
        Daemon.start(folder / "d.sock") as daemon,
        daemon.connect() as client,
        Process(client.worker_pid) as worker,
    ):
        _model = client.device("compiled").prepare(LARGE, preference=FAST)  # one that is dropped is compiled elsewhere
        until(lambda: bool(daemon.compile_servers()), "it compiles")
        if number == signal.SIGKILL:
            worker.kill()
        else:
            daemon.end()
        worker.wait_for_end()
    assert entries(cache) == []
    assert not cache.exists() or not is_compiling(cache)


def test_its_time_is_bounded(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNFMQ_COMPILE_AFTER_EXIT_S", "2")
    with running_daemon(folder / "d.sock") as daemon:
        with daemon.connect() as client, Process(client.worker_pid) as worker:
            _model = client.device("compiled").prepare(logistics_model(1200), preference=FAST)
            client.close()
            worker.wait_for_end()
        with the_compiler(cache) as process:
            process.wait_for_end(LIMIT_S)
    assert entries(cache) == []
