"""Fusion: neighbouring operations of a partition that one kernel computes.

`_PATTERNS` lists them. The first operation of a pattern writes an operand that the second one alone reads; the second
operation's rule, or the first one's, is called again with arguments that describe both:

    PAD, PAD_V2, then a convolution      its explicit padding, if the padding value represents 0
    a result with activation NONE,       its fused activation
    then RELU, RELU1 or RELU6
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from nnfmq.engines.compiled.lowered_operation import LoweredOp
from nnfmq.hal.types import FusedActivationFunc, OperationType
from nnfmq.operations.prepare import TO_NHWC
from nnfmq.operations.shapes import WindowDimension, windows

__all__ = ["fuse"]


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A result of one of the `producers` is the first input of one of the `consumers`.

    `merge` returns the operation that computes both, not lowered yet, or None if no kernel does.
    """

    producers: frozenset[OperationType]
    consumers: frozenset[OperationType]
    merge: Callable[[LoweredOp, LoweredOp], LoweredOp | None]


def fuse(ops: Iterable[LoweredOp], read_outside: AbstractSet[int]) -> list[LoweredOp]:
    """Return the operations of a partition in order, merged where a pattern fits.

    A merged operation has the place of the later one. Operands in `read_outside` must keep their values.
    """
    sources = list(ops)
    reader_counts = Counter(index for op in sources for index in op.inputs)
    positions: dict[int, int] = {}  # of the operations in `result`, by their outputs
    result: dict[int, LoweredOp] = {}
    for position, op in enumerate(sources):
        source = op.inputs[0] if op.inputs else None
        if source in positions and reader_counts[source] == 1 and source not in read_outside:
            merged = _merged(result[positions[source]], op)
            if merged is not None:
                del result[positions[source]]
                op = merged
        result[position] = op
        positions.update(dict.fromkeys(op.outputs, position))
    return list(result.values())


def _merged(producer: LoweredOp, consumer: LoweredOp) -> LoweredOp | None:
    """Return the operation that computes both, or None."""
    for pattern in _PATTERNS:
        if producer.call.code in pattern.producers and consumer.call.code in pattern.consumers:
            merged = pattern.merge(producer, consumer)
            lowered = None if merged is None else merged.call.lower()
            if merged is None or lowered is None:
                return None
            computed = {producer.number, consumer.number, *producer.fused, *consumer.fused} - {merged.number}
            return replace(merged, lowered=lowered, fused=tuple(sorted(computed)))
    return None


# -- padding -----------------------------------------------------------------------------------------------------------

_PADDING = ("padding_top", "padding_bottom", "padding_left", "padding_right")
_WINDOW = ("stride_width", "stride_height", "padding_scheme", "dilation_width", "dilation_height", *_PADDING)


def _padded_convolution(pad: LoweredOp, convolution: LoweredOp) -> LoweredOp | None:
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


def _activated(producer: LoweredOp, activation: LoweredOp) -> LoweredOp | None:
    """Return the producer with a fused activation, in the layout of its own result. Both have one scale."""
    if producer.call.attributes["activation"] != FusedActivationFunc.NONE:
        return None
    call = producer.call.with_attributes(activation=_ACTIVATIONS[activation.call.code])
    return replace(producer, call=call, outputs=activation.outputs)


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
)
