"""Which operators of a file have to be translated: those whose results reach an output of the model.

Converters write the shape of a RESHAPE, and sizes like it, as a computation on another tensor's shape where the batch
was left open. The file also states the shape that comes out, so nobody needs that computation, and it may use what
NNAPI lacks (SHAPE).
"""

from __future__ import annotations

from nnfmq.importers.tflite_file import File, Operator

__all__ = ["needed"]

_SIZES = {
    "BROADCAST_TO": 1,
    "FILL": 0,
    "RESHAPE": 1,
    "RESIZE_BILINEAR": 1,
    "RESIZE_NEAREST_NEIGHBOR": 1,
    "TRANSPOSE_CONV": 0,
}
"""Which input of an operator says no more than its output's shape does."""


def needed(file: File) -> list[Operator]:
    """Return the operators that the outputs need, in the file's order."""
    wanted, found = set(file.outputs), []
    for operator in reversed(list(file.operators())):
        if not wanted.isdisjoint(operator.outputs):
            found.append(operator)
            wanted.update(_read(file, operator))
    return found[::-1]


def _read(file: File, operator: Operator) -> list[int]:
    """Return the tensors that the rule of `operator` reads."""
    place = _SIZES.get(operator.name, -1)
    if not 0 <= place < len(operator.inputs) or len(operator.outputs) != 1:
        return list(operator.inputs)
    is_stated = bool(file.tensor(operator.outputs[0]).shape)
    return [index for position, index in enumerate(operator.inputs) if position != place or not is_stated]
