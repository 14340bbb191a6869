"""Emission: LLVM's instruction builder with the few forms that kernels are written in.

A kernel is a function of a table of addresses: `void kernel(ptr table, i64 begin, i64 end, ptr scratch)` computes the
units of work from `begin` to `end`. Addresses are bytes; vectors are loaded and stored at any alignment. Loops whose
values change carry them explicitly, so that sums stay in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from llvmlite import ir

from nnfmq.engines.compiled.target import Target

__all__ = ["F32", "F64", "I1", "I8", "I16", "I32", "I64", "POINTER", "Emitter", "Value", "vector"]

Value: TypeAlias = Any  # llvmlite is not typed
Index: TypeAlias = "int | Value"

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()
POINTER = ir.PointerType()
_KERNEL = ir.FunctionType(ir.VoidType(), [POINTER, I64, I64, POINTER])


def vector(element: Any, lanes: int) -> Any:
    """Return the type of `lanes` elements."""
    return ir.VectorType(element, lanes)


class Emitter:
    """Writes one kernel into a module."""

    def __init__(self, module: ir.Module, name: str, target: Target) -> None:
        self.target = target
        self.module = module
        self.function = ir.Function(module, _KERNEL, name)
        self.table, self.begin, self.end, self.scratch = self.function.args
        self.b = ir.IRBuilder(self.function.append_basic_block("entry"))
        self._stack: dict[tuple[str, int], Value] = {}

    # -- numbers ------------------------------------------------------------------------------------------------------

    def i64(self, value: Index) -> Value:
        """Return a constant, or `value` itself where it is one already."""
        return ir.Constant(I64, value) if isinstance(value, int) else value

    def add(self, first: Index, second: Index) -> Value:
        """Return the sum of two 64-bit numbers; what is known is added here."""
        if isinstance(first, int) and isinstance(second, int):
            return first + second
        if second == 0 and isinstance(second, int):
            return first
        if first == 0 and isinstance(first, int):
            return second
        return self.b.add(self.i64(first), self.i64(second))

    def mul(self, first: Index, second: Index) -> Value:
        """Return the product of two 64-bit numbers."""
        if isinstance(first, int) and isinstance(second, int):
            return first * second
        if second == 1 and isinstance(second, int):
            return first
        return self.b.mul(self.i64(first), self.i64(second))

    def splat(self, element: Any, value: Any, lanes: int) -> Value:
        """Return a vector of one constant."""
        return ir.Constant(vector(element, lanes), [value] * lanes)

    def broadcast(self, value: Value, lanes: int) -> Value:
        """Return a vector of one value that is known at run time."""
        kind = vector(value.type, lanes)
        single = self.b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
        return self.b.shuffle_vector(single, ir.Constant(kind, ir.Undefined), self.splat(I32, 0, lanes))

    def shuffle(self, first: Value, second: Value, order: Sequence[int]) -> Value:
        """Return the elements of `first` and then `second` at the places in `order`."""
        return self.b.shuffle_vector(first, second, ir.Constant(vector(I32, len(order)), list(order)))

    def call(self, name: str, result: Any, *arguments: Value) -> Value:
        """Call one of LLVM's intrinsics, by its full name."""
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = self.module.globals.get(name) or ir.Function(self.module, kind, name)
        return self.b.call(function, arguments)

    def intrinsic(self, name: str, *arguments: Value) -> Value:
        """Call an intrinsic that is made for each type, and returns the type of its first argument."""
        return self.call(f"{name}.{_mangled(arguments[0].type)}", arguments[0].type, *arguments)

    def clamp(self, value: Value, low: Value, high: Value) -> Value:
        """Return whole numbers held between two others."""
        return self.intrinsic("llvm.smin", self.intrinsic("llvm.smax", value, low), high)

    # -- memory -------------------------------------------------------------------------------------------------------

    def argument(self, number: int) -> Value:
        """Return the address at place `number` of the table."""
        return self.b.load(self.at(self.table, 8 * number), typ=POINTER)

    def at(self, base: Value, offset: Index) -> Value:
        """Return the address `offset` bytes after `base`."""
        if isinstance(offset, int) and offset == 0:
            return base
        return self.b.gep(base, [self.i64(offset)], source_etype=I8)

    def load(self, kind: Any, address: Value, offset: Index = 0) -> Value:
        """Return what lies at an address."""
        return self.b.load(self.at(address, offset), typ=kind, align=1)

    def load_again(self, kind: Any, address: Value, offset: Index = 0) -> Value:
        """Return what lies at an address, loaded at this very place: not taken from a register that held it before.

        For constants that are used several times while no register is free: an instruction takes them from memory.
        """
        place = self.at(address, offset)
        found = _LoadAgain(self.b.block, place, "", typ=kind)
        found.align = 1
        self.b._insert(found)
        return found

    def opaque(self, address: Value) -> Value:
        """Return `address` as something of which nothing is known.

        Addresses in a loop then stay as they were written, in registers of their own; otherwise one would be made of
        the other in each round, which takes instructions.
        """
        return self.b.asm(ir.FunctionType(POINTER, [POINTER]), "", "=r,0", [address], side_effect=False)

    def load_some(self, kind: Any, address: Value, offset: Index, mask: Value) -> Value:
        """Return the elements of a vector for which `mask` is set, and 0 for the others, which are not read."""
        name = f"llvm.masked.load.{_mangled(kind)}.p0"
        place, alignment = self.at(address, offset), ir.Constant(I32, 1)
        return self.call(name, kind, place, alignment, mask, ir.Constant(kind, None))

    def store(self, value: Value, address: Value, offset: Index = 0) -> None:
        """Put a value at an address."""
        self.b.store(value, self.at(address, offset), align=1)

    def store_first(self, value: Value, count: int, address: Value, offset: Index = 0) -> None:
        """Put the first `count` elements of a vector at an address, and touch nothing behind them."""
        place, element = self.at(address, offset), value.type.element
        done = 0
        while done < count:
            part = 1 << ((count - done).bit_length() - 1)
            piece = value if part == value.type.count else self.shuffle(value, value, range(done, done + part))
            self.b.store(piece, self.at(place, done * size_of(element)), align=1)
            done += part

    def copy(self, target: Value, source: Value, count: Index) -> None:
        """Copy `count` bytes between memories that do not overlap; nothing beside them is touched."""
        self._block("llvm.memcpy.p0.p0.i64", target, source, self.i64(count))

    def fill(self, target: Value, byte: int, count: Index) -> None:
        """Put `count` times the same byte to an address."""
        self._block("llvm.memset.p0.i64", target, ir.Constant(I8, byte), self.i64(count))

    def _block(self, name: str, *arguments: Value) -> None:
        self.call(name, ir.VoidType(), *arguments, ir.Constant(I1, 0))

    def store_panel(self, vectors: Sequence[Value], place: Value, rest: int, is_last: Value) -> None:
        """Put vectors to an address, one after the other; where `is_last` only `rest` elements, if that is not 0."""

        def store(width: int) -> None:
            done = 0
            for value in vectors:
                count = min(value.type.count, width - done)
                if count > 0:
                    self.store_first(value, count, place, done * size_of(value.type.element))
                done += value.type.count

        every = sum(value.type.count for value in vectors)
        if not rest:
            store(every)
            return
        with self.b.if_else(is_last) as (last, other):
            with last:
                store(rest)
            with other:
                store(every)

    @contextmanager
    def rows_of(self, values: Sequence[Value], width: int, pitch: Index = 1) -> Iterator[tuple[Value, list[Value]]]:
        """Emit a loop around the block's instructions over rows of `width` of the values: `pitch` times its number, and
        the row."""
        if len(values) == width:
            yield self.i64(0), list(values)
            return
        kind = values[0].type
        size = kind.count * size_of(kind.element)
        memory = self._on_stack(kind, len(values))
        for number, value in enumerate(values):
            self.b.store(value, self.at(memory, number * size), align=size)
        entered, end = self.b.block, len(values) // width
        body, after, row = self._open(0, end)
        offset = self.b.phi(I64)
        offset.add_incoming(self.i64(0), entered)
        first = self.at(memory, self.mul(row, width * size))
        yield offset, [self.b.load(self.at(first, v * size), typ=kind, align=size) for v in range(width)]
        offset.add_incoming(self.add(offset, pitch), self.b.block)
        self._close(body, after, row, end, 1)

    def _on_stack(self, kind: Any, count: int) -> Value:
        """Return memory that lives as long as the kernel runs; the same for all that ask for as much."""
        key = (str(kind), count)
        if key not in self._stack:
            with self.b.goto_entry_block():
                self._stack[key] = self.b.alloca(kind, size=count)
                self._stack[key].align = 64
        return self._stack[key]

    # -- loops --------------------------------------------------------------------------------------------------------

    @contextmanager
    def loop(self, begin: Index, end: Index, step: int = 1) -> Iterator[Value]:
        """Emit a loop around the block's instructions; the index is known to it. An empty range runs it not once."""
        body, after, index = self._open(begin, end)
        yield index
        self._close(body, after, index, end, step)

    def _open(self, begin: Index, end: Index) -> tuple[Value, Value, Value]:
        body, after = (self.function.append_basic_block(name) for name in ("body", "after"))
        begin, entered = self.i64(begin), self.b.block
        self.b.cbranch(self.b.icmp_signed("<", begin, self.i64(end)), body, after)
        self.b.position_at_end(body)
        index = self.b.phi(I64)
        index.add_incoming(begin, entered)
        return body, after, index

    def _close(self, body: Value, after: Value, index: Value, end: Index, step: int) -> None:
        following = self.b.add(index, self.i64(step))
        index.add_incoming(following, self.b.block)
        self.b.cbranch(self.b.icmp_signed("<", following, self.i64(end)), body, after)
        self.b.position_at_end(after)

    def carry(
        self,
        count: Index,
        values: Sequence[Value],
        step: Callable[[Value, Sequence[Value]], Sequence[Value]],
        or_none: bool = False,
    ) -> Sequence[Value]:
        """Emit a loop of `count` rounds (at least 1, or 0 if `or_none`) over `values`, and return them after the last.

        `step` is called once with the index and the values, and returns the next ones.
        """
        if isinstance(count, int) and count == 1:
            return step(self.i64(0), values)
        body, after = (self.function.append_basic_block(name) for name in ("carried", "after"))
        entered = self.b.block
        if or_none:
            self.b.cbranch(self.b.icmp_signed("<", self.i64(0), self.i64(count)), body, after)
        else:
            self.b.branch(body)
        self.b.position_at_end(body)
        index, carried = self.b.phi(I64), [self.b.phi(value.type) for value in values]
        results = step(index, carried)
        following = self.b.add(index, self.i64(1))
        index.add_incoming(self.i64(0), entered)
        index.add_incoming(following, self.b.block)
        for phi, first, result in zip(carried, values, results, strict=True):
            phi.add_incoming(first, entered)
            phi.add_incoming(result, self.b.block)
        left = self.b.block
        self.b.cbranch(self.b.icmp_signed("<", following, self.i64(count)), body, after)
        self.b.position_at_end(after)
        return (
            [self._either(entered, *pair, left) for pair in zip(values, results, strict=True)] if or_none else results
        )

    def _either(self, entered: Value, first: Value, last: Value, left: Value) -> Value:
        """Return what a loop carried, where it may have been passed by."""
        phi = self.b.phi(first.type)
        phi.add_incoming(first, entered)
        phi.add_incoming(last, left)
        return phi

    def sums_across(self, values: Sequence[Value]) -> Value:
        """Return a vector that begins with the sum of the elements of each of `values`.

        Halves of two vectors, parts of two sums, are added: one vector has both sums then, in half as many parts each.
        """
        parts, pending = values[0].type.count, list(values)
        while parts > 1:
            pending += pending[-1:] * (len(pending) > 1 and len(pending) % 2)
            step = min(2, len(pending))
            pending = [self._halved(pending[n : n + step], parts) for n in range(0, len(pending), step)]
            parts //= 2
        while len(pending) > 1:
            pending += pending[-1:] * (len(pending) % 2)
            pending = [self.joined(*pair) for pair in zip(pending[::2], pending[1::2], strict=True)]
        return pending[0]

    def joined(self, first: Value, second: Value) -> Value:
        """Return two vectors, one after the other, as one."""
        return self.shuffle(first, second, range(2 * first.type.count))

    def _halved(self, values: Sequence[Value], parts: int) -> Value:
        """Return a vector with the sums of one vector, or two, in half as many parts each."""
        places = range(len(values) * values[0].type.count)
        low, high = ([n for n in places if (n % parts < parts // 2) is wanted] for wanted in (True, False))
        return self.b.add(self.shuffle(values[0], values[-1], low), self.shuffle(values[0], values[-1], high))

    def finish(self) -> None:
        """End the kernel."""
        self.b.ret_void()


class _LoadAgain(ir.instructions.LoadInstr):  # type: ignore[misc]  # llvmlite is not typed
    """A volatile load, of which llvmlite's builder has none."""

    def descr(self, buf: list[str]) -> None:
        super().descr(buf)
        buf[-1] = buf[-1].replace("load ", "load volatile ", 1)


def size_of(kind: Any) -> int:
    """Return the bytes of an element."""
    return 4 if kind == F32 else 8 if kind == F64 else int(kind.width) // 8


def _mangled(kind: Any) -> str:
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{_mangled(kind.element)}"
    return {F32: "f32", F64: "f64"}.get(kind) or f"i{kind.width}"
