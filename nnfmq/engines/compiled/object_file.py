"""Relocatable object files (ELF64, little-endian) as LLVM emits them: the sections to load, symbols and relocations.

The bytes may come from a damaged cache file. So each offset, size and index is checked against the file before it is
used: a malformed file raises an error, and nothing outside of it is read.

The format: System V ABI, chapters 4 (object files: headers, sections, symbols, relocations).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from struct import Struct as Layout
from typing import NamedTuple

from msgspec import Struct

from nnfmq.hal.errors import GeneralFailure

__all__ = ["MACHINES", "ObjectFile", "Relocation", "Section", "Symbol", "parse_object"]

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
    """A name for byte `value` of the loaded section number `section`. None: the file does not define it there."""

    name: str
    section: int | None
    value: int
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
    """What is loaded of an object file. Sections are numbered as in the file."""

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
        name, info, _, index, value, _ = fields
        section = self.sections.get(index)
        # A symbol may be the end of its section.
        if section is not None and value > section.size:
            raise _malformed(f"a symbol is byte {value} of section {index}, which has {section.size}")
        is_global, is_function = info >> 4 != _LOCAL, info & 15 == _FUNCTION
        return Symbol(self._string(names, name), None if section is None else index, value, is_global, is_function)

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
