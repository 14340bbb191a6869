"""The messages between the runner of crash tests and a client process: lines of JSON.

The runner sends one task on stdin and keeps stdin open: a client exits when it is closed. The client replies with
messages on stdout. A client that was told to kill itself announces it, so that its death is not taken for a crash.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from nnfmq.mlts.crash_list import GraphSize, Workload

LINE_BYTES_MAX = 1 << 20
"""The longest message; a client that sends a longer one has failed."""


class ClientTask(msgspec.Struct, frozen=True):
    """The task of a client process.

    Attributes:
        connect_to: The driver's socket.
        device: The device's name; "" for any.
        workload: What to do.
        seconds: For how long.
        threads: The number of threads.
        models: Names of models, as in `stress_models`.
        pause_s: The least and the longest pause of a thread.
        graphs: The size of random graphs.
        seed: The first seed of random graphs.
        kill_after_s: When to kill itself; None: never.
        dump_to: The folder for random graphs that fail.
        compiles_fully: Whether a preparation waits for the compiler.
    """

    connect_to: str
    device: str
    workload: Workload
    seconds: float
    threads: int = 1
    models: tuple[str, ...] = ()
    pause_s: tuple[float, float] = (0.0, 0.0)
    graphs: GraphSize | None = None
    seed: int = 0
    kill_after_s: float | None = None
    dump_to: str = ""
    compiles_fully: bool = False


class ClientState(StrEnum):
    """The kind of a client's message."""

    READY = "ready"  # connected; `worker_pid` serves it
    SUCCESS = "success"
    FAILURE = "failure"
    DRIVER_DIED = "driver died"  # a call raised DeadObject
    KILLING = "killing"  # the client is about to kill itself


class ClientMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of a client: its state, the reason of a failure, and numbers of steps by outcome."""

    state: ClientState
    reason: str = ""
    worker_pid: int = 0
    codes: dict[str, int] = {}


def encode(message: ClientTask | ClientMessage) -> bytes:
    """Return a message as a line."""
    return msgspec.json.encode(message) + b"\n"


def decode_task(line: bytes) -> ClientTask:
    """Return the task in a line. Raises msgspec.DecodeError."""
    return msgspec.json.decode(line, type=ClientTask)


def decode_message(line: bytes) -> ClientMessage:
    """Return the message in a line. Raises msgspec.DecodeError if a client wrote anything else."""
    return msgspec.json.decode(line, type=ClientMessage)
