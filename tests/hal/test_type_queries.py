"""The HAL utilities' queries of types and sizes, and its small helpers, under this package's names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnfmq.hal import capabilities, extensions, tensor_info, timing, types
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import extension_code, is_extension
from nnfmq.hal.feature_levels import number_of_consumers
from nnfmq.hal.models import aligned_offset, alignment_for, round_up
from nnfmq.hal.types import (
    Operand,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
    element_bytes,
    has_unspecified_dimensions,
    is_scalar,
    merge_dimensions,
    operand_bytes,
)
from nnfmq.validation.models import operand_size

F32, Q8 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_QUANT8_ASYMM
SIZES = {
    1: "BOOL TENSOR_QUANT8_ASYMM TENSOR_QUANT8_SYMM TENSOR_QUANT8_SYMM_PER_CHANNEL TENSOR_BOOL8 "
    "TENSOR_QUANT8_ASYMM_SIGNED TENSOR_OEM_BYTE",
    2: "FLOAT16 TENSOR_FLOAT16 TENSOR_QUANT16_SYMM TENSOR_QUANT16_ASYMM",
    4: "FLOAT32 INT32 UINT32 TENSOR_FLOAT32 TENSOR_INT32",
    0: "SUBGRAPH OEM",
}
"""The HAL's types by the bytes of an element."""


def test_UTL_3_each_type_has_the_hals_element_size() -> None:
    stated = {OperandType[name]: size for size, names in SIZES.items() for name in names.split()}
    assert {kind: element_bytes(kind) for kind in OperandType} == stated


def test_UTL_3_scalars_are_the_types_that_are_no_tensors() -> None:
    tensors = {kind for kind in OperandType if kind.name.startswith("TENSOR_")}
    assert {kind for kind in OperandType if not is_scalar(kind)} == tensors


def test_UTL_3_codes_above_16_bits_are_those_of_extensions() -> None:
    assert not any(is_extension(code) for code in (*OperandType, *OperationType))
    assert not is_extension(0xFFFF)
    assert is_extension(OperandType(extension_code(1, 0)))
    assert is_extension(OperationType(extension_code(0x7FFF, 0xFFFF)))


@pytest.mark.parametrize(
    ("kind", "dimensions", "is_unspecified"),
    [
        (F32, (), True),
        (F32, (0,), True),
        (F32, (2, 0), True),
        (F32, (2, 3), False),
        (OperandType.FLOAT32, (), False),
        (OperandType.SUBGRAPH, (), False),
    ],
)
def test_UTL_3_a_tensor_without_rank_or_with_an_extent_of_0_has_unspecified_dimensions(
    kind: OperandType, dimensions: tuple[int, ...], is_unspecified: bool
) -> None:
    assert has_unspecified_dimensions(kind, dimensions) is is_unspecified


@pytest.mark.parametrize(
    ("kind", "dimensions", "size"),
    [
        (F32, (), 0),
        (F32, (0, 5), 0),
        (F32, (5, 0), 0),
        (F32, (2, 3), 24),
        (Q8, (2**32 - 1,), 2**32 - 1),
        (OperandType.FLOAT16, (), 2),
    ],
)
def test_UTL_3_an_unknown_extent_makes_the_size_0(kind: OperandType, dimensions: tuple[int, ...], size: int) -> None:
    assert operand_size(kind, dimensions, "operand 0") == size
    assert operand_bytes(Operand(kind, dimensions)) == size


@pytest.mark.parametrize("dimensions", [(2**32 - 1,), (2**16, 2**16), (2**31, 4, 0), (2**30, 1, 0)])
def test_UTL_3_a_size_over_32_bits_is_an_error_even_if_a_later_extent_is_0(dimensions: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match=r"more than 2\^32 - 1 bytes"):
        operand_size(F32, dimensions, "operand 0")


def test_UTL_3_an_extent_of_0_before_a_large_one_makes_the_size_0() -> None:
    assert operand_size(F32, (0, 2**31, 4), "operand 0") == 0


@pytest.mark.parametrize(
    ("first", "second", "combined"),
    [
        ((), (), ()),
        ((), (2, 3), (2, 3)),
        ((2, 0), (), (2, 0)),
        ((0, 3), (2, 0), (2, 3)),
        ((0, 0), (0, 3), (0, 3)),
        ((2, 3), (2, 3), (2, 3)),
        ((2, 3), (2, 4), None),
        ((2, 3), (2, 3, 1), None),
    ],
)
def test_UTL_8_dimensions_are_combined(
    first: tuple[int, ...], second: tuple[int, ...], combined: tuple[int, ...] | None
) -> None:
    assert merge_dimensions(first, second) == combined
    assert merge_dimensions(second, first) == combined


def test_UTL_8_consumers_are_counted_once_for_each_reading() -> None:
    operations = (
        Operation(OperationType.ADD, (0, 0, 1), (2,)),
        Operation(OperationType.RELU, (2,), (3,)),
    )
    graph = Subgraph((Operand(F32),) * 4, operations, (0,), (3,))
    assert number_of_consumers(graph) == [2, 1, 1, 0]


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 20))
def test_UTL_8_rounding_up_gives_the_next_multiple(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - value < multiple


def test_UTL_8_alignment_is_2_for_2_and_3_bytes_and_4_above() -> None:
    assert [alignment_for(length) for length in (0, 1, 2, 3, 4, 5, 8, 1000)] == [1, 1, 2, 2, 4, 4, 4, 4]


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_UTL_8_the_next_offset_is_the_first_aligned_one(end: int, size: int) -> None:
    aligned = [offset for offset in range(end, end + 4) if offset % alignment_for(size) == 0]
    assert aligned_offset(end, size) == aligned[0]


VALUES = [
    types.ChannelQuant((0.5, 0.25), 1),
    types.DataLocation(1, 2, 3, 0),
    types.Operand(F32, (2, 3), 0.5, 1),
    types.Operation(OperationType.ADD, (0, 1, 2), (3,)),
    types.Subgraph((), (), (), ()),
    types.Model(types.Subgraph((), (), (), ())),
    types.RequestArgument(),
    types.Request((), ()),
    types.BufferToken(7),
    types.ExtensionNameAndPrefix("com.example.name", 1),
    types.ExtensionOperandTypeInformation(0, True, 8),
    types.ExecutionConfig(),
    types.TokenValuePair(1 << 16, b"x"),
    types.OutputShape((2, 3)),
    timing.Timing(1, 2),
    capabilities.PerformanceInfo(1.0, 2.0),
    extensions.Extension("com.example.name"),
    tensor_info.TensorInfo("image", (1, 2), "float32"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_UTL_8_each_structure_of_the_hal_has_a_repr_that_names_it(value: object) -> None:
    assert type(value).__name__ in repr(value)
    assert " object at 0x" not in repr(value)


def test_UTL_8_each_enumeration_of_the_hal_has_a_repr_with_name_and_value() -> None:
    kinds = [value for name in types.__all__ if isinstance(value := getattr(types, name), type)]
    members = [member for kind in kinds if hasattr(kind, "__members__") for member in kind]
    assert len(members) > 150
    assert [m for m in members if m.name not in repr(m) or str(int(m)) not in repr(m)] == []
