"""When a receiver polls and when it sleeps: the arithmetic, in Python and in C, and that it harms nothing."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnfmq.queue.core as cores
from nnfmq.queue import MessageQueue, hybrid_polling
from nnfmq.queue.hybrid_polling import POLL, SLEEP, WaitEstimator

WINDOW = 50_000
US, MS = 1_000, 1_000_000
FIELDS = ("mean", "deviation", "wakeup_delay", "samples", "early_arrivals", "stopped_polls")


def used_to(*waits: int) -> WaitEstimator:
    estimator = WaitEstimator()
    for waited in waits:
        estimator.add_wait(waited)
    return estimator


def test_without_samples_the_receiver_polls() -> None:
    assert used_to(200 * US, 200 * US, 200 * US).next_action(0, WINDOW) == POLL


def test_the_receiver_polls_for_waits_that_end_within_the_window() -> None:
    assert used_to(*[20 * US] * 50).next_action(0, WINDOW) == POLL


def test_equal_waits_beyond_the_window_are_slept_through_until_shortly_before_their_end() -> None:
    sleep_ns = used_to(*[200 * US] * 50).next_action(7 * MS, WINDOW)
    assert 7 * MS + 150 * US <= sleep_ns < 7 * MS + 200 * US


def test_after_late_wakeups_sleeps_end_earlier_by_a_tenth_of_a_millisecond_at_most() -> None:
    estimator = used_to(*[200 * US] * 50)
    for _ in range(20):
        estimator.add_wakeup(1000, 1000 + 30 * US, False)
    assert 165 * US - 6 <= estimator.next_action(0, WINDOW) <= 172 * US
    for _ in range(20):
        estimator.add_wakeup(1000, 1000 + 500 * US, False)
    assert 95 * US - 6 <= estimator.next_action(0, WINDOW) <= 101 * US


def test_waits_that_a_late_wakeup_would_prolong_are_polled_for_until_a_window_after_their_end() -> None:
    estimator = used_to(*[100 * US] * 50)
    for _ in range(20):
        estimator.add_wakeup(1000, 1000 + 500 * US, False)
    assert estimator.next_action(7 * MS, WINDOW) == POLL
    assert estimator.poll_end(7 * MS, 7 * MS, WINDOW) == 7 * MS + 100 * US + WINDOW


def test_a_poll_after_a_sleep_ends_a_window_after_the_expected_arrival() -> None:
    estimator = used_to(*[200 * US] * 50)
    assert estimator.poll_end(7 * MS, 7 * MS + 180 * US, WINDOW) == 7 * MS + 200 * US + WINDOW
    assert estimator.poll_end(7 * MS, 7 * MS + 260 * US, WINDOW) == 7 * MS + 260 * US + WINDOW, "it woke late"


def test_a_poll_for_waits_that_are_not_known_takes_one_window() -> None:
    chance = random.Random(5)
    irregular = [chance.randrange(5 * US, 150 * US) for _ in range(200)]
    for waits in ([200 * US] * 3, [1000 * MS] * 200, irregular):
        assert used_to(*waits).poll_end(7 * MS, 7 * MS, WINDOW) == 7 * MS + WINDOW


def deviating(mean: int, by: int, late: int) -> WaitEstimator:
    """Return an estimator after many waits that deviate by `by`, and sleeps that ended late by `late`."""
    estimator = used_to(*[mean - by, mean + by] * 200, mean - by)
    for _ in range(40):
        estimator.add_wakeup(1000, 1000 + late, False)
    return estimator


def test_waits_are_regular_if_they_deviate_by_no_more_than_sleeps_end_late() -> None:
    assert MS // 2 < deviating(MS, 40 * US, late=60 * US).next_action(0, WINDOW) < MS
    assert deviating(MS, 40 * US, late=20 * US).next_action(0, WINDOW) == SLEEP
    assert deviating(MS, 40 * US, late=0).next_action(0, WINDOW) == SLEEP


def test_waits_that_deviate_by_more_than_two_windows_are_not_regular() -> None:
    assert deviating(2 * MS, 80 * US, late=100 * US).next_action(0, WINDOW) > MS
    assert deviating(2 * MS, 80 * US, late=100 * US).next_action(0, WINDOW // 2) == SLEEP


def test_one_of_16_irregular_waits_measures_how_late_sleeps_end() -> None:
    estimator = deviating(2 * MS, 200 * US, late=0)
    timed = 0
    for _ in range(160):
        timed += estimator.next_action(0, WINDOW) > 0
        estimator.add_wait(2 * MS - 200 * US if estimator.samples % 2 else 2 * MS + 200 * US)
    assert timed == 10


def contended(*waits: int) -> WaitEstimator:
    """Return an estimator two of whose polls in a row had to stop."""
    estimator = used_to(*waits)
    estimator.add_poll(True)
    estimator.add_poll(True)
    return estimator


def test_on_a_contended_cpu_all_but_one_of_16_long_waits_are_slept_through() -> None:
    estimator = contended(*[200 * US] * 20)
    actions = []
    for _ in range(32):
        actions.append(estimator.next_action(0, WINDOW))
        estimator.add_wait(200 * US)
    assert actions.count(SLEEP) == 30 and sum(action > 0 for action in actions) == 2


def test_on_a_contended_cpu_short_waits_are_polled_for() -> None:
    assert contended(*[20 * US] * 17).next_action(0, WINDOW) == POLL


def test_one_poll_that_stopped_does_not_change_the_next_wait() -> None:
    estimator = used_to(*[200 * US] * 17)
    usual = estimator.next_action(0, WINDOW)
    for is_stopped in (True, False, True):
        estimator.add_poll(is_stopped)
        assert estimator.next_action(0, WINDOW) == usual > 0


def test_a_poll_for_a_long_wait_stops_if_another_thread_has_had_the_cpu() -> None:
    long, short, unknown = used_to(*[200 * US] * 9), used_to(*[20 * US] * 9), used_to(200 * US)
    assert long.must_stop_polling(5 * US, WINDOW) and not long.must_stop_polling(US, WINDOW)
    assert not short.must_stop_polling(5 * US, WINDOW) and not unknown.must_stop_polling(5 * US, WINDOW)


def test_an_early_arrival_makes_the_next_sleep_shorter() -> None:
    estimator = used_to(*[200 * US] * 50)
    before = estimator.next_action(0, WINDOW)
    estimator.add_wakeup(before, before + 1, True)
    assert estimator.next_action(0, WINDOW) < before - 20 * US


def test_the_estimate_follows_much_shorter_waits_within_a_dozen_sleeps() -> None:
    estimator = used_to(*[33 * MS] * 50)
    sleeps = 0
    while estimator.next_action(0, WINDOW) > 0:
        estimator.add_wakeup(10**12, 0, True)
        sleeps += 1
    assert sleeps <= 12


def test_waits_of_any_length_that_may_end_within_the_window_are_polled_for_as_in_android() -> None:
    chance = random.Random(5)
    assert used_to(*[chance.randrange(5 * US, 150 * US) for _ in range(200)]).next_action(0, WINDOW) == POLL


def test_waits_of_any_length_beyond_the_window_are_slept_through() -> None:
    chance = random.Random(5)
    assert used_to(*[chance.randrange(60 * US, 2 * MS) for _ in range(200)]).next_action(0, WINDOW) == SLEEP


def test_a_receiver_polls_again_when_long_waits_become_short() -> None:
    chance = random.Random(5)
    estimator = used_to(*[chance.randrange(60 * US, 2 * MS) for _ in range(200)])
    for _ in range(30):
        estimator.add_wait(20 * US)
    assert estimator.next_action(0, WINDOW) == POLL


def test_waits_of_a_second_are_polled_for_as_in_android() -> None:
    assert used_to(*[1000 * MS] * 200).next_action(0, WINDOW) == POLL


def test_one_wait_that_took_very_long_does_not_make_the_next_ones_late() -> None:
    estimator = used_to(*[200 * US] * 50)
    estimator.add_wait(900 * MS)
    assert estimator.mean < 220 * US


def test_the_estimate_follows_a_lasting_change_of_the_waits() -> None:
    estimator = used_to(*[200 * US] * 50, *[400 * US] * 40)
    assert 350 * US <= estimator.next_action(0, WINDOW) < 400 * US


def test_a_window_of_zero_sleeps_immediately() -> None:
    assert used_to(*[5 * US] * 10).next_action(0, 0) == SLEEP


# ---- the same in C ----

SOURCE = """
#include "_hybrid_polling.h"
int64_t next_action(nnfmq_wait_estimator *f, int64_t now, int64_t window) { return nnfmq_next_action(f, now, window); }
int64_t poll_end(nnfmq_wait_estimator *f, int64_t began, int64_t now, int64_t window) {
    return nnfmq_poll_end(f, began, now, window);
}
int64_t must_stop_polling(nnfmq_wait_estimator *f, int64_t yield_ns, int64_t window) {
    return nnfmq_must_stop_polling(f, yield_ns, window);
}
void add_poll(nnfmq_wait_estimator *f, int64_t is_stopped) { nnfmq_add_poll(f, (int)is_stopped); }
void add_wait(nnfmq_wait_estimator *f, int64_t waited) { nnfmq_add_wait(f, waited); }
void add_wakeup(nnfmq_wait_estimator *f, int64_t planned, int64_t now, int64_t is_ready) {
    nnfmq_add_wakeup(f, planned, now, (int)is_ready);
}
"""


class InC(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in FIELDS]


@pytest.fixture
def in_c(tmp_path: Path) -> ctypes.CDLL:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc): what it would compile cannot be compared")
    source, library = tmp_path / "estimator.c", tmp_path / "estimator.so"
    source.write_text(SOURCE)
    header = Path(hybrid_polling.__file__).parent
    command = [compiler, "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{header}"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True, timeout=60)
    loaded = ctypes.CDLL(str(library))
    loaded.next_action.restype = loaded.poll_end.restype = loaded.must_stop_polling.restype = ctypes.c_int64
    return loaded


def some_event(chance: random.Random, now: int) -> tuple[str, tuple[int, ...]]:
    around = chance.choice([3 * US, 60 * US, 200 * US, 3 * MS, 300 * MS])
    waited = chance.randrange(around, 2 * around)
    if chance.random() < 0.5:
        return "add_wait", (waited,)
    if chance.random() < 0.4:
        return "add_poll", (chance.randrange(2),)
    return "add_wakeup", (now, now + chance.randrange(-10 * US, 300 * US), chance.randrange(2))


def test_the_c_header_computes_as_the_specification(in_c: ctypes.CDLL) -> None:
    chance, specified, computed = random.Random(11), WaitEstimator(), InC()
    for now in range(MS, 4000 * MS, MS):
        name, numbers = some_event(chance, now)
        getattr(specified, name)(*numbers)
        getattr(in_c, name)(ctypes.byref(computed), *map(ctypes.c_int64, numbers))
        assert [getattr(computed, n) for n in FIELDS] == [getattr(specified, n) for n in FIELDS]
        window = chance.choice([0, 7 * US, WINDOW, 900 * US])
        yielded = chance.randrange(4 * US)
        stopped = in_c.must_stop_polling(ctypes.byref(computed), ctypes.c_int64(yielded), ctypes.c_int64(window))
        assert stopped == specified.must_stop_polling(yielded, window)
        planned = in_c.next_action(ctypes.byref(computed), ctypes.c_int64(now), ctypes.c_int64(window))
        assert planned == specified.next_action(now, window)
        times = now, now + chance.randrange(400 * US), window
        assert in_c.poll_end(ctypes.byref(computed), *map(ctypes.c_int64, times)) == specified.poll_end(*times)


# ---- in a queue ----


@pytest.fixture
def one_cpu() -> Iterator[None]:
    """This process on one CPU, so that both sides of a queue in it are there."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    yield
    os.sched_setaffinity(0, allowed)


def echo(requests: MessageQueue, replies: MessageQueue, times: int) -> None:
    for _ in range(times):
        record = requests.receive(time.monotonic_ns() + 20_000 * MS, WINDOW)
        assert record is not None
        replies.send(record)


@pytest.mark.usefixtures("one_cpu")
def test_two_sides_on_one_cpu_exchange_records_in_order(make_queue: Callable[..., MessageQueue]) -> None:
    requests, replies = make_queue(8, 4), make_queue(8, 4)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(echo, requests, replies, 500)
        for i in range(500):
            requests.send(i.to_bytes(8, "little"))
            assert replies.receive(time.monotonic_ns() + 20_000 * MS, WINDOW) == i.to_bytes(8, "little")
        done.result(20)


def status_of(thread: int) -> int:
    return int(Path(f"/proc/{thread}/timerslack_ns").read_text())


def send_after(queue: MessageQueue, wait_s: float, receiver: int) -> int:
    """Send once `wait_s` has passed; return the receiver's timer slack at a quarter of that."""
    threading.Event().wait(wait_s / 4)
    slack = status_of(receiver)
    threading.Event().wait(wait_s * 3 / 4)
    queue.send(bytes(8))
    return slack


@pytest.fixture
def sender() -> Iterator[ThreadPoolExecutor]:
    """A thread on one CPU; the test's own is on another meanwhile."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("one CPU only: there are no timed sleeps beside a writer on the same CPU")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(os.sched_setaffinity, 0, {max(allowed)}).result(20)
        os.sched_setaffinity(0, {min(allowed)})
        yield pool
        os.sched_setaffinity(0, allowed)


def accustom(queue: MessageQueue, sender: ThreadPoolExecutor, wait_s: float, window_ns: int) -> list[int]:
    """Receive a dozen records that come at equal intervals; return the timer slack in each wait."""
    seen, me = [], threading.get_native_id()
    for _ in range(12):
        sent = sender.submit(send_after, queue, wait_s, me)
        assert queue.receive(time.monotonic_ns() + 20_000 * MS, window_ns)
        seen.append(sent.result(20))
    return seen


def test_a_timed_sleep_has_exact_timers_and_restores_the_timer_slack(
    make_queue: Callable[..., MessageQueue], sender: ThreadPoolExecutor
) -> None:
    queue, own = make_queue(8, 4), status_of(threading.get_native_id())
    seen = accustom(queue, sender, 0.02, 15 * MS)
    assert (seen[0], 1 in seen) == (own, True)
    assert status_of(threading.get_native_id()) == own


def test_waits_of_any_length_beyond_the_window_use_no_cpu(
    make_queue: Callable[..., MessageQueue], sender: ThreadPoolExecutor
) -> None:
    queue, me, spent = make_queue(8, 4), threading.get_native_id(), []
    for wait_s in [0.03, 0.06] * 6:
        sent, before = sender.submit(send_after, queue, wait_s, me), time.thread_time_ns()
        assert queue.receive(time.monotonic_ns() + 20_000 * MS, 15 * MS)
        spent.append(time.thread_time_ns() - before)
        sent.result(20)
    assert min(spent[6:]) < 3 * MS, "every wait is polled for, for 15 ms where this thread has a core"


def polled(queue: MessageQueue, sender: ThreadPoolExecutor) -> int:
    """Return how many of a dozen equal waits a poll ended."""
    words = np.zeros(3, np.uint64)  # received, polled, slept
    queue.count_waits(memoryview(words).cast("B"))
    accustom(queue, sender, 0.02, 15 * MS)
    return int(words[1])


def test_a_receiver_does_not_poll_for_long_on_a_cpu_that_another_thread_uses(
    make_queue: Callable[..., MessageQueue], sender: ThreadPoolExecutor
) -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:  # on this thread's CPU
        try:
            count = polled(make_queue(8, 4), sender)
        finally:
            other.kill()
    assert count <= 3


def test_a_deadline_ends_a_timed_sleep() -> None:
    queue: Any = MessageQueue.create(8, 4, core=cores.CORES.load("python"), shared=False)
    with queue:
        assert late_by(queue, used_to(*[90 * MS] * 50)) < 15 * MS, "the timed sleep ends after another 85 ms"


def late_by(queue: Any, habit: WaitEstimator) -> int:
    """Receive until a deadline during a timed sleep; return its delay after the deadline, the best of a few."""
    late = []
    for _ in range(5):
        queue._ring._estimator = habit
        deadline = time.monotonic_ns() + 2 * MS
        assert queue.receive(deadline, WINDOW) is None
        late.append(time.monotonic_ns() - deadline)
    return min(late)


def test_a_signal_handler_that_raises_during_a_timed_sleep_leaves_the_timer_slack_unchanged() -> None:
    queue: Any = MessageQueue.create(8, 4, core=cores.CORES.load("python"), shared=False)
    own = status_of(threading.get_native_id())

    def interrupt(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with queue:
            for after_us in range(1, 400):
                queue._ring._estimator = used_to(*[30 * MS] * 50)
                with suppress(InterruptedError):
                    signal.setitimer(signal.ITIMER_REAL, after_us / 1e6)
                    queue.receive(time.monotonic_ns() + 20_000 * MS, WINDOW)
                assert status_of(threading.get_native_id()) == own
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("one_cpu")
def test_the_python_core_yields_to_a_writer_on_its_own_cpu(
    monkeypatch: pytest.MonkeyPatch, until: Callable[[Callable[[], object]], None]
) -> None:
    yields: list[int] = []
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(1))

    def wait_in_vain(queue: MessageQueue) -> int:
        """Return how often a wait of 1 ms yields."""
        yields.clear()
        assert queue.receive(time.monotonic_ns() + MS, WINDOW) is None
        return len(yields)

    def new_queue() -> MessageQueue:
        return MessageQueue.create(8, 4, core=cores.CORES.load("python"), shared=False)

    def polls() -> bool:
        with new_queue() as queue:  # nobody has said yet where its writer is
            return wait_in_vain(queue) > 1

    until(polls)  # at once, unless this thread loses the CPU during the window
    with new_queue() as queue:
        queue.send(bytes(8))
        assert queue.receive(0, WINDOW) == bytes(8)
        assert wait_in_vain(queue) == 1, "the core yields once, and sleeps"


def test_the_python_core_sleeps_through_long_waits_and_then_reads_what_arrived() -> None:
    queue: Any = MessageQueue.create(8, 4, core=cores.CORES.load("python"), shared=False)
    with queue, ThreadPoolExecutor(1) as pool:
        estimator = queue._ring._estimator = used_to(*[30 * MS] * 50)
        received = pool.submit(queue.receive, time.monotonic_ns() + 20_000 * MS, WINDOW)
        queue.send(b"too soon")
        assert received.result(20) == b"too soon"
    assert estimator.mean < 30 * MS
