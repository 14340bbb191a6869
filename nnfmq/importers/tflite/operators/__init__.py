"""Conversion of TFLite operators to HAL operations: CONVERTERS, by the operator's name.

A converter reads an operator's options and adds one operation, rarely more. It rejects only what the HAL cannot express
or would interpret differently; `validation` decides whether the result is a valid model. Argument lists: the operation
documents of HAL 1.0 to 1.3 and of AIDL.
"""

from __future__ import annotations

from importlib import import_module

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers.tflite.file import TfliteOperator
from nnfmq.importers.tflite.operators.conversion import SIXTEEN_BITS, ConversionContext, OpConverter, live_operators
from nnfmq.importers.tflite.operators.custom import plugin_converter

__all__ = ["CONVERTERS", "ConversionContext", "OpConverter", "convert_operator", "converter_of", "live_operators"]

_MODULES = (
    "control_flow",
    "custom",
    "elementwise",
    "images",
    "indexing",
    "movement",
    "products",
    "recurrent",
    "reduction",
)

_OF_REAL_VALUES = frozenset((
    "ADD", "BATCH_MATMUL", "CONV_2D", "DEPTHWISE_CONV_2D", "DEQUANTIZE", "DIV", "ELU", "EQUAL", "EXP",
    "FULLY_CONNECTED", "GELU", "HARD_SWISH", "L2_NORMALIZATION", "LEAKY_RELU", "LOG", "LOGISTIC", "LOG_SOFTMAX",
    "MEAN", "MUL", "NOT_EQUAL", "PRELU", "QUANTIZE", "REDUCE_PROD", "RELU", "RELU6", "RELU_0_TO_1", "RELU_N1_TO_1",
    "RSQRT", "SOFTMAX", "SQRT", "SQUARED_DIFFERENCE", "SUB", "SUM", "TANH", "TRANSPOSE_CONV",
))  # fmt: skip
"""Operators whose results depend on the scales of tensors of UINT8 and INT16; others move elements."""
_ORDERS = frozenset(("GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL"))  # compare the elements of INT16


CONVERTERS: dict[str, OpConverter] = {
    name: converter
    for module in _MODULES
    for name, converter in import_module(f"{__name__}.{module}").CONVERTERS.items()
}


def convert_operator(context: ConversionContext, operator: TfliteOperator) -> None:
    """Add the operations that compute `operator`.

    Raises:
        InvalidArgument: If the operator is not supported; the message is the reason.
    """
    converter = converter_of(operator)
    _require_scales(context, operator)
    converter.convert(context, operator)


def _require_scales(context: ConversionContext, operator: TfliteOperator) -> None:
    """Require scales of UINT8 and INT16 where TFLite needs the real values of their elements."""
    if operator.name not in _OF_REAL_VALUES and operator.name not in _ORDERS:
        return
    for tensor in (context.file.tensor(index) for index in (*operator.inputs, *operator.outputs) if index >= 0):
        if tensor.is_plain and (operator.name in _OF_REAL_VALUES or tensor.type != SIXTEEN_BITS):
            raise InvalidArgument(f"{tensor} has no quantization scale, which is required here")


def converter_of(operator: TfliteOperator) -> OpConverter:
    """Return the converter of `operator`, whose numbers of tensors and options it accepts. Raises InvalidArgument."""
    converter = CONVERTERS.get(operator.name)
    if converter is None and operator.custom_code:
        converter = plugin_converter(operator.custom_code)
    if converter is None:
        raise InvalidArgument("is not supported")
    _check_counts_and_options(converter, operator)
    return converter


def _check_counts_and_options(converter: OpConverter, operator: TfliteOperator) -> None:
    _check_count("inputs", converter.input_counts, len(operator.inputs))
    _check_count("outputs", converter.output_counts, len(operator.outputs))
    if operator.options is None:
        if converter.needs_options:
            raise InvalidArgument(f"has no {converter.options}")
    elif operator.options_name != converter.options:
        raise InvalidArgument(f"has {operator.options_name} instead of {converter.options or 'no options'}")


def _check_count(kind: str, counts: range, count: int) -> None:
    if count not in counts:
        allowed = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
        raise InvalidArgument(f"{count} {kind}: {allowed} are allowed")
