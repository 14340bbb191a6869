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

from collections.abc import Callable, Mapping
from dataclasses import replace as replace_fields
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.kernels import Kernel
from nnfmq.engines.compiled.target import Target
from nnfmq.engines.program import StepFunction
from nnfmq.hal.types import OperationType
from nnfmq.operations.declaration import Shape, Tensor

__all__ = [
    "Constant",
    "Intermediate",
    "KernelLaunch",
    "KernelSequence",
    "LoweredOp",
    "LoweringRule",
    "RuleCall",
    "ViewOp",
    "as_intermediates",
]

Constant: TypeAlias = bytes | Callable[[], bytes]
"""A constant's bytes, or a function that packs them. The function is not called if a cache has the constants."""


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """A kernel, its constants, and its estimated single-thread time in nanoseconds.

    If it has `errors`, the kernel's last output is an int32 for each work item and each of them; one that is not 0 is
    that error.
    """

    kernel: Kernel
    constants: tuple[Constant, ...]
    estimated_ns: int
    errors: tuple[str, ...] = ()


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


def as_intermediates(
    lowered: KernelLaunch | KernelSequence, source: int, first: int, dtype: np.dtype[Any], shape: Shape
) -> list[Intermediate]:
    """Return the launches of an operation on the value `source` as a part of another operation's sequence.

    The first of them writes value `first`, the last one a value of `dtype` and `shape`, which is the operation's only
    result.
    """
    if isinstance(lowered, KernelLaunch):
        return [Intermediate(lowered, (source,), dtype, shape)]

    def renumbered(inputs: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(first + number - 1 if number else source for number in inputs)

    parts = [replace_fields(one, inputs=renumbered(one.inputs)) for one in lowered.intermediates]
    return [*parts, Intermediate(lowered.last, renumbered(lowered.inputs), dtype, shape)]


@dataclass(frozen=True, slots=True)
class ViewOp:
    """The output is the first input under another shape: nothing is computed."""


LoweringRule: TypeAlias = Callable[..., "KernelLaunch | KernelSequence | ViewOp | None"]


# ----------------------------------------------------------------------------------------------------------------------
# A lowered operation of a model: its kernels, the operands that they read and write, and the call of its rule.
#
# `fusion` calls a rule again with other arguments to merge operations. `partition` makes the launches.


class RuleCall(Struct, frozen=True):
    """The arguments of a lowering rule: the DATA and WEIGHT tensors in order, and the attributes. Images are NHWC.

    `code` is None for several elementwise operations.
    """

    code: OperationType | None
    rule: LoweringRule
    tensors: tuple[Tensor | None, ...]
    outputs: tuple[Tensor, ...]
    attributes: Mapping[str, Any]
    target: Target

    @property
    def output(self) -> Tensor:
        """The first output."""
        return self.outputs[0]

    def lower(self) -> KernelLaunch | KernelSequence | ViewOp | None:
        """Return the result of the rule."""
        output = self.output if len(self.outputs) == 1 else self.outputs
        return self.rule(*self.tensors, output=output, target=self.target, **self.attributes)

    def with_attributes(self, **changed: Any) -> RuleCall:
        """Return the call with other values of some attributes."""
        return replace(self, attributes={**self.attributes, **changed})


class LoweredOp(Struct, frozen=True):
    """A lowered operation, in place of its step.

    Kernels only know NHWC: `inputs_nchw` and `outputs_nchw` mark the operands that are NCHW in the model. `reference`
    is the interpreter's step of a view, for a view of memory outside of an arena. `fused` are the numbers of the other
    operations that the kernels compute.
    """

    number: int
    call: RuleCall
    lowered: KernelLaunch | KernelSequence | ViewOp
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    reference: StepFunction | None
    inputs_nchw: tuple[bool, ...]
    outputs_nchw: bool
    fused: tuple[int, ...] = ()

    @property
    def is_view(self) -> bool:
        """Whether nothing is computed."""
        return isinstance(self.lowered, ViewOp)

    def inputs_as_in_model(self) -> list[int]:
        """Return the inputs that are read without a conversion to NHWC."""
        return [index for index, nchw in zip(self.inputs, self.inputs_nchw, strict=True) if not nchw]
