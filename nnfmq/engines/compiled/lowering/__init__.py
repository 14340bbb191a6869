"""Which kernel computes an operation: `RULES`, a function for each, from what is known at preparation.

A rule is called as a plan of `operations` is: with the DATA and WEIGHT tensors in order (None where omitted), `output`
(a tuple where the model has several), and the controls by name; and with the target. It returns a `Lowered`, whose
kernel gets in its table the addresses of the DATA arrays that are given in order, then of the outputs, then of its
constants; or a `Chain` of several; or an `Alias`; or None for what no kernel computes, and the reference kernel does.
Images are NHWC, the model is valid, and all constraints hold.
"""

from __future__ import annotations

from collections.abc import Mapping

from nnfmq.engines.compiled.lowering import (
    aliases,
    data_movement_rules,
    elementwise_rules,
    matmul,
    products,
    recurrent_rules,
    reduction_rules,
    resize,
    softmax,
)
from nnfmq.engines.compiled.lowering.lowered import Alias, Chain, Constant, Lowered, Rule, Stage
from nnfmq.hal.types import OperationType

__all__ = ["RULES", "Alias", "Chain", "Constant", "Lowered", "Rule", "Stage"]

RULES: Mapping[OperationType, Rule] = {
    **aliases.RULES,
    **elementwise_rules.RULES,
    **matmul.RULES,
    **data_movement_rules.RULES,
    **reduction_rules.RULES,
    **products.RULES,
    **recurrent_rules.RULES,
    **resize.RULES,
    **softmax.RULES,
}
