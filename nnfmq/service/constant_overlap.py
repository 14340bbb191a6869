"""Rejection of requests whose outputs overlap memory that a model's constants came from (EXE-10).

The driver executes with private copies of the constants, so such an output would do no harm; the HAL forbids it.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from nnfmq.file_memory import FileMemory
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import LifeTime, Model, Request
from nnfmq.memory import Memory, file_identity
from nnfmq.service.private_memory import ConstantPool


class ConstantRange(Struct, frozen=True):
    """Bytes `begin` to `end` of a client's file, from which the driver copied one constant."""

    identity: tuple[int, int]
    begin: int
    end: int


def find_constant_ranges(model: Model) -> tuple[ConstantRange, ...]:
    """Return the ranges of client memory from which the model's constants were copied.

    Constants in pools whose file cannot be identified are left out (see `memory.file_identity`).
    """
    found = []
    for operand in (operand for graph in (model.main, *model.referenced) for operand in graph.operands):
        if operand.lifetime is LifeTime.CONSTANT_REFERENCE:
            location = operand.location
            pool = model.pools[location.pool_index]
            if isinstance(pool, ConstantPool) and pool.identity is not None:
                begin = pool.offset + location.offset
                found.append(ConstantRange(pool.identity, begin, begin + location.length))
    return tuple(found)


def require_no_constant_overlap(constants: Sequence[ConstantRange], request: Request) -> None:
    """Check the outputs of a valid request.

    Raises:
        InvalidArgument: If an output overlaps one of `constants`.
    """
    for index, argument in enumerate(request.outputs):
        pool = None if argument.has_no_value else request.pools[argument.location.pool_index]
        if not isinstance(pool, Memory | FileMemory):
            continue
        identity, begin = file_identity(pool.fileno()), pool.offset + argument.location.offset
        end = begin + argument.location.length
        if any(c.identity == identity and begin < c.end and c.begin < end for c in constants):
            raise InvalidArgument(f"output {index} overlaps a constant of the model (N-RQX-13)")
