"""Text of kernels' functions, which LLVM parses: what llvmlite prints of them, in less time.

llvmlite formats each instruction from all that an instruction may have, such as metadata, and searches a free name for
each value. Kernels use few kinds of instructions in their simplest form, and do not name values. llvmlite prints the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from llvmlite import ir
from llvmlite.ir import instructions as kinds

__all__ = ["KernelFunction"]

Instruction: TypeAlias = Any
"""An instruction of llvmlite, which has no type annotations."""


class KernelFunction(ir.Function):  # type: ignore[misc]  # llvmlite is not typed
    """A function whose values have numbers as names."""

    def __init__(self, module: ir.Module, kind: Any, name: str) -> None:
        super().__init__(module, kind, name)
        self.scope = _Numbers()

    def descr_body(self, buf: list[str]) -> None:
        """Append the text of all blocks to `buf`, which llvmlite joins."""
        for block in self.blocks:
            buf.append(f"{block.name}:\n")
            for instruction in block.instructions:
                write = _WRITERS.get(type(instruction))
                text = None if write is None or instruction.metadata else write(instruction)
                buf.append(f"{instruction}\n" if text is None else f"{instruction.get_reference()} = {text}\n")


class _Numbers:
    """The names of a function's values and blocks."""

    def __init__(self) -> None:
        self._count = 0

    def register(self, _name: str, deduplicate: bool) -> str:
        """Return a new name, whatever name is wished."""
        assert deduplicate, "only names of functions matter"
        self._count += 1
        return f"v{self._count}"


def _list(values: Any) -> str:
    return ", ".join([f"{value.type} {value.get_reference()}" for value in values])


def _operation(instruction: Instruction) -> str:
    first, *others = instruction.operands
    flags = "".join([f" {flag}" for flag in instruction.flags])
    rest = "".join([f", {other.get_reference()}" for other in others])
    return f"{instruction.opname}{flags} {instruction.type} {first.get_reference()}{rest}"


def _address(instruction: Instruction) -> str | None:
    if instruction.inbounds:
        return None
    return f"getelementptr {instruction.source_etype}, {_list(instruction.operands)}"


def _load(instruction: Instruction) -> str:
    alignment = "" if instruction.align is None else f", align {instruction.align}"
    return f"load {instruction.type}, {_list(instruction.operands)}{alignment}"


def _cast(instruction: Instruction) -> str:
    return f"{instruction.opname} {_list(instruction.operands)} to {instruction.type}"


def _shuffle(instruction: Instruction) -> str:
    return f"shufflevector {_list(instruction.operands)}"


def _phi(instruction: Instruction) -> str:
    incoming = [f"[{value.get_reference()}, {block.get_reference()}]" for value, block in instruction.incomings]
    return f"phi {instruction.type} {', '.join(incoming)}"


def _call(instruction: Instruction) -> str | None:
    callee = instruction.callee
    special = (instruction.tail, instruction.cconv, instruction.attributes, instruction.fastmath)
    if any(special) or instruction.arg_attributes or not isinstance(callee, ir.Function):
        return None
    if isinstance(instruction.type, ir.VoidType):
        return None
    return f"call {instruction.type} {callee.get_reference()}({_list(instruction.args)})"


_WRITERS: Mapping[type[Any], Callable[[Instruction], str | None]] = {
    kinds.CallInstr: _call,
    kinds.CastInstr: _cast,
    kinds.GEPInstr: _address,
    kinds.Instruction: _operation,
    kinds.LoadInstr: _load,
    kinds.PhiInstr: _phi,
    kinds.ShuffleVector: _shuffle,
}
"""Kinds of instructions → a function that returns the text after the value's name, None for a form it does not know."""
