"""The memory of a trace ring: where its parts are, what a record means, and the names that every ring begins with.

    bytes      part
    0-7        MAGIC
    8-15       cursor: how many records were written since the ring was made
    16-23      size of the names in bytes
    24-31      pid of the writer
    32-127     label of the writer, UTF-8, filled up with zeros
    128-32767  names: u16 length and UTF-8 of each; the first has the id 1
    32768-     records of 32 bytes: begin and end (CLOCK_MONOTONIC ns), request, name id, thread id

A record is a slice: what a thread did from begin to end. Record n is at place n modulo the ring's capacity, so a full
ring keeps the last records. A name is AOSP's tag and a detail, as `[NN_LD_PE]request`. Integers are little-endian.

A request id joins the slices of one request in client and driver: pid of the worker (22 bits), burst id (18 bits; 0 for
a call of the control channel), number of the packet, or id of the call (24 bits). 0 stands for no request.

The reader takes nothing for granted: sizes come from the memory's size, and every length is checked.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "BURST_OF",
    "CURSOR",
    "HEADER_BYTES",
    "LABEL",
    "LABEL_BYTES",
    "MAGIC",
    "NAMES",
    "NAMES_SIZE",
    "PAUSED",
    "PID",
    "RAN",
    "RECORD",
    "RECORDS",
    "RECORD_BYTES",
    "RING_BYTES",
    "SAMPLE_PERIOD_NS",
    "SLOW_NS",
    "STANDARD_NAMES",
    "TURN",
    "WAITED",
    "WAKE_UP",
    "burst_of",
    "capacity_of",
    "packet_of",
    "request_base",
    "ring_bytes",
    "worker_of",
]

MAGIC: Final = b"nnfmqtr1"
CURSOR: Final = 8
NAMES_SIZE: Final = 16
PID: Final = 24
LABEL: Final = 32
LABEL_BYTES: Final = 96
NAMES: Final = 128
HEADER_BYTES: Final = 32768
RECORDS: Final = HEADER_BYTES  # where the records begin
RECORD: Final = "<QQQII"
RECORD_BYTES: Final = 32
RING_BYTES: Final = HEADER_BYTES + (RECORD_BYTES << 16)
"""Size of a ring unless something else is asked for: the last 65536 slices."""

STANDARD_NAMES: Final = (
    "[NN_LD_PE]request",
    "[NN_LD_PIO]decode",
    "[NN_LC_PE]engine",
    "[NN_LR_PE]execute",
    "[NN_LR_PIO]write",
    "[NN_LI_PE]wait",
    "[NN_LR_PR]read",
    "[NN_LD_PIO]bind",
    "waited for a CPU",
    "ran on a CPU",
    "[NN_LI_PE]wake-up",
)
"""The names with the ids 1 to 11, which are written without looking them up."""

WAITED: Final = STANDARD_NAMES[8]
"""Not a slice: from `begin` to `end` the thread was runnable and had no CPU for `request` ns (schedstat)."""
RAN: Final = STANDARD_NAMES[9]
"""Not a slice: from `begin` to `end` the thread ran for `request` ns. It follows WAITED of the same times."""

WAKE_UP: Final = STANDARD_NAMES[10]
"""From when the client sent a request, as it says itself, until the driver had it: if only the driver is traced."""
TURN: Final = "[NN_LD_PE]turn"
"""The execution waited for its turn at the cores: others with deadlines, or of other users, were first."""
PAUSED: Final = "[NN_LC_PE]paused"
"""The engine paused, because workers of clients of a higher class used the cores."""

BURST_OF: Final = "burst of "
"""How the name of a slice begins whose request is a burst, with the number 0. Then it has the name of its model."""

SLOW_NS: Final = 1_000_000
SAMPLE_PERIOD_NS: Final = 10_000_000
"""A thread's schedstat is read after a request that took SLOW_NS, and otherwise once in this time: it costs 10 µs."""


def ring_bytes(records: int) -> int:
    """Return the size of a ring for `records` records."""
    return HEADER_BYTES + RECORD_BYTES * records


def capacity_of(size_bytes: int) -> int:
    """Return how many records a ring of `size_bytes` has.

    Raises:
        ValueError: If it has none.
    """
    capacity = (size_bytes - HEADER_BYTES) // RECORD_BYTES
    if capacity < 1:
        raise ValueError(f"a trace ring of {size_bytes} bytes; it needs at least {ring_bytes(1)}")
    return capacity


def request_base(worker_pid: int, burst: int = 0) -> int:
    """Return the id of a request with the number 0; the number is added modulo 2**24."""
    return (worker_pid % (1 << 22)) << 42 | (burst % (1 << 18)) << 24


def worker_of(request: int) -> int:
    """Return the pid of a request's worker, modulo 2**22."""
    return request >> 42


def burst_of(request: int) -> int:
    """Return the id of a request's burst, modulo 2**18; 0 for a call of the control channel."""
    return request >> 24 & (1 << 18) - 1


def packet_of(request: int) -> int:
    """Return the number of a request's packet, or the id of the call, modulo 2**24."""
    return request & (1 << 24) - 1
