"""Past counts: of released models whose row another model has got, and of clients that have left.

A table of the past has one writing process: the worker for its slot's, the supervisor for that of the driver. What is
added to it was counted by others, and a client can write anything to its page: it is summed, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nnfmq.observe import statistics_layout as layout
from nnfmq.observe.statistics_layout import text_to_words

__all__ = ["add_past", "is_plausible"]

_MASK = 2**64 - 1
_IDENTITY = slice(layout.MODEL_VERSION, layout.IDENTITY_END)
_COUNTS = (layout.EXECUTIONS, layout.FAILURES, layout.DRIVER_NS, layout.ENGINE_NS)


def is_plausible(model: Sequence[int], calls: Sequence[int]) -> bool:
    """Return whether a client may have measured what its row of calls says: not much more than the driver has counted.

    `model` are the words of the model's row.
    """
    counted = sum(calls[layout.CLIENT_HISTOGRAM : layout.CLIENT_HISTOGRAM + layout.BUCKETS])
    waited = sum(calls[layout.QUEUE_HISTOGRAM : layout.QUEUE_HISTOGRAM + layout.BUCKETS])
    return max(counted, waited) <= model[layout.EXECUTIONS] + model[layout.FAILURES] + layout.CALLS_AHEAD_MAX


def add_past(table: memoryview, model: Sequence[int], calls: Sequence[int]) -> None:
    """Add the words of a model's row and of its row of calls to a table of the past (format "Q").

    They are added to the row of the same model, device and program; if there is none and no row is free, to the last.
    Calls that are not plausible are omitted.
    """
    if not (model[layout.EXECUTIONS] or model[layout.FAILURES]):
        return
    begin = _row_of(table, model)
    if not table[begin + layout.MODEL_ID]:
        table[begin + layout.MODEL_ID] = 1
        for word in range(layout.MODEL_VERSION, layout.IDENTITY_END):
            table[begin + word] = model[word]
    words = (*_COUNTS, *range(layout.DRIVER_HISTOGRAM, layout.MODEL_WORDS))
    _add(table, begin, ((word, model[word]) for word in words))
    if is_plausible(model, calls):
        _add(table, begin + layout.PAST_CALLS, enumerate(calls))


def _row_of(table: memoryview, model: Sequence[int]) -> int:
    """Return the offset of the row to which the counts of a model are added."""
    identity = list(model[_IDENTITY])
    rows = range(0, len(table), layout.PAST_WORDS)
    for begin in rows[:-1]:
        if not table[begin + layout.MODEL_ID]:
            return begin
        if table[begin : begin + layout.IDENTITY_END].tolist()[_IDENTITY] == identity:
            return begin
    last = rows[-1]
    if not table[last + layout.MODEL_ID]:
        table[last + layout.MODEL_ID] = layout.OTHER_MODELS_ID
        name = memoryview(text_to_words(layout.OTHER_MODELS, layout.MODEL_NAME_WORDS)).cast("Q")
        for word, value in enumerate(name):
            table[last + layout.MODEL_NAME + word] = value
    return last


def _add(table: memoryview, begin: int, counts: Iterable[tuple[int, int]]) -> None:
    for word, count in counts:
        if count:
            table[begin + word] = (table[begin + word] + count) & _MASK
