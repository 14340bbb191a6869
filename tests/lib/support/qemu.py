"""AArch64 in QEMU's user mode, for instruction sets that Unicorn does not have.

QEMU runs a program without a C library: `_START`, linked to a fixed address. Its standard input is a file with a table
and the content of memory. The program maps the pages that the table lists, the writable ones shared, makes the calls,
and exits; the results are in the file then.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from nnfmq.engines.compiled.code_generator import compile_ir
from nnfmq.engines.compiled.target import TARGETS, Target
from support.emulated import CODE, PAGE, Call, Region
from support.linked import Image, link, undefined_symbols

__all__ = ["Qemu"]

_PROGRAM = CODE - (16 << 20)
_TABLE, _TABLE_BYTES = 0x2000_0000, 1 << 20
_HEADER = struct.Struct("<3Q")  # mappings, calls, calls that have returned
_MAPPING = struct.Struct("<5Q")  # address, size, rights, flags, offset in the file
_CALL = struct.Struct("<7Q")  # function, arguments
_READ, _WRITE, _EXECUTE = 1, 2, 4
_SHARED, _PRIVATE, _FIXED = 1, 2, 16
_MMAP, _EXIT_GROUP = 222, 94
_TIMEOUT_S = 300
_OLDEST = 6, 1

_SYSTEM_CALL = (  # syscall(number, 6 arguments)
    0xAA0003E8,  # mov x8, x0
    *(0xAA0003E0 | source << 16 | source - 1 for source in range(1, 7)),  # mov x0, x1; ...; mov x5, x6
    0xD4000001,  # svc #0
    0xD65F03C0,  # ret
)

_START = f"""
declare i64 @syscall(i64, i64, i64, i64, i64, i64, i64)

define void @start() {{
  call i64 @syscall(i64 {_MMAP}, i64 {_TABLE}, i64 {_TABLE_BYTES}, i64 {_READ | _WRITE}, i64 {_SHARED | _FIXED},
                    i64 0, i64 0)
  %table = inttoptr i64 {_TABLE} to ptr
  %mappings = load i64, ptr %table
  %calls.at = getelementptr i64, ptr %table, i64 1
  %calls = load i64, ptr %calls.at
  %done.at = getelementptr i64, ptr %table, i64 2
  %first = getelementptr i64, ptr %table, i64 3
  br label %map
map:
  %m = phi i64 [0, %0], [%m.next, %mapped]
  %mapping = phi ptr [%first, %0], [%mapping.next, %mapped]
  %more.mappings = icmp ult i64 %m, %mappings
  br i1 %more.mappings, label %mapped, label %calling
mapped:
  %m1 = getelementptr i64, ptr %mapping, i64 1
  %m2 = getelementptr i64, ptr %mapping, i64 2
  %m3 = getelementptr i64, ptr %mapping, i64 3
  %m4 = getelementptr i64, ptr %mapping, i64 4
  %address = load i64, ptr %mapping
  %size = load i64, ptr %m1
  %rights = load i64, ptr %m2
  %flags = load i64, ptr %m3
  %offset = load i64, ptr %m4
  call i64 @syscall(i64 {_MMAP}, i64 %address, i64 %size, i64 %rights, i64 %flags, i64 0, i64 %offset)
  %m.next = add i64 %m, 1
  %mapping.next = getelementptr i64, ptr %mapping, i64 5
  br label %map
calling:
  %done = phi i64 [0, %map], [%done.next, %called]
  %call = phi ptr [%mapping, %map], [%call.next, %called]
  store i64 %done, ptr %done.at
  %more.calls = icmp ult i64 %done, %calls
  br i1 %more.calls, label %called, label %exit
called:
  %c1 = getelementptr i64, ptr %call, i64 1
  %c2 = getelementptr i64, ptr %call, i64 2
  %c3 = getelementptr i64, ptr %call, i64 3
  %c4 = getelementptr i64, ptr %call, i64 4
  %c5 = getelementptr i64, ptr %call, i64 5
  %c6 = getelementptr i64, ptr %call, i64 6
  %function = load ptr, ptr %call
  %a1 = load i64, ptr %c1
  %a2 = load i64, ptr %c2
  %a3 = load i64, ptr %c3
  %a4 = load i64, ptr %c4
  %a5 = load i64, ptr %c5
  %a6 = load i64, ptr %c6
  call void %function(i64 %a1, i64 %a2, i64 %a3, i64 %a4, i64 %a5, i64 %a6)
  %done.next = add i64 %done, 1
  %call.next = getelementptr i64, ptr %call, i64 7
  br label %calling
exit:
  call i64 @syscall(i64 {_EXIT_GROUP}, i64 0, i64 0, i64 0, i64 0, i64 0, i64 0)
  unreachable
}}

define ptr @memcpy(ptr %to, ptr %from, i64 %count) {{
  br label %next
next:
  %n = phi i64 [0, %0], [%n.next, %copy]
  %more = icmp ult i64 %n, %count
  br i1 %more, label %copy, label %end
copy:
  %source = getelementptr i8, ptr %from, i64 %n
  %target = getelementptr i8, ptr %to, i64 %n
  %byte = load i8, ptr %source
  store i8 %byte, ptr %target
  %n.next = add i64 %n, 1
  br label %next
end:
  ret ptr %to
}}

define ptr @memset(ptr %to, i32 %value, i64 %count) {{
  %byte = trunc i32 %value to i8
  br label %next
next:
  %n = phi i64 [0, %0], [%n.next, %set]
  %more = icmp ult i64 %n, %count
  br i1 %more, label %set, label %end
set:
  %target = getelementptr i8, ptr %to, i64 %n
  store i8 %byte, ptr %target
  %n.next = add i64 %n, 1
  br label %next
end:
  ret ptr %to
}}
"""


class Qemu:
    """The emulator. Skips the test if QEMU is not installed, or if the code calls functions that the program lacks."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._emulator = _emulator()

    def load(self, *code: bytes) -> Image:
        """Link object files for it."""
        functions = {name: _program().functions[name] for name in ("memcpy", "memset")}
        missing = undefined_symbols(*code).difference(functions)
        if missing:
            pytest.skip(f"the program in QEMU has no {', '.join(sorted(missing))}")
        return link(code, CODE, functions)

    def run(self, image: Image, regions: Sequence[Region], calls: Sequence[Call]) -> None:
        """Make the calls in a new process."""
        memory = _Memory()
        memory.map(Region(image.base, np.frombuffer(image.data, np.uint8), False), _READ | _EXECUTE)
        places = [memory.map(region, _READ | (_WRITE if region.writable else 0)) for region in regions]
        with tempfile.TemporaryDirectory() as folder:
            file, program = Path(folder, "memory"), Path(folder, "program")
            file.write_bytes(memory.bytes(calls))
            program.write_bytes(_executable(_program()))
            program.chmod(0o700)
            with file.open("r+b") as stdin:
                status = subprocess.run(
                    [self._emulator, "-cpu", "max", program],
                    stdin=stdin,
                    stderr=subprocess.DEVNULL,
                    cwd=folder,
                    timeout=_TIMEOUT_S,
                    check=False,
                ).returncode
            data = file.read_bytes()
        _, _, done = _HEADER.unpack_from(data)
        if status:
            raise AssertionError(f"exit status {status} in call {done} of the function, {calls[done].arguments}")
        assert done == len(calls)
        for region, place in zip(regions, places, strict=True):
            if region.writable:
                region.data[:] = np.frombuffer(data, np.uint8, region.data.nbytes, place)


@cache
def _emulator() -> str:
    """Return the path of QEMU's user mode. Skips the test if it is missing or too old."""
    found = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if found is None:
        pytest.skip("qemu-aarch64 is not installed: apt-get install qemu-user")
    text = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"version (\d+)\.(\d+)", text)
    if version is None or tuple(map(int, version.groups())) < _OLDEST:
        pytest.skip(f"{found} has no i8mm before 6.1: {text}")
    return found


class _Memory:
    """The file: the table, then the pages of the regions."""

    def __init__(self) -> None:
        self._mappings: list[bytes] = []
        self._data = bytearray(_TABLE_BYTES)

    def map(self, region: Region, rights: int) -> int:
        """Map a region at its address, and return where its first byte is in the file."""
        skip, offset = region.address % PAGE, len(self._data)
        size = -(-(skip + max(region.data.nbytes, 1)) // PAGE) * PAGE
        self._data += (bytes(skip) + region.data.tobytes()).ljust(size, b"\0")
        flags = (_SHARED if region.writable else _PRIVATE) | _FIXED
        self._mappings.append(_MAPPING.pack(region.address - skip, size, rights, flags, offset))
        return offset + skip

    def bytes(self, calls: Sequence[Call]) -> bytes:
        """Return the content of the file."""
        made = [_CALL.pack(call.function, *call.arguments, *[0] * (6 - len(call.arguments))) for call in calls]
        table = b"".join((_HEADER.pack(len(self._mappings), len(calls), 0), *self._mappings, *made))
        assert len(table) <= _TABLE_BYTES
        self._data[: len(table)] = table
        return bytes(self._data)


@cache
def _program() -> Image:
    """Return `_START` after a page that begins with the system call."""
    system_call = struct.pack(f"<{len(_SYSTEM_CALL)}I", *_SYSTEM_CALL).ljust(PAGE, b"\0")
    linked = link((compile_ir(_START, TARGETS["neon"]),), _PROGRAM + PAGE, {"syscall": _PROGRAM})
    return Image(_PROGRAM, system_call + linked.data, linked.functions)


def _executable(program: Image) -> bytes:
    """Return an ELF file with one segment, which is loaded at the program's address."""
    kind, machine, header_bytes, entry_bytes = 2, 183, 64, 56  # EXEC, AARCH64
    identification = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    numbers = kind, machine, 1, program.functions["start"], header_bytes, 0, 0, header_bytes, entry_bytes, 1, 0, 0, 0
    header = identification + struct.pack("<HHI3QI6H", *numbers)
    size = len(program.data)
    segment = struct.pack("<2I6Q", 1, _READ | _EXECUTE, PAGE, program.base, program.base, size, size, PAGE)
    return (header + segment).ljust(PAGE, b"\0") + program.data
