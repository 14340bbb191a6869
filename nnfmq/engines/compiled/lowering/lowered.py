"""What a lowering rule says of an operation: a kernel with its constants, several of them, or that nothing is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from nnfmq.engines.compiled.kernels.kernel import Kernel
from nnfmq.operations.signature import Shape

__all__ = ["Alias", "Chain", "Constant", "Lowered", "Rule", "Stage"]


Constant: TypeAlias = bytes | Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class Lowered:
    """A kernel and the constants that follow inputs and outputs in its table; `work` in nanoseconds, roughly.

    A constant that takes time to make is given as what makes it, which need not be asked where a cache has it.
    """

    kernel: Kernel
    constants: tuple[Constant, ...]
    work: int


@dataclass(frozen=True, slots=True)
class Stage:
    """One kernel of a chain. `inputs` count the operation's inputs first, then what the stages before have made.

    It makes an array of `dtype` and `shape`, and after it those of the operation's outputs that `outputs` count.
    """

    lowered: Lowered
    inputs: tuple[int, ...]
    dtype: np.dtype[Any]
    shape: Shape
    outputs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Chain:
    """Kernels one after the other, and a `last` one that makes the outputs still missing, of `inputs` as in a Stage."""

    stages: tuple[Stage, ...]
    last: Lowered
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Alias:
    """The output is the first input under another shape: nothing is computed."""


Rule: TypeAlias = Callable[..., "Lowered | Chain | Alias | None"]
