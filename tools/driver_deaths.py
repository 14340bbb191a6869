"""The time until a process learns that its peer was killed, and what stays behind: nnfmq beside other transports.

In each round a peer of every candidate is killed (SIGKILL) while the other side, the observer, waits for it. The time
is that from just before kill(2) to the moment at which the observer knows it, on one clock; an observer that does not
know it within --wait seconds is counted as *unnoticed*. *CPU* is the part of a core that the observer takes meanwhile.
*left* counts the files in /dev/shm and in iceoryx2's folder that were not there before, when both have ended.

The peer does not reply, so the observer has something to wait for; nnfmq's worker is stopped (SIGSTOP) for that. A bare
queue, libfmq's, has no control socket: nobody tells its reader. iceoryx2 wakes nobody either, so its observers poll: a
pending response, or the list of nodes. A unix socket shows how soon the kernel reports the death of a process, and gRPC
over such a socket what a client of a model server gets.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench_support import (
    Report,
    Table,
    Tables,
    has_exited,
    missed_targets,
    opened_pidfd,
    positive,
    targets_table,
    upper_limit,
)
from forked_peers import forked, iceoryx2_service, stop_process
from queue_candidates import null_model

import nnfmq
from nnfmq.base.packages import installed_version
from nnfmq.lab.child_processes import BenchmarkFailed, call_in_child, set_time_limit, started_child
from nnfmq.lab.listening_driver import started_daemon
from nnfmq.queue import MessageQueue

LIMIT_MS = 20.0
_START_S = 60.0
_PEER_S = 600
_THINK_S = 0.02  # at most, from the beginning of the waiting to the kill
_FILES = (Path("/dev/shm"), Path("/tmp/iceoryx2"))
Wait = Callable[[float], bool]
"""Waits until its process knows that the peer is dead, or until a time of the monotonic clock; returns which."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--rounds", type=positive, default=20, help="deaths of each peer (default: 20)")
    parser.add_argument("--wait", type=float, default=2.0, metavar="S", help="for the notice of a death (default: 2)")
    parser.add_argument("--quick", action="store_true", help="1 round, 0.2 s, without iceoryx2 and gRPC: for tests")
    parser.add_argument(
        "--limit", type=positive, default=600, metavar="S", help="time limit of each process in seconds"
    )


# ----------------------------------------------------------------------------------------------------------------------
# The observer and its peer


def observe(connection: Connection, candidate: str, address: str, limit_s: int) -> None:
    """Send the pid of a peer, and wait for its death until the time that the parent sends. Entry point.

    Then send the time of the notice, in ns of the monotonic clock, or None, and the part of a core that waiting took.
    """
    set_time_limit(limit_s)
    with ExitStack() as stack:
        pid, wait = CANDIDATES[candidate](stack, address)
        connection.send(pid)
        end = connection.recv()
        begin, cpu_ns = time.monotonic_ns(), time.thread_time_ns()
        connection.send(None)
        is_noticed = wait(end)
        now = time.monotonic_ns()
        connection.send((now if is_noticed else None, (time.thread_time_ns() - cpu_ns) / (now - begin)))


def _peer(stack: ExitStack, serve: Callable[[], object]) -> int:
    """Fork a peer that calls `serve`, keeps what that returns, and does nothing; return its pid as soon as it does."""

    def wait_for_death(ready: Callable[[], None], _: Connection) -> None:
        kept = serve()  # noqa: F841  what it has created lives as long as the process
        ready()
        signal.pause()

    process, _ = stack.enter_context(forked("the peer", wait_for_death, _PEER_S))
    return int(process.pid)


def _waiting_call(stack: ExitStack, address: str) -> tuple[int, Wait]:
    """A client executes over a burst; the peer is its worker."""
    client = stack.enter_context(nnfmq.connect(address, timeout=_START_S, recover=False))
    model = stack.enter_context(client.device("reference").prepare(null_model()))
    burst = stack.enter_context(model.burst())
    burst.execute([1.0])
    worker = client.worker_pid
    stop_process(worker)

    def wait(end: float) -> bool:
        try:
            burst.execute([1.0], timeout=end - time.monotonic())
        except nnfmq.DeadObject:
            return True
        except nnfmq.MissedDeadline:
            return False
        raise BenchmarkFailed("a stopped worker has replied")

    return worker, wait


def _idle_worker(stack: ExitStack, address: str) -> tuple[int, Wait]:
    """A worker serves a client, which is the peer; the worker knows the death when it has exited."""

    def serve(ready: Callable[[], None], connection: Connection) -> None:
        client = nnfmq.connect(address, timeout=_START_S, recover=False)
        ready()
        connection.send(client.worker_pid)
        signal.pause()

    peer, connection = stack.enter_context(forked("the peer", serve, _PEER_S))
    worker = stack.enter_context(opened_pidfd(connection.recv()))
    return peer.pid, lambda end: has_exited(worker, end - time.monotonic())


def _unix_socket(stack: ExitStack, address: str) -> tuple[int, Wait]:
    own, peer = socket.socketpair()
    pid = _peer(stack, own.close)
    peer.close()
    stack.enter_context(own)

    def wait(end: float) -> bool:
        own.settimeout(end - time.monotonic())
        try:
            return own.recv(1) == b""
        except TimeoutError:
            return False

    return pid, wait


def _bare_queue(stack: ExitStack, address: str) -> tuple[int, Wait]:
    queue = stack.enter_context(MessageQueue.create(8, 8))
    pid = _peer(stack, lambda: None)

    def wait(end: float) -> bool:
        queue.read_blocking(1, round(end * 1e9))
        return False  # without a control socket only its deadline ends the call

    return pid, wait


def _grpc_call(stack: ExitStack, address: str) -> tuple[int, Wait]:
    path = f"unix:{address}.{os.getpid()}"
    pid = _peer(stack, lambda: _served(path))
    import grpc  # after the fork, because it starts threads

    channel = stack.enter_context(grpc.insecure_channel(path))
    call = channel.unary_unary("/never/replies")

    def wait(end: float) -> bool:
        try:
            call(b"", timeout=end - time.monotonic())
        except grpc.RpcError as error:
            return bool(error.code() is grpc.StatusCode.UNAVAILABLE)
        raise BenchmarkFailed("a server that never replies has replied")

    return pid, wait


def _served(path: str) -> object:
    """Return a server of gRPC at a path, whose calls never return."""
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    class NeverReplies(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
        def service(self, handler_call_details: object) -> object:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: threading.Event().wait())

    server = grpc.server(ThreadPoolExecutor(1), handlers=[NeverReplies()])
    server.add_insecure_port(path)
    server.start()
    return server


def _remove_dead_nodes() -> None:
    """Remove the files that dead nodes of iceoryx2 have left: whoever creates a node does that."""
    iceoryx2_service(f"nnfmq-deaths-{os.getpid()}")


def _iceoryx_service(name: str) -> tuple[Any, Any]:
    """Return a node of iceoryx2, and its service of requests and responses."""
    import ctypes

    node, builder = iceoryx2_service(name)
    return node, builder.request_response(ctypes.c_uint64, ctypes.c_uint64).open_or_create()


def _iceoryx_server(name: str) -> object:
    node, service = _iceoryx_service(name)
    return node, service, service.server_builder().create()


def _iceoryx_response(stack: ExitStack, address: str) -> tuple[int, Wait]:
    """A client waits for a response of iceoryx2, and looks whether the server is connected."""
    import ctypes

    name = f"nnfmq-deaths-{os.getpid()}"
    pid = _peer(stack, lambda: _iceoryx_server(name))
    kept = _iceoryx_service(name)
    client = kept[1].client_builder().create()
    pending = client.send_copy(ctypes.c_uint64(0))

    def wait(end: float) -> bool:
        while kept and pending.is_connected:
            if time.monotonic() > end:
                return False
        return True

    return pid, wait


def _iceoryx_nodes(stack: ExitStack, address: str) -> tuple[int, Wait]:
    """A process looks at the list of iceoryx2's nodes."""
    import iceoryx2

    pid = _peer(stack, lambda: _iceoryx_server(f"nnfmq-deaths-{os.getpid()}"))
    iceoryx2.set_log_level(iceoryx2.LogLevel.Fatal)
    config = iceoryx2.config.global_config()

    def wait(end: float) -> bool:
        while time.monotonic() < end:
            if any(
                isinstance(state, iceoryx2.NodeState.Dead)
                for state in iceoryx2.Node.list(iceoryx2.ServiceType.Ipc, config)
            ):
                return True
        return False

    return pid, wait


CANDIDATES: Mapping[str, Callable[[ExitStack, str], tuple[int, Wait]]] = MappingProxyType({
    "nnfmq: a client in a burst, its worker killed": _waiting_call,
    "nnfmq: a worker, its client killed": _idle_worker,
    "a unix socket": _unix_socket,
    "gRPC over a unix socket: a call": _grpc_call,
    "a bare queue": _bare_queue,
    "iceoryx2: a pending response, polled": _iceoryx_response,
    "iceoryx2: the list of nodes, polled": _iceoryx_nodes,
})  # fmt: skip
"""What waits → a function that connects it to a new peer, and returns that one's pid, and how to wait for its death."""
_NEEDED = {"gRPC": "grpcio", "iceoryx2": "iceoryx2"}


# ----------------------------------------------------------------------------------------------------------------------
# Measuring


def measure(options: argparse.Namespace, folder: Path) -> Report:
    """Return the report, as --json prints it. `folder` is for the driver's files.

    Raises:
        BenchmarkFailed: If a peer or an observer fails.
    """
    if options.quick:
        options.rounds, options.wait = 1, 0.2
    skipped = [name for name, package in _NEEDED.items() if options.quick or installed_version(package) is None]
    candidates = [candidate for candidate in CANDIDATES if not candidate.startswith(tuple(skipped))]
    deaths: dict[str, list[Report]] = {candidate: [] for candidate in candidates}
    with ExitStack() as stack:
        if any(candidate.startswith("iceoryx2") for candidate in candidates):
            stack.callback(call_in_child, _remove_dead_nodes)
        daemon = stack.enter_context(started_daemon(folder))
        for number in range(options.rounds):
            shift = number % len(candidates)
            for candidate in candidates[shift:] + candidates[:shift]:
                deaths[candidate].append(_death(candidate, daemon.socket, options))
    targets = [_target(candidate, found) for candidate, found in deaths.items() if candidate.startswith("nnfmq")]
    conditions = {"rounds": options.rounds, "wait_s": options.wait}
    return {"conditions": conditions, "deaths": deaths, "targets": targets, "missed": missed_targets(targets)}


def _death(candidate: str, address: str, options: argparse.Namespace) -> Report:
    before = _files()
    with started_child(observe, candidate, address, options.limit, name=candidate) as observer:
        peer = observer.receive(_START_S)
        observer.send(time.monotonic() + _THINK_S + options.wait)
        observer.receive(_START_S)
        time.sleep(random.uniform(_THINK_S / 2, _THINK_S))
        begin = time.monotonic_ns()
        os.kill(peer, signal.SIGKILL)
        noticed, cpu = observer.receive(_START_S + options.wait)
    return {
        "notice_ms": None if noticed is None else (noticed - begin) / 1e6, "cpu": cpu, "left": len(_files() - before),
    }  # fmt: skip


def _files() -> set[Path]:
    return {path for folder in _FILES for path in folder.rglob("*") if path.is_file()}


def _times(deaths: list[Report]) -> list[float]:
    return sorted(death["notice_ms"] for death in deaths if death["notice_ms"] is not None)


def _target(candidate: str, deaths: list[Report]) -> Report:
    times = _times(deaths)
    worst = max(times) if len(times) == len(deaths) else float("inf")
    return upper_limit(f"{candidate}: latest notice", [worst], worst, LIMIT_MS, "ms")


def tables(report: Report) -> Tables:
    """Return the targets, and the times of the notices."""
    rows = []
    for candidate, deaths in report["deaths"].items():
        times = _times(deaths)
        cells = ["–"] * 3  # a hyphen begins a list in Markdown
        if times:
            cells = [f"{value:.2f}" for value in (min(times), statistics.median(times), max(times))]
        cpu = statistics.median(death["cpu"] for death in deaths)
        rows.append(
            [
                candidate,
                *cells,
                str(len(deaths) - len(times)),
                f"{cpu:.2f}",
                str(sum(death["left"] for death in deaths)),
            ]
        )
    headings = ("what waits", ">least, ms", ">median, ms", ">latest, ms", ">unnoticed", ">CPU", ">left")
    return {"targets": targets_table(report["targets"]), "notices": Table("notices", headings, rows)}
