"""Requests to a cluster from several threads while parts of it fail, and what became of each one.

The model adds its version to its input, so that each answer says which version computed it. A request that fails with
an error after which a client may try again is sent again, as a client would; each attempt is recorded.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from support.tflite_files import Operator, Tensor, writer

Array = np.ndarray[Any, Any]
Call = Callable[[Array], tuple[int, Array]]
"""Sends an input once; returns the version that the reply names, and the output."""
SIZE = 16
ATTEMPTS = 50
_PAUSE_S = 0.02  # before another attempt


def version_model(version: int) -> bytes:
    """Return a .tflite file that adds `version` to its input, `SIZE` floats."""
    added = np.full(SIZE, version, np.float32).tobytes()
    tensors = [Tensor("x", (1, SIZE)), Tensor("version", (SIZE,), data=added), Tensor("y", (1, SIZE))]
    data: bytes = writer.write(
        tensors, [Operator("ADD", [0, 1], [2], "AddOptions", {"FusedActivationFunction": 0})], [0], [2]
    )
    return data


class Attempt(NamedTuple):
    """One attempt of a request. `error` is the name of what it raised; `version` is 0 then."""

    request: int
    begin_ns: int
    end_ns: int
    error: str = ""
    version: int = 0
    is_wrong: bool = False


class ClusterLoad:
    """Sends requests from `threads` threads, each at most every `period_s`, from `start` to `finish`."""

    def __init__(self, call: Call, retryable: tuple[type[Exception], ...], threads: int, period_s: float) -> None:
        self._call, self._retryable, self._period_s = call, retryable, period_s
        self._is_full_speed = False
        self._numbers = itertools.count()
        self._ending = threading.Event()
        self.attempts: list[Attempt] = []
        """In the order in which they ended. Only ever appended to."""
        self._threads = [threading.Thread(target=self._send_all, daemon=True) for _ in range(threads)]

    def start(self) -> None:
        """Begin to send."""
        for thread in self._threads:
            thread.start()

    def finish(self, timeout_s: float) -> bool:
        """Let each thread end its request; return whether all did in time."""
        self._ending.set()
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def answers(self) -> int:
        """Return how many requests have an answer."""
        return sum(not attempt.error for attempt in self.attempts)

    @contextmanager
    def full_speed(self) -> Iterator[None]:
        """Send without pauses, so that each thread has a request in flight at almost any time."""
        self._is_full_speed = True
        try:
            yield
        finally:
            self._is_full_speed = False

    def _send_all(self) -> None:
        while not self._ending.is_set():
            next_ns = time.monotonic_ns() + int(self._period_s * 1e9)
            self._send(next(self._numbers))
            if not self._is_full_speed:
                self._ending.wait(max(0.0, (next_ns - time.monotonic_ns()) / 1e9))

    def _send(self, request: int) -> None:
        source = np.random.default_rng(request).integers(0, 1000, (1, SIZE)).astype(np.float32)
        for _ in range(ATTEMPTS):
            attempt, may_retry = self._attempt(request, source)
            self.attempts.append(attempt)
            if not may_retry:
                return
            time.sleep(_PAUSE_S)

    def _attempt(self, request: int, source: Array) -> tuple[Attempt, bool]:
        begin_ns = time.monotonic_ns()
        try:
            version, output = self._call(source)
        except Exception as error:  # noqa: BLE001  whatever it is belongs in the report
            failed = Attempt(request, begin_ns, time.monotonic_ns(), type(error).__name__)
            return failed, isinstance(error, self._retryable)
        end_ns = time.monotonic_ns()
        is_wrong = output.shape != source.shape or bool((output - source != version).any())
        return Attempt(request, begin_ns, end_ns, "", version, is_wrong), False


class ClusterEvent(NamedTuple):
    """Something done to the cluster. `restored_ns` is when the cluster was complete again."""

    name: str
    at_ns: int
    restored_ns: int


def summary(attempts: Sequence[Attempt], events: Sequence[ClusterEvent]) -> dict[str, Any]:
    """Return what became of the requests, and what each event, in order of time, did to them."""
    last = {attempt.request: attempt for attempt in attempts}
    ends = [*(event.at_ns for event in events[1:]), max(attempt.end_ns for attempt in attempts) + 1]
    return {
        "requests": len(last),
        "answers": sum(not attempt.error for attempt in last.values()),
        "lost": sorted(request for request, attempt in last.items() if attempt.error),
        "wrong": sorted(attempt.request for attempt in attempts if attempt.is_wrong),
        "answered_twice": sorted(_answered_twice(attempts)),
        "failed_before_all_events": sum(bool(each.error) and each.end_ns < events[0].at_ns for each in attempts),
        "events": [_effects(attempts, event, end) for event, end in zip(events, ends, strict=True)],
    }


def _answered_twice(attempts: Sequence[Attempt]) -> set[int]:
    counts = Counter(attempt.request for attempt in attempts if not attempt.error)
    return {request for request, count in counts.items() if count > 1}


def _effects(attempts: Sequence[Attempt], event: ClusterEvent, end_ns: int) -> dict[str, Any]:
    """Return the failures and answers between an event and the next one.

    `recovery_s` is from the event to the end of the last failure, `late` the failures that began after the event, and
    `longest_s` the longest attempt that was answered.
    """
    during = [attempt for attempt in attempts if event.at_ns <= attempt.end_ns < end_ns]
    failures = [attempt for attempt in during if attempt.error]
    answers = [attempt for attempt in during if not attempt.error]
    return {
        "event": event.name,
        "failures": dict(Counter(attempt.error for attempt in failures)),
        "late": sum(attempt.begin_ns > event.at_ns for attempt in failures),
        "recovery_s": _seconds(max((attempt.end_ns for attempt in failures), default=event.at_ns) - event.at_ns),
        "pause_s": _seconds(_longest_pause_ns(answers, event.at_ns)),
        "longest_s": _seconds(max((attempt.end_ns - attempt.begin_ns for attempt in answers), default=0)),
        "restored_s": _seconds(event.restored_ns - event.at_ns),
        "answers_by_version": {str(each): count for each, count in sorted(_versions(answers).items())},
    }


def _longest_pause_ns(answers: Sequence[Attempt], since_ns: int) -> int:
    """Return the longest time without any answer."""
    times = [since_ns, *sorted(attempt.end_ns for attempt in answers)]
    return max((after - before for before, after in itertools.pairwise(times)), default=0)


def _versions(answers: Sequence[Attempt]) -> Mapping[int, int]:
    return Counter(attempt.version for attempt in answers)


def _seconds(duration_ns: int) -> float:
    return round(duration_ns / 1e9, 3)
