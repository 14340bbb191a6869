"""Kernels: specialized loop nests that emit LLVM IR. This module says what a kernel is; the others have one kind each.

It imports neither LLVM nor a kernel, so that a plan can name kernels without either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from nnfmq.base.digests import sha256
from nnfmq.engines.compiled.target import Target

if TYPE_CHECKING:
    from nnfmq.engines.compiled.ir_builder import KernelBuilder

__all__ = ["Kernel", "symbol_name"]


class Kernel(Protocol):
    """Base of a specialized loop nest: a frozen dataclass whose repr decides the code.

    Kernels with equal reprs share one function; fields with `repr=False` reach the code as run-time parameters. The
    argument array holds the addresses of inputs, outputs and constants, in that order.
    """

    __slots__ = ()
    compile_cost: int = 1
    """Estimated time to compile it, in units of about 20 ms."""

    @property
    def work_items(self) -> int:
        """Number of independent parts of the work: they may run on any thread, in any order, with equal results."""
        ...

    def scratch_bytes(self, target: Target) -> int:
        """Return the scratch memory that each thread needs, in bytes; none by default."""
        return 0

    def emit(self, kb: KernelBuilder) -> None:
        """Emit the whole function."""
        ...


def symbol_name(kernel: Kernel) -> str:
    """Return the name of a kernel's function, from its class and a hash of its repr."""
    return f"{type(kernel).__name__}_{sha256(repr(kernel).encode()).hex()[:16]}"
