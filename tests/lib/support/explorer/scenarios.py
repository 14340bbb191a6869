"""Scenarios for the exploration: writers, readers, event flags and watchers, and the conditions on their results.

Record k of a stream is k + 1 in each of its bytes: no byte is ever zero, so fresh memory, a torn record, a repeated or
a missing one all differ from what must come.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from nnfmq.base.watcher import DeathRecipients
from nnfmq.hal.errors import DeadObject
from support.explorer.instrumented_runtime import LIMIT_NS, ProcessQueues, QueueShape
from support.explorer.program import Call, Thread, Violation
from support.explorer.search import Scenario

DIED = "ended: the peer is dead"


def stream(records: int, quantum: int) -> bytes:
    """Return the bytes of so many records."""
    return b"".join(bytes([k + 1]) * quantum for k in range(records))


def batches(sizes: Sequence[int], quantum: int) -> list[bytes]:
    """Cut a stream into batches of so many records."""
    whole, ends = stream(sum(sizes), quantum), [sum(sizes[: i + 1]) * quantum for i in range(len(sizes))]
    return [whole[end - size * quantum : end] for size, end in zip(sizes, ends, strict=True)]


# ---- writers and readers ----


def writer(
    sizes: Sequence[int], quantum: int, how: str = "write_blocking", *, queue: int = 0, **options: Any
) -> Thread:
    """Write a stream in batches by a call that must succeed."""
    data = batches(sizes, quantum)

    def next_call(done: Any) -> Call | None:
        return None if done == DIED or done == len(data) else lambda bench: _write(bench.rings[queue], how, data[done])

    def fold(done: int, result: object) -> Hashable:
        if isinstance(result, DeadObject):
            return DIED
        if result is not True:
            raise Violation(f"batch {done} was rejected: {result!r}")
        return done + 1

    return Thread("writer", "writer", next_call, fold, **options)


def _write(ring: Any, how: str, data: bytes) -> object:
    return ring.write_blocking(data, None) if how == "write_blocking" else getattr(ring, how)(data)


def reader(
    sizes: Sequence[int], quantum: int, *, queue: int = 0, window_ns: int | None = None, sleeps_first: bool = False,
    is_async: bool = False,
    **options: Any,
) -> Thread:  # fmt: skip
    """Read a stream in batches of `sizes`, or, with a window, by as many `receive` as it takes."""
    whole = stream(sum(sizes), quantum)
    ends = {sum(sizes[:i]) * quantum: size for i, size in enumerate(sizes)}

    def next_call(got: Any) -> Call | None:
        if got == DIED or got == len(whole):
            return None
        if window_ns is not None:
            return lambda bench: _receive(bench.rings[queue], window_ns, sleeps_first)
        if is_async:
            return lambda bench: _read_async(bench, queue, ends[got])
        return lambda bench: bench.rings[queue].read_blocking(ends[got], None)

    def fold(got: int, result: object) -> Hashable:
        return DIED if isinstance(result, DeadObject) else _taken(whole, got, result)

    return Thread("reader", "reader", next_call, fold, reads=True, **options)


def _receive(ring: Any, window_ns: int, sleeps_first: bool) -> object:
    """Receive; with `sleeps_first`, after waits so long that the receiver sleeps before it polls."""
    if sleeps_first:
        ring._estimator.samples, ring._estimator.mean = 4, 50_000
    return ring.receive(None, window_ns)


def _read_async(bench: ProcessQueues, queue: int, n: int) -> object:
    """Try, and sleep in between as the thread of `nnfmq.queue.aio` does for one queue."""
    ring, size = bench.rings[queue], n * bench.machine.shapes[queue].quantum
    while (data := ring.read_blocking(n, 0)) is None:
        address = ring.begin_wait()
        try:
            while (expected := ring.prepare_to_wait(bench.machine.pycore.READER, size)) is not None:
                bench.machine.futex.futex_waitv([(address, expected)], None)
        finally:
            ring.finish_wait()
    return data


def _taken(whole: bytes, got: int, result: object) -> int:
    if not isinstance(result, bytes) or not result or not whole.startswith(result, got):
        raise Violation(f"after {got} bytes came {result!r}, expected {whole[got:]!r}")
    return got + len(result)


# ---- scenarios ----


def streaming(
    sizes: Sequence[int], count: int, *, quantum: int = 2, read: Sequence[int] | None = None,
    how: str = "write_blocking", window_ns: int | None = None, start: int = 0, sleeps_first: bool = False,
    is_async: bool = False, **options: Any,
) -> Scenario:  # fmt: skip
    """Send a stream from one writer to one reader; both wait if necessary."""
    taken = "receive" if window_ns is not None else "read_async" if is_async else "read_blocking"
    numbers = "+".join(map(str, sizes)) + (f" as {'+'.join(map(str, read))}" if read else "")
    polls = (f", polls {window_ns}" if window_ns else "") + (", sleeps first" if sleeps_first else "")
    used = f", used {start}" if start else ""
    kernel = ", " + options["atomics"] if "atomics" in options else ""
    signals = f", {options['signals']} signals" if "signals" in options else ""
    return Scenario(
        f"{how}, {taken}: {numbers} of {count}{used}{polls}{kernel}{signals}",
        (QueueShape(quantum, count, start),),
        (
            writer(sizes, quantum, how),
            reader(read or sizes, quantum, window_ns=window_ns, sleeps_first=sleeps_first, is_async=is_async),
        ),
        **options,
    )


def trying(
    writes: int, reads: int, count: int, quantum: int = 2, in_place: bool = False, start: int = 0, batch: int = 1
) -> Scenario:
    """Try `write` and `read` (or transactions) so many times without waiting: what is read was written, in order."""
    records = batches([batch] * writes, quantum)
    write, read = (_write_in_place, _read_in_place) if in_place else (_write_copy, _read_copy)

    def next_write(done: tuple[int, int]) -> Call | None:
        tried, written = done
        return None if tried == writes else lambda bench: write(bench, records[written])

    def next_read(done: tuple[int, int]) -> Call | None:
        return None if done[0] == reads else lambda bench: read(bench, batch, quantum)

    def fold_read(done: tuple[int, int], result: object) -> Hashable:
        tried, got = done
        return tried + 1, got if result is None else _taken(stream(writes * batch, quantum), got, result)

    kind = "transactions of" if in_place else "write, read:"
    return Scenario(
        f"{kind} {batch}, {writes} and {reads} tries, {count} of {quantum} bytes"
        + (f", used {start}" if start else ""),
        (QueueShape(quantum, count, start),),
        (
            Thread("writer", "writer", next_write, lambda done, ok: (done[0] + 1, done[1] + bool(ok)), (0, 0)),
            Thread("reader", "reader", next_read, fold_read, (0, 0), reads=True),
        ),
    )


def _write_copy(bench: ProcessQueues, data: bytes) -> object:
    return bench.rings[0].write(data)


def _read_copy(bench: ProcessQueues, n: int, quantum: int) -> object:
    return bench.rings[0].read(n)


def _write_in_place(bench: ProcessQueues, data: bytes) -> object:
    ring, n = bench.rings[0], len(data) // bench.machine.shapes[0].quantum
    at = ring.begin_write(n)
    if at is None:
        return False
    first, second = bench.in_place(at, len(data))
    first[:], second[:] = data[: len(first)], data[len(first) :]
    ring.commit_write(n)
    return True


def _read_in_place(bench: ProcessQueues, n: int, quantum: int) -> object:
    ring = bench.rings[0]
    at = ring.begin_read(n)
    if at is None:
        return None
    first, second = bench.in_place(at, n * quantum)
    data = bytes(first) + bytes(second)
    return data if ring.commit_read(n) else None


def overwriting(
    sizes: Sequence[int], reads: int, count: int, *, margin: int = 0, in_place: bool = False, history: int = 0,
    quantum: int = 2,
) -> Scenario:  # fmt: skip
    """Read one record at a time from an unsynchronized queue: records may be missing, but come whole and in order.

    With a `margin` the reader accepts a record only if the writer is still that many records away after the read.
    """
    data, whole = batches(sizes, quantum), stream(sum(sizes), quantum)
    known = [whole[i : i + quantum] for i in range(0, len(whole), quantum)]
    read = _read_in_place if in_place else _read_copy

    def next_write(done: int) -> Call | None:
        return None if done == len(data) else lambda bench: bench.rings[0].write(data[done])

    def validated(bench: ProcessQueues) -> object:
        record = read(bench, 1, quantum)
        return None if margin and bench.rings[0].available_to_read() + 1 + margin > count else record

    def fold_read(done: tuple[int, int], result: Any) -> Hashable:
        tried, last = done
        if result is None:
            return tried + 1, last
        if result not in known[last:]:
            raise Violation(f"after record {last} came {result!r}, which is no later one")
        return tried + 1, known.index(result) + 1

    numbers = "+".join(map(str, sizes))
    kind = ("in place, " if in_place else "") + (f"margin {margin}" if margin else "no margin")
    return Scenario(
        f"unsynchronized: {numbers}, {reads} reads, {count}, {kind}" + (f", keeps {history}" if history else ""),
        (QueueShape(quantum, count, unsynchronized=True, history=history),),
        (
            Thread("writer", "writer", next_write, lambda done, _: done + 1),
            Thread("reader", "reader", lambda d: None if d[0] == reads else validated, fold_read, (0, 0)),
        ),
    )


def until_deadline(records: int, count: int, quantum: int = 2) -> Scenario:
    """Read with a deadline that may pass at any moment: nothing is lost, a passed deadline takes nothing."""
    whole = stream(records, quantum)
    attempts = records + 2

    def next_call(done: tuple[int, int]) -> Call | None:
        tried, got = done
        if tried == attempts or got == len(whole):
            return None
        return lambda bench: bench.rings[0].read_blocking(1, LIMIT_NS)

    def fold(done: tuple[int, int], result: object) -> Hashable:
        return done[0] + 1, done[1] if result is None else _taken(whole, done[1], result)

    return Scenario(
        f"send, read_blocking until a deadline: {records} of {count}",
        (QueueShape(quantum, count),),
        (
            writer([1] * records, quantum, "send"),
            Thread("reader", "reader", next_call, fold, (0, 0), has_deadline=True, reads=True),
        ),
    )


def ping_pong(rounds: int, quantum: int = 1, window_ns: int = 0, sleeps_first: bool = False) -> Scenario:
    """Send a request, receive its reply, as a burst does over two queues."""
    records = batches([1] * rounds, quantum)

    def caller(name: str, out: int, back: int, sends_first: bool) -> Thread:
        def next_call(done: int) -> Call | None:
            turn, is_second = divmod(done, 2)
            if turn == rounds:
                return None
            if sends_first == (not is_second):
                return lambda bench: bench.rings[out].send(records[turn])
            return lambda bench: _receive(bench.rings[back], window_ns, sleeps_first)

        def fold(done: int, result: object) -> Hashable:
            if result is not True and result != records[done // 2]:
                raise Violation(f"{name}: round {done // 2} gave {result!r}")
            return done + 1

        return Thread(name, name, next_call, fold, reads=True)

    return Scenario(
        f"send and receive over two queues, {rounds} rounds"
        + (f", polls {window_ns}" if window_ns else "")
        + (", sleeps first" if sleeps_first else ""),
        (QueueShape(quantum, rounds), QueueShape(quantum, rounds)),
        (caller("client", 0, 1, True), caller("server", 1, 0, False)),
    )


def sharing_a_word(rounds: int, count: int = 1) -> Scenario:
    """Move records through two queues whose sides wait on the event flag word of the first, each with its own bits."""
    records = batches([1] * rounds, 1)

    def writing(queue: int) -> Thread:
        def next_call(done: int) -> Call | None:
            return None if done == rounds else lambda bench: _long_form(bench, queue, records[done])

        def fold(done: int, result: object) -> Hashable:
            if result is not True:
                raise Violation(f"record {done} of queue {queue} was rejected: {result!r}")
            return done + 1

        return Thread(f"writer {queue}", f"writer {queue}", next_call, fold)

    def next_read(done: int) -> Call | None:
        return None if done == 2 * rounds else lambda bench: _long_form(bench, done % 2, None)

    def fold_read(done: int, result: object) -> Hashable:
        if result != records[done // 2]:
            raise Violation(f"record {done // 2} of queue {done % 2} was {result!r}")
        return done + 1

    threads = (writing(0), writing(1), Thread("reader", "reader", next_read, fold_read, reads=True))
    return Scenario(
        f"two queues on one event flag word, {rounds} rounds of {count}", (QueueShape(1, count),) * 2, threads
    )


def _long_form(bench: ProcessQueues, queue: int, data: bytes | None) -> object:
    ring, word = bench.rings[queue], bench.events[0]
    not_full, not_empty = 1 << 2 * queue, 2 << 2 * queue
    if data is None:
        return ring.read_blocking(1, None, word, not_empty, not_full)
    return ring.write_blocking(data, None, word, not_full, not_empty)


# ---- event flags ----


def flags(wakers: Sequence[int], atomics: str = "libatomic", times: int = 1) -> Scenario:
    """Wait for every bit of one word once (or more), while as many wakers set one each."""
    wanted = 0
    for mask in wakers:
        wanted |= mask

    def waker(mask: int) -> Thread:
        def next_call(done: int) -> Call | None:
            return None if done == times else lambda bench: bench.events[0].wake(mask)

        return Thread(f"waker {mask}", f"waker {mask}", next_call, lambda done, _: done + 1)

    def next_wait(missing: int) -> Call | None:
        return (lambda bench: bench.events[0].wait(missing)) if missing else None

    def fold(missing: int, bits: Any) -> Hashable:
        if not bits or bits & ~missing:
            raise Violation(f"a wait for {missing:#x} gave {bits!r}")
        return missing & ~int(bits)

    threads = (*map(waker, wakers), Thread("waiter", "waiter", next_wait, fold, wanted))
    name = f"event flag: {len(wakers)} wakers x{times}" + ("" if atomics == "libatomic" else f", {atomics}")
    return Scenario(name, (QueueShape(1, 1),), threads, atomics=atomics)


# ---- death ----


def watcher(
    survivor: str,
    victim: str | None,
    rounds: int | None = None,
    mark_dead: Callable[[DeathRecipients], object] = DeathRecipients.mark_dead,
) -> Thread:
    """Notify of peer death as `nnfmq.base.watcher` does: set flag, OR, wake; repeat until none waits (or `rounds`)."""

    def next_call(done: Any) -> Call | None:
        if done == "alive":
            return lambda bench: bench.await_death(victim or survivor)
        if done == "dead":
            return lambda bench: mark_dead(_peer(bench))
        return None if done == "marked dead" or done == rounds else lambda bench: _peer(bench).wake()

    def fold(done: Any, result: object) -> Hashable:
        if done in ("alive", "dead"):
            return {"alive": "dead", "dead": 1}[done]
        return "marked dead" if not result else done if rounds is None else done + 1

    first = "alive" if victim else "dead"
    return Thread("watcher", survivor, next_call, fold, first, is_watched=True, needed=False)


def _peer(bench: ProcessQueues) -> DeathRecipients:
    peer = DeathRecipients(bench.flag)
    peer.add(*bench.events)
    return peer


def dying(
    victim: str, sizes: Sequence[int], count: int, *, rounds: int | None = None,
    mark_dead: Callable[[DeathRecipients], object] = DeathRecipients.mark_dead,
    written: Sequence[int] | None = None, **options: Any,
) -> Scenario:  # fmt: skip
    """Kill one side at any step; the other must get whole records in order, and then an end.

    The reader wants `sizes`; the writer writes them, or only `written`.
    """
    quantum = options.pop("quantum", 2)
    how, window_ns = options.pop("how", "write_blocking"), options.pop("window_ns", None)
    sleeps_first, is_async = options.pop("sleeps_first", False), options.pop("is_async", False)
    survivor = "reader" if victim == "writer" else "writer"
    threads = (
        writer(sizes if written is None else written, quantum, how, is_watched=survivor == "writer"),
        reader(
            sizes,
            quantum,
            window_ns=window_ns,
            sleeps_first=sleeps_first,
            is_async=is_async,
            is_watched=survivor == "reader",
        ),
        watcher(survivor, victim, rounds, mark_dead),
    )
    numbers = "+".join(map(str, sizes))
    once = ("" if rounds is None else f", woken {rounds}x") + (", sleeps first" if sleeps_first else "")
    return Scenario(
        f"{victim} dies, {how}{', read_async' if is_async else ''}: {numbers} of {count}{once}",
        (QueueShape(quantum, count),), threads, (victim,), **options,
    )  # fmt: skip


def given_up(
    sizes: Sequence[int], count: int, *, quantum: int = 1, window_ns: int | None = None, sleeps_first: bool = False
) -> Scenario:
    """Report a living writer as dead at any moment; its later records are not checked."""
    threads = (
        writer(sizes, quantum, "send"),
        reader(sizes, quantum, window_ns=window_ns, sleeps_first=sleeps_first, is_watched=True),
        watcher("reader", None),
    )
    return Scenario(
        f"reported dead while alive: {'+'.join(map(str, sizes))} of {count}"
        + (", sleeps first" if sleeps_first else ""),
        (QueueShape(quantum, count),),
        threads,
    )


def waiting_on_a_dead_peer(rounds: int | None = None, atomics: str = "libatomic") -> Scenario:
    """Wait on the event flag for a bit that no thread sets, while the peer, which sets others, dies at any step."""

    def next_wait(done: Any) -> Call | None:
        return (lambda bench: bench.events[0].wait(2)) if done == 0 else None

    def fold(_: int, result: object) -> Hashable:
        if not isinstance(result, DeadObject):
            raise Violation(f"a wait for 2, which nobody sets, gave {result!r}")
        return DIED

    waker = Thread("writer", "writer", _once(lambda bench: bench.events[0].wake(1)), lambda done, _: done + 1)
    waiter = Thread("reader", "reader", next_wait, fold, is_watched=True)
    name = "waker of an event flag dies" + ("" if atomics == "libatomic" else f", {atomics}")
    return Scenario(
        name, (QueueShape(1, 1),), (waker, waiter, watcher("reader", "writer", rounds)), ("writer",), atomics=atomics
    )


def _once(call: Call) -> Callable[[Any], Call | None]:
    return lambda done: None if done else call
