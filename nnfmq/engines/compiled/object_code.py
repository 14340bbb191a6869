"""Object code, as LLVM emits it, linked and loaded. The only module that makes memory executable.

It is linked in private memory and written to a memfd, which is sealed against writing and then mapped: what is
executable was never writable in this address space, and is a file's. So a process may be kept from making other memory
executable (`base.sandbox`). For perf alone it is anonymous memory (`perf_map`). It is unmapped with the last reference
to its `LoadedCode`.

LLVM has a loader of its own, but a process that imports it has 40 MiB more resident memory, 5 MiB of them private. A
driver has a worker process for each client, which only loads what compile processes have compiled.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from struct import Struct as Layout
from typing import NamedTuple, TypeAlias

from msgspec import Struct

from nnfmq.base.memory import Memory, write_all
from nnfmq.engines import memory
from nnfmq.engines.compiled.perf_map import PERF_MAP
from nnfmq.hal.errors import GeneralFailure

__all__ = [
    "LIBRARY_FUNCTIONS",
    "MACHINES",
    "RELOCATIONS",
    "Linker",
    "LoadedCode",
    "ObjectFile",
    "Relocation",
    "Section",
    "Symbol",
    "parse_object",
]


# ----------------------------------------------------------------------------------------------------------------------
# Relocatable object files (ELF64, little-endian) as LLVM emits them: the sections to load, symbols and relocations.
#
# The bytes may come from a damaged cache file. So each offset, size and index is checked against the file before it is
# used: a malformed file raises an error, and nothing outside of it is read.
#
# The format: System V ABI, chapters 4 (object files: headers, sections, symbols, relocations).


MACHINES: Mapping[int, str] = {62: "x86_64", 183: "aarch64"}
"""e_machine → the name of the machine, as `uname -m` prints it."""

_FILE_HEADER = Layout("<16s2HI3QI6H")
_SECTION_HEADER = Layout("<2I4Q2I2Q")
_SYMBOL = Layout("<I2BH2Q")
_RELOCATION = Layout("<2Qq")

_IDENTITY = b"\x7fELF\x02\x01\x01"  # ELFCLASS64, ELFDATA2LSB, EV_CURRENT
_ET_REL = 1
_PROGBITS, _SYMTAB, _STRTAB, _RELA, _NOBITS, _REL = 1, 2, 3, 4, 8, 9
_UNWIND = 0x70000001  # SHT_X86_64_UNWIND
_WRITE, _ALLOC, _EXECUTE, _TLS = 1, 2, 4, 0x400
_MAX_ALIGNMENT = 4096  # the smallest page: sections begin at page boundaries at the earliest
_MAX_LOADED_BYTES = 1 << 30  # NOBITS sections have any size without bytes in the file
_LOCAL, _FUNCTION = 0, 2


class Section(Struct, frozen=True):
    """A section that is loaded: code, or constants. `data` may be shorter than `size`: the rest is zero."""

    data: memoryview
    size: int
    alignment: int
    is_code: bool


class Symbol(Struct, frozen=True):
    """A name for `size` bytes from byte `value` of section number `section` on, which is loaded.

    None: the file does not define it there.
    """

    name: str
    section: int | None
    value: int
    size: int
    is_global: bool
    is_function: bool


class Relocation(Struct, frozen=True):
    """A field of section number `section` at `offset`, to be computed from a symbol and `addend` in the way `kind`."""

    section: int
    offset: int
    kind: int
    symbol: Symbol
    addend: int


class ObjectFile(Struct, frozen=True):
    """The loaded parts of an object file. Sections are numbered as in the file."""

    machine: str
    sections: Mapping[int, Section]
    symbols: Sequence[Symbol]
    relocations: Sequence[Relocation]


def parse_object(data: bytes) -> ObjectFile:
    """Return the parts of an object file that are loaded. `Section.data` are views of `data`.

    Unwind tables (.eh_frame) are left out: no exception passes through generated code, which calls only functions of
    the C library.

    Raises:
        GeneralFailure: If it is malformed, not for a known machine, or has variables or something else that generated
            code never has.
    """
    parser = _Parser(data)
    return ObjectFile(parser.machine, parser.sections, parser.symbols, list(parser.relocations()))


class _Header(NamedTuple):
    """An entry of the section header table (Elf64_Shdr)."""

    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


class _Parser:
    def __init__(self, data: bytes) -> None:
        self._bytes, self._data = data, memoryview(data)
        self.machine, self._names, table = self._file_header()
        self._headers = [_Header(*fields) for fields in _SECTION_HEADER.iter_unpack(table)]
        self.sections = dict(self._loaded_sections())
        self._symbol_table, self.symbols = self._parsed_symbols()

    def _slice(self, offset: int, size: int, what: str) -> memoryview:
        """Return bytes of the file. Python would cut off a slice that ends behind the end, without an error."""
        if offset + size > len(self._data):
            raise _malformed(f"{what} ends after the end of the file")
        return self._data[offset : offset + size]

    def _file_header(self) -> tuple[str, int, memoryview]:
        """Return the machine, the number of the section with the section's names, and the section header table."""
        header = self._slice(0, _FILE_HEADER.size, "its header")
        identity, kind, machine, _, _, _, offset, *_, entry_size, count, names = _FILE_HEADER.unpack(header)
        if not identity.startswith(_IDENTITY) or kind != _ET_REL or machine not in MACHINES:
            raise _malformed("it is no relocatable ELF64 file for a known machine")
        if entry_size != _SECTION_HEADER.size:
            raise _malformed(f"section headers have {entry_size} bytes")
        # A count of 0 means 65,280 sections or more. Here none is found then, and so no function.
        return MACHINES[machine], names, self._slice(offset, count * entry_size, "the section header table")

    def _loaded_sections(self) -> Iterator[tuple[int, Section]]:
        loaded_bytes = 0
        for number, header in enumerate(self._headers):
            if not header.flags & _ALLOC or not header.size or self._is_unwind_table(header):
                continue
            if header.kind not in (_PROGBITS, _NOBITS):
                raise _malformed(f"section {number} has the type {header.kind:#x}, which is not supported")
            if header.flags & (_WRITE | _TLS):
                raise _malformed(f"section {number} is writable: generated code has no variables")
            alignment = max(header.alignment, 1)
            if alignment & (alignment - 1) or alignment > _MAX_ALIGNMENT:
                raise _malformed(f"section {number} has an alignment of {alignment}")
            loaded_bytes += header.size
            if loaded_bytes > _MAX_LOADED_BYTES:
                raise _malformed(f"its sections have more than {_MAX_LOADED_BYTES} bytes")
            stored_bytes = 0 if header.kind == _NOBITS else header.size
            data = self._slice(header.offset, stored_bytes, f"section {number}")
            yield number, Section(data, header.size, alignment, bool(header.flags & _EXECUTE))

    def _is_unwind_table(self, header: _Header) -> bool:
        """Return whether a section is .eh_frame, which has a type of its own on x86-64 only."""
        return header.kind == _UNWIND or self._string(self._names, header.name) == ".eh_frame"

    def _parsed_symbols(self) -> tuple[int, list[Symbol]]:
        """Return the number of the symbol table's section, and the symbols."""
        tables = [number for number, header in enumerate(self._headers) if header.kind == _SYMTAB]
        if len(tables) != 1:
            raise _malformed(f"it has {len(tables)} symbol tables")
        header = self._headers[tables[0]]
        return tables[0], [self._symbol(header.link, fields) for fields in self._entries(header, _SYMBOL)]

    def _symbol(self, names: int, fields: Sequence[int]) -> Symbol:
        name, info, _, index, value, size = fields
        section = self.sections.get(index)
        # A symbol may be the end of its section.
        if section is not None and value > section.size:
            raise _malformed(f"a symbol is byte {value} of section {index}, which has {section.size}")
        is_global, is_function = info >> 4 != _LOCAL, info & 15 == _FUNCTION
        number = None if section is None else index
        return Symbol(self._string(names, name), number, value, size, is_global, is_function)

    def relocations(self) -> Iterator[Relocation]:
        """Yield the relocations of the loaded sections."""
        for header in self._headers:
            if header.kind == _REL and header.info in self.sections:
                raise _malformed("it has relocations without addends")
            if header.kind != _RELA or header.info not in self.sections:
                continue
            if header.link != self._symbol_table:
                raise _malformed("relocations refer to another section than the symbol table")
            for offset, info, addend in self._entries(header, _RELOCATION):
                number = info >> 32
                if number >= len(self.symbols):
                    raise _malformed(f"a relocation refers to symbol {number} of {len(self.symbols)}")
                yield Relocation(header.info, offset, info & 0xFFFFFFFF, self.symbols[number], addend)

    def _entries(self, header: _Header, layout: Layout) -> Iterator[tuple[int, ...]]:
        if header.entry_size != layout.size or header.size % layout.size:
            raise _malformed(f"a table has {header.size} bytes, and entries of {header.entry_size}")
        return layout.iter_unpack(self._slice(header.offset, header.size, "a table"))

    def _string(self, table: int, offset: int) -> str:
        """Return the string at `offset` of the string table in section number `table`."""
        if table >= len(self._headers) or self._headers[table].kind != _STRTAB:
            raise _malformed(f"section {table} is no string table")
        header = self._headers[table]
        limit = header.offset + len(self._slice(header.offset, header.size, "a string table"))
        begin = header.offset + offset
        end = self._bytes.find(b"\0", begin, limit)
        if end < 0:
            raise _malformed("a name does not end within its string table")
        return self._bytes[begin:end].decode("utf-8", "backslashreplace")


def _malformed(reason: str) -> GeneralFailure:
    return GeneralFailure(f"object code cannot be loaded: {reason}")


# ----------------------------------------------------------------------------------------------------------------------
# Linker: lays out object files in one block of memory and relocates them to its address.
#
#     code of all files | stubs | up to a page boundary | constants of all files | addresses of library functions
#
# All references inside the block are relative to the instruction, so the distance decides whether they fit, never the
# address. Library functions may be anywhere in the address space. A call of one goes to its stub, which jumps to the
# address that the last part of the block has for it: what a dynamic linker calls PLT and GOT.
#
# Only the relocations that LLVM uses for generated code (position-independent, small code model) are known; others are
# rejected. In their formulas S is the address of the symbol, A the addend, P the address of the field.
#
#     x86-64     System V ABI, AMD64 Architecture Processor Supplement, 4.4.1: relocation types
#     AArch64    ELF for the Arm 64-bit Architecture, 5.7: relocation; veneers may change x16 and x17 (AAPCS64, 6.1.1)
#
# It writes with `struct.pack_into` and to slices of the block whose size was checked: a malformed file can cause an
# error, but no write outside of the block.


_PAGE = mmap.PAGESIZE  # what is linked here is loaded here
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

    def functions(self) -> dict[str, tuple[int, int]]:
        """Return the offset and the size of each global function in the block."""
        return {
            name: (self._starts[number, symbol.section] + symbol.value, symbol.size)
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


# ----------------------------------------------------------------------------------------------------------------------
# Loads object code into this process. The only module that makes memory executable.


LIBRARY_FUNCTIONS = frozenset(
    [
        "acosf",
        "acoshf",
        "asinf",
        "asinhf",
        "atanf",
        "atanhf",
        "cosf",
        "coshf",
        "memcpy",
        "memset",
        "powf",
        "sinf",
        "sinhf",
        "syscall",
        "tanf",
    ]
)
"""Functions of the C library that object code may call. Kernels call all except syscall(2), which the thread pool does.

LLVM would call others for operations that the instruction set lacks, such as fmaf(3). Tests assert that it does not.
"""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.mmap.restype = ctypes.c_size_t
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FIXED, _MAP_FAILED = 0x10, 2 ** (8 * ctypes.sizeof(ctypes.c_size_t)) - 1


class LoadedCode:
    """Object code in this process. Its functions stay callable as long as it is referenced. Immutable.

    Threads that run its functions must refer to it, daemon threads too: at the end of the interpreter objects that only
    modules refer to are freed, while such threads still run.
    """

    def __init__(self, object_code: Iterable[bytes]) -> None:
        """Link the object files and load them.

        Raises:
            GeneralFailure: If they are malformed, are for another machine, refer to a function that nothing defines, or
                if the system does not allow executable memory.
            MemoryError: If there is not enough address space.
            ResourceExhausted: If there is not enough memory, the budget does not allow it, or no descriptor is left.
        """
        linker = Linker(object_code)
        if linker.machine != os.uname().machine:
            raise GeneralFailure(f"object code cannot be loaded: it is for {linker.machine}")
        addresses = {name: _library_function(name) for name in linker.library_functions}
        block = bytearray(linker.size_bytes)
        # The block has no address inside it: library functions are reached by their own ones.
        linker.write(memoryview(block), 0, addresses)
        self._charge = memory.charge(len(block))  # RLIMIT_DATA counts no memfds
        self._base = (_mapped_for_perf if PERF_MAP.is_open else _mapped)(block, linker.code_bytes)
        weakref.finalize(self, _libc.munmap, self._base, len(block)).atexit = False
        self._functions = linker.functions()
        PERF_MAP.add((self._base + offset, size, name) for name, (offset, size) in self._functions.items())

    def address(self, name: str) -> int:
        """Return the address of a function.

        Raises:
            GeneralFailure: If the object code does not define it.
        """
        if name not in self._functions:
            raise GeneralFailure(f"object code cannot be loaded: nothing defines {name!r}")
        return self._base + self._functions[name][0]


@cache
def _library_function(name: str) -> int:
    """Return the address of a function of the C library.

    Raises:
        GeneralFailure: If generated code has no reason to call it.
    """
    if name not in LIBRARY_FUNCTIONS:
        raise GeneralFailure(f"object code cannot be loaded: it refers to {name!r}, which nothing defines")
    # An interpreter without libm of its own does not see the one that NumPy has loaded, unless it asks for that.
    library = _libc if hasattr(_libc, name) else ctypes.CDLL("libm.so.6")
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


def _mapped(block: bytearray, code_bytes: int) -> int:
    """Map a copy of `block` that nobody can write to, its first part executable; return its address.

    The C library's call is used, because Python's mmap would keep a descriptor for each program.
    """
    with Memory.create_constant(len(block), lambda fd: write_all(fd, block), "nnfmq-code") as file:
        fd = file.fileno()
        base = _map(None, len(block), mmap.PROT_READ, mmap.MAP_PRIVATE, fd)
        try:
            # The kernel makes CPUs see the instructions when it maps a file's pages executable (Arm ARM, B2.4).
            _map(base, code_bytes, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE | _MAP_FIXED, fd)
        except GeneralFailure:
            _libc.munmap(base, len(block))
            raise
    return base


def _mapped_for_perf(block: bytearray, code_bytes: int) -> int:
    """Map a copy of `block` as `_mapped` does, in anonymous memory: only there perf looks for names in its map.

    So it is writable before it is executable, which the sandbox allows while the setting is on.
    """
    base = _map(None, len(block), mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    ctypes.memmove(base, bytes(block), len(block))
    for address, size, protection in (
        (base, code_bytes, mmap.PROT_READ | mmap.PROT_EXEC),
        (base + code_bytes, len(block) - code_bytes, mmap.PROT_READ),
    ):
        if size and _libc.mprotect(address, size, protection):
            number = ctypes.get_errno()
            _libc.munmap(base, len(block))
            raise GeneralFailure(f"machine code cannot be loaded: mprotect(2): {os.strerror(number)}")
    return base


def _map(address: int | None, size_bytes: int, protection: int, flags: int, fd: int) -> int:
    found: int = _libc.mmap(address, size_bytes, protection, flags, fd, 0)
    if found == _MAP_FAILED:
        number = ctypes.get_errno()
        if number == errno.ENOMEM:
            raise MemoryError(f"{size_bytes} bytes for machine code: {os.strerror(number)}")
        raise GeneralFailure(f"machine code cannot be loaded: mmap(2) of executable memory: {os.strerror(number)}")
    return found
