"""Copies of arrays into shared memory and out of it: `_copies` (Cython) or `_pycopies` (Python).

It is selected at import, as `nnfmq.base.cores` documents. Callers import the class from here.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from nnfmq.base.cores import CorePair

__all__ = ["CORES", "ArrayCopies"]

CORES: CorePair[ModuleType] = CorePair(compiled="nnfmq.client.model._copies", python="nnfmq.client.model._pycopies")

if TYPE_CHECKING:
    from nnfmq.client.model._pycopies import ArrayCopies
else:
    ArrayCopies = CORES.load(CORES.choose()[0]).ArrayCopies
