"""Code generation: kernels to LLVM IR to object code. The only module that imports LLVM, which costs 40 MiB of memory.

Compile processes import it. Another process does so only to compile without them: nothing else needs LLVM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from llvmlite import binding as llvm

from nnfmq.engines.compiled.ir_builder import KernelBuilder, Module
from nnfmq.engines.compiled.kernels import Kernel, symbol_name
from nnfmq.engines.compiled.target import Target

__all__ = ["compile_ir", "compile_kernels", "create_target_machine", "ir_of", "object_code", "parsed_ir"]


@cache
def _initialize_llvm() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@cache
def _target_machine(target: Target) -> llvm.TargetMachine:
    _initialize_llvm()
    is_tuned = "avx2" in target.features  # to this CPU
    cpu, features = (llvm.get_host_cpu_name(), llvm.get_host_cpu_features()) if is_tuned else ("", ())
    return create_target_machine(target, cpu, features)


def create_target_machine(target: Target, cpu: str, cpu_features: Iterable[str]) -> llvm.TargetMachine:
    """Return LLVM's code generator for `target`, tuned to `cpu`, without those of its features that `target` lacks.

    Its level of optimization is 1: at 2 code takes a tenth longer to generate, and kernels are no faster.
    """
    triple, flags = llvm.Target.from_triple(target.triple), target.feature_flags(cpu_features)
    return triple.create_target_machine(cpu=cpu, features=flags, opt=1, reloc="pic", codemodel="small")


def ir_of(kernels: Sequence[Kernel], target: Target) -> str:
    """Return the text of an LLVM IR module with a function for each of the kernels, which differ."""
    module = Module()
    for kernel in kernels:
        kernel.emit(KernelBuilder(module, symbol_name(kernel), target))
    return str(module)


def parsed_ir(text: str, target: Target) -> llvm.ModuleRef:
    """Return the LLVM IR module that a text describes, verified."""
    parsed = llvm.parse_assembly(text)
    parsed.triple = target.triple
    parsed.data_layout = str(_target_machine(target).target_data)
    parsed.verify()
    return parsed


def object_code(module: llvm.ModuleRef, target: Target) -> bytes:
    """Return the object code of an LLVM IR module."""
    code: bytes = _target_machine(target).emit_object(module)
    return code


def compile_ir(text: str, target: Target) -> bytes:
    """Return the object code of the LLVM IR module that a text describes."""
    return object_code(parsed_ir(text, target), target)


def compile_kernels(kernels: Sequence[Kernel], target: Target) -> bytes:
    """Return object code with a function for each of the kernels, which differ."""
    return compile_ir(ir_of(kernels, target), target)
