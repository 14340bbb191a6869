"""Linker: lays out object files in one block of memory and relocates them to its address.

    code of all files | stubs | up to a page boundary | constants of all files | addresses of library functions

All references inside the block are relative to the instruction, so the distance decides whether they fit, never the
address. Library functions may be anywhere in the address space. A call of one goes to its stub, which jumps to the
address that the last part of the block has for it: what a dynamic linker calls PLT and GOT.

Only the relocations that LLVM uses for generated code (position-independent, small code model) are known; others are
rejected. In their formulas S is the address of the symbol, A the addend, P the address of the field.

    x86-64     System V ABI, AMD64 Architecture Processor Supplement, 4.4.1: relocation types
    AArch64    ELF for the Arm 64-bit Architecture, 5.7: relocation; veneers may change x16 and x17 (AAPCS64, 6.1.1)

It writes with `struct.pack_into` and to slices of the block whose size was checked: a malformed file can cause an
error, but no write outside of the block.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from msgspec import Struct

from nnfmq.engines.compiled.object_file import Relocation, Symbol, parse_object
from nnfmq.hal.errors import GeneralFailure

__all__ = ["RELOCATIONS", "Linker"]

_PAGE = 65536  # a multiple of every Linux page size: on AArch64 pages have 4, 16 or 64 KiB
_ADDRESS_BYTES = 8
_STUB_BYTES = 16
_MAX_BLOCK_BYTES = 1 << 30


class Linker:
    """Object files with places in a block of memory, whose address is not known yet.

    Attributes:
        machine: What the files are for, as `uname -m` names it.
        size_bytes: The size of the block.
        code_bytes: The size of its executable first part, a multiple of the page size.
        library_functions: The functions outside of the files that they refer to.
    """

    def __init__(self, files: Iterable[bytes]) -> None:
        """Parse and place the files.

        Raises:
            GeneralFailure: If one is malformed, two define the same function, or they are for different machines.
        """
        self._files = [parse_object(data) for data in files]
        machines = {file.machine for file in self._files}
        if len(machines) != 1:
            raise _unlinkable(f"it is for {' and '.join(sorted(machines)) or 'no machine'}")
        (self.machine,) = machines
        self._definitions = self._defined()
        self.library_functions = self._undefined()
        self._place()

    def _defined(self) -> dict[str, tuple[int, Symbol]]:
        """Return the global symbols, with the number of the file that defines each."""
        found: dict[str, tuple[int, Symbol]] = {}
        for number, file in enumerate(self._files):
            for symbol in file.symbols:
                if symbol.is_global and symbol.section is not None:
                    if symbol.name in found:
                        raise _unlinkable(f"{symbol.name} is defined twice")
                    found[symbol.name] = number, symbol
        return found

    def _undefined(self) -> list[str]:
        referred = (relocation.symbol for file in self._files for relocation in file.relocations)
        names = {symbol.name for symbol in referred if symbol.section is None}
        return sorted(names - self._definitions.keys())

    def _place(self) -> None:
        self._starts: dict[tuple[int, int], int] = {}  # file and section → offset in the block
        self._stubs = _align(self._place_sections(0, is_code=True), _STUB_BYTES)
        self.code_bytes = _align(self._stubs + _STUB_BYTES * len(self.library_functions), _PAGE)
        self._addresses = _align(self._place_sections(self.code_bytes, is_code=False), _ADDRESS_BYTES)
        self.size_bytes = self._addresses + _ADDRESS_BYTES * len(self.library_functions)
        if self.size_bytes > _MAX_BLOCK_BYTES:
            raise _unlinkable(f"it has {self.size_bytes} bytes")

    def _place_sections(self, end: int, is_code: bool) -> int:
        for file_number, file in enumerate(self._files):
            for number, section in file.sections.items():
                if section.is_code is is_code:
                    start = self._starts[file_number, number] = _align(end, section.alignment)
                    end = start + section.size
        return end

    def functions(self) -> dict[str, int]:
        """Return the offset of each global function in the block."""
        return {
            name: self._starts[number, symbol.section] + symbol.value
            for name, (number, symbol) in self._definitions.items()
            if symbol.is_function and symbol.section is not None
        }

    def write(self, block: memoryview, base: int, addresses: Mapping[str, int]) -> None:
        """Write the block for the address `base`, a multiple of the page size. `block` is zero and has `size_bytes`.

        `addresses` has an address for each of `library_functions`.

        Raises:
            GeneralFailure: If a relocation's type is unknown, its target is not in the block, or the distance to it
                does not fit.
        """
        for number, file in enumerate(self._files):
            for index, section in file.sections.items():
                start = self._starts[number, index]
                block[start : start + len(section.data)] = section.data
        for number, name in enumerate(self.library_functions):
            slot = self._addresses + _ADDRESS_BYTES * number
            struct.pack_into("<Q", block, slot, addresses[name])
            _STUBS[self.machine](block, self._stubs + _STUB_BYTES * number, slot)
        for number, file in enumerate(self._files):
            for relocation in file.relocations:
                self._relocate(block, base, number, relocation)

    def _relocate(self, block: memoryview, base: int, file: int, relocation: Relocation) -> None:
        kind = RELOCATIONS[self.machine].get(relocation.kind)
        if kind is None:
            raise _unlinkable(f"relocation type {relocation.kind} of {self.machine} is unknown")
        section = self._files[file].sections[relocation.section]
        if relocation.offset + _FIELD_BYTES > section.size:
            raise _unlinkable(f"a relocation is at byte {relocation.offset} of a section with {section.size}")
        place = self._starts[file, relocation.section] + relocation.offset
        target = self._target(file, relocation.symbol, kind.is_call) + relocation.addend
        (field,) = struct.unpack_from("<I", block, place)
        value = kind.apply(field, base + target, base + place)
        if value is None:
            raise _unlinkable(f"{kind.name} at {place:#x} cannot refer to {target:#x} ({relocation.symbol.name!r})")
        struct.pack_into("<I", block, place, value)

    def _target(self, file: int, symbol: Symbol, is_call: bool) -> int:
        """Return the offset of a symbol in the block."""
        if symbol.section is None and symbol.name in self._definitions:
            file, symbol = self._definitions[symbol.name]
        if symbol.section is not None:
            return self._starts[file, symbol.section] + symbol.value
        if not is_call:  # a stub can be called, but it is not what the address of a symbol means
            raise _unlinkable(f"it refers to {symbol.name!r}, which nothing defines")
        return self._stubs + _STUB_BYTES * self.library_functions.index(symbol.name)


def _align(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _unlinkable(reason: str) -> GeneralFailure:
    return GeneralFailure(f"object code cannot be linked: {reason}")


# -- stubs ------------------------------------------------------------------------------------------------------------


def _x86_stub(block: memoryview, stub: int, slot: int) -> None:
    """Write `jmp *slot(%rip)`; %rip is the address of the next instruction. The rest is int3."""
    struct.pack_into("<2si10s", block, stub, b"\xff\x25", slot - (stub + 6), b"\xcc" * 10)


def _arm_stub(block: memoryview, stub: int, slot: int) -> None:
    """Write `adrp x16, slot; ldr x16, [x16, #:lo12:slot]; br x16; brk #0`.

    Pages and the low 12 bits are those of offsets, because the block begins at a page boundary.
    """
    pages = (slot >> 12) - (stub >> 12)
    adrp = 0x90000010 | (pages & 3) << 29 | (pages >> 2) << 5
    ldr = 0xF9400210 | (slot & 0xFFF) // 8 << 10
    struct.pack_into("<4I", block, stub, adrp, ldr, 0xD61F0200, 0xD4200000)


_STUBS: Mapping[str, Callable[[memoryview, int, int], None]] = {"x86_64": _x86_stub, "aarch64": _arm_stub}

# -- relocations ------------------------------------------------------------------------------------------------------

_FIELD_BYTES = 4

_Apply: TypeAlias = Callable[[int, int, int], int | None]
"""Returns the field for the old field, S + A and P; None if the value does not fit."""


class _Kind(Struct, frozen=True):
    """A relocation type. `is_call`: the field is a branch's, so a stub may stand for the function."""

    name: str
    apply: _Apply
    is_call: bool = False


def _relative(_field: int, target: int, place: int) -> int | None:
    """Return S + A - P as 32 bits with sign."""
    distance = target - place
    return distance & 0xFFFFFFFF if -(1 << 31) <= distance < 1 << 31 else None


def _branch(field: int, target: int, place: int) -> int | None:
    """Return `b` or `bl` with (S + A - P) / 4 in 26 bits with sign."""
    distance = target - place
    if distance % 4 or not -(1 << 27) <= distance < 1 << 27:
        return None
    return field & 0xFC000000 | distance >> 2 & 0x03FFFFFF


def _page(field: int, target: int, place: int) -> int | None:
    """Return `adrp` with Page(S + A) - Page(P) in 21 bits with sign: the low 2 in bits 29 to 30, the rest from 5 on."""
    pages = (target >> 12) - (place >> 12)
    if not -(1 << 20) <= pages < 1 << 20:
        return None
    return field & 0x9F00001F | (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5


def _low_bits(size: int) -> _Apply:
    """Return a function that puts the low 12 bits of S + A, in units of `size` bytes, into bits 10 to 21."""

    def apply(field: int, target: int, _place: int) -> int | None:
        return None if target % size else field & 0xFFC003FF | (target & 0xFFF) // size << 10

    return apply


RELOCATIONS: Mapping[str, Mapping[int, _Kind]] = {
    "x86_64": {
        2: _Kind("R_X86_64_PC32", _relative),
        4: _Kind("R_X86_64_PLT32", _relative, is_call=True),
    },
    "aarch64": {
        275: _Kind("R_AARCH64_ADR_PREL_PG_HI21", _page),
        277: _Kind("R_AARCH64_ADD_ABS_LO12_NC", _low_bits(1)),
        278: _Kind("R_AARCH64_LDST8_ABS_LO12_NC", _low_bits(1)),
        282: _Kind("R_AARCH64_JUMP26", _branch, is_call=True),
        283: _Kind("R_AARCH64_CALL26", _branch, is_call=True),
        284: _Kind("R_AARCH64_LDST16_ABS_LO12_NC", _low_bits(2)),
        285: _Kind("R_AARCH64_LDST32_ABS_LO12_NC", _low_bits(4)),
        286: _Kind("R_AARCH64_LDST64_ABS_LO12_NC", _low_bits(8)),
        299: _Kind("R_AARCH64_LDST128_ABS_LO12_NC", _low_bits(16)),
    },
}
"""Machine → number → relocation type."""
