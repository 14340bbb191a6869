"""Custom operators of popular models: object detection of TensorFlow, and MediaPipe's.

Options are FlexBuffers, or a struct of the kernel's parameters: little-endian numbers of 4 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import TfliteOperation, operation_code
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.types import Operand, OperandType, PaddingScheme
from nnfmq.importers.tflite.file import TfliteOperator
from nnfmq.importers.tflite.operators.conversion import ConversionContext, OpConverter
from nnfmq.importers.tflite.operators.options import dequantized

__all__ = ["CONVERTERS", "GROUP", "FlexOptions", "plugin_converter"]

_FLOAT = OperandType.TENSOR_FLOAT32
_SCHEMES = {1: PaddingScheme.SAME, 2: PaddingScheme.VALID}


class FlexOptions:
    """The options of a custom operator: a FlexBuffer with a map. Nothing of it is trusted."""

    def __init__(self, data: bytes) -> None:
        self._size = len(data)
        self._map = self._guarded(lambda: self._root(data))

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number. Raises InvalidArgument if it is missing and there is no default, or is no number."""
        found = self._guarded(lambda: self._find(key))
        if found is None:
            if default is None:
                raise InvalidArgument(f"its options have no {key!r}")
            return float(default)
        return float(self._guarded(lambda: found.AsFloat if found.IsNumeric or found.IsBool else struct.error()))

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer; as `number`."""
        value = self.number(key, default)
        if not value.is_integer() or abs(value) >= 1 << 31:
            raise InvalidArgument(f"its option {key!r} is {value}: an integer of 32 bits is required")
        return int(value)

    def integers(self, key: str) -> list[int]:
        """Return a vector of integers."""

        def read() -> list[int]:
            vector = self._find(key)
            items = vector.AsTypedVector if vector.IsTypedVector else vector.AsVector
            if len(items) > self._size:
                raise ValueError
            return [int(items[index].AsInt) for index in range(len(items))]

        return list(self._guarded(read))

    def _root(self, data: bytes) -> Any:
        from flatbuffers import flexbuffers

        return flexbuffers.GetRoot(data).AsMap if data else None

    def _find(self, key: str) -> Any:
        if self._map is None:
            return None
        try:
            return self._map[key]
        except KeyError:
            return None

    def _guarded(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except Exception as error:  # noqa: BLE001 - the package raises errors of any type for a corrupt buffer
            raise InvalidArgument(f"its options are corrupt ({type(error).__name__})") from None


def _numbers(operator: TfliteOperator, count: int) -> tuple[int, ...]:
    """Return the first numbers of a struct."""
    if len(operator.custom) < 4 * count:
        raise InvalidArgument(f"its options have {len(operator.custom)} bytes: at least {4 * count} are required")
    return struct.unpack_from(f"<{count}i", operator.custom)


def _detection_postprocess(context: ConversionContext, operator: TfliteOperator) -> None:
    """Convert to DETECTION_POSTPROCESSING, whose class 0 is the background."""
    options, builder = FlexOptions(operator.custom), context.builder
    scores_shape = context.file.tensor(operator.inputs[1]).shape
    deltas, scores, anchors = (dequantized(context, index) for index in operator.inputs)
    background = scores_shape[-1] - options.integer("num_classes") if scores_shape else -1
    if background not in (0, 1):
        raise InvalidArgument(f"{options.integer('num_classes')} classes for scores of shape {list(scores_shape)}")
    if background == 0:
        scores = _with_background(context, scores, scores_shape)
    per_detection, regular = options.integer("max_classes_per_detection"), bool(options.number("use_regular_nms", 0))
    arguments = [scores, deltas, anchors]
    arguments += [builder.float_scalar(_FLOAT, options.number(f"{axis}_scale")) for axis in "yxhw"]
    arguments += [builder.boolean(regular), builder.int32(options.integer("max_detections"))]
    arguments += [builder.int32(per_detection), builder.int32(options.integer("detections_per_class", 100))]
    arguments += [builder.float_scalar(_FLOAT, options.number(f"nms_{kind}_threshold")) for kind in ("score", "iou")]
    arguments.append(builder.boolean(False))
    boxes, classes, rated, count = (context.result(index) for index in operator.outputs)
    shapes = [builder[index].dimensions for index in (classes, count)]
    found = [builder.operand(Operand(OperandType.TENSOR_INT32, shape)) for shape in shapes]
    builder.operation(OperationType.DETECTION_POSTPROCESSING, arguments, rated, boxes, *found)
    for integers, floats in zip(found, (classes, count), strict=True):
        builder.operation(OperationType.CAST, [integers], floats)


def _with_background(context: ConversionContext, scores: int, shape: tuple[int, ...]) -> int:
    """Return scores with a class of zeros before the others."""
    padded = context.builder.operand(Operand(_FLOAT, (*shape[:-1], shape[-1] + 1)))
    paddings = [0, 0] * (len(shape) - 1) + [1, 0]
    vector = context.builder.int32_matrix(paddings, 2)
    context.builder.operation(OperationType.PAD, [scores, vector], padded)
    return padded


def _transpose_conv_bias(context: ConversionContext, operator: TfliteOperator) -> None:
    scheme, *strides = _numbers(operator, 3)
    x, weights = (context.file.tensor(index) for index in operator.inputs[:2])
    if scheme not in _SCHEMES or min(strides) < 1 or len(x.shape) != 4 or len(weights.shape) != 4:
        raise InvalidArgument(f"padding {scheme}, strides {strides}, input {x.shape} and filter {weights.shape}")
    arguments = [context.value(index) for index in operator.inputs]
    for axis, stride in ((2, strides[0]), (1, strides[1])):  # left and right before top and bottom
        total = max(weights.shape[axis] - (x.shape[axis] - 1) % stride - 1, 0)
        total = total if _SCHEMES[scheme] == PaddingScheme.SAME else 0
        arguments += [context.builder.int32(total // 2), context.builder.int32(total - total // 2)]
    arguments += [*map(context.builder.int32, strides), context.builder.int32(0), context.builder.boolean(False)]
    context.emit(OperationType.TRANSPOSE_CONV_2D, operator, *arguments)


def _pool(operation: TfliteOperation) -> Callable[[ConversionContext, TfliteOperator], None]:
    """Return the converter of an operation with a window."""

    def convert(context: ConversionContext, operator: TfliteOperator) -> None:
        scheme, *window, activation = _numbers(operator, 6)
        if activation or scheme not in _SCHEMES:
            raise InvalidArgument(f"fused activation {activation} or padding {scheme} is not supported")
        arguments = [context.value(index) for index in operator.inputs]
        arguments += [context.builder.int32(number) for number in (_SCHEMES[scheme], *window)]
        outputs = [context.result(index) for index in operator.outputs]
        context.builder.operation(operation_code(operation), arguments, *outputs)

    return convert


def _transform_landmarks(context: ConversionContext, operator: TfliteOperator) -> None:
    options = FlexOptions(operator.custom)
    if options.number("scale", 1) != 1 or len(context.file.tensor(operator.inputs[0]).shape) != 3:
        raise InvalidArgument("version 1 of the operator is not supported")
    dimensions = context.builder.int32(options.integer("dimensions", 2))
    arguments = [*map(context.value, operator.inputs), dimensions]
    context.emit(operation_code(TfliteOperation.TRANSFORM_LANDMARKS), operator, *arguments)


def _transform_tensor(context: ConversionContext, operator: TfliteOperator) -> None:
    shape = context.file.tensor(operator.outputs[0]).shape
    if len(shape) != 4:
        raise InvalidArgument(f"its output has shape {list(shape)}: an image is required")
    arguments = [*map(context.value, operator.inputs), context.builder.int32_vector(shape[1:3])]
    context.emit(operation_code(TfliteOperation.TRANSFORM_TENSOR), operator, *arguments)


def _landmarks_to_matrix(context: ConversionContext, operator: TfliteOperator) -> None:
    options, builder = FlexOptions(operator.custom), context.builder
    arguments = [context.value(operator.inputs[0]), builder.int32_vector(options.integers("subset_idxs"))]
    arguments += [builder.int32(options.integer(f"{side}_rotation_idx")) for side in ("left", "right")]
    arguments.append(builder.float_scalar(_FLOAT, options.number("target_rotation_radians", 0)))
    arguments += [builder.int32(options.integer(f"output_{extent}")) for extent in ("height", "width")]
    arguments += [builder.float_scalar(_FLOAT, options.number(f"scale_{axis}")) for axis in "xy"]
    context.emit(operation_code(TfliteOperation.LANDMARKS_TO_TRANSFORM_MATRIX), operator, *arguments)


_ONE, _TWO, _THREE = range(1, 2), range(2, 3), range(3, 4)
_POOLED = _pool(TfliteOperation.MAX_POOL_WITH_ARGMAX)

_CONVERTERS: dict[str, OpConverter] = {
    "Convolution2DTransposeBias": OpConverter(_THREE, _transpose_conv_bias),
    "Landmarks2TransformMatrix": OpConverter(_ONE, _landmarks_to_matrix),
    "MaxPoolingWithArgmax2D": OpConverter(_ONE, _POOLED, output_counts=_TWO),
    "MaxUnpooling2D": OpConverter(_TWO, _pool(TfliteOperation.MAX_UNPOOL)),
    "TFLite_Detection_PostProcess": OpConverter(_THREE, _detection_postprocess, output_counts=range(4, 5)),
    "TransformLandmarks": OpConverter(_TWO, _transform_landmarks),
    "TransformTensorBilinear": OpConverter(_TWO, _transform_tensor),
}
CONVERTERS = {f"CUSTOM {name!r}": converter for name, converter in _CONVERTERS.items()}
"""By the operator's name as `TfliteOperator` has it."""


# ----------------------------------------------------------------------------------------------------------------------
# Converters of custom operators from plug-ins: entry points of the group `nnfmq.tflite_operators`.
#
# An entry point has the operator's custom code and refers to an `OpConverter`. Plug-ins are imported when a file has an
# operator that nnfmq does not know, in the application.


GROUP = "nnfmq.tflite_operators"


def plugin_converter(custom_code: str) -> OpConverter | None:
    """Return the converter of a custom operator; None if no plug-in has it.

    Raises:
        InvalidArgument: If two plug-ins have it, or if it cannot be imported or is no OpConverter.
    """
    from importlib.metadata import entry_points  # few applications have such a model

    found = [entry for entry in entry_points(group=GROUP) if entry.name == custom_code]
    if not found:
        return None
    if len({entry.value for entry in found}) > 1:
        raise InvalidArgument(f"has converters in several plug-ins: {', '.join(entry.value for entry in found)}")
    try:
        converter = found[0].load()
    except Exception as error:
        raise InvalidArgument(f"its plug-in {found[0].value} cannot be imported: {error}") from error
    if not isinstance(converter, OpConverter):
        raise InvalidArgument(f"its plug-in {found[0].value} is a {type(converter).__name__}, not an OpConverter")
    return converter
