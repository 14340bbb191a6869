"""MLTS's crash tests and long-running tests as a table, with their durations and parameters.

Each target has one or more variants, which differ in the number of threads, the share of killed processes, or the size
of the graphs. The self-tests are not part of the suite: they make a client or the driver fail on purpose, and
`expected` is the outcome that the suite must report.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = [
    "ClientMessage",
    "ClientState",
    "ClientTask",
    "CrashOutcome",
    "CrashTest",
    "GraphSize",
    "KilledClients",
    "Workload",
    "chosen_tests",
]

MINUTE_S = 60.0
MAX_COMPILING_THREADS = 4
"""With more threads a preparation is not waited for, so that 60 of them end within the grace period."""


class CrashOutcome(StrEnum):
    """The outcome of a crash test. UNSUPPORTED: the device supports no model that the test could use."""

    SUCCESS = "SUCCESS"
    FAILURE = "FAILURE"
    HANG = "HANG"
    CRASH = "CRASH"
    UNSUPPORTED = "UNSUPPORTED"


class Workload(StrEnum):
    """The work of a client until the duration has passed."""

    INFERENCE = "inference"
    COMPILATION = "compilation"
    MAPPED_COMPILATION = "mapped compilation"
    RANDOM_COMPILATION = "random compilation"
    RANDOM_INFERENCE = "random inference"
    DEGRADATION = "degradation"
    NO_OP = "no-op"
    FAIL = "fail"
    HANG = "hang"
    NULL_POINTER = "null pointer"
    STOP_DRIVER = "stop driver"
    CRASH_DRIVER = "crash driver"
    CRASH_DRIVER_UNSEEN = "crash driver unseen"


class KilledClients(StrEnum):
    """The client processes that are killed on purpose, at a random moment between 1/4 and 1/2 of the duration."""

    NONE = "none"
    ALL = "all"  # once each; the test ends with them
    SHARE = "share"  # a share of the processes; others take their places


@dataclass(frozen=True, slots=True)
class GraphSize:
    """The size of random graphs: number of operations, limit of a dimension, and the number of graphs."""

    operations: int
    max_dimension: int
    count: int = 600


@dataclass(frozen=True, slots=True)
class CrashTest:
    """One variant of a target; `mlts_s` is MLTS's duration, `pause_s` the least and the longest pause of a thread."""

    target: str
    workload: Workload
    mlts_s: float
    variant: str = ""
    processes: int = 1
    threads: int = 1
    in_process: bool = False
    killed: KilledClients = KilledClients.NONE
    killed_share: float = 0.0
    pause_s: tuple[float, float] = (0.0, 0.0)
    graphs: GraphSize | None = None
    expected: CrashOutcome = CrashOutcome.SUCCESS

    @property
    def name(self) -> str:
        """The test's name: target and variant."""
        return f"{self.target}-{self.variant}" if self.variant else self.target

    @property
    def only_compiles(self) -> bool:
        """Whether models are prepared and not executed."""
        return "compilation" in self.workload

    @property
    def compiles_fully(self) -> bool:
        """Whether each preparation waits for the compiler, as a test with few threads can afford."""
        return self.only_compiles and self.processes * self.threads <= MAX_COMPILING_THREADS

    @property
    def needs_compiler(self) -> bool:
        """Whether the program cache of the driver would make the test pointless."""
        return self.only_compiles or self.workload is Workload.DEGRADATION


def _parallel() -> Iterator[CrashTest]:
    for suffix, in_process in (("", False), ("-in-process", True)):
        for threads, minutes in ((8, 30), (12, 20)):
            yield CrashTest(
                f"parallel-inference-stress{suffix}", Workload.INFERENCE, minutes * MINUTE_S,
                f"{threads}-threads", threads=threads, in_process=in_process,
            )  # fmt: skip


def _multi_process() -> Iterator[CrashTest]:
    for share, minutes in ((0.0, 30), (0.8, 20)):
        yield _six_processes("multi-process-inference-stress", Workload.INFERENCE, minutes, share)
    for share, minutes in ((0.0, 20), (0.5, 20), (1.0, 10)):
        yield _six_processes("multi-process-model-load-stress", Workload.COMPILATION, minutes, share, (0.3, 0.8))


def _six_processes(
    target: str, workload: Workload, minutes: float, share: float, pause_s: tuple[float, float] = (0.0, 0.0)
) -> CrashTest:
    return CrashTest(
        target, workload, minutes * MINUTE_S, f"{share:.0%}-killed".replace("%", ""), processes=6, threads=10,
        killed=KilledClients.SHARE if share else KilledClients.NONE, killed_share=share, pause_s=pause_s,
    )  # fmt: skip


def _random() -> Iterator[CrashTest]:
    targets = {
        "model-load-random-stress": Workload.RANDOM_COMPILATION,
        "inference-random-stress": Workload.RANDOM_INFERENCE,
    }
    for target, workload in targets.items():
        for graphs in (GraphSize(10, 1000), GraphSize(600, 10)):
            yield CrashTest(
                target, workload, 15 * MINUTE_S, f"{graphs.operations}-operations", pause_s=(0.3, 0.3), graphs=graphs
            )


CRASH_TESTS: tuple[CrashTest, ...] = (
    *_parallel(),
    CrashTest(
        "client-early-termination-stress", Workload.COMPILATION, 70.0, processes=4, killed=KilledClients.ALL
    ),
    *_multi_process(),
    CrashTest("memory-mapped-model-load-stress", Workload.MAPPED_COMPILATION, 70.0, threads=4),
    *_random(),
    CrashTest("performance-degradation-stress", Workload.DEGRADATION, 20.0),
)  # fmt: skip
"""MLTS's nine targets."""

LONG_TESTS: tuple[CrashTest, ...] = (
    CrashTest("inference-stress", Workload.INFERENCE, 60 * MINUTE_S),
    CrashTest("model-loading-stress", Workload.COMPILATION, 30 * MINUTE_S),
)
"""MLTS's long-running tests, with one thread."""

SELF_TESTS: tuple[CrashTest, ...] = (
    CrashTest("self-test-no-op", Workload.NO_OP, 1.0),
    CrashTest("self-test-failure", Workload.FAIL, 1.0, expected=CrashOutcome.FAILURE),
    CrashTest("self-test-client-hang", Workload.HANG, 1.0, expected=CrashOutcome.HANG),
    CrashTest("self-test-client-crash", Workload.NULL_POINTER, 1.0, expected=CrashOutcome.CRASH),
    CrashTest("self-test-driver-hang", Workload.STOP_DRIVER, 1.0, expected=CrashOutcome.HANG),
    CrashTest("self-test-driver-crash", Workload.CRASH_DRIVER, 1.0, expected=CrashOutcome.CRASH),
    CrashTest("self-test-driver-crash-unseen", Workload.CRASH_DRIVER_UNSEEN, 1.0, expected=CrashOutcome.CRASH),
)
"""Tests of the suite itself."""


def chosen_tests(pattern: str) -> list[CrashTest]:
    """Return the tests of the suite, long-running ones included, whose name matches the expression."""
    search = re.compile(pattern)
    return [test for test in (*CRASH_TESTS, *LONG_TESTS) if search.search(test.name)]


# ----------------------------------------------------------------------------------------------------------------------
# The task of a client, and its messages to the runner.
#
# A client that was told to kill itself announces it, so that its death is not taken for a crash.


@dataclass(frozen=True, slots=True)
class ClientTask:
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


@dataclass(frozen=True, slots=True)
class ClientMessage:
    """A message of a client: its state, the reason of a failure, and numbers of steps by outcome."""

    state: ClientState
    reason: str = ""
    worker_pid: int = 0
    codes: dict[str, int] = field(default_factory=dict)
