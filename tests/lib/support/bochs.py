"""x86-64 in the Bochs emulator, for instruction sets that this machine does not have.

Bochs runs the ROM of `bochs_monitor.asm` without an operating system. Requests are written to its disk, which is a
file; results are read with Bochs's debugger, at whose prompt the machine waits between requests (Debian's package has
the debugger). The CPU is the oldest that has the instruction set, so code that uses later instructions fails.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import pytest

from nnfmq.engines.compiled.target import Target
from support.emulated import CODE, PAGE, Call, Region
from support.linked import Image, link, undefined_symbols

__all__ = ["Bochs"]

_SHARE = Path("/usr/share/bochs")
_MONITOR = Path(__file__).with_name("bochs_monitor.asm")
_FUNCTIONS, _NAMES = 0xFF00, ("memcpy", "memset", "logf", "syscall")
_STATUS, _FIRST_GIB, _PAYLOAD = 0x5000, 0x3000, 0x100_0000
_SECTOR = 512
_DISK_BYTES = 256 << 20
_PRESENT, _WRITABLE, _NOT_EXECUTED = 1, 2, 1 << 63
_HASWELL = frozenset(("sse4.1", "ssse3", "avx", "avx2", "fma", "f16c", "bmi", "bmi2"))
_SKYLAKE = _HASWELL | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}
_PROCESSORS = {  # the oldest first, by what targets ask for
    "core2_penryn_t9600": frozenset(("sse4.1", "ssse3")),
    "corei7_haswell_4770": _HASWELL,
    "corei7_skylake_x": _SKYLAKE,
    "corei7_icelake_u": _SKYLAKE | {"avx512vnni", "avx512ifma", "avx512vbmi", "avx512vbmi2", "avx512bitalg"},
}
_SETTINGS = """display_library: rfb, options="timeout=0"
romimage: file={folder}/rom
cpu: model={processor}, count=1, reset_on_triple_fault=0
memory: guest=512, host=512
ata0-master: type=disk, path={folder}/disk, mode=flat
magic_break: enabled=1
speaker: enabled=0
log: {folder}/log
panic: action=fatal
"""


class Bochs:
    """A running emulator, as a context manager. Skips the test if Bochs is not installed."""

    def __init__(self, target: Target) -> None:
        self.target = target
        fit = [name for name, features in _PROCESSORS.items() if features.issuperset(target.features)]
        if not fit:
            pytest.skip(f"no processor of Bochs has all of {target.name}")
        missing = [name for name in ("bochs", "nasm") if shutil.which(name) is None]
        if missing or not _SHARE.is_dir():
            pytest.skip(f"{missing or _SHARE} is not installed: apt-get install bochs bochsbios nasm")
        self._processor = fit[0]

    def __enter__(self) -> Bochs:
        self._place = tempfile.TemporaryDirectory()
        folder = self.folder = Path(self._place.name)
        subprocess.run(["nasm", "-f", "bin", "-o", folder / "rom", _MONITOR], check=True)
        self._functions = _functions_of((folder / "rom").read_bytes())
        (folder / "settings").write_text(_SETTINGS.format(folder=folder, processor=self._processor))
        with (folder / "disk").open("wb") as disk:
            disk.truncate(_DISK_BYTES)
        self._bochs = subprocess.Popen(
            ["bochs", "-q", "-f", folder / "settings"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._reply()
        self._command("c")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bochs.kill()
        self._bochs.communicate()
        self._place.cleanup()

    def load(self, *code: bytes) -> Image:
        """Link object files for it."""
        missing = undefined_symbols(*code).difference(self._functions)
        if missing:
            pytest.skip(f"the monitor in Bochs has no {', '.join(sorted(missing))}")
        return link(code, CODE, self._functions)

    def run(self, image: Image, regions: Sequence[Region], calls: Sequence[Call]) -> None:
        """Make the calls."""
        request = _Request()
        code = Region(image.base, np.frombuffer(image.data, np.uint8), False)
        request.map(code, executed=True)
        places = [request.map(region) for region in regions]
        with (self.folder / "disk").open("r+b") as disk:
            disk.write(request.bytes(calls))
        self._command("c")
        left, vector, code_of_error, at, touched = struct.unpack("<5Q", self._memory(_STATUS, 40))
        if left:
            call = calls[len(calls) - left]
            raise AssertionError(
                f"exception {vector} ({code_of_error:#x}) at {at - call.function:#x} of the function,"
                f" perhaps by touching {touched:#x}; {call.arguments}"
            )
        for region, place in zip(regions, places, strict=True):
            if region.writable:
                region.data[:] = np.frombuffer(self._memory(place, region.data.nbytes), np.uint8)

    def _memory(self, address: int, size: int) -> bytes:
        self._command(f'writemem "{self.folder}/memory" {address:#x} {size}')
        return (self.folder / "memory").read_bytes()

    def _command(self, command: str) -> None:
        assert self._bochs.stdin is not None
        self._bochs.stdin.write(f"{command}\n".encode())
        self._reply()

    def _reply(self) -> None:
        """Wait for the debugger's prompt."""
        assert self._bochs.stdout is not None
        text = b""
        while not re.search(rb"<bochs:\d+> $", text):
            more = os.read(self._bochs.stdout.fileno(), 1 << 16)
            assert more, f"Bochs ended: {text[-2000:].decode(errors='replace')}"
            text += more


def _functions_of(rom: bytes) -> Mapping[str, int]:
    return dict(zip(_NAMES, struct.unpack_from(f"<{len(_NAMES)}Q", rom, _FUNCTIONS), strict=True))


class _Request:
    """Physical memory from `_PAYLOAD` on: page tables and pages, in the order of allocation."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._root = self._page()
        self._link(self._table(self._root, 0), 0, _FIRST_GIB | _PRESENT | _WRITABLE)

    def map(self, region: Region, executed: bool = False) -> int:
        """Map a region at its address, and return its physical address."""
        skip = region.address % PAGE
        pages = -(-(skip + max(region.data.nbytes, 1)) // PAGE)
        first = _PAYLOAD + len(self._data)
        self._data += (bytes(skip) + region.data.tobytes()).ljust(pages * PAGE, b"\0")
        rights = _PRESENT | (_WRITABLE if region.writable else 0) | (0 if executed else _NOT_EXECUTED)
        for number in range(pages):
            self._show(region.address - skip + number * PAGE, first + number * PAGE, rights)
        return first + skip

    def bytes(self, calls: Sequence[Call]) -> bytes:
        """Return the content of the disk."""
        place = _PAYLOAD + len(self._data)
        for call in calls:
            self._data += struct.pack("<7Q", call.function, *call.arguments, *[0] * (6 - len(call.arguments)))
        sectors = -(-len(self._data) // _SECTOR)
        assert (sectors + 1) * _SECTOR <= _DISK_BYTES
        header = struct.pack("<4Q", sectors, self._root, len(calls), place)
        return header.ljust(_SECTOR, b"\0") + bytes(self._data).ljust(sectors * _SECTOR, b"\0")

    def _page(self) -> int:
        self._data += bytes(PAGE)
        return _PAYLOAD + len(self._data) - PAGE

    def _table(self, above: int, index: int) -> int:
        """Return the page table that an entry points to."""
        offset = above - _PAYLOAD + 8 * index
        (entry,) = struct.unpack_from("<Q", self._data, offset)
        if not entry:
            entry = self._page() | _PRESENT | _WRITABLE
            self._link(above, index, entry)
        return int(entry) & ~(PAGE - 1)

    def _link(self, table: int, index: int, entry: int) -> None:
        struct.pack_into("<Q", self._data, table - _PAYLOAD + 8 * index, entry)

    def _show(self, address: int, physical: int, rights: int) -> None:
        table = self._root
        for shift in (39, 30, 21):
            table = self._table(table, address >> shift & 511)
        self._link(table, address >> 12 & 511, physical | rights)
