"""What an operation gives, and what it gives in float32: expected outputs that no quantization has touched.

A single operation of float16 or of codes is judged by what the reference computes for the same numbers in float32,
rounded to the output's type once. Where no float32 form means the same (conversions between types, and
HASHTABLE_LOOKUP, whose misses are zero bytes), it is judged by the reference's own result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from nnfmq.conformance.testmodels import Array
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import Operand, OperandType, OperationType, is_scalar
from nnfmq.operations import REGISTRY
from nnfmq.operations.prepare import prepare, tensor_of
from nnfmq.operations.signature import NUMPY_TYPES, Match, Role, match

_NOT_CONVERTED = {
    OperationType.CAST,
    OperationType.DEQUANTIZE,
    OperationType.HASHTABLE_LOOKUP,
    OperationType.QUANTIZE,
}


@dataclass(frozen=True, slots=True)
class Call:
    """An operation with its arguments (None: omitted) and its outputs, whose dimensions may be unknown."""

    code: OperationType
    operands: tuple[Operand, ...]
    arrays: tuple[Array | None, ...]
    outputs: tuple[Operand, ...]

    def matched(self) -> Match:
        """Return the form and variant. Raises InvalidArgument where there is none."""
        return match(REGISTRY[self.code], self.operands, self.outputs)


def computed(call: Call) -> tuple[Array, ...]:
    """Return the outputs as the reference computes them. Raises what the operation refuses."""
    found = call.matched()
    pairs = list(zip(found.parameters, call.operands, call.arrays, strict=True))
    tensors = [None if a is None else tensor_of(o, a.shape, None if p.role is Role.DATA else a) for p, o, a in pairs]
    with np.errstate(all="ignore"):
        special = prepare(found, tensors, call.outputs)
        results = special.run(*(a for p, _, a in pairs if p.role is Role.DATA))
    arrays = results if isinstance(results, tuple) else (results,)
    return tuple(np.ascontiguousarray(array).reshape(np.shape(array)) for array in arrays)


def in_float32(call: Call) -> Call | None:
    """Return the same operation on the same numbers in float32; None where nothing means the same."""
    if call.code in _NOT_CONVERTED:
        return None
    pairs = [_real(call, number) for number in range(len(call.operands))]
    operands, arrays = tuple(operand for operand, _ in pairs), tuple(array for _, array in pairs)
    converted = Call(call.code, operands, arrays, tuple(_float_operand(operand) for operand in call.outputs))
    try:
        converted.matched()
    except InvalidArgument:
        return None
    return converted


def _real(call: Call, number: int) -> tuple[Operand, Array | None]:
    operand, array = call.operands[number], call.arrays[number]
    if call.code == OperationType.PAD_V2 and number == 2 and operand.type == OperandType.INT32:
        source = call.operands[0]  # the code that pads has the scale and zero point of what it pads
        operand = replace(operand, scale=source.scale, zero_point=source.zero_point)
    elif operand.type == OperandType.TENSOR_INT32 and array is not None and _is_channel_bias(call, number):
        scales = np.array(_channel_scales(call), np.float64) * call.operands[0].scale
        return Operand(OperandType.TENSOR_FLOAT32, operand.dimensions), (array * scales).astype(np.float32)
    return _float_operand(operand), None if array is None else reals(operand, array)


def _is_channel_bias(call: Call, number: int) -> bool:
    return call.matched().parameters[number].name == "bias" and bool(_channel_scales(call))


def _channel_scales(call: Call) -> tuple[float, ...]:
    quant = call.operands[1].channel_quant
    return quant.scales if quant is not None else ()


def _is_converted(operand: Operand) -> bool:
    has_scale = operand.scale != 0 or operand.channel_quant is not None
    return has_scale or operand.type in (OperandType.TENSOR_FLOAT16, OperandType.FLOAT16)


def _float_operand(operand: Operand) -> Operand:
    if not _is_converted(operand):
        return operand
    scalar = is_scalar(operand.type)
    return Operand(OperandType.FLOAT32 if scalar else OperandType.TENSOR_FLOAT32, operand.dimensions)


def reals(operand: Operand, array: Array) -> Array:
    """Return the numbers that stored values stand for, as float32; integers without a scale as they are."""
    if not _is_converted(operand):
        return array
    if operand.channel_quant is not None:
        shape = [1] * array.ndim
        shape[operand.channel_quant.channel_dim] = -1
        scales = np.array(operand.channel_quant.scales, np.float64).reshape(shape)
        return np.asarray(array * scales, np.float32)
    if operand.scale:
        return np.asarray((array.astype(np.float64) - operand.zero_point) * operand.scale, np.float32)
    return array.astype(np.float32)


def stored(operand: Operand, values: Array) -> Array:
    """Return float32 results as the output's type stores them: rounded once, codes half away from 0 and clamped."""
    dtype = NUMPY_TYPES[operand.type]
    if not operand.scale:
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    info = np.iinfo(dtype)
    quotients = np.nan_to_num(values.astype(np.float64) / operand.scale)
    codes = np.copysign(np.floor(np.abs(quotients) + 0.5), quotients) + operand.zero_point
    return np.asarray(np.clip(codes, info.min, info.max), dtype)


def expected(call: Call) -> tuple[Array, ...]:
    """Return what the outputs should be: by the float32 form where there is one, else by the operation itself."""
    converted = in_float32(call)
    if converted is None:
        return computed(call)
    return tuple(stored(o, array) for o, array in zip(call.outputs, computed(converted), strict=True))


def fitted(call: Call, output: Operand) -> Operand:
    """Return the output with the scale and zero point that just hold the results, as a quantizing tool would choose.

    The scale stays above the product of the first two arguments', which HAL 1.0 demands of products.
    """
    converted = in_float32(call)
    assert converted is not None, "every product has a float32 form"
    (result,) = computed(converted)
    low, high = min(float(result.min()), 0.0), max(float(result.max()), 0.0)
    scales = _channel_scales(call) or (call.operands[1].scale,)
    least = call.operands[0].scale * max(scales) * 1.001
    scale = float(np.float32(max((high - low) / 255, least)))
    info = np.iinfo(NUMPY_TYPES[output.type])
    zero = min(max(round(info.min - low / scale), int(info.min)), int(info.max))
    return replace(output, scale=scale, zero_point=zero)
