"""Fusion: neighbouring operations of a partition that one kernel computes.

`_PATTERNS` lists them. The first operation of a pattern writes an operand that the second one alone reads; the second
operation's rule, or the first one's, is called again with arguments that describe both:

    PAD, PAD_V2, then a convolution      its explicit padding, if the padding value represents 0
    a result with activation NONE,       its fused activation
    then RELU, RELU1 or RELU6
    a float32 convolution or             its weights and bias
    FULLY_CONNECTED, then MUL or ADD
    of a constant for each channel
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import numpy as np

from nnfmq.engines.compiled.lowered_operation import LoweredOp
from nnfmq.hal.types import FusedActivationFunc, OperationType
from nnfmq.operations.prepare import TO_NHWC
from nnfmq.operations.shapes import WindowDimension, windows
from nnfmq.operations.signature import Array, Shape

__all__ = ["fuse"]


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A result of one of the `producers` is an input of one of the `consumers`.

    `merge` gets them and the number of that input. It returns the operation that computes both, not lowered yet, or
    None if no kernel does.
    """

    producers: frozenset[OperationType]
    consumers: frozenset[OperationType]
    merge: Callable[[LoweredOp, LoweredOp, int], LoweredOp | None]


def fuse(ops: Iterable[LoweredOp], read_outside: AbstractSet[int]) -> list[LoweredOp]:
    """Return the operations of a partition in order, merged where a pattern fits.

    A merged operation has the place of the later one. Operands in `read_outside` must keep their values.
    """
    sources = list(ops)
    reader_counts = Counter(index for op in sources for index in op.inputs)
    private = {index for index, count in reader_counts.items() if count == 1} - read_outside
    positions: dict[int, int] = {}  # of the operations in `result`, by their outputs
    result: dict[int, LoweredOp] = {}
    for position, op in enumerate(sources):
        for number, index in enumerate(op.inputs):
            producer = positions.get(index) if index in private else None
            merged = None if producer is None else _merged(result[producer], op, number)
            if producer is not None and merged is not None:
                del result[producer]
                op = merged
                break
        result[position] = op
        positions.update(dict.fromkeys(op.outputs, position))
    return list(result.values())


def _merged(producer: LoweredOp, consumer: LoweredOp, number: int) -> LoweredOp | None:
    """Return the operation that computes both, or None. The producer's result is input `number` of the consumer."""
    for pattern in _PATTERNS:
        if producer.call.code in pattern.producers and consumer.call.code in pattern.consumers:
            merged = pattern.merge(producer, consumer, number)
            lowered = None if merged is None else merged.call.lower()
            if merged is not None and lowered is not None:
                computed = {producer.number, consumer.number, *producer.fused, *consumer.fused} - {merged.number}
                return replace(merged, lowered=lowered, fused=tuple(sorted(computed)))
    return None


# -- padding -----------------------------------------------------------------------------------------------------------

_PADDING = ("padding_top", "padding_bottom", "padding_left", "padding_right")
_WINDOW = ("stride_width", "stride_height", "padding_scheme", "dilation_width", "dilation_height", *_PADDING)


def _padded_convolution(pad: LoweredOp, convolution: LoweredOp, _: int) -> LoweredOp | None:
    """Return the convolution with the padding in its windows.

    As in the model, a window's padding is smaller than its filter, so that each window has an element of the image.
    """
    image, filter = pad.call.tensors[0], convolution.call.tensors[1]
    assert image is not None and filter is not None, "both are required arguments"
    paddings = pad.call.attributes["paddings"].tolist()
    if (
        len(paddings) != 4
        or (pad.outputs_nchw and not convolution.inputs_nchw[0])
        or pad.call.attributes.get("value", image.zero_point) != image.zero_point
    ):
        return None
    shape = image.shape
    if convolution.inputs_nchw[0] and not pad.outputs_nchw:
        paddings, shape = [paddings[axis] for axis in TO_NHWC], tuple(shape[axis] for axis in TO_NHWC)
    if any(paddings[0]) or any(paddings[3]):
        return None
    padded = convolution.call.tensors[0]
    assert padded is not None
    params = {name: value for name, value in convolution.call.attributes.items() if name in _WINDOW}
    own = windows(padded.shape[1:3], filter.shape[1:3], **params)
    total = [_with_padding(window, *more) for window, more in zip(own, paddings[1:3], strict=True)]
    if any(max(low, high) >= window.effective_kernel_size for window, (low, high) in zip(own, total, strict=True)):
        return None
    call = convolution.call.with_attributes(
        padding_scheme=None, **dict(zip(_PADDING, (*total[0], *total[1]), strict=True))
    )
    call = replace(call, tensors=(replace(padded, shape=shape), *call.tensors[1:]))
    return replace(convolution, call=call, inputs=(pad.inputs[0], *convolution.inputs[1:]))


def _with_padding(window: WindowDimension, low: int, high: int) -> tuple[int, int]:
    return window.padding_low + low, window.padding_high + high


# -- activations -------------------------------------------------------------------------------------------------------

_ACTIVATIONS: Mapping[OperationType, FusedActivationFunc] = {
    OperationType.RELU: FusedActivationFunc.RELU,
    OperationType.RELU1: FusedActivationFunc.RELU1,
    OperationType.RELU6: FusedActivationFunc.RELU6,
}


def _activated(producer: LoweredOp, activation: LoweredOp, _: int) -> LoweredOp | None:
    """Return the producer with a fused activation, in the layout of its own result. Both have one scale."""
    if producer.call.attributes["activation"] != FusedActivationFunc.NONE:
        return None
    call = producer.call.with_attributes(activation=_ACTIVATIONS[activation.call.code])
    return replace(producer, call=call, outputs=activation.outputs)


# -- constants of channels ---------------------------------------------------------------------------------------------

_CHANNEL_AXES: Mapping[OperationType, int] = {
    OperationType.CONV_2D: 0,
    OperationType.DEPTHWISE_CONV_2D: 3,
    OperationType.FULLY_CONNECTED: 0,
    OperationType.GROUPED_CONV_2D: 0,
    OperationType.TRANSPOSE_CONV_2D: 0,
}
"""The axis of a filter that is the output channel."""


def _with_constants(producer: LoweredOp, consumer: LoweredOp, number: int) -> LoweredOp | None:
    """Return the producer with the factors or summands of its channels in its weights and bias: a batch normalization.

    Weights and bias stay finite, so that no result is NaN which was none.
    """
    call, (filter, bias) = producer.call, producer.call.tensors[1:3]
    assert filter is not None and bias is not None, "both are required arguments"
    constants = _channel_constants(consumer, number, call.output.shape)
    is_plain = call.attributes["activation"] == FusedActivationFunc.NONE and filter.dtype.kind == "f"
    if constants is None or not is_plain or producer.outputs_nchw != consumer.inputs_nchw[number]:
        return None
    weights, biases = filter.array, bias.array
    if consumer.call.code == OperationType.MUL:
        axis = _CHANNEL_AXES[call.code]
        shape = [len(constants) if n == axis else 1 for n in range(weights.ndim)]
        weights, biases = weights * constants.reshape(shape), biases * constants
    else:
        biases = biases + constants
    if not (np.isfinite(weights).all() and np.isfinite(biases).all()):
        return None
    tensors = (call.tensors[0], replace(filter, value=weights), replace(bias, value=biases))
    call = replace(call, tensors=tensors).with_attributes(activation=consumer.call.attributes["activation"])
    return replace(producer, call=call, outputs=consumer.outputs)


def _channel_constants(consumer: LoweredOp, number: int, shape: Shape) -> Array | None:
    """Return a constant operand of an operation as a value for each channel, or None if it is something else."""
    other = consumer.call.tensors[1 - number]
    if other is None or other.value is None or consumer.call.output.shape != shape:
        return None
    if any(extent > 1 for extent in other.shape[:-1]) or other.value.size not in (1, shape[-1]):
        return None
    return np.broadcast_to(other.value.reshape(-1), shape[-1:])


# -- patterns ----------------------------------------------------------------------------------------------------------

_CONVOLUTIONS = frozenset({OperationType.CONV_2D, OperationType.GROUPED_CONV_2D, OperationType.DEPTHWISE_CONV_2D})
_ACTIVATED = _CONVOLUTIONS | {
    OperationType.TRANSPOSE_CONV_2D,
    OperationType.FULLY_CONNECTED,
    OperationType.ADD,
    OperationType.SUB,
    OperationType.MUL,
    OperationType.DIV,
}
_PATTERNS: Sequence[_Pattern] = (
    _Pattern(frozenset({OperationType.PAD, OperationType.PAD_V2}), _CONVOLUTIONS, _padded_convolution),
    _Pattern(_ACTIVATED, frozenset(_ACTIVATIONS), _activated),
    _Pattern(frozenset(_CHANNEL_AXES), frozenset({OperationType.ADD, OperationType.MUL}), _with_constants),
)
