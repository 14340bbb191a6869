"""Models are compiled in child processes: these tests end clients, workers, servers and processes during preparations.

A preparation is in progress while compile processes of its worker exist; 1200 kernels take much longer than any test
here waits. Every model is compiled while its client waits: without a baseline program, and without a cache.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.compiled import random_inputs
from support.drivers import LIMIT_S, Daemon, InThread, Process, app, opened, running_daemon, short_folder, until
from support.models import logistics_model

import nnfmq
from nnfmq.base import settings
from nnfmq.base.processes import allowed_cpus
from nnfmq.base.scheduling import BATCH, scheduling_of
from nnfmq.driver.compilation.jobs import PROCESSES_MAX
from nnfmq.driver.process.event_loop import STOP_GRACE_S
from nnfmq.engines import interpreter
from nnfmq.hal.errors import DeadObject, ErrorStatus, GeneralFailure, MissedDeadlineTransient
from nnfmq.hal.types import ExecutionPreference, Model
from nnfmq.serialize import messages
from nnfmq.serialize.models import encode_model

pytest.importorskip("llvmlite", exc_type=ImportError)

SUSTAINED, FAST = ExecutionPreference.SUSTAINED_SPEED, ExecutionPreference.FAST_SINGLE_ANSWER
ENDLESS = logistics_model(1200)
SHORT = logistics_model(24)
FDS = 5  # of a compile process: the standard streams, its connection, and its folder of /proc; not the log
PROMPT_S = 2.0  # less than all of ENDLESS takes; a part of it may be quicker


@pytest.fixture(scope="module")
def _daemon() -> Iterator[Daemon]:
    """Run a daemon without a driver cache for the tests of this module."""
    with (
        short_folder() as made,
        running_daemon(made / "d.sock", environment={settings.CACHE_MIB.variable: "0"}) as daemon,
    ):
        yield daemon


def prepare(client: nnfmq.Client, model: Model, **rest: Any) -> nnfmq.PreparedModel:
    """Prepare a model so that the reply is sent after its compilation, unless `rest` has another preference."""
    return client.device("compiled").prepare(model, **{"preference": SUSTAINED, **rest})


@pytest.fixture
def worker(client: nnfmq.Client) -> Iterator[Process]:
    with Process(client.worker_pid) as process:
        yield process


@pytest.fixture
def server(daemon: Daemon, client: nnfmq.Client) -> Iterator[Process]:
    """Return the daemon's compile server, which the first preparation starts."""
    with prepare(client, SHORT):
        (pid,) = daemon.compile_servers()
    with Process(pid) as process:
        until(lambda: process.children() == [], "the compile processes are gone")
        yield process


@contextmanager
def compile_processes(server: Process) -> Iterator[list[Process]]:
    """Wait until there is one for each CPU, which has asked for a signal at the server's exit, and yield them.

    That signal ends a process that is stopped. A process asks for it before it closes the fds that it does not keep.
    """
    count = min(allowed_cpus(), PROCESSES_MAX)
    until(lambda: len(server.children()) == count, "the compile processes are there")
    with ExitStack() as stack:
        processes = [stack.enter_context(process) for process in opened(server.children())]
        until(lambda: all(len(process.descriptors()) == FDS for process in processes), "they have closed the rest")
        yield processes


def assert_computes(prepared: nnfmq.PreparedModel, model: Model) -> None:
    inputs = random_inputs(model, 1)
    expected = [np.empty_like(array) for array in inputs]
    interpreter.prepare(model).execute(inputs, expected)
    for found, wanted in zip(prepared.execute(*inputs), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_code_from_compile_processes_computes_the_same(client: nnfmq.Client, server: Process) -> None:
    with prepare(client, SHORT) as prepared:
        assert_computes(prepared, SHORT)
    until(lambda: server.children() == [], "the compile processes are gone")


def test_server_and_processes_have_their_own_sessions_and_fds(
    client: nnfmq.Client, worker: Process, server: Process
) -> None:
    call = InThread.start(lambda: prepare(client, ENDLESS))
    with compile_processes(server) as processes:
        assert os.getsid(server.pid) == server.pid
        assert {os.getsid(process.pid) for process in processes} == {server.pid}
        assert all(process.descriptors().count("socket") == 1 for process in processes)
        assert all(process.shared_mappings() == [] for process in processes)
    client.close()
    assert isinstance(call.wait().error, DeadObject)


NICE_MAX = 19  # the kernel's, which the processes of a driver that is nice itself may reach


def nice(process: Process) -> int:
    """Return the nice value of a process's main thread, which computes: the 19th field of its stat (proc(5))."""
    return int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[16])


@pytest.mark.parametrize(("preference", "nicer"), [(SUSTAINED, 5), (FAST, 10)], ids=["foreground", "background"])
def test_compile_processes_have_a_lower_priority_than_workers(
    client: nnfmq.Client, worker: Process, server: Process, preference: ExecutionPreference, nicer: int
) -> None:
    call = InThread.start(lambda: prepare(client, ENDLESS, preference=preference))
    with compile_processes(server) as processes:
        # A process lowers its priority after it has closed the fds.
        lower = min(nice(worker) + nicer, NICE_MAX)
        until(lambda: {nice(process) for process in processes} == {lower}, "they have a lower priority")
        until(lambda: {scheduling_of(process.pid) for process in processes} == {BATCH}, "they have a short slice")
        assert nice(server) == nice(worker)  # it answers immediately, and what it forks decides for itself
    client.close()
    call.wait()


def group_nice(pid: int) -> int:
    """Return the value of a process's session: see sched(7)."""
    return int(Path(f"/proc/{pid}/autogroup").read_text().rpartition(" nice ")[2])


@pytest.mark.parametrize(("preference", "nicer"), [(SUSTAINED, 5), (FAST, 10)], ids=["foreground", "background"])
def test_the_session_of_the_compile_processes_has_a_lower_priority(
    client: nnfmq.Client, worker: Process, server: Process, preference: ExecutionPreference, nicer: int
) -> None:
    if not Path("/proc/self/autogroup").exists() or os.geteuid():
        pytest.skip("the kernel has no autogroups, or lets users change one session in 0.1 s")
    call = InThread.start(lambda: prepare(client, ENDLESS, preference=preference))
    with compile_processes(server):
        lower = min(group_nice(worker.pid) + nicer, NICE_MAX)
        until(lambda: group_nice(server.pid) == lower, "the session has its value")
    client.close()
    call.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT], ids=lambda number: number.name)
def test_LIFE_8_a_compile_process_that_dies_fails_that_preparation_only(
    client: nnfmq.Client, server: Process, number: signal.Signals
) -> None:
    call = InThread.start(lambda: prepare(client, ENDLESS))
    with compile_processes(server) as processes:
        processes[0].send(number)
        assert isinstance(call.wait().error, GeneralFailure)
        assert f"was ended by {number.name}" in str(call.error)
        for process in processes:
            process.wait_for_end(PROMPT_S)
    with prepare(client, SHORT) as prepared:
        assert_computes(prepared, SHORT)


def test_LIFE_3_SIGKILL_of_the_worker_ends_its_compile_processes(
    daemon: Daemon, client: nnfmq.Client, worker: Process, server: Process
) -> None:
    call = InThread.start(lambda: prepare(client, ENDLESS))
    with compile_processes(server) as processes:
        worker.kill()
        for process in processes:
            process.wait_for_end(PROMPT_S)
        assert not server.has_exited()
    assert isinstance(call.wait().error, DeadObject)


def test_LIFE_3_compile_processes_that_are_stopped_end_with_their_worker(
    daemon: Daemon, client: nnfmq.Client, worker: Process, server: Process
) -> None:
    call = InThread.start(lambda: prepare(client, ENDLESS))
    with compile_processes(server) as processes:
        for process in processes:
            process.stop()
        worker.kill()
        for process in processes:
            process.wait_for_end(PROMPT_S)
    assert isinstance(call.wait().error, DeadObject)


def test_LIFE_3_SIGKILL_of_the_client_ends_its_worker_and_the_compile_processes(
    daemon: Daemon, server: Process
) -> None:
    with app("waits", daemon.path, "compilation") as client, Process(int(client.line())) as worker:
        client.tell()
        assert client.line() == "waiting"
        with compile_processes(server) as processes:
            client.popen.kill()
            for process in (worker, *processes):
                process.wait_for_end(PROMPT_S)


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_a_compile_server_that_is_killed_is_replaced(
    daemon: Daemon, client: nnfmq.Client, server: Process, stopped: bool
) -> None:
    if stopped:
        server.stop()
    server.kill()
    server.wait_for_end()
    with prepare(client, SHORT) as prepared:
        assert_computes(prepared, SHORT)
    (pid,) = daemon.compile_servers()
    assert pid != server.pid


def test_a_preparation_outlives_the_compile_server_and_its_processes(client: nnfmq.Client, server: Process) -> None:
    call = InThread.start(lambda: prepare(client, logistics_model(60)))
    with compile_processes(server) as processes:
        processes[0].stop()
        server.kill()
        for process in processes:
            process.wait_for_end(PROMPT_S)
    with call.wait().value as prepared:
        assert_computes(prepared, logistics_model(60))


SERVE_IMPATIENTLY = """
import pathlib, sys
from nnfmq.driver.compilation import server
from nnfmq.driver.process import supervisor
setattr(server, sys.argv[2], float(sys.argv[3]))
supervisor.serve(pathlib.Path(sys.argv[1]), ready=lambda path: print(f"nnfmq: listening on {path}", flush=True))
"""


def impatient_daemon(folder: Path, name: str, seconds: float) -> AbstractContextManager[Daemon]:
    """Run a daemon without a driver cache, with another value of a limit of `nnfmq.driver.compilation.server`."""
    path = folder / "impatient.sock"
    arguments = ["-P", "-c", SERVE_IMPATIENTLY, path, name, str(seconds)]
    return running_daemon(path, environment={settings.CACHE_MIB.variable: "0"}, arguments=arguments)


def test_a_compile_server_that_is_not_used_ends(folder: Path) -> None:
    with impatient_daemon(folder, "IDLE_TIMEOUT_S", 0.1) as daemon, daemon.connect() as client:
        assert daemon.compile_servers() == []
        for _ in range(2):
            with prepare(client, SHORT) as prepared:
                until(lambda: daemon.compile_servers() == [], "it has ended")
                assert_computes(prepared, SHORT)
        assert daemon.program.errors() == ""


SERVE_WITH_A_SERVER_THAT_HANGS = """
import pathlib, sys, time
from nnfmq.driver.compilation import server
from nnfmq.driver.process import supervisor
def hang(self, real=server._Server._serve):
    request = 0
    while pathlib.Path(f"{sys.argv[1]}.{request}").exists():
        request += 1
    pathlib.Path(f"{sys.argv[1]}.{request}").touch()
    if request == int(sys.argv[2]):
        time.sleep(600)
    real(self)
setattr(server, sys.argv[3], 1.0)
server._Server._serve = hang
supervisor.serve(pathlib.Path(sys.argv[1]), ready=lambda path: print(f"nnfmq: listening on {path}", flush=True))
"""


@pytest.mark.parametrize(("request_", "limit"), [(0, "REPLY_TIMEOUT_S"), (1, "NEXT_REPLY_TIMEOUT_S")])
def test_a_compile_server_that_does_not_answer_is_replaced(folder: Path, request_: int, limit: str) -> None:
    path = folder / "hangs.sock"
    arguments = ["-P", "-c", SERVE_WITH_A_SERVER_THAT_HANGS, path, str(request_), limit]
    with running_daemon(path, environment={settings.CACHE_MIB.variable: "0"}, arguments=arguments) as daemon:
        with daemon.connect() as client, prepare(client, SHORT) as prepared:
            assert_computes(prepared, SHORT)
        log = daemon.program.errors()
        assert "the compile server has not replied for 1 s: it is replaced" in log and "the worker compiles" not in log


def test_LIFE_8_a_compile_server_that_is_stopped_is_replaced(
    daemon: Daemon, client: nnfmq.Client, server: Process
) -> None:
    call = InThread.start(lambda: prepare(client, logistics_model(60)))
    with compile_processes(server) as processes:
        processes[0].stop()
        server.stop()
        with call.wait().value as prepared:
            assert_computes(prepared, logistics_model(60))
    assert server.has_exited()
    assert "the compile server is stopped: it is replaced" in daemon.program.errors()


def test_LIFE_8_a_compile_process_that_is_stopped_costs_no_preparation(client: nnfmq.Client, server: Process) -> None:
    call = InThread.start(lambda: prepare(client, logistics_model(60)))
    with compile_processes(server) as processes:
        processes[0].stop()
        with call.wait().value as prepared:
            assert_computes(prepared, logistics_model(60))
        assert processes[0].has_exited() and not server.has_exited()


def test_LIFE_8_a_compile_process_that_is_stopped_for_a_moment_goes_on(client: nnfmq.Client, server: Process) -> None:
    call = InThread.start(lambda: prepare(client, ENDLESS))
    with compile_processes(server) as processes:
        with processes[0].stopped():
            pass
        assert not processes[0].has_exited(2 * STOP_GRACE_S)
    client.close()
    call.wait()


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_a_preparation_outlives_the_daemon_whose_compile_server_ends_with_it(folder: Path, stopped: bool) -> None:
    path = folder / "d.sock"
    with Daemon.start(path, environment={settings.CACHE_MIB.variable: "0"}) as daemon, daemon.connect() as client:
        with prepare(client, SHORT):
            (pid,) = daemon.compile_servers()
        with Process(pid) as server:
            until(lambda: not server.children(), "the compile processes of the first model have ended")
            call = InThread.start(lambda: prepare(client, logistics_model(60)))
            with compile_processes(server) as processes:
                if stopped:
                    server.stop()
                daemon.kill()
                for process in (server, *processes):
                    process.wait_for_end(PROMPT_S)
        for model, prepared in ((logistics_model(60), call.wait().value), (SHORT, prepare(client, SHORT))):
            with prepared:
                assert_computes(prepared, model)


def test_only_the_compile_server_and_its_processes_load_LLVM(daemon: Daemon, server: Process) -> None:
    assert "libllvmlite" in Path(f"/proc/{server.pid}/maps").read_text()
    assert "llvm" not in Path(f"/proc/{daemon.process.pid}/maps").read_text()


def test_PREP_6_a_deadline_that_passes_ends_the_compile_processes(client: nnfmq.Client, server: Process) -> None:
    call = InThread.start(lambda: prepare(client, ENDLESS, timeout=PROMPT_S))
    with compile_processes(server) as processes:
        assert isinstance(call.wait().error, MissedDeadlineTransient)
        for process in processes:
            process.wait_for_end(PROMPT_S)
    with prepare(client, SHORT) as prepared:
        assert_computes(prepared, SHORT)


def test_PREP_6_the_driver_reports_the_missed_deadline(client: nnfmq.Client) -> None:
    """Call without a client-side limit, so that the driver reports the missed deadline."""
    data, _ = encode_model(ENDLESS)
    connection, deadline_ns = client.connection, time.monotonic_ns() + 1_000_000_000
    message = messages.PrepareModel(connection.next_call_id(), "compiled", SUSTAINED, 1, deadline_ns, data)
    reply = connection.exchange(message, messages.PreparedModelReady)
    assert reply.status is ErrorStatus.MISSED_DEADLINE_TRANSIENT
    assert "while the model was compiled" in reply.message


def test_clients_that_compile_concurrently_have_separate_processes(daemon: Daemon) -> None:
    models = [logistics_model(count) for count in (20, 24, 28)]
    with ExitStack() as stack:
        clients = [stack.enter_context(daemon.connect()) for _ in models]
        calls = [InThread.start(lambda c=c, m=m: prepare(c, m)) for c, m in zip(clients, models, strict=True)]
        for call, model in zip(calls, models, strict=True):
            assert_computes(stack.enter_context(call.wait().value), model)


def test_one_client_compiles_several_models_concurrently(client: nnfmq.Client) -> None:
    models = [logistics_model(count) for count in (20, 24, 28)]
    with ExitStack() as stack:
        calls = [InThread.start(lambda m=m: prepare(client, m)) for m in models]
        for call, model in zip(calls, models, strict=True):
            assert_computes(stack.enter_context(call.wait().value), model)


def test_progress_is_reported_on_the_calling_thread_until_all_is_compiled(client: nnfmq.Client) -> None:
    reports: list[tuple[int, int]] = []
    with prepare(client, SHORT, progress=lambda *report: reports.append(report)):
        pass
    total = reports[0][1]
    assert total > 2  # equal code is compiled once
    assert reports[0] == (0, total) and reports[-1] == (total, total) and len(reports) > 2
    assert reports == sorted(reports)


def test_a_device_that_does_not_compile_reports_no_progress(client: nnfmq.Client) -> None:
    reports: list[tuple[int, int]] = []
    with client.device("reference").prepare(SHORT, progress=lambda *report: reports.append(report)):
        pass
    assert reports == []


class _EnoughError(Exception):
    pass


def test_an_exception_of_the_progress_callback_ends_the_call_and_releases_the_model(client: nnfmq.Client) -> None:
    def enough(_done: int, _total: int) -> None:
        raise _EnoughError

    with pytest.raises(_EnoughError):
        prepare(client, SHORT, progress=enough)
    with prepare(client, SHORT) as prepared:
        assert_computes(prepared, SHORT)


def test_an_embedded_driver_compiles_in_processes_that_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.CACHE_MIB.variable, "0")
    with nnfmq.connect(embedded=True, recover=False) as client, Process(client.worker_pid) as driver:
        (pid,) = driver.children()
        with Process(pid) as server:
            with prepare(client, SHORT) as prepared:
                assert_computes(prepared, SHORT)
            until(lambda: server.children() == [], "the compile processes are gone")
            call = InThread.start(lambda: prepare(client, ENDLESS))
            with compile_processes(server) as processes:
                driver.kill()
                for process in (server, *processes):
                    process.wait_for_end(PROMPT_S)
            assert isinstance(call.wait().error, DeadObject)


def test_LIFE_8_an_embedded_driver_compiles_itself_if_its_compile_server_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(settings.CACHE_MIB.variable, "0")
    with (
        nnfmq.connect(embedded=True, recover=False) as client,
        Process(client.worker_pid) as driver,
        Process(driver.children()[0]) as server,
    ):
        server.stop()
        with prepare(client, SHORT) as prepared:
            assert_computes(prepared, SHORT)
        assert server.has_exited()


def test_a_driver_without_a_device_that_compiles_has_no_compile_server(folder: Path) -> None:
    listed = folder / "devices.toml"
    listed.write_text('[[device]]\nname = "plain"\n', encoding="utf-8")
    with (
        running_daemon(folder / "plain.sock", environment={"NNFMQ_DEVICES": str(listed)}) as daemon,
        nnfmq.connect(daemon.path, timeout=LIMIT_S) as client,
        Process(client.worker_pid) as worker,
    ):
        assert worker.children() == daemon.compile_servers() == []
