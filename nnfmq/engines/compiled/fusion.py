"""Fusion: neighbouring operations of a partition that one kernel computes.

`_PATTERNS` lists them. The first operation of a pattern writes an operand that the second one alone reads; the second
operation's rule, or the first one's, is called again with arguments that describe both:

    PAD, PAD_V2, then a convolution      its explicit padding, if the padding value represents 0
    a result with activation NONE,       its fused activation
    then RELU, RELU1 or RELU6
    elementwise operations of one shape  one operator of both
    a CONV_2D or FULLY_CONNECTED         its epilogue
    with results of float32, then
    an elementwise operation
    GATHERs that repeat rows, then       one that repeats both
    the elements of rows
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.kernels.elementwise import (
    RESULT,
    ElementwiseKernel,
    ElementwiseOperator,
    EpilogueInput,
    EpilogueOperator,
    FlatElementwiseKernel,
    FusedOperator,
    operator_count,
    plan_elementwise,
)
from nnfmq.engines.compiled.kernels.gemm import GemmKernel
from nnfmq.engines.compiled.lowering import (
    Constant,
    KernelLaunch,
    KernelSequence,
    LoweredOp,
    RuleCall,
    elementwise,
    movement,
)
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.extensions import Scheme, extended_code
from nnfmq.hal.types import CLAMPS, FusedActivationFunc, OperationType
from nnfmq.operations.declaration import Tensor
from nnfmq.operations.preparation import TO_NHWC
from nnfmq.operations.shapes import WindowDimension, windows

__all__ = ["fuse"]

_FLOAT32 = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A result of one of the `producers` is an input of one of the `consumers`.

    `merge` gets them and the number of that input. It returns the operation that computes both, not lowered yet, or
    None if no kernel does.
    """

    producers: AbstractSet[OperationType | None]
    consumers: AbstractSet[OperationType | None]
    merge: Callable[[LoweredOp, LoweredOp, int], LoweredOp | None]


def fuse(ops: Iterable[LoweredOp], read_outside: AbstractSet[int]) -> list[LoweredOp]:
    """Return the operations of a partition in order, merged where a pattern fits.

    A merged operation has the position of the later one. Operands in `read_outside` must keep their values.
    """
    result = list(ops)
    for patterns in _PATTERNS:
        result = _Fusion(result, read_outside, patterns).result()
    return result


class _Fusion:
    """Merges each operation with those before it, as long as one of the patterns fits."""

    def __init__(self, ops: Sequence[LoweredOp], read_outside: AbstractSet[int], patterns: Sequence[_Pattern]) -> None:
        self._ops, self._read_outside, self._patterns = ops, read_outside, patterns
        self._reader_counts = Counter(index for op in ops for index in op.inputs)
        self._positions: dict[int, int] = {}  # of the operations in `_merged_ops`, by their outputs
        self._merged_ops: dict[int, LoweredOp] = {}

    def result(self) -> list[LoweredOp]:
        """Return the merged operations. Called once."""
        for position, op in enumerate(self._ops):
            while (merged := self._with_a_producer(op)) is not None:
                op = merged
            self._merged_ops[position] = op
            self._positions.update(dict.fromkeys(op.outputs, position))
        return list(self._merged_ops.values())

    def _with_a_producer(self, op: LoweredOp) -> LoweredOp | None:
        """Return the operation merged with one that produces an input, which is then computed no more, or None."""
        for number, index in enumerate(op.inputs):
            if index in self._positions and self._reader_counts[index] == 1 and index not in self._read_outside:
                position = self._positions[index]
                merged = _merged(self._patterns, self._merged_ops[position], op, number)
                if merged is not None:
                    producer = self._merged_ops.pop(position)
                    self._reader_counts.subtract((*producer.inputs, *op.inputs))
                    self._reader_counts.update(merged.inputs)
                    return merged
        return None


def _merged(patterns: Sequence[_Pattern], producer: LoweredOp, consumer: LoweredOp, number: int) -> LoweredOp | None:
    """Return the operation that computes both, or None. The producer's result is input `number` of the consumer."""
    for pattern in patterns:
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


def _activated(producer: LoweredOp, activation: LoweredOp, _: int) -> LoweredOp | None:
    """Return the producer with a fused activation, in the layout of its own result. Both have one scale."""
    if producer.call.attributes["activation"] != FusedActivationFunc.NONE:
        return None
    code = activation.call.code
    assert code is not None, "the pattern has one of CLAMPS"
    call = producer.call.with_attributes(activation=CLAMPS[code])
    return replace(producer, call=call, outputs=activation.outputs)


# -- elementwise operations --------------------------------------------------------------------------------------------

_ELEMENTWISE_KERNELS = (ElementwiseKernel, FlatElementwiseKernel)
_MAX_INPUTS, _MAX_OPERATORS = 4, 8  # so that pointers and values of a vector stay in registers


def _one_loop(producer: LoweredOp, consumer: LoweredOp, number: int) -> LoweredOp | None:
    """Return the operation that applies the consumer's operator to each result of the producer's."""
    first, second = _elementwise_launch(producer), _elementwise_launch(consumer)
    if first is None or second is None or producer.call.output.shape != consumer.call.output.shape:
        return None
    own, others = _inputs_with_layouts(producer), _inputs_with_layouts(consumer)
    if producer.outputs_nchw != consumer.inputs_nchw[number]:
        return None
    tensors = dict(zip(own, producer.call.tensors, strict=True))
    tensors |= {key: tensor for key, tensor in zip(others, consumer.call.tensors, strict=True) if key != others[number]}
    order = {key: position for position, key in enumerate(tensors)}
    input_numbers = [tuple(order.get(key, RESULT) for key in keys) for keys in (own, others)]
    operator = FusedOperator(first[0], input_numbers[0], second[0], input_numbers[1])
    if len(order) > _MAX_INPUTS or operator_count(operator) > _MAX_OPERATORS:
        return None
    rule = partial(_lower_operator, operator, (*first[1], *second[1]))
    call = replace(consumer.call, code=None, rule=rule, tensors=tuple(tensors.values()), attributes={})
    indexes, layouts = zip(*order, strict=True)
    return replace(consumer, call=call, inputs=indexes, inputs_nchw=layouts)


def _elementwise_launch(op: LoweredOp) -> tuple[ElementwiseOperator, tuple[Constant, ...]] | None:
    """Return the operator and the constants of an elementwise operation; None if it is a view."""
    launch = op.lowered
    if not isinstance(launch, KernelLaunch) or not isinstance(launch.kernel, _ELEMENTWISE_KERNELS):
        return None
    return launch.kernel.operator, launch.constants


def _inputs_with_layouts(op: LoweredOp) -> list[tuple[int, bool]]:
    """Return the operand and the layout of each input."""
    return list(zip(op.inputs, op.inputs_nchw, strict=True))


def _lower_operator(
    operator: FusedOperator, constants: tuple[Constant, ...], *inputs: Tensor, output: Tensor, target: Target
) -> KernelLaunch:
    kernel = plan_elementwise(operator, output.shape, [tensor.shape for tensor in inputs], target)
    return KernelLaunch(kernel, constants, operator_count(operator) * math.prod(output.shape) // 4)


def _with_operator(producer: LoweredOp, consumer: LoweredOp, number: int) -> LoweredOp | None:
    """Return the float32 matrix product with the elementwise operator in its epilogue.

    Other operands are arrays of the output's shape, such as a residual connection's, or single elements. Quantized
    results gain nothing: an epilogue unpacks them as a loop does, and arrays of bytes stay in the caches.
    """
    found, result = _elementwise_launch(consumer), producer.call.output
    if found is None or producer.outputs_nchw != consumer.inputs_nchw[number]:
        return None
    if (consumer.call.output.shape, consumer.call.output.dtype, result.dtype) != (result.shape, _FLOAT32, _FLOAT32):
        return None
    kinds = [_epilogue_input(tensor, result) for tensor in consumer.call.tensors]
    kinds[number] = EpilogueInput.RESULT
    if None in kinds:
        return None
    operator = EpilogueOperator(found[0], tuple(kind for kind in kinds if kind is not None))
    others = [key for position, key in enumerate(_inputs_with_layouts(consumer)) if position != number]
    call = replace(producer.call, code=None, rule=partial(_lower_with_operator, producer.call, operator, found[1]))
    inputs, layouts = zip(*_inputs_with_layouts(producer), *others, strict=True)
    return replace(producer, call=call, inputs=inputs, inputs_nchw=layouts, outputs=consumer.outputs)


def _epilogue_input(tensor: Tensor | None, result: Tensor) -> EpilogueInput | None:
    """Return an operand as an input of an epilogue, or None if an epilogue does not read such ones."""
    if tensor is None or math.prod(tensor.shape) == 1:
        return None if tensor is None else EpilogueInput.ELEMENT
    is_array = (tensor.shape, tensor.dtype.itemsize) == (result.shape, result.dtype.itemsize)
    return EpilogueInput.ARRAY if is_array else None


def _lower_with_operator(
    call: RuleCall, operator: EpilogueOperator, constants: tuple[Constant, ...], *_: Tensor, **__: Any
) -> KernelLaunch | KernelSequence | None:
    """Return the launches of `call` with the operator in the last one, or None if its kernel takes none.

    An epilogue reads whole vectors of arrays: rows of the output must be whole panels.
    """
    lowered = call.lower()
    launch = lowered.last if isinstance(lowered, KernelSequence) else lowered
    if not isinstance(launch, KernelLaunch) or not isinstance(launch.kernel, GemmKernel):
        return None
    if operator.reads_arrays and launch.kernel.nr_remainder:
        return None
    kernel = dataclasses.replace(launch.kernel, operator=operator)
    finished = KernelLaunch(kernel, (*launch.constants, *constants), launch.estimated_ns)
    return (
        _with_operands(lowered, finished, operator.operand_count) if isinstance(lowered, KernelSequence) else finished
    )


def _with_operands(lowered: KernelSequence, last: KernelLaunch, count: int) -> KernelSequence:
    """Return a sequence of one input with another last launch, which reads `count` more inputs of the operation."""

    def renumbered(inputs: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number + count if number else 0 for number in inputs)

    parts = tuple(dataclasses.replace(one, inputs=renumbered(one.inputs)) for one in lowered.intermediates)
    return KernelSequence(parts, last, (*renumbered(lowered.inputs), *range(1, 1 + count)))


# -- enlarged images ---------------------------------------------------------------------------------------------------


def _enlarged(rows: LoweredOp, elements: LoweredOp, number: int) -> LoweredOp | None:
    """Return the operation that repeats rows, then the elements of rows, as one."""
    image, rank = rows.call.tensors[0], len(rows.call.output.shape)
    if image is None or number or rank < 2 or True in (*rows.inputs_nchw, *elements.inputs_nchw):
        return None
    times = [_repetitions(op, image, axis) for op, axis in ((rows, rank - 2), (elements, rank - 1))]
    if min(times) < 1:
        return None
    attributes = {"row_times": times[0], "times": times[1]}
    call = replace(elements.call, rule=movement.repeated, tensors=(image,), attributes=attributes)
    return replace(elements, call=call, inputs=rows.inputs)


def _repetitions(gather: LoweredOp, image: Tensor, axis: int) -> int:
    """Return how often a GATHER repeats each element along an axis; 0 if it does anything else."""
    found, indices = gather.call.attributes.get("axis"), gather.call.attributes.get("indices")
    if found is None or indices is None or found % len(image.shape) != axis:
        return 0
    return movement.repetitions(image, axis, indices)


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
_QUANTIZED_AT_RUN_TIME = frozenset(
    extended_code(code, scheme)
    for code in (OperationType.CONV_2D, OperationType.FULLY_CONNECTED)
    for scheme in (Scheme.DYNAMIC, Scheme.HYBRID)
)
_PRODUCTS = _QUANTIZED_AT_RUN_TIME | {
    OperationType.CONV_2D,
    OperationType.GROUPED_CONV_2D,
    OperationType.FULLY_CONNECTED,
}
_ELEMENTWISE = frozenset({None, *elementwise.RULES})
_PATTERNS: Sequence[Sequence[_Pattern]] = (
    (
        _Pattern(frozenset({OperationType.PAD, OperationType.PAD_V2}), _CONVOLUTIONS, _padded_convolution),
        _Pattern(_ACTIVATED | _QUANTIZED_AT_RUN_TIME, frozenset(CLAMPS), _activated),
        _Pattern(_ELEMENTWISE, _ELEMENTWISE, _one_loop),
        _Pattern(frozenset({OperationType.GATHER}), frozenset({OperationType.GATHER}), _enlarged),
    ),
    (_Pattern(_PRODUCTS, _ELEMENTWISE, _with_operator),),
)
"""Those of the second row are tried when the first row's are all merged: an epilogue takes a whole loop."""
