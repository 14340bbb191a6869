"""ModelBuilder: builds a model operand by operand, with the calls, states and errors of NNAPI.

Source: NNAPI, ANeuralNetworksModel_* (API-3, API-4, API-16, N-API-1 to N-API-11). NNAPI's BAD_STATE is BadState here,
BAD_DATA is InvalidArgument, and so is a null pointer, which is None. A call that raises changes nothing, except that a
wrong model is invalid after `finish`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from nnfmq.base.file_memory import FileMemory
from nnfmq.base.memory import Memory
from nnfmq.base.ownership import Closable
from nnfmq.graphs.graph_dump import graph_dump
from nnfmq.hal.capabilities import MAX_SIZE_OF_IMMEDIATELY_COPIED_VALUES
from nnfmq.hal.errors import BadState, InvalidArgument
from nnfmq.hal.extensions import Code, extension_code, extension_prefix, extension_type, is_extension
from nnfmq.hal.models import model_architecture_hash, round_up
from nnfmq.hal.summaries import clipped, code_name, tensor_text
from nnfmq.hal.tensor_info import TensorInfo, dtype_name, operand_info
from nnfmq.hal.types import (
    ChannelQuant,
    DataLocation,
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    Pool,
    Subgraph,
)
from nnfmq.model_builder.constants import ConstantValues
from nnfmq.model_builder.operand_types import (
    DescribedExtension,
    OperandTypes,
    to_code,
    to_indexes,
    to_integer,
    to_integers,
    to_real,
)
from nnfmq.model_builder.simplification import prepare_for_compilation
from nnfmq.operations import REGISTRY
from nnfmq.operations.declaration import match
from nnfmq.validation.models import require_counts, validate_channel_quant
from nnfmq.validation.values import require

__all__ = ["ModelBuilder", "OperandValue", "SubgraphMerging", "value_bytes"]


# ----------------------------------------------------------------------------------------------------------------------
# SubgraphMerging: several finished models as the subgraphs of one.


_ALIGNMENT = 4  # of constants within each model, and so of its constants as a whole


@dataclass(slots=True)
class SubgraphMerging:
    """Collects the subgraphs, constants and pools of models that IF and WHILE of another model call.

    A model that is added twice is there once. `types` has the extension codes of the model that calls them.
    """

    types: OperandTypes
    subgraphs: list[Subgraph] = field(default_factory=list)
    values: bytearray = field(default_factory=bytearray)
    pools: list[Pool] = field(default_factory=list)
    _models: list[tuple[Model, int]] = field(default_factory=list)

    def add(self, model: Model) -> int:
        """Return the index of the main subgraph of a finished model among `subgraphs`."""
        known = next((index for added, index in self._models if added is model), None)
        if known is not None:
            return known
        first = len(self.subgraphs)
        self.values += bytes(round_up(len(self.values), _ALIGNMENT) - len(self.values))
        relocation = _Relocation(len(self.values), self._pool_indexes(model), first + 1, self._prefixes(model))
        self.subgraphs += [relocation.moved(subgraph) for subgraph in (model.main, *model.referenced)]
        self.values += model.operand_values
        self._models.append((model, first))
        return first

    def _pool_indexes(self, model: Model) -> list[int]:
        """Return the index of each pool of a model among `pools`, to which it adds those that are new."""
        indexes = []
        for pool in model.pools:
            if not any(pool is known for known in self.pools):
                self.pools.append(pool)
            indexes.append(next(index for index, known in enumerate(self.pools) if known is pool))
        return indexes

    def _prefixes(self, model: Model) -> dict[int, int]:
        return {entry.prefix: self.types.prefix(entry.name) for entry in model.extensions}


@dataclass(frozen=True, slots=True)
class _Relocation:
    """The locations of a model's constants, pools and referenced subgraphs in another one, and its prefixes there."""

    values_offset: int
    pools: list[int]
    first_referenced: int
    prefixes: Mapping[int, int]

    def moved(self, subgraph: Subgraph) -> Subgraph:
        """Return a subgraph that refers to the other model's parts."""
        operations = tuple(replace(operation, type=self._code(operation.type)) for operation in subgraph.operations)
        return replace(subgraph, operands=tuple(map(self._operand, subgraph.operands)), operations=operations)

    def _operand(self, operand: Operand) -> Operand:
        location = operand.location
        if operand.lifetime == LifeTime.CONSTANT_COPY:
            location = replace(location, offset=self.values_offset + location.offset)
        elif operand.lifetime == LifeTime.CONSTANT_REFERENCE:
            location = replace(location, pool_index=self.pools[location.pool_index])
        elif operand.lifetime == LifeTime.SUBGRAPH:
            location = replace(location, offset=self.first_referenced + location.offset)
        return replace(operand, type=self._code(operand.type), location=location)

    def _code(self, code: Code) -> Code:
        if not is_extension(code):
            return code
        return type(code)(extension_code(self.prefixes[extension_prefix(code)], extension_type(code)))


# ----------------------------------------------------------------------------------------------------------------------
# Conversion of an application's values to the bytes of a constant.


OperandValue: TypeAlias = "bytes | bytearray | memoryview | npt.NDArray[Any] | Sequence[Any] | float"
"""The bytes of a value, an array with the operand's dtype and shape, or Python numbers."""
_NUMBER_KINDS = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}  # kinds of Python numbers that fit a kind of elements


def value_bytes(value: OperandValue, dtype: str | None, shape: tuple[int, ...], where: str) -> memoryview:
    """Return the bytes of a constant (format "B"): a view of bytes or of a contiguous array, otherwise a copy.

    Args:
        value: Bytes are taken as they are. An array must have `dtype` and `shape`. Python numbers are converted.
        dtype: NumPy's name of the operand's elements; None if it has none, then only bytes are allowed.
        shape: The operand's dimensions.
        where: Begins the messages of errors.

    Raises:
        InvalidArgument: If an array has another dtype or shape, or numbers do not fit.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _as_bytes(value, where)
    if dtype is None:
        raise InvalidArgument(f"{where}: only bytes can be its value, not {_shown(value)} (N-API-3)")
    array = value if isinstance(value, np.ndarray) else _from_numbers(value, np.dtype(dtype), where)
    if array.dtype != np.dtype(dtype) or array.shape != shape:
        received = f"{array.dtype} {array.shape}"
        raise InvalidArgument(f"{where}: the value is an array of {received}, it must be {dtype} {shape} (N-API-3)")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _as_bytes(value: bytes | bytearray | memoryview, where: str) -> memoryview:
    try:
        return memoryview(value).cast("B")
    except TypeError as error:
        raise InvalidArgument(f"{where}: the value is a memoryview that is not contiguous (N-API-3)") from error


def _from_numbers(value: Sequence[Any] | float, dtype: np.dtype[Any], where: str) -> npt.NDArray[Any]:
    """Return Python numbers as an array of `dtype`; integers are not rounded, nor cut."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidArgument(f"{where}: the value {_shown(value)} has rows of different lengths (N-API-3)") from error
    if array.dtype.kind not in _NUMBER_KINDS.get(dtype.kind, ""):
        raise InvalidArgument(f"{where}: the value {_shown(value)} does not fit {dtype} (N-API-3)")
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    is_equal = converted == array if dtype.kind in "iu" else np.isfinite(converted) == np.isfinite(array)
    if not np.all(is_equal):
        raise InvalidArgument(f"{where}: the value {_shown(value)} is out of the range of {dtype} (N-API-3)")
    return converted


def _shown(value: object) -> str:
    return clipped(repr(value), 60)


# ----------------------------------------------------------------------------------------------------------------------
# ModelBuilder: builds a model operand by operand, with the calls, states and errors of NNAPI.


Boundary: TypeAlias = Sequence[int] | Mapping[str, int]
"""The operands that are inputs or outputs, in order, or by name."""
_WITHOUT_DTYPE = (OperandType.OEM, OperandType.TENSOR_OEM_BYTE)


class _State(Enum):
    BUILDING = "not finished: call finish()"
    FINISHED = "finished: it cannot be changed any more"
    INVALID = "invalid, because finish() failed: build it again with a new ModelBuilder"
    CLOSED = "closed"


class ModelBuilder(Closable):
    """Builds a model operand by operand, as with NNAPI's C functions. Close it, or use `with`.

    After `finish`, `client.prepare(builder)` prepares the model. Closing the builder affects neither `model` nor what
    was prepared from it. Types and operations are members of `nnfmq.hal.types.OperandType` and `OperationType`, their
    names ("TENSOR_FLOAT32", "CONV_2D") or their codes. Not thread-safe.

    Args:
        extensions: The extensions that the model may use: `device.info.extensions`. Without them the model may use any,
            but sizes and dtypes of their operand types are unknown, so that values are bytes, and nobody checks their
            length before the driver does.
    """

    def __init__(self, *, extensions: Iterable[DescribedExtension] = ()) -> None:
        self._types = OperandTypes(extensions)
        self._values = ConstantValues()
        self._operands: list[Operand] = []
        self._operations: list[Operation] = []
        self._inputs: dict[int, str] = {}  # names by operand
        self._outputs: dict[int, str] = {}
        self._called: dict[int, Model] = {}  # by the operand that refers to it
        self._is_identified = False
        self._is_relaxed = False
        self._state = _State.BUILDING
        self._model: Model | None = None

    def __repr__(self) -> str:
        if self._state is not _State.FINISHED:
            counts = f"{len(self._operands)} operands, {len(self._operations)} operations"
            return f"<ModelBuilder, {self._state.name.lower()}: {counts}>"
        return f"<ModelBuilder, finished: {self.model.main.summary()}>"

    # -- operands ------------------------------------------------------------------------------------------------------

    def add_operand(
        self, type: OperandType | int | str, dimensions: Sequence[int] = (), scale: float = 0.0, zero_point: int = 0
    ) -> int:
        """Add an operand and return its index.

        Args:
            type: The type; of an extension, from `get_extension_operand_type`.
            dimensions: None for a scalar. A dimension of 0 is unknown; without any the rank of a tensor is unknown.
            scale: Of a quantized type.
            zero_point: Of a quantized type.

        Raises:
            InvalidArgument: If the type is unknown, or something else is not allowed for it.
            BadState: If the model is finished.
        """
        self._require_building("add_operand")
        kind = to_code(OperandType, type, "N-API-1")
        lifetime = LifeTime.SUBGRAPH if kind is OperandType.SUBGRAPH else LifeTime.TEMPORARY_VARIABLE
        operand = Operand(
            kind,
            to_integers(dimensions, "dimensions", "N-API-1"),
            to_real(scale, "scale", "N-API-1"),
            to_integer(zero_point, "zero_point", "N-API-1"),
            lifetime,
        )
        self._types.validate(operand, _name(len(self._operands), operand))
        self._operands.append(operand)
        return len(self._operands) - 1

    def set_operand_value(self, index: int, value: OperandValue | None) -> None:
        """Make an operand a constant, or an omitted argument if `value` is None.

        A value of at most 128 bytes is copied. A larger one is borrowed and copied by `finish`, so do not change it
        before that.

        Args:
            index: The operand.
            value: Bytes, an array with the operand's dtype and shape, or Python numbers.

        Raises:
            InvalidArgument: If the index or the value does not fit.
            BadState: If the model is finished.
        """
        operand = self._future_constant("set_operand_value", index, "N-API-3")
        if value is None:
            self._set(index, LifeTime.NO_VALUE, DataLocation())
            return
        where = _name(index, operand)
        required = self._types.value_bytes(operand, where)
        data = value_bytes(value, self._dtype(operand), operand.dimensions, where)
        fits = required is None or data.nbytes == required
        require(fits, "N-API-3", f"{where}: the value has {data.nbytes} bytes, {required} are required")
        if data.nbytes <= MAX_SIZE_OF_IMMEDIATELY_COPIED_VALUES:
            self._set(index, LifeTime.CONSTANT_COPY, self._values.copied(data))
        else:  # `finish` completes the location
            self._set(index, LifeTime.CONSTANT_REFERENCE, DataLocation(0, 0, data.nbytes))
            self._values.borrow(index, data)

    def set_operand_value_from_memory(
        self, index: int, memory: Memory | FileMemory, offset: int = 0, length: int | None = None
    ) -> None:
        """Make an operand a constant in shared memory, which may be closed afterwards, but must not be changed.

        Args:
            index: The operand.
            memory: A `Memory` or a `FileMemory`.
            offset: Of the value in the memory, in bytes.
            length: Of the value; by default the operand's size.

        Raises:
            InvalidArgument: If the index, the memory, the offset or the length does not fit.
            BadState: If the model is finished.
        """
        operand = self._future_constant("set_operand_value_from_memory", index, "N-API-4")
        where = _name(index, operand)
        is_memory = isinstance(memory, (Memory, FileMemory))
        kinds = "nnfmq.Memory or nnfmq.FileMemory is required"
        require(is_memory, "N-API-4", f"{where}: {kinds}, not {type(memory).__name__}")
        required = self._types.value_bytes(operand, where)
        begin = to_integer(offset, f"{where}: offset", "N-API-4")
        default = memory.size_bytes - begin if required is None else required
        size = default if length is None else to_integer(length, f"{where}: length", "N-API-4")
        require(required in (None, size), "N-API-4", f"{where}: {size} bytes given, {required} are required")
        is_inside = 0 <= begin <= begin + size <= memory.size_bytes
        message = f"{where}: {size} bytes at offset {begin}, the memory has {memory.size_bytes}"
        require(is_inside, "N-API-4", message)
        self._set(index, LifeTime.CONSTANT_REFERENCE, DataLocation(self._values.pool_of(memory), begin, size))

    def set_operand_value_from_model(self, index: int, value: ModelBuilder) -> None:
        """Make an operand of type SUBGRAPH refer to a finished model, which an IF or WHILE calls.

        The other builder may be closed afterwards.

        Raises:
            InvalidArgument: If the index or the operand's type is wrong, or `value` is no ModelBuilder.
            BadState: If this model is finished, or the other one is not.
        """
        self._require_building("set_operand_value_from_model")
        operand = self._operand(index, "N-API-6")
        where = _name(index, operand)
        require(operand.type == OperandType.SUBGRAPH, "N-API-6", f"{where}: only a SUBGRAPH can refer to a model")
        message = f"{where}: a ModelBuilder is required, not {type(value).__name__}"
        require(isinstance(value, ModelBuilder), "N-API-6", message)
        self._called[index] = value.model

    def set_per_channel_quant_params(self, index: int, scales: Sequence[float], channel_dim: int) -> None:
        """Set the scales of an operand of type TENSOR_QUANT8_SYMM_PER_CHANNEL, one for each index of `channel_dim`.

        Raises:
            InvalidArgument: If the index, the operand's type, the scales or the dimension are wrong.
            BadState: If the model is finished.
        """
        self._require_building("set_per_channel_quant_params")
        operand = self._operand(index, "N-API-7")
        where = _name(index, operand)
        require(isinstance(scales, Iterable), "N-API-7", f"{where}: scales: a sequence is required, not {scales!r}")
        numbers = tuple(to_real(scale, f"{where}: scales", "N-API-7") for scale in scales)
        quant = ChannelQuant(numbers, to_integer(channel_dim, f"{where}: channel_dim", "N-API-7"))
        changed = replace(operand, channel_quant=quant)
        validate_channel_quant(changed, where)
        self._operands[index] = changed

    def set_extension_data(self, index: int, data: bytes | None) -> None:
        """Set the parameters of an operand of an extension's type, whose meaning its vendor defines; None removes them.

        Raises:
            InvalidArgument: If the index is wrong, the type is not one of an extension, or `data` is empty.
            BadState: If the model is finished.
        """
        self._require_building("set_extension_data")
        operand = self._operand(index, "N-API-7")
        where = _name(index, operand)
        require(is_extension(operand.type), "N-API-7", f"{where}: only types of extensions have extension data")
        is_allowed = data is None or (isinstance(data, (bytes, bytearray, memoryview)) and len(data) > 0)
        require(is_allowed, "N-API-7", f"{where}: extension data must be bytes, at least one, or None")
        self._operands[index] = replace(operand, extension_data=bytes(data or b""))

    def get_extension_operand_type(self, name: str, code: int) -> OperandType:
        """Return the operand type `code` of the extension `name`, for `add_operand` of this builder.

        Raises:
            InvalidArgument: If the name is malformed, or the extensions given to this builder do not have the type.
            BadState: If the model is finished.
        """
        self._require_building("get_extension_operand_type")
        return self._types.operand_type(name, code)

    def get_extension_operation_type(self, name: str, code: int) -> OperationType:
        """Return the operation `code` of the extension `name`, for `add_operation` of this builder.

        Raises:
            InvalidArgument: If the name is malformed, or the builder was given extensions and has none of that name.
            BadState: If the model is finished.
        """
        self._require_building("get_extension_operation_type")
        return self._types.operation_type(name, code)

    # -- operations and boundaries -------------------------------------------------------------------------------------

    def add_operation(self, type: OperationType | int | str, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Add an operation. It may read operands that a later one writes: `finish` puts operations in run order.

        Args:
            type: The operation; of an extension, from `get_extension_operation_type`.
            inputs: The operands that are its arguments.
            outputs: The operands that it writes.

        Raises:
            InvalidArgument: If the operation is unknown, an operand does not exist, or their number or types are wrong.
            BadState: If the model is finished.
        """
        self._require_building("add_operation")
        code = to_code(OperationType, type, "N-API-8")
        where, count = f"operation {len(self._operations)} ({code_name(code)})", len(self._operands)
        operation = Operation(
            code,
            to_indexes(inputs, count, f"{where}: inputs", "N-API-8"),
            to_indexes(outputs, count, f"{where}: outputs", "N-API-8"),
        )
        if is_extension(code):
            self._types.require_prefix(code, where)
        else:
            self._require_accepted(operation, where)
        self._operations.append(operation)

    def _require_accepted(self, operation: Operation, where: str) -> None:
        """Require that the HAL's operation has such arguments and outputs. An OEM operation has any."""
        require_counts(operation, where)
        declaration = REGISTRY.get(operation.type)
        if declaration is None:
            return
        inputs, outputs = ([self._operands[i] for i in indexes] for indexes in (operation.inputs, operation.outputs))
        try:
            match(declaration, inputs, outputs)
        except InvalidArgument as error:
            raise InvalidArgument(f"{where}: {error} (N-API-8)") from error

    def identify_inputs_and_outputs(self, inputs: Boundary, outputs: Boundary) -> None:
        """Determine the inputs and outputs of the model, in their order; a mapping gives them names.

        Without names they are called "input 0", "output 0" and so on.

        Raises:
            InvalidArgument: If an operand does not exist, is listed twice or is a constant, or in a second call.
            BadState: If the model is finished.
        """
        self._require_building("identify_inputs_and_outputs")
        require(not self._is_identified, "N-API-9", "the inputs and outputs are identified already")
        found = {kind: self._boundary(kind, listed) for kind, listed in (("input", inputs), ("output", outputs))}
        both = sorted(found["input"].keys() & found["output"])
        require(not both, "N-API-9", f"operands {both} are listed as inputs and as outputs")
        self._inputs, self._outputs = found["input"], found["output"]
        for index in self._inputs:
            self._operands[index] = replace(self._operands[index], lifetime=LifeTime.SUBGRAPH_INPUT)
        for index in self._outputs:
            self._operands[index] = replace(self._operands[index], lifetime=LifeTime.SUBGRAPH_OUTPUT)
        self._is_identified = True

    def _boundary(self, kind: str, listed: Boundary) -> dict[int, str]:
        """Return the names of inputs or outputs by operand."""
        numbers = listed.values() if isinstance(listed, Mapping) else listed
        indexes = to_indexes(numbers, len(self._operands), f"{kind}s", "N-API-9")
        require(len(set(indexes)) == len(indexes), "N-API-9", f"{kind}s {list(indexes)}: an operand is listed twice")
        for index in indexes:
            lifetime = self._operands[index].lifetime
            text = f"{_name(index, self._operands[index])} cannot be an {kind}: it is {lifetime.name}"
            require(lifetime == LifeTime.TEMPORARY_VARIABLE, "N-API-9", text)
        names = listed if isinstance(listed, Mapping) else [f"{kind} {number}" for number in range(len(indexes))]
        return dict(zip(indexes, names, strict=True))

    def relax_computation(self, allow: bool = True) -> None:
        """Allow devices to compute FLOAT32 with the range and precision of FLOAT16. Raises BadState if finished."""
        self._require_building("relax_computation")
        self._is_relaxed = bool(allow)

    # -- the finished model --------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Finish the model: put operations in run order, validate them, remove default arguments and unused operands.

        Raises:
            InvalidArgument: If the model is wrong. It cannot be mended afterwards.
            BadState: If it was called before.
            ResourceExhaustedTransient: If there is no memory for large constants; free some and try again.
        """
        self._require_building("finish")
        try:
            self._model = prepare_for_compilation(self._assembled())
        except InvalidArgument:
            self._release(_State.INVALID)
            raise
        self._release(_State.FINISHED)
        graph_dump("ModelBuilder.finish", self._model)

    def _assembled(self) -> Model:
        """Return the model as it was built."""
        operands = list(self._operands)
        for index, location in self._values.join_large().items():
            operands[index] = replace(operands[index], location=location)
        merging = SubgraphMerging(self._types, [], bytearray(self._values.small), list(self._values.pools))
        for index, operand in enumerate(operands):
            if operand.type == OperandType.SUBGRAPH:
                text = f"{_name(index, operand)} has no value: call set_operand_value_from_model"
                require(index in self._called, "N-API-10", text)
                location = DataLocation(0, merging.add(self._called[index]), 0)
                operands[index] = replace(operand, location=location)
        main = Subgraph(tuple(operands), tuple(self._operations), tuple(self._inputs), tuple(self._outputs))
        subgraphs = (main, *merging.subgraphs)
        codes = [
            int(part.type) for graph in subgraphs for parts in (graph.operands, graph.operations) for part in parts
        ]
        return Model(
            main,
            tuple(merging.subgraphs),
            bytes(merging.values),
            tuple(merging.pools),
            self._is_relaxed,
            self._types.used(codes),
        )

    @property
    def model(self) -> Model:
        """The finished model. Raises BadState if it is not finished, or the builder is closed."""
        if self._model is None:
            raise BadState(f"this model is {self._state.value}")
        return self._model

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        """The inputs. Raises BadState as `model`; InvalidArgument if the dtype of an extension's type is unknown."""
        return self._described(self.model.main.input_indexes, self._inputs.values())

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """The outputs. Raises as `inputs`."""
        return self._described(self.model.main.output_indexes, self._outputs.values())

    def _described(self, indexes: Sequence[int], names: Iterable[str]) -> tuple[TensorInfo, ...]:
        operands = [self.model.main.operands[index] for index in indexes]
        unknown = [o for o in operands if is_extension(o.type) and o.type not in self._types.elements]
        if unknown:
            remedy = "give ModelBuilder the device's extensions, or prepare its `model`"
            raise InvalidArgument(f"the dtype of extension type {int(unknown[0].type):#x} is unknown: {remedy}")
        described = zip(operands, names, strict=True)
        return tuple(operand_info(operand, name, self._types.elements) for operand, name in described)

    @property
    def architecture_hash(self) -> str:
        """A SHA-256 of the finished model without the values of its constants, as telemetry has it."""
        return model_architecture_hash(self.model)

    def close(self) -> None:
        """Release what the builder holds; `model` objects remain valid. Idempotent."""
        self._release(_State.CLOSED)
        self._model = None

    # -- states --------------------------------------------------------------------------------------------------------

    def _require_building(self, call: str) -> None:
        if self._state is not _State.BUILDING:
            raise BadState(f"{call}: this model is {self._state.value} (N-API-2)")

    def _release(self, state: _State) -> None:
        """Drop the parts of the model; the state becomes `state`."""
        self._state = state
        self._values = ConstantValues()
        self._operands, self._operations, self._called = [], [], {}

    def _operand(self, index: int, rule: str) -> Operand:
        to_indexes([index], len(self._operands), "index", rule)
        return self._operands[index]

    def _future_constant(self, call: str, index: int, rule: str) -> Operand:
        """Return an operand that may become a constant."""
        self._require_building(call)
        operand = self._operand(index, rule)
        where = _name(index, operand)
        is_value = operand.type != OperandType.SUBGRAPH
        require(is_value, rule, f"{where}: a model is its value: call set_operand_value_from_model")
        boundary = (LifeTime.SUBGRAPH_INPUT, LifeTime.SUBGRAPH_OUTPUT)
        require(operand.lifetime not in boundary, rule, f"{where} is {code_name(operand.lifetime)}: it has no value")
        return operand

    def _set(self, index: int, lifetime: LifeTime, location: DataLocation) -> None:
        self._values.forget(index)
        self._operands[index] = replace(self._operands[index], lifetime=lifetime, location=location)

    def _dtype(self, operand: Operand) -> str | None:
        """Return NumPy's name of an operand's elements; None if it has none, or it is unknown."""
        if is_extension(operand.type):
            element = self._types.elements.get(operand.type)
            return None if element is None else element.dtype
        return None if operand.type in _WITHOUT_DTYPE else dtype_name(operand.type)


def _name(index: int, operand: Operand) -> str:
    """Return the index, type and dimensions of an operand, for messages."""
    return f"operand {index} ({tensor_text(code_name(operand.type), operand.dimensions)})"
