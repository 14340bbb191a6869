"""The Python core of the statistics area: how counters are added to, and how rows are changed and read.

The specification of the compiled core `_recorder`, with the same classes and functions. Here accesses are ordered on
x86 only; elsewhere a reader may see a row of two owners for a moment, which is displayed and nothing else.

Recorders may be used by all threads of the process that hold the GIL: an addition is not interrupted. Only one process
writes to a slot.
"""

from __future__ import annotations

import struct
from time import monotonic_ns
from typing import TYPE_CHECKING

from nnfmq.observe import statistics_layout as layout
from nnfmq.observe.statistics_layout import WORD_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "BurstCalls",
    "BurstRecorder",
    "Calls",
    "ModelRecorder",
    "SendClock",
    "begin_change",
    "end_change",
    "snapshot",
]

_WORD_MASK = 2**64 - 1
REQUEST_RECEIVED, RESULT_SENT = 1, 5  # of `serialize.execution_stats`, which a test compares
SAMPLED_BELOW_NS, SAMPLE = 16_000, 8
SENT_WORD = 1  # of `serialize.packets`, likewise


class ModelRecorder:
    """Counts the executions of one model, for the model and for the client.

    `client` is the header of the client's slot, `row` the model's row. It keeps both mapped.
    """

    def __init__(self, client: Buffer, row: Buffer) -> None:
        self._client = _words(client, layout.SLOT_HEADER_WORDS)
        self._row = _words(row, layout.MODEL_WORDS)

    def add(self, driver_ns: int, engine_ns: int, /) -> None:
        """Count a successful execution, with its times in the driver and in the engine."""
        self._client[layout.CLIENT_EXECUTIONS] += 1
        row = self._row
        row[layout.EXECUTIONS] += 1
        row[layout.DRIVER_NS] += max(driver_ns, 0)
        row[layout.ENGINE_NS] += max(engine_ns, 0)
        row[layout.DRIVER_HISTOGRAM + layout.bucket_of(driver_ns)] += 1
        row[layout.ENGINE_HISTOGRAM + layout.bucket_of(engine_ns)] += 1

    def add_failure(self) -> None:
        """Count an execution that ended with an error."""
        self._client[layout.CLIENT_FAILURES] += 1
        self._row[layout.FAILURES] += 1


class BurstRecorder:
    """Counts the executions of one burst, for the burst, its model and the client. It keeps `row` mapped."""

    def __init__(self, model: ModelRecorder, row: Buffer) -> None:
        self._model = model
        self._row = _words(row, layout.BURST_WORDS)

    def add(self, driver_ns: int, engine_ns: int, /) -> None:
        """Count a successful execution, with its times in the driver and in the engine."""
        self._row[layout.BURST_EXECUTIONS] += 1
        self._model.add(driver_ns, engine_ns)

    def add_failure(self) -> None:
        """Count an execution that ended with an error."""
        self._row[layout.BURST_FAILURES] += 1
        self._model.add_failure()


class Calls:
    """Counts the executions of one model as its client sees them, in a row of the client's page. It keeps `row` mapped.

    The driver may read and clear the row at any time: a count may get lost then.
    """

    def __init__(self, row: Buffer) -> None:
        self._row = _words(row, layout.CALLS_WORDS)

    def add(self, client_ns: int, queue_ns: int, /) -> None:
        """Count an execution: its time from call to return, and the part between client and driver; -1 = unknown."""
        self._add(layout.CLIENT_NS, max(client_ns, 0))
        self._add(layout.CLIENT_HISTOGRAM + layout.bucket_of(client_ns), 1)
        if queue_ns >= 0:
            self.add_queue(queue_ns, 1)

    def add_queue(self, queue_ns: int, executions: int, /) -> None:
        """Count the time of executions between client and driver; for `BurstCalls`."""
        self._add(layout.QUEUE_NS, queue_ns * executions)
        self._add(layout.QUEUE_HISTOGRAM + layout.bucket_of(queue_ns), executions)

    def _add(self, word: int, more: int) -> None:
        self._row[word] = (self._row[word] + more) & _WORD_MASK


class BurstCalls:
    """Counts the executions of a burst as its client sees them. Close it.

    `words` are the execution statistics of the burst, in which the driver says when it received a request, and when it
    sent the result. Another core has just written them, so to read them costs more than all else here. So of executions
    that are shorter than SAMPLED_BELOW_NS only every SAMPLE-th is read, and stands for as many.
    """

    def __init__(self, calls: Calls, words: Buffer) -> None:
        self._calls = calls
        self._unread = 0
        self._words: memoryview | None = _words(words, RESULT_SENT + 1)

    def add(self, client_ns: int, latency_ns: int, /) -> None:
        """Count an execution: its time from call to return, and the part from sending the request to the result."""
        words = self._words
        if words is None:
            return
        self._calls.add(client_ns, -1)
        executions = 1
        if latency_ns < SAMPLED_BELOW_NS:
            self._unread += 1
            if self._unread < SAMPLE:
                return
            executions, self._unread = self._unread, 0
        driver_ns = (words[RESULT_SENT] - words[REQUEST_RECEIVED]) & _WORD_MASK
        self._calls.add_queue(max(latency_ns - driver_ns, 0), executions)

    def finish(self, begin_ns: int, is_counted: bool, /) -> int:
        """Return how long ago `begin_ns` is. If `is_counted`, the execution began and ends there, and is counted."""
        latency_ns = monotonic_ns() - begin_ns
        if is_counted:
            self.add(latency_ns, latency_ns)
        return latency_ns

    def close(self) -> None:
        """Release the words; nothing is counted any more. Idempotent."""
        words, self._words = self._words, None
        if words is not None:
            words.release()


class SendClock:
    """Tells the driver of a burst when its client sends a request, which a trace of the driver begins with. Close it.

    `words` are those beside the ring of the requests.
    """

    def __init__(self, words: Buffer) -> None:
        self._words: memoryview | None = _words(words, SENT_WORD + 1)

    def now(self) -> int:
        """Return the time (CLOCK_MONOTONIC, ns), and store it."""
        now_ns, words = monotonic_ns(), self._words
        if words is not None:
            words[SENT_WORD] = now_ns
        return now_ns

    def close(self) -> None:
        """Release the words; `now` stores nothing any more. Idempotent."""
        words, self._words = self._words, None
        if words is not None:
            words.release()


def _words(region: Buffer, count: int) -> memoryview:
    words = memoryview(region).cast("B").cast("Q")
    if len(words) < count:
        raise ValueError(f"{len(words)} words of statistics where {count} are needed")
    return words


def begin_change(slot: Buffer, /) -> None:
    """Announce that the rows of a slot change: readers wait. Whoever died during a change is overruled."""
    words = memoryview(slot).cast("B").cast("Q")
    words[layout.CHANGE] = (words[layout.CHANGE] | 1) & _WORD_MASK  # SYNC rows


def end_change(slot: Buffer, /) -> None:
    """Announce that the change of the rows is complete."""
    words = memoryview(slot).cast("B").cast("Q")
    words[layout.CHANGE] = ((words[layout.CHANGE] | 1) + 1) & _WORD_MASK  # SYNC rows


def snapshot(slot: Buffer, /) -> bytes | None:
    """Return a copy of a slot in which all rows belong together; None if they changed meanwhile."""
    view = memoryview(slot).cast("B")
    before = _change_of(view)  # SYNC rows
    copy = bytes(view)
    after = _change_of(view)  # SYNC rows
    return copy if before == after and before % 2 == 0 else None


def _change_of(view: memoryview) -> int:
    word: int = struct.unpack_from("<Q", view, layout.CHANGE * WORD_BYTES)[0]
    return word
