"""Lowering: the rules that choose kernels for an operation, a module for each family. This module has their results.

A rule is called as a plan of `operations` is: with the DATA and WEIGHT tensors in order (None if omitted), `output` (a
tuple if the operation has several) and the attributes by name; and with `target`. It returns

- a `KernelLaunch`, whose argument array holds the DATA arrays that are present, then the outputs, then its constants;
- a `KernelSequence` of several launches;
- a `ViewOp`, if the output has the input's elements under another shape;
- None, if no kernel computes the operation. The interpreter's step is used then.

Images are NHWC. The model is valid, and its operation's constraints hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from nnfmq.engines.compiled.jit import Kernel
from nnfmq.operations.signature import Shape

__all__ = ["Constant", "Intermediate", "KernelLaunch", "KernelSequence", "LoweringRule", "ViewOp"]

Constant: TypeAlias = bytes | Callable[[], bytes]
"""A constant's bytes, or a function that packs them. The function is not called if a cache has the constants."""


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """A kernel, its constants, and its estimated single-thread time in nanoseconds."""

    kernel: Kernel
    constants: tuple[Constant, ...]
    estimated_ns: int


@dataclass(frozen=True, slots=True)
class Intermediate:
    """A launch of a sequence, and the intermediate that it writes, of `dtype` and `shape`.

    `inputs` number the operation's inputs first, then the intermediates of earlier launches. The launch also writes the
    operation's outputs that `outputs` number, after the intermediate in its argument array.
    """

    launch: KernelLaunch
    inputs: tuple[int, ...]
    dtype: np.dtype[Any]
    shape: Shape
    outputs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class KernelSequence:
    """Launches in order. `last` reads `inputs` (numbered as in `Intermediate`) and writes all other outputs."""

    intermediates: tuple[Intermediate, ...]
    last: KernelLaunch
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ViewOp:
    """The output is the first input under another shape: nothing is computed."""


LoweringRule: TypeAlias = Callable[..., "KernelLaunch | KernelSequence | ViewOp | None"]
