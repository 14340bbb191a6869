"""REGISTRY: the declaration of each operation that this process can execute, by its code.

`operations` fills it with the families of the HAL, `operations.tflite_extension` with those of the built-in extension,
and `operations.extensions` with the declarations of vendors. The module of a family is imported when a declaration of
it is first read: most models use few families, and a driver that imports all of them starts later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import TypeAlias

from nnfmq.hal.types import OperationType
from nnfmq.operations.signature import Declaration

__all__ = ["REGISTRY", "Declarations"]

LoadFamily: TypeAlias = Callable[[], Iterable[tuple[OperationType, Declaration]]]


class Declarations(MutableMapping[OperationType, Declaration]):
    """Declarations by code; some are of families that are not loaded yet. Thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[OperationType, Declaration | LoadFamily] = {}

    def add_family(self, codes: Iterable[OperationType], load: LoadFamily) -> None:
        """Add the operations of a family; `load` returns each code with its declaration, when one is first read."""
        self._entries.update(dict.fromkeys(codes, load))

    def __getitem__(self, code: OperationType) -> Declaration:
        entry = self._entries[code]
        if isinstance(entry, Declaration):
            return entry
        found = dict(entry())  # another thread may do the same: both get equal declarations
        self._entries.update(found)
        return found[code]

    def __setitem__(self, code: OperationType, declaration: Declaration) -> None:
        self._entries[code] = declaration

    def __delitem__(self, code: OperationType) -> None:
        del self._entries[code]

    def __contains__(self, code: object) -> bool:
        return code in self._entries

    def __iter__(self) -> Iterator[OperationType]:
        return iter(tuple(self._entries))

    def __len__(self) -> int:
        return len(self._entries)


REGISTRY = Declarations()
