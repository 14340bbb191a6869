"""JIT compilation: kernels to LLVM IR and object code.

The kernels of a program are compiled in shards, separate modules that do not refer to each other. A driver's
compile processes take one shard after the other (`service.compile_jobs`), and progress is counted in them. Shards cost
about the same by an estimate for each kernel class. The estimate may be rough, because a process takes the next shard
when it has finished one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Protocol, TypeAlias

from llvmlite import binding as llvm
from llvmlite import ir

from nnfmq.engines.compiled.ir_builder import KernelBuilder
from nnfmq.engines.compiled.target import Target, chosen_target

__all__ = [
    "Compile",
    "Kernel",
    "ProgressCallback",
    "compile_in_process",
    "compile_ir",
    "compile_kernels",
    "compile_shards",
    "host_target",
    "shard_kernels",
    "symbol_name",
    "total_compile_cost",
    "unique_kernels",
]

_SHARDS_IN_PROCESS = 8


class Kernel(Protocol):
    """A specialized loop nest: a frozen dataclass whose repr decides the code.

    Kernels with equal reprs share one function; fields with `repr=False` reach the code as run-time parameters. The
    argument array holds the addresses of inputs, outputs and constants, in that order.
    """

    @property
    def work_items(self) -> int:
        """Number of independent parts of the work: they may run on any thread, in any order, with equal results."""
        ...

    @property
    def compile_cost(self) -> int:
        """Estimated time to compile it, in units of about 20 ms."""
        ...

    def scratch_bytes(self, target: Target) -> int:
        """Return the scratch memory that each thread needs, in bytes."""
        ...

    def emit(self, kb: KernelBuilder) -> None:
        """Emit the whole function."""
        ...


Compile: TypeAlias = Callable[[Sequence[Kernel], Target], list[bytes]]
"""Returns object code, in one part or more, that together defines each kernel's function."""

ProgressCallback: TypeAlias = Callable[[int, int], None]
"""Receives the number of compiled kernels and of all kernels. An exception that it raises ends the compilation."""


def symbol_name(kernel: Kernel) -> str:
    """Return the name of a kernel's function, from its class and a hash of its repr."""
    text = repr(kernel)
    return f"{type(kernel).__name__}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


# -- the host and LLVM's code generator --------------------------------------------------------------------------------


@cache
def _initialize_llvm() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@cache
def host_target() -> Target:
    """Return the target that this process generates code for.

    Raises:
        InvalidArgument: If there is none for this machine, or `$NNFMQ_TARGET` names one that it cannot run.
    """
    return chosen_target(llvm.get_process_triple(), llvm.get_host_cpu_features())


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


def compile_kernels(kernels: Iterable[Kernel], target: Target) -> bytes:
    """Return object code with a function for each of the kernels, which differ."""
    module = ir.Module("kernels")
    for kernel in kernels:
        kernel.emit(KernelBuilder(module, symbol_name(kernel), target))
    return compile_ir(str(module), target)


# -- shards ------------------------------------------------------------------------------------------------------------


def unique_kernels(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Return one kernel of each symbol name."""
    return list({symbol_name(kernel): kernel for kernel in kernels}.values())


def total_compile_cost(kernels: Iterable[Kernel]) -> int:
    """Return the estimated time to compile kernels, in units of about 20 ms."""
    return sum(kernel.compile_cost for kernel in kernels)


def shard_kernels(kernels: Sequence[Kernel], count: int) -> list[list[Kernel]]:
    """Return different kernels in at most `count` shards of about equal cost, none of them empty."""
    shards: list[list[Kernel]] = [[] for _ in range(min(count, len(kernels)))]
    for kernel in sorted(kernels, key=lambda kernel: -kernel.compile_cost):
        min(shards, key=total_compile_cost).append(kernel)
    return shards


def compile_shards(shards: Sequence[Sequence[Kernel]], target: Target, on_progress: ProgressCallback) -> list[bytes]:
    """Return the object code of each shard. Compiles on this thread, and calls `on_progress` after each shard."""
    total, object_code = sum(map(len, shards)), []
    on_progress(0, total)
    for number, shard in enumerate(shards, start=1):
        object_code.append(compile_kernels(shard, target))
        on_progress(sum(map(len, shards[:number])), total)
    return object_code


def compile_in_process(kernels: Sequence[Kernel], target: Target) -> list[bytes]:
    """Return the object code of kernels, compiled on this thread without progress: a `Compile`."""
    shards = shard_kernels(unique_kernels(kernels), _SHARDS_IN_PROCESS)
    return compile_shards(shards, target, lambda _done, _total: None)
