"""The result type of every importer, in a separate module so that no importer is imported with it."""

from __future__ import annotations

from dataclasses import dataclass

from nnfmq.hal.summaries import code_name, html_tables, signature
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import Model


@dataclass(frozen=True, slots=True, repr=False)
class LoadedModel:
    """A model read from a file, ready for `Device.prepare`, and its inputs and outputs in the model's order."""

    model: Model
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]

    def __repr__(self) -> str:
        return f"<LoadedModel: {signature(self.inputs, self.outputs)}; {len(self.model.main.operations)} operations>"

    def _repr_html_(self) -> str:
        """Return tables of inputs, outputs and operations, for notebooks."""
        operations = [code_name(operation.type) for operation in self.model.main.operations]
        return html_tables(f"LoadedModel: {len(operations)} operations", self.inputs, self.outputs, operations)
