"""Code generation: kernels to LLVM IR to object code. The only module that imports LLVM, which costs 40 MiB of memory.

Compile processes import it. Another process does so only to compile without them: nothing else needs LLVM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from llvmlite import binding as llvm
from llvmlite import ir

from nnfmq.engines.compiled.ir_builder import KernelBuilder
from nnfmq.engines.compiled.jit import Kernel, symbol_name
from nnfmq.engines.compiled.kernels.launch_loops import LaunchLoops
from nnfmq.engines.compiled.target import Target

__all__ = ["compile_ir", "compile_kernels", "create_target_machine"]


@cache
def _initialize_llvm() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def _target_machine(target: Target) -> llvm.TargetMachine:
    _initialize_llvm()
    is_tuned = "avx2" in target.features  # to this CPU
    cpu, features = (llvm.get_host_cpu_name(), llvm.get_host_cpu_features()) if is_tuned else ("", ())
    return create_target_machine(target, cpu, features)


def create_target_machine(target: Target, cpu: str, cpu_features: Iterable[str]) -> llvm.TargetMachine:
    """Return LLVM's code generator for `target`, tuned to `cpu`, without those of its features that `target` lacks."""
    triple, flags = llvm.Target.from_triple(target.triple), target.feature_flags(cpu_features)
    return triple.create_target_machine(cpu=cpu, features=flags, opt=2, reloc="pic", codemodel="small")


def compile_ir(text: str, target: Target) -> bytes:
    """Return the object code of an LLVM IR module."""
    machine = _target_machine(target)
    parsed = llvm.parse_assembly(text)
    parsed.triple = target.triple
    parsed.data_layout = str(machine.target_data)
    parsed.verify()
    code: bytes = machine.emit_object(parsed)
    return code


def compile_kernels(kernels: Sequence[Kernel], target: Target) -> bytes:
    """Return object code with a function for each of the kernels, which differ.

    That of the thread pool is kept: every worker asks for it, and compile processes are forks of one that has it.
    """
    if len(kernels) == 1 and isinstance(kernels[0], LaunchLoops):
        return _compiled_launch_loops(kernels[0], target)
    return _compile_together(kernels, target)


@cache
def _compiled_launch_loops(kernel: LaunchLoops, target: Target) -> bytes:
    return _compile_together([kernel], target)


def _compile_together(kernels: Sequence[Kernel], target: Target) -> bytes:
    module = ir.Module("kernels")
    module_ir: list[str] = []
    for kernel in kernels:
        builder = KernelBuilder(module, symbol_name(kernel), target)
        kernel.emit(builder)
        module_ir += builder.module_ir
    return compile_ir("\n".join([str(module), *module_ir]), target)
