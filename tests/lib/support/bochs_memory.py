"""The memory of a machine in Bochs: pages of this process, and page tables that map them at addresses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from types import TracebackType

import numpy as np

from nnfmq.operations.declaration import Array
from support.bochs_cpu import bochscpu
from support.emulated import PAGE, Region

__all__ = ["BochsMemory"]

_PRESENT, _WRITABLE, _NOT_EXECUTED = 1, 2, 1 << 63
_ENTRIES = PAGE // 8
_ADDRESS_BITS = (1 << 40) - PAGE
_FIRST_PAGE = 1 << 32  # above the registers of interrupt controllers


class BochsMemory:
    """Regions with their rights, as a context manager. Bochs has one physical memory: use one at a time.

    Each is a copy in pages of its own, so an access beyond the first and last page of a region is a page fault.
    """

    def __init__(self, regions: Sequence[Region], executed: Sequence[Region]) -> None:
        self._regions, self._executed = regions, executed

    def __enter__(self) -> BochsMemory:
        self._free, self._pages, self._copies = count(_FIRST_PAGE, PAGE), list[int](), list[tuple[Region, Array]]()
        self._tables: dict[int, Array] = {}
        self.root = self._new_table()
        for region in self._executed:
            self._map(region, 0)
        for region in self._regions:
            self._map(region, _NOT_EXECUTED)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for page in self._pages:
            bochscpu.memory.page_remove(page)

    def bytes_at(self, address: int, size: int, to_write: bool = False) -> Array | None:
        """Return the bytes at an address, or None if no region has all of them, or may not be written to."""
        for region, data in self._copies:
            begin = address - region.address
            if begin >= 0 and begin + size <= data.nbytes and (region.writable or not to_write):
                return data[begin : begin + size]
        return None

    def code_at(self, address: int, at_most: int) -> bytes:
        """Return the code at the address of an instruction; fewer bytes at its end."""
        offsets = ((region, address - region.address) for region in self._executed)
        region, begin = next((region, at) for region, at in offsets if 0 <= at < region.data.nbytes)
        return region.data[begin : begin + at_most].tobytes()

    def update_regions(self) -> None:
        """Copy what was written to the regions."""
        for region, data in self._copies:
            if region.writable:
                region.data[:] = data

    def _map(self, region: Region, rights: int) -> None:
        skip, size = region.address % PAGE, region.data.nbytes
        pages = -(-(skip + max(size, 1)) // PAGE)
        physical, content = self._new_pages(pages)
        content[skip : skip + size] = region.data
        self._copies.append((region, content[skip : skip + size]))
        rights |= _PRESENT | (_WRITABLE if region.writable else 0)
        entries = np.arange(physical, physical + pages * PAGE, PAGE, dtype=np.uint64) | np.uint64(rights)
        number = region.address // PAGE
        while entries.size:
            table, begin = self._last_table(number), number % _ENTRIES
            now, entries = np.split(entries, [_ENTRIES - begin])
            table[begin : begin + now.size] = now
            number += now.size

    def _last_table(self, number: int) -> Array:
        """Return the page table that has the entry of a page."""
        table = self._tables[self.root]
        for shift in (27, 18, 9):
            index = number >> shift & (_ENTRIES - 1)
            if not table[index]:
                table[index] = self._new_table() | _PRESENT | _WRITABLE
            table = self._tables[int(table[index]) & _ADDRESS_BITS]
        return table

    def _new_table(self) -> int:
        physical, content = self._new_pages(1)
        self._tables[physical] = content.view(np.uint64)
        return physical

    def _new_pages(self, pages: int) -> tuple[int, Array]:
        content = np.zeros((pages + 1) * PAGE, np.uint8)
        content = content[-content.ctypes.data % PAGE :][: pages * PAGE]
        numbers = [next(self._free) for _ in range(pages)]
        for physical, host in zip(numbers, count(content.ctypes.data, PAGE), strict=False):
            bochscpu.memory.page_insert(physical, host)
        self._pages += numbers
        return numbers[0], content
