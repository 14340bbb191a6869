"""Guard pages: a debug mode in which machine code that leaves the memory of an operand ends its process.

Each operand of an arena, each input, constant and scratch buffer has pages of its own, between pages that nothing
may access. With the side `end` its last byte is the last one of its pages, so that the first byte after it is a
segmentation fault; with `begin` its first byte is the first one, so that the byte before it is. No memory is used again
for another operand, inputs are copied in each run, and outputs are never written in place. The results are the same.

A plan says where the guards are, so a program with guards can be saved like any other.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from nnfmq.operations.declaration import Array

__all__ = ["GUARD_BYTES", "GuardedContext", "Guards", "guarded_copy", "guarded_layout"]

_PAGE = mmap.PAGESIZE
GUARD_BYTES = 16 * _PAGE  # more than a wrong row or vector of most kernels is away
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_PROT_NONE = 0


class Guards(Struct, frozen=True, array_like=True):
    """The guards of a partition: the side, the offset of each in the arena, and the bytes of a scratch buffer."""

    side: str
    arena: tuple[int, ...]
    scratch_bytes: int


class GuardedLayout(Struct, frozen=True):
    """A layout of operands one after the other: their offsets, those of the guards, and the size of all."""

    offsets: tuple[int, ...]
    guards: tuple[int, ...]
    size: int


def guarded_layout(sizes: Sequence[int], side: str, alignment: int = 1) -> GuardedLayout:
    """Return a layout of operands of these sizes (bytes), each between guards.

    With the side `end` an offset is the last one that is a multiple of `alignment`, a power of two.
    """
    offsets, guards, at = [], [], 0
    for size in sizes:
        guards.append(at)
        at += GUARD_BYTES
        pages = max(-(-size // _PAGE), 1) * _PAGE
        offsets.append(at + (pages - size) // alignment * alignment if side == "end" else at)
        at += pages
    return GuardedLayout(tuple(offsets), (*guards, at), at + GUARD_BYTES)


def guarded(size: int, guards: Sequence[int]) -> Array:
    """Return zeroed memory of `size` bytes, at the beginning of a page, with GUARD_BYTES at each of `guards` protected.

    Raises:
        MemoryError: If there is not enough memory, or the kernel allows no more mappings.
    """
    try:
        memory = np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    except OSError as error:
        raise MemoryError(f"{size} bytes of guarded memory: {error}") from error
    for offset in guards:
        if _libc.mprotect(memory.ctypes.data + offset, GUARD_BYTES, _PROT_NONE):
            number = ctypes.get_errno()
            raise MemoryError(f"memory cannot be guarded: {os.strerror(number)}")
    return memory


def guarded_copy(data: Array, guards: Sequence[int]) -> Array:
    """Return a copy of bytes with gaps for these guards."""
    memory = guarded(data.nbytes, guards)
    begins = [offset + GUARD_BYTES for offset in guards[:-1]]
    for begin, end in zip(begins, guards[1:], strict=True):
        memory[begin:end] = data[begin:end]
    return memory


class GuardedContext:
    """The memory of one execution of a partition: its arena, its scratch buffers, and copies of its inputs.

    `scratch` is the address of the first of the buffers, which are `scratch_stride` bytes apart.
    """

    def __init__(self, guards: Guards, arena_bytes: int, scratch_slots: int, alignment: int) -> None:
        self._side = guards.side
        self.arena = guarded(arena_bytes, guards.arena)
        layout = guarded_layout([guards.scratch_bytes] * scratch_slots, guards.side, alignment)
        self._scratch = guarded(layout.size, layout.guards)
        self.scratch = self._scratch.ctypes.data + layout.offsets[0]
        self.scratch_stride = layout.guards[1] - layout.guards[0]
        self._inputs: dict[int, Array] = {}

    def input_array(self, position: int, array: Array) -> Array:
        """Return a copy of an input, contiguous, in the memory that is kept for its position."""
        memory = self._inputs.get(position)
        if memory is None or memory.nbytes != array.nbytes:
            layout = guarded_layout([array.nbytes], self._side)
            mapped = guarded(layout.size, layout.guards)
            memory = self._inputs[position] = mapped[layout.offsets[0] : layout.offsets[0] + array.nbytes]
        copy = memory.view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy
