"""The CPU of the package `bochscpu-python`: which processor it is, and its state in 64-bit mode."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_flags = sys.getdlopenflags()
try:
    # The library refers to two functions of glibc 2.38. Older systems have none of them, but nothing here calls them.
    sys.setdlopenflags(os.RTLD_LAZY)
    import bochscpu
    import bochscpu.memory
finally:
    sys.setdlopenflags(_flags)

__all__ = ["GDT", "IDT", "SEGMENTS", "TSS", "VECTORS", "bochscpu", "is_over", "session", "time_limit"]

VECTORS = 32
GDT, TSS, IDT = 0, 0x100, 0x200
"""Where the tables of segments, of stacks and of exceptions begin in a page, whose address is `system`."""

SEGMENTS = (0, 0x00AF_9B00_0000_FFFF, 0x00CF_9300_0000_FFFF)
"""The table of segments: code of 64 bits, and data. The code has the highest privileges, which HLT needs."""

_CODE, _DATA, _TASK = (8, 0xA09B), (16, 0xC093), (24, 0x008B)  # selector, and attributes as in the table
_OPCODES_BYTES = 0x15150  # in version 0.4.0
_library = ctypes.CDLL(bochscpu._bochscpu.__file__)
_libc = ctypes.CDLL(None)
_libc.signal.argtypes, _libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p


def session(processor: int, states: int, root: int, system: int) -> Any:
    """Return a CPU that has been reset and then changed to 64-bit mode. There must be no other.

    `processor` is its number in Bochs, `states` are the vector registers that XCR0 enables, beside those of SSE, `root`
    is the physical address of the page tables.
    """
    _choose(processor)
    new = bochscpu.Session()  # a second one would free what belongs to the first; each loses 5 kB
    state = new.cpu.state
    state.cr0 = 0x8001_0033  # PG, WP: read-only pages are so for every privilege level; NE, ET, MP, PE
    state.cr3 = root
    state.cr4 = 0x620 | (0x4_0000 if states else 0)  # OSXMMEXCPT, OSFXSR, PAE; OSXSAVE
    state.xcr0 = 0x3 | states if states else 0x1
    state.efer = 0xD00  # NXE: pages without code are not executed; LMA, LME
    state.cs = _segment(_CODE)
    state.ds = state.es = state.ss = state.fs = state.gs = _segment(_DATA)
    state.tr = _segment(_TASK, system + TSS, 103)
    state.gdtr, state.idtr = _table(system + GDT, 8 * len(SEGMENTS)), _table(system + IDT, 16 * VECTORS)
    new.cpu.state = state
    return new


def _choose(processor: int) -> None:
    """Let the next session have a processor. The package has no function for that, but exports Bochs's own."""
    parameter = _library._ZN13bx_real_sim_c14get_param_enumEPKcP10bx_param_c
    parameter.argtypes, parameter.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p), ctypes.c_void_p
    choose = _library._ZN15bx_param_enum_c3setEl
    choose.argtypes = (ctypes.c_void_p, ctypes.c_long)
    choose(parameter(ctypes.c_void_p.in_dll(_library, "SIM"), b"cpu.model", None), processor)
    _opcodes()[:] = _ALL_OPCODES


def _opcodes() -> Any:
    """Return the table from which a session deletes what its processor lacks, for later ones as well."""
    return (ctypes.c_char * _OPCODES_BYTES).in_dll(_library, "BxOpcodesTable")


_ALL_OPCODES = bytes(_opcodes())


def _segment(kind: tuple[int, int], base: int = 0, limit: int = 0xFFFF_FFFF) -> Any:
    segment = bochscpu.Segment()
    segment.present, segment.base, segment.limit = True, base, limit
    segment.selector, segment.attr = kind
    return segment


def _table(base: int, size: int) -> Any:
    table = bochscpu.GlobalSegment()
    table.base, table.limit = base, size - 1
    return table


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Stop a CPU that runs when this process has computed for so long. Then `is_over()`.

    Python's signal handlers, among them that of pytest's limit, do not run meanwhile, so the handler is Bochs's.
    """
    stop = ctypes.cast(_library.cpu_set_killbit, ctypes.c_void_p)
    previous = _libc.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        _libc.signal(signal.SIGVTALRM, previous)


def is_over() -> bool:
    """Return whether the time of `time_limit` is over."""
    return signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0
