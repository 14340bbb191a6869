"""Which operators of a file have to be translated: those whose results reach an output of the model.

Converters write the shape of a RESHAPE as a computation on another tensor's shape, where the batch was left open. The
file also states the shape that comes out, so nobody needs that computation, and it may use what NNAPI lacks (SHAPE).
"""

from __future__ import annotations

from nnfmq.importers.tflite_file import File, Operator

__all__ = ["needed"]


def needed(file: File) -> list[Operator]:
    """Return the operators that the outputs need, in the file's order."""
    wanted, found = set(file.outputs), []
    for operator in reversed(list(file.operators())):
        if not wanted.isdisjoint(operator.outputs):
            found.append(operator)
            wanted.update(_read(file, operator))
    return found[::-1]


def _read(file: File, operator: Operator) -> tuple[int, ...]:
    """Return the tensors that the rule of `operator` reads."""
    if operator.name != "RESHAPE" or len(operator.inputs) != 2 or len(operator.outputs) != 1:
        return operator.inputs
    return operator.inputs[:1] if file.tensor(operator.outputs[0]).shape else operator.inputs
