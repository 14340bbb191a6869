"""The watchdog of a worker: it ends what another runtime does beyond its deadline, and executions that never end.

A runtime computes without looking at the clock. At the deadline the watchdog's thread tells it to stop, if it has a
function for that. If it still runs when the grace is over, the worker exits, which its client sees immediately, and
the driver starts another one for it (docs/explanation/peer-death.md). Before it exits, it tells the client why.

Every execution, on any device, has $NNFMQ_EXECUTION_LIMIT_S, whatever its deadline is. These are sampled, because
watching costs a burst too much.

The thread cannot run while a runtime keeps the GIL. So it has the kernel send SIGALRM, which ends a process, STALL_S
after its next look, and moves that time on with each look.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Hashable, Set
from functools import partial
from typing import NamedTuple

from nnfmq.base import settings, watcher
from nnfmq.base.ownership import Closable
from nnfmq.base.threads import start_daemon
from nnfmq.hal.errors import ResourceExhaustedTransient

__all__ = [
    "GRACE_S",
    "OPEN_GRACE_S",
    "STALL_S",
    "WATCHDOG",
    "ExecutionLimit",
    "Watchdog",
    "cannot_abort",
]

GRACE_S = 2.0
"""How long after its deadline an execution may still run."""
OPEN_GRACE_S = 60.0
"""How long after its deadline a file may still be opened: an engine may be built, and other models go on meanwhile."""
STALL_S = 10.0
"""How long after a look was due the process may keep the watchdog's thread from running."""
_LATE_NS = 5_000_000  # after a deadline; so bursts with short deadlines wake the thread 200 times a second at most
_NEVER = 2**63 - 1
_WAIT_MAX_S = 3600.0
_LATE = "a runtime has not stopped in time after its deadline, so this worker exits"
_log = logging.getLogger("nnfmq.execution")


def cannot_abort() -> None:
    """Do nothing: what is watched cannot be told to stop."""


class _Watched(NamedTuple):
    """Work that is told to stop at `late_ns`, and must have ended `grace_ns` later."""

    late_ns: int
    grace_ns: int
    abort: Callable[[], object]


class Watchdog:
    """Ends what runs beyond its deadline in this process. Thread-safe.

    A call of `begin` and `end` takes less than a microsecond, and wakes the thread only if the deadline is earlier than
    its next look.

    Args:
        end_process: Ends the process; called, with the lock held, if something has not ended within its grace.
        set_timer: Has the process ended by the kernel in so many seconds; 0: not at all.
    """

    def __init__(self, end_process: Callable[[], object], set_timer: Callable[[float], object]) -> None:
        self._end_process, self._set_timer = end_process, set_timer
        self._tokens = itertools.count()
        self._running: dict[int, _Watched] = {}
        self._end_ns: dict[int, int] = {}  # when those that were told to stop must have ended; under the lock
        self.tell: Callable[[str], object] = lambda _reason: None
        """Tells the client why the process ends; called with the lock held, so it must not block."""
        self._condition = threading.Condition()
        self._look_ns = _NEVER  # when the thread looks next; _NEVER: when it is woken
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def begin(self, deadline_ns: int, abort: Callable[[], object], grace_s: float | None = None) -> int:
        """Watch what begins now, until `end` gets the returned token.

        Args:
            deadline_ns: The deadline on the monotonic clock.
            abort: Tells it to stop, if that is possible; called on the watchdog's thread, never after `end` has
                returned. It must not block.
            grace_s: How long after the deadline the process ends; None: GRACE_S.

        Raises:
            ResourceExhaustedTransient: If the thread cannot be started.
        """
        token, late_ns = next(self._tokens), deadline_ns + _LATE_NS
        self._running[token] = _Watched(late_ns, int((GRACE_S if grace_s is None else grace_s) * 1e9), abort)
        if late_ns < self._look_ns:
            self._wake(token, late_ns)
        return token

    def end(self, token: int) -> bool:
        """Stop watching what has ended; return whether it was told to stop, perhaps too late."""
        if self._running.pop(token, None) is not None:
            return False
        with self._condition:  # the thread tells it to stop, or has done so
            self._end_ns.pop(token, None)
        return True

    def look(self, now_ns: int) -> int:
        """End what is late, and return when to look again. The caller has the lock."""
        for token, end_ns in list(self._end_ns.items()):
            if now_ns >= end_ns:
                del self._end_ns[token]
                self.end_now(_LATE)
        for token, watched in list(self._running.items()):
            if now_ns >= watched.late_ns and self._running.pop(token, None) is not None:  # it has not ended meanwhile
                # From now: the process may have been stopped.
                self._end_ns[token] = now_ns + watched.grace_ns
                _abort(watched)
        # Whoever begins after the first store, with an earlier limit, wakes the thread; whoever began before is found.
        self._look_ns = end_ns = min(self._end_ns.values(), default=_NEVER)
        self._look_ns = min([end_ns, *(watched.late_ns for watched in list(self._running.values()))])
        return self._look_ns

    def end_now(self, reason: str) -> None:
        """End the process, and tell the client and the log why."""
        _log.critical(reason)
        self.tell(reason)
        self._end_process()

    def stop(self) -> None:
        """End the thread. Blocks. For tests: a worker exits without waiting."""
        with self._condition:
            self._is_stopped = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join()
        self._thread, self._is_stopped, self._look_ns = None, False, _NEVER

    def _wake(self, token: int, late_ns: int) -> None:
        with self._condition:
            if self._thread is None:
                try:
                    self._thread = start_daemon(self._watch, "nnfmq-watchdog")
                except RuntimeError as error:
                    del self._running[token]
                    raise ResourceExhaustedTransient(f"no thread can be started: {error}") from error
            self._set_timer(_seconds_until(late_ns) + STALL_S)
            self._condition.notify()

    def _watch(self) -> None:
        with self._condition:
            while not self._is_stopped:
                look_ns = self.look(time.monotonic_ns())
                if look_ns == _NEVER:
                    self._set_timer(0)
                    self._condition.wait()
                else:
                    wait_s = _seconds_until(look_ns)
                    self._set_timer(wait_s + STALL_S)
                    self._condition.wait(wait_s)
            self._set_timer(0)


def _abort(watched: _Watched) -> None:
    try:
        watched.abort()
    except Exception:  # noqa: BLE001  code of a plug-in may raise anything; the grace goes on
        _log.exception("a runtime could not be told to stop")


def _seconds_until(time_ns: int) -> float:
    return min(max(time_ns - time.monotonic_ns(), 0) / 1e9, _WAIT_MAX_S)


WATCHDOG = Watchdog(partial(os._exit, os.EX_SOFTWARE), partial(signal.setitimer, signal.ITIMER_REAL))
"""That of this process."""


# ----------------------------------------------------------------------------------------------------------------------
# The limit of any execution.


_SAMPLES = 8
"""Within the limit: an execution ends the process by an eighth of the limit after that at the latest."""


class ExecutionLimit(Closable):
    """Ends this process if an execution takes longer than $NNFMQ_EXECUTION_LIMIT_S. Costs an execution nothing.

    A timer of the watcher thread looks which executions are in progress. Looks are counted, not seconds: the process
    may have been stopped meanwhile. If a kernel keeps the GIL the thread cannot run, and the supervisor ends the worker
    (`driver.process.heartbeats`). Close it.

    Args:
        running: Returns what identifies each execution that is in progress, another value for each one.
        end: Ends the process; gets the reason.
    """

    def __init__(self, running: Callable[[], Set[Hashable]], end: Callable[[str], object]) -> None:
        self._running, self._end = running, end
        self._limit_s = settings.EXECUTION_LIMIT_S.value()
        self._seen: dict[Hashable, int] = {}
        self._timer: watcher.TimerHandle | None = None
        self._look_later()

    def _look_later(self) -> None:
        if self._limit_s:
            pause_ns = int(self._limit_s / _SAMPLES * 1e9)
            self._timer = watcher.call_at(time.monotonic_ns() + pause_ns, self._look)

    def _look(self) -> None:
        self._seen = {execution: self._seen.get(execution, 0) + 1 for execution in self._running()}
        if max(self._seen.values(), default=0) > _SAMPLES:
            self._end(
                f"an execution has taken {self._limit_s:g} s, the limit that ${settings.EXECUTION_LIMIT_S.variable} of "
                "the driver sets, so this worker exits"
            )
        self._look_later()

    def close(self) -> None:
        """Look no more. Idempotent."""
        timer, self._timer, self._limit_s = self._timer, None, 0.0
        if timer is not None:
            watcher.cancel_timer(timer)
