"""ProcessQueue: turns at compile processes among the clients that wait for one, and the limit of all processes.

At most `processes_max` processes run, one for each core, however many the clients ask for. A free place goes to the uid
that has the fewest, of its clients to the one that has the fewest, and of that client's claims to one whose caller
waits; among equals, to the client that has not got a place for longest. A process that has had its turn, TURN_NS, is
told to end, between two parts of a model, when a client with fewer processes waits. A background compilation has no
turn while a caller waits.

A process ends only after the part that it compiles. One that has not ended OVERRUN_NS after it was told does not count,
so that its client delays no other; but at most `processes_max` do not count, which bounds what exists at any time.

Arithmetic only: times are nanoseconds of the monotonic clock.
"""

from __future__ import annotations

from collections import Counter

__all__ = ["OVERRUN_NS", "TURN_NS", "Claim", "ProcessQueue"]

TURN_NS = 500_000_000
OVERRUN_NS = 1_000_000_000


class Claim:
    """A compile process that a client has or waits for. Compared by identity."""

    __slots__ = ("client", "is_background", "started_ns", "told_ns", "uid")

    def __init__(self, client: int, uid: int, is_background: bool) -> None:
        self.client = client
        self.uid = uid
        self.is_background = is_background
        self.started_ns = 0
        self.told_ns: int | None = None  # when it was told to end


class _Places:
    """The number of places that each uid and each client has."""

    def __init__(self, claims: list[Claim]) -> None:
        self.of_uid = Counter(claim.uid for claim in claims)
        self.of_client = Counter(claim.client for claim in claims)

    def add(self, claim: Claim) -> None:
        self.of_uid[claim.uid] += 1
        self.of_client[claim.client] += 1

    def rank(self, claim: Claim) -> tuple[int, int, bool]:
        """Return the rank of a waiting claim: the least is first."""
        return self.of_uid[claim.uid], self.of_client[claim.client], claim.is_background

    def is_ahead(self, waiting: Claim, running: Claim) -> bool:
        """Return whether a running process should end for a waiting claim, when it has had its turn."""
        if waiting.client == running.client:
            return running.is_background and not waiting.is_background
        if waiting.uid == running.uid:
            return self.of_client[running.client] > self.of_client[waiting.client]
        return self.of_uid[running.uid] > self.of_uid[waiting.uid]


class ProcessQueue:
    """The claims of all clients. `processes_max` is the number of places."""

    def __init__(self, processes_max: int) -> None:
        self._processes_max = processes_max
        self._waiting: list[Claim] = []  # in the order of arrival
        self._running: list[Claim] = []
        self._last_start: dict[int, int] = {}  # of the clients with claims: the number of their latest start
        self._starts = 0

    def add(self, claim: Claim) -> None:
        """Let a claim wait."""
        self._waiting.append(claim)

    def remove(self, claim: Claim) -> None:
        """Forget a claim: its process has ended, or is not wanted any more."""
        (self._waiting if claim in self._waiting else self._running).remove(claim)
        if all(other.client != claim.client for other in (*self._waiting, *self._running)):
            self._last_start.pop(claim.client, None)

    def start_next(self, now_ns: int) -> Claim | None:
        """Give the next place away; return the claim whose process the caller starts now, None if there is none."""
        overrunning = len(self._overrunning(now_ns))
        if not self._waiting or len(self._running) - min(overrunning, self._processes_max) >= self._processes_max:
            return None
        claim = self._best(self._waiting, _Places(self._running))
        self._waiting.remove(claim)
        self._running.append(claim)
        claim.started_ns = now_ns
        self._starts += 1
        self._last_start[claim.client] = self._starts
        return claim

    def end_next(self, now_ns: int) -> Claim | None:
        """Return a claim whose process the caller tells to end now, for another client's; None if there is none."""
        staying = [claim for claim in self._running if claim.told_ns is None]
        waiting, places = list(self._waiting), _Places(staying)
        for _ in range(self._processes_max - len(staying)):  # each of these places is free soon, and promised
            if waiting:
                promised = self._best(waiting, places)
                waiting.remove(promised)
                places.add(promised)
        if not waiting:
            return None
        best = self._best(waiting, places)
        ending = [claim for claim in staying if places.is_ahead(best, claim) and _turn_end(claim, best) <= now_ns]
        if not ending:
            return None
        claim = max(ending, key=lambda claim: (places.rank(claim), -claim.started_ns))
        claim.told_ns = now_ns
        return claim

    def next_change_ns(self, now_ns: int) -> int | None:
        """Return when to call `start_next` and `end_next` again, if no claim comes or goes; None: not before."""
        if not self._waiting:
            return None
        told = [claim.told_ns + OVERRUN_NS for claim in self._running if claim.told_ns is not None]
        turns = [claim.started_ns + TURN_NS for claim in self._running if claim.told_ns is None]
        return min((time_ns for time_ns in (*told, *turns) if time_ns > now_ns), default=None)

    def _best(self, waiting: list[Claim], places: _Places) -> Claim:
        return min(waiting, key=lambda claim: (places.rank(claim), self._last_start.get(claim.client, 0)))

    def _overrunning(self, now_ns: int) -> list[Claim]:
        return [claim for claim in self._running if claim.told_ns is not None and claim.told_ns + OVERRUN_NS <= now_ns]


def _turn_end(running: Claim, waiting: Claim) -> int:
    """Return until when a process may run although `waiting` is ahead."""
    has_turn = waiting.is_background or not running.is_background
    return running.started_ns + TURN_NS * has_turn
