"""Operations that move nothing: RESHAPE, SQUEEZE, EXPAND_DIMS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnfmq.engines.compiled.lowering.lowered import Alias, Rule
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.types import OperationType
from nnfmq.operations.signature import Tensor

__all__ = ["RULES"]


def renamed(input: Tensor, *_: Tensor | None, output: Tensor, target: Target, **attributes: Any) -> Alias | None:
    """Take the elements as they are."""
    return None if 0 in input.shape else Alias()


RULES: Mapping[OperationType, Rule] = {
    OperationType.RESHAPE: renamed,
    OperationType.SQUEEZE: renamed,
    OperationType.EXPAND_DIMS: renamed,
}
