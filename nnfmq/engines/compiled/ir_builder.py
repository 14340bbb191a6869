"""IR builder: emits one kernel as an LLVM function, with the memory, loop and vector operations that kernels need.

A kernel is `void kernel(ptr args, i64 begin, i64 end, ptr scratch)`: it computes the work items from `begin` to before
`end`. `args` is its argument array, the addresses of inputs, outputs and constants in that order; `scratch` is memory
of the calling thread. Offsets are in bytes, and loads and stores assume no alignment. Loops pass the values that they
change as loop-carried values, so that accumulators stay in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import numpy as np

from nnfmq.engines.compiled.ir_text import (
    F16,
    F32,
    F64,
    I1,
    I8,
    I16,
    I32,
    I64,
    POINTER,
    VOID,
    Builder,
    Constant,
    Function,
    Module,
    VectorType,
    integer,
    undefined,
    vector,
)
from nnfmq.engines.compiled.target import Target

__all__ = [
    "F16",
    "F32",
    "F64",
    "I1",
    "I8",
    "I16",
    "I32",
    "I64",
    "POINTER",
    "VOID",
    "Constant",
    "KernelBuilder",
    "Module",
    "Value",
    "VectorType",
    "for_each_vector",
    "integer",
    "load_params",
    "pack_params",
    "strided_offset",
    "unseen_lanes_mask",
    "vector",
    "vector_loop",
    "vector_width_for",
]

Value: TypeAlias = Any
"""A value, see `ir_text.IrValue`; in named tuples of parameters also the int of which it is made."""

Index: TypeAlias = "int | Value"
"""A 64-bit integer: a Python int is computed with while the kernel is built, a Value while it runs."""

Params = TypeVar("Params", bound=tuple[Any, ...])

_KERNEL = (POINTER, I64, I64, POINTER)
_STACK_ALIGNMENT = 64  # bytes of the longest vector
_CONSTANTS_KEPT = 1 << 14


# Kernels have few different constants.


@lru_cache(_CONSTANTS_KEPT)
def _integer(value: int) -> Value:
    return Constant(I64, value)


@lru_cache(_CONSTANTS_KEPT)
def _integers(element: Any, lanes: tuple[int, ...]) -> Value:
    return Constant(vector(element, len(lanes)), lanes)


class KernelBuilder:
    """Builds one kernel's function in a module. `ir` adds single instructions."""

    def __init__(self, module: Module, name: str, target: Target) -> None:
        self.target = target
        self.module = module
        self.function = Function(module, name, _KERNEL)
        self.args, self.begin, self.end, self.scratch = self.function.args
        self.ir = Builder(self.function)
        self._stack: dict[tuple[Any, int], Value] = {}

    # -- integers and vectors ------------------------------------------------------------------------------------------

    def i64(self, value: Index) -> Value:
        """Return an int as a constant of 64 bits, and any other value as it is."""
        return _integer(value) if isinstance(value, int) else value

    def add(self, first: Index, second: Index) -> Value:
        """Return the sum of two 64-bit integers. Constants are folded."""
        if isinstance(first, int) and isinstance(second, int):
            return first + second
        if second == 0 and isinstance(second, int):
            return first
        if first == 0 and isinstance(first, int):
            return second
        return self.ir.add(self.i64(first), self.i64(second))

    def mul(self, first: Index, second: Index) -> Value:
        """Return the product of two 64-bit integers. Constants are folded."""
        if isinstance(first, int) and isinstance(second, int):
            return first * second
        if second == 1 and isinstance(second, int):
            return first
        return self.ir.mul(self.i64(first), self.i64(second))

    def splat(self, element: Any, value: Any, lanes: int) -> Value:
        """Return a vector whose lanes are all the constant `value`."""
        if isinstance(value, int):  # a float is not equal to all that is compared as equal with it
            return _integers(element, (value,) * lanes)
        return Constant(vector(element, lanes), [value] * lanes)

    def broadcast(self, value: Value, lanes: int) -> Value:
        """Return a vector whose lanes are all a value that is known at run time."""
        kind = vector(value.type, lanes)
        single = self.ir.insert_element(undefined(kind), value, Constant(I32, 0))
        return self.ir.shuffle_vector(single, undefined(kind), self.splat(I32, 0, lanes))

    def shuffle(self, first: Value, second: Value, mask: Sequence[int]) -> Value:
        """Return the lanes that `mask` selects from `first` followed by `second`."""
        return self.ir.shuffle_vector(first, second, _integers(I32, tuple(mask)))

    def concat(self, first: Value, second: Value) -> Value:
        """Return one vector with the lanes of `first`, then those of `second`."""
        return self.shuffle(first, second, range(2 * first.type.count))

    def call(self, name: str, result: Any, *arguments: Value) -> Value:
        """Call a function by its full name, and return its result of type `result`."""
        self.module.declare(name, result, arguments)
        return self.ir.call(name, result, arguments)

    def intrinsic(self, name: str, *arguments: Value) -> Value:
        """Call an overloaded intrinsic, which takes and returns values of the first argument's type."""
        return self.call(f"{name}.{arguments[0].type.mangled}", arguments[0].type, *arguments)

    def clamp(self, value: Value, low: Value, high: Value) -> Value:
        """Return signed integers limited to the range from `low` to `high`."""
        return self.intrinsic("llvm.smin", self.intrinsic("llvm.smax", value, low), high)

    def horizontal_sums(self, values: Sequence[Value]) -> Value:
        """Return a vector whose first lanes are the sums over the lanes of each of `values`.

        A tree of pairwise additions: each round halves the lanes that hold partial sums of one value, and packs the
        halves of two vectors into one. An odd vector is paired with itself.
        """
        lanes, pending = values[0].type.count, list(values)
        while lanes > 1:
            pending += pending[-1:] * (len(pending) > 1 and len(pending) % 2)
            step = min(2, len(pending))
            pending = [self._add_halves(pending[n : n + step], lanes) for n in range(0, len(pending), step)]
            lanes //= 2
        while len(pending) > 1:
            pending += pending[-1:] * (len(pending) % 2)
            pending = [self.concat(*pair) for pair in zip(pending[::2], pending[1::2], strict=True)]
        return pending[0]

    def _add_halves(self, values: Sequence[Value], lanes: int) -> Value:
        """Return the partial sums of one vector or two, which have `lanes` for each value, in half as many lanes."""
        every = range(len(values) * values[0].type.count)
        low, high = ([n for n in every if (n % lanes < lanes // 2) is is_low] for is_low in (True, False))
        return self.ir.add(self.shuffle(values[0], values[-1], low), self.shuffle(values[0], values[-1], high))

    # -- memory --------------------------------------------------------------------------------------------------------

    def argument(self, index: int) -> Value:
        """Load the address at `index` of the argument array."""
        return self.ir.load(POINTER, self.at(self.args, 8 * index), align=8)

    def at(self, base: Value, offset: Index) -> Value:
        """Return the address `offset` bytes after `base`."""
        if isinstance(offset, int) and offset == 0:
            return base
        return self.ir.gep(base, self.i64(offset))

    def load(self, kind: Any, address: Value, offset: Index = 0) -> Value:
        """Load a value of type `kind` from an address of any alignment."""
        return self.ir.load(kind, self.at(address, offset), align=1)

    def load_volatile(self, kind: Any, address: Value, offset: Index = 0) -> Value:
        """Load a value with one instruction, which LLVM neither merges with other loads nor repeats.

        For what decides an address, in memory that another process may change. And for constants that are used several
        times when no register is free: LLVM would merge plain loads into one, and spill its result.
        """
        return self.ir.load(kind, self.at(address, offset), align=1, is_volatile=True)

    def launder(self, value: Value) -> Value:
        """Hide what an address or an integer is from the optimizer (empty inline assembly).

        LLVM then keeps one pointer for each row of a tile in a register, instead of deriving it from another row's in
        each iteration.
        """
        kind = value.type.text
        return self.ir.define(value.type, f'call {kind} asm "", "=r,0" ({value.typed})')

    def masked_load(self, kind: Any, address: Value, offset: Index, mask: Value) -> Value:
        """Load the lanes of a vector that `mask` selects. The others are 0, and their memory is not read."""
        name = f"llvm.masked.load.{kind.mangled}.p0"
        pointer, alignment = self.at(address, offset), Constant(I32, 1)
        return self.call(name, kind, pointer, alignment, mask, Constant(kind, None))

    def prefetch(self, address: Value) -> None:
        """Hint that the second-level cache will be read at `address`, which need not be mapped."""
        is_write, locality, is_data = Constant(I32, 0), Constant(I32, 2), Constant(I32, 1)
        self.call("llvm.prefetch.p0", VOID, address, is_write, locality, is_data)

    def store(self, value: Value, address: Value, offset: Index = 0) -> None:
        """Store a value at an address of any alignment."""
        self.ir.store(value, self.at(address, offset), align=1)

    def store_partial(self, value: Value, count: int, address: Value, offset: Index = 0) -> None:
        """Store the first `count` lanes of a vector, and write no byte after them.

        Emits one store for each bit of `count`: a full vector is one store.
        """
        pointer, element = self.at(address, offset), value.type.element
        done = 0
        while done < count:
            lanes = 1 << ((count - done).bit_length() - 1)
            part = value if lanes == value.type.count else self.shuffle(value, value, range(done, done + lanes))
            self.ir.store(part, self.at(pointer, done * size_of(element)), align=1)
            done += lanes

    def store_tile_row(self, vectors: Sequence[Value], address: Value, remainder: int, is_last: Value) -> None:
        """Store adjacent vectors; if `is_last` is set and `remainder` is not 0, only the first `remainder` lanes."""

        def store(width: int) -> None:
            done = 0
            for value in vectors:
                count = min(value.type.count, width - done)
                if count > 0:
                    self.store_partial(value, count, address, done * size_of(value.type.element))
                done += value.type.count

        full_width = sum(value.type.count for value in vectors)
        if not remainder:
            store(full_width)
            return
        with self.ir.if_else(is_last) as (last, other):
            with last:
                store(remainder)
            with other:
                store(full_width)

    def memcpy(self, target: Value, source: Value, count: Index) -> None:
        """Copy `count` bytes between memory regions that do not overlap."""
        self._memory_intrinsic("llvm.memcpy.p0.p0.i64", target, source, self.i64(count))

    def memset(self, target: Value, byte: int, count: Index) -> None:
        """Set `count` bytes to `byte`."""
        self._memory_intrinsic("llvm.memset.p0.i64", target, Constant(I8, byte), self.i64(count))

    def _memory_intrinsic(self, name: str, *arguments: Value) -> None:
        is_volatile = Constant(I1, 0)
        self.call(name, VOID, *arguments, is_volatile)

    def on_stack(self, kind: Any, count: int) -> Value:
        """Return `count` elements of stack memory. Requests of one type and count share the memory."""
        key = (kind, count)
        if key not in self._stack:
            self._stack[key] = self.ir.alloca(kind, count, _STACK_ALIGNMENT)
        return self._stack[key]

    # -- loops ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def loop(self, begin: Index, end: Index, step: int = 1) -> Iterator[Value]:
        """Emit a counted loop around the `with` block's instructions, and yield its index.

        The body is skipped if `begin` is not below `end`.
        """
        body, after, index = self._open_loop(begin, end)
        yield index
        self._close_loop(body, after, index, end, step)

    def _open_loop(self, begin: Index, end: Index) -> tuple[Value, Value, Value]:
        body, after = self.function.append_basic_block(), self.function.append_basic_block()
        begin, before = self.i64(begin), self.ir.block
        self.ir.cbranch(self.ir.icmp_signed("<", begin, self.i64(end)), body, after)
        self.ir.position_at_end(body)
        index = self.ir.phi(I64)
        index.add_incoming(begin, before)
        return body, after, index

    def _close_loop(self, body: Value, after: Value, index: Value, end: Index, step: int) -> None:
        next_index = self.ir.add(index, self.i64(step))
        index.add_incoming(next_index, self.ir.block)
        self.ir.cbranch(self.ir.icmp_signed("<", next_index, self.i64(end)), body, after)
        self.ir.position_at_end(after)

    def for_loop(
        self,
        count: Index,
        iter_args: Sequence[Value],
        body: Callable[[Value, Sequence[Value]], Sequence[Value]],
        may_be_empty: bool = False,
    ) -> Sequence[Value]:
        """Emit a loop of `count` iterations with loop-carried values, and return their last values.

        `body` is called once, with the index and the values, and returns those of the next iteration. `count` is at
        least 1, or at least 0 if `may_be_empty`.
        """
        if isinstance(count, int) and count == 1:
            return body(self.i64(0), iter_args)
        block, after = self.function.append_basic_block(), self.function.append_basic_block()
        before = self.ir.block
        if may_be_empty:
            self.ir.cbranch(self.ir.icmp_signed("<", self.i64(0), self.i64(count)), block, after)
        else:
            self.ir.branch(block)
        self.ir.position_at_end(block)
        index, carried = self.ir.phi(I64), [self.ir.phi(value.type) for value in iter_args]
        results = body(index, carried)
        next_index = self.ir.add(index, self.i64(1))
        index.add_incoming(self.i64(0), before)
        index.add_incoming(next_index, self.ir.block)
        for phi, first, result in zip(carried, iter_args, results, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(result, self.ir.block)
        last_block = self.ir.block
        self.ir.cbranch(self.ir.icmp_signed("<", next_index, self.i64(count)), block, after)
        self.ir.position_at_end(after)
        if not may_be_empty:
            return results
        merged = [self.ir.phi(value.type) for value in iter_args]
        for phi, first, result in zip(merged, iter_args, results, strict=True):
            phi.add_incoming(first, before)  # the loop was skipped
            phi.add_incoming(result, last_block)
        return merged

    @contextmanager
    def for_each_tile_row(
        self, values: Sequence[Value], width: int, stride: Index = 1
    ) -> Iterator[tuple[Value, list[Value]]]:
        """Emit a loop over the rows of a tile of `values`, `width` vectors each; yield row index · `stride` and a row.

        The values go through the stack, so that the loop's body is emitted once, not once for each row.
        """
        if len(values) == width:
            yield self.i64(0), list(values)
            return
        kind = values[0].type
        size = kind.count * size_of(kind.element)
        memory = self.on_stack(kind, len(values))
        for number, value in enumerate(values):
            self.ir.store(value, self.at(memory, number * size), align=size)
        with self.for_each_stored_row(memory, kind, len(values) // width, width, stride) as (_, offset, row):
            yield offset, row

    @contextmanager
    def for_each_stored_row(
        self, memory: Value, kind: Any, rows: int, width: int, stride: Index
    ) -> Iterator[tuple[Value, Value, list[Value]]]:
        """Emit a loop over the rows of a tile on the stack; yield row index, row index · `stride` and the row."""
        size = kind.count * size_of(kind.element)
        with self.loop(0, rows) as row:
            first = self.at(memory, self.mul(row, width * size))
            vectors = [self.ir.load(kind, self.at(first, v * size), align=size) for v in range(width)]
            yield row, self.mul(row, stride), vectors

    def either(
        self, condition: Value, when_true: Callable[[], Sequence[Value]], when_false: Callable[[], Sequence[Value]]
    ) -> Sequence[Value]:
        """Emit two branches, and return the values of the one that is taken."""
        found = []
        with self.ir.if_else(condition) as paths:
            for path, compute in zip(paths, (when_true, when_false), strict=True):
                with path:
                    found.append((compute(), self.ir.block))
        (values, _), _ = found
        merged = [self.ir.phi(value.type) for value in values]
        for results, block in found:
            for phi, result in zip(merged, results, strict=True):
                phi.add_incoming(result, block)
        return merged

    def return_void(self) -> None:
        """End the function."""
        self.ir.ret_void()


def size_of(kind: Any) -> int:
    """Return the size of an element type in bytes."""
    return int(kind.width) // 8


# -- parameters: integers that kernels load, which differ between operations that share code ---------------------------


def pack_params(*params: tuple[int, ...]) -> bytes:
    """Return named tuples of integers as a constant, one after the other, 64 bits each."""
    return np.array([number for group in params for number in group], np.int64).tobytes()


def load_params(kb: KernelBuilder, address: Value, kind: type[Params], first: int = 0) -> Params:
    """Load a named tuple of type `kind`, which begins `first` integers after `address`."""
    count = len(kind._fields)  # type: ignore[attr-defined]  # named tuples have it
    return kind(*(kb.load(I64, address, 8 * (first + n)) for n in range(count)))


# -- rows of any length, in whole vectors ------------------------------------------------------------------------------


def vector_width_for(length: int, max_lanes: int) -> int:
    """Return the largest power of two that is at most `length` (1 or more) and `max_lanes`, itself a power of two."""
    return min(max_lanes, 1 << (length.bit_length() - 1))


def for_each_vector(kb: KernelBuilder, count: int, lanes: int, body: Callable[[Index, int], None]) -> None:
    """Call `body` with (first element, elements) of the vectors that cover `count` elements.

    Whole vectors, in a loop if there are several, then one that is moved back to end at the last element; fewer
    elements than a vector are covered by powers of two. `body` must be idempotent.
    """
    if count >= lanes:
        aligned_count = count - count % lanes
        if aligned_count == lanes:
            body(0, lanes)
        else:
            with kb.loop(0, aligned_count, lanes) as offset:
                body(offset, lanes)
        if count % lanes:
            body(count - lanes, lanes)
        return
    done = 0
    while done < count:
        part = 1 << ((count - done).bit_length() - 1)
        body(done, part)
        done += part


@contextmanager
def vector_loop(
    kb: KernelBuilder, length: int, lanes: int, begin: int | Value = 0, end: int | Value | None = None
) -> Iterator[Value]:
    """Emit a loop over `length` elements in vectors, with an overlapping tail; yield each vector's first element.

    The last vector is moved back to end at `length`, so no scalar remainder is needed and no element after the row is
    touched. `length` is at least `lanes`. The elements that the last vector shares with the one before it are computed
    twice: the body must be idempotent. `begin` is a multiple of `lanes`, `end` one too or `length`.
    """
    if length == lanes:
        yield kb.i64(0)
        return
    with kb.loop(begin, length if end is None else end, lanes) as index:
        yield index if length % lanes == 0 else kb.intrinsic("llvm.smin", index, kb.i64(length - lanes))


def unseen_lanes_mask(kb: KernelBuilder, length: int, lanes: int, index: Value, unmoved: Value) -> Value | None:
    """Return the mask of the lanes that no earlier vector of a `vector_loop` has had, or None if none overlap.

    For bodies that are not idempotent. `index` is the index that the loop yielded, `unmoved` the one without
    moving the last vector back.
    """
    if length % lanes == 0:
        return None
    lane_indexes = vector(I32, lanes)(list(range(lanes)))
    seen = kb.broadcast(kb.ir.trunc(kb.ir.sub(unmoved, index), I32), lanes)
    return kb.ir.icmp_signed(">=", lane_indexes, seen)


def strided_offset(kb: KernelBuilder, index: Value, extents: tuple[int, ...], strides: tuple[int, ...]) -> Value | int:
    """Return Σ coordinate · stride for a linear index into `extents`, the last of which varies fastest."""
    total: Value | int = 0
    for axis in reversed(range(len(extents))):
        coordinate = index
        if axis:
            coordinate = kb.ir.urem(index, kb.i64(extents[axis]))
            index = kb.ir.udiv(index, kb.i64(extents[axis]))
        if strides[axis]:
            total = kb.add(total, kb.mul(coordinate, strides[axis]))
    return total
