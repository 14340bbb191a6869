"""A lowered operation of a model: its kernels, the operands that they read and write, and the call of its rule.

`fusion` calls a rule again with other arguments to merge operations. `partition` makes the launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from nnfmq.engines.compiled.lowering import KernelLaunch, KernelSequence, LoweringRule, ViewOp
from nnfmq.engines.compiled.target import Target
from nnfmq.engines.execution import StepFunction
from nnfmq.hal.types import OperationType
from nnfmq.operations.signature import Tensor

__all__ = ["LoweredOp", "RuleCall"]


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
        """Return what the rule returns."""
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
