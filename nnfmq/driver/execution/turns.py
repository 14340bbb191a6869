"""Turns at the cores: when each worker of a driver may compute.

If more workers compute than there are cores, the kernel's scheduler interrupts each run again and again, so each ends
late, and none of them in the order of deadlines. So at most as many have a turn as there are cores. Whoever ends a turn
chooses who is next, gives it the turn and wakes it.

The workers change the page under a lock on its file, which the kernel releases if its owner dies. A turn holds nothing
else, and there are three ways in which it does not delay others for long:

* The supervisor clears the turn of a worker that has exited, and wakes those that wait. If the supervisor has exited,
  nobody would, and the workers then compute without turns.
* A turn counts no longer than HOLD_NS, or twice the time that its run takes usually. The kernel's scheduler then shares
  the cores, also with a worker that was stopped.
* An execution that has waited for longer than it would take with an equal share of the cores begins without a turn.

Whoever waits looks again every LOOK_NS, so a lost wake-up costs that time at most.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic_ns
from typing import NamedTuple

import numpy as np

from nnfmq.base.memory import Memory
from nnfmq.base.ownership import Closable
from nnfmq.base.processes import allowed_cpus
from nnfmq.engines.compiled.thread_pool import CoreDivision, CorePauses
from nnfmq.hal.client_class import ClientClass
from nnfmq.queue.futex import ALL_BITS, futex_wait, futex_wake

__all__ = [
    "CREDIT_NS",
    "DUE_WITHOUT_DEADLINE_NS",
    "HOLD_NS",
    "IDLE",
    "LEAD_NS",
    "LOOK_NS",
    "RUNNING",
    "SLOTS_MAX",
    "WAITING",
    "CorePage",
    "CoreShares",
    "CoreTurns",
    "Waiter",
    "begin_user_ns",
    "next_turn",
    "possible_virtual_ns",
    "wait_limit_ns",
]


# ----------------------------------------------------------------------------------------------------------------------
# How the workers of one driver share the cores: a page in which each says that it computes, or waits for its turn.
#
# The page has for each worker
#
# * a busy byte, which only that worker writes: 1 while its thread pool runs a model. Each pool counts them before each
#   launch, and uses no more than its share of the cores (`engines.compiled.thread_pool`);
# * a claim byte, which only that worker writes: 1 while it has or awaits a turn. The pools count it like a busy byte;
# * a turn, IDLE, WAITING or RUNNING, and what the choice of the next turn depends on. At most as many
#   executions have a turn as there are cores. Workers change the page under a file lock;
# * the class of its client (`hal.client_class`), which only the supervisor writes;
# * how many threads its last run used, and whether it pauses for a client of a higher class. Only its pool writes both;
# * the user of its client, as a number that the supervisor gives. 0: all clients are of one user.
#
# For each user there is a virtual time, which workers change under the file lock.
#
# A worker that dies at any instruction leaves at most its own entries, which the supervisor clears when the worker has
# exited. The kernel releases the lock.
#
# Only the supervisor and its workers have the page, but one of them may be compromised (see
# docs/explanation/security-model.md). It can take turns from others, and slow them down. It can neither end them nor
# let them wait for longer than `wait_limit_ns`: the times in the page are read within bounds.


SLOTS_MAX = 64
IDLE, WAITING, RUNNING = 0, 1, 2
_CLAIMS, _TURNS, _WORDS, _TIMES = (SLOTS_MAX * number for number in (1, 2, 3, 7))
_FIELDS = 5
_VIRTUAL_NOW = _FIELDS * SLOTS_MAX
_CLASSES = _TIMES + 8 * (_VIRTUAL_NOW + 1)
_USES, _PAUSED, _RESUMED = (_CLASSES + SLOTS_MAX * number for number in (1, 2, 3))
_USERS = _RESUMED + 8
_USER_TIMES = _USERS + SLOTS_MAX
_USER_NUMBERS = SLOTS_MAX + 1  # from 0 on
_PAGE_BYTES = _USER_TIMES + 8 * _USER_NUMBERS


class CorePage:
    """The page's fields, as arrays with an entry for each slot from 0 to SLOTS_MAX - 1. Borrows `memory`.

    Attributes:
        busy: The busy bytes.
        claims: The claim bytes.
        turns: IDLE, WAITING or RUNNING.
        words: Futex words, which change with each turn.
        due_ns: When the waiting execution is due.
        has_deadline: Whether that is its deadline.
        virtual_ns: The virtual time of the client.
        expected_ns: How long the execution will probably run.
        until_ns: Until when the running execution counts.
        classes: The classes of the clients.
        uses: How many threads the last run of each worker used.
        paused: Whether a worker pauses.
        resumed: A futex word, which changes when those that pause are woken.
        users: The numbers of the clients' users.
        user_ns: The virtual time of each user, by number from 1 on.
    """

    def __init__(self, memory: Memory) -> None:
        view = memory.view
        self.busy = np.frombuffer(view, np.uint8, SLOTS_MAX)
        self.claims = np.frombuffer(view, np.uint8, SLOTS_MAX, _CLAIMS)
        self.turns = view[_TURNS : _TURNS + SLOTS_MAX]
        self.words = view[_WORDS : _WORDS + 4 * SLOTS_MAX].cast("I")
        self.classes, self.uses, self.paused = (
            np.frombuffer(view, np.uint8, SLOTS_MAX, begin) for begin in (_CLASSES, _USES, _PAUSED)
        )
        self.resumed = np.frombuffer(view, np.uint32, 1, _RESUMED)
        self.users = view[_USERS : _USERS + SLOTS_MAX]
        self.user_ns = view[_USER_TIMES:_PAGE_BYTES].cast("q")
        times = view[_TIMES:_CLASSES].cast("q")
        self.due_ns, self.has_deadline, self.virtual_ns, self.expected_ns, self.until_ns = (
            times[field * SLOTS_MAX : (field + 1) * SLOTS_MAX] for field in range(_FIELDS)
        )
        self._virtual_now = times[_VIRTUAL_NOW:]
        self._words_address = int(self.busy.ctypes.data) + _WORDS

    @property
    def virtual_now_ns(self) -> int:
        """The virtual time of the client that got a turn last."""
        return self._virtual_now[0]

    @virtual_now_ns.setter
    def virtual_now_ns(self, value: int) -> None:
        self._virtual_now[0] = value

    @property
    def min_user_ns(self) -> int:
        """The least virtual time of the users whose clients waited or ran last; it never decreases."""
        return self.user_ns[0]

    @min_user_ns.setter
    def min_user_ns(self, value: int) -> None:
        self.user_ns[0] = value

    def word_address(self, slot: int) -> int:
        """Return the address of a futex word."""
        return self._words_address + 4 * slot

    def wake(self, slot: int) -> None:
        """Let the worker of `slot` look at its turn again."""
        self.words[slot] = (self.words[slot] + 1) % (1 << 32)
        futex_wake(self.word_address(slot), ALL_BITS)

    def division(self, slot: int) -> CoreDivision:
        """Return the busy bytes, for the pool of the worker with `slot`."""
        pauses = CorePauses(self.classes, self.uses, self.paused, self.resumed)
        return CoreDivision(self.busy, self.claims, slot, pauses)

    def class_of(self, slot: int) -> int:
        """Return the class of a worker's client."""
        return int(self.classes[slot]) or ClientClass.NORMAL

    def user_of(self, slot: int) -> int:
        """Return the number of the user of a worker's client."""
        return min(self.users[slot], SLOTS_MAX)

    def resume(self) -> None:
        """Let the workers that pause look again whether a core is left for them."""
        if self.paused.any():
            self.resumed[0] = (int(self.resumed[0]) + 1) % (1 << 32)
            futex_wake(int(self.resumed.ctypes.data), ALL_BITS)

    def release(self) -> None:
        """Let the memory be unmapped. The object must not be used afterwards."""
        self.__dict__.clear()


class CoreShares(Closable):
    """The supervisor's side, for workers with the slots 1 to `slots`. Owns its memory; close it, or use `with`.

    Forked children do not inherit the mapping; workers map the memory themselves.
    """

    def __init__(self, slots: int) -> None:
        assert slots <= SLOTS_MAX
        self.memory = Memory.create(_PAGE_BYTES, "nnfmq-cores")
        self._page = CorePage(self.memory)
        self._uids: dict[int, int] = {}  # by slot, of a driver that serves several users
        self._numbers: dict[int, int] = {}  # of users, by uid
        self.memory.keep_from_children()

    def set_class(self, slot: int, client_class: ClientClass) -> None:
        """Set the class of the client whose worker has `slot`, or will have it."""
        self._page.classes[slot - 1] = client_class

    def set_user(self, slot: int, uid: int) -> None:
        """Set the user of the client whose worker will have `slot`: clients of each uid share the cores as one does."""
        self._uids[slot] = uid
        if uid not in self._numbers:
            number = self._numbers[uid] = min(set(range(1, _USER_NUMBERS)) - set(self._numbers.values()))
            self._page.user_ns[number] = 0
        self._page.users[slot - 1] = self._numbers[uid]

    def release(self, slot: int) -> None:
        """Take back what a worker that has exited has of the cores, and let those that wait choose the next turn."""
        page = self._page
        page.busy[slot - 1] = page.claims[slot - 1] = page.uses[slot - 1] = page.paused[slot - 1] = 0
        page.turns[slot - 1], page.classes[slot - 1], page.users[slot - 1] = IDLE, 0, 0
        uid = self._uids.pop(slot, None)
        if uid is not None and uid not in self._uids.values():
            del self._numbers[uid]
        page.resume()
        for waiting, turn in enumerate(bytes(page.turns)):
            if turn == WAITING:
                page.wake(waiting)

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._page.release()
        self.memory.close()


# ----------------------------------------------------------------------------------------------------------------------
# Whose turn it is at the cores: the rule by which the workers of a driver choose among waiting executions.
#
# Clients of the highest class that waits are first. Among them, each user and each client has a *virtual time*: the
# time that their executions had the cores. A user that has had more than another one that waits, by more than LEAD_NS,
# has to wait for it; so has a client for another one of the same user. Among the others the execution that is due first
# is next. One without a deadline is due DUE_WITHOUT_DEADLINE_NS after its arrival, so it goes before all that arrive
# and are due later. An execution that cannot end before its deadline any more goes after those that can.
#
# Arithmetic only: times are integer nanoseconds, deadlines those of the monotonic clock.


LEAD_NS = 50_000_000
CREDIT_NS = 2 * LEAD_NS
DUE_WITHOUT_DEADLINE_NS = 100_000_000
_WAIT_MIN_NS = 1_000_000  # for a wake-up, and for the error of the estimate


class Waiter(NamedTuple):
    """A waiting execution.

    Attributes:
        slot: Its worker.
        due_ns: Its deadline, or when it is due without one.
        has_deadline: Whether it has a deadline.
        virtual_ns: The virtual time of its client.
        expected_ns: How long it will probably run.
        client_class: The class of its client.
        user: The number of the client's user.
        user_ns: The virtual time of that.
    """

    slot: int
    due_ns: int
    has_deadline: bool
    virtual_ns: int
    expected_ns: int
    client_class: int
    user: int = 0
    user_ns: int = 0


def next_turn(waiters: Sequence[Waiter], now_ns: int) -> Waiter:
    """Return the one of `waiters`, at least one, whose turn is next."""
    highest = max(waiter.client_class for waiter in waiters)
    waiters = [waiter for waiter in waiters if waiter.client_class == highest]
    latest = min(waiter.user_ns for waiter in waiters) + LEAD_NS
    lowest: dict[int, int] = {}  # virtual time of a client, by user
    for waiter in waiters:
        lowest[waiter.user] = min(waiter.virtual_ns, lowest.get(waiter.user, waiter.virtual_ns))
    return min(
        (
            waiter
            for waiter in waiters
            if waiter.user_ns <= latest and waiter.virtual_ns <= lowest[waiter.user] + LEAD_NS
        ),
        key=lambda waiter: (
            waiter.has_deadline and now_ns + waiter.expected_ns > waiter.due_ns,
            waiter.due_ns,
            waiter.user_ns,
            waiter.virtual_ns,
            waiter.slot,
        ),
    )


def possible_virtual_ns(virtual_ns: int, now_ns: int) -> int:
    """Return the possible virtual time that is nearest to one that another worker may have written.

    A client's executions follow each other, so its virtual time is at most the time since the driver's start, and that
    at most the time of the monotonic clock.
    """
    return min(max(virtual_ns, 0), now_ns)


def begin_user_ns(own_ns: int, min_ns: int) -> int:
    """Return the virtual time of a user who begins to wait; `min_ns` is the least of those who waited or ran.

    He keeps what he is behind, up to CREDIT_NS, so that one with one client loses nothing between two executions; but
    the time in which he needed no core is no credit.
    """
    return max(own_ns, min_ns - CREDIT_NS)


def wait_limit_ns(expected_ns: int, executions: int, cores: int) -> int:
    """Return for how long an execution waits: as long as it would take if all ran at once with equal shares.

    Then it begins without a turn: a short execution must not wait for long ones. `executions` are all that wait or run.
    """
    return _WAIT_MIN_NS + expected_ns * executions * 5 // (4 * cores)


# ----------------------------------------------------------------------------------------------------------------------
# Turns at the cores: when each worker of a driver may compute.


HOLD_NS = 100_000_000
_HOLD_MAX_NS = 1_000_000_000
LOOK_NS = 20_000_000
_LOCK_TRIES, _LOCK_PAUSE_S = 50, 20e-6  # a holder works for some microseconds, unless it was stopped


class CoreTurns:
    """A worker's side of the page. Takes ownership of `memory`, which it keeps as long as the process lives.

    `take` and `release` are called in turns, by one thread at a time.
    """

    def __init__(self, memory: Memory, slot: int, supervisor_pid: int) -> None:
        self._memory = memory
        self._page = CorePage(memory)
        self._me = slot - 1
        self._supervisor_pid = supervisor_pid
        self._cores = 0  # until the first turn: the CPUs that the process may use can change until its first model
        self._began_ns = 0
        self._chosen: list[int] = []  # workers that have a turn, and sleep
        self._page.turns[self._me] = IDLE

    @property
    def division(self) -> CoreDivision:
        """The division of the cores between this worker's pool and the others."""
        return self._page.division(self._me)

    @property
    def cores(self) -> int:
        """The cores that this worker shares with the others."""
        self._cores = self._cores or allowed_cpus()
        return self._cores

    def others(self) -> int:
        """Return how many other workers have a turn or wait for one."""
        turns = bytes(self._page.turns)
        return len(turns) - turns.count(IDLE) - (turns[self._me] != IDLE)

    def take(self, due_ns: int, has_deadline: bool, expected_ns: int) -> None:
        """Wait until it is this worker's turn, for an execution that is due at `due_ns` and runs for `expected_ns`.

        Does not wait beyond the deadline, nor for longer than equal shares of the cores would take.
        """
        page, me, arrived_ns = self._page, self._me, monotonic_ns()
        page.due_ns[me], page.has_deadline[me], page.expected_ns[me] = due_ns, has_deadline, expected_ns
        page.until_ns[me] = arrived_ns + _hold_ns(expected_ns)
        page.claims[me] = 1
        with self._locked() as is_locked:
            latest = max(page.virtual_ns[me], page.virtual_now_ns)
            page.virtual_ns[me] = possible_virtual_ns(latest, arrived_ns)
            self._begin_user(arrived_ns)
            page.turns[me] = WAITING
            if is_locked:
                self._give_turns(arrived_ns)
        self.wake_chosen()
        self._wait(arrived_ns, due_ns if has_deadline else None, expected_ns)
        self._began_ns = monotonic_ns()

    def _begin_user(self, now_ns: int) -> None:
        """Let the user begin to wait or run, if none of his clients does. No effect if all clients are of one."""
        page, mine = self._page, self._page.user_of(self._me)
        if not mine:
            return
        active = self._active_users()
        page.min_user_ns = max(page.min_user_ns, self._min_of(active, now_ns))
        if mine not in active:
            min_ns = min(max(page.min_user_ns, 0), now_ns * self.cores)
            page.user_ns[mine] = begin_user_ns(self._user_ns(mine, now_ns), min_ns)

    def _charge_user(self, now_ns: int) -> None:
        """Add the time of the turn that ends to the user's, if there are several."""
        page, mine = self._page, self._page.user_of(self._me)
        if mine:
            page.user_ns[mine] = self._user_ns(mine, now_ns) + now_ns - self._began_ns
            page.min_user_ns = max(page.min_user_ns, self._min_of(self._active_users(), now_ns))

    def _active_users(self) -> set[int]:
        """Return the users whose clients wait or run."""
        return {self._page.user_of(slot) for slot, turn in enumerate(bytes(self._page.turns)) if turn != IDLE}

    def _min_of(self, users: set[int], now_ns: int) -> int:
        return min((self._user_ns(user, now_ns) for user in users), default=0)

    def _user_ns(self, user: int, now_ns: int) -> int:
        """Return the virtual time of a user within bounds: at most that of all cores since they exist."""
        return min(max(self._page.user_ns[user], 0), now_ns * self.cores)

    def _executions(self) -> int:
        """Return how many executions with equal shares of the cores an execution of this worker would be one of.

        All that wait or run; or more for a user with more than others, because users have equal shares.
        """
        page, turns = self._page, bytes(self._page.turns)
        users = Counter(page.user_of(slot) for slot, turn in enumerate(turns) if turn != IDLE or slot == self._me)
        return max(users.total(), users[page.user_of(self._me)] * len(users))

    def hurry(self, due_ns: int, has_deadline: bool) -> None:
        """Change when the waiting execution is due: another one will have its turn."""
        self._page.due_ns[self._me], self._page.has_deadline[self._me] = due_ns, has_deadline

    def release(self) -> None:
        """End this worker's turn. The client is charged with its time. Call `wake_chosen` next."""
        page, me, now_ns = self._page, self._me, monotonic_ns()
        with self._locked() as is_locked:
            page.virtual_ns[me] = possible_virtual_ns(page.virtual_ns[me], now_ns) + now_ns - self._began_ns
            self._charge_user(now_ns)
            page.turns[me], page.claims[me] = IDLE, 0
            if is_locked:
                self._give_turns(now_ns)

    def wake_chosen(self) -> None:
        """Wake the workers that have been given turns, and those that pause.

        A separate call, because the kernel may let a woken worker run at once on this CPU: the page must not be locked
        then, and the reply of the execution that has ended should be sent.
        """
        while self._chosen:
            self._page.wake(self._chosen.pop())
        if not self._page.claims[self._me]:
            self._page.resume()

    @property
    def are_taken(self) -> bool:
        """Whether an execution with a deadline, or of another user, waits or runs: long executions then take turns."""
        page, mine = self._page, self._page.user_of(self._me)
        return any(
            turn and (page.has_deadline[slot] or page.user_of(slot) != mine)
            for slot, turn in enumerate(bytes(page.turns))
        )

    def begin(self, expected_ns: int) -> None:
        """Begin without waiting, because turns are not taken."""
        page, me = self._page, self._me
        page.has_deadline[me], page.expected_ns[me] = False, expected_ns
        self._began_ns = monotonic_ns()
        page.claims[me] = 1
        page.until_ns[me] = self._began_ns + _hold_ns(expected_ns)
        self._begin_user(self._began_ns)
        page.turns[me] = RUNNING

    def _wait(self, arrived_ns: int, deadline_ns: int | None, expected_ns: int) -> None:
        page, me = self._page, self._me
        while True:
            seen = page.words[me]  # before the turn: whoever gives the turn changes the word afterwards
            if page.turns[me] == RUNNING:
                return
            end_ns = arrived_ns + wait_limit_ns(expected_ns, self._executions(), self.cores)
            if deadline_ns is not None:
                end_ns = min(end_ns, deadline_ns)
            now_ns = monotonic_ns()
            if now_ns >= end_ns or os.getppid() != self._supervisor_pid:
                page.until_ns[me] = now_ns + _hold_ns(expected_ns)
                page.turns[me] = RUNNING
                return
            futex_wait(page.word_address(me), seen, min(end_ns, now_ns + LOOK_NS), ALL_BITS)
            if page.turns[me] != RUNNING:
                with self._locked() as is_locked:
                    if is_locked:
                        self._give_turns(monotonic_ns())
                self.wake_chosen()

    def _give_turns(self, now_ns: int) -> None:
        """Give the next turns, as long as a core is free and an execution waits. Under the lock."""
        page, turns = self._page, bytes(self._page.turns)
        if WAITING not in turns:
            return
        waiting = [self._waiter(slot, now_ns) for slot, turn in enumerate(turns) if turn == WAITING]
        running = [
            page.class_of(slot) for slot, turn in enumerate(turns) if turn == RUNNING and page.until_ns[slot] > now_ns
        ]
        while waiting:
            chosen = next_turn(waiting, now_ns)
            if sum(each >= chosen.client_class for each in running) >= self.cores:
                return  # those of lower classes pause for it
            waiting.remove(chosen)
            running.append(chosen.client_class)
            page.until_ns[chosen.slot] = now_ns + _hold_ns(chosen.expected_ns)
            page.virtual_now_ns = max(possible_virtual_ns(page.virtual_now_ns, now_ns), chosen.virtual_ns)
            page.turns[chosen.slot] = RUNNING
            if chosen.slot != self._me:
                self._chosen.append(chosen.slot)

    def _waiter(self, slot: int, now_ns: int) -> Waiter:
        page = self._page
        return Waiter(
            slot,
            page.due_ns[slot],
            bool(page.has_deadline[slot]),
            possible_virtual_ns(page.virtual_ns[slot], now_ns),
            page.expected_ns[slot],
            page.class_of(slot),
            page.user_of(slot),
            self._user_ns(page.user_of(slot), now_ns),
        )

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Lock the page; yield whether that was possible. A stopped process may have the lock."""
        is_locked = self._lock()
        try:
            yield is_locked
        finally:
            if is_locked:
                fcntl.lockf(self._memory.fileno(), fcntl.LOCK_UN)

    def _lock(self) -> bool:
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.lockf(self._memory.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                time.sleep(_LOCK_PAUSE_S)
        return False


def _hold_ns(expected_ns: int) -> int:
    return min(max(HOLD_NS, 2 * expected_ns), _HOLD_MAX_NS)
