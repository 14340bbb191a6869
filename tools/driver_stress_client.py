"""Client process of `driver_stress`: threads that connect, prepare, execute, create bursts and disconnect at random.

Outputs are compared with NumPy's, and each call has a list of statuses that it may end with.
`python driver_stress_client.py SOCKET SEED SECONDS THREADS` runs for that time and prints a JSON object.
"""

from __future__ import annotations

import json
import random
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import nnfmq
from nnfmq.hal.types import (
    DataLocation,
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    Priority,
    Subgraph,
)

LIMIT_S = 60.0
_FUNCTIONS: dict[OperationType, Callable[[Any, Any], Any]] = {
    OperationType.ADD: lambda a, b: a + b,
    OperationType.MUL: lambda a, b: a * b,
    OperationType.SUB: lambda a, b: a - b,
}
_SIZES = (1, 7, 1000, 50_000)  # elements; the largest does not fit into a socket's buffer


@dataclass
class Tally:
    """One thread's calls by kind, expected statuses by kind and name, and failures."""

    calls: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def binary_model(code: OperationType, count: int) -> Model:
    """Return a model of one operation on two float32 vectors of `count` elements."""
    tensor = OperandType.TENSOR_FLOAT32
    ends = (LifeTime.SUBGRAPH_INPUT, LifeTime.SUBGRAPH_INPUT, LifeTime.SUBGRAPH_OUTPUT)
    vectors = [Operand(tensor, (count,), lifetime=lifetime) for lifetime in ends]
    none = Operand(OperandType.INT32, lifetime=LifeTime.CONSTANT_COPY, location=DataLocation(0, 0, 4))
    operands = (vectors[0], vectors[1], none, vectors[2])
    main = Subgraph(operands, (Operation(code, (0, 1, 2), (3,)),), (0, 1), (3,))
    return Model(main, operand_values=struct.pack("<i", 0))


class StressClient:
    """One thread's connection, prepared models and bursts, and the random choice of its next call."""

    def __init__(self, path: str, seed: int, *, stays_connected: bool = False) -> None:
        self._path = path
        self._stays_connected = stays_connected  # never disconnects before `run` ends
        self._random = random.Random(seed)
        self._numbers = np.random.default_rng(seed)
        self._client: nnfmq.Client | None = None
        self._models: list[tuple[nnfmq.PreparedModel, OperationType, int]] = []
        self._bursts: list[tuple[nnfmq.Burst, OperationType, int]] = []
        self.tally = Tally()

    def call_at_random(self) -> None:
        """Make one random call. A status that is not expected for it is recorded as a failure."""
        if self._client is None:
            self._call_checked("connect", self._connect, (nnfmq.ResourceExhausted,))
        elif not self._models or self._random.random() < 0.05:
            self._call_checked("prepare", self._prepare, (nnfmq.MissedDeadline,))
        else:
            kind, work, expected = self._random.choices(
                (
                    ("execute", self._execute, (nnfmq.MissedDeadline,)),
                    ("burst", self._burst, (nnfmq.MissedDeadline,)),
                    ("configure", self._configure, ()),
                    ("close burst", self._close_burst, ()),
                    ("release", self._release, ()),
                    ("disconnect", self._disconnect, ()),
                ),
                (40, 40, 8, 5, 4, 0 if self._stays_connected else 1),
            )[0]
            self._call_checked(kind, work, expected)

    @property
    def worker_pid(self) -> int:
        """The pid of the worker that serves this connection."""
        assert self._client is not None
        return self._client.worker_pid

    def prepare_concurrently(self, calls: int = 32) -> None:
        """Prepare models concurrently, so that the worker starts all threads that it may have."""
        assert self._client is not None
        device = self._client.device("reference", timeout=LIMIT_S)
        model = binary_model(next(iter(_FUNCTIONS)), _SIZES[0])
        with ThreadPoolExecutor(calls) as pool:
            for prepared in pool.map(lambda _: device.prepare(model, timeout=LIMIT_S), range(calls)):
                prepared.close()

    def release_all(self) -> None:
        """Close all bursts and prepared models, but not the connection."""
        for burst, _, _ in self._bursts:
            with suppress(nnfmq.NnfmqError):
                burst.close()
        for model, _, _ in self._models:
            model.close()
        self._models, self._bursts = [], []

    def _call_checked(self, kind: str, work: Callable[[], None], expected: tuple[type[Exception], ...]) -> None:
        self.tally.calls[kind] += 1
        try:
            work()
        except expected as error:
            self.tally.statuses[f"{kind}: {type(error).__name__}"] += 1
        except nnfmq.NnfmqError as error:
            self.tally.failures.append(f"{kind}: {type(error).__name__}: {error}")
            self._disconnect()

    def _connect(self) -> None:
        self._client = nnfmq.connect(self._path, timeout=LIMIT_S)

    def _prepare(self) -> None:
        assert self._client is not None
        code, count = self._random.choice(list(_FUNCTIONS)), self._random.choice(_SIZES)
        timeout = self._random.choice((LIMIT_S, LIMIT_S, 0.0001))
        priority = self._random.choice(list(Priority))
        device = self._client.device("reference", timeout=LIMIT_S)
        self._models.append(
            (device.prepare(binary_model(code, count), priority=priority, timeout=timeout), code, count)
        )

    def _execute(self) -> None:
        model, code, count = self._random.choice(self._models)
        timeout = self._random.choice((LIMIT_S, LIMIT_S, LIMIT_S, 0.0005))
        self._check("execute", code, count, lambda a, b: model.execute(a, b, timeout=timeout))

    def _burst(self) -> None:
        if not self._bursts:
            self._configure()
        burst, code, count = self._random.choice(self._bursts)
        timeout = self._random.choice((LIMIT_S, LIMIT_S, LIMIT_S, 0.0001))
        for _ in range(self._random.randint(1, 20)):
            self._check("burst", code, count, lambda a, b: burst.execute(a, b, timeout=timeout))

    def _check(self, kind: str, code: OperationType, count: int, execute: Callable[[Any, Any], Any]) -> None:
        a, b = self._numbers.standard_normal((2, count), np.float32)
        (found,) = execute(a, b)
        if not np.array_equal(found, _FUNCTIONS[code](a, b)):
            self.tally.failures.append(f"{kind}: wrong output of {code.name} of {count}")

    def _configure(self) -> None:
        model, code, count = self._random.choice(self._models)
        self._bursts.append((model.burst(timeout=LIMIT_S), code, count))
        if len(self._bursts) > 4:
            self._close_burst()

    def _close_burst(self) -> None:
        if self._bursts:
            self._bursts.pop(self._random.randrange(len(self._bursts)))[0].close()

    def _release(self) -> None:
        self._models.pop(self._random.randrange(len(self._models)))[0].close()  # its bursts stay valid

    def _disconnect(self) -> None:
        self.release_all()
        if self._client is not None:
            self._client.close()
        self._client = None

    def run(self, until: float) -> None:
        """Make random calls until `until` (monotonic clock, seconds), then disconnect."""
        while time.monotonic() < until:
            self.call_at_random()
        self._disconnect()


def main() -> None:
    """Run the threads and print their tallies added up."""
    path, seed, seconds, threads = sys.argv[1], *map(int, sys.argv[2:5])
    until = time.monotonic() + seconds
    clients = [StressClient(path, seed * 1000 + number) for number in range(threads)]
    running = [threading.Thread(target=client.run, args=(until,)) for client in clients]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    tallies = [client.tally for client in clients]
    calls = sum((tally.calls for tally in tallies), Counter())
    statuses = sum((tally.statuses for tally in tallies), Counter())
    print(
        json.dumps({"calls": calls, "statuses": statuses, "failures": [w for tally in tallies for w in tally.failures]})
    )


if __name__ == "__main__":
    main()
