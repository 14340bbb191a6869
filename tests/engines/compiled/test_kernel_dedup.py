"""Products and depthwise convolutions of different shapes share code: what their names tell is all that decides it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import pytest
from llvmlite import ir

from nnfmq.engines.compiled.ir_builder import KernelBuilder
from nnfmq.engines.compiled.jit import Kernel, symbol_name
from nnfmq.engines.compiled.kernels.conv_shape import ConvShape
from nnfmq.engines.compiled.kernels.dot_product import (
    DotS16x2,
    DotU8S8x4,
    Float32,
    MaddU8S8Acc16,
    MicroKernel,
    Q8ViaFloat32,
)
from nnfmq.engines.compiled.kernels.dwconv import DwConvKernel, plan_dwconv
from nnfmq.engines.compiled.kernels.gemm import GemmKernel
from nnfmq.engines.compiled.kernels.gemm_plan import plan_gemm
from nnfmq.engines.compiled.kernels.requantize import NO_REQUANTIZATION
from nnfmq.engines.compiled.target import TARGETS, Target
from nnfmq.operations.shapes import WindowDimension, window_dimension

VALID, SAME = 2, 1
FLOATS, CODES = Float32(0.0, 6.0), DotS16x2(False, NO_REQUANTIZATION)


def window(extent: int, size: int, stride: int) -> WindowDimension:
    return window_dimension(extent, size, stride, 1, SAME)


def products(arithmetic: MicroKernel, target: Target, widths: Sequence[int] = range(1, 9)) -> Iterator[GemmKernel]:
    for extent, channels, filters in itertools.product((8, 36), (8, 30, 384), (16, 100)):
        for size, stride in ((1, 1), (3, 1), (5, 2)):
            along = window(extent, size, stride)
            for parts, own in ((1, False), (2, False), (1, size == 1)):
                shape = ConvShape(2, extent, extent, channels, along, along, filters, parts, own)
                yield plan_gemm(shape, arithmetic, target, widths)


def depthwises(arithmetic: Float32 | Q8ViaFloat32, target: Target) -> Iterator[DwConvKernel]:
    for extent, channels, multiplier in itertools.product((12, 36), (32, 128), (1, 3)):
        for size, stride in ((3, 1), (3, 2), (9, 1)):
            along = window(extent, size, stride)
            yield plan_dwconv((2, extent, extent, channels), multiplier, along, along, arithmetic, target)


def emitted(kernel: Kernel, target: Target) -> str:
    module = ir.Module("kernels")
    kernel.emit(KernelBuilder(module, "kernel", target))
    return str(module)


def assert_names_tell_all(kernels: Iterable[Kernel], target: Target) -> None:
    """Assert that of kernels with one name the first and the last have the same instructions."""
    named = defaultdict(list)
    for kernel in kernels:
        named[symbol_name(kernel)].append(kernel)
    assert any(len(alike) > 1 for alike in named.values())
    for alike in (alike for alike in named.values() if len(alike) > 1):
        assert len({emitted(kernel, target) for kernel in (alike[0], alike[-1])}) == 1


@pytest.mark.parametrize("target", [TARGETS["avx2"], TARGETS["avx512"]], ids=["avx2", "avx512"])
@pytest.mark.parametrize("arithmetic", [FLOATS, CODES], ids=["floats", "codes"])
def test_products_of_one_name_have_the_same_instructions(arithmetic: MicroKernel, target: Target) -> None:
    assert_names_tell_all(products(arithmetic, target), target)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("has_excess", [False, True])
def test_products_of_quads_of_one_name_have_the_same_instructions(signed: bool, has_excess: bool) -> None:
    quads, target = DotU8S8x4(signed, NO_REQUANTIZATION, has_excess), TARGETS["avx512vnni"]
    every = products(quads, target)
    assert_names_tell_all((product for product in every if product.shape.groups == 1 or not has_excess), target)


@pytest.mark.parametrize("target", [TARGETS["avx2"], TARGETS["sse4.1"]], ids=["avx2", "sse4.1"])
@pytest.mark.parametrize("signed", [False, True])
def test_products_of_octets_of_one_name_have_the_same_instructions(signed: bool, target: Target) -> None:
    every = products(MaddU8S8Acc16(signed, NO_REQUANTIZATION), target, [2, 4])
    assert_names_tell_all(
        (product for product in every if not product.has_batched_rhs), target
    )  # own weights have no lists


@pytest.mark.parametrize("target", [TARGETS["avx2"], TARGETS["avx512"]], ids=["avx2", "avx512"])
@pytest.mark.parametrize("arithmetic", [FLOATS, Q8ViaFloat32(True, NO_REQUANTIZATION)], ids=["floats", "codes"])
def test_depthwise_convolutions_of_one_name_have_the_same_instructions(
    arithmetic: Float32 | Q8ViaFloat32, target: Target
) -> None:
    assert_names_tell_all(depthwises(arithmetic, target), target)
