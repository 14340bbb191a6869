"""LoadPlan: what `nnfmq bench` measures. Data only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from nnfmq.lab.bench.runner import Load, OwnRunner
from nnfmq.lab.bench.steps import Array
from nnfmq.lab.statistics import REPORTED

__all__ = ["LoadLevel", "LoadPlan"]

ROUNDS = 5  # of several runners: each is measured in as many parts, in turn with the others


class LoadLevel(NamedTuple):
    """The number of clients, and the requests per second of all together; None: a closed loop."""

    clients: int
    rate: float | None

    def text(self) -> str:
        """Return the level in words."""
        clients = "1 client" if self.clients == 1 else f"{self.clients} clients"
        return clients if self.rate is None else f"{clients}, {self.rate:g}/s"


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The model, its inputs, the runners (execution modes, peers, and names in `own`) and the load.

    Each level is measured for `seconds`, or with `count` requests. `warm_up` is a number of requests; None: windows of
    `window_s`, until the last ones differ by at most `stability` percent. The first level at which `percentile` of the
    first runner exceeds `threshold_ns` is the last one.
    """

    model: Path
    inputs: Sequence[Sequence[Array]]
    runners: tuple[str, ...]
    shapes: Mapping[str | int, tuple[int, ...]] = field(default_factory=dict)
    signature: str | None = None
    clients: tuple[int, ...] = (1,)
    rates: tuple[float | None, ...] = (None,)
    distribution: str = "constant"
    seed: int = 0
    seconds: float = 10.0
    count: int | None = None
    warm_up: int | None = None
    window_s: float = 0.5
    stability: float = 10.0
    percentile: str = "p99"
    threshold_ns: int | None = None
    device: str | None = None
    threads: int | None = None
    connect: str | None = None
    own: Mapping[str, OwnRunner] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.percentile in REPORTED

    @property
    def rounds(self) -> int:
        """The number of parts in which each runner is measured."""
        return 1 if len(self.runners) == 1 else ROUNDS

    def levels(self) -> Iterator[LoadLevel]:
        """Yield the levels in the order in which they are measured."""
        for clients in self.clients:
            for rate in self.rates:
                yield LoadLevel(clients, rate)

    def trial(self, level: LoadLevel, number: int) -> Load:
        """Return one of `rounds` parts of the load; its `number` is also the seed of its arrivals."""
        count = None if self.count is None else len(range(number, self.count, self.rounds))
        return self._load(level, self.seconds / self.rounds, count, self.seed + number)

    def warm_up_load(self, level: LoadLevel) -> Load:
        """Return the load of the warm-up, or of one of its windows."""
        if self.warm_up is not None:
            return self._load(level, self.seconds, self.warm_up, self.seed)
        # In an open loop a window needs some requests, however few there are.
        seconds = self.window_s if level.rate is None else max(self.window_s, 10 / level.rate)
        return self._load(level, seconds, None, self.seed)

    def _load(self, level: LoadLevel, seconds: float, count: int | None, seed: int) -> Load:
        return Load(seconds, count, level.rate, self.distribution, seed)
