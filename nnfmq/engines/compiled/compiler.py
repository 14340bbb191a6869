"""Compiling the kernels of a program, in parts of about equal cost: the way without other processes.

Parts are what compile processes take one after the other (`service.compile_jobs`), what is counted as progress, and
modules of their own: nothing in one refers to another. Costs are estimated by family; as a process takes the next part
when it has finished one, the estimate need not be good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import TypeAlias

from nnfmq.engines.compiled.kernel_serialization import kernel_types
from nnfmq.engines.compiled.kernels.kernel import Kernel, name_of
from nnfmq.engines.compiled.objects import compile_kernels, host_target
from nnfmq.engines.compiled.target import Target
from nnfmq.engines.compiled.team import team_code
from nnfmq.hal.errors import InvalidArgument

__all__ = ["Compile", "Heard", "compile_here", "compiled_here", "cost", "distinct", "parts_of", "warm_up"]

Compile: TypeAlias = Callable[[Sequence[Kernel], Target], list[bytes]]
"""Returns object codes that have, together, a function for each kernel by its name."""

Heard: TypeAlias = Callable[[int, int], None]
"""Hears how many kernels are compiled, of how many; what it raises ends the compilation."""

_COSTS = {
    "Product": 3,
    "Depthwise": 2,
    "CellKernel": 3,
    "SequenceKernel": 3,
}  # in units of about 20 ms; all others take one
_PARTS_HERE = 8


def distinct(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Return the kernels, each once."""
    return list({name_of(kernel): kernel for kernel in kernels}.values())


def cost(kernels: Iterable[Kernel]) -> int:
    """Return about how long they take to compile, in units of 20 ms."""
    return sum(_COSTS.get(type(kernel).__name__, 1) for kernel in kernels)


def parts_of(kernels: Sequence[Kernel], count: int) -> list[list[Kernel]]:
    """Return different kernels in `count` parts of about equal cost, fewer where there are fewer kernels."""
    parts: list[list[Kernel]] = [[] for _ in range(min(count, len(kernels)))]
    for kernel in sorted(kernels, key=lambda kernel: -cost([kernel])):
        min(parts, key=cost).append(kernel)
    return parts


@cache
def warm_up() -> None:
    """Import and set up all that compiling takes, once: what is forked afterwards begins at once."""
    kernel_types()
    with suppress(InvalidArgument):  # no code for this machine: a preparation says so
        compile_kernels([], host_target())
        team_code()


def compiled_here(parts: Sequence[Sequence[Kernel]], target: Target, heard: Heard) -> list[bytes]:
    """Return the object code of each part, made by this thread."""
    total, codes = sum(map(len, parts)), []
    heard(0, total)
    for number, part in enumerate(parts, start=1):
        codes.append(compile_kernels(part, target))
        heard(sum(map(len, parts[:number])), total)
    return codes


def compile_here(kernels: Sequence[Kernel], target: Target) -> list[bytes]:
    """Compile on this thread, and tell nobody: a `Compile`."""
    return compiled_here(parts_of(distinct(kernels), _PARTS_HERE), target, lambda _done, _total: None)
