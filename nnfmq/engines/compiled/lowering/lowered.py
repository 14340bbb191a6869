"""What a lowering rule says of an operation: a kernel with its constants, or that nothing has to be done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from nnfmq.engines.compiled.kernels.kernel import Kernel

__all__ = ["Alias", "Lowered", "Rule"]


@dataclass(frozen=True, slots=True)
class Lowered:
    """A kernel and the constants that follow inputs and outputs in its table; `work` in nanoseconds, roughly."""

    kernel: Kernel
    constants: tuple[bytes, ...]
    work: int


@dataclass(frozen=True, slots=True)
class Alias:
    """The output is the first input under another shape: nothing is computed."""


Rule: TypeAlias = Callable[..., "Lowered | Alias | None"]
