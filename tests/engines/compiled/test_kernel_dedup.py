"""Kernels of different shapes share code: kernels with one symbol name emit equal IR."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pytest

from nnfmq.engines.compiled.ir_builder import KernelBuilder, Module
from nnfmq.engines.compiled.kernels import Kernel, symbol_name
from nnfmq.engines.compiled.kernels.conv_shape import ConvShape
from nnfmq.engines.compiled.kernels.depthwise import DwConvKernel, plan_dwconv
from nnfmq.engines.compiled.kernels.depthwise_int8 import DwConvInt8Kernel, plan_dwconv_int8
from nnfmq.engines.compiled.kernels.elementwise import plan_elementwise
from nnfmq.engines.compiled.kernels.float_ops import FloatBinary
from nnfmq.engines.compiled.kernels.gemm import GemmKernel
from nnfmq.engines.compiled.kernels.gemm_plan import plan_gemm
from nnfmq.engines.compiled.kernels.interleaving import RowDot
from nnfmq.engines.compiled.kernels.micro_kernels import (
    TILE_ROWS,
    Amx,
    AmxS8S8x64,
    Dot4,
    DotS8S8x4,
    DotS16x2,
    DotU8S8x4,
    Float32,
    MaddU8S8Acc16,
    MicroKernel,
    MmlaU8S8x8,
)
from nnfmq.engines.compiled.kernels.requantize import NO_REQUANTIZATION
from nnfmq.engines.compiled.target import TARGETS, Target
from nnfmq.operations.shapes import WindowDimension, window_dimension

VALID, SAME = 2, 1
FLOAT32, DOT2 = Float32(0.0, 6.0), DotS16x2(False, NO_REQUANTIZATION)


def window(extent: int, size: int, stride: int) -> WindowDimension:
    return window_dimension(extent, size, stride, 1, SAME)


def gemms(micro_kernel: MicroKernel, target: Target, widths: Sequence[int] = range(1, 9)) -> Iterator[GemmKernel]:
    for extent, channels, output_channels in itertools.product((8, 36), (8, 30, 384), (16, 100)):
        for size, stride in ((1, 1), (3, 1), (5, 2)):
            along = window(extent, size, stride)
            for groups, has_batched_rhs in ((1, False), (2, False), (1, size == 1)):
                shape = ConvShape(2, extent, extent, channels, along, along, output_channels, groups, has_batched_rhs)
                yield plan_gemm(shape, micro_kernel, target, widths)


def dwconvs(micro_kernel: Float32 | RowDot, target: Target) -> Iterator[DwConvKernel | DwConvInt8Kernel]:
    for extent, channels, multiplier in itertools.product((12, 36), (32, 128), (1, 3)):
        for size, stride in ((3, 1), (3, 2), (9, 1)):
            along = window(extent, size, stride)
            image = (2, extent, extent, channels)
            if isinstance(micro_kernel, Float32):
                yield plan_dwconv(image, multiplier, along, along, micro_kernel, target)
            else:
                yield plan_dwconv_int8(image, multiplier, along, along, micro_kernel, target)


def emitted(kernel: Kernel, target: Target) -> str:
    module = Module()
    kernel.emit(KernelBuilder(module, "kernel", target))
    return str(module)


def assert_names_decide_code(kernels: Iterable[Kernel], target: Target) -> None:
    """Assert that of kernels with one symbol name the first and the last emit equal IR."""
    by_name = defaultdict(list)
    for kernel in kernels:
        by_name[symbol_name(kernel)].append(kernel)
    assert any(len(same_name) > 1 for same_name in by_name.values())
    for same_name in (same_name for same_name in by_name.values() if len(same_name) > 1):
        assert len({emitted(kernel, target) for kernel in (same_name[0], same_name[-1])}) == 1


@pytest.mark.parametrize("target", [TARGETS["avx2"], TARGETS["avx512"]], ids=["avx2", "avx512"])
@pytest.mark.parametrize("micro_kernel", [FLOAT32, DOT2], ids=["float32", "dot2"])
def test_gemms_of_one_name_have_equal_code(micro_kernel: MicroKernel, target: Target) -> None:
    assert_names_decide_code(gemms(micro_kernel, target), target)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (AmxS8S8x64, "amx"),
        (DotU8S8x4, "avx512vnni"),
        (DotS8S8x4, "neon-dotprod"),
        (MmlaU8S8x8, "neon-i8mm"),
    ],
)
@pytest.mark.parametrize("is_signed", [False, True])
@pytest.mark.parametrize("has_weight_zero_point", [False, True])
def test_dot4_gemms_of_one_name_have_equal_code(
    is_signed: bool, has_weight_zero_point: bool, kind: type[Dot4], name: str
) -> None:
    dot4, target = kind(is_signed, NO_REQUANTIZATION, has_weight_zero_point), TARGETS[name]
    fewest = TILE_ROWS if issubclass(kind, Amx) else 1  # positions for which it is chosen
    kernels = (kernel for kernel in gemms(dot4, target) if kernel.shape.tiled_positions >= fewest)
    kernels = (kernel for kernel in kernels if kernel.shape.groups == 1 or not has_weight_zero_point)
    assert_names_decide_code(kernels, target)


@pytest.mark.parametrize("target", [TARGETS["avx2"], TARGETS["sse4.1"]], ids=["avx2", "sse4.1"])
@pytest.mark.parametrize("is_signed", [False, True])
def test_acc16_gemms_of_one_name_have_equal_code(is_signed: bool, target: Target) -> None:
    kernels = gemms(MaddU8S8Acc16(is_signed, NO_REQUANTIZATION), target, [2, 4])
    # A batched RHS is packed at run time, and never as group lists.
    assert_names_decide_code((kernel for kernel in kernels if not kernel.has_batched_rhs), target)


@pytest.mark.parametrize("target", [TARGETS["avx2"], TARGETS["avx512"]], ids=["avx2", "avx512"])
@pytest.mark.parametrize(("rows", "terms"), [(0, 0), (1, 1), (2, 1), (4, 1), (4, 2)])
def test_depthwise_convolutions_of_one_name_have_equal_code(rows: int, terms: int, target: Target) -> None:
    micro_kernel = RowDot(rows, terms, True, NO_REQUANTIZATION) if rows else FLOAT32
    assert_names_decide_code(dwconvs(micro_kernel, target), target)


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_elementwise_operations_on_whole_vectors_share_code(target: Target) -> None:
    operator = FloatBinary("add", -np.inf, np.inf)
    shapes = [(2 * target.lanes * 3,), (1, 5, 2, 64), (4, 1024, 8)]
    kernels = [plan_elementwise(operator, shape, [shape, shape], target) for shape in shapes]
    kernels += [plan_elementwise(operator, shape, [shape, (1,)], target) for shape in shapes]
    assert [kernel.work_items * 2 * target.lanes for kernel in kernels] == 2 * [math.prod(shape) for shape in shapes]
    assert len({symbol_name(kernel) for kernel in kernels}) == 2
    assert_names_decide_code(kernels, target)
    others = [plan_elementwise(operator, (length,), [(length,)] * 2, target) for length in (2 * target.lanes + 1, 3)]
    assert len({symbol_name(kernel) for kernel in (*kernels, *others)}) == 4
