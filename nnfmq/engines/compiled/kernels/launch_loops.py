"""The thread pool's functions as a kernel, so that compile processes can compile them, which know only kernels."""

from __future__ import annotations

from dataclasses import dataclass
from string import Template

from nnfmq.engines.compiled.ir_builder import KernelBuilder
from nnfmq.engines.compiled.target import Target

__all__ = ["LaunchLoops"]

_MACHINES = {  # spin-loop hint: intrinsic, parameter and argument; number of futex(2)
    "x86_64": ("@llvm.x86.sse2.pause", "", "", 202),
    "aarch64": ("@llvm.aarch64.hint", "i32", "i32 1", 98),
}


@dataclass(frozen=True, slots=True)
class LaunchLoops:
    """The functions `run_launches`, `worker_loop` and `shut_down` for a machine, as `uname -m` names it.

    `thread_pool` describes them and the parameters. They are not called as a kernel, which only names them. It is
    compiled alone: other kernels may declare the same intrinsics.
    """

    machine: str
    chunks_per_thread: int
    spins_before_wait: int
    parallel_wake: int

    work_items = 1
    compile_cost = 1

    def scratch_bytes(self, target: Target) -> int:
        """Return 0: no scratch is used."""
        return 0

    def module_ir(self) -> str:
        """Return the functions as LLVM IR."""
        pause, parameter, argument, futex = _MACHINES[self.machine]
        from importlib import resources

        text = resources.files("nnfmq.engines.compiled").joinpath("thread_pool.ll").read_text("utf-8")
        return Template(text).substitute(
            PAUSE_DECLARATION=f"{pause}({parameter})",
            PAUSE=f"{pause}({argument})",
            FUTEX=futex,
            CHUNKS_PER_THREAD=self.chunks_per_thread,
            SPINS_BEFORE_WAIT=self.spins_before_wait,
            PARALLEL_WAKE=self.parallel_wake,
        )

    def emit(self, kb: KernelBuilder) -> None:
        """Add the functions to the module."""
        kb.module_ir.append(self.module_ir())
        kb.return_void()
