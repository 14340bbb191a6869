"""The cost of encoding and decoding packets: `tools/codec_bench.py [--json] [--batches N] [--round-trips N]`.

Measures every codec that is built here, in ns per call. The request has 20 records: two inputs and one output of
rank 4, and three pools. The result has 7 records. `samples` returns one value for each batch of calls, so that the
median ignores the batches that another process disturbed. The cost of the loop itself is measured before each batch
and subtracted.

With --round-trips, also measures executions of the null model over an embedded driver, on the selected core, with
bursts that use one memory, or two or eight memories in turn. If the memories alternate, every request differs from the
one before, so that the driver has to decode it and bind it again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import ModuleType

from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.types import DataLocation, OutputShape, Pool, RequestArgument
from nnfmq.serialize import codec as codecs

RECORDS = 20
BATCHES, CALLS = 60, 500  # a batch is shorter than a time slice of the scheduler
MEMORIES = (1, 2, 8)

Samples = dict[str, list[float]]
"""Operation → ns per call, one value for each batch."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every codec, print the results, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON: codec, operation, ns per call of each batch")
    parser.add_argument("--batches", type=int, default=BATCHES, help=f"of {CALLS} calls each (default: {BATCHES})")
    parser.add_argument("--round-trips", type=int, default=0, metavar="N", help="executions per burst (default: none)")
    arguments = parser.parse_args(argv)
    report = {name: samples(codecs.load(name), arguments.batches) for name in codecs.available()}
    if arguments.round_trips:
        report["round trips"] = {f"{count} memories": round_trips(count, arguments.round_trips) for count in MEMORIES}
    if arguments.json:
        print(json.dumps(report))
    else:
        print(f"request of {RECORDS} records, ns per call: median of {arguments.batches} batches of {CALLS}, minimum")
        for line in _lines(report):
            print(line)
    return 0


def samples(codec: ModuleType, batches: int = BATCHES, calls: int = CALLS) -> Samples:
    """Return ns per call of each operation of `codec`, a module that `codec.load` returned; takes milliseconds."""
    return {name: list(_measure(call, batches, calls)) for name, call in operations(codec).items()}


def operations(codec: ModuleType) -> dict[str, Callable[[], object]]:
    """Return the measured operations as functions without arguments."""
    arguments = request()
    request_packet = codec.encode_request(*arguments)
    shapes = (OutputShape(_SHAPE),)
    result_packet = codec.encode_result(ErrorStatus.NONE, shapes)
    return {
        "encode request": lambda: codec.encode_request(*arguments),
        "decode request": lambda: codec.decode_request(request_packet),
        "encode result": lambda: codec.encode_result(ErrorStatus.NONE, shapes),
        "decode result": lambda: codec.decode_result(result_packet),
    }


_SHAPE = (1, 224, 224, 3)


def request() -> tuple[tuple[RequestArgument, ...], tuple[RequestArgument, ...], tuple[int, ...]]:
    """Return inputs, outputs and slots of the request: 1 + 3 × 5 + 3 + 1 records."""
    arguments = [RequestArgument(location=DataLocation(pool, 64, 4096), dimensions=_SHAPE) for pool in range(3)]
    return tuple(arguments[:2]), tuple(arguments[2:]), (0, 1, 2)


def round_trips(memory_count: int, count: int) -> list[float]:
    """Return the ns of `count` executions of the null model over a burst that uses so many memories in turn."""
    from latency_client import null_model

    from nnfmq.cli.console import open_client
    from nnfmq.hal.feature_levels import FeatureLevel
    from nnfmq.memory import Memory
    from nnfmq.queue import MessageQueue
    from nnfmq.queue.hybrid_polling import PollingWindow
    from nnfmq.runtime.hidl.iburst_context import configure_burst

    with ExitStack() as stack:
        client = stack.enter_context(open_client("embedded"))
        model: object = stack.enter_context(client.device("reference").prepare(null_model()))
        memories = [stack.enter_context(Memory.create(4096)) for _ in range(memory_count)]
        requests, results = (stack.enter_context(MessageQueue.create(24, 1024)) for _ in range(2))
        status, burst = configure_burst(model, FeatureLevel.V1_3, _Memories(memories), requests, results)  # type: ignore[arg-type]
        assert status is ErrorStatus.NONE and burst is not None
        stack.callback(burst.close)
        inputs, outputs = ((RequestArgument(location=DataLocation(0, at, 4)),) for at in (0, 64))
        slots, window_ns = itertools.cycle(range(memory_count)), PollingWindow.controller().ns
        times = []
        for _ in range(count + memory_count):
            begin_ns = time.perf_counter_ns()
            requests.send(codecs.encode_request(inputs, outputs, (next(slots),)))
            packet = results.receive(None, window_ns)
            assert packet is not None and codecs.decode_result(packet).status is ErrorStatus.NONE
            times.append(float(time.perf_counter_ns() - begin_ns))
        return times[memory_count:]  # without the first use of each memory, which maps it


class _Memories:
    """The burst callback (IBurstCallback): slot n is the n-th memory."""

    def __init__(self, memories: Sequence[Pool]) -> None:
        self._memories = memories

    def getMemories(self, slots: Sequence[int]) -> tuple[ErrorStatus, list[Pool]]:
        return ErrorStatus.NONE, [self._memories[slot] for slot in slots]


def _measure(call: Callable[[], object], batches: int, calls: int) -> Iterator[float]:
    for _ in range(batches):
        yield max(0.0, _batch_ns(call, calls) - _batch_ns(_nothing, calls)) / calls


def _batch_ns(call: Callable[[], object], calls: int) -> int:
    begin_ns = time.perf_counter_ns()
    for _ in itertools.repeat(None, calls):
        call()
    return time.perf_counter_ns() - begin_ns


def _nothing() -> None:
    """An empty call, whose cost is subtracted."""


def _lines(report: dict[str, Samples]) -> Iterator[str]:
    for name, measured in report.items():
        for operation, values in measured.items():
            yield f"{name:11} {operation:16} {statistics.median(values):8.0f} {min(values):8.0f}"


if __name__ == "__main__":
    sys.exit(main())
