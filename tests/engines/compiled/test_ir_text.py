"""Text of kernels' functions: LLVM parses the same functions from it as from llvmlite's own text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("llvmlite", exc_type=ImportError)

from llvmlite import binding as llvm
from llvmlite import ir

from nnfmq import example_path, load
from nnfmq.engines.compiled.ir_builder import F32, I1, I8, I32, I64, POINTER, KernelBuilder, vector
from nnfmq.engines.compiled.ir_text import KernelFunction
from nnfmq.engines.compiled.kernel_compilation import Meanwhile, unique_kernels
from nnfmq.engines.compiled.kernels import Kernel
from nnfmq.engines.compiled.partition import prepare
from nnfmq.engines.compiled.target import Target, host_target


class _Enough(Exception):
    """The kernels are known: nothing is compiled."""


def kernels_of(path: Any) -> list[Kernel]:
    found: list[Kernel] = []

    def keep(kernels: Sequence[Kernel], _target: Target, _meanwhile: Meanwhile) -> list[bytes]:
        found.extend(unique_kernels(kernels))
        raise _Enough

    with pytest.raises(_Enough):
        prepare(load(path).model, compile=keep)
    return found


def assert_same_function(emit: Callable[[KernelBuilder], object]) -> None:
    """Compare what LLVM reads in the text with what it reads in llvmlite's."""
    module = ir.Module("kernels")
    kb = KernelBuilder(module, "kernel", host_target())
    emit(kb)
    found = llvm.parse_assembly(str(module))
    found.verify()
    with patch.object(KernelFunction, "descr_body", ir.Function.descr_body):
        expected = llvm.parse_assembly(str(module))
    assert str(found) == str(expected)


@pytest.mark.parametrize("name", ["digits.tflite", "digits_quant.tflite"])
def test_llvm_reads_the_same_kernels_of_a_model(name: str) -> None:
    for kernel in kernels_of(example_path(name)):
        assert_same_function(kernel.emit)


def test_llvm_reads_the_same_instructions_in_all_their_forms() -> None:
    """Those in forms that kernels rarely have are written by llvmlite."""

    def emit(kb: KernelBuilder) -> None:
        lanes = vector(F32, 4)
        value = kb.load(lanes, kb.args, 16)
        kb.load_volatile(lanes, kb.args, 32)
        kb.ir.load(kb.args, typ=I64)
        kb.ir.gep(kb.args, [kb.i64(4)], inbounds=True, source_etype=I8)
        kb.ir.fadd(value, value, flags=["nnan", "contract"])
        kb.ir.add(kb.begin, kb.end, flags=["nsw"])
        kb.ir.fneg(value)
        kb.ir.call(ir.Function(kb.module, ir.FunctionType(lanes, [lanes]), "f"), [value], fastmath=("fast",))
        kb.ir.call(ir.Function(kb.module, ir.FunctionType(I64, [POINTER]), "g"), [kb.args], tail="tail")
        kb.launder(kb.args)
        kb.prefetch(kb.args)
        kb.ir.insert_element(value, ir.Constant(F32, 1.5), ir.Constant(I32, 1))
        with kb.loop(kb.begin, kb.end) as index, kb.ir.if_then(kb.ir.icmp_signed("<", index, kb.i64(3))):
            kb.store_partial(kb.broadcast(kb.load(F32, kb.args, index), 4), 3, kb.args)
        kb.ir.select(kb.ir.trunc(kb.begin, I1), kb.args, kb.scratch)
        marked = kb.ir.load(kb.args, typ=I64)
        marked.set_metadata("nontemporal", kb.module.add_metadata([ir.Constant(I32, 1)]))
        kb.return_void()

    assert_same_function(emit)


def test_values_of_a_function_have_different_names() -> None:
    kb = KernelBuilder(ir.Module("kernels"), "kernel", host_target())
    names = {kb.ir.add(kb.begin, kb.end, name="same").name for _ in range(3)}
    assert len(names) == 3 and not names & {argument.name for argument in kb.function.args}
