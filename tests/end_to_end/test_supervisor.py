"""The daemon: a worker per client, one path, and an end that leaves nothing, however it comes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.descriptors import no_more_descriptors_than
from support.drivers import (
    DEAD_WITHIN_NS,
    LIMIT_S,
    Daemon,
    InThread,
    Process,
    Program,
    app,
    at_least_once,
    one,
    running_daemon,
    until,
    wait_until_waiting,
)
from support.model_folders import RepositoryPeer, add_version, adder
from support.models import null_model

import nnfmq
from nnfmq.base.channel import Channel
from nnfmq.serialize import control_protocol, messages

FEW = 2

SERVE_A_FEW = """
import pathlib, sys
from nnfmq.driver.process import supervisor
supervisor.CLIENTS_MAX = int(sys.argv[2])
supervisor.serve(pathlib.Path(sys.argv[1]), ready=lambda path: print(f"nnfmq: listening on {path}", flush=True))
"""


KILLED = """
import sys, time, nnfmq
client = nnfmq.connect(sys.argv[1])
print(client.worker_pid, flush=True)
time.sleep(60)
"""

SERVE_WITHOUT_EPOLL = """
import errno, pathlib, select, sys, types
from nnfmq.driver.process import event_loop, supervisor
class Full:
    def __init__(self):
        self.real = select.epoll()
        self.poll, self.unregister, self.close = self.real.poll, self.real.unregister, self.real.close
    def register(self, fd, events):
        raise OSError(errno.ENOSPC, "No space left on device")
event_loop.select = types.SimpleNamespace(epoll=Full, poll=select.poll, EPOLLIN=select.EPOLLIN, POLLIN=select.POLLIN)
supervisor.serve(pathlib.Path(sys.argv[1]), ready=lambda path: print(f"nnfmq: listening on {path}", flush=True))
"""


@pytest.fixture
def own(folder: Path) -> Iterator[Daemon]:
    """Yield a daemon that the test may end."""
    with running_daemon(folder / "d.sock") as daemon:
        yield daemon


def serve(path: Path) -> Program:
    return Program.start(["-P", "-m", "nnfmq", "serve", "--socket", path])


def admits(daemon: Daemon) -> bool:
    try:
        daemon.connect().close()
    except nnfmq.ResourceExhaustedTransient:
        return False
    return True


def executes(client: nnfmq.Client, value: float) -> bool:
    with client.device("reference").prepare(null_model()) as model, model.burst() as burst:
        return burst.execute(one(value)) == (one(value),) == model.execute(one(value))


# ---------------------------------------------------------------------------------------------------------- clients


def test_a_driver_for_which_epoll_has_no_memory_serves_its_clients_and_sees_them_die(folder: Path) -> None:
    with running_daemon(folder / "d.sock", arguments=["-P", "-c", SERVE_WITHOUT_EPOLL, folder / "d.sock"]) as daemon:
        with daemon.connect() as client:
            assert executes(client, 1)
            with Program.start(["-P", "-c", KILLED, folder / "d.sock"]) as other, Process(int(other.line())) as worker:
                other.popen.kill()
                worker.wait_for_end()
            with Process(client.worker_pid) as own:
                own.kill()
                until(lambda: own.pid not in daemon.process.children(), "the supervisor has reaped the worker")
        assert admits(daemon)


def test_one_process_leaves_places_to_others(folder: Path) -> None:
    with running_daemon(folder / "d.sock", environment={"NNFMQ_PROCESS_CLIENTS": str(FEW)}) as daemon:
        with daemon.connect(), daemon.connect() as second:
            with pytest.raises(nnfmq.ResourceExhaustedTransient, match=rf"process {os.getpid()} has 2 clients already"):
                daemon.connect()
            assert executes(second, 1)
            other = "import nnfmq, sys; nnfmq.connect(sys.argv[1]).close()"
            subprocess.run([sys.executable, "-P", "-c", other, daemon.path], check=True, timeout=LIMIT_S)
        until(lambda: daemon.process.children() == [], "the workers have exited")
        assert admits(daemon)


def test_the_last_place_is_that_of_the_driver_s_model_repository(folder: Path) -> None:
    (folder / "models").mkdir()
    arguments = ["-P", "-c", SERVE_A_FEW, folder / "d.sock", str(FEW)]
    environment = {"NNFMQ_MODELS": str(folder / "models")}
    with (
        running_daemon(folder / "d.sock", arguments=arguments, environment=environment) as daemon,
        daemon.connect() as client,
        RepositoryPeer(daemon.path) as peer,
    ):
        with pytest.raises(nnfmq.ResourceExhaustedTransient, match="its model repository has the last place"):
            daemon.connect()
        add_version(folder / "models", "adder", 1, adder(1))
        peer.wait_for("adder", version=1)
        with pytest.raises(nnfmq.ResourceExhaustedTransient, match="this driver serves 2 clients already"):
            daemon.connect()
        assert executes(client, 1)


def test_a_driver_starts_where_BLAS_would_have_several_threads(folder: Path) -> None:
    """A process with threads starts no child processes, and BLAS starts its threads when NumPy is imported."""
    environment = {"OPENBLAS_NUM_THREADS": "4"}
    with running_daemon(folder / "d.sock", environment=environment) as daemon, daemon.connect() as client:
        assert executes(client, 1)


def test_with_all_warnings_on_a_driver_prints_none(folder: Path) -> None:
    with running_daemon(folder / "d.sock", environment={"PYTHONWARNINGS": "always"}) as daemon:
        for device in ("reference", "compiled"):
            with daemon.connect() as client, client.device(device).prepare(null_model()) as model:
                with model.burst() as burst:
                    burst.execute(one(1))
                model.execute(one(2))
        daemon.end()
        assert daemon.program.errors() == ""


def test_without_a_free_fd_the_supervisor_retries_at_most_ten_times_a_second(folder: Path) -> None:
    """A client that waits would otherwise have it try without a pause, and log every try."""
    with serve(folder / "d.sock") as program:
        program.line()
        began = time.monotonic()
        with no_more_descriptors_than(program.pid, 3), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(str(folder / "d.sock"))
            until(lambda: program.errors().count("cannot accept a client now") >= 4, "four tries")
        assert time.monotonic() - began >= 0.3
        nnfmq.connect(folder / "d.sock").close()


def test_each_of_4_concurrent_clients_has_its_own_worker(daemon: Daemon) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(daemon.connect()) for _ in range(4)]
        assert len({client.worker_pid for client in clients} | {daemon.process.pid}) == 5
        assert {client.driver_pid for client in clients} == {daemon.process.pid}
        calls = [InThread.start(lambda c=client, v=value: executes(c, v)) for value, client in enumerate(clients)]
        assert [call.wait().value for call in calls] == [True] * 4


def test_clients_that_connect_at_the_same_time_are_all_served(daemon: Daemon) -> None:
    calls = [InThread.start(daemon.connect) for _ in range(20)]
    with ExitStack() as stack:
        clients = [stack.enter_context(call.wait().value) for call in calls]
        assert len({client.worker_pid for client in clients}) == 20


def test_a_client_beyond_the_limit_is_rejected_until_another_leaves(folder: Path) -> None:
    path = folder / "d.sock"
    with running_daemon(path, arguments=["-P", "-c", SERVE_A_FEW, path, str(FEW)]) as daemon, ExitStack() as stack:
        clients = [stack.enter_context(daemon.connect()) for _ in range(FEW)]
        for _ in range(3):
            with pytest.raises(
                nnfmq.ResourceExhaustedTransient, match=f"rejected the client: this driver serves {FEW} clients"
            ):
                daemon.connect()
        assert clients[1].statistics().rejected_clients == 3
        with nnfmq.connect(path, monitor=True) as monitor:  # which has a place of its own
            assert monitor.statistics().rejected_clients == 3
            with pytest.raises(nnfmq.InvalidArgument, match="a monitor may not call PrepareModel"):
                monitor.device("reference").prepare(null_model())
        clients[0].close()
        until(lambda: admits(daemon), "one has left, so another one may come")


def test_LIFE_7_a_protocol_violation_ends_that_connection_only(daemon: Daemon, client: nnfmq.Client) -> None:
    for bad in (b"", b"no message", b"\xff" * 1000, control_protocol.encode(messages.ListDevices(1))):
        with Channel.connect(daemon.path) as channel:
            channel.send(bad)
            with pytest.raises(nnfmq.DeadObject):
                channel.receive(time.monotonic_ns() + int(LIMIT_S * 1e9))
    assert executes(client, 1)


def test_a_silent_peer_delays_no_other_client(daemon: Daemon) -> None:
    with Channel.connect(daemon.path), daemon.connect() as client:
        assert executes(client, 1)


def test_a_peer_that_hangs_up_immediately_is_ignored(daemon: Daemon) -> None:
    for _ in range(5):
        Channel.connect(daemon.path).close()
    with daemon.connect() as client:
        assert executes(client, 1)


def test_another_socket_type_is_rejected_by_the_kernel(daemon: Daemon) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream, pytest.raises(OSError, match="wrong type"):
        stream.connect(str(daemon.path))


# ---------------------------------------------------------------------------------------------------------- ending


@pytest.mark.parametrize("window_us", [0.0, 10_000_000.0], ids=["asleep", "polling"])
def test_SIGTERM_ends_every_worker_and_the_waits_of_their_clients(own: Daemon, window_us: float) -> None:
    with ExitStack() as stack:
        idle, busy = (stack.enter_context(own.connect()) for _ in range(2))
        first, second = (stack.enter_context(Process(client.worker_pid)) for client in (idle, busy))
        model = busy.device("reference").prepare(null_model())
        burst = stack.enter_context(model.burst(polling_window_us=window_us))
        burst.execute(one(1))
        second.stop()
        call = InThread.start(lambda: burst.execute(one(2)))
        wait_until_waiting(burst)
        own.process.send(signal.SIGTERM)
        second.resume()
        assert own.program.wait() == 0
        assert first.has_exited() and second.has_exited()
        assert call.wait().value == (one(2),)
        with pytest.raises(nnfmq.DeadObject):
            idle.devices()
    assert own.program.errors() == ""  # nobody had to be killed
    assert not own.path.exists()


def test_SIGTERM_ends_a_worker_that_is_stopped_as_well(folder: Path) -> None:
    with (
        running_daemon(folder / "d.sock", environment={"NNFMQ_DRAIN_S": "0"}) as own,
        own.connect() as client,
        Process(client.worker_pid) as worker,
    ):
        worker.stop()
        call = InThread.start(client.devices)
        own.process.send(signal.SIGTERM)
        assert own.program.wait() == 0
        assert worker.has_exited()
        assert isinstance(call.wait().error, nnfmq.DeadObject)


def test_Ctrl_C_in_its_terminal_ends_the_daemon_as_SIGTERM_does(own: Daemon) -> None:
    with own.connect() as client, Process(client.worker_pid) as worker:
        own.program.interrupt()
        assert own.program.wait() == 0
        worker.wait_for_end()
        with pytest.raises(nnfmq.DeadObject):
            client.devices()
    assert "Traceback" not in own.program.errors()
    assert not own.path.exists()


def test_after_SIGKILL_connecting_fails_immediately(own: Daemon) -> None:
    own.kill()
    assert own.path.exists()

    def fails_immediately() -> bool:
        begin_ns = time.monotonic_ns()
        with pytest.raises(nnfmq.DeviceUnavailable, match="no driver listens"):
            nnfmq.connect(own.path)
        return time.monotonic_ns() - begin_ns < DEAD_WITHIN_NS

    at_least_once(fails_immediately, "connecting fails immediately")


def test_the_next_daemon_replaces_the_socket_of_a_killed_one(own: Daemon) -> None:
    own.kill()
    with running_daemon(own.path) as second, second.connect() as client:
        assert executes(client, 1)


def test_LIFE_3_a_worker_that_is_stopped_when_its_daemon_is_killed_ends_with_its_client(own: Daemon) -> None:
    with app("waits", own.path, "nothing") as client, Process(int(client.line())) as worker:
        worker.stop()
        own.process.stop()  # so that it does not end the worker itself
        client.popen.kill()
        client.wait()
        own.kill()
        worker.wait_for_end()


def test_a_worker_that_is_stopped_when_its_daemon_is_killed_continues_with_its_client(own: Daemon) -> None:
    with own.connect() as client, Process(client.worker_pid) as worker:
        model = client.device("reference").prepare(null_model())
        worker.stop()
        own.kill()
        assert model.execute(one(3)) == (one(3),)


def test_workers_outlive_a_killed_daemon_and_end_with_their_client(own: Daemon) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(own.connect())
        worker = stack.enter_context(Process(client.worker_pid))
        own.kill()
        assert executes(client, 1)
        with running_daemon(own.path) as second, second.connect() as other:
            assert executes(other, 2) and executes(client, 3)
        client.close()
        worker.wait_for_end()


def test_a_second_daemon_at_the_same_path_is_rejected_with_one_line(daemon: Daemon, client: nnfmq.Client) -> None:
    with serve(daemon.path) as second:
        assert second.wait() == 1
        (line,) = second.errors().splitlines()
        assert line.startswith(f"nnfmq: error: another driver already listens at {daemon.path}: ")
        assert "--replace takes its place" in line
    assert executes(client, 1)
    with daemon.connect() as another:
        assert executes(another, 2)


def test_of_daemons_that_start_at_the_same_time_at_one_path_one_listens(folder: Path) -> None:
    path = folder / "d.sock"
    with ExitStack() as stack:
        programs = [stack.enter_context(serve(path)) for _ in range(3)]
        until(lambda: sum(program.popen.poll() is not None for program in programs) == 2, "two of them are rejected")
        winner = next(program for program in programs if program.popen.poll() is None)
        assert winner.line() == f"nnfmq: listening on {path}"
        with nnfmq.connect(path) as client:
            assert executes(client, 1)
        winner.popen.terminate()
        assert sorted(program.wait() for program in programs) == [0, 1, 1]


def test_a_path_that_is_too_long_is_rejected_with_one_line(folder: Path) -> None:
    with serve(folder / ("x" * 120)) as program:
        assert program.wait() == 1
        text = r"nnfmq: error: the path of a driver's socket has at most \d+ bytes; .* is longer\n"
        assert re.fullmatch(text, program.errors())


def test_a_folder_that_does_not_exist_is_rejected_with_one_line(folder: Path) -> None:
    with serve(folder / "missing" / "d.sock") as program:
        assert program.wait() == 1
        (line,) = program.errors().splitlines()
        socket, reason = f"{folder}/missing/d.sock", f"{folder}/missing: No such file or directory"
        assert line.startswith(f"nnfmq: error: the driver cannot listen at {socket}: {reason}: create the directory, ")


# ---------------------------------------------------------------------------------------------------------- its parts


def test_a_worker_that_dies_is_reported_and_replaced_for_the_next_client(own: Daemon) -> None:
    with own.connect() as client, Process(client.worker_pid) as worker:
        worker.kill()
        worker.wait_for_end()
        until(lambda: f"worker {worker.pid} ended with status -9" in own.program.errors(), "the daemon says so")
    with own.connect() as client:
        assert executes(client, 1)


def test_an_idle_daemon_and_its_idle_workers_use_no_CPU(daemon: Daemon, client: nnfmq.Client) -> None:
    assert executes(client, 1)
    with Process(client.worker_pid) as worker:
        until(lambda: set(worker.states()) == {"S"} == set(daemon.process.states()), "all their threads sleep")


def test_the_driver_counts_the_workers_that_die_and_not_those_whose_clients_leave(folder: Path) -> None:
    with running_daemon(folder / "d.sock") as daemon, daemon.connect() as watching:
        with daemon.connect(recover=True) as client:
            with Process(client.worker_pid) as worker:
                worker.kill()
                worker.wait_for_end()
            assert client.devices()
            until(lambda: watching.statistics().dead_workers == 1, "the driver has counted it")
        until(lambda: len(watching.statistics().clients) == 1, "the worker of the client has ended")
        found = watching.statistics()
        assert (found.dead_workers, {cause: count for cause, count in found.deaths.items() if count}) == (
            1,
            {"killed": 1},
        )
