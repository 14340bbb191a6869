"""Proof that a test of the device `compiled` has run machine code, and not the interpreter that stands in for it."""

from __future__ import annotations

from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.hal.preparation import ProgramKind

__all__ = ["machine_code"]


def machine_code(model: PreparedModel, operations: int = 0) -> PreparedModel:
    """Return a prepared model that machine code executes: of `operations` of its operations, at least of one."""
    assert model.device == "compiled"
    assert model.program in (ProgramKind.COMPILED, ProgramKind.CACHED), model.program
    assert model.compiled_operations >= max(1, operations), f"{model.compiled_operations} of {operations} operations"
    return model
