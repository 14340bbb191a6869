"""Conversion of TFLite operators to HAL operations: CONVERTERS, by the operator's name.

A converter reads an operator's options and adds one operation, rarely more. It rejects only what the HAL cannot express
or would interpret differently; `validation` decides whether the result is a valid model. Argument lists: the operation
documents of HAL 1.0 to 1.3 and of AIDL.
"""

from __future__ import annotations

from importlib import import_module

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers.tflite_file import TfliteOperator
from nnfmq.importers.tflite_operators.conversion import ConversionContext, OpConverter
from nnfmq.importers.tflite_operators.custom_plugins import plugin_converter
from nnfmq.importers.tflite_operators.pruning import live_operators

__all__ = ["CONVERTERS", "ConversionContext", "OpConverter", "convert_operator", "converter_of", "live_operators"]

_MODULES = (
    "control_flow_ops",
    "custom_ops",
    "data_movement_ops",
    "elementwise_ops",
    "extension_elementwise_ops",
    "extension_image_ops",
    "extension_indexing_ops",
    "image_ops",
    "matrix_product_ops",
    "recurrent_ops",
    "reduction_ops",
    "slicing_ops",
    "variable_ops",
    "weighted_ops",
)

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
    converter_of(operator).convert(context, operator)


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
