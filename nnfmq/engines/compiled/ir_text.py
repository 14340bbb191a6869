"""LLVM IR as text, which LLVM parses: types, constants, and a builder that writes the instructions of a function.

It has those of LLVM's types and instructions that kernels use, under the names of llvmlite's builder. That one makes an
object of each instruction, formats it later from all that an instruction may have, such as metadata, and searches a
free name for each value, which takes four times as long. LLVM checks types when it parses the text.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, TypeAlias

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
    "Builder",
    "Constant",
    "Function",
    "IrValue",
    "Module",
    "Type",
    "VectorType",
    "integer",
    "undefined",
    "vector",
]


# ----------------------------------------------------------------------------------------------------------------------
# Types and constants.


class Type:
    """A type. There is one object for each, so types are compared by identity.

    Attributes:
        text: As LLVM writes it.
        width: Bits of a number; 0 if it is none.
        mangled: As it is written in names of overloaded intrinsics.
    """

    __slots__ = ("mangled", "text", "width")

    def __init__(self, text: str, width: int = 0, mangled: str = "") -> None:
        self.text = text
        self.width = width
        self.mangled = mangled

    def __call__(self, value: Any) -> Constant:
        """Return a constant, see `Constant`."""
        return Constant(self, value)


class _IntegerType(Type):
    """An integer."""

    __slots__ = ()

    def format(self, value: Any) -> str:
        """Return a constant as LLVM writes it."""
        return str(int(value))


class _FloatType(Type):
    """A float, whose constants are written as the bits of a float64: the text of LLVM for each of them."""

    __slots__ = ()

    def format(self, value: Any) -> str:
        """Return a constant as LLVM writes it."""
        layout = _FLOAT_FORMATS[self.width]
        (rounded,) = struct.unpack(layout, struct.pack(layout, value))
        (bits,) = struct.unpack("<Q", struct.pack("<d", rounded))
        return f"{bits:#018x}"


_FLOAT_FORMATS = {16: "<e", 32: "<f", 64: "<d"}


class VectorType(Type):
    """A vector of `count` integers or floats of type `element`."""

    __slots__ = ("count", "element")

    def __init__(self, element: _IntegerType | _FloatType, count: int) -> None:
        super().__init__(f"<{count} x {element.text}>", 0, f"v{count}{element.mangled}")
        self.element = element
        self.count = count

    def format(self, value: Any) -> str:
        """Return the constants of all lanes as LLVM writes them."""
        return f"<{', '.join([f'{self.element.text} {self.element.format(lane)}' for lane in value])}>"


@cache
def integer(bits: int) -> Type:
    """Return the type of integers of so many bits."""
    return _IntegerType(f"i{bits}", bits, f"i{bits}")


@cache
def vector(element: Any, lanes: int) -> VectorType:
    """Return the vector type of `lanes` elements."""
    return VectorType(element, lanes)


I1, I8, I16, I32, I64 = map(integer, (1, 8, 16, 32, 64))
F16, F32, F64 = _FloatType("half", 16, "f16"), _FloatType("float", 32, "f32"), _FloatType("double", 64, "f64")
POINTER, VOID = Type("ptr"), Type("void")


class IrValue:
    """An operand of instructions.

    Attributes:
        type: Its type.
        text: As LLVM writes it.
        typed: The same after its type.
    """

    __slots__ = ("text", "type", "typed")

    def __init__(self, kind: Any, text: str) -> None:
        self.type = kind
        self.text = text
        self.typed = f"{kind.text} {text}"


class Constant(IrValue):
    """A constant of a type: a number, the numbers of a vector's lanes, or None for zeros."""

    __slots__ = ()

    def __init__(self, kind: Any, value: Any) -> None:
        super().__init__(kind, "zeroinitializer" if value is None else kind.format(value))


def undefined(kind: Type) -> IrValue:
    """Return a constant without a specified value."""
    return IrValue(kind, "undef")


# ----------------------------------------------------------------------------------------------------------------------
# Functions.


_Line: TypeAlias = "str | Phi"


class Block:
    """A basic block: its instructions, in order, which end with a terminator."""

    __slots__ = ("is_terminated", "label", "lines", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.label = f"label %{name}"
        self.lines: list[_Line] = []
        self.is_terminated = False


class Phi(IrValue):
    """A value that depends on the block from which control has come."""

    __slots__ = ("_incoming",)

    def __init__(self, kind: Any, text: str) -> None:
        super().__init__(kind, text)
        self._incoming: list[str] = []

    def add_incoming(self, value: IrValue, block: Block) -> None:
        """Say which value it has after a block."""
        self._incoming.append(f"[{value.text}, %{block.name}]")

    def line(self) -> str:
        """Return the instruction."""
        return f"{self.text} = phi {self.type.text} {', '.join(self._incoming)}"


class Module:
    """Functions that are compiled together. `str` of it is the text for LLVM."""

    def __init__(self) -> None:
        self._functions: list[Function] = []
        self._declarations: dict[str, str] = {}

    def add(self, function: Function) -> None:
        """Add a function."""
        self._functions.append(function)

    def declare(self, name: str, result: Type, arguments: Sequence[IrValue]) -> None:
        """Declare a function that is defined elsewhere, by its first call. Idempotent."""
        if name not in self._declarations:
            kinds = ", ".join([argument.type.text for argument in arguments])
            self._declarations[name] = f"declare {result.text} @{name}({kinds})"

    def __str__(self) -> str:
        return "\n".join([*self._declarations.values(), *map(str, self._functions), ""])


class Function:
    """A function without a result, in a module. `str` of it is its text."""

    def __init__(self, module: Module, name: str, arguments: Sequence[Type]) -> None:
        self.args = [IrValue(kind, f"%a{number}") for number, kind in enumerate(arguments)]
        self.blocks: list[Block] = []
        self.stack: list[str] = []  # instructions at the begin that allocate memory
        self._name = name
        module.add(self)

    def append_basic_block(self) -> Block:
        """Append a block."""
        self.blocks.append(Block(f"b{len(self.blocks)}"))
        return self.blocks[-1]

    def __str__(self) -> str:
        found = [f"define void @{self._name}({', '.join([argument.typed for argument in self.args])}) {{"]
        for number, block in enumerate(self.blocks):
            found += [f"{block.name}:", *(self.stack if number == 0 else ())]
            found += [line if isinstance(line, str) else line.line() for line in block.lines]
        return "\n".join([*found, "}"])


_COMPARISONS = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}


def _binary(name: str) -> Callable[[Builder, IrValue, IrValue], IrValue]:
    def add(self: Builder, first: IrValue, second: IrValue) -> IrValue:
        return self._pure(first.type, f"{name} {first.typed}, {second.text}")

    add.__doc__ = f"Add the instruction {name}, and return its result."
    return add


def _cast(name: str) -> Callable[[Builder, IrValue, Type], IrValue]:
    def add(self: Builder, value: IrValue, kind: Type) -> IrValue:
        return value if value.type is kind else self._pure(kind, f"{name} {value.typed} to {kind.text}")

    add.__doc__ = f"Add the instruction {name}, unless the value has the type, and return its result."
    return add


class Builder:
    """Adds instructions at the end of a block of a function.

    An instruction that a block has already, and that has the same result there, is not added again: that makes a
    quarter of the text of some kernels, which LLVM would have to read.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        self._count = 0
        self.position_at_end(function.append_basic_block())

    @property
    def block(self) -> Block:
        """The block to which instructions are added."""
        return self._block

    def position_at_end(self, block: Block) -> None:
        """Add the next instructions to a block."""
        self._block = block
        self._add = block.lines.append
        self._known: dict[str, IrValue] = {}  # results in this block
        self._loaded: dict[str, IrValue] = {}  # since memory was last written

    def define(self, kind: Type, text: str) -> IrValue:
        """Add an instruction by its text, and return its result."""
        self._count += 1
        value = IrValue(kind, f"%v{self._count}")
        self._add(f"{value.text} = {text}")
        return value

    def _pure(self, kind: Type, text: str) -> IrValue:
        """Return the result of an instruction that depends on its operands only; add it if the block lacks it."""
        found = self._known.get(text)
        if found is None:
            found = self._known[text] = self.define(kind, text)
        return found

    def _read(self, kind: Type, text: str) -> IrValue:
        """Likewise of an instruction that also depends on memory."""
        found = self._loaded.get(text)
        if found is None:
            found = self._loaded[text] = self.define(kind, text)
        return found

    # -- arithmetic ----------------------------------------------------------------------------------------------------

    add, sub, mul, udiv, urem = map(_binary, ("add", "sub", "mul", "udiv", "urem"))
    shl, lshr, ashr, and_, or_, xor = map(_binary, ("shl", "lshr", "ashr", "and", "or", "xor"))
    fadd, fsub, fmul, fdiv = map(_binary, ("fadd", "fsub", "fmul", "fdiv"))
    trunc, zext, sext, fptrunc, fpext = map(_cast, ("trunc", "zext", "sext", "fptrunc", "fpext"))
    fptosi, sitofp, uitofp, ptrtoint, bitcast = map(_cast, ("fptosi", "sitofp", "uitofp", "ptrtoint", "bitcast"))

    def neg(self, value: IrValue) -> IrValue:
        """Return 0 minus integers."""
        return self._pure(value.type, f"sub {value.type.text} zeroinitializer, {value.text}")

    def not_(self, value: IrValue) -> IrValue:
        """Return integers with all bits inverted."""
        ones = -1 if not isinstance(value.type, VectorType) else [-1] * value.type.count
        return self.xor(value, Constant(value.type, ones))

    def fneg(self, value: IrValue) -> IrValue:
        """Return floats with the other sign."""
        return self._pure(value.type, f"fneg {value.typed}")

    def icmp_signed(self, comparison: str, first: IrValue, second: IrValue) -> IrValue:
        """Compare signed integers: <, <=, >, >=, == or !=."""
        return self._compare("icmp ", "s" if comparison[0] in "<>" else "", comparison, first, second)

    def icmp_unsigned(self, comparison: str, first: IrValue, second: IrValue) -> IrValue:
        """Compare unsigned integers, likewise."""
        return self._compare("icmp ", "u" if comparison[0] in "<>" else "", comparison, first, second)

    def fcmp_ordered(self, comparison: str, first: IrValue, second: IrValue) -> IrValue:
        """Compare floats, likewise; false if one is NaN."""
        return self._compare("fcmp ", "o", comparison, first, second)

    def fcmp_unordered(self, comparison: str, first: IrValue, second: IrValue) -> IrValue:
        """Compare floats, likewise; true if one is NaN. `uno`: only then."""
        return self._compare("fcmp ", "u", comparison, first, second)

    def _compare(self, name: str, prefix: str, comparison: str, first: IrValue, second: IrValue) -> IrValue:
        kind = vector(I1, first.type.count) if isinstance(first.type, VectorType) else I1
        condition = comparison if comparison not in _COMPARISONS else prefix + _COMPARISONS[comparison]
        return self._pure(kind, f"{name}{condition} {first.typed}, {second.text}")

    def select(self, condition: IrValue, when_true: IrValue, when_false: IrValue) -> IrValue:
        """Return one value where the condition is true, the other one elsewhere."""
        return self._pure(when_true.type, f"select {condition.typed}, {when_true.typed}, {when_false.typed}")

    # -- vectors -------------------------------------------------------------------------------------------------------

    def extract_element(self, values: IrValue, lane: IrValue) -> IrValue:
        """Return a lane of a vector."""
        return self._pure(values.type.element, f"extractelement {values.typed}, {lane.typed}")

    def insert_element(self, values: IrValue, value: IrValue, lane: IrValue) -> IrValue:
        """Return a vector with another value in a lane."""
        return self._pure(values.type, f"insertelement {values.typed}, {value.typed}, {lane.typed}")

    def shuffle_vector(self, first: IrValue, second: IrValue, mask: IrValue) -> IrValue:
        """Return the lanes that a constant selects from `first` followed by `second`."""
        kind = vector(first.type.element, mask.type.count)
        return self._pure(kind, f"shufflevector {first.typed}, {second.typed}, {mask.typed}")

    # -- memory --------------------------------------------------------------------------------------------------------

    def alloca(self, kind: Type, count: int, align: int) -> IrValue:
        """Return stack memory for `count` values, which lasts until the function returns."""
        self._count += 1
        memory = IrValue(POINTER, f"%v{self._count}")
        self._function.stack.append(f"{memory.text} = alloca {kind.text}, i32 {count}, align {align}")
        return memory

    def gep(self, address: IrValue, offset: IrValue) -> IrValue:
        """Return the address `offset` bytes after another one."""
        return self._pure(POINTER, f"getelementptr i8, {address.typed}, {offset.typed}")

    def load(self, kind: Type, address: IrValue, align: int, is_volatile: bool = False) -> IrValue:
        """Load a value from an address that is a multiple of `align`."""
        if is_volatile:
            return self.define(kind, f"load volatile {kind.text}, {address.typed}, align {align}")
        return self._read(kind, f"load {kind.text}, {address.typed}, align {align}")

    def store(self, value: IrValue, address: IrValue, align: int) -> None:
        """Store a value at an address that is a multiple of `align`."""
        self._add(f"store {value.typed}, {address.typed}, align {align}")
        self._loaded.clear()

    # -- calls and branches --------------------------------------------------------------------------------------------

    def call(self, name: str, result: Type, arguments: Sequence[IrValue]) -> IrValue:
        """Call a function that the module declares, and return its result."""
        text = f"call {result.text} @{name}({', '.join([argument.typed for argument in arguments])})"
        if result is not VOID:
            return self._read(result, text) if name.startswith("llvm.") else self.define(result, text)
        self._add(text)
        self._loaded.clear()
        return _NOTHING

    def phi(self, kind: Type) -> Phi:
        """Return a value that depends on the block before this one, at the begin of this one."""
        self._count += 1
        value = Phi(kind, f"%v{self._count}")
        self._add(value)
        return value

    def branch(self, target: Block) -> None:
        """End the block with a jump."""
        self._end(f"br {target.label}")

    def cbranch(self, condition: IrValue, when_true: Block, when_false: Block) -> None:
        """End the block with a jump to one of two."""
        self._end(f"br {condition.typed}, {when_true.label}, {when_false.label}")

    def ret_void(self) -> None:
        """End the block with the return of the function."""
        self._end("ret void")

    def _end(self, text: str) -> None:
        self._add(text)
        self._block.is_terminated = True

    @contextmanager
    def if_then(self, condition: IrValue) -> Iterator[None]:
        """Execute the `with` block's instructions only if a condition is true."""
        then, after = self._append_block(), self._append_block()
        self.cbranch(condition, then, after)
        with self._branch(then, after):
            yield
        self.position_at_end(after)

    @contextmanager
    def if_else(
        self, condition: IrValue
    ) -> Iterator[tuple[AbstractContextManager[None], AbstractContextManager[None]]]:
        """Yield two context managers: the instructions in the first one are executed if a condition is true."""
        then, other, after = self._append_block(), self._append_block(), self._append_block()
        self.cbranch(condition, then, other)
        yield self._branch(then, after), self._branch(other, after)
        self.position_at_end(after)

    def _append_block(self) -> Block:
        return self._function.append_basic_block()

    @contextmanager
    def _branch(self, block: Block, after: Block) -> Iterator[None]:
        self.position_at_end(block)
        yield
        if not self._block.is_terminated:
            self.branch(after)


_NOTHING = IrValue(VOID, "")
