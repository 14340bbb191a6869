"""The oracle: expected outputs of a single operation, computed in float32 where possible.

An operation on float16 or quantized tensors is compared with the result of the reference for the same real values in
float32, rounded to the output's type once. If no float32 form is equivalent (conversions between types, and
HASHTABLE_LOOKUP, whose misses are zero bytes), it is compared with the reference's own result.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

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


class OperationCall(Struct, frozen=True):
    """An operation with its arguments (None: omitted) and outputs, whose dimensions may be unknown."""

    code: OperationType
    operands: tuple[Operand, ...]
    arrays: tuple[Array | None, ...]
    outputs: tuple[Operand, ...]

    def matched(self) -> Match:
        """Return the matching overload and variant. Raises InvalidArgument if there is none."""
        return match(REGISTRY[self.code], self.operands, self.outputs)


def compute(call: OperationCall) -> tuple[Array, ...]:
    """Return the outputs as the reference computes them. Raises the operation's errors."""
    matched = call.matched()
    pairs = list(zip(matched.parameters, call.operands, call.arrays, strict=True))
    tensors = [None if a is None else tensor_of(o, a.shape, None if p.role is Role.DATA else a) for p, o, a in pairs]
    with np.errstate(all="ignore"):
        prepared = prepare(matched, tensors, call.outputs)
        results = prepared.run(*(a for p, _, a in pairs if p.role is Role.DATA))
    arrays = results if isinstance(results, tuple) else (results,)
    return tuple(np.ascontiguousarray(array).reshape(np.shape(array)) for array in arrays)


def in_float32(call: OperationCall) -> OperationCall | None:
    """Return the same operation on the same real values in float32, or None if there is no equivalent."""
    if call.code in _NOT_CONVERTED:
        return None
    pairs = [_real(call, number) for number in range(len(call.operands))]
    operands, arrays = tuple(operand for operand, _ in pairs), tuple(array for _, array in pairs)
    converted = OperationCall(call.code, operands, arrays, tuple(_float_operand(operand) for operand in call.outputs))
    try:
        converted.matched()
    except InvalidArgument:
        return None
    return converted


def _real(call: OperationCall, number: int) -> tuple[Operand, Array | None]:
    operand, array = call.operands[number], call.arrays[number]
    if call.code == OperationType.PAD_V2 and number == 2 and operand.type == OperandType.INT32:
        source = call.operands[0]  # the padding value has the scale and zero point of the input
        operand = replace(operand, scale=source.scale, zero_point=source.zero_point)
    elif operand.type == OperandType.TENSOR_INT32 and array is not None and _is_channel_bias(call, number):
        scales = np.array(_channel_scales(call), np.float64) * call.operands[0].scale
        return Operand(OperandType.TENSOR_FLOAT32, operand.dimensions), (array * scales).astype(np.float32)
    return _float_operand(operand), None if array is None else reals(operand, array)


def _is_channel_bias(call: OperationCall, number: int) -> bool:
    return call.matched().parameters[number].name == "bias" and bool(_channel_scales(call))


def _channel_scales(call: OperationCall) -> tuple[float, ...]:
    quant = call.operands[1].channel_quant
    return quant.scales if quant is not None else ()


def _is_converted(operand: Operand) -> bool:
    has_scale = operand.scale != 0 or operand.channel_quant is not None
    return has_scale or operand.type in (OperandType.TENSOR_FLOAT16, OperandType.FLOAT16)


def _float_operand(operand: Operand) -> Operand:
    if not _is_converted(operand):
        return operand
    return Operand(OperandType.FLOAT32 if is_scalar(operand.type) else OperandType.TENSOR_FLOAT32, operand.dimensions)


def reals(operand: Operand, array: Array) -> Array:
    """Return the real values of a tensor as float32; integers without a scale unchanged."""
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


def convert_results(operand: Operand, values: Array) -> Array:
    """Convert float32 results to the output's type: rounded once, quantized values half away from 0 and clamped."""
    dtype = NUMPY_TYPES[operand.type]
    if not operand.scale:
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    info = np.iinfo(dtype)
    quotients = np.nan_to_num(values.astype(np.float64) / operand.scale)
    quantized = np.copysign(np.floor(np.abs(quotients) + 0.5), quotients) + operand.zero_point
    return np.asarray(np.clip(quantized, info.min, info.max), dtype)


def expected_outputs(call: OperationCall) -> tuple[Array, ...]:
    """Return the expected outputs.

    If the operation exists in float32, it is computed there from the same real values and rounded once to the outputs'
    types; otherwise it is computed in its own types.
    """
    converted = in_float32(call)
    if converted is None:
        return compute(call)
    return tuple(convert_results(o, array) for o, array in zip(call.outputs, compute(converted), strict=True))


def fit_output_scale(call: OperationCall, output: Operand) -> Operand:
    """Return the output with the scale and zero point of the results' range, as a quantization tool would choose them.

    The scale is above the product of the first two arguments' scales, as HAL 1.0 requires of products.
    """
    converted = in_float32(call)
    assert converted is not None, "every product has a float32 form"
    (result,) = compute(converted)
    low, high = min(float(result.min()), 0.0), max(float(result.max()), 0.0)
    scales = _channel_scales(call) or (call.operands[1].scale,)
    min_scale = call.operands[0].scale * max(scales) * 1.001
    scale = float(np.float32(max((high - low) / 255, min_scale)))
    info = np.iinfo(NUMPY_TYPES[output.type])
    zero_point = min(max(round(info.min - low / scale), int(info.min)), int(info.max))
    return replace(output, scale=scale, zero_point=zero_point)
