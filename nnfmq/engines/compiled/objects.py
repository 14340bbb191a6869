"""From kernels to machine code: modules, object code, addresses."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from llvmlite import binding as llvm
from llvmlite import ir

from nnfmq.engines.compiled.emission import Emitter
from nnfmq.engines.compiled.kernels.kernel import Kernel, name_of
from nnfmq.engines.compiled.target import Target, chosen_target

__all__ = ["Linker", "compile_kernels", "host_target", "object_of_assembly"]


@cache
def _initialized() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@cache
def host_target() -> Target:
    """Return the target that this process generates code for. Raises InvalidArgument."""
    return chosen_target(llvm.get_process_triple(), llvm.get_host_cpu_features())


def _machine(target: Target) -> llvm.TargetMachine:
    _initialized()
    tuned = "avx2" in target.features  # to this processor
    return _machine_of(target, llvm.get_host_cpu_name() if tuned else "", llvm.get_host_cpu_features() if tuned else ())


def _machine_of(target: Target, processor: str, features: Iterable[str]) -> llvm.TargetMachine:
    triple, flags = llvm.Target.from_triple(target.triple), target.flags(features)
    return triple.create_target_machine(cpu=processor, features=flags, opt=2, reloc="pic", codemodel="small")


def object_of_assembly(text: str, target: Target) -> bytes:
    """Return the object code of a module in LLVM's assembly."""
    machine = _machine(target)
    parsed = llvm.parse_assembly(text)
    parsed.triple = target.triple
    parsed.data_layout = str(machine.target_data)
    parsed.verify()
    code: bytes = machine.emit_object(parsed)
    return code


def compile_kernels(kernels: Iterable[Kernel], target: Target) -> bytes:
    """Return object code with a function for each of different kernels, by its name."""
    module = ir.Module("kernels")
    for kernel in kernels:
        kernel.emit(Emitter(module, name_of(kernel), target))
    return object_of_assembly(str(module), target)


class Linker:
    """Object codes, linked into this process as long as this lives."""

    def __init__(self, codes: Iterable[bytes], target: Target) -> None:
        module = llvm.parse_assembly("")
        self._engine = llvm.create_mcjit_compiler(module, _machine(target))
        for code in codes:
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        """Return where a function lies."""
        return int(self._engine.get_function_address(name))
