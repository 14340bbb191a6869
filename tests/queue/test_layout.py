"""Offsets and descriptors, without memory."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nnfmq.hal.errors import InvalidArgument, QueueCorrupted
from nnfmq.queue import layout
from nnfmq.queue.layout import Grantor, MQDescriptor, compute_layout, resolve, to_descriptor

PAGE = 4096

# What libfmq itself lays down for a burst channel: 1024 records of 24 bytes.
BURST = MQDescriptor((Grantor(0, 0, 8), Grantor(0, 8, 8), Grantor(0, 16, 24576), Grantor(0, 24592, 4)), 24, 1)


def test_a_burst_channel_is_described_as_libfmq_does() -> None:
    assert to_descriptor(compute_layout(24, 1024)) == BURST


def test_a_burst_channel_needs_28672_bytes_with_pages_of_4_kib() -> None:
    assert layout.PAGE_BYTES != PAGE or compute_layout(24, 1024).region_bytes == 28672


def test_QueueSizeOdd_an_odd_ring_moves_only_the_event_flag_word() -> None:
    place = compute_layout(1, 2049)
    assert (place.read_counter, place.write_counter, place.ring, place.ring_bytes, place.event_flag) == (
        0, 8, 16, 2049, 2072,
    )  # fmt: skip


def test_without_event_flag_there_are_three_grantors() -> None:
    assert to_descriptor(compute_layout(4, 8, event_flag=False)).grantors == BURST.grantors[:2] + (Grantor(0, 16, 32),)


@pytest.mark.parametrize(("quantum", "count"), [(1, 1), (1, 2049), (24, 1024), (24, 1019), (7, 585)])
def test_stage_slots_are_behind_the_cpu_hints_in_a_separate_cache_line(quantum: int, count: int) -> None:
    place = compute_layout(quantum, count)
    assert place.event_flag is not None and place.stats is not None
    assert place.stats % 64 == 0
    assert place.event_flag + 8 <= place.stats < place.event_flag + 8 + 64
    assert place.stats + layout.STATS_WORDS * 8 <= place.region_bytes
    assert place.region_bytes % layout.PAGE_BYTES == 0


@pytest.mark.parametrize(("quantum", "count"), [(24, 1024), (1, 2049), (8, 1)])
def test_a_descriptor_resolves_to_the_layout_that_it_was_made_from(quantum: int, count: int) -> None:
    place = compute_layout(quantum, count)
    assert resolve(to_descriptor(place), place.region_bytes) == place


@pytest.mark.parametrize(
    ("quantum", "count"),
    [(0, 1), (-10, 1), (2**31, 1), (1, 0), (1, -1), (2, (2**64 - 1) // 2 + 1), (2, (2**63 - 1) // 2 + 1), (1, 2**31)],
)
def test_QueueSizeTooLarge_sizes_that_no_descriptor_can_express_are_rejected(quantum: int, count: int) -> None:
    with pytest.raises(InvalidArgument, match="allowed are"):
        compute_layout(quantum, count)


def changed(position: int, **fields: int) -> MQDescriptor:
    """Return the burst's descriptor with one grantor changed."""
    grantors = list(BURST.grantors)
    grantors[position] = replace(grantors[position], **fields)
    return replace(BURST, grantors=tuple(grantors))


HOSTILE = {
    "N_BUX_3 wrong flavor": (replace(BURST, flags=2), "flavor is 2"),
    "N_BUX_3 no flavor": (replace(BURST, flags=0), "flavor is 0"),
    "NegativeAidlDescriptor": (replace(BURST, quantum=-10), "quantum is -10"),
    "quantum 0": (replace(BURST, quantum=0), "quantum is 0"),
    "N_BUX_3 ring no multiple of the quantum": (replace(BURST, quantum=25), "no multiple of the quantum 25"),
    "MismatchedPayloadSize": (replace(BURST, quantum=17), "no multiple of the quantum 17"),
    "two grantors": (replace(BURST, grantors=BURST.grantors[:2]), "2 grantors"),
    "no grantors": (replace(BURST, grantors=()), "0 grantors"),
    "BadFdIndex": (changed(0, fd_index=5), "read counter is in descriptor 5"),
    "negative fd index": (changed(2, fd_index=-1), "ring is in descriptor -1"),
    "ExtentTooLarge": (changed(2, extent=0xFFFFF041), "ring has extent 4294963265"),
    "NegativeAidlDescriptorGrantor": (changed(2, extent=-10), "ring has extent -10"),
    "empty ring": (changed(2, extent=0), "ring has extent 0"),
    "ring shorter than a record": (changed(2, extent=10), "no multiple of the quantum"),
    "short read counter": (changed(0, extent=4), "read counter has extent 4"),
    "short write counter": (changed(1, extent=7), "write counter has extent 7"),
    "short event flag word": (changed(3, extent=3), "event flag word has extent 3"),
    "misaligned write counter": (changed(1, offset=12), "write counter at offset 12"),
    "misaligned event flag word": (changed(3, offset=24596), "event flag word at offset 24596"),
    "negative offset": (changed(2, offset=-8), "ring at offset -8"),
    "huge offset": (changed(3, offset=2**31), "event flag word at offset 2147483648"),
    "N_BUX_3 ring out of the region": (changed(2, extent=24 * 1194), "ring ends at byte 28672.*|overlaps|ends at byte"),
    "N_BUX_3 event flag word out of the region": (
        changed(3, offset=28672),
        "event flag word ends at byte 28676 of memory",
    ),
    "counter inside the ring": (changed(1, offset=800), "overlaps ring"),
    "both counters in one place": (changed(1, offset=0), "overlaps"),
    "event flag word on a counter": (changed(3, offset=8), "overlaps"),
    "HidlOnlyBadQueueConfig_SanityCheck": (
        MQDescriptor((Grantor(0, 0, 4096),) * 3, 4096, 1),
        "overlaps",
    ),
}


@pytest.mark.parametrize(("descriptor", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_descriptor_is_rejected(descriptor: MQDescriptor, message: str) -> None:
    with pytest.raises(QueueCorrupted, match=message):
        resolve(descriptor, 28672)


def test_grantors_after_the_fourth_are_ignored() -> None:
    extended = replace(BURST, grantors=(*BURST.grantors, Grantor(9, -1, -1)))
    assert resolve(extended, 28672) == resolve(BURST, 28672)


def test_a_counter_may_claim_more_than_its_eight_bytes() -> None:
    assert resolve(changed(0, extent=4096), 28672).read_counter == 0


# The burst's queue with its ring in a second descriptor, as libfmq lays that out.
TWO_FDS = MQDescriptor((Grantor(0, 0, 8), Grantor(0, 8, 8), Grantor(1, 0, 24576), Grantor(0, 16, 4)), 24, 1)


def test_a_ring_in_a_second_descriptor_is_described_as_libfmq_does() -> None:
    place = compute_layout(24, 1024, ring_fd=1)
    assert to_descriptor(place) == TWO_FDS
    assert resolve(TWO_FDS, place.region_bytes, 24576) == place


def test_ranges_at_one_offset_of_different_descriptors_do_not_overlap() -> None:
    assert resolve(TWO_FDS, PAGE, 24576).fds == (0, 0, 1, 0)


@pytest.mark.parametrize(
    ("descriptor", "sizes", "message"),
    [
        (TWO_FDS, (PAGE,), "ring is in descriptor 1; the last one is 0"),
        (TWO_FDS, (PAGE, 24575), "ring ends at byte 24576 of memory of 24575 bytes"),
        (TWO_FDS, (16, 24576), "event flag word ends at byte 20 of memory of 16 bytes"),
        (replace(TWO_FDS, grantors=(*TWO_FDS.grantors[:3], Grantor(1, 8, 4))), (PAGE, PAGE * 8), "overlaps ring"),
        (replace(TWO_FDS, grantors=(Grantor(1, 0, 8), *TWO_FDS.grantors[1:])), (PAGE, PAGE * 8), "overlaps"),
        (replace(TWO_FDS, grantors=(Grantor(2, 0, 8), *TWO_FDS.grantors[1:])), (PAGE, PAGE * 8), "in descriptor 2"),
    ],
)
def test_a_hostile_descriptor_of_two_fds_is_rejected(
    descriptor: MQDescriptor, sizes: tuple[int, ...], message: str
) -> None:
    with pytest.raises(QueueCorrupted, match=message):
        resolve(descriptor, *sizes)


@pytest.mark.parametrize(("flags", "expected"), [(1, 2), (2, 1), (0, 1), (3, 2)])
def test_a_descriptor_of_another_flavor_than_expected_is_rejected(flags: int, expected: int) -> None:
    with pytest.raises(QueueCorrupted, match=f"flavor is {flags}; expected is {expected}"):
        resolve(replace(BURST, flags=flags), 28672, flavor=expected)


def test_memory_that_ends_after_the_event_flag_word_has_no_stage_slots() -> None:
    assert resolve(BURST, 24596).stats is None


def test_a_layout_other_than_the_standard_one_has_no_stage_slots() -> None:
    assert resolve(changed(3, offset=24600), 28672).stats is None
