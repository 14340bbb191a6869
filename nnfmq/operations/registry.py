"""REGISTRY: the declaration of each operation that this process can execute, by its code.

`operations` fills it with those of the HAL, and `operations.extensions` with those of extensions.
"""

from __future__ import annotations

from nnfmq.hal.types import OperationType
from nnfmq.operations.signature import Declaration

__all__ = ["REGISTRY"]

REGISTRY: dict[OperationType, Declaration] = {}
