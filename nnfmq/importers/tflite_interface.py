"""What a TFLite file says of its tensors, operators and signatures, in all its subgraphs and before any conversion.

`tflite_file` has what the conversion needs; this is what a program that inspects a file sees. A tensor may have a type
that is not supported. The file is verified first, and reading it is bounded by its size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.summaries import tensor_text
from nnfmq.importers import flatbuffer_verifier, tflite_schema
from nnfmq.importers.file_format import TFLITE_IMPORTER, FileContent, importer_of
from nnfmq.importers.flatbuffer_reader import TableReader
from nnfmq.importers.tflite_enumerations import BUILTIN_OPERATORS, TENSOR_TYPES

__all__ = [
    "FileOperator",
    "FileSignature",
    "FileSubgraph",
    "FileTensor",
    "TfliteInterface",
    "read_interface",
    "read_signatures",
]


class FileTensor(Struct, frozen=True):
    """A tensor as the file has it: `type` is the schema's name, `shape_signature` may be empty.

    `data` is a view of the file, None without a value.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    shape_signature: tuple[int, ...]
    scales: tuple[float, ...] = ()
    zero_points: tuple[int, ...] = ()
    quantized_dimension: int = 0
    is_variable: bool = False
    data: memoryview | None = None

    def __repr__(self) -> str:
        return f"<FileTensor: {tensor_text(self.type, self.shape)} {self.name!r}>"


class FileOperator(Struct, frozen=True):
    """An operator: the name of the builtin or custom operator, and tensor indexes (-1: omitted)."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class FileSubgraph(Struct, frozen=True):
    """The tensors of a subgraph, the indexes of its inputs and outputs, and its operators in the file's order."""

    tensors: tuple[FileTensor, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    operators: tuple[FileOperator, ...]


class FileSignature(Struct, frozen=True):
    """The tensors of a signature by the names that it gives them."""

    subgraph: int
    inputs: dict[str, int]
    outputs: dict[str, int]


class TfliteInterface(Struct, frozen=True):
    """The subgraphs of a file, and its signatures by key."""

    subgraphs: tuple[FileSubgraph, ...]
    signatures: dict[str, FileSignature]


def read_interface(data: FileContent) -> TfliteInterface:
    """Return what a .tflite file says of itself.

    Raises:
        InvalidArgument: If it is no .tflite file, or corrupt.
    """
    if importer_of(data) != TFLITE_IMPORTER:
        raise InvalidArgument(
            "this is no TensorFlow Lite file; nnfmq.load and nnfmq.compat.onnxruntime read .onnx files"
        )
    flatbuffer_verifier.verify(data, tflite_schema.MODEL, tflite_schema.IDENTIFIER)
    return _InterfaceReader(data).read()


def read_signatures(data: FileContent) -> dict[str, FileSignature]:
    """Return the signatures of a verified .tflite file by key. Raises InvalidArgument if one is invalid."""
    return _InterfaceReader(data).signatures()


class _InterfaceReader:
    """Reads a verified file within a budget of elements, so that parts that overlap cannot multiply the work."""

    def __init__(self, data: FileContent) -> None:
        self._model = TableReader.root(data, tflite_schema.MODEL)
        self._elements_left = len(data)

    def read(self) -> TfliteInterface:
        model = self._model
        subgraphs = tuple(self._subgraph(model.Subgraphs(index)) for index in range(model.SubgraphsLength()))
        if not subgraphs:
            raise InvalidArgument("0 subgraphs: a model has at least one")
        return TfliteInterface(subgraphs, self.signatures())

    def signatures(self) -> dict[str, FileSignature]:
        signatures = (self._model.SignatureDefs(index) for index in range(self._model.SignatureDefsLength()))
        return {self._text(raw.SignatureKey()): self._signature(raw) for raw in signatures}

    def _subgraph(self, raw: Any) -> FileSubgraph:
        tensors = tuple(self._tensor(raw.Tensors(index)) for index in range(raw.TensorsLength()))
        inputs = self._ints(raw.InputsLength(), raw.InputsAsNumpy)
        outputs = self._ints(raw.OutputsLength(), raw.OutputsAsNumpy)
        operators = tuple(self._operator(raw.Operators(index)) for index in range(raw.OperatorsLength()))
        used = [inputs, outputs, *(indexes for found in operators for indexes in (found.inputs, found.outputs))]
        _require_indexes(used, len(tensors))
        return FileSubgraph(tensors, inputs, outputs, operators)

    def _tensor(self, raw: Any) -> FileTensor:
        self._spend(1)
        shape = self._ints(raw.ShapeLength(), raw.ShapeAsNumpy)
        signature = self._ints(raw.ShapeSignatureLength(), raw.ShapeSignatureAsNumpy)
        scales: tuple[float, ...] = ()
        zero_points: tuple[int, ...] = ()
        quantization, dimension = raw.Quantization(), 0
        if quantization is not None:
            scales = self._floats(quantization.ScaleLength(), quantization.ScaleAsNumpy)
            zero_points = self._ints(quantization.ZeroPointLength(), quantization.ZeroPointAsNumpy)
            dimension = quantization.QuantizedDimension()
        type_name, is_variable = TENSOR_TYPES.get(raw.Type(), f"number {raw.Type()}"), bool(raw.IsVariable())
        return FileTensor(
            self._text(raw.Name()), type_name, shape, signature,
            scales, zero_points, dimension, is_variable, self._constant(raw.Buffer()),
        )  # fmt: skip

    def _operator(self, raw: Any) -> FileOperator:
        self._spend(1)
        if raw.OpcodeIndex() >= self._model.OperatorCodesLength():
            raise InvalidArgument(f"operator code index {raw.OpcodeIndex()} is out of range")
        code = self._model.OperatorCodes(raw.OpcodeIndex())
        number = max(code.BuiltinCode(), code.DeprecatedBuiltinCode())
        name = BUILTIN_OPERATORS.get(number, f"code {number}")
        return FileOperator(
            self._text(code.CustomCode()) if name == "CUSTOM" else name,
            self._ints(raw.InputsLength(), raw.InputsAsNumpy),
            self._ints(raw.OutputsLength(), raw.OutputsAsNumpy),
        )

    def _signature(self, raw: Any) -> FileSignature:
        self._spend(1)
        subgraph = raw.SubgraphIndex()
        if subgraph >= self._model.SubgraphsLength():
            raise InvalidArgument(f"a signature has subgraph {subgraph}, which does not exist")
        inputs = self._tensor_map(raw.InputsLength(), raw.Inputs)
        outputs = self._tensor_map(raw.OutputsLength(), raw.Outputs)
        _require_indexes([inputs.values(), outputs.values()], self._model.Subgraphs(subgraph).TensorsLength())
        return FileSignature(subgraph, inputs, outputs)

    def _tensor_map(self, count: int, entry: Callable[[int], Any]) -> dict[str, int]:
        self._spend(count)
        entries = [entry(index) for index in range(count)]
        return dict(sorted((self._text(found.Name()), int(found.TensorIndex())) for found in entries))

    def _constant(self, index: int) -> memoryview | None:
        if index >= self._model.BuffersLength():
            raise InvalidArgument(f"buffer index {index} is not in 0..{self._model.BuffersLength() - 1}")
        buffer = self._model.Buffers(index)
        return memoryview(buffer.DataAsNumpy()).cast("B") if buffer.DataLength() else None

    def _spend(self, count: int) -> None:
        self._elements_left -= count
        if self._elements_left < 0:
            raise InvalidArgument("corrupt file: its vectors overlap (more elements than the file has bytes)")

    def _ints(self, count: int, as_numpy: Callable[[], Any]) -> tuple[int, ...]:
        self._spend(count)
        return tuple(as_numpy().tolist()) if count else ()

    def _floats(self, count: int, as_numpy: Callable[[], Any]) -> tuple[float, ...]:
        self._spend(count)
        return tuple(as_numpy().tolist()) if count else ()

    def _text(self, raw: bytes | None) -> str:
        self._spend(len(raw or b""))
        return (raw or b"").decode("utf-8", "replace")


def _require_indexes(groups: Iterable[Iterable[int]], count: int) -> None:
    for group in groups:
        for index in group:
            if not -1 <= index < count:
                raise InvalidArgument(f"tensor index {index} is not in 0..{count - 1}")
