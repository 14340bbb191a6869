"""The deadline beside a request packet: its mark is padding to every reader, and any word has a meaning."""

from __future__ import annotations

import pytest

from nnfmq.hal.types import DataLocation, RequestArgument
from nnfmq.serialize.codec import decode_request, encode_request
from nnfmq.serialize.execution_stats import STATS_BYTES
from nnfmq.serialize.packets import DeadlineWord, is_marked, marked


def test_BUR_18_a_marked_packet_has_the_same_request() -> None:
    packet = encode_request([RequestArgument(location=DataLocation(0, 0, 16), dimensions=(4,))], [], slots=[7])
    assert (is_marked(packet), is_marked(marked(packet))) == (False, True)
    assert len(marked(packet)) == len(packet)
    assert decode_request(marked(packet)) == decode_request(packet)


@pytest.mark.parametrize(("word", "deadline_ns"), [(0, None), (1, 1), (2**63 - 1, 2**63 - 1), (2**63, None)])
def test_BUR_18_a_word_outside_the_clock_is_no_deadline(word: int, deadline_ns: int | None) -> None:
    area = memoryview(bytearray(STATS_BYTES))
    area[:8] = word.to_bytes(8, "little")
    assert DeadlineWord(area).load() == deadline_ns


def test_BUR_18_a_stored_deadline_is_read_by_the_other_side() -> None:
    area = memoryview(bytearray(STATS_BYTES))
    DeadlineWord(area).store(5)
    assert DeadlineWord(area).load() == 5
    assert DeadlineWord(None).load() is None
