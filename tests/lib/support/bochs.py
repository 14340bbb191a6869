"""x86-64 in the Bochs emulator, for instruction sets that this machine does not have.

The package `bochscpu-python` is Bochs's CPU in this process. It runs the calls in 64-bit mode without an operating
system. The CPU is the oldest that has the instruction set, so code that uses later instructions fails. It has no AMX:
those instructions raise the exception of an invalid one, and `support.amx` executes them.

Each address outside of the code is one of a page full of HLT: that which a call returns to, those of the library
functions, which are computed in Python, and those of exceptions. After HLT the emulator stops, and Python goes on.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from nnfmq.engines.compiled.target import Target
from nnfmq.operations.declaration import Array
from support import amx, bochs_cpu
from support.bochs_memory import BochsMemory
from support.emulated import CODE, PAGE, Call, Region
from support.library_functions import FLOAT_FUNCTIONS, float_result
from support.linked import Image, link

__all__ = ["Bochs"]

_HASWELL = frozenset(("sse4.1", "ssse3", "avx", "avx2", "fma", "f16c", "bmi", "bmi2"))
_SKYLAKE = _HASWELL | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}
_ICELAKE = _SKYLAKE | {"avx512vnni", "avx512ifma", "avx512vbmi", "avx512vbmi2", "avx512bitalg"}
_AMX = frozenset(("amx-tile", "amx-int8"))
_PROCESSORS = {  # by Bochs's number, the oldest first
    16: frozenset(("sse4.1", "ssse3")),  # core2_penryn_t9600
    24: _HASWELL,  # corei7_haswell_4770
    26: _SKYLAKE,  # corei7_skylake_x
    28: _ICELAKE,  # corei7_icelake_u
    30: _ICELAKE | _AMX,  # sapphire_rapids
}
_STATES = {"avx": 0x4, "avx512f": 0xE0, "amx-tile": 0x6_0000}  # registers that XCR0 enables

_OUTSIDE, _SYSTEM = CODE - (16 << 20), CODE - (8 << 20)  # a call reaches 2 GiB
_STACK, _STACK_BYTES = 0x2000_0000, 1 << 20
_DONE = _OUTSIDE + PAGE - 1
_EXCEPTIONS = _OUTSIDE + PAGE // 2
_HLT = 0xF4
_NAMES = (*FLOAT_FUNCTIONS, "memcpy", "memset", "syscall")
_ADDRESSES = {name: _OUTSIDE + 16 * number for number, name in enumerate(_NAMES)}
_BY_ADDRESS = {address: name for name, address in _ADDRESSES.items()}

_INVALID_INSTRUCTION, _PAGE_FAULT = 6, 14
_WITH_ERROR_CODE = (8, 10, 11, 12, 13, 14, 17, 21)
_RESUME_FLAG = 1 << 16
_ARGUMENTS = ("rdi", "rsi", "rdx", "rcx", "r8", "r9")


class Bochs:
    """The emulator. Skips the test if no CPU of it has the target's instruction set.

    A call that takes more than `limit_s` seconds of processor time is an error.
    """

    def __init__(self, target: Target, limit_s: float = 100) -> None:
        self.target, self._limit_s = target, limit_s
        fit = [number for number, features in _PROCESSORS.items() if features.issuperset(target.features)]
        if not fit:
            pytest.skip(f"no processor of Bochs has all of {target.name}")
        self._processor = fit[0]

    def load(self, *code: bytes) -> Image:
        """Link object files for it."""
        return link(code, CODE, _ADDRESSES)

    def run(self, image: Image, regions: Sequence[Region], calls: Sequence[Call]) -> None:
        """Make the calls on a CPU that has just been reset."""
        code = Region(image.base, np.frombuffer(image.data, np.uint8), False)
        outside = Region(_OUTSIDE, np.full(PAGE, _HLT, np.uint8), False)
        own = [Region(_SYSTEM, _system_page(), True), Region(_STACK, np.zeros(_STACK_BYTES, np.uint8), True)]
        with BochsMemory([*own, *regions], [code, outside]) as memory:
            error = self._run(memory, calls)
            memory.update_regions()
        assert error is None, error

    def _run(self, memory: BochsMemory, calls: Sequence[Call]) -> str | None:
        """Make the calls, and return what ended them early, or None: a traceback would refer to the CPU."""
        states = sum(bits for feature, bits in _STATES.items() if feature in self.target.features)
        tiles = amx.Tiles(memory.bytes_at) if _AMX.issubset(self.target.features) else None
        runner = _Runner(bochs_cpu.session(self._processor, states, memory.root, _SYSTEM), memory, tiles)
        for call in calls:
            try:
                with bochs_cpu.time_limit(self._limit_s):
                    runner.run(call)
            except _Stopped as stopped:
                return f"{stopped} of the function, {call.arguments}"
        return None


def _system_page() -> Array:
    """Return the tables of segments, of stacks and of exceptions. The stack of exceptions is at the page's end."""
    page = bytearray(PAGE)
    struct.pack_into("<3Q", page, bochs_cpu.GDT, *bochs_cpu.SEGMENTS)
    struct.pack_into("<Q", page, bochs_cpu.TSS + 36, _SYSTEM + PAGE)
    for vector in range(bochs_cpu.VECTORS):
        at = _EXCEPTIONS + vector
        gate = (at & 0xFFFF, 8, 1, 0x8E, at >> 16 & 0xFFFF, at >> 32, 0)
        struct.pack_into("<2H2BH2I", page, bochs_cpu.IDT + 16 * vector, *gate)
    return np.frombuffer(page, np.uint8)


class _Stopped(Exception):
    """What ended a call early, and at which offset."""


class _Runner:
    """Makes calls on a CPU."""

    def __init__(self, session: Any, memory: BochsMemory, tiles: amx.Tiles | None) -> None:
        self._session, self._cpu = session, session.cpu
        self._memory, self._tiles = memory, tiles
        self._hook = bochs_cpu.bochscpu.Hook()
        self._hook.hlt = _stop

    def run(self, call: Call) -> None:
        """Make a call.

        Raises:
            _Stopped: If it did not return.
        """
        cpu = self._cpu
        for register, argument in zip(_ARGUMENTS, call.arguments, strict=False):
            setattr(cpu, register, argument)
        cpu.rip, cpu.rsp = call.function, _STACK + _STACK_BYTES - 64 - 8
        self._word(cpu.rsp)[:] = _DONE
        while (at := self._next_halt()) != _DONE:
            if at in _BY_ADDRESS:
                self._compute(_BY_ADDRESS[at], call.function)
            elif at - _EXCEPTIONS in range(bochs_cpu.VECTORS):
                self._handle(at - _EXCEPTIONS, call.function)
            else:
                raise _Stopped(f"HLT at {at - call.function:#x}")

    def _next_halt(self) -> int:
        """Run until HLT, and return its address."""
        self._session.run([self._hook])
        if bochs_cpu.is_over():
            raise _Stopped("processor time is over in a call")
        return int(self._cpu.rip) - 1

    def _word(self, address: int) -> Array:
        found = self._memory.bytes_at(address, 8, True)
        assert found is not None
        return found.view(np.uint64)

    def _compute(self, name: str, function: int) -> None:
        """Do what a library function does, and return from it."""
        cpu = self._cpu
        back = int(self._word(cpu.rsp)[0])
        if name in FLOAT_FUNCTIONS:
            self._compute_float(name)
        else:
            try:
                self._fill(name)
            except _Stopped as stopped:
                raise _Stopped(f"{stopped}, called before {back - function:#x}") from None
        cpu.rip, cpu.rsp = back, cpu.rsp + 8

    def _compute_float(self, name: str) -> None:
        vector = type(self._cpu).zmm  # a property with an index, so only its functions are of use
        result, other = vector.fget(self._cpu, 0), vector.fget(self._cpu, 1)
        result.q = [float_result(name, result.q[0], other.q[0]), *result.q[1:]]
        vector.fset(self._cpu, 0, result)

    def _fill(self, name: str) -> None:
        """Do what memcpy and memset do. There is no system for syscall."""
        cpu = self._cpu
        target = self._memory.bytes_at(cpu.rdi, cpu.rdx, True)
        source = self._memory.bytes_at(cpu.rsi, cpu.rdx) if name == "memcpy" else cpu.rsi & 0xFF
        if target is None or source is None or name == "syscall":
            raise _Stopped(f"{name}({cpu.rdi:#x}, {cpu.rsi:#x}, {cpu.rdx:#x})")
        target[:] = source
        cpu.rax = cpu.rdi

    def _handle(self, vector: int, function: int) -> None:
        """Execute an instruction of AMX, or report the exception. The CPU has written it to the stack of exceptions."""
        code, at, _, flags, stack, _ = (int(self._word(_SYSTEM + PAGE - 48 + 8 * word)[0]) for word in range(6))
        if vector == _INVALID_INSTRUCTION and self._tiles is not None:
            self._cpu.rsp, self._cpu.rflags = stack, flags & ~_RESUME_FLAG
            try:
                following = self._tiles.execute(self._memory.code_at(at, amx.INSTRUCTION_BYTES), at, self._register)
            except amx.Fault as fault:
                raise _Stopped(f"{fault} at {at - function:#x}") from None
            if following is not None:
                self._cpu.rip = following
                return
        details = f" ({code:#x})" if vector in _WITH_ERROR_CODE else ""
        if vector == _PAGE_FAULT:
            access = "fetch of" if code & 16 else "write to" if code & 2 else "read of"
            details = f" ({access} {self._cpu.cr2:#x}, {'protected' if code & 1 else 'not mapped'})"
        raise _Stopped(f"exception {vector}{details} at {at - function:#x}")

    def _register(self, name: str) -> int:
        return int(getattr(self._cpu, name))


def _stop(session: Any, _cpu: int) -> None:
    session.stop()
