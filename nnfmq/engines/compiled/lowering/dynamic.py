"""Lowering rules of sums of bytes that are not requantized: DYNAMIC_, HYBRID_ and EXACT_FULLY_CONNECTED and _CONV_2D.

The input of the first two is quantized at run time; the last one's is given as bytes, and its results are the sums.

One or two kernels make bytes of the input, then a GEMM of the same micro-kernels as those of quantized models
multiplies them with the weights, which stay bytes. Its results are floats. If several rows have scales of their own,
its results are sums, and another kernel makes floats of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.kernels.conv_shape import ConvShape
from nnfmq.engines.compiled.kernels.depthwise_int8 import plan_dwconv_int8
from nnfmq.engines.compiled.kernels.dynamic_quantization import (
    HEADER_BYTES,
    Dequantization,
    ExactSums,
    RangeKernel,
    RowDequantization,
    RowStepsKernel,
    Rule,
    StepsKernel,
)
from nnfmq.engines.compiled.kernels.dynamic_recurrent import DynamicGateGemv
from nnfmq.engines.compiled.kernels.gemm import GemmKernel
from nnfmq.engines.compiled.kernels.gemm_plan import plan_gemm
from nnfmq.engines.compiled.kernels.interleaving import RowDot
from nnfmq.engines.compiled.kernels.micro_kernels import Dot4, DotS16x2, MaddS8S8, MaddU8S8Acc16, s8_micro_kernel
from nnfmq.engines.compiled.kernels.recurrent import GateGemv
from nnfmq.engines.compiled.lowering import Constant, Intermediate, KernelLaunch, KernelSequence, LoweringRule
from nnfmq.engines.compiled.lowering.products import (
    WeightedOp,
    best_acc16_kernel,
    estimate_ns,
    image_and_windows,
    int8_offset,
    rows_shape,
    weight_range,
    weight_zero_point_of,
    without_zero_point,
)
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.extensions import Scheme, TfliteOperation, extended_code, operation_code
from nnfmq.hal.types import ChannelQuant, OperationType
from nnfmq.operations.declaration import Array, Shape, Tensor
from nnfmq.operations.dynamic_matmul import weight_scales
from nnfmq.operations.fixed_point import Ints
from nnfmq.operations.quantization import float_activation_range

__all__ = ["RULES", "ByteGates", "dynamic_gemm", "quantized_input", "quantized_product", "rule_of"]

_BYTE, _FLOAT, _INT16, _INT32 = map(np.dtype, ("u1", "<f4", "i2", "<i4"))
_INPUT, _RANGES, _STEPS = range(3)
_MAX_MAGNITUDE = 127  # of weights that `MaddS8S8` multiplies


def fully_connected(
    input: Tensor, weights: Tensor, bias: Tensor, *, output: Tensor, target: Target, activation: int
) -> KernelSequence | None:
    """DYNAMIC_FULLY_CONNECTED: each row of the input is a pixel."""
    if 0 in input.shape:
        return None
    units, k = weights.shape
    shape = rows_shape(math.prod(input.shape) // k, k, units)
    return _lowered(WeightedOp(shape, input, weights, bias, output, target, activation), rounds_bias=False)


def _hybrid_fully_connected(
    input: Tensor, weights: Tensor, bias: Tensor, *, output: Tensor, target: Target, activation: int, asymmetric: bool
) -> KernelSequence | None:
    """HYBRID_FULLY_CONNECTED: each row of the input is a pixel with a scale of its own."""
    if 0 in input.shape:
        return None
    units, k = weights.shape
    shape = rows_shape(math.prod(input.shape) // k, k, units)
    return quantized_product(WeightedOp(shape, input, weights, bias, output, target, activation), rule_of(asymmetric))


def quantized_product(op: WeightedOp, rule: Rule) -> KernelSequence:
    """Return the product of rows with scales of their own."""
    rows, k, units = op.conv_shape.pixels, op.conv_shape.k, op.conv_shape.output_channels
    quantize = _quantized_rows(rows, k, rule)
    if rows == 1:
        return KernelSequence((quantize,), dynamic_gemm(op, rounds_bias=False), (1,))
    assert isinstance(quantize.launch.kernel, RowStepsKernel), "it is"
    epilogue = RowDequantization(*float_activation_range(op.activation), rows, units, quantize.launch.kernel.headers)

    def constant() -> bytes:
        sums = op.weight_rows().sum(axis=1, dtype=np.int64)
        return epilogue.constants(sums, np.broadcast_to(weight_scales(op.filter), units), op.bias.array)

    products = Intermediate(dynamic_gemm(op, rounds_bias=False, keeps_sums=True), (1,), _INT32, (rows, units))
    last = KernelLaunch(epilogue, (constant, epilogue.params()), rows * units // 8)
    return KernelSequence((quantize, products), last, (2, 1))


def _quantized_rows(rows: int, length: int, rule: Rule) -> Intermediate:
    """Return the launch that makes bytes of rows."""
    kernel = RowStepsKernel(rows, length, rows == 1, rule)
    return Intermediate(
        KernelLaunch(kernel, (kernel.params(),), rows * length // 5), (_INPUT,), _BYTE, (kernel.size_bytes,)
    )


def rule_of(asymmetric: bool) -> Rule:
    """Return TFLite's rule with or without zero points."""
    return Rule.ASYMMETRIC if asymmetric else Rule.SYMMETRIC


def convolution(
    input: Tensor,
    filter: Tensor,
    bias: Tensor,
    *,
    output: Tensor,
    target: Target,
    activation: int,
    rounds_bias: bool,
    **conv_params: int,
) -> KernelSequence | None:
    """DYNAMIC_CONV_2D."""
    if 0 in input.shape:
        return None
    shape = _conv_shape(input, filter, conv_params)
    return _lowered(WeightedOp(shape, input, filter, bias, output, target, activation), rounds_bias=bool(rounds_bias))


def _hybrid_convolution(
    input: Tensor,
    filter: Tensor,
    bias: Tensor,
    *,
    output: Tensor,
    target: Target,
    activation: int,
    asymmetric: bool,
    **conv_params: int,
) -> KernelSequence | None:
    """HYBRID_CONV_2D of one image; padding has one value, so the interpreter computes several images."""
    if 0 in input.shape or input.shape[0] > 1:
        return None
    shape = _conv_shape(input, filter, conv_params)
    op = WeightedOp(shape, input, filter, bias, output, target, activation)
    return _lowered(op, rule_of(asymmetric), rounds_bias=False)


def _hybrid_depthwise(
    input: Tensor,
    filter: Tensor,
    bias: Tensor,
    *,
    output: Tensor,
    target: Target,
    depth_multiplier: int,
    activation: int,
    asymmetric: bool,
    **conv_params: int,
) -> KernelSequence | None:
    """HYBRID_DEPTHWISE_CONV_2D of one image."""
    if 0 in input.shape or input.shape[0] > 1:
        return None
    batch, height, width, channels, rows, columns = image_and_windows(input, filter, conv_params)
    epilogue = Dequantization(*float_activation_range(activation), rounds_bias=False, lhs_is_signed=False)
    dot = RowDot.of(target, weight_range(filter), False, epilogue)
    epilogue = replace(epilogue, lhs_is_signed=dot.lhs_is_signed(target))
    dot, image = replace(dot, requantization=epilogue), (batch, height, width, channels)
    kernel = plan_dwconv_int8(image, depth_multiplier, rows, columns, dot, target)
    weights, packed = filter.array[0].astype(np.int16), kernel.packed_channel_map

    def constant() -> bytes:
        scales, sums = weight_scales(filter), weights.sum(axis=(0, 1), dtype=np.int64)
        return epilogue.constants(sums[packed], scales[packed % len(scales)], bias.array[packed], 0, target.lanes)

    taps = weights.reshape(rows.size, columns.size, -1)
    last = KernelLaunch(kernel, (lambda: kernel.pack(taps), constant, kernel.params()), kernel.macs // 32)
    steps = quantized_input(math.prod(input.shape), _INPUT, _RANGES, rule_of(asymmetric))
    return KernelSequence(steps, last, (_STEPS,))


def _conv_shape(input: Tensor, filter: Tensor, conv_params: Mapping[str, int]) -> ConvShape:
    batch, height, width, channels, rows, columns = image_and_windows(input, filter, conv_params)
    return ConvShape(batch, height, width, channels, rows, columns, filter.shape[0])


def _lowered(op: WeightedOp, rule: Rule = Rule.LINEAR, *, rounds_bias: bool) -> KernelSequence:
    intermediates = quantized_input(math.prod(op.input.shape), _INPUT, _RANGES, rule)
    return KernelSequence(intermediates, dynamic_gemm(op, rounds_bias=rounds_bias), (_STEPS,))


def quantized_input(
    count: int, source: int, ranges: int, rule: Rule = Rule.LINEAR
) -> tuple[Intermediate, Intermediate]:
    """Return the launches that make bytes of the value `source`; `ranges` will be the number of the first one's."""
    find, quantize = RangeKernel(count, rule), StepsKernel(count, rule)
    parts = Intermediate(KernelLaunch(find, (find.params(),), count // 16), (source,), _FLOAT, (2 * find.work_items,))
    steps = Intermediate(
        KernelLaunch(quantize, (quantize.params(),), count // 8), (source, ranges), _BYTE, (HEADER_BYTES + count,)
    )
    return parts, steps


def _quantize_linearly(
    input: Tensor, *, output: tuple[Tensor, Tensor, Tensor], target: Target
) -> KernelSequence | None:
    """DYNAMIC_QUANTIZE_LINEAR."""
    if 0 in input.shape:
        return None
    count = math.prod(input.shape)
    parts, steps = quantized_input(count, _INPUT, _RANGES)
    kernel = StepsKernel(count, Rule.LINEAR, has_header=False)
    last = KernelLaunch(kernel, steps.launch.constants, steps.launch.estimated_ns)
    return KernelSequence((parts,), last, steps.inputs)


def dynamic_gemm(op: WeightedOp, *, rounds_bias: bool, keeps_sums: bool = False) -> KernelLaunch:
    """Return the launch that multiplies bytes after a header by the weights; its results are floats, or the sums."""
    limits = float_activation_range(op.activation)
    dequantization = Dequantization(*limits, rounds_bias, lhs_is_signed=False, keeps_sums=keeps_sums)
    product = _ByteProduct.of(op, dequantization)
    dequantization = replace(dequantization, lhs_is_signed=product.lhs_is_signed)
    channels, bias, scales = product.kernel.packed_channel_map, op.bias.array, weight_scales(op.filter)

    def constant() -> bytes:
        rows = product.weight_sums(), scales[channels % len(scales)], bias[channels % len(bias)]
        return dequantization.constants(*rows, product.weight_zero_point, op.target.lanes)

    return product.launch(dequantization, constant)


def _exact_gemm(op: WeightedOp) -> KernelLaunch:
    """Return the launch that multiplies bytes by the weights; its results are the sums plus the bias."""
    epilogue = ExactSums()
    product = _ByteProduct.of(op, epilogue)
    zero_point = op.input.zero_point - 128 * product.lhs_is_signed

    def constant() -> bytes:
        biases = op.bias.array.astype(np.int64)[product.kernel.packed_channel_map]
        return epilogue.constants(biases - zero_point * product.weight_sums(), product.weight_zero_point, zero_point)

    return product.launch(epilogue, constant)


@dataclass(frozen=True, slots=True)
class _ByteProduct:
    """A GEMM of bytes by the weights of an operation, and its micro-kernel.

    `weight_zero_point` is subtracted from the packed weights; the epilogue has the term for it.
    """

    op: WeightedOp
    weight_zero_point: int
    kernel: GemmKernel
    micro_kernel: Dot4 | MaddU8S8Acc16 | DotS16x2

    @classmethod
    def of(cls, op: WeightedOp, epilogue: Dequantization | ExactSums) -> _ByteProduct:
        """Return the product; `epilogue` is one of the kind that it will have."""
        weight_zero_point = weight_zero_point_of(op)
        return cls(op, weight_zero_point, *_planned(op, weight_zero_point != 0, epilogue))

    @property
    def lhs_is_signed(self) -> bool:
        """Whether the micro-kernel reads the bytes as int8."""
        return not isinstance(self.micro_kernel, DotS16x2) and self.micro_kernel.lhs_is_signed

    def weight_sums(self) -> Ints:
        """Return the sum of the weights of each packed channel; 0 if each byte is read minus its zero point."""
        sums: Ints = self.op.weight_rows().sum(axis=1, dtype=np.int64)[self.kernel.packed_channel_map]
        return sums * (not isinstance(self.micro_kernel, DotS16x2))

    def launch(self, epilogue: Dequantization | ExactSums, constant: Constant) -> KernelLaunch:
        """Return the launch with an epilogue and its constant."""
        op, kernel = self.op, replace(self.kernel, micro_kernel=replace(self.micro_kernel, requantization=epilogue))
        zero_point = np.int16(self.weight_zero_point)
        constants = (lambda: kernel.pack(op.weights() - zero_point), constant, kernel.params())
        return KernelLaunch(kernel, constants, estimate_ns(kernel.shape, 128 if op.target.has_dot4 else 32, 1))


def _exact_fully_connected(
    input: Tensor, weights: Tensor, bias: Tensor, *, output: Tensor, target: Target, activation: int
) -> KernelLaunch | None:
    """EXACT_FULLY_CONNECTED."""
    if 0 in input.shape:
        return None
    units, k = weights.shape
    shape = rows_shape(math.prod(input.shape) // k, k, units)
    return _exact_gemm(WeightedOp(shape, input, weights, bias, output, target, activation))


def _exact_convolution(
    input: Tensor,
    filter: Tensor,
    bias: Tensor,
    *,
    output: Tensor,
    target: Target,
    activation: int,
    **conv_params: int,
) -> KernelLaunch | None:
    """EXACT_CONV_2D."""
    if 0 in input.shape:
        return None
    shape = _conv_shape(input, filter, conv_params)
    return _exact_gemm(WeightedOp(shape, input, filter, bias, output, target, activation))


def _planned(
    op: WeightedOp, has_weight_zero_point: bool, epilogue: Dequantization | ExactSums
) -> tuple[GemmKernel, Dot4 | MaddU8S8Acc16 | DotS16x2]:
    """Return a GEMM and its micro-kernel."""
    target = op.target
    chosen: Dot4 | MaddU8S8Acc16 | DotS16x2
    chosen = s8_micro_kernel(target, op.conv_shape, False, has_weight_zero_point, epilogue)
    if target.has_dot4:
        return plan_gemm(op.conv_shape, chosen, target), chosen
    low, high = weight_range(op.filter)
    if target.psign is not None and max(-low, high) <= _MAX_MAGNITUDE:
        chosen = MaddS8S8(False, epilogue, False)
        return plan_gemm(op.conv_shape, chosen, target), chosen
    best = best_acc16_kernel(op)
    if best is not None:
        return best, chosen
    chosen = DotS16x2(False, epilogue)
    return plan_gemm(op.conv_shape, chosen, target), chosen


# -- the gates of recurrent cells --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ByteGates:
    """The weights of all gates (gates, units, elements) without their zero points, and the scales (gates, units)."""

    values: Array
    factors: Array

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> ByteGates | None:
        """Return the weights (units, elements) of gates; None if they are not bytes."""
        if any(tensor.dtype.itemsize > 1 for tensor in tensors):
            return None
        factors = [np.broadcast_to(weight_scales(tensor), tensor.shape[:1]) for tensor in tensors]
        return cls(np.stack([without_zero_point(tensor) for tensor in tensors]), np.stack(factors))

    @property
    def shape(self) -> Shape:
        """Gates, units and elements."""
        return self.values.shape

    def gemv(self, gemv: GateGemv) -> DynamicGateGemv:
        """Return the product with a row of bytes."""
        low, high = int(self.values.min(initial=0)), int(self.values.max(initial=0))
        return DynamicGateGemv(gemv, int8_offset(low, high))

    def constants(self, gemv: GateGemv, biases: Array) -> tuple[Constant, ...]:
        """Return the constants of that product; `biases` (gates, units) are added."""
        gates = self.gemv(gemv)
        sums = self.values.sum(axis=2, dtype=np.int64)
        return lambda: gates.pack(self.values), lambda: gates.constants(sums, self.factors, biases)

    def rows_operation(self, gemv: GateGemv, bias: Array, count: int, target: Target) -> WeightedOp:
        """Return the product of `count` rows with all gates' weights, in the order of `GateGemv.pack_rows`."""
        elements = self.values.shape[2]
        rows = gemv.pack_rows(self.values).astype(np.int16).reshape(-1, elements)
        scales = ChannelQuant(tuple(gemv.pack_rows(self.factors).reshape(-1).tolist()), 0)
        # The zero point of 0 stands for that of the weights, which the rows do not have any more.
        filter = Tensor(rows.shape, _INT16, 1.0, 0, channel_quant=scales, value=rows)
        data, output = Tensor((count, elements), _FLOAT), Tensor((count, len(rows)), _FLOAT)
        biases = Tensor((len(rows),), _FLOAT, value=bias)
        return WeightedOp(rows_shape(count, elements, len(rows)), data, filter, biases, output, target, 0)

    def product_of_rows(self, gemv: GateGemv, bias: Array, count: int, target: Target, rule: Rule) -> KernelSequence:
        """Return the product of rows with scales of their own."""
        return quantized_product(self.rows_operation(gemv, bias, count, target), rule)


RULES: Mapping[OperationType, LoweringRule] = {
    operation_code(TfliteOperation.DYNAMIC_QUANTIZE_LINEAR): _quantize_linearly,
    extended_code(OperationType.CONV_2D, Scheme.DYNAMIC): convolution,
    extended_code(OperationType.CONV_2D, Scheme.EXACT): _exact_convolution,
    extended_code(OperationType.CONV_2D, Scheme.HYBRID): _hybrid_convolution,
    extended_code(OperationType.DEPTHWISE_CONV_2D, Scheme.HYBRID): _hybrid_depthwise,
    extended_code(OperationType.FULLY_CONNECTED, Scheme.DYNAMIC): fully_connected,
    extended_code(OperationType.FULLY_CONNECTED, Scheme.EXACT): _exact_fully_connected,
    extended_code(OperationType.FULLY_CONNECTED, Scheme.HYBRID): _hybrid_fully_connected,
}
