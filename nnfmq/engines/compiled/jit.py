"""JIT compilation: what a kernel is, and the shards in which a program's kernels are compiled.

The kernels of a program are compiled in shards, separate modules that do not refer to each other. A driver's
compile processes take one shard after the other (`service.compile_jobs`), and progress is counted in them. Shards cost
about the same by an estimate for each kernel class. The estimate may be rough, because a process takes the next shard
when it has finished one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from nnfmq.engines.compiled.target import Target

if TYPE_CHECKING:
    from nnfmq.engines.compiled.ir_builder import KernelBuilder

__all__ = [
    "Compile",
    "Kernel",
    "shard_kernels",
    "symbol_name",
    "total_compile_cost",
    "unique_kernels",
]


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


Compile: TypeAlias = Callable[[Sequence[Kernel], Target], list[bytes]]
"""Returns object code, in one part or more, that together defines each kernel's function."""


def symbol_name(kernel: Kernel) -> str:
    """Return the name of a kernel's function, from its class and a hash of its repr."""
    import hashlib  # it loads OpenSSL, which a supervisor does without

    text = repr(kernel)
    return f"{type(kernel).__name__}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


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
