"""`nnfmq queue bench`: measure round trips and throughput between two processes over temporary named queues.

The second process echoes the round trips, then reads the stream and replies with its last message. Every wait has a
deadline, so that a process exits soon after its peer is killed. The report includes the conditions, without which the
times mean little.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from nnfmq.cli.console import console, microseconds, print_json, progress_bar, table
from nnfmq.hal.errors import DeadObject, MissedDeadlineTransient
from nnfmq.queue import MessageQueue, PollingWindow, create_named, open_named, remove_named

_COUNT = 256
_WARM_UP = 500
_TRIPS_BETWEEN_REDRAWS = 2000
_LIMIT_NS = 10 * 10**9


def bench(arguments: argparse.Namespace) -> int:
    """Create the two queues, measure, print, remove the queues; return the exit status."""
    from nnfmq.lab.statistics import distribution  # imports NumPy, which the second process does not need

    name = arguments.name or f"/nnfmq-bench-{os.getpid()}"
    window_ns = PollingWindow.controller(arguments.window).ns
    conditions = _conditions(arguments, window_ns)  # before this process gives up CPUs
    with ExitStack() as stack:
        requests, results = (
            stack.enter_context(_temporary(f"{name}-{which}", arguments.record_bytes))
            for which in ("requests", "results")
        )
        own_cpu, peer_cpu = stack.enter_context(_placed(arguments.placement))
        stack.enter_context(_peer(name, arguments, window_ns, peer_cpu))
        with progress_bar("round trips", arguments.no_color) as progress:
            latencies_ns = _round_trips(requests, results, arguments.round_trips, window_ns, progress)
        with progress_bar("streaming", arguments.no_color, delay_s=0.0) as progress:
            if progress is not None:
                progress(0, arguments.messages)  # before the clock starts; a redraw would slow the stream
            stream_ns = _stream(requests, results, arguments.messages, window_ns)
    report = {
        "conditions": conditions | {"cpus": [own_cpu, peer_cpu]},
        "round_trip_ns": distribution(latencies_ns),
        "messages_per_s": round(arguments.messages * 1e9 / stream_ns),
    }
    if arguments.json:
        print_json(report)
    else:
        _show(report, arguments.no_color)
    return 0


@contextmanager
def _temporary(name: str, record_bytes: int) -> Iterator[MessageQueue]:
    queue = create_named(name, record_bytes, _COUNT)
    try:
        with queue:
            yield queue
    finally:
        remove_named(name)


@contextmanager
def _placed(placement: str) -> Iterator[tuple[int | None, int | None]]:
    """Pin this process to a CPU meanwhile; yield its CPU and that of the other process, None for any."""
    allowed = sorted(os.sched_getaffinity(0))
    if placement == "free":
        yield None, None
        return
    own_cpu, peer_cpu = allowed[0], allowed[-1 if placement == "apart" else 0]
    os.sched_setaffinity(0, {own_cpu})
    try:
        yield own_cpu, peer_cpu
    finally:
        os.sched_setaffinity(0, allowed)


@contextmanager
def _peer(name: str, arguments: argparse.Namespace, window_ns: int, cpu: int | None) -> Iterator[None]:
    """Run the other process until the context exits.

    Raises:
        DeadObject: If the process does not start.
    """
    from nnfmq.lab.child_processes import BenchmarkFailed, started_child

    trips = _WARM_UP + arguments.round_trips + _untimed(arguments.round_trips)
    with started_child(_serve, name, trips, arguments.messages, window_ns, cpu, name="queue bench") as process:
        try:
            process.receive(_LIMIT_NS / 1e9)
        except BenchmarkFailed as error:
            raise DeadObject(f"the second process of the benchmark exited before it was ready: {error}") from None
        yield
        process.kill()  # it has exited by now, or it hangs


def _untimed(count: int) -> int:
    """Return the number of round trips that follow a progress report and are not timed: the peer may have slept."""
    return count // _TRIPS_BETWEEN_REDRAWS


def _round_trips(
    requests: MessageQueue,
    results: MessageQueue,
    count: int,
    window_ns: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[int]:
    """Return the times of `count` round trips in ns, after a warm-up."""
    payload = os.urandom(requests.quantum)
    for _ in range(_WARM_UP):
        _round_trip(requests, results, payload, window_ns)
    times = []
    for done in range(1, count + 1):
        times.append(_round_trip(requests, results, payload, window_ns))
        if done % _TRIPS_BETWEEN_REDRAWS == 0:
            if progress is not None:
                progress(done, count)
            _round_trip(requests, results, payload, window_ns)
    return times


def _round_trip(requests: MessageQueue, results: MessageQueue, payload: bytes, window_ns: int) -> int:
    """Return the time of one round trip in ns."""
    begin = time.monotonic_ns()
    requests.send(payload)
    reply = results.receive(begin + _LIMIT_NS, window_ns)
    elapsed = time.monotonic_ns() - begin
    _check(reply, payload)
    return elapsed


def _stream(requests: MessageQueue, results: MessageQueue, count: int, window_ns: int) -> int:
    """Return the time in ns from sending the first of `count` messages to the reply to the last."""
    payload = os.urandom(requests.quantum)
    begin = time.monotonic_ns()
    for _ in range(count):
        # Reads the clock once per full ring, not per message.
        if not requests.send(payload) and not requests.write_blocking(payload, time.monotonic_ns() + _LIMIT_NS):
            _check(None, payload)
    _check(results.receive(time.monotonic_ns() + _LIMIT_NS, window_ns), payload)
    return time.monotonic_ns() - begin


def _check(reply: bytes | None, expected: bytes) -> None:
    if reply is None:
        raise MissedDeadlineTransient(f"the second process did not reply within {_LIMIT_NS / 1e9:g} s")
    if reply != expected:
        raise DeadObject("unexpected reply: another program uses these queues")


def _conditions(arguments: argparse.Namespace, window_ns: int) -> dict[str, Any]:
    from nnfmq.lab.conditions import machine  # which the second process does not need

    return machine() | {
        "record_bytes": arguments.record_bytes,
        "round_trips": arguments.round_trips,
        "messages": arguments.messages,
        "window_us": window_ns / 1000,
        "placement": arguments.placement,
    }


def _show(report: dict[str, Any], no_color: bool) -> None:
    from nnfmq.lab.statistics import heading_of

    screen = console(no_color)
    times = table("round trip, µs", *(f">{heading_of(name)}" for name in report["round_trip_ns"]))
    times.add_row("", *map(microseconds, report["round_trip_ns"].values()))
    screen.print(times)
    screen.print(f"Stream: {report['messages_per_s']:,} messages per second.")
    conditions = report["conditions"]
    cpus = "any CPUs" if conditions["placement"] == "free" else "CPUs {} and {}".format(*conditions["cpus"])
    screen.print(
        f"{conditions['core']} core, {conditions['record_bytes']} bytes, window {conditions['window_us']:g} µs, "
        f"{cpus}; {conditions['round_trips']:,} round trips, {conditions['messages']:,} messages"
    )


# ---- the other process ----


def _serve(connection: Any, name: str, round_trips: int, messages: int, window_ns: int, cpu: int | None) -> None:
    """Echo the round trips, then read the stream and reply with its last message."""
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    with open_named(f"{name}-requests") as requests, open_named(f"{name}-results") as results:
        connection.send("ready")
        for _ in range(round_trips):
            packet = requests.receive(time.monotonic_ns() + _LIMIT_NS, window_ns)
            if packet is None:
                return
            results.send(packet)
        last = b""
        while messages > 0:
            packet = requests.receive(time.monotonic_ns() + _LIMIT_NS, window_ns)
            if packet is None:
                return
            messages -= len(packet) // requests.quantum
            last = packet[-requests.quantum :]
        results.send(last)
