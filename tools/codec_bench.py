"""What encoding and decoding a packet costs: `tools/codec_bench.py [--json] [--batches N]`, for each codec built here.

The packet is a request of 20 records: two inputs and one output of rank 4, three pools. `samples` returns, for each of
the five things that an execution can do with it, nanoseconds per call: one value for each batch of calls, so that their
median forgets the batches that something else disturbed. The bytes to decode lie in two objects by turns: a decoder may
compare them, and cannot know them by identity. The cost of the loop itself is measured beside and subtracted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

from nnfmq.hal.types import DataLocation, RequestArgument
from nnfmq.serialize import codec as codecs

RECORDS = 20
BATCHES, CALLS = 60, 500  # a batch is over before another process is likely to come in between

Samples = dict[str, list[float]]
"""What was done → ns per call, one for each batch."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each codec and print; 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON: codec, operation, ns per call for each batch")
    parser.add_argument("--batches", type=int, default=BATCHES, help=f"of {CALLS} calls each (default: {BATCHES})")
    arguments = parser.parse_args(argv)
    report = {name: samples(codecs.load(name), arguments.batches) for name in codecs.available()}
    if arguments.json:
        print(json.dumps(report))
    else:
        print(
            f"packet of {RECORDS} records, ns per call: median of {arguments.batches} batches of {CALLS}, and fastest"
        )
        for line in _lines(report):
            print(line)
    return 0


def samples(codec: ModuleType, batches: int = BATCHES, calls: int = CALLS) -> Samples:
    """Return ns per call of each operation with `codec`, a module that `codec.load` returned; takes milliseconds.

    `encode` and `decode` begin from nothing. `repeated encode` takes the unchanged packet of a template, `patched
    encode` gives one input another location first, and `repeated decode` is a Decoder that gets equal bytes again.
    """
    return {name: list(_measure(call, batches, calls)) for name, call in operations(codec).items()}


def operations(codec: ModuleType) -> dict[str, Callable[[], object]]:
    """Return what is measured, each as a call without arguments."""
    inputs, outputs, slots = request()
    template = codec.RequestTemplate(inputs, outputs, slots)
    packet = codec.encode_request(inputs, outputs, slots)
    again = itertools.cycle((packet, bytes(bytearray(packet)))).__next__
    elsewhere = itertools.cycle((inputs[1], RequestArgument(location=DataLocation(1, 8192, 4096), dimensions=_SHAPE)))
    decoder = codec.Decoder(codec.decode_request)

    def patched() -> object:
        template.set_input(1, next(elsewhere))
        return template.packet

    return {
        "encode": lambda: codec.encode_request(inputs, outputs, slots),
        "decode": lambda: codec.decode_request(again()),
        "repeated encode": lambda: template.packet,
        "patched encode": patched,
        "repeated decode": lambda: decoder.decode(again()),
    }


_SHAPE = (1, 224, 224, 3)


def request() -> tuple[tuple[RequestArgument, ...], tuple[RequestArgument, ...], tuple[int, ...]]:
    """Return inputs, outputs and slots of the packet: information, 3 arguments of 5 records, 3 pools, measure."""
    places = [RequestArgument(location=DataLocation(pool, 64, 4096), dimensions=_SHAPE) for pool in range(3)]
    return tuple(places[:2]), tuple(places[2:]), (0, 1, 2)


def _measure(call: Callable[[], object], batches: int, calls: int) -> Iterator[float]:
    for _ in range(batches):
        yield max(0.0, _batch_ns(call, calls) - _batch_ns(_nothing, calls)) / calls


def _batch_ns(call: Callable[[], object], calls: int) -> int:
    begin_ns = time.perf_counter_ns()
    for _ in itertools.repeat(None, calls):
        call()
    return time.perf_counter_ns() - begin_ns


def _nothing() -> None:
    """Cost what a call costs that does nothing."""


def _lines(report: dict[str, Samples]) -> Iterator[str]:
    for name, measured in report.items():
        for operation, values in measured.items():
            yield f"{name:9} {operation:16} {statistics.median(values):8.0f} {min(values):8.0f}"


if __name__ == "__main__":
    sys.exit(main())
