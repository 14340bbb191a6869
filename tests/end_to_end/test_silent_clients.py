"""Peers of the supervisor that send nothing, or nonsense, or exit: they take nobody's place and stop nobody."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from support.descriptors import no_more_descriptors_than
from support.drivers import LIMIT_S, Daemon, Process, Program, app, one, running_daemon, until
from support.models import null_model

import nnfmq
from nnfmq.base.channel import INLINE_BYTES, Channel
from nnfmq.driver.process.pending_clients import PROCESS_MAX
from nnfmq.hal.errors import ErrorStatus
from nnfmq.serialize import control_protocol, messages
from nnfmq.serialize.control_protocol import PeerRole

SERVE = """
import pathlib, sys
from nnfmq.driver.process import {module} as module, supervisor
{change}
supervisor.serve(pathlib.Path(sys.argv[1]), ready=lambda path: print(f"nnfmq: listening on {{path}}", flush=True))
"""

CONNECT = """
import pathlib, sys
from nnfmq.base.channel import Channel
channels = [Channel.connect(pathlib.Path(sys.argv[1])) for _ in range(int(sys.argv[2]))]
print("connected", flush=True)
sys.stdin.readline()
"""


def changed_daemon(folder: Path, module: str, change: str) -> AbstractContextManager[Daemon]:
    """Run a daemon after a change of one of its modules."""
    path = folder / "d.sock"
    return running_daemon(path, arguments=["-P", "-c", SERVE.format(module=module, change=change), path])


@contextmanager
def silent(path: Path, count: int) -> Iterator[Program]:
    """Run a process that holds this many connections without sending anything."""
    with Program.start(["-P", "-c", CONNECT, path, str(count)]) as program:
        assert program.line() == "connected"
        yield program


def executes(client: nnfmq.Client) -> bool:
    with client.device("reference").prepare(null_model()) as model:
        return model.execute(one(1)) == (one(1),)


def rejection(channel: Channel) -> messages.Refused:
    with channel.receive(time.monotonic_ns() + int(LIMIT_S * 1e9)) as frame:
        message = control_protocol.decode(frame.data, sender=PeerRole.DRIVER)
    assert isinstance(message, messages.Refused)
    return message


@contextmanager
def lingering() -> Iterator[socket.socket]:
    """Yield a TCP socket with data that its peer does not read: its last close waits for that for a minute."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        sock = stack.enter_context(socket.create_connection(listener.getsockname()))
        stack.enter_context(listener.accept()[0])
        sock.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                sock.send(bytes(1 << 16))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
        yield sock


@pytest.mark.parametrize("is_behind", [False, True])
def test_a_descriptor_whose_close_waits_does_not_make_the_supervisor_wait(daemon: Daemon, is_behind: bool) -> None:
    """It comes with the first message; or behind it, and the supervisor rejects the client and never receives it."""
    hello = control_protocol.encode(messages.Hello(control_protocol.PROTOCOL + 1, "AIDL v4", "test"))
    with lingering() as sock:
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with daemon.process.stopped(), raw:  # all of it is there when the driver looks
            raw.connect(str(daemon.path))
            if is_behind:
                raw.send(b"\0" + hello)
            socket.send_fds(raw, [b"\0" + hello], [sock.fileno()])
            sock.close()
        with nnfmq.connect(daemon.path, timeout=LIMIT_S / 2, recover=False) as client:
            assert executes(client)


def test_LIFE_7_silent_connections_of_one_process_take_no_place_of_a_client(daemon: Daemon) -> None:
    """More than the 64 clients that a driver serves, and more than its connections without a Hello."""
    before = len(daemon.process.descriptors())
    with silent(daemon.path, 400), ExitStack() as stack:
        until(lambda: len(daemon.process.descriptors()) == before + PROCESS_MAX, "the others are rejected")
        for _ in range(5):
            assert executes(stack.enter_context(daemon.connect()))


def test_LIFE_7_of_too_many_silent_connections_of_a_process_the_oldest_is_rejected(daemon: Daemon) -> None:
    with ExitStack() as stack:
        channels = [stack.enter_context(Channel.connect(daemon.path)) for _ in range(PROCESS_MAX + 1)]
        refused = rejection(channels[0])
        assert refused.status is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
        assert f"process {os.getpid()} has {PROCESS_MAX} connections without a Hello" in refused.message
        hello = messages.Hello(control_protocol.PROTOCOL, "AIDL v4", "late")
        channels[1].send(control_protocol.encode(hello))
        with channels[1].receive(time.monotonic_ns() + int(LIMIT_S * 1e9)) as frame:
            reply = control_protocol.decode(frame.data, sender=PeerRole.DRIVER, fds=frame.fd_count)
        assert isinstance(reply, messages.HelloReply)


def test_LIFE_7_connections_of_other_processes_are_limited_in_total(folder: Path) -> None:
    with changed_daemon(folder, "pending_clients", "module.PROCESS_MAX, module.PENDING_MAX = 4, 6") as daemon:
        before = len(daemon.process.descriptors())
        with silent(daemon.path, 4), silent(daemon.path, 2), silent(daemon.path, 2):
            until(lambda: len(daemon.process.descriptors()) == before + 6, "two of the first process are rejected")
            with daemon.connect() as client:
                assert executes(client)


def test_LIFE_7_a_connection_without_a_hello_is_closed_in_time(folder: Path) -> None:
    with (
        changed_daemon(folder, "pending_clients", "module.HELLO_TIMEOUT_S = 0.05") as daemon,
        Channel.connect(daemon.path) as first,
        Channel.connect(daemon.path) as second,
    ):
        for channel in (first, second):
            assert rejection(channel).message == "no Hello arrived within 0.05 s"


def test_LIFE_3_a_client_that_is_killed_before_its_hello_leaves_nothing(daemon: Daemon) -> None:
    with silent(daemon.path, 3) as client:
        client.popen.kill()
        client.wait()
    # The fixture compares the daemon's descriptors and processes.


def first_frames() -> Iterator[tuple[bytes, int]]:
    """Yield raw frames, and how many descriptors come with each."""
    generator = random.Random(14)
    hello = b"\0" + control_protocol.encode(messages.Hello(control_protocol.PROTOCOL, "AIDL v4", "test"))
    in_file = struct.pack("<BQ", 1, INLINE_BYTES + 1)
    yield from ((b"", 0), (b"\0", 0), (b"\1", 0), (b"\2", 0), (hello, 1), (hello, 250), (in_file, 0), (in_file, 1))
    yield from ((b"\0" * (INLINE_BYTES + 1), 0), (b"\0" * (INLINE_BYTES + 2), 0), (hello + b"\0", 0), (hello[:-1], 0))
    for _ in range(200):
        damaged = bytearray(hello)
        damaged[generator.randrange(1, len(hello))] ^= 1 << generator.randrange(8)
        yield bytes(damaged), 0
        yield generator.randbytes(generator.randrange(64)), generator.randrange(3)


def test_LIFE_7_the_supervisor_survives_any_first_frame(daemon: Daemon) -> None:
    for data, fds in first_frames():
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.connect(str(daemon.path))
            socket.send_fds(peer, [data], [0] * fds)
            peer.settimeout(LIMIT_S)
            answer = peer.recv(1 << 16) if data else b""
        if answer:  # a rejection, or the reply to a Hello whose damage is in the client's name
            message = control_protocol.decode(answer[1:], sender=PeerRole.DRIVER, fds=None)
            assert isinstance(message, messages.Refused | messages.HelloReply)
    with daemon.connect() as client:
        assert executes(client)


# ---------------------------------------------------------------------------------------------------- dead clients


@pytest.mark.parametrize("call", ["nothing", "computation"])
def test_LIFE_3_a_stopped_worker_ends_when_its_client_is_killed(daemon: Daemon, call: str) -> None:
    with app("waits", daemon.path, call) as client, Process(int(client.line())) as worker:
        client.tell()
        assert client.line() == "waiting"
        worker.stop()
        client.popen.kill()
        worker.wait_for_end()


def test_LIFE_3_a_stopped_worker_of_a_client_that_lives_is_not_ended(daemon: Daemon, client: nnfmq.Client) -> None:
    with daemon.connect() as other, Process(client.worker_pid) as worker:
        with worker.stopped():
            with Process(other.worker_pid) as ended:
                other.close()
                ended.wait_for_end()
            assert not worker.has_exited(0.2)
        assert executes(client)


# ------------------------------------------------------------------------------------------------------- shortages


def test_without_a_free_fd_a_client_gets_RESOURCE_EXHAUSTED(folder: Path) -> None:
    with running_daemon(folder / "d.sock") as daemon:
        used = max(int(fd) for fd in os.listdir(f"/proc/{daemon.process.pid}/fd")) + 1
        for free in range(4):  # none to accept, then too few to start a worker
            with (
                no_more_descriptors_than(daemon.process.pid, used + free),
                pytest.raises(nnfmq.ResourceExhaustedTransient),
            ):
                daemon.connect()
        with daemon.connect() as client:
            assert executes(client)


def test_a_client_that_connects_after_a_shortage_is_not_rejected(folder: Path) -> None:
    change = """
import errno, os, select
accept, reject, shortages = module.Listener.accept, module.reject, [errno.EMFILE]
def accepts(listener):
    global listening
    listening = listener
    if shortages:
        raise OSError(shortages.pop(), "no fd")
    return accept(listener)
def rejects(*arguments):
    reject(*arguments)
    select.select([listening], [], [])  # the next client waits before the supervisor goes on
module.Listener.accept, module.reject = accepts, rejects
"""
    with changed_daemon(folder, "supervisor", change) as daemon:
        with pytest.raises(nnfmq.ResourceExhaustedTransient, match="cannot accept a client now"):
            daemon.connect()
        with daemon.connect() as client:
            assert executes(client)


def test_if_no_process_can_be_forked_a_client_gets_RESOURCE_EXHAUSTED(folder: Path) -> None:
    fail = """
import errno, os
fork, failures = os.fork, [errno.EAGAIN, errno.ENOMEM]
def forks():
    if failures:
        number = failures.pop()
        raise OSError(number, os.strerror(number))
    return fork()
run = supervisor.Supervisor.run
def runs(self):
    module.os.fork = forks
    run(self)
supervisor.Supervisor.run = runs
"""
    with changed_daemon(folder, "children", fail) as daemon:
        before = daemon.process.descriptors()
        for reason in ("Cannot allocate memory", "Resource temporarily unavailable"):
            with pytest.raises(nnfmq.ResourceExhaustedTransient, match=f"no worker could be started: {reason}"):
                daemon.connect()
        until(lambda: daemon.process.descriptors() == before, "nothing is left of the rejected clients")
        with daemon.connect() as client:
            assert executes(client)


def test_SIGTERM_ends_a_daemon_with_silent_connections_and_a_stopped_worker(folder: Path) -> None:
    with (
        running_daemon(folder / "d.sock", environment={"NNFMQ_DRAIN_S": "0.1"}) as daemon,
        silent(daemon.path, 20),
        daemon.connect() as client,
        Process(client.worker_pid) as worker,
    ):
        worker.stop()
        daemon.process.send(signal.SIGTERM)
        assert daemon.program.wait() == 0
        assert worker.has_exited()


def test_the_supervisor_has_one_thread(daemon: Daemon, client: nnfmq.Client) -> None:
    assert executes(client)
    assert len(daemon.process.states()) == 1


def test_text_of_a_client_in_the_log_is_escaped(tmp_path: Path) -> None:
    with running_daemon(tmp_path / "d.sock") as daemon:
        with daemon.connect() as client:
            worker = client.worker_pid
            goodbye = {"type": "Goodbye", "a\nnnfmq: forged line\x1b[31m": 1}
            client.connection._channel.send(msgspec.msgpack.encode(goodbye), (), time.monotonic_ns() + 10**9)
            until(lambda: not Path(f"/proc/{worker}").exists(), "the worker has exited")
        lines = [line for line in daemon.program.errors().splitlines() if "forged" in line]
        assert len(lines) == 1
        assert lines[0].isprintable() and r"a\nnnfmq: forged line\x1b[31m" in lines[0]
