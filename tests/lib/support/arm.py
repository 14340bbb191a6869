"""AArch64 in the Unicorn emulator, for the targets `neon` and `neon-dotprod`.

Library functions that kernels call are computed in Python: each is a return instruction in a separate page, with a hook
that computes the result.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import unicorn
from unicorn import arm64_const as arm

from nnfmq.engines.compiled.target import TARGETS, Target
from support.emulated import CODE, PAGE, Call, Region
from support.library_functions import FLOAT_FUNCTIONS, float_result
from support.linked import Image, link

__all__ = ["Arm"]

_OUTSIDE = CODE - (16 << 20)  # a call reaches 128 MiB
_STACK, _STACK_BYTES = 0x2000_0000, 1 << 20
_RETURN = 0xD65F03C0
_DONE = _OUTSIDE + PAGE - 4


def _arguments(uc: unicorn.Uc) -> tuple[int, int, int]:
    first, second, third = (uc.reg_read(register) for register in _INTEGERS[:3])
    return first, second, third


def _memcpy(uc: unicorn.Uc) -> None:
    target, source, count = _arguments(uc)
    uc.mem_write(target, bytes(uc.mem_read(source, count)))


def _memset(uc: unicorn.Uc) -> None:
    target, byte, count = _arguments(uc)
    uc.mem_write(target, bytes([byte & 255]) * count)


def _float(name: str) -> Callable[[unicorn.Uc], None]:
    def call(uc: unicorn.Uc) -> None:
        registers = (arm.UC_ARM64_REG_S0, arm.UC_ARM64_REG_S1)
        uc.reg_write(registers[0], float_result(name, *(uc.reg_read(register) for register in registers)))

    return call


_FUNCTIONS: dict[str, Callable[[unicorn.Uc], None]] = {
    **{name: _float(name) for name in FLOAT_FUNCTIONS},
    "memcpy": _memcpy,
    "memset": _memset,
    "syscall": lambda uc: uc.emu_stop(),  # there is no system
}
_ADDRESSES = {name: _OUTSIDE + 16 * number for number, name in enumerate(_FUNCTIONS)}
_BY_ADDRESS = {address: _FUNCTIONS[name] for name, address in _ADDRESSES.items()}
_INTEGERS = [getattr(arm, f"UC_ARM64_REG_X{number}") for number in range(6)]


class Arm:
    """The emulator. Without `dotprod` its CPU is one that raises an exception at such instructions."""

    def __init__(self, target: Target = TARGETS["neon"]) -> None:
        self.target = target
        self._cpu = arm.UC_CPU_ARM64_MAX if "dotprod" in target.features else arm.UC_CPU_ARM64_A53

    def load(self, *code: bytes) -> Image:
        """Link object files for it."""
        return link(code, CODE, _ADDRESSES)

    def run(self, image: Image, regions: Sequence[Region], calls: Sequence[Call]) -> None:
        """Make the calls in a new emulator."""
        uc = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        uc.ctl_set_cpu_model(self._cpu)
        _map(uc, image.base, image.data, unicorn.UC_PROT_READ | unicorn.UC_PROT_EXEC)
        _map(uc, _OUTSIDE, struct.pack("<I", _RETURN) * (PAGE // 4), unicorn.UC_PROT_READ | unicorn.UC_PROT_EXEC)
        uc.mem_map(_STACK, _STACK_BYTES)
        for region in regions:
            writable = unicorn.UC_PROT_WRITE if region.writable else 0
            _map(uc, region.address, region.data.tobytes(), unicorn.UC_PROT_READ | writable)
        uc.hook_add(unicorn.UC_HOOK_CODE, _called, begin=_OUTSIDE, end=_DONE - 1)
        for call in calls:
            _run(uc, call)
        for region in regions:
            if region.writable:
                region.data[:] = memoryview(uc.mem_read(region.address, region.data.nbytes))


def _map(uc: unicorn.Uc, address: int, data: bytes, rights: int) -> None:
    first = address // PAGE * PAGE
    uc.mem_map(first, -(-(address + max(len(data), 1) - first) // PAGE) * PAGE, rights)
    uc.mem_write(address, data)


def _called(uc: unicorn.Uc, address: int, size: int, data: object) -> None:
    if address in _BY_ADDRESS:
        _BY_ADDRESS[address](uc)


def _run(uc: unicorn.Uc, call: Call) -> None:
    for register, argument in zip(_INTEGERS, call.arguments, strict=False):
        uc.reg_write(register, argument)
    uc.reg_write(arm.UC_ARM64_REG_SP, _STACK + _STACK_BYTES - 64)
    uc.reg_write(arm.UC_ARM64_REG_LR, _DONE)
    try:
        uc.emu_start(call.function, _DONE)
    except unicorn.UcError as error:
        at = uc.reg_read(arm.UC_ARM64_REG_PC)
        raise AssertionError(f"{error} at {at - call.function:#x} of the function, {call.arguments}") from error
