"""Elementwise operators that become operations of the extension `nnfmq.tflite`."""

from __future__ import annotations

from collections.abc import Callable

from nnfmq.hal.tflite_codes import TfliteOperation, operation_code
from nnfmq.importers.tflite_file import TfliteOperator
from nnfmq.importers.tflite_operators.conversion import ConversionContext, OpConverter

__all__ = ["CONVERTERS"]


def _of_inputs(operation: TfliteOperation) -> Callable[[ConversionContext, TfliteOperator], None]:
    """Return the converter of an operation whose arguments are the operator's inputs."""

    def convert(context: ConversionContext, operator: TfliteOperator) -> None:
        context.emit(operation_code(operation), operator, *map(context.value, operator.inputs))

    return convert


def _gelu(context: ConversionContext, operator: TfliteOperator) -> None:
    approximate = operator.options is not None and bool(operator.options.Approximate())
    arguments = [context.value(operator.inputs[0]), context.builder.boolean(approximate)]
    context.emit(operation_code(TfliteOperation.GELU), operator, *arguments)


_ONE = range(1, 2)

CONVERTERS: dict[str, OpConverter] = {
    **{name: OpConverter(_ONE, _of_inputs(TfliteOperation[name])) for name in ("COS", "ROUND", "SIGN")},
    "GELU": OpConverter(_ONE, _gelu, "GeluOptions"),
}
