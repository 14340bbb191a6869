"""Dead-operator elimination: only operators whose results reach a model output are converted.

If the batch is unknown, TFLite's converter writes the shape of a RESHAPE, and similar sizes, as a computation on
another tensor's shape. The file also declares the resulting shape, so that computation is dead; it may use operators
that the HAL does not have (SHAPE).
"""

from __future__ import annotations

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers.tflite_file import TfliteFile, TfliteOperator

__all__ = ["SIZES", "has_unknown_sizes", "live_operators"]

SIZES = {
    "BROADCAST_TO": 1,
    "FILL": 0,
    "RESHAPE": 1,
    "RESIZE_BILINEAR": 1,
    "RESIZE_NEAREST_NEIGHBOR": 1,
    "TRANSPOSE_CONV": 0,
}
"""The position of the input that only determines the output's shape."""
_WITH_EFFECT = frozenset(("ASSIGN_VARIABLE", "CALL_ONCE"))


def has_unknown_sizes(file: TfliteFile) -> bool:
    """Return whether results have dimensions that the file does not know, besides the batch, although inputs have not.

    Such a dimension follows from the inputs' shapes, and the file states 1 for it.
    """
    if any(-1 in file.signature(index)[1:] for index in file.inputs):
        return False
    results = (index for operator in file.operators() for index in operator.outputs)
    return any(-1 in file.signature(index)[1:] for index in results)


def live_operators(file: TfliteFile, *, with_sizes: bool = False) -> list[TfliteOperator]:
    """Return the operators on which the outputs and the variables depend, in the file's order.

    Without `with_sizes` they do not depend on the inputs that only determine a shape, if the file states that shape.
    """
    wanted, found = set(file.outputs), []
    for operator in reversed(list(file.operators())):
        if operator.name in _WITH_EFFECT or not wanted.isdisjoint(operator.outputs):
            found.append(operator)
            wanted.update(operator.inputs if with_sizes else _read(file, operator))
    return found[::-1]


def _read(file: TfliteFile, operator: TfliteOperator) -> list[int]:
    """Return the tensors that the rule of `operator` reads."""
    size_position = SIZES.get(operator.name, -1)
    if not 0 <= size_position < len(operator.inputs) or len(operator.outputs) != 1:
        return list(operator.inputs)
    is_stated = _has_stated_shape(file, operator.outputs[0])
    return [index for position, index in enumerate(operator.inputs) if position != size_position or not is_stated]


def _has_stated_shape(file: TfliteFile, index: int) -> bool:
    try:
        return bool(file.tensor(index).shape)
    except InvalidArgument:  # the conversion of the operator reports it
        return True
