"""DriverRecovery: the threads of a client whose driver has died or was replaced, beside the calls.

The CPU executes a model that has a fallback while the model is prepared again, on a thread of the client. The thread
starts with the first such model and ends when none is left, so a client whose driver lives has no such thread. It is a
daemon, and all signals are blocked in it, because signals must interrupt the main thread.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

from nnfmq.base.threads import start_daemon
from nnfmq.client.model.handle import ModelHandle
from nnfmq.hal.errors import BadState, DeadObject, DeviceUnavailable, NnfmqError

__all__ = ["DriverRecovery", "RecoveryCounts", "RestartLimit"]


# ----------------------------------------------------------------------------------------------------------------------
# RestartLimit: how soon a driver that has died is started again.
#
# The first deaths cost nothing: the next driver starts at once. If a driver has died again and again, each time soon
# after its start, a model probably kills it, and the next start is delayed: 1 s, then twice as long each time, up to 60
# s. A driver that lives longer ends the delays.


_STABLE_NS = 10_000_000_000
_FREE_DEATHS = 5
_DELAY_MAX_S = 60


class RestartLimit:
    """The deaths of one driver and of its successors. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held for a few assignments
        self._began_ns = time.monotonic_ns()
        self._ended_ns = 0
        self._early_deaths = 0
        self._next_start_ns = 0

    def begin(self) -> None:
        """Note that a driver runs from now on."""
        with self._lock:
            self._began_ns = time.monotonic_ns()

    def require_allowed(self, ended_ns: int) -> None:
        """Do nothing if another driver may be started now in place of the one that died at `ended_ns`.

        Raises:
            DeadObject: If not. The text says when.
        """
        with self._lock:
            if ended_ns != self._ended_ns:
                self._ended_ns = ended_ns
                self._count(is_early=ended_ns - self._began_ns < _STABLE_NS)
        left_s = (self._next_start_ns - time.monotonic_ns()) / 1e9
        if left_s > 0:
            raise DeadObject(f"{self._text()}; the next one is started in {left_s:.1f} s at the earliest")

    def fail(self) -> None:
        """Note that a driver has exited while it started."""
        with self._lock:
            self._count(is_early=True)

    def _count(self, *, is_early: bool) -> None:
        self._early_deaths = self._early_deaths + 1 if is_early else 0
        late = self._early_deaths - _FREE_DEATHS
        if late > 0:
            delay_s = min(2 ** min(late - 1, 10), _DELAY_MAX_S)
            self._next_start_ns = time.monotonic_ns() + delay_s * 1_000_000_000
            _log.warning("%s; the next one is started in %d s", self._text(), delay_s)

    def _text(self) -> str:
        return (
            f"{self._early_deaths} drivers have died one after the other, each within {_STABLE_NS // 10**9} s of its "
            "start: probably a model makes them crash"
        )


# ----------------------------------------------------------------------------------------------------------------------
# DriverRecovery: what a client does after its driver has died, besides the calls that wait for the next driver.


_GIVE_UP_NS = 10_000_000_000
_RETRY_S = 0.02
_RETRY_MAX_S = 0.5
_DELAY_MAX_NS = 60_000_000_000
_END_S = 2.0
_log = logging.getLogger("nnfmq.client")


class RecoveryCounts(NamedTuple):
    """The counts of a client: `deaths` of its driver and of the successors, and `reconnections` after them."""

    deaths: int = 0
    reconnections: int = 0


class DriverRecovery:
    """The recovery of one client. Thread-safe. The client closes it: `end`, then `join`."""

    def __init__(self) -> None:
        self.limit = RestartLimit()
        self.counts = RecoveryCounts()
        self._lock = threading.Lock()  # held for a few assignments
        self._models: list[ModelHandle] = []
        self._thread: threading.Thread | None = None
        self._moving: list[threading.Thread] = []
        self._followed: weakref.WeakSet[ModelHandle] = weakref.WeakSet()
        self._ended = threading.Event()

    def count(self, *, deaths: int = 0, reconnections: int = 0) -> None:
        """Add to the counts."""
        with self._lock:
            self.counts = RecoveryCounts(self.counts.deaths + deaths, self.counts.reconnections + reconnections)

    def follow(self, model: ModelHandle) -> None:
        """Prepare a model ahead of a move while it is open. Keeps only a weak reference."""
        with self._lock:
            self._followed.add(model)

    def open_models(self) -> list[ModelHandle]:
        """Return the models that are followed and open."""
        with self._lock:
            return [model for model in self._followed if model.is_open]

    def start_moving(self, move: Callable[[], None]) -> bool:
        """Call a function on a thread of its own, and return whether that has started. Does not block."""
        with self._lock:
            if not self._ended.is_set():
                try:
                    self._moving = [each for each in self._moving if each.is_alive()]
                    self._moving.append(start_daemon(move, "nnfmq-move"))
                    return True
                except RuntimeError as error:  # no thread can be started
                    _log.warning("a move to the next driver is not prepared: %s", error)
            return False

    def pause(self, seconds: float) -> bool:
        """Wait, and return whether the client is closed."""
        return self._ended.wait(seconds)

    def request(self, model: ModelHandle) -> None:
        """Have a model prepared again in the background, unless that is in progress. Does not block.

        Waits up to 10 s for a driver; if there is none, the next request begins again.
        """
        with self._lock:
            if any(other is model for other in self._models) or self._ended.is_set():
                return
            if time.monotonic_ns() < model.recovery_at_ns:
                return
            self._models.append(model)
            if self._thread is None:
                self._start()

    def _start(self) -> None:
        try:
            self._thread = start_daemon(self._run, "nnfmq-recovery")
        except RuntimeError as error:  # no thread can be started: the next request tries it again
            self._models.clear()
            _log.warning("a model is not prepared again in the background: %s", error)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._models or self._ended.is_set():
                    self._models.clear()
                    self._thread = None
                    return
                model = self._models[0]
            try:
                self._recover(model)
            except Exception:  # noqa: BLE001  a bug in one preparation must not end the thread that others need
                _log.exception("a model was not prepared again in the background")
                self._delay(model)
            with self._lock:
                self._models.remove(model)
            del model

    def _recover(self, model: ModelHandle) -> None:
        give_up_ns, wait_s = time.monotonic_ns() + _GIVE_UP_NS, _RETRY_S
        while not self._ended.is_set():
            try:
                model.recover_now(None, wait=False)
            except BadState:  # it was closed meanwhile
                return
            except DeviceUnavailable as error:  # there is no driver yet
                if time.monotonic_ns() > give_up_ns:
                    _log.info("a model on %s waits for a driver: %s", model.device, error)
                    return
            except NnfmqError as error:
                if self._ended.is_set():
                    return
                _log.warning("a model on %s could not be prepared again: %s", model.device, error)
                self._delay(model)
                return
            else:
                model.recovery_delay_ns = 0
                _log.info("a model is prepared again on device %s, which executes it from now on", model.device)
                return
            self._ended.wait(wait_s)
            wait_s = min(2 * wait_s, _RETRY_MAX_S)

    @staticmethod
    def _delay(model: ModelHandle) -> None:
        """Let the next attempt wait: 1 s, then twice as long each time."""
        model.recovery_delay_ns = min(2 * model.recovery_delay_ns or 1_000_000_000, _DELAY_MAX_NS)
        model.recovery_at_ns = time.monotonic_ns() + model.recovery_delay_ns

    def end(self) -> None:
        """Let the thread end, and none start any more. Does not block. The caller closes the connection next."""
        self._ended.set()

    def join(self) -> None:
        """Wait until each thread has ended, up to 2 s: a driver that does not reply holds it longer."""
        for thread in (self._thread, *self._moving):
            if thread is not None and thread is not threading.current_thread():
                thread.join(_END_S)
