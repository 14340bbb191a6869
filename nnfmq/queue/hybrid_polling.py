"""Hybrid polling: sleep for most of an expected wait, then poll the ring for the rest of it.

A receiver that polls notices a record within a fraction of a microsecond, but occupies a CPU; one that sleeps in the
futex pays for a context switch. As the Linux block layer did for NVMe, a receiver here estimates how long its waits
are, sleeps until shortly before the next record is due, and polls from there until one polling window after that.

`WaitEstimator` is arithmetic only, and the specification of `_hybrid_polling.h`. The cores do the waiting.
"""

from __future__ import annotations

import os

from msgspec import Struct

from nnfmq.base import settings
from nnfmq.hal.errors import InvalidArgument

_WINDOW_MAX_US = 10**9

POLL, SLEEP = 0, -1
"""Results of `WaitEstimator.next_action`; any other result is the time at which to stop sleeping and start polling."""

_LONG_WAIT_NS = 100_000_000  # after a wait of this length, the cost of a wake-up does not matter
_SLEEP_MIN_NS = 10_000  # going to sleep and waking up costs about as much
_WAKE_MARGIN_NS = 5_000  # time between the end of a sleep and the expected arrival
_WAKEUP_DELAY_MAX_NS = 100_000  # a later wake-up is an outlier: the thread was preempted
_EARLY_ARRIVALS_MAX = 2  # after so many in a row the estimate is wrong, not unlucky
_SAMPLES_MIN = 4  # before these there is no estimate
_PROBE_PERIOD = 16  # so often a wait is polled for although it would be slept through
_YIELD_MAX_NS = 2_000  # to yield the CPU takes longer if another thread has run meanwhile
_STOPPED_POLLS_MIN = 2  # one in 2,000 yields takes longer on an idle CPU, too


class WaitEstimator:
    """Wait-time estimate of one receiver. All times are integer nanoseconds.

    Keeps a moving average of the waits (`mean`), their mean absolute deviation (`deviation`), and an upper estimate of
    how late timed sleeps end (`wakeup_delay`).
    """

    __slots__ = ("deviation", "early_arrivals", "mean", "samples", "stopped_polls", "wakeup_delay")

    def __init__(self) -> None:
        self.mean = self.deviation = 0
        self.wakeup_delay = 0
        self.samples = 0
        self.early_arrivals = 0  # sleeps in a row during which the record arrived
        self.stopped_polls = 0  # polls in a row that ended because another thread used this CPU

    def next_action(self, now: int, window_ns: int) -> int:
        """Return POLL, SLEEP, or the time at which to end a sleep before polling.

        * POLL until `poll_end`: if the wait is expected to end within the window or sooner than a sleep would, if there
          are too few samples, or if waits are so long that the latency of a wake-up no longer matters.
        * A time, if the wait is long and regular: sleep until shortly before the expected arrival, then poll. The
          sleep ends earlier by as much as sleeps end late.
        * SLEEP immediately, if the wait rarely ends within the window, and is irregular or on a contended CPU. Polling
          would rarely succeed, or delay the thread that computes the record. One of 16 such waits gets a time all the
          same: only timed sleeps show how late sleeps end, and only polls whether the CPU is contended.

        Rejected: to sleep whenever another task has run on this CPU, also if waits are short. Beside one busy process,
        the additional wake-ups cost more than the rare interruption of a poll.
        """
        if window_ns == 0:
            return SLEEP
        if self.samples < _SAMPLES_MIN or self.mean > _LONG_WAIT_NS or self._is_short(window_ns):
            return POLL
        is_contended = self.stopped_polls >= _STOPPED_POLLS_MIN
        if (is_contended or not self._is_regular(window_ns)) and self.samples % _PROBE_PERIOD:
            return SLEEP if self.mean - self.deviation > window_ns else POLL
        sleep_ns = self.mean - (self.wakeup_delay + 2 * self.deviation + _WAKE_MARGIN_NS)
        return POLL if sleep_ns < _SLEEP_MIN_NS else now + sleep_ns

    def _is_short(self, window_ns: int) -> bool:
        """Return whether the wait is expected to end within the window."""
        return self.mean + 2 * self.deviation <= window_ns

    def _is_regular(self, window_ns: int) -> bool:
        """Return whether waits deviate by at most half a window, or by at most as much as sleeps end late.

        On an idle CPU, a wake-up by the writer is as late: polling saves as much time as it takes.
        """
        return self.deviation <= max(window_ns // 2, min(self.wakeup_delay, 2 * window_ns))

    def poll_end(self, began: int, now: int, window_ns: int) -> int:
        """Return the time at which to stop polling and sleep, in a wait that began at `began` and polls from `now` on.

        It is one window after the expected arrival if the wait is regular, else one window from now, as in Android.
        """
        if self.samples < _SAMPLES_MIN or self.mean > _LONG_WAIT_NS or not self._is_regular(window_ns):
            return now + window_ns
        return max(now, began + self.mean) + window_ns

    def must_stop_polling(self, yield_ns: int, window_ns: int) -> bool:
        """Return whether to stop polling and sleep, after a yield of the CPU that took `yield_ns`.

        If another thread has run meanwhile, it may be the one that computes the record, and a wake-up on a busy CPU
        costs little. A poll for a wait that should end within the window goes on.
        """
        return yield_ns > _YIELD_MAX_NS and self.samples >= _SAMPLES_MIN and not self._is_short(window_ns)

    def add_poll(self, is_stopped: bool) -> None:
        """Note whether `must_stop_polling` has ended a poll."""
        self.stopped_polls = self.stopped_polls + 1 if is_stopped else 0

    def add_wait(self, waited: int) -> None:
        """Update the estimate with the length of a wait.

        The error counts at most 4 deviations plus 20 µs, so that one pause of the sender does not ruin the estimate.
        """
        if not self.samples:
            self.mean, self.deviation = waited, waited // 2
        error = min(abs(waited - self.mean), 4 * self.deviation + 20_000)
        self.mean += error // 4 if waited > self.mean else -(error // 4)
        self.deviation += _step(self.deviation, error, 4, 4)
        self.samples += 1

    def add_wakeup(self, planned: int, now: int, is_ready: bool) -> None:
        """Update the estimate after a timed sleep: when it should have ended, when it ended, and if a record was there.

        The delay rises quickly and falls slowly, so that it stays near the worst case. A record that arrived during the
        sleep arrived at an unknown time, so `mean` is only reduced: by an eighth, or a half if it happens repeatedly.
        """
        if now >= planned:
            self.wakeup_delay += _step(self.wakeup_delay, min(now - planned, _WAKEUP_DELAY_MAX_NS), 2, 16)
        if is_ready:
            self.mean -= self.mean // (2 if self.early_arrivals >= _EARLY_ARRIVALS_MAX else 8)
        self.early_arrivals = self.early_arrivals + 1 if is_ready else 0


def _step(estimate: int, sample: int, up: int, down: int) -> int:
    """Return the change of a moving average that follows `sample` with weight 1/up or 1/down, rounded towards 0."""
    return (sample - estimate) // up if sample > estimate else -((estimate - sample) // down)


class PollingWindow(Struct, frozen=True):
    """The time for which a receiver polls its ring before it sleeps, in ns; 0 = it sleeps immediately."""

    ns: int

    @classmethod
    def controller(cls, window_us: float | None = None) -> PollingWindow:
        """Return the client's window: `window_us` if set, else $NNFMQ_BURST_CONTROLLER_POLLING_WINDOW (µs).

        Raises:
            InvalidArgument: If the window is NaN or longer than 1000 s.
        """
        return cls(_window_ns(settings.BURST_CONTROLLER_POLLING_WINDOW, window_us))

    @classmethod
    def server(cls, window_us: float | None = None) -> PollingWindow:
        """Return the driver's window: `window_us` if set, else $NNFMQ_BURST_SERVER_POLLING_WINDOW (µs).

        Raises:
            InvalidArgument: If the window is NaN or longer than 1000 s.
        """
        return cls(_window_ns(settings.BURST_SERVER_POLLING_WINDOW, window_us))


def _window_ns(setting: settings.Setting[int], window_us: float | None) -> int:
    # On a machine with one CPU polling keeps the peer from running. A process that is pinned to one of several CPUs may
    # poll, because the peer can run on another.
    if os.cpu_count() == 1:
        return 0
    wanted = setting.value() if window_us is None else window_us
    if not abs(wanted) <= _WINDOW_MAX_US:  # written so that NaN is rejected as well
        raise InvalidArgument(f"a polling window is 0 to {_WINDOW_MAX_US} µs, got {wanted}")
    return round((wanted if wanted >= 0 else setting.default) * 1000)
