"""The memory of a state: values of words, and which accesses each thread knows of.

Atomic words keep the messages that some thread may still read: every store, in the order in which they happen. A thread
never reads an older message than one that it knows of. Plain words have one value, and no two threads may access one,
one of them storing, unless the first access *happens before* the second (C11 5.1.2.4): that is a data race. A release
store passes on what its thread knows of, an acquire load of its message takes it over. Sequentially consistent loads
do not read older messages than the last sequentially consistent access to the word has stored or read.

`Uses` says what can matter: an exploration with `Machine.VALUES` finds it, and the others leave out the rest, so that
states which differ in nothing else are one.

With `Machine.IN_ORDER` a load reads the newest message always, whatever its order; what is passed on depends on the
orders all the same. So data races are found there too, and the states are far fewer.

Not modelled: stores that pass each other (stores of one word happen in the order of the schedule), and fences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from support.pool_explorer.replay import Access

__all__ = ["DataRaceError", "Knowledge", "Machine", "Message", "State", "Uses", "Words", "World"]

_ACQUIRES = frozenset({"acquire", "acq_rel", "seq_cst"})
_RELEASES = frozenset({"release", "acq_rel", "seq_cst"})
_EVERYTHING = -1  # as a set of bits

View = tuple[int, ...]
"""For each atomic word the oldest message that may still be read."""

Knowledge = tuple[int, View]
"""The plain accesses that a thread does NOT know of, as a set of bits, and its view."""

Message = tuple[int, int, View]
"""A value, and the knowledge that it passes on."""

State = tuple[tuple[tuple[Message, ...], ...], tuple[int, ...], View, tuple[Knowledge, ...]]
"""Messages of each atomic word, values of the plain words, the view of sequentially consistent loads, the threads'."""


class Machine(Enum):
    """What a load may read, and whether it is checked that accesses are ordered."""

    VALUES = "values"
    IN_ORDER = "in order"
    C11 = "C11"


class DataRaceError(Exception):
    """Two accesses to a plain word, one of them a store, are not ordered."""


@dataclass(frozen=True)
class Uses:
    """How the threads use words.

    `acquired` are atomic words that are loaded with acquire, `unordered` those with an access that is not sequentially
    consistent; `loaders` are threads and the atomic words that they load; `accesses` are those to plain words.
    """

    acquired: set[int] = field(default_factory=set)
    unordered: set[int] = field(default_factory=set)
    loaders: set[tuple[int, int]] = field(default_factory=set)
    accesses: set[tuple[int, int, bool]] = field(default_factory=set)

    def add(self, thread: int, access: Access) -> None:
        """Take an access of a thread into account."""
        if access.kind in ("read", "write"):
            self.accesses.add((access.place, thread, access.kind == "write"))
            return
        if access.order in _ACQUIRES and access.kind != "store":
            self.acquired.add(access.place)
        if access.order != "seq_cst":
            self.unordered.add(access.place)
        if access.kind in ("load", "compare"):
            self.loaders.add((thread, access.place))

    def may_be_old(self, thread: int, place: int) -> bool:
        """Return whether a load of `thread` may read an old message."""
        return place in self.unordered and (thread, place) in self.loaders

    def conflicts(self, place: int, thread: int, is_store: bool) -> bool:
        """Return whether an access of another thread to this plain word has to be ordered after this one."""
        return any(p == place and t != thread and (is_store or stores) for p, t, stores in self.accesses)


@dataclass
class Words:
    """The words that a scenario uses, numbered at their first use; they contain 0 before, or `initial`."""

    threads: int
    machine: Machine
    initial: dict[int, int]
    uses: Uses

    def __post_init__(self) -> None:
        self.atomic: dict[int, int] = {}
        self.plain: dict[int, int] = {}
        self.has_views = self.machine is Machine.C11
        self.acquired: list[bool] = []  # of atomic words
        self.may_be_old: list[list[bool]] = []  # of atomic words, by thread
        self._bits: dict[tuple[int, int, bool], int] = {}

    def atomic_number(self, place: int) -> int:
        if place not in self.atomic:
            self.atomic[place] = len(self.atomic)
            self.acquired.append(place in self.uses.acquired)
            self.may_be_old.append([self.uses.may_be_old(thread, place) for thread in range(self.threads)])
        return self.atomic[place]

    def plain_number(self, place: int) -> int:
        return self.plain.setdefault(place, len(self.plain))

    def bit(self, place: int, thread: int, is_store: bool) -> int:
        """Return the bit of a thread's last load of, or last store to a plain word; 0 if it is of no consequence."""
        key = place, thread, is_store
        if key not in self._bits:
            matters = self.machine is not Machine.VALUES and self.uses.conflicts(place, thread, is_store)
            self._bits[key] = matters << (self.plain_number(place) * 2 * self.threads + 2 * thread + is_store)
        return self._bits[key]

    def bits(self, number: int) -> int:
        """Return the bits of all accesses to a plain word."""
        return (1 << 2 * self.threads) - 1 << number * 2 * self.threads

    def stores(self, number: int) -> int:
        """Return the bits of all stores to a plain word."""
        return sum(1 << (number * 2 * self.threads + 2 * thread + 1) for thread in range(self.threads))


class World:
    """A state that is being changed by one step."""

    def __init__(self, words: Words, state: State) -> None:
        self._words = words
        messages, plain, total, known = state
        self._messages = [list(word) for word in messages]
        self._plain = list(plain)
        self._unknown = [unknown for unknown, _ in known]
        missing = [] if words.has_views else [0] * len(messages)
        self._total = [*total, *missing]
        self._views = [[*view, *missing] for _, view in known]

    def frozen(self) -> State:
        """Return the state without what can matter no more.

        That is: messages that no thread can read, accesses that all threads know of, what messages pass on to nobody.
        """
        unknown_to_some = 0
        for unknown in self._unknown:
            unknown_to_some |= unknown
        matters = [unknown_to_some if acquired else 0 for acquired in self._words.acquired]
        first = [min([view[n] for view in self._views]) for n in range(len(self._messages))]

        def shifted(view: list[int] | View) -> View:
            if not self._words.has_views:
                return ()
            return tuple([at - low if at > low else 0 for at, low in zip(view, first, strict=False)])

        messages = tuple(
            tuple((value, unknown & matters[n], shifted(view)) for value, unknown, view in word[first[n] :])
            for n, word in enumerate(self._messages)
        )
        known = tuple((u, shifted(v)) for u, v in zip(self._unknown, self._views, strict=True))
        return messages, tuple(self._plain), shifted(self._total), known

    # ---- plain words ----

    def load_plain(self, thread: int, access: Access) -> int:
        """Return a plain word's value."""
        number = self._plain_number(access.place)
        if self._unknown[thread] & self._words.stores(number):
            raise DataRaceError("a load and an earlier store")
        self._announce(thread, self._words.bit(access.place, thread, False))
        return self._plain[number]

    def store_plain(self, thread: int, access: Access) -> None:
        """Change a plain word."""
        number = self._plain_number(access.place)
        bits = self._words.bits(number)
        if self._unknown[thread] & bits:
            raise DataRaceError("a store and an earlier access")
        self._unknown = [unknown & ~bits for unknown in self._unknown]
        self._messages = [[(v, u & ~bits, view) for v, u, view in word] for word in self._messages]
        self._announce(thread, self._words.bit(access.place, thread, True))
        self._plain[number] = access.operand

    def _plain_number(self, place: int) -> int:
        number = self._words.plain_number(place)
        for missing in list(self._words.plain)[len(self._plain) : number + 1]:
            self._plain.append(self._words.initial.get(missing, 0))
        return number

    def _announce(self, thread: int, bit: int) -> None:
        if bit:
            self._unknown = [u if t == thread else u | bit for t, u in enumerate(self._unknown)]
            self._messages = [[(v, u | bit, view) for v, u, view in word] for word in self._messages]

    # ---- atomic words ----

    def _word(self, place: int) -> int:
        number = self._words.atomic_number(place)
        while len(self._messages) <= number:
            known = self._words.acquired[len(self._messages)]
            self._messages.append([(0, 0 if known else _EVERYTHING, ())])
            for view in (self._total, *self._views):
                view.append(0)
        return number

    def readable(self, thread: int, access: Access) -> Iterator[tuple[int, int]]:
        """Yield the messages that a load may read: their numbers and values."""
        number = self._word(access.place)
        word, first = self._messages[number], self._views[thread][number]
        if access.order == "seq_cst":
            first = max(first, self._total[number])
        if not self._words.has_views:
            first = len(word) - 1
        yield from ((k, word[k][0]) for k in range(first, len(word)))

    def newest(self, place: int) -> int:
        """Return the newest value."""
        return self._messages[self._word(place)][-1][0]

    def read(self, thread: int, access: Access, k: int) -> None:
        """Let `thread` read message `k`."""
        number = self._word(access.place)
        self._know(thread, number, k, access.order)

    def read_newest(self, thread: int, place: int) -> None:
        """Let `thread` know of the newest message, as after a system call that looked at it."""
        number = self._word(place)
        self._views[thread][number] = len(self._messages[number]) - 1

    def store(self, thread: int, access: Access) -> None:
        """Append a message."""
        number = self._word(access.place)
        self._append(thread, number, access.operand, access.order, _EVERYTHING, ())

    def change(self, thread: int, access: Access, value: int) -> None:
        """Read the newest message and append another one, in one step."""
        number = self._word(access.place)
        self._know(thread, number, len(self._messages[number]) - 1, access.order)
        _, unknown, view = self._messages[number][-1]
        self._append(thread, number, value, access.order, unknown, view)

    def _know(self, thread: int, number: int, k: int, order: str) -> None:
        _, unknown, passed = self._messages[number][k]
        view = self._views[thread]
        if order in _ACQUIRES:
            self._unknown[thread] &= unknown
            for n, at in enumerate(passed):
                view[n] = max(view[n], at)
        view[number] = max(view[number], k)
        if order == "seq_cst":
            self._total[number] = max(self._total[number], k)

    def _append(self, thread: int, number: int, value: int, order: str, unknown: int, passed: View) -> None:
        """Append a message that continues the release sequence with the knowledge `unknown` and `passed`."""
        word, view = self._messages[number], self._views[thread]
        view[number] = len(word)
        passes = list(passed) + [0] * (len(view) - len(passed))
        if order in _RELEASES:
            unknown &= self._unknown[thread]
            passes = [max(a, b) for a, b in zip(passes, view, strict=True)]
        if order == "seq_cst":
            self._total[number] = len(word)
        words = self._words
        if not words.acquired[number]:
            unknown, passes = _EVERYTHING, []
        word.append((value, unknown, tuple(passes)))
        for other, old in zip(self._views, words.may_be_old[number], strict=True):
            if not (old and words.has_views):
                other[number] = len(word) - 1
