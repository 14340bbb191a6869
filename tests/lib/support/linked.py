"""Object files linked for emulated machines, by the linker that also links them for this one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nnfmq.engines.compiled.object_code import Linker

__all__ = ["Image", "link", "undefined_symbols"]


@dataclass(frozen=True, slots=True)
class Image:
    """Linked bytes for the address `base`, and the addresses of functions."""

    base: int
    data: bytes
    functions: Mapping[str, int]


def undefined_symbols(*code: bytes) -> set[str]:
    """Return the functions that object files refer to and none of them defines."""
    return set(Linker(code).library_functions)


def link(code: tuple[bytes, ...], base: int, outside: Mapping[str, int]) -> Image:
    """Return object files linked at the address `base`. `outside` has the addresses of library functions."""
    linker = Linker(code)
    data = bytearray(linker.size_bytes)
    linker.write(memoryview(data), base, outside)
    return Image(base, bytes(data), {name: base + offset for name, (offset, _) in linker.functions().items()})
