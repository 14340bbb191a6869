"""The result types of every importer, in a separate module so that no importer is imported with it."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from nnfmq.hal.summaries import clipped, code_name, html_tables, listed, signature
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.types import Model


class TensorMetadata(Struct, frozen=True):
    """What a file's author says of an input or output: its normalization, and the labels of its elements or values.

    Inputs are normalized as (x - mean) / std, before they are quantized. `mean` and `std` have one element or one for
    each channel; none if there is no normalization.
    """

    name: str = ""
    description: str = ""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()

    def __repr__(self) -> str:
        parts = [clipped(repr(self.name), 64)]
        if self.mean:
            mean, std = (listed(values[:4], len(values)) for values in (self.mean, self.std))
            parts.append(f"mean {mean}, std {std}")
        parts += [f"{len(self.labels)} labels"] if self.labels else []
        return f"<TensorMetadata: {', '.join(parts)}>"


class ModelMetadata(Struct, frozen=True):
    """What a file's author says of a model, its inputs and its outputs (without states), and the files in it."""

    name: str = ""
    description: str = ""
    version: str = ""
    author: str = ""
    license: str = ""
    inputs: tuple[TensorMetadata, ...] = ()
    outputs: tuple[TensorMetadata, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.name, self.version, self.inputs, self.outputs))  # `files` is a dict

    def __repr__(self) -> str:
        name, version = clipped(repr(self.name), 64), clipped(repr(self.version))
        return f"<ModelMetadata: {name}, version {version}, {len(self.files)} files>"


class LoadedModel(Struct, frozen=True):
    """A model read from a file, ready for `Device.prepare`, and its inputs, outputs and states in the model's order.

    The inputs and outputs of `model` are these, followed by the states. `metadata` is None if the file has none.
    `signatures` are the names of those in the file, for `nnfmq.load(file, signature=name)`. `file_name` is the file's
    name without its folders, "" if the model was given as bytes. `data_files` are other files of its folder, which have
    weights of an ONNX file.
    """

    model: Model
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    metadata: ModelMetadata | None = None
    states: tuple[StateInfo, ...] = ()
    signatures: tuple[str, ...] = ()
    file_name: str = ""
    data_files: tuple[str, ...] = ()

    def __repr__(self) -> str:
        states = f", {len(self.states)} states" if self.states else ""
        operations = len(self.model.main.operations)
        return f"<LoadedModel: {signature(self.inputs, self.outputs)}; {operations} operations{states}>"

    def _repr_html_(self) -> str:
        """Return tables of inputs, outputs and operations, for notebooks."""
        operations = [code_name(operation.type) for operation in self.model.main.operations]
        return html_tables(f"LoadedModel: {len(operations)} operations", self.inputs, self.outputs, operations)
