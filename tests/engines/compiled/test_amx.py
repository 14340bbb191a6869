"""GEMMs in AMX's tile registers compared with the interpreter, and the code that uses the registers."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from llvmlite import binding as llvm
from support.compiled import assert_kernels_agree_on
from support.instruction_sets import initialize_all_targets
from support.quantized_gemm import (
    INPUTS,
    PER_CHANNEL,
    SAME,
    VALID,
    QuantType,
    assert_packed_weights_are_restored,
    constants_of,
    convolution,
    filter_kind,
    fully_connected,
    inputs_of,
    quantized_values,
)

from nnfmq.engines.compiled import code_generator
from nnfmq.engines.compiled.ir_builder import KernelBuilder, Module
from nnfmq.engines.compiled.kernels import gemm_plan
from nnfmq.engines.compiled.kernels.conv_shape import ConvShape
from nnfmq.engines.compiled.kernels.gemm import GemmKernel, LhsLayout
from nnfmq.engines.compiled.kernels.micro_kernels import Amx, AmxS8S8x64, AmxU8S8x64, DotU8S8x4, s8_micro_kernel
from nnfmq.engines.compiled.kernels.requantize import NO_REQUANTIZATION
from nnfmq.engines.compiled.target import TARGETS
from nnfmq.hal.types import Model
from nnfmq.operations.shapes import WindowDimension, window_dimension

on_tiles = pytest.mark.instruction_sets("tiles")

UINT8, INT8 = INPUTS[1], INPUTS[4]


def filter_of(input: QuantType, zero_point: int | None, shape: tuple[int, ...], pattern: str = "random") -> list[Any]:
    """Return filter and bias as constants; the filter has the ends of its type."""
    kind = filter_kind(input, zero_point)
    data = quantized_values(kind, shape, pattern, np.random.default_rng(1))
    data.reshape(-1)[:2] = kind.ends
    return constants_of(kind, data)


def assert_tiles_match(model: Model, kind: QuantType, planned: list[GemmKernel]) -> GemmKernel:
    assert_kernels_agree_on(model, inputs_of(model, kind, ("random", "high")))
    assert isinstance(planned[-1].micro_kernel, Amx)
    return planned[-1]


@on_tiles
@pytest.mark.parametrize("input", [UINT8, INT8], ids=["uint8", "int8"])
@pytest.mark.parametrize("filter", [122, 128])
@pytest.mark.parametrize("rows", [16, 31, 32, 33, 100])
@pytest.mark.parametrize("length", [32, 63, 64, 65, 200])
@pytest.mark.parametrize("units", [1, 16, 17, 32, 33, 90])
def test_products_match_the_interpreter(
    units: int, length: int, rows: int, filter: int, input: QuantType, planned: list[GemmKernel]
) -> None:
    """Rows and units that fill one tile register, two, and parts of them; lengths that end within a group of K."""
    model = fully_connected(input, filter_of(input, filter, (units, length)), rows, 0.8 * length**0.5)

    kernel = assert_tiles_match(model, input, planned)

    assert kernel.tile == (16 if rows < 32 else 32, 1 if units <= 16 else 2)
    assert kernel.micro_kernel.has_weight_zero_point == (filter == 122 or input is UINT8)


@on_tiles
@pytest.mark.parametrize("input", INPUTS)
@pytest.mark.parametrize("filter", [PER_CHANNEL, 0, 122, 255])
@pytest.mark.parametrize("window", [(3, 3, 1, 1, SAME), (3, 2, 2, 1, SAME), (2, 3, 1, 2, SAME), (1, 1, 2, 1, VALID)])
@pytest.mark.parametrize("size", [(1, 5, 40, 20, 33), (2, 3, 64, 40, 7)])
def test_convolutions_match_the_interpreter(
    size: tuple[int, ...],
    window: tuple[int, ...],
    filter: int | None,
    input: QuantType,
    planned: list[GemmKernel],
) -> None:
    rows, columns, *moves = window
    if columns * size[3] < 32:
        size = (*size[:3], 32, size[4])
    if moves[1] == 2:
        size = (*size[:3], 33, size[4])  # each column is a tap
    constants = filter_of(input, filter, (size[4], rows, columns, size[3]))
    model = convolution(input, constants, size[:4], tuple(moves), 0.8 * (rows * columns * size[3]) ** 0.5)  # type: ignore[arg-type]

    assert assert_tiles_match(model, input, planned).lhs_layout == LhsLayout.ROW_BUFFER


@on_tiles
@pytest.mark.parametrize("pattern", ["low", "high", "ends"])
@pytest.mark.parametrize("input", INPUTS)
def test_extreme_accumulators_match_the_interpreter(input: QuantType, pattern: str, planned: list[GemmKernel]) -> None:
    model = fully_connected(input, filter_of(input, 122, (33, 300), pattern), 40, 300.0)
    assert_tiles_match(model, input, planned)


@on_tiles
@pytest.mark.parametrize("size", [(33, 130, 100), (60, 128, 33), (17, 200, 5)])
@pytest.mark.parametrize("filter", [122, 128])
@pytest.mark.parametrize("input", [UINT8, INT8], ids=["uint8", "int8"])
def test_streamed_weights_match_the_interpreter(
    input: QuantType,
    filter: int,
    size: tuple[int, int, int],
    planned: list[GemmKernel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limits are so small that small weights are streamed, in K blocks of which the last one is shorter."""
    monkeypatch.setattr(gemm_plan, "_MAX_RESIDENT_BYTES", 64)
    monkeypatch.setattr(gemm_plan, "_MAX_K_BLOCK_BYTES", 3000)
    rows, length, units = size
    model = fully_connected(input, filter_of(input, filter, (units, length)), rows, 0.8 * length**0.5)

    kernel = assert_tiles_match(model, input, planned)

    assert kernel.streams_weights and kernel.k_blocks > 1


@on_tiles
@pytest.mark.parametrize("rows", [16, 70])
@pytest.mark.parametrize("input", [UINT8, INT8], ids=["uint8", "int8"])
def test_rows_that_share_a_cache_set_match_the_interpreter(
    input: QuantType, rows: int, planned: list[GemmKernel]
) -> None:
    model = fully_connected(input, filter_of(input, 122, (20, 2048)), rows, 40.0)
    assert assert_tiles_match(model, input, planned).lhs_layout == LhsLayout.SPACED


@on_tiles
@pytest.mark.parametrize("input", [UINT8, INT8], ids=["uint8", "int8"])
def test_weights_and_corrected_biases_are_restored_from_a_cache(input: QuantType) -> None:
    assert_packed_weights_are_restored(fully_connected(input, filter_of(input, 122, (20, 70)), 18, 10.0))


@pytest.mark.parametrize(
    ("rows", "k", "expected"),
    [(16, 32, AmxU8S8x64), (15, 32, DotU8S8x4), (16, 31, DotU8S8x4)],
    ids=["a tile", "few rows", "few K elements"],
)
def test_tile_registers_are_used_if_they_are_at_least_half_full(rows: int, k: int, expected: type) -> None:
    along, across = (window_dimension(extent, 1, 1, 1, 1) for extent in (rows, 1))
    shape = ConvShape(1, 1, rows, k, across, along, 8)
    assert type(s8_micro_kernel(TARGETS["amx"], shape, False, False, NO_REQUANTIZATION)) is expected
    assert type(s8_micro_kernel(TARGETS["avx512vnni"], shape, False, False, NO_REQUANTIZATION)) is DotU8S8x4


def assembly_of(kernel: GemmKernel) -> str:
    module = Module()
    kernel.emit(KernelBuilder(module, "kernel", TARGETS["amx"]))
    parsed = llvm.parse_assembly(str(module))
    parsed.triple = TARGETS["amx"].triple
    initialize_all_targets()
    assembly: str = code_generator.create_target_machine(TARGETS["amx"], "", ()).emit_assembly(parsed)
    return assembly


@pytest.mark.parametrize("kind", [AmxU8S8x64, AmxS8S8x64])
def test_registers_are_configured_once_and_released(kind: type[Amx]) -> None:
    """Each return follows a tilerelease; all eight registers have 16 rows of 64 bytes (Intel SDM, TILECFG)."""
    along, across = WindowDimension(1, 1, 1, 0, 0, 64), WindowDimension(1, 1, 1, 0, 0, 1)
    shape = ConvShape(1, 1, 64, 96, across, along, 48)
    assembly = assembly_of(gemm_plan.plan_gemm(shape, kind(True, NO_REQUANTIZATION, False), TARGETS["amx"]))

    order = re.findall(r"\t(ldtilecfg|tilerelease|retq|tdpb[us]sd)\b", assembly)
    assert [name for name, _ in itertools.groupby(order)] == [
        "ldtilecfg",
        "tdpbssd" if kind is AmxS8S8x64 else "tdpbusd",
        "tilerelease",
        "retq",
    ]
    assert order.count("ldtilecfg") == order.count("retq") == 1
