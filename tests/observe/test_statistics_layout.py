"""The histogram's buckets, against exact fractions; the sizes of the area; text in words."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnfmq.observe import statistics_layout as layout
from nnfmq.observe.limits import LIMITS

LAST_START_NS = (2**27 - 2**23) * 1000


def start_ns(bucket: int) -> Fraction:
    """Return where a bucket begins, from the definition: 125 ns each below 1 µs, then 8 in each octave."""
    if bucket < 8:
        return Fraction(125 * bucket)
    octave, part = divmod(bucket - 8, 8)
    return 1000 * 2**octave * (1 + Fraction(part, 8))


def test_buckets_begin_where_the_definition_says() -> None:
    assert [layout.bucket_start_ns(bucket) for bucket in range(layout.BUCKETS)] == [
        start_ns(bucket) for bucket in range(layout.BUCKETS)
    ]
    assert layout.bucket_start_ns(layout.BUCKETS - 1) == LAST_START_NS


@given(st.integers(0, LAST_START_NS - 1))
def test_a_duration_counts_in_the_bucket_that_contains_it(duration_ns: int) -> None:
    bucket = layout.bucket_of(duration_ns)
    assert start_ns(bucket) <= duration_ns < start_ns(bucket + 1)


@given(st.integers(1000, LAST_START_NS - 1))
def test_the_middle_of_a_bucket_is_at_most_a_sixteenth_away(duration_ns: int) -> None:
    bucket = layout.bucket_of(duration_ns)
    middle = (start_ns(bucket) + start_ns(bucket + 1)) / 2
    assert abs(middle - duration_ns) <= Fraction(duration_ns, 16)


@pytest.mark.parametrize(("duration_ns", "bucket"), [(-5, 0), (0, 0), (LAST_START_NS, 223), (2**63 - 1, 223)], ids=str)
def test_durations_beyond_the_ends_count_in_the_first_and_the_last_bucket(duration_ns: int, bucket: int) -> None:
    assert layout.bucket_of(duration_ns) == bucket


def test_the_header_has_a_word_for_each_limit_and_each_cause_of_death() -> None:
    assert layout.LIMITS + len(LIMITS) <= layout.HEADER_WORDS
    assert layout.DEATHS + len(layout.DEATH_CAUSES) <= layout.LIMITS


def test_parts_of_the_area_do_not_overlap_and_begin_in_cache_lines_of_their_own() -> None:
    parts = (layout.MODELS_AT, layout.BURSTS_AT, layout.CALLS_AT, layout.PAST_AT, layout.SLOT_WORDS)
    assert all(word * 8 % 64 == 0 for word in (*parts, layout.CALLS_WORDS, layout.PAST_WORDS))
    slot_words = 32 + 16 * 480 + 32 * 8 + 16 * 456 + 4 * 936
    assert layout.slot_at(1) - layout.slot_at(0) == slot_words
    assert layout.area_bytes(64, 64) == 8 * (64 + 64 * slot_words + 64 * 936)


@pytest.mark.parametrize(
    ("text", "data"),
    [("", b"\0" * 8), ("añb", "añb".encode() + b"\0" * 4), ("1234567ñ", b"1234567\0"), ("\udc80", b"?" + b"\0" * 7)],
)
def test_text_is_cut_at_a_character(text: str, data: bytes) -> None:
    assert layout.text_to_words(text, 1) == data


@pytest.mark.parametrize(("data", "text"), [(b"ab\0c\0\0\0\0", "ab"), (b"\xff1234567", "�1234567")])
def test_text_ends_at_the_first_zero(data: bytes, text: str) -> None:
    assert layout.text_from_words(data) == text
