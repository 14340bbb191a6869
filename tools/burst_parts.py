"""Measure what each end of a burst adds to an execution, alone and on one CPU: ns per call, the shortest and the tenth.

The client's calls find their reply in the ring, because its worker is stopped and the tool puts it there; the worker's
part runs in this process, with a request in its ring. So nothing waits, and no cache line moves between CPUs; what a
round trip takes beyond the sum of both is `queue_bench.py --rows round-trip`.

    python tools/burst_parts.py
    python tools/burst_parts.py --calls 2000 --json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
from bench_support import parser_for, positive
from forked_peers import stop_process
from queue_candidates import null_model

import nnfmq
from nnfmq.client.burst.burst import Burst
from nnfmq.driver.execution.burst import BurstServer, CachingBurstExecutor
from nnfmq.driver.execution.prepared_model import BoundExecution, DriverPreparedModel, MappedExecution
from nnfmq.engines.interpreter import prepare
from nnfmq.lab import placement
from nnfmq.observe.statistics_writer import unpublished_burst
from nnfmq.queue import MessageQueue
from nnfmq.serialize.packets import DATUM_BYTES, RequestPacket

Times = dict[str, tuple[int, int]]
"""Name of a part → the shortest call and the tenth of all calls, in ns."""
WINDOW_NS, RECORDS = 1_000_000, 64


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status."""
    parser = parser_for(__doc__)
    parser.add_argument("--calls", type=positive, default=20_000, help="of each part (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options: argparse.Namespace = parser.parse_args(argv)
    times = measure(options.calls)
    if options.json:
        print(json.dumps(times))
    else:
        print("\n".join(f"{name:36}{least:7,}{tenth:7,}" for name, (least, tenth) in times.items()))
    return 0


def measure(calls: int) -> Times:
    """Return the times of all parts. Pins this process to one CPU meanwhile."""
    placement.pin_process(0, min(placement.ALLOWED))
    try:
        clock_ns, _ = _times(lambda: None, lambda: None, calls)
        times, packet, reply = client_times(calls)
        times |= worker_times(calls, packet, reply)
    finally:
        placement.pin_process(0, None)
    return {name: (least - clock_ns, tenth - clock_ns) for name, (least, tenth) in times.items()}


def _times(call: Callable[[], object], prepare_call: Callable[[], object], calls: int) -> tuple[int, int]:
    found = []
    for _ in range(calls):
        prepare_call()
        begin_ns = time.perf_counter_ns()
        call()
        found.append(time.perf_counter_ns() - begin_ns)
    found.sort()
    return found[0], found[calls // 10]


def client_times(calls: int) -> tuple[Times, bytes, bytes]:
    """Return the times of the client's calls, and the packets of a request and its reply."""
    array = np.ones(1, np.float32)
    with (
        nnfmq.connect(embedded=True, recover=False) as client,
        client.device("reference").prepare(null_model()) as model,
        model.burst() as burst,
    ):
        for _ in range(2):
            burst.execute(array)
        assert isinstance(burst, Burst) and burst._arrays is not None
        request, requests, results = burst._arrays.prepared[0], burst.channel.requests, burst.channel.results
        packet, reply, execute, outputs = request.packet, request.valid_reply, burst.execute, burst.outputs

        def answer() -> None:
            requests.drain()
            assert results.write(reply)

        try:
            stop_process(client.worker_pid)
            times = {
                "client: execute(out=outputs)": _times(lambda: execute(out=outputs), answer, calls),
                "client: execute(array)": _times(lambda: execute(array), answer, calls),
                "client: ..., out=outputs, timeout": _times(lambda: execute(out=outputs, timeout=60), answer, calls),
                "client: send": _times(lambda: requests.send(packet), requests.drain, calls),
                "client: count it": _times(lambda: burst.channel.count(2500, 2000), lambda: None, calls),
                "client: receive": _times(lambda: results.receive(None, WINDOW_NS), answer, calls),
            }
            requests.drain()
        finally:
            os.kill(client.worker_pid, signal.SIGCONT)
    return times, packet, reply


class _NullExecutor(CachingBurstExecutor):
    """Binds every request to the same execution of the null model."""

    def __init__(self, execution: BoundExecution) -> None:
        super().__init__(DriverPreparedModel(null_model(), prepare(null_model())))
        self._execution = execution

    def unknown_slots(self, slots: Sequence[int]) -> list[int]:
        return []

    def bind(self, request: RequestPacket) -> tuple[int, BoundExecution]:
        return self.version, self._execution


Worker = tuple[BurstServer, MessageQueue, MessageQueue, MappedExecution, np.ndarray[Any, Any]]


@contextmanager
def answering_worker() -> Iterator[Worker]:
    """Yield a burst's server, whose listener thread does not run, its queues, its execution, and the output of that."""
    source, sink = np.ones(1, np.float32), np.zeros(1, np.float32)
    program = prepare(null_model()).bind((source,), (sink,))
    execution = MappedExecution(program, memoryview(bytearray(1)))
    with (
        closing(MessageQueue.create(DATUM_BYTES, RECORDS)) as requests,
        closing(MessageQueue.create(DATUM_BYTES, RECORDS)) as results,
    ):
        server = BurstServer(
            lambda _: [], requests, results, _NullExecutor(execution), WINDOW_NS, None, unpublished_burst()
        )
        with closing(server._stats), closing(server._deadline), closing(server._responder):
            yield server, requests, results, execution, sink


def worker_times(calls: int, packet: bytes, reply: bytes) -> Times:
    """Return the times of what a worker does for a request that equals the last one, and of parts of it."""
    with answering_worker() as (server, requests, results, execution, _):

        def ask() -> None:
            results.drain()
            assert requests.send(packet)

        with np.errstate(all="ignore"):
            return {
                "worker: from receive to the next": _times(server._receive_and_handle, ask, calls),
                "worker: run": _times(execution.run, lambda: None, calls),
                "worker: run of the program": _times(execution._program.run, lambda: None, calls),
                "worker: send": _times(lambda: results.send(reply), results.drain, calls),
            }


if __name__ == "__main__":
    sys.exit(main())
