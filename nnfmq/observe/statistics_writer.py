"""SlotWriter: a worker's slot of the statistics area, whose rows it gives to models and bursts.

A row is given with `CHANGE` announced, so that no reader takes the counts of its last owner for those of the new one.
It is taken back by one store, its id, because the garbage collector may do that in any thread at any time. Its counts
stay until another model gets the row, and are added to those of the past then.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from nnfmq.observe import statistics_layout as layout
from nnfmq.observe.recorder_core import BurstRecorder, ModelRecorder, begin_change, end_change
from nnfmq.observe.statistics_layout import WORD_BYTES, text_to_words
from nnfmq.observe.statistics_past import add_past

__all__ = ["UNPUBLISHED", "BurstRow", "SlotWriter", "unpublished_burst"]


class BurstRow(NamedTuple):
    """The counters of a burst: its executions, and three words for its requests and waits (RECEIVED, POLLED, SLEPT).

    `row` is its place in the slot, None if it has none.
    """

    recorder: BurstRecorder
    waits: memoryview
    row: int | None


def _private(words: int) -> memoryview:
    return memoryview(bytearray(words * WORD_BYTES))


UNPUBLISHED = ModelRecorder(_private(layout.SLOT_HEADER_WORDS), _private(layout.MODEL_WORDS))
"""Counts what no client's session executes, in memory that nobody reads."""


def unpublished_burst(model: ModelRecorder = UNPUBLISHED) -> BurstRow:
    """Return a row that nobody reads, for a burst; its executions count for `model`."""
    return _burst_row(model, _private(layout.BURST_WORDS), None)


def _burst_row(model: ModelRecorder, words: memoryview, row: int | None) -> BurstRow:
    waits = words[layout.RECEIVED * WORD_BYTES : (layout.SLEPT + 1) * WORD_BYTES]
    return BurstRow(BurstRecorder(model, words), waits, row)


class SlotWriter:
    """The slot of one client. Thread-safe. Borrows its arguments, which must outlive it.

    `area` are the bytes of the whole area, and `page` those of the client's own page, if it has one.
    """

    def __init__(self, area: memoryview, slot: int, page: memoryview | None = None) -> None:
        begin = layout.slot_at(slot) * WORD_BYTES
        self._slot = area[begin : begin + layout.SLOT_BYTES]
        self._header = self._slot[: layout.SLOT_HEADER_WORDS * WORD_BYTES]
        self._words = self._slot.cast("Q")
        self._page = (_private(layout.PAGE_BYTES // WORD_BYTES) if page is None else page).cast("Q")
        self._lock = threading.Lock()
        self._free_models = deque(range(layout.MODELS_MAX - 1))
        self._free_bursts = deque(range(layout.BURSTS_MAX))
        self._other_models: ModelRecorder | None = None
        self._rows: weakref.WeakKeyDictionary[ModelRecorder, int] = weakref.WeakKeyDictionary()

    def open(self, client_pid: int, client_uid: int, quota_bytes: int, program: str = "") -> None:
        """Begin to count for a client, from 0. `program` is the name of the client's program."""
        with self._changing():
            words, client_class = self._words, self._words[layout.CLIENT_CLASS]
            self._slot[WORD_BYTES:] = bytes(layout.SLOT_BYTES - WORD_BYTES)  # all but CHANGE
            words[layout.CLIENT_CLASS] = client_class
            words[layout.WORKER_PID], words[layout.CLIENT_PID] = os.getpid(), client_pid
            words[layout.CLIENT_UID], words[layout.CLIENT_START] = client_uid, time.monotonic_ns()
            begin, text = layout.CLIENT_PROGRAM * WORD_BYTES, text_to_words(program, layout.CLIENT_PROGRAM_WORDS)
            self._slot[begin : begin + len(text)] = text
            words[layout.QUOTA_BYTES], words[layout.STATE] = quota_bytes, layout.USED

    def set_calls(self, open_calls: int, running: int) -> None:
        """Publish how many calls of the client are queued or running, and how many are running."""
        self._words[layout.OPEN_CALLS], self._words[layout.RUNNING_CALLS] = open_calls, running

    def set_charged_bytes(self, size: int) -> None:
        """Publish how many bytes are charged to the client."""
        self._words[layout.CHARGED_BYTES] = size

    def set_models(self, count: int) -> None:
        """Publish how many prepared models the client has."""
        self._words[layout.MODEL_COUNT] = count

    def set_bursts(self, count: int) -> None:
        """Publish how many bursts over queues the client has."""
        self._words[layout.BURST_COUNT] = count

    def set_threads(self, count: int) -> None:
        """Publish how many threads count for the client."""
        self._words[layout.THREAD_COUNT] = count

    def model(self, model_id: int, name: str, device: str, version: int = 0) -> ModelRecorder:
        """Return a recorder of a new model, which keeps its row as long as the returned object lives.

        `version` is that of a model of the model repository.
        """
        with self._changing():
            if not self._free_models:
                return self._others()
            row = self._free_models.popleft()
            self._retire(row)
            recorder = self._fill_model(row, model_id, name, device, version)
        begin = (layout.MODELS_AT + row * layout.MODEL_WORDS) + layout.MODEL_ID
        weakref.finalize(recorder, _free, self._words, begin, self._free_models, row).atexit = False
        return recorder

    def _retire(self, row: int) -> None:
        """Add the counts of the model that had a row to the past, and clear its calls. The caller changes the rows."""
        begin, calls = layout.MODELS_AT + row * layout.MODEL_WORDS, row * layout.CALLS_WORDS
        counted = self._page[calls : calls + layout.CALLS_WORDS]
        past = self._words[layout.PAST_AT : layout.PAST_AT + layout.PAST_MODELS_MAX * layout.PAST_WORDS]
        add_past(past, self._words[begin : begin + layout.MODEL_WORDS].tolist(), counted.tolist())
        counted[:] = memoryview(bytes(counted.nbytes)).cast("Q")

    def calls_row(self, model: ModelRecorder) -> int:
        """Return the number of the row of the client's page for the calls of a model; rows count from 0."""
        return self._rows.get(model, layout.MODELS_MAX - 1)

    def _others(self) -> ModelRecorder:
        """Return the recorder of all models without a row of their own. The caller changes the rows."""
        if self._other_models is None:
            last = layout.MODELS_MAX - 1
            self._other_models = self._fill_model(last, layout.OTHER_MODELS_ID, layout.OTHER_MODELS, "", 0)
        return self._other_models

    def _fill_model(self, row: int, model_id: int, name: str, device: str, version: int) -> ModelRecorder:
        begin = (layout.MODELS_AT + row * layout.MODEL_WORDS) * WORD_BYTES
        view = self._slot[begin : begin + layout.MODEL_WORDS * WORD_BYTES]
        view[:] = bytes(len(view))
        for word, text, words in (
            (layout.MODEL_NAME, name, layout.MODEL_NAME_WORDS),
            (layout.DEVICE_NAME, device, layout.DEVICE_NAME_WORDS),
        ):
            view[word * WORD_BYTES : (word + words) * WORD_BYTES] = text_to_words(text, words)
        numbers = view.cast("Q")
        program = slice(layout.CLIENT_PROGRAM, layout.CLIENT_PROGRAM + layout.CLIENT_PROGRAM_WORDS)
        numbers[layout.PROGRAM : layout.PROGRAM + layout.PROGRAM_WORDS] = self._words[program]
        numbers[layout.MODEL_ID], numbers[layout.MODEL_VERSION] = model_id, version
        recorder = ModelRecorder(self._header, view)
        self._rows[recorder] = row
        return recorder

    def burst(self, burst_id: int, model_id: int, model: ModelRecorder) -> BurstRow:
        """Return the counters of a new burst, until `close_burst`."""
        with self._changing():
            if not self._free_bursts:
                return unpublished_burst(model)
            row = self._free_bursts.popleft()
            begin = (layout.BURSTS_AT + row * layout.BURST_WORDS) * WORD_BYTES
            view = self._slot[begin : begin + layout.BURST_WORDS * WORD_BYTES]
            view[:] = bytes(len(view))
            words = view.cast("Q")
            words[layout.BURST_ID], words[layout.BURST_MODEL_ID] = burst_id, model_id
        return _burst_row(model, view, row)

    def close_burst(self, burst: BurstRow) -> None:
        """Take back the row of a burst that has ended."""
        if burst.row is not None:
            begin = layout.BURSTS_AT + burst.row * layout.BURST_WORDS
            _free(self._words, begin + layout.BURST_ID, self._free_bursts, burst.row)

    def complete_copy(self, area: memoryview) -> bytes:
        """Return a copy of the area in which no change of this slot is half done."""
        with self._lock:
            return bytes(area)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            begin_change(self._header)
            try:
                yield
            finally:
                end_change(self._header)


def _free(words: memoryview, id_word: int, free_rows: deque[int], row: int) -> None:
    words[id_word] = 0
    free_rows.append(row)
