"""Messages between `nnfmq bench` and its runner processes: msgpack with a length before it, over two pipes."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from nnfmq.lab.bench.steps import Array

__all__ = [
    "ArrayData",
    "BenchmarkFailed",
    "Load",
    "MessagePipe",
    "Reply",
    "RunnerFailed",
    "RunnerJob",
    "RunnerReady",
    "RunnerUnavailable",
    "Trial",
    "TrialResult",
    "to_messages",
]


# ----------------------------------------------------------------------------------------------------------------------
# Errors of measurements: a runner that cannot run here, and a measurement that has no result.


class RunnerUnavailable(Exception):
    """A runner cannot run on this machine, or cannot execute this model; the message gives the reason."""


class BenchmarkFailed(Exception):
    """A measurement has no result: a child process reported an error, or ended early, or did not become idle."""


# ----------------------------------------------------------------------------------------------------------------------
# Messages between `nnfmq bench` and its runner processes: msgpack with a length before it, over two pipes.


_TICK_S = 0.1
_MAX_BYTES = 1 << 31
_LENGTH_BYTES = 8


class ArrayData(msgspec.Struct):
    """An array: dtype, shape, and elements in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: Array) -> ArrayData:
        """Return the message of an array."""
        return cls(array.dtype.str, array.shape, np.ascontiguousarray(array).tobytes())

    def array(self) -> Array:
        """Return the array."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class RunnerJob(msgspec.Struct, tag=True):
    """The work of a runner: `runner` is an execution mode or the name of a peer.

    `inputs` has one or several sets of inputs, which the requests use in turn. `threads` is the number of computing
    threads; None leaves it to the runtime. `connect` is the socket of a driver, `embedded`, or None for any.
    """

    runner: str
    model: str
    shapes: dict[str | int, tuple[int, ...]]
    signature: str | None
    inputs: list[list[ArrayData]]
    device: str | None
    threads: int | None
    connect: str | None


class Load(msgspec.Struct):
    """The load of one client: requests in a closed loop, or `rate` per second of all `clients` in an open loop."""

    seconds: float
    count: int | None = None
    rate: float | None = None
    distribution: str = "constant"
    seed: int = 0
    client: int = 0
    clients: int = 1


class Trial(msgspec.Struct, tag=True):
    """A request for a load that begins at `begin_ns` of the monotonic clock; with `stages`, executions after it."""

    begin_ns: int
    load: Load
    stages: int = 0


class RunnerReady(msgspec.Struct, tag=True):
    """The first reply: the runner's processes, the name of the device or API variant, and other details."""

    pids: list[int]
    details: dict[str, str | int | float]


class TrialResult(msgspec.Struct, tag=True):
    """The times of a trial's requests in ns, as int64: intended and real start from the begin, and latency.

    `unsent` is the number of requests that were due and not begun. `stages_ns` has the mean of each of `STAGES` over
    the executions after the trial.
    """

    intended: bytes
    started: bytes
    latencies: bytes
    unsent: int
    wall_ns: int
    client_cpu_ns: int
    driver_cpu_ns: int
    stages_ns: list[float]


class RunnerFailed(msgspec.Struct, tag=True):
    """The reason why there is no result; `is_unavailable`: the runner cannot run here."""

    message: str
    is_unavailable: bool = False


Reply: TypeAlias = RunnerReady | TrialResult | RunnerFailed


class MessagePipe:
    """The ends of two pipes: one that is read and one that is written. Borrows both file descriptors."""

    def __init__(self, read_fd: int, write_fd: int, received: Any) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(received)

    def send(self, message: msgspec.Struct) -> None:
        """Write a message; blocks while the pipe is full."""
        data = self._encoder.encode(message)
        _write_all(self._write_fd, len(data).to_bytes(_LENGTH_BYTES, "little") + data)

    def receive(self, timeout_s: float | None = None, tick: Callable[[], object] = lambda: None) -> Any:
        """Return the next message; `tick` is called about ten times a second while there is none.

        Raises:
            EOFError: If the other end is closed.
            BenchmarkFailed: If no message arrives within `timeout_s` (None: no limit), or it is none.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        size = int.from_bytes(self._read(_LENGTH_BYTES, end, tick), "little")
        if size > _MAX_BYTES:
            raise BenchmarkFailed(f"a message of {size} bytes between processes of the benchmark")
        try:
            return self._decoder.decode(self._read(size, end, tick))
        except msgspec.DecodeError as error:
            raise BenchmarkFailed(f"an invalid message between processes of the benchmark: {error}") from error

    def _read(self, size: int, end: float | None, tick: Callable[[], object]) -> bytes:
        data = bytearray()
        while len(data) < size:
            while not select.select([self._read_fd], [], [], _TICK_S)[0]:
                tick()
                if end is not None and time.monotonic() > end:
                    raise BenchmarkFailed("a process of the benchmark did not reply in time")
            part = os.read(self._read_fd, min(size - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def to_messages(sets: Sequence[Sequence[Array]]) -> list[list[ArrayData]]:
    """Return sets of inputs as messages."""
    return [[ArrayData.of(array) for array in arrays] for arrays in sets]
