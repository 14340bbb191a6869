"""Deterministic programs: which operations may be in one, and why another may not.

A kernel computes the same bits on every machine (`target`), unless it calls the C library. NumPy, which computes what
has no kernel, does so for operations that copy or compare numbers, or compute what IEEE 754 defines: one correctly
rounded result. For all others its bits depend on the release, on the CPU and on the BLAS that it uses.
"""

from __future__ import annotations

from collections.abc import Sequence

from nnfmq.engines.compiled.kernels.float_ops import LIBRARY_NAMES
from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.extensions import TfliteOperation, extended_operations, operation_code
from nnfmq.hal.types import Operand, Operation, OperationType
from nnfmq.operations.declaration import NUMPY_TYPES

__all__ = ["require_deterministic"]

_OF_EXTENSION = (operation_code(TfliteOperation[name.upper()]) for name in LIBRARY_NAMES if name != "sin")
_OF_C_LIBRARY = frozenset((OperationType.POW, OperationType.SIN, *_OF_EXTENSION))

_NAMES = """
ABS ADD ARGMAX ARGMIN BATCH_TO_SPACE_ND CAST CHANNEL_SHUFFLE CONCATENATION DEPTH_TO_SPACE DEQUANTIZE DIV
EMBEDDING_LOOKUP EQUAL EXPAND_DIMS FILL FLOOR GATHER GREATER GREATER_EQUAL HASHTABLE_LOOKUP IF LESS LESS_EQUAL
MIRROR_PAD MUL NEG NOT_EQUAL PACK PAD PAD_V2 RANK RESHAPE RESIZE_NEAREST_NEIGHBOR REVERSE SELECT SLICE
SPACE_TO_BATCH_ND SPACE_TO_DEPTH SPLIT SQRT SQUEEZE STRIDED_SLICE SUB TILE TOPK_V2 TRANSPOSE WHILE
"""
_EXACT = frozenset(OperationType[name] for name in _NAMES.split())
_EXACT_OF_EXTENSION = frozenset(
    operation_code(operation) for (base, _), operation in extended_operations().items() if base in _EXACT
)


def require_deterministic(number: int, operation: Operation, operands: Sequence[Operand], has_kernel: bool) -> None:
    """Require that operation `number` computes the same bits on every machine.

    Raises:
        GeneralFailure: If it does not; the message says what computes it.
    """
    if operation.type in _OF_C_LIBRARY:
        by = "a function of the C library computes it"
    elif has_kernel or _is_exact(operation, operands):
        return
    else:
        by = "no kernel computes it, but NumPy"
    raise GeneralFailure(
        f"operation {number} ({operation.type.name}) has not the same bits on every machine: {by}; prepare the model "
        "without `deterministic`"
    )


def _is_exact(operation: Operation, operands: Sequence[Operand]) -> bool:
    if operation.type in _EXACT or operation.type in _EXACT_OF_EXTENSION:
        return True
    types = (NUMPY_TYPES.get(operands[index].type) for index in (*operation.inputs, *operation.outputs))
    return not any(dtype is not None and dtype.kind in "fc" for dtype in types)
