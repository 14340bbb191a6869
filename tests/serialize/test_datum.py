"""The record layout against the formats that the specification gives."""

from __future__ import annotations

import struct

import pytest

from nnfmq.serialize import packets
from nnfmq.serialize.packets import DATUM_BYTES, DatumVariant

REQUEST_FORMATS = [
    "<B3xIIII4x", "<B3xB3xIIII", "<B3xI16x", "<B3xB3xIIII", "<B3xI16x", "<B3xi16x", "<B3xi16x",
]  # fmt: skip
RESULT_FORMATS = ["<B7xIiI4x", "<B7xB3xI8x", "<B7xI12x", "<B7xQQ"]


def offsets_of(layout: str) -> list[int]:
    """Return the bytes of each value of a format, found by packing one value of all ones at a time."""
    codes = [code for code in layout if code in "BIiQ"]
    packed = [struct.pack(layout, *(int(at == index) for at in range(len(codes)))) for index in range(len(codes))]
    return [record.index(1) for record in packed]


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        *zip(packets.REQUEST_VARIANTS, REQUEST_FORMATS, strict=True),
        *zip(packets.RESULT_VARIANTS, RESULT_FORMATS, strict=True),
    ],
)
def test_BUR_7_BUR_8_a_variant_has_the_offsets_of_the_specification(variant: DatumVariant, layout: str) -> None:
    assert [0, *(field.offset for field in variant.fields)] == offsets_of(layout)


@pytest.mark.parametrize("variant", [*packets.REQUEST_VARIANTS, *packets.RESULT_VARIANTS], ids=lambda v: v.name)
def test_every_variant_fills_one_record(variant: DatumVariant) -> None:
    assert variant.layout.size == DATUM_BYTES == 24


@pytest.mark.parametrize("variants", [packets.REQUEST_VARIANTS, packets.RESULT_VARIANTS])
def test_discriminators_count_from_zero_in_order(variants: tuple[DatumVariant, ...]) -> None:
    assert [variant.discriminator for variant in variants] == list(range(len(variants)))


def test_an_unknown_field_has_no_offset() -> None:
    with pytest.raises(KeyError):
        packets.RESULT_OPERAND.offset_of("hasNoValue")
