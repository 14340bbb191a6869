"""Text of kernels' functions: LLVM parses the same functions from it as from that of llvmlite's builder."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("llvmlite", exc_type=ImportError)

from llvmlite import binding as llvm
from llvmlite import ir

from nnfmq.engines.compiled import ir_text
from nnfmq.engines.compiled.ir_text import F16, F32, F64, I1, I8, I32, I64, POINTER, VOID, Builder, Module, vector

SCALARS = {
    I1: ir.IntType(1),
    I8: ir.IntType(8),
    I32: ir.IntType(32),
    I64: ir.IntType(64),
    F16: ir.HalfType(),
    F32: ir.FloatType(),
    F64: ir.DoubleType(),
    POINTER: ir.PointerType(),
    VOID: ir.VoidType(),
}
FOUR = {kind: vector(kind, 4) for kind in (I8, I32, I64, F32, F64)}
ARGUMENTS = [POINTER, I64, I64, FOUR[I32], FOUR[I32], FOUR[F32], FOUR[F32], I32, F64, I1]


def of_llvmlite(kind: Any) -> Any:
    if isinstance(kind, ir_text.VectorType):
        return ir.VectorType(of_llvmlite(kind.element), kind.count)
    return SCALARS[kind]


class Reference:
    """llvmlite's builder, with the arguments that `Builder` has where they differ."""

    def __init__(self, module: ir.Module, function: ir.Function) -> None:
        self._module = module
        self._builder = ir.IRBuilder(function.append_basic_block())

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._builder, name)
        if name in CASTS:
            return lambda value, kind: found(value, of_llvmlite(kind))
        return found

    def constant(self, kind: Any, value: Any) -> Any:
        return ir.Constant(of_llvmlite(kind), value)

    def undefined(self, kind: Any) -> Any:
        return ir.Constant(of_llvmlite(kind), ir.Undefined)

    def append_basic_block(self) -> Any:
        return self._builder.function.append_basic_block()

    def phi(self, kind: Any) -> Any:
        return self._builder.phi(of_llvmlite(kind))

    def alloca(self, kind: Any, count: int, align: int) -> Any:
        with self._builder.goto_entry_block():
            memory = self._builder.alloca(of_llvmlite(kind), size=count)
            memory.align = align
        return memory

    def gep(self, address: Any, offset: Any) -> Any:
        return self._builder.gep(address, [offset], source_etype=of_llvmlite(I8))

    def load(self, kind: Any, address: Any, align: int) -> Any:
        return self._builder.load(address, typ=of_llvmlite(kind), align=align)

    def call(self, name: str, result: Any, arguments: Any) -> Any:
        function = self._module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(of_llvmlite(result), [argument.type for argument in arguments])
            function = ir.Function(self._module, kind, name)
        return self._builder.call(function, arguments)


class Ours(Builder):
    """The builder, with what `Reference` has for the tests."""

    def __init__(self, module: Module, function: ir_text.Function) -> None:
        super().__init__(function)
        self._module = module
        self.append_basic_block = function.append_basic_block

    constant, undefined = staticmethod(ir_text.Constant), staticmethod(ir_text.undefined)

    def call(self, name: str, result: Any, arguments: Any) -> Any:
        self._module.declare(name, result, arguments)
        return super().call(name, result, arguments)


def parsed(text: object) -> str:
    """Return what LLVM reads, with values and blocks numbered in order of appearance, without the other names."""
    module = llvm.parse_assembly(str(text))
    module.verify()
    (function,) = (function for function in module.functions if not function.is_declaration)
    numbers: dict[str, str] = {}
    text = re.sub(r"\s*; preds = .*", "", str(function))
    text = re.sub(r'^("?)([\w.]+)\1:', r"%\1\2\1:", text, flags=re.MULTILINE)
    return re.sub(r'%("?)[\w.]+\1', lambda name: numbers.setdefault(name[0].replace('"', ""), f"%{len(numbers)}"), text)


def assert_same_function(emit: Callable[[Any, Any], object]) -> None:
    """Compare what LLVM reads in the text with what it reads in llvmlite's."""
    module, theirs = Module(), ir.Module("kernels")
    function = ir_text.Function(module, "kernel", ARGUMENTS)
    kind = ir.FunctionType(ir.VoidType(), list(map(of_llvmlite, ARGUMENTS)))
    reference = ir.Function(theirs, kind, "kernel")
    for builder, arguments in ((Ours(module, function), function.args), (Reference(theirs, reference), reference.args)):
        emit(builder, arguments)
        builder.ret_void()
    found = parsed(module)
    assert found == parsed(theirs)
    assert found.count("\n") > 3


INTEGERS = ["add", "sub", "mul", "udiv", "urem", "shl", "lshr", "ashr", "and_", "or_", "xor"]
CASTS = ["trunc", "zext", "sext", "fptrunc", "fpext", "fptosi", "sitofp", "uitofp", "ptrtoint", "bitcast"]


@pytest.mark.parametrize("name", [*INTEGERS, "fadd", "fsub", "fmul", "fdiv"])
def test_arithmetic(name: str) -> None:
    first = 5 if name.startswith("f") else 3
    assert_same_function(lambda b, args: getattr(b, name)(args[first], args[first + 1]))


def test_operations_of_one_value() -> None:
    def emit(b: Any, args: Any) -> None:
        for value in (args[1], args[3]):
            b.neg(value)
            b.not_(value)
        b.fneg(args[5])
        b.fneg(args[8])

    assert_same_function(emit)


def test_casts() -> None:
    def emit(b: Any, args: Any) -> None:
        pointer, long, _, ints, _, floats, _, int32, double, _ = args
        b.trunc(long, I32)
        b.trunc(ints, FOUR[I8])
        b.zext(ints, FOUR[I64])
        b.sext(int32, I64)
        b.fptrunc(double, F32)
        b.fpext(floats, FOUR[F64])
        b.fptosi(floats, FOUR[I32])
        b.sitofp(ints, FOUR[F32])
        b.uitofp(ints, FOUR[F32])
        b.ptrtoint(pointer, I64)
        b.bitcast(ints, FOUR[F32])
        b.bitcast(ints, FOUR[I32])

    assert_same_function(emit)


@pytest.mark.parametrize("comparison", ["<", "<=", ">", ">=", "==", "!="])
def test_comparisons(comparison: str) -> None:
    def emit(b: Any, args: Any) -> None:
        b.icmp_signed(comparison, args[1], args[2])
        b.select(b.icmp_unsigned(comparison, args[3], args[4]), args[5], args[6])
        b.fcmp_ordered(comparison, args[5], args[6])
        b.fcmp_unordered(comparison, args[8], args[8])

    assert_same_function(emit)


def test_comparisons_with_nan() -> None:
    def emit(b: Any, args: Any) -> None:
        b.fcmp_ordered("ord", args[5], args[6])
        b.fcmp_unordered("uno", args[8], args[8])

    assert_same_function(emit)


def test_constants() -> None:
    def emit(b: Any, args: Any) -> None:
        for kind in (I1, I8, I32, I64):
            b.select(args[9], b.constant(kind, 1), b.constant(kind, 0))
        for value in (0.1, -0.0, 1e-30, 65504.0, math.inf, -math.inf, math.nan):
            for kind in (F16, F32, F64):
                b.fadd(b.constant(kind, value), b.undefined(kind))
        for element, lanes in ((I32, [1, -2, 3, 4]), (I8, [-128, 127, 0, 1]), (F32, [0.1, -0.0, 2.0, math.inf])):
            b.select(args[9], b.constant(FOUR[element], lanes), b.constant(FOUR[element], None))

    assert_same_function(emit)


def test_vectors() -> None:
    def emit(b: Any, args: Any) -> None:
        lane = b.extract_element(args[5], b.constant(I32, 2))
        b.insert_element(b.undefined(FOUR[F32]), lane, b.constant(I32, 0))
        b.extract_element(args[3], args[1])
        b.shuffle_vector(args[5], args[6], b.constant(vector(I32, 8), [0, 4, 1, 5, 2, 6, 3, 7]))

    assert_same_function(emit)


def test_memory_and_calls() -> None:
    def emit(b: Any, args: Any) -> None:
        memory = b.alloca(FOUR[I32], 3, align=64)
        address = b.gep(args[0], args[1])
        b.store(b.load(FOUR[F32], address, align=1), args[0], align=16)
        b.store(args[3], memory, align=16)
        b.call("llvm.fma.v4f32", FOUR[F32], [args[5], args[6], args[5]])
        b.call("llvm.prefetch.p0", VOID, [address, *(b.constant(I32, value) for value in (0, 2, 1))])

    assert_same_function(emit)


def test_a_volatile_load_and_inline_assembly() -> None:
    module = Module()
    builder = Builder(ir_text.Function(module, "kernel", [POINTER]))
    builder.load(I64, ir_text.IrValue(POINTER, "%a0"), align=1, is_volatile=True)
    builder.define(POINTER, 'call ptr asm "", "=r,0" (ptr %a0)')
    builder.ret_void()
    assert "load volatile i64, ptr %0, align 1" in parsed(module)
    assert 'call ptr asm "", "=r,0"(ptr %0)' in parsed(module)


def test_branches() -> None:
    def emit(b: Any, args: Any) -> None:
        memory = b.alloca(I64, 1, align=64)
        before, body, after = b.block, b.append_basic_block(), b.append_basic_block()
        b.cbranch(b.icmp_signed("<", args[1], args[2]), body, after)
        b.position_at_end(body)
        index = b.phi(I64)
        following = b.add(index, b.constant(I64, 1))
        with b.if_then(args[9]):
            b.mul(index, index)
        with b.if_else(args[9]) as (then, other):
            with then:
                b.store(index, memory, align=8)
            with other:
                b.sub(index, args[1])
        index.add_incoming(args[1], before)
        index.add_incoming(following, b.block)
        b.cbranch(b.icmp_signed("<", following, args[2]), body, after)
        b.position_at_end(after)
        last = b.append_basic_block()
        with b.if_then(args[9]):
            b.branch(last)
        b.branch(last)
        b.position_at_end(last)

    assert_same_function(emit)
