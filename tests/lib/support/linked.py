"""A linker for emulated machines: lays out the sections of an object file at an address and applies relocations.

Supports only what kernels' object files contain: functions, their constants, and calls of a few library functions.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import RelocationSection
from elftools.elf.sections import Section, SymbolTableSection

__all__ = ["Image", "link", "undefined_symbols"]

_ALLOCATED = 2
_X86_64, _AARCH64 = "EM_X86_64", "EM_AARCH64"


@dataclass(frozen=True, slots=True)
class Image:
    """Linked bytes for the address `base`, and the addresses of functions."""

    base: int
    data: bytes
    functions: Mapping[str, int]


def undefined_symbols(code: bytes) -> set[str]:
    """Return the undefined symbols of object code."""
    return {symbol.name for symbol in _symbols(_parsed(code)) if symbol["st_shndx"] == "SHN_UNDEF" and symbol.name}


def link(code: bytes, base: int, outside: Mapping[str, int]) -> Image:
    """Return `code` linked at the address `base`. `outside` has the addresses of library functions."""
    elf = _parsed(code)
    starts, data = _laid_out(elf, base)
    symbols = list(_symbols(elf))
    values = [_value(symbol, starts, outside) for symbol in symbols]
    for section in elf.iter_sections():
        if isinstance(section, RelocationSection) and section["sh_info"] in starts:
            for relocation in section.iter_relocations():
                place = starts[section["sh_info"]] + relocation["r_offset"]
                target = values[relocation["r_info_sym"]]
                assert target is not None, f"{symbols[relocation['r_info_sym']].name} is nowhere"
                apply = _RELOCATIONS[elf["e_machine"]][relocation["r_info_type"]]
                _patch(data, place - base, apply, target + relocation["r_addend"], place)
    functions = {
        symbol.name: value
        for symbol, value in zip(symbols, values, strict=True)
        if symbol["st_info"]["type"] == "STT_FUNC" and value is not None
    }
    return Image(base, bytes(data), functions)


def _parsed(code: bytes) -> ELFFile:
    return ELFFile(io.BytesIO(code))


def _symbols(elf: ELFFile) -> Iterator[Any]:
    for section in elf.iter_sections():
        if isinstance(section, SymbolTableSection):
            yield from section.iter_symbols()


def _laid_out(elf: ELFFile, base: int) -> tuple[dict[int, int], bytearray]:
    """Return the offsets of the loaded sections, and their bytes."""
    starts: dict[int, int] = {}
    data = bytearray()
    for number, section in enumerate(elf.iter_sections()):
        if _is_loaded(section):
            data += bytes(-len(data) % max(section["sh_addralign"], 1))
            starts[number] = base + len(data)
            data += section.data()
    return starts, data


def _is_loaded(section: Section) -> bool:
    return bool(section["sh_flags"] & _ALLOCATED) and section.name != ".eh_frame"


def _value(symbol: Any, starts: Mapping[int, int], outside: Mapping[str, int]) -> int | None:
    section = symbol["st_shndx"]
    if section == "SHN_UNDEF":
        return outside.get(symbol.name)
    return starts[section] + symbol["st_value"] if section in starts else None


_Apply = Callable[[int, int, int], int]  # the word, what it refers to, where it is


def _patch(data: bytearray, offset: int, apply: _Apply, value: int, place: int) -> None:
    word = int.from_bytes(data[offset : offset + 4], "little")
    data[offset : offset + 4] = (apply(word, value, place) & 0xFFFFFFFF).to_bytes(4, "little")


def _relative(word: int, value: int, place: int) -> int:
    assert -(1 << 31) <= value - place < 1 << 31
    return value - place


def _page(word: int, value: int, place: int) -> int:
    """ADRP: 21 bits of a page number, the lowest two of them in another field."""
    pages = (value >> 12) - (place >> 12)
    assert -(1 << 20) <= pages < 1 << 20
    return word | (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5


def _low(size: int) -> _Apply:
    """The lowest 12 bits of an address, in units of `size` bytes."""

    def apply(word: int, value: int, place: int) -> int:
        assert not value % size
        return word | (value & 0xFFF) // size << 10

    return apply


def _branch(word: int, value: int, place: int) -> int:
    words = (value - place) >> 2
    assert -(1 << 25) <= words < 1 << 25
    return word | words & 0x3FFFFFF


_RELOCATIONS: dict[str, dict[int, _Apply]] = {
    _X86_64: {2: _relative, 4: _relative},
    _AARCH64: {
        275: _page,
        277: _low(1),
        278: _low(1),
        282: _branch,
        283: _branch,
        284: _low(2),
        285: _low(4),
        286: _low(8),
        299: _low(16),
    },
}
