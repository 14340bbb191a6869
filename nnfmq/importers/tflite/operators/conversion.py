"""ConversionContext: the mapping from a file's tensors to operands.

A tensor must be written before it is read, and only once. A variable tensor, TFLite's memory between executions,
becomes a state: an input and an output of the model, after all others. The HAL has no other memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.extensions import ELEMENTS, TENSOR_INT64
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.tensor_info import StateInfo, TensorInfo, operand_info
from nnfmq.hal.types import DataLocation, LifeTime, Operand, OperandType, element_bytes
from nnfmq.importers.graph_builder import GraphBuilder
from nnfmq.importers.tflite.file import TfliteFile, TfliteOperator, TfliteTensor

__all__ = [
    "FLOAT_TYPES",
    "INTEGERS",
    "PER_CHANNEL",
    "QUANTIZED_TYPES",
    "SIXTEEN_BITS",
    "ConversionContext",
    "OpConverter",
    "State",
    "computed_size",
    "follows_from_data",
    "has_unknown_sizes",
    "is_constant",
    "live_operators",
]

SIXTEEN_BITS = OperandType.TENSOR_QUANT16_SYMM
FLOAT_TYPES = (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)
QUANTIZED_TYPES = (OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED)
INTEGERS: Mapping[OperandType, str] = {OperandType.TENSOR_INT32: "<i4", TENSOR_INT64: "<i8"}
"""The element types of integers that are no quantized values."""
PER_CHANNEL = OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL
_STORAGE_DTYPES = {
    OperandType.TENSOR_QUANT8_ASYMM: "u1",
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED: "i1",
    PER_CHANNEL: "i1",
    OperandType.TENSOR_QUANT16_SYMM: "<i2",
}
_COMPUTED = (LifeTime.SUBGRAPH_INPUT, LifeTime.SUBGRAPH_OUTPUT, LifeTime.TEMPORARY_VARIABLE)
_MAX_ATTRIBUTE_ELEMENTS = 16  # the largest attribute: paddings of rank 8


class OpConverter(Struct, frozen=True):
    """The converter of one operator, with the allowed counts of inputs and outputs, and its options table if any."""

    input_counts: range
    convert: Callable[[ConversionContext, TfliteOperator], None]
    options: str = ""
    needs_options: bool = False
    output_counts: range = range(1, 2)


class State(Struct, frozen=True):
    """The operands of a state before and after an execution, and its description."""

    before: int
    after: int
    info: StateInfo


class CalledSubgraph(Struct, frozen=True):
    """A subgraph that operations can call: its index in the model, and the operands of its outputs."""

    index: int
    outputs: tuple[Operand, ...]


class SubgraphCalls(Protocol):
    """Imports the subgraphs that operators call; see `tflite.model`."""

    def call(
        self, caller: ConversionContext, index: int, inputs: Sequence[int], keeps_constants: bool
    ) -> CalledSubgraph:
        """Import a subgraph to be called with these operands of the caller."""


def is_constant(operand: Operand) -> bool:
    """Return whether an operand's value is in the model."""
    return operand.lifetime in (LifeTime.CONSTANT_COPY, LifeTime.CONSTANT_REFERENCE)


class ConversionContext:
    """The state of one conversion: the file, the builder, and the operand of each tensor so far."""

    def __init__(self, file: TfliteFile, builder: GraphBuilder) -> None:
        self.file = file
        self.builder = builder
        self._operands: dict[int, int] = {}
        self._states: dict[int, State] = {}
        self._outputs = frozenset(file.outputs)
        self._output_operands: list[int] = []
        self.variables: dict[str, Any] = {}
        """The resource variables by name; see `control_flow`."""
        self.handles: dict[int, str] = {}
        """The names of variables by the tensors of their handles."""
        self.subgraphs: SubgraphCalls | None = None
        self.resized_shapes: dict[int, tuple[int, ...]] = {}
        """New shapes of results whose shape the file states for its own inputs; see `tflite.resizing`."""

    def call(self, index: int, inputs: Sequence[int], keeps_constants: bool = False) -> CalledSubgraph:
        """Import a subgraph to be called with these operands. Raises InvalidArgument if it is not supported.

        If it `keeps_constants`, it has those among the operands itself, and is called with the others.
        """
        if self.subgraphs is None:
            raise InvalidArgument(f"subgraph {index} cannot be called here")
        return self.subgraphs.call(self, index, inputs, keeps_constants)

    def states(self) -> Mapping[int, State]:
        """Return the states by tensor, in the order in which operators use them."""
        return self._states

    def known_shapes(self) -> dict[int, tuple[int, ...]]:
        """Return the shapes of all tensors that operators read or write, without constants, after the model is built.

        Those that the file does not state follow from the others, unless they depend on the data.
        """
        operands = {**self._operands, **{index: state.before for index, state in self._states.items()}}
        if not all(self.builder[operand].dimensions for operand in operands.values()):
            with suppress(InvalidArgument, GeneralFailure):
                self.builder.infer_shapes(0)
        found = {index: self.builder[operand] for index, operand in operands.items()}
        return {index: operand.dimensions for index, operand in found.items() if operand.lifetime in _COMPUTED}

    def find_ranks(self, outputs: Sequence[int]) -> None:
        """State the shapes of outputs whose rank the file does not state, if they follow from the inputs' shapes.

        A file states the same of a scalar and of a tensor of unknown rank.
        """
        if not all(self.builder[output].dimensions for output in outputs):
            with suppress(InvalidArgument, GeneralFailure):
                self.builder.infer_shapes(0)

    def keep_results(self) -> dict[int, int]:
        """Make all intermediate results outputs of the model, and return their operands by tensor."""
        found: dict[int, int] = {}
        for index, operand in self._operands.items():
            if self.builder[operand].lifetime == LifeTime.TEMPORARY_VARIABLE:
                self.builder.as_output(operand)
                found[index] = operand
        return found

    def infos(self, tensors: Sequence[int], operands: Sequence[int]) -> tuple[TensorInfo, ...]:
        """Describe inputs or outputs of the model."""
        return tuple(map(self._info, tensors, operands))

    def _info(self, index: int, operand: int) -> TensorInfo:
        tensor = self.file.tensor(index)
        info = operand_info(self.builder[operand], tensor.name, ELEMENTS)
        if tensor.is_empty:
            return replace(info, shape=tensor.shape, is_empty=True)
        return replace(info, shape=(), is_scalar=True) if tensor.rank == 0 and info.shape == (1,) else info

    def model_input(self, index: int) -> int:
        """Add tensor `index` as an input of the model."""
        tensor = self.file.tensor(index)
        self._check_zero_point(index, any_zero_point=False)
        if tensor.is_empty:
            return self._operand(tensor, LifeTime.SUBGRAPH_INPUT, (1,))
        if index in self._operands or tensor.data is not None or tensor.is_variable:
            raise InvalidArgument(f"{tensor} cannot be a model input: it is listed twice, a constant, or a variable")
        return self._add(tensor, LifeTime.SUBGRAPH_INPUT)

    def given(self, index: int, operand: int) -> None:
        """Make `operand`, an input of a subgraph that is called, the operand of tensor `index`."""
        if index in self._operands:
            raise InvalidArgument(f"{self.file.tensor(index)} is listed twice")
        self._operands[index] = operand

    def model_output(self, index: int) -> int:
        """Return the operand of tensor `index` as an output: a copy of an input, a constant, or another output."""
        tensor = self.file.tensor(index)
        if index not in self._operands and (tensor.data is None or tensor.is_variable):
            raise InvalidArgument(f"{tensor} cannot be a model output: no operator writes it")
        operand = self._placeholder(tensor) if tensor.is_empty else self.value(index)
        is_result = self.builder[operand].lifetime == LifeTime.SUBGRAPH_OUTPUT
        if not is_result or operand in self._output_operands:
            operand = self.copied(operand)
        self._output_operands.append(operand)
        return operand

    def _placeholder(self, tensor: TfliteTensor) -> int:
        """Return a constant of one element for a tensor that has none."""
        location = self.builder.stored(bytes(element_bytes(tensor.type)))
        kind, zero_point = tensor.type, 0 if tensor.type == SIXTEEN_BITS else tensor.zero_point
        return self.builder.operand(Operand(kind, (1,), tensor.scale, zero_point, LifeTime.CONSTANT_COPY, location))

    def copied(self, index: int) -> int:
        """Return a copy of an operand, an output. Raises InvalidArgument if its shape is not known."""
        operand = self.builder[index]
        if not operand.dimensions or 0 in operand.dimensions:
            raise InvalidArgument("a tensor of unknown shape cannot be an output twice")
        output = replace(operand, lifetime=LifeTime.SUBGRAPH_OUTPUT, location=DataLocation())
        copy = self.builder.operand(output)
        self.builder.operation(OperationType.RESHAPE, [index, self.builder.int32_vector(operand.dimensions)], copy)
        return copy

    def shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of the operand of tensor `index`, which an operator has written."""
        return self.builder[self._operands[index]].dimensions

    def is_model_output(self, index: int) -> bool:
        """Return True if tensor `index` is a model output."""
        return index in self._outputs

    def value(self, index: int, *, any_zero_point: bool = False) -> int:
        """Return the operand of a tensor that an operator reads.

        `any_zero_point`: the operator gets the zero point of a tensor of 16 bits, which the operand does not have.
        """
        self._check_zero_point(index, any_zero_point)
        if index not in self._operands:
            tensor = self.file.tensor(index)
            if tensor.is_variable:
                raise InvalidArgument(
                    f"{tensor} is a variable tensor: only the state of a recurrent operator may be one"
                )
            if tensor.data is None:
                raise InvalidArgument(f"{tensor} is read before it is written")
            self._operands[index] = self.constant(tensor, tensor.scale)
        return self._operands[index]

    def optional(self, operator: TfliteOperator, position: int, operand_type: OperandType) -> int:
        """Return the operand of an input that may be omitted; `operand_type` is what it then would have."""
        index = operator.inputs[position] if position < len(operator.inputs) else -1
        return self.builder.omitted(operand_type) if index == -1 else self.value(index)

    def state(self, index: int) -> State:
        """Return the two operands of a variable tensor, which become input and output of the model."""
        tensor = self.file.tensor(index)
        if not tensor.is_variable:
            raise InvalidArgument(f"{tensor} is not a variable tensor: a state must be one")
        if index in self._states:
            raise InvalidArgument(f"{tensor} is the state of two operators: that is not supported")
        before = self._operand(tensor, LifeTime.SUBGRAPH_INPUT, tensor.shape)
        after = self._operand(tensor, LifeTime.SUBGRAPH_OUTPUT, tensor.shape)
        info = StateInfo(operand_info(self.builder[before], tensor.name, ELEMENTS))
        self._states[index] = State(before, after, info)
        return self._states[index]

    def result(self, index: int, shape: tuple[int, ...] = (), *, any_zero_point: bool = False) -> int:
        """Return a new operand for a tensor that an operator writes; of `shape` if the file declares none.

        `any_zero_point` is as for `value`; a model output needs an operand that has its zero point.
        """
        self._check_zero_point(index, any_zero_point and not self.is_model_output(index))
        tensor = self.file.tensor(index)
        self._check_unwritten(tensor)
        lifetime = LifeTime.SUBGRAPH_OUTPUT if self.is_model_output(index) else LifeTime.TEMPORARY_VARIABLE
        return self._add(tensor, lifetime, shape)

    def assume_written(self, operator: TfliteOperator) -> None:
        """Give the results of an operator that cannot be converted operands, so that their readers can be converted."""
        for index in operator.outputs:
            if index in self._operands:
                continue
            with suppress(InvalidArgument):  # a tensor of an unsupported type: its readers report that
                lifetime = LifeTime.SUBGRAPH_OUTPUT if self.is_model_output(index) else LifeTime.TEMPORARY_VARIABLE
                self._add(self.file.tensor(index), lifetime)

    def temporary(self, tensor: TfliteTensor, shape: tuple[int, ...]) -> int:
        """Return a new operand between two operations of one operator, typed and quantized like `tensor`."""
        return self._operand(tensor, LifeTime.TEMPORARY_VARIABLE, shape)

    def constant(self, tensor: TfliteTensor, scale: float, shape: tuple[int, ...] | None = None) -> int:
        """Add an operand for a constant tensor; several operands of one file buffer share its bytes."""
        if tensor.is_empty:
            raise InvalidArgument(
                f"{tensor} of shape {list(tensor.shape)} has no elements, which is not supported here"
            )
        location = self.builder.constant_of(tensor.buffer_index, self._data(tensor))
        dimensions, copy = tensor.shape if shape is None else shape, LifeTime.CONSTANT_COPY
        return self.builder.operand(
            Operand(tensor.type, dimensions, scale, tensor.zero_point, copy, location, tensor.channel_quant)
        )

    def stored_bytes(self, tensor: TfliteTensor) -> bytes:
        """Return the elements of a constant as its operand stores them."""
        return bytes(self._data(tensor))

    def dequantized_constant(self, tensor: TfliteTensor) -> int:
        """Add a FLOAT32 operand with the values of a constant that is quantized or FLOAT16."""
        data, kind = self._data(tensor), OperandType.TENSOR_FLOAT32
        size_bytes = 4 * len(data) // element_bytes(tensor.type)
        with np.errstate(all="ignore"):  # a large scale may give infinities
            location = self.builder.converted((tensor.index, kind), size_bytes, lambda: _to_float32(tensor, data))
        return self.builder.operand(Operand(kind, tensor.shape, lifetime=LifeTime.CONSTANT_COPY, location=location))

    def name(self, index: int, operand: int) -> None:
        """Make `operand` the operand of tensor `index`, which no operation writes."""
        self._check_unwritten(self.file.tensor(index))
        self._operands[index] = operand

    def ints(self, index: int, max_count: int = _MAX_ATTRIBUTE_ELEMENTS) -> list[int]:
        """Return the elements of a constant of integers that is an attribute."""
        tensor = self.file.tensor(index)
        if tensor.data is None or tensor.type not in INTEGERS:
            raise InvalidArgument(f"{tensor} must be a constant of type INT32 or INT64")
        count = len(tensor.data) // np.dtype(INTEGERS[tensor.type]).itemsize
        if count > max_count:
            raise InvalidArgument(f"{tensor} has {count} elements: at most {max_count} are allowed")
        return [int(value) for value in np.frombuffer(tensor.data, INTEGERS[tensor.type])]

    def one_int(self, index: int) -> int:
        """Return the only element of a constant of integers."""
        values = self.ints(index)
        if len(values) != 1:
            raise InvalidArgument(f"{self.file.tensor(index)} has {len(values)} elements: one is required")
        return values[0]

    def emit(
        self, operation_type: OperationType, operator: TfliteOperator, *inputs: int, shape: tuple[int, ...] = ()
    ) -> None:
        """Add an operation that writes the operator's only output; `shape` is as for `result`."""
        self.builder.operation(operation_type, inputs, self.result(operator.outputs[0], shape))

    def _check_zero_point(self, index: int, any_zero_point: bool) -> None:
        tensor = self.file.tensor(index)
        if tensor.type == SIXTEEN_BITS and tensor.zero_point != 0 and not any_zero_point:
            raise InvalidArgument(f"{tensor} has zero point {tensor.zero_point}: here, that of INT16 must be 0")

    def _check_unwritten(self, tensor: TfliteTensor) -> None:
        if tensor.index in self._operands or tensor.data is not None or tensor.is_variable:
            raise InvalidArgument(
                f"{tensor} cannot be written: it is an input, constant, variable, or was written before"
            )

    def _data(self, tensor: TfliteTensor) -> memoryview:
        if tensor.data is None:
            raise InvalidArgument(f"{tensor} must be a constant")
        return tensor.data

    def _add(self, tensor: TfliteTensor, lifetime: LifeTime, shape: tuple[int, ...] = ()) -> int:
        self._operands[tensor.index] = self._operand(tensor, lifetime, tensor.shape or shape)
        return self._operands[tensor.index]

    def _operand(self, tensor: TfliteTensor, lifetime: LifeTime, shape: tuple[int, ...]) -> int:
        if tensor.channel_quant is not None:
            raise InvalidArgument(f"{tensor}: only constants may be quantized per channel")
        zero_point = 0 if tensor.type == SIXTEEN_BITS else tensor.zero_point
        return self.builder.operand(Operand(tensor.type, shape, tensor.scale, zero_point, lifetime))


def _to_float32(tensor: TfliteTensor, data: memoryview) -> bytes:
    if tensor.type == OperandType.TENSOR_FLOAT16:
        return np.frombuffer(data, "<f2").astype("<f4").tobytes()
    if tensor.type not in _STORAGE_DTYPES:
        raise InvalidArgument(f"{tensor} is {tensor.type.name}: only quantized tensors and FLOAT16 convert to FLOAT32")
    quantized = np.frombuffer(data, _STORAGE_DTYPES[tensor.type]).astype("<f4").reshape(tensor.shape)
    if tensor.channel_quant is None:
        return ((quantized - np.float32(tensor.zero_point)) * np.float32(tensor.scale)).tobytes()
    along = [-1 if axis == tensor.channel_quant.channel_dim else 1 for axis in range(len(tensor.shape))]
    real: bytes = (quantized * np.array(tensor.channel_quant.scales, "<f4").reshape(along)).tobytes()
    return real


# ----------------------------------------------------------------------------------------------------------------------
# Dead-operator elimination: only operators whose results reach a model output are converted.
#
# If the batch is unknown, TFLite's converter writes the shape of a RESHAPE, and similar sizes, as a computation on
# another tensor's shape. The file also declares the resulting shape, so that computation is dead; it may use operators
# that the HAL does not have (SHAPE).


_SIZES = {
    "BROADCAST_TO": 1,
    "FILL": 0,
    "RESHAPE": 1,
    "RESIZE_BILINEAR": 1,
    "RESIZE_NEAREST_NEIGHBOR": 1,
    "TRANSPOSE_CONV": 0,
}
"""The position of the input that only determines the output's shape."""
_SIZED_BY_DATA = frozenset(("RANGE", "UNIQUE", "WHERE"))
_WITH_EFFECT = frozenset(("ASSIGN_VARIABLE", "CALL_ONCE"))


def has_unknown_sizes(file: TfliteFile) -> bool:
    """Return whether results have dimensions that the file does not know, besides the batch, although inputs have not.

    Such a dimension follows from the inputs' shapes, and the file states 1 for it.
    """
    if any(-1 in file.signature(index)[1:] for index in file.inputs):
        return False
    results = (index for operator in file.operators() for index in operator.outputs)
    return any(-1 in file.signature(index)[1:] for index in results)


def live_operators(file: TfliteFile, *, with_sizes: bool = False) -> list[TfliteOperator]:
    """Return the operators on which the outputs and the variables depend, in the file's order.

    Without `with_sizes` they do not depend on the inputs that only determine a shape, if the file states that shape.
    """
    wanted, found = set(file.outputs), []
    for operator in reversed(file.operators()):
        if operator.name in _WITH_EFFECT or not wanted.isdisjoint(operator.outputs):
            found.append(operator)
            wanted.update(operator.inputs if with_sizes else _read(file, operator))
    return found[::-1]


def _read(file: TfliteFile, operator: TfliteOperator) -> list[int]:
    """Return the tensors that the rule of `operator` reads."""
    size = computed_size(file, operator)
    is_read = size is None or len(operator.outputs) != 1 or not _has_stated_shape(file, operator.outputs[0])
    return [index for index in operator.inputs if is_read or index != size]


def computed_size(file: TfliteFile, operator: TfliteOperator) -> int | None:
    """Return the input that only determines the output's shape, if the file computes it from shapes and constants.

    Then the shape that the file states is right. One that follows from the values of inputs may be any.
    """
    for index in operator.inputs[_size_slice(operator)]:
        if index >= 0 and not _is_constant(file, index) and not follows_from_data(file, index):
            return index
    return None


def _size_slice(operator: TfliteOperator) -> slice:
    """Return the position of the input that only determines the output's shape: of length 1 or 0."""
    position = _SIZES.get(operator.name, len(operator.inputs))
    return slice(position, position + 1)


def follows_from_data(file: TfliteFile, index: int, *, only_shape: bool = False) -> bool:
    """Return whether the elements of a tensor, or its shape, follow from the values of inputs or variables."""
    if file.from_data is None:
        file.from_data = _find_from_data(file)
    return index in file.from_data[only_shape]


def _find_from_data(file: TfliteFile) -> tuple[set[int], set[int]]:
    """Return the tensors whose elements follow from data, and those whose shape does."""
    elements, shapes, known = set[int](), set[int](), set[int]()
    for operator in file.operators():
        inputs = [index for index in operator.inputs if index >= 0]
        elements.update(index for index in inputs if index not in known and not _is_constant(file, index))
        known.update(operator.outputs)
        is_computed = not inputs or not elements.isdisjoint(inputs)
        is_resized = not shapes.isdisjoint(inputs)
        sizes = inputs if operator.name in _SIZED_BY_DATA else operator.inputs[_size_slice(operator)]
        if is_resized or not elements.isdisjoint(sizes):
            shapes.update(operator.outputs)
        if is_resized if operator.name in ("RANK", "SHAPE") else is_computed:
            elements.update(operator.outputs)
    return elements, shapes


def _is_constant(file: TfliteFile, index: int) -> bool:
    try:
        return file.tensor(index).data is not None
    except InvalidArgument:  # the conversion of the operator that reads the tensor reports it
        return False


def _has_stated_shape(file: TfliteFile, index: int) -> bool:
    try:
        return bool(file.tensor(index).shape)
    except InvalidArgument:  # the conversion of the operator reports it
        return True
