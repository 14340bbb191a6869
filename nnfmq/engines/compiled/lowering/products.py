"""Products: CONV_2D, DEPTHWISE_CONV_2D, GROUPED_CONV_2D, TRANSPOSE_CONV_2D and FULLY_CONNECTED."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from nnfmq.engines.compiled.kernels.arithmetic import Codes, FloatCodes, Floats, Octets, Quads
from nnfmq.engines.compiled.kernels.depthwise import plan_depthwise
from nnfmq.engines.compiled.kernels.product import Product
from nnfmq.engines.compiled.kernels.product_plan import plan_product, time_of
from nnfmq.engines.compiled.kernels.product_shape import ProductShape
from nnfmq.engines.compiled.kernels.requantize import NO_REQUANTIZATION, Codomain, Requantization, Rounding
from nnfmq.engines.compiled.lowering import Intermediate, KernelLaunch, KernelSequence, LoweringRule
from nnfmq.engines.compiled.lowering.data_movement_rules import side_by_side
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.types import OperationType
from nnfmq.operations.fixed_point import INT32_MAX, Ints, ints
from nnfmq.operations.quantization import (
    EXACT_FLOAT32,
    OutputMultipliers,
    float_activation_range,
    quantized_activation_range,
    requantization_scales,
)
from nnfmq.operations.shapes import WindowDimension, windows
from nnfmq.operations.signature import Array, Tensor
from nnfmq.operations.transpose_conv import TransposedConvDimension, transposed_conv_dimensions

__all__ = ["RULES", "rows_product"]

Weights: TypeAlias = Callable[[], Array]

_FLOAT, _CODES = np.dtype("<f4"), (np.dtype("u1"), np.dtype("i1"))
_ONE = WindowDimension(1, 1, 1, 0, 0, 1)
_LARGEST_BYTE, _LARGEST_WEIGHT = 255, 128
_LISTED_WIDTHS, _LISTED_WIDTHS_OF_ONE = (2, 4), (2, 4, 8)  # the widest would leave the nearest cache


def _is_float(*tensors: Tensor) -> bool:
    return all(tensor.dtype == _FLOAT for tensor in tensors)


def convolution(
    input: Tensor, filter: Tensor, bias: Tensor, *, output: Tensor, target: Target, activation: int, **conv_params: int
) -> KernelLaunch | None:
    """CONV_2D."""
    return grouped(input, filter, bias, output=output, target=target, groups=1, activation=activation, **conv_params)


def grouped(
    input: Tensor,
    filter: Tensor,
    bias: Tensor,
    *,
    output: Tensor,
    target: Target,
    groups: int,
    activation: int,
    **conv_params: int,
) -> KernelLaunch | None:
    """GROUPED_CONV_2D."""
    rows, columns = windows(input.shape[1:3], filter.shape[1:3], **conv_params)
    batch, height, width, channels = input.shape
    shape = ProductShape(batch, height, width, channels, rows, columns, filter.shape[0], groups)
    return _product(shape, input, filter, bias, output, target, activation)


def fully_connected(
    input: Tensor, weights: Tensor, bias: Tensor, *, output: Tensor, target: Target, activation: int
) -> KernelLaunch | None:
    """FULLY_CONNECTED: each row of the input is a position of one pixel."""
    units, length = weights.shape
    count = math.prod(input.shape) // length
    along = WindowDimension(1, 1, 1, 0, 0, count)
    shape = ProductShape(1, 1, count, length, _ONE, along, units)
    return _product(shape, input, weights, bias, output, target, activation)


def rows_product(count: int, weights: Array, biases: Array, target: Target) -> KernelLaunch:
    """Return `count` rows of float32 times weights (units, length), with biases added."""
    along = WindowDimension(1, 1, 1, 0, 0, count)
    shape = ProductShape(1, 1, count, weights.shape[1], _ONE, along, len(weights))
    return _float_product(plan_product(shape, Floats(-np.inf, np.inf), target), lambda: weights, biases)


def _product(
    shape: ProductShape, input: Tensor, filter: Tensor, bias: Tensor, output: Tensor, target: Target, activation: int
) -> KernelLaunch | None:
    if 0 in input.shape:
        return None
    return _product_of(_Operands(shape, lambda: _centred(filter), input, filter, bias, output, target, activation))


@dataclass(frozen=True, slots=True)
class _Operands:
    """What a product is made of: `weights` (channels, height, width, depth) are made of the filter's values."""

    shape: ProductShape
    weights: Weights
    input: Tensor
    filter: Tensor
    bias: Tensor
    output: Tensor
    target: Target
    activation: int

    def finish(self, order: Array, doubled: bool = True) -> _Finish | None:
        """Return how sums become codes, for the channels in `order`."""
        taps, rows = self.shape.taps_of_a_filter, _rows(self.weights)
        return _finish(self.input, self.filter, self.bias, self.output, self.activation, order, taps, rows, doubled)


def _product_of(given: _Operands) -> KernelLaunch | None:
    """Return a product of floats or of codes."""
    if _is_float(given.input, given.filter, given.output):
        product = plan_product(given.shape, Floats(*float_activation_range(given.activation)), given.target)
        return _float_product(product, given.weights, given.bias.array)
    if given.input.dtype not in _CODES or given.output.dtype not in _CODES:
        return None
    return _product_of_bytes(given) or _product_of_pairs(given)


def _float_product(product: Product, weights: Weights, bias: Array) -> KernelLaunch:
    biases = np.asarray(bias, np.float32)[product.order % len(bias)]
    constants = (lambda: product.pack(weights()), biases.tobytes(), product.numbers())
    return KernelLaunch(product, constants, product.shape.multiplications // 16)


def _product_of_pairs(given: _Operands) -> KernelLaunch | None:
    shape, weights, target = given.shape, given.weights, given.target
    signed = given.input.dtype.kind == "i"
    draft = plan_product(shape, Codes(signed, NO_REQUANTIZATION), target)
    finish = given.finish(draft.order)
    if finish is None:
        return None
    product = replace(draft, arithmetic=Codes(signed, finish.requantization))
    factor = np.int16(product.arithmetic.factor)
    constants = (lambda: product.pack(weights() * factor), finish.constants(target), product.numbers())
    return KernelLaunch(product, constants, shape.multiplications // 32)


def _product_of_bytes(given: _Operands) -> KernelLaunch | None:
    """Return a product of bytes, or None where the target has none, they take longer, or sums might not fit.

    Of the sum of (code - zero point) · weight the zero point's part is known: it goes into the bias.
    """
    shape, weights, target = given.shape, given.weights, given.target
    signed, excess = given.input.dtype.kind == "i", _excess(given.filter) if target.quads else 0
    largest = _LARGEST_BYTE * shape.taps_of_a_filter * (_LARGEST_WEIGHT + abs(excess) + _largest(given.filter))
    fits = largest + int(np.abs(ints(given.bias.array)).max(initial=0)) <= INT32_MAX
    if not fits or (excess and shape.parts > 1):
        return None

    def arithmetic(requantization: Requantization) -> Quads | Octets:
        return Quads(signed, requantization, excess != 0) if target.quads else Octets(signed, requantization)

    draft = plan_product(shape, arithmetic(NO_REQUANTIZATION), target) if target.quads else _listed_draft(given)
    if draft is None:
        return None
    finish = given.finish(draft.order, doubled=False)
    if finish is None:
        return None
    product = replace(draft, arithmetic=arithmetic(finish.requantization))
    codes = replace(finish.codes, centre=given.input.zero_point + 128 * signed, excess=excess)

    def corrected() -> bytes:
        sums = _rows(weights)().sum(axis=1, dtype=np.int64)
        return replace(finish, biases=finish.biases - codes.centre * sums[product.order], codes=codes).constants(target)

    constants = (lambda: product.pack(weights() - np.int16(excess)), corrected, product.numbers())
    return KernelLaunch(product, constants, shape.multiplications // 128)


def _listed_draft(given: _Operands) -> Product | None:
    """Return the product of listed bytes that takes the least time, None where one of pairs takes less.

    The wider a panel, the more groups are in its list again because of one of its channels.
    """
    shape, target, signed = given.shape, given.target, given.input.dtype.kind == "i"
    if target.byte_products is None:
        return None
    weights, pairs = given.weights(), plan_product(shape, Codes(signed, NO_REQUANTIZATION), target)
    octets = Octets(signed, NO_REQUANTIZATION)
    widths = _LISTED_WIDTHS_OF_ONE if shape.positions == 1 else _LISTED_WIDTHS
    drafts = [plan_product(shape, octets, target, [width]) for width in widths]
    time, draft = min(((time_of(draft, weights), draft) for draft in drafts), key=lambda timed: timed[0])
    return draft if time < time_of(pairs, weights) else None


def _rows(weights: Weights) -> Weights:
    """Return what makes a row of each channel's weights."""

    def rows() -> Array:
        made = weights()
        return made.reshape(len(made), -1)

    return rows


def _excess(filter: Tensor) -> int:
    """Return what is to be subtracted from weights so that 8 bits hold them, and the 0 of filled up filters."""
    low = min(int(filter.array.min()) - filter.zero_point, 0)
    high = max(int(filter.array.max()) - filter.zero_point, 0)
    return max(high - 127, 0) + min(low + 128, 0)


def _centred(filter: Tensor) -> Array:
    """Return a filter's values as products take them: floats, or codes less their zero point."""
    if filter.dtype.kind == "f":
        return filter.array
    return filter.array.astype(np.int16) - np.int16(filter.zero_point)


def _largest(tensor: Tensor) -> int:
    """Return how far a code can be from the zero point."""
    info = np.iinfo(tensor.dtype)
    return max(info.max - tensor.zero_point, tensor.zero_point - info.min)


@dataclass(frozen=True, slots=True)
class _Finish:
    """How sums become codes: one multiplier and one bias for each place of a channel."""

    requantization: Requantization
    multipliers: OutputMultipliers
    biases: Ints
    codes: Codomain

    def constants(self, target: Target) -> bytes:
        """Return what kernels load of it."""
        return self.requantization.constants(self.multipliers, self.biases, self.codes, target.lanes)


def _finish(
    input: Tensor,
    filter: Tensor,
    bias: Tensor,
    output: Tensor,
    activation: int,
    order: Array,
    taps: int,
    weights: Weights,
    doubled: bool = True,
) -> _Finish | None:
    """Return how sums become codes, for the channels in `order`; they come again after the last one.

    How large the sums of a channel can become is told by the number of taps or, where that is not enough, by the
    `weights` (channels first). Weights can be `doubled`, or not.
    """
    multipliers = OutputMultipliers.of(requantization_scales(input, filter, bias, output))
    chosen = order % len(multipliers.multipliers)
    multipliers = OutputMultipliers(multipliers.multipliers[chosen], multipliers.shifts[chosen])
    biases = ints(bias.array)[order % len(bias.array)]
    any_weights = ints(np.full(len(order), taps * _largest(filter) * _largest(input)))
    found = Rounding.of(multipliers, biases, any_weights, doubled)
    if found is None:
        bounds = np.abs(weights().astype(np.int32)).sum(axis=1, dtype=np.int64)[order] * _largest(input)
        found = Rounding.of(multipliers, biases, bounds, doubled)
    codes = Codomain(output.zero_point, *quantized_activation_range(activation, output), input.zero_point)
    return None if found is None else _Finish(Requantization(found), multipliers, biases, codes)


def transposed(
    input: Tensor, filter: Tensor, bias: Tensor, *, output: Tensor, target: Target, activation: int, **conv_params: Any
) -> KernelSequence | None:
    """TRANSPOSE_CONV_2D: a convolution with a channel for each place in a stride, and these put side by side.

    Output cell m · stride + place - head gets taps place + t · stride from input cell m - t: with filters thinned out
    and turned round, every place is a channel of a convolution of stride 1.
    """
    if 0 in input.shape:
        return None
    vertical, horizontal = transposed_conv_dimensions(input.shape[1:3], filter.shape[1:3], **conv_params)
    filters, places = filter.shape[0], vertical.stride * horizontal.stride
    rows, columns = _phase_window(vertical), _phase_window(horizontal)

    def virtual() -> Array:
        phases = _phases(_centred(filter), rows.size * vertical.stride, columns.size * horizontal.stride)
        split = phases.reshape(filters, rows.size, vertical.stride, columns.size, horizontal.stride, -1)
        turned = split[:, ::-1, :, ::-1].transpose(2, 4, 0, 1, 3, 5)
        return turned.reshape(places * filters, rows.size, columns.size, -1)

    batch, height, width, channels = input.shape
    shape = ProductShape(batch, height, width, channels, rows, columns, places * filters)
    product = _product_of(_Operands(shape, virtual, input, filter, bias, output, target, activation))
    made = (batch, rows.count, columns.count, vertical.stride, horizontal.stride, filters)
    joined = (
        None if product is None else side_by_side(made, (vertical.padding_low, horizontal.padding_low), output, target)
    )
    if product is None or joined is None:
        return None
    return KernelSequence((Intermediate(product, (0,), output.dtype, made),), joined, (1,))


def _phase_window(spread: TransposedConvDimension) -> WindowDimension:
    """Return how the filters of single places move along one axis."""
    size = math.ceil(spread.size / spread.stride)
    count = (spread.count - 1 + spread.padding_low) // spread.stride + 1
    return WindowDimension(size, 1, 1, size - 1, count - spread.input_size, count)


def _phases(weights: Array, rows: int, columns: int) -> Array:
    """Return filters filled up with 0 to whole strides."""
    filled = np.zeros((weights.shape[0], rows, columns, weights.shape[3]), weights.dtype)
    filled[:, : weights.shape[1], : weights.shape[2]] = weights
    return filled


def depthwise(
    input: Tensor,
    filter: Tensor,
    bias: Tensor,
    *,
    output: Tensor,
    target: Target,
    depth_multiplier: int,
    activation: int,
    **conv_params: int,
) -> KernelLaunch | None:
    """DEPTHWISE_CONV_2D."""
    if 0 in input.shape:
        return None
    rows, columns = windows(input.shape[1:3], filter.shape[1:3], **conv_params)
    if _is_float(input, filter, output):
        kernel = plan_depthwise(
            input.shape, depth_multiplier, rows, columns, Floats(*float_activation_range(activation)), target
        )
        biases = np.asarray(bias.array, np.float32)[kernel.order]
        constants = (lambda: kernel.pack(filter.array[0]), biases.tobytes(), kernel.numbers())
        return KernelLaunch(kernel, constants, kernel.multiplications // 12)
    if input.dtype not in _CODES or output.dtype not in _CODES:
        return None
    taps, signed = rows.size * columns.size, input.dtype.kind == "i"
    if 2 * taps * _largest(filter) * _largest(input) >= EXACT_FLOAT32:
        return None
    draft = FloatCodes(signed, NO_REQUANTIZATION)
    kernel = plan_depthwise(input.shape, depth_multiplier, rows, columns, draft, target)
    finish = _finish(
        input, filter, bias, output, activation, kernel.order, taps, lambda: _centred(filter).reshape(taps, -1).T
    )
    if finish is None:
        return None
    arithmetic = FloatCodes(signed, finish.requantization)
    kernel, factor = replace(kernel, arithmetic=arithmetic), np.int16(arithmetic.factor)
    constants = (lambda: kernel.pack(_centred(filter)[0] * factor), finish.constants(target), kernel.numbers())
    return KernelLaunch(kernel, constants, kernel.multiplications // 8)


RULES: Mapping[OperationType, LoweringRule] = {
    OperationType.CONV_2D: convolution,
    OperationType.DEPTHWISE_CONV_2D: depthwise,
    OperationType.FULLY_CONNECTED: fully_connected,
    OperationType.GROUPED_CONV_2D: grouped,
    OperationType.TRANSPOSE_CONV_2D: transposed,
}
