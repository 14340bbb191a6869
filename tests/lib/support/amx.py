"""The instructions of AMX with 8-bit integers, for an emulator that lacks them: Intel's SDM, volume 2.

An emulator executes the instruction here when its CPU raises the exception of an invalid one. `test_amx.py` compares
the results with those of a CPU that has AMX.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nnfmq.operations.declaration import Array

__all__ = ["INSTRUCTION_BYTES", "Fault", "Memory", "Tiles"]

INSTRUCTION_BYTES = 10
"""The longest one: a VEX prefix of three bytes, opcode, ModRM, SIB, and a displacement of four bytes."""

_TILES, _ROWS, _ROW_BYTES, _CONFIG_BYTES = 8, 16, 64, 64
_REGISTERS = ("rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", *(f"r{number}" for number in range(8, 16)))
_PREFIXES = ("", "66", "F3", "F2")

Memory = Callable[[int, int, bool], Array | None]
"""Returns the bytes at an address, of a size, to write or not; None if they are not all accessible."""


class Fault(Exception):
    """What an instruction does that raises an exception of the CPU."""


@dataclass(frozen=True, slots=True)
class _Operands:
    """An instruction's operands: registers by number, addresses of the memory operand and of the next instruction."""

    register: int
    other: int  # in the ModRM byte
    third: int  # in the VEX prefix
    address: int
    stride: int
    next_instruction: int


class Tiles:
    """The state of AMX: a configuration, and eight tiles of 16 rows of 64 bytes."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._release()

    def execute(self, code: bytes, at: int, register: Callable[[str], int]) -> int | None:
        """Execute the instruction at the address `at`, and return that of the next; None if it is not one of AMX.

        Raises:
            Fault: If the CPU would raise an exception.
        """
        code = code.ljust(INSTRUCTION_BYTES, b"\0")
        if code[0] != 0xC4 or code[1] & 0x1F != 2 or code[2] & 0x84:  # VEX.128.0F38.W0
            return None
        name = _name(_PREFIXES[code[2] & 3], code[3], code[4])
        if name is None:
            return None
        operands = _operands(code, at, register)
        try:
            self._by_name(name, operands)
        except Fault as fault:
            raise Fault(f"{name}: {fault}") from None
        return operands.next_instruction

    def _by_name(self, name: str, operands: _Operands) -> None:
        match name:
            case "ldtilecfg":
                self._configure(self._at(operands.address, _CONFIG_BYTES).tobytes())
            case "sttilecfg":
                self._at(operands.address, _CONFIG_BYTES, True)[:] = np.frombuffer(self._configuration(), np.uint8)
            case "tilerelease":
                self._release()
            case "tilezero":
                self._set(operands.register, np.zeros(self._shape(operands.register), np.uint8))
            case "tileloadd" | "tileloaddt1":
                self._set(operands.register, np.array(self._rows(operands, False), np.uint8))
            case "tilestored":
                for target, row in zip(self._rows(operands, True), self._data[operands.register], strict=False):
                    target[:] = row[: target.size]
            case _:
                self._multiply(operands, "ui"[name[4] == "s"], "ui"[name[5] == "s"])

    def _release(self) -> None:
        self._shapes = [(0, 0)] * _TILES  # rows, bytes in a row
        self._is_configured = False
        self._data = np.zeros((_TILES, _ROWS, _ROW_BYTES), np.uint8)

    def _configure(self, config: bytes) -> None:
        palette, start_row = config[:2]
        if palette == 0:
            self._release()
            return
        row_bytes, rows = struct.unpack_from("<16H", config, 16), config[48:]
        shapes = list(zip(rows, row_bytes, strict=True))
        if palette > 1 or start_row or any(config[2:16]) or any(map(any, shapes[_TILES:])):
            raise Fault("general protection: palette, start row or reserved bytes")
        if any(row > _ROWS or size > _ROW_BYTES or (row == 0) != (size == 0) for row, size in shapes):
            raise Fault("general protection: shape of a tile")
        self._release()
        self._shapes, self._is_configured = shapes[:_TILES], True

    def _configuration(self) -> bytes:
        rows, row_bytes = zip(*self._shapes, *[(0, 0)] * _TILES, strict=True)
        return struct.pack("<B15x16H16B", self._is_configured, *row_bytes, *rows)

    def _shape(self, tile: int) -> tuple[int, int]:
        if not self._is_configured or tile >= _TILES or not self._shapes[tile][0]:
            raise Fault(f"invalid: tile {tile} is not configured")
        return self._shapes[tile]

    def _set(self, tile: int, values: Array) -> None:
        """Set a tile; what its shape leaves out is 0."""
        self._data[tile] = 0
        self._data[tile, : values.shape[0], : values.shape[1]] = values

    def _rows(self, operands: _Operands, to_write: bool) -> list[Array]:
        """Return the memory of each row of a tile."""
        rows, size = self._shape(operands.register)
        return [self._at(operands.address + row * operands.stride, size, to_write) for row in range(rows)]

    def _at(self, address: int, size: int, to_write: bool = False) -> Array:
        address &= (1 << 64) - 1
        found = self._memory(address, size, to_write)
        if found is None:
            raise Fault(f"{'write' if to_write else 'read'} of {size} bytes at {address:#x}, outside of operands")
        return found

    def _multiply(self, operands: _Operands, lhs_kind: str, rhs_kind: str) -> None:
        """Add products of bytes to 32-bit sums, four at a time: sum[m, n] += lhs[m, 4k + i] * rhs[k, 4n + i]."""
        (rows, size), lhs, rhs = map(self._shape, (operands.register, operands.other, operands.third))
        if len({operands.register, operands.other, operands.third}) < 3:
            raise Fault("invalid: a tile is two operands")
        if lhs[0] != rows or rhs != (lhs[1] // 4, size) or size % 4 or lhs[1] % 4:
            raise Fault(f"invalid: tiles of {rows} x {size}, {lhs[0]} x {lhs[1]} and {rhs[0]} x {rhs[1]} bytes")
        left = self._data[operands.other, :rows, : lhs[1]].view(f"{lhs_kind}1").astype(np.int64)
        right = self._data[operands.third, : rhs[0], :size].view(f"{rhs_kind}1").astype(np.int64)
        right = right.reshape(-1, size // 4, 4).transpose(0, 2, 1).reshape(lhs[1], size // 4)
        sums = self._data[operands.register, :rows, :size].view(np.int32) + left @ right
        self._set(operands.register, sums.astype(np.int32).view(np.uint8))


def _name(prefix: str, opcode: int, modrm: int) -> str | None:
    """Return an instruction's name, by prefix, opcode and form, or None."""
    is_register, low = modrm >= 0xC0, modrm & 7
    if opcode == 0x49 and is_register:
        return {("", 0xC0): "tilerelease"}.get((prefix, modrm)) or ("tilezero" if prefix == "F2" and low == 0 else None)
    if opcode == 0x49 and not modrm & 0x38:
        return {"": "ldtilecfg", "66": "sttilecfg"}.get(prefix)
    if opcode == 0x4B and not is_register and low == 4:
        return {"F2": "tileloadd", "66": "tileloaddt1", "F3": "tilestored"}.get(prefix)
    if opcode == 0x5E and is_register:
        return {"F2": "tdpbssd", "F3": "tdpbsud", "66": "tdpbusd", "": "tdpbuud"}[prefix]
    return None


def _operands(code: bytes, at: int, register: Callable[[str], int]) -> _Operands:
    modrm, sib = code[4], code[5]
    mode, low = modrm >> 6, modrm & 7
    extension = code[1] ^ 0xE0  # R, X and B are inverted
    address = stride = 0
    end = 5
    if mode != 3:
        base = low
        if low == 4:
            end, base = 6, sib & 7
            index = sib >> 3 & 7 | (extension & 0x40) >> 3
            stride = 0 if index == 4 else register(_REGISTERS[index]) << (sib >> 6)
        size = {0: 4 if base == 5 else 0, 1: 1, 2: 4}[mode]
        address = int.from_bytes(code[end : end + size], "little", signed=True)
        end += size
        if mode or base != 5:
            address += register(_REGISTERS[base | (extension & 0x20) >> 2])
        elif low == 5:
            address += at + end  # relative to the next instruction
    return _Operands(modrm >> 3 & 7, low, code[2] >> 3 & 15 ^ 15, address, stride, at + end)
