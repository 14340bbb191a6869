"""GraphBuilder: builds a Model from operands, constants and operations.

Constants stay views of the file until `build` joins them, so that weights are copied once. Equal small constants
(scalars, axes) share one operand. The total size of constants is limited, because all tensors of a hostile file can
refer to the same bytes. Constants are aligned in `operand_values` as the HAL requires: those of 2 or 3 bytes at 2,
larger ones at 4.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import (
    HAL_RANK,
    NAME,
    TENSOR_INT64,
    WIDE_TYPES,
    ExtensionCodes,
    Scheme,
    TfliteOperation,
    extended_code,
    extension_prefix,
    flat_shape,
    is_extension,
    operation_code,
)
from nnfmq.hal.models import aligned_offset, without_unused_operands
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.types import DataLocation, LifeTime, Model, Operand, OperandType, Operation, Subgraph, element_bytes

__all__ = ["GraphBuilder"]

_USUAL = frozenset(
    (
        OperandType.TENSOR_FLOAT16,
        OperandType.TENSOR_FLOAT32,
        OperandType.TENSOR_QUANT8_ASYMM,
        OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
    )
)
_QUANTIZED = (
    OperandType.TENSOR_QUANT8_ASYMM,
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
    OperandType.TENSOR_QUANT16_SYMM,
)


class _Shared(Struct):
    """The common parts of a model's subgraphs: the bytes of constants, prefixes of extensions, called subgraphs."""

    max_bytes: int
    size_bytes: int = 0
    contents: dict[int, bytes | memoryview] = field(default_factory=dict)  # of the constants, by offset
    equal: dict[bytes, DataLocation] = field(default_factory=dict)  # of constants that `stored` has added
    prefixes: set[int] = field(default_factory=set)
    referenced: list[Subgraph] = field(default_factory=list)


class GraphBuilder:
    """A subgraph under construction, by default the main one. Methods return and take operand indexes."""

    def __init__(self, max_constant_bytes: int, shared: _Shared | None = None) -> None:
        self._operands: list[Operand] = []
        self._operations: list[Operation] = []
        self._shared_parts = shared or _Shared(max_constant_bytes)
        self._known: dict[Hashable, DataLocation] = {}
        self._small: dict[tuple[OperandType, bytes], int] = {}
        self._indices: dict[int, int] = {}  # operands of TENSOR_INT64 as INT32
        self.extension_codes = ExtensionCodes()
        self.sized_by_data = set[int]()
        """The operands whose sizes follow from data; with a rank that is not known, dimensions do not tell."""
        """The codes of extensions in this model; the built-in one has prefix `extensions.PREFIX`."""
        self.extension_codes.prefix(NAME)

    def operand(self, operand: Operand) -> int:
        """Add an operand and return its index."""
        if is_extension(operand.type):
            self._shared_parts.prefixes.add(extension_prefix(operand.type))
        self._operands.append(operand)
        return len(self._operands) - 1

    def __getitem__(self, index: int) -> Operand:
        return self._operands[index]

    def constant(self, data: bytes | memoryview) -> DataLocation:
        """Add a constant's bytes and return their location. Raises InvalidArgument if the limit is exceeded."""
        shared = self._shared_parts
        offset = aligned_offset(shared.size_bytes, len(data))
        self.reserve(offset - shared.size_bytes + len(data))
        shared.contents[offset] = data
        shared.size_bytes = offset + len(data)
        return DataLocation(0, offset, len(data))

    def stored(self, data: bytes) -> DataLocation:
        """Return the location of a constant's bytes; all subgraphs of the model share those of equal constants."""
        equal = self._shared_parts.equal
        if data not in equal:
            equal[data] = self.constant(data)
        return equal[data]

    def reserve(self, size_bytes: int) -> None:
        """Raise InvalidArgument if `size_bytes` more of constants would exceed the limit."""
        total, most = self._shared_parts.size_bytes + size_bytes, self._shared_parts.max_bytes
        if total > most:
            raise InvalidArgument(f"constants of {total} bytes: the file's size allows {most}, so its parts overlap")

    def constant_of(self, buffer_index: int, data: memoryview) -> DataLocation:
        """Return the location of a file's buffer, added once even if tensors share it."""
        return self.converted(buffer_index, len(data), lambda: data)

    def converted(self, key: Hashable, size_bytes: int, make: Callable[[], bytes | memoryview]) -> DataLocation:
        """Return the location of the `size_bytes` bytes that `make` returns; `make` is called once for each `key`."""
        if key not in self._known:
            self.reserve(size_bytes)  # before the bytes exist
            self._known[key] = self.constant(make())
        return self._known[key]

    def zeros(self, operand_type: OperandType, scale: float, count: int) -> int:
        """Add a constant vector of `count` zeros."""
        size_bytes = count * element_bytes(operand_type)
        self.reserve(size_bytes)  # before the bytes exist
        location = self.constant(bytes(size_bytes))
        return self.operand(Operand(operand_type, (count,), scale, 0, LifeTime.CONSTANT_COPY, location))

    def int32(self, value: int) -> int:
        """Return a constant INT32 scalar."""
        return self._shared(OperandType.INT32, (), _packed([value]))

    def boolean(self, value: bool) -> int:
        """Return a constant BOOL scalar."""
        return self._shared(OperandType.BOOL, (), bytes([value]))

    def float_scalar(self, tensor_type: OperandType, value: float) -> int:
        """Return a constant scalar of the float type that goes with tensors of `tensor_type`."""
        half = tensor_type == OperandType.TENSOR_FLOAT16
        try:
            data = struct.pack("<e" if half else "<f", value)
        except OverflowError:
            raise InvalidArgument(f"{value} does not fit the model's float type") from None
        return self._shared(OperandType.FLOAT16 if half else OperandType.FLOAT32, (), data)

    def int32_vector(self, values: Sequence[int]) -> int:
        """Return a constant TENSOR_INT32 of rank 1."""
        return self._shared(OperandType.TENSOR_INT32, (len(values),), _packed(values))

    def float_vector(self, values: Sequence[float]) -> int:
        """Return a constant TENSOR_FLOAT32 of rank 1. Raises InvalidArgument for a number beyond float32."""
        try:
            data = struct.pack(f"<{len(values)}f", *values)
        except OverflowError:
            raise InvalidArgument(f"one of {list(values)[:8]} does not fit float32") from None
        return self._shared(OperandType.TENSOR_FLOAT32, (len(values),), data)

    def int32_matrix(self, values: Sequence[int], columns: int) -> int:
        """Return a constant TENSOR_INT32 of rank 2 from the elements of its rows."""
        data = _packed(values)
        location = self.converted(("matrix", columns, data), len(data), lambda: data)
        shape = (len(values) // columns, columns)
        return self.operand(
            Operand(OperandType.TENSOR_INT32, shape, lifetime=LifeTime.CONSTANT_COPY, location=location)
        )

    def omitted(self, operand_type: OperandType) -> int:
        """Return an operand for an omitted optional argument."""
        scale = 1.0 if operand_type in _QUANTIZED else 0.0  # which validation requires of an omitted one, too
        return self.operand(Operand(operand_type, scale=scale, lifetime=LifeTime.NO_VALUE))

    def operation(self, operation_type: OperationType, inputs: Sequence[int], *outputs: int) -> None:
        """Append an operation, of the HAL or of an extension.

        If the HAL's operation does not accept the types or ranks, the built-in extension's takes its place. Indices of
        TENSOR_INT64 are converted for operations that take INT32, and results that are INT32 to TENSOR_INT64.
        """
        operands = self._operands
        if any(operands[index].type == TENSOR_INT64 for index in (*inputs, *outputs)):
            return self._with_indices(operation_type, list(inputs), list(outputs))
        return self._append(operation_type, inputs, *outputs)

    def _with_indices(self, operation_type: OperationType, inputs: list[int], outputs: list[int]) -> None:
        # Imports all operations, which few models need: 3 MiB of an application.
        from nnfmq.importers.shape_inference import indices_of, results_of_32_bits

        operands, casts = self._operands, []
        for position in indices_of(operation_type, [operands[index] for index in inputs]):
            inputs[position] = self._index(inputs[position])
        for position in results_of_32_bits(operation_type, [operands[index] for index in outputs]):
            narrow = self.operand(Operand(OperandType.TENSOR_INT32, operands[outputs[position]].dimensions))
            casts.append((narrow, outputs[position]))
            outputs[position] = narrow
        self._append(operation_type, inputs, *outputs)
        for narrow, wide in casts:
            self._append(OperationType.CAST, [narrow], wide)

    def _index(self, wide: int) -> int:
        """Return a TENSOR_INT64 as INT32."""
        if wide not in self._indices:
            from nnfmq.importers.shape_inference import saturated

            operand = self._operands[wide]
            if operand.lifetime == LifeTime.CONSTANT_COPY:
                location = self.stored(saturated(self.content(wide)))
                narrow = self.operand(replace(operand, type=OperandType.TENSOR_INT32, location=location))
            else:
                narrow = self.operand(Operand(OperandType.TENSOR_INT32, operand.dimensions))
                self._append(operation_code(TfliteOperation.SATURATE), [wide], narrow)
            self._indices[wide] = narrow
        return self._indices[wide]

    def _append(self, operation_type: OperationType, inputs: Sequence[int], *outputs: int) -> None:
        operands = self._operands
        flat = flat_shape(operation_type, [operands[index] for index in inputs])
        if flat:
            return self._append_flat(operation_type, inputs, outputs[0], flat)
        operation_type = _code(operation_type, [operands[i] for i in inputs], [operands[i] for i in outputs])
        if is_extension(operation_type):
            self._shared_parts.prefixes.add(extension_prefix(operation_type))
        return self._operations.append(Operation(operation_type, tuple(inputs), outputs))

    def _append_flat(
        self, operation_type: OperationType, inputs: Sequence[int], output: int, flat: tuple[int, ...]
    ) -> None:
        """Append an operation on the elements of its first input in another shape, and a RESHAPE of its result."""
        x, place = self._operands[inputs[0]], DataLocation()
        before, after = (
            self.operand(replace(operand, dimensions=flat, lifetime=LifeTime.TEMPORARY_VARIABLE, location=place))
            for operand in (x, self._operands[output])
        )
        self._append(OperationType.RESHAPE, [inputs[0], self.int32_vector(flat)], before)
        self._append(operation_type, [before, *inputs[1:]], after)
        self._append(OperationType.RESHAPE, [after, self.int32_vector(x.dimensions)], output)

    def as_output(self, index: int) -> None:
        """Make an operand, so far an intermediate result, an output of the model."""
        self._operands[index] = replace(self._operands[index], lifetime=LifeTime.SUBGRAPH_OUTPUT)

    def content(self, index: int) -> bytes | memoryview:
        """Return the bytes of a constant operand."""
        return self._shared_parts.contents[self._operands[index].location.offset]

    def with_content(self, index: int, data: bytes, is_shared: bool) -> int:
        """Return a constant operand like `index` with other bytes: that operand itself, unless `is_shared`."""
        operand = replace(self._operands[index], location=self.constant(data))
        if is_shared:
            return self.operand(operand)
        self._operands[index] = operand
        return index

    def replace_operations(self, operations: Sequence[Operation]) -> None:
        """Replace all operations so far."""
        self._operations = list(operations)

    @property
    def operations(self) -> Sequence[Operation]:
        """The operations so far."""
        return self._operations

    @property
    def operation_count(self) -> int:
        """The number of operations so far."""
        return len(self._operations)

    def infer_shapes(self, begin: int) -> None:
        """Give the outputs of the operations from `begin` on the shapes that follow from their inputs.

        Raises:
            InvalidArgument: If a shape depends on the data.
            GeneralFailure: If the inputs' shapes violate a constraint of an operation.
        """
        for operation in self._operations[begin:]:
            for index, shape in zip(operation.outputs, self.output_shapes(operation), strict=True):
                if 0 in shape:
                    raise InvalidArgument("the shape of its result depends on the data")
                self.set_dimensions(index, shape)

    def output_shapes(self, operation: Operation) -> list[tuple[int, ...]]:
        """Return the shapes of an operation's outputs; a size that depends on the data is 0.

        Raises:
            InvalidArgument: If a shape depends on values that are not constants.
            GeneralFailure: As `infer_shapes`.
        """
        from nnfmq.importers.shape_inference import output_shapes  # imports the declarations of operations

        return output_shapes(operation, self._operands, self._shared_parts.contents)

    def require_plan(self, operation: Operation) -> None:
        """Require that a device can prepare an operation whose inputs' shapes are known.

        Raises:
            InvalidArgument: If that depends on the data.
            GeneralFailure: If a constraint is violated.
        """
        from nnfmq.importers.shape_inference import require_plan  # imports the declarations of operations

        require_plan(operation, self._operands, self._shared_parts.contents)

    def build(self, inputs: Sequence[int], outputs: Sequence[int]) -> Model:
        """Return the model, without unused operands, and with one copy of all constants."""
        shared = self._shared_parts
        used = tuple(entry for entry in self.extension_codes.extensions if entry.prefix in shared.prefixes)
        subgraphs = [without_unused_operands(each) for each in (self._subgraph(inputs, outputs), *shared.referenced)]
        offsets = {operand.location.offset for each in subgraphs for operand in each.operands if _is_constant(operand)}
        values, new_offsets = _joined({offset: shared.contents[offset] for offset in sorted(offsets)})
        main, *referenced = (_relocated(each, new_offsets) for each in subgraphs)
        return Model(main, tuple(referenced), values, extensions=used)

    def _subgraph(self, inputs: Sequence[int], outputs: Sequence[int]) -> Subgraph:
        return Subgraph(tuple(self._operands), tuple(self._operations), tuple(inputs), tuple(outputs))

    def child(self) -> GraphBuilder:
        """Return a builder of another subgraph of the model, which `refer` ends."""
        builder = GraphBuilder(0, self._shared_parts)
        builder.extension_codes = self.extension_codes
        return builder

    def refer(self, inputs: Sequence[int], outputs: Sequence[int]) -> int:
        """Add this subgraph to those that operations of others can call, and return its index."""
        self._shared_parts.referenced.append(self._subgraph(inputs, outputs))
        return len(self._shared_parts.referenced) - 1

    def callee(self, index: int) -> int:
        """Return an operand that names a subgraph that `refer` returned."""
        location = DataLocation(0, index, 0)
        return self.operand(Operand(OperandType.SUBGRAPH, lifetime=LifeTime.SUBGRAPH, location=location))

    def set_dimensions(self, index: int, dimensions: tuple[int, ...]) -> None:
        """State other dimensions of an operand; an unknown size is 0."""
        self._operands[index] = replace(self._operands[index], dimensions=dimensions)

    def _shared(self, operand_type: OperandType, dimensions: tuple[int, ...], data: bytes) -> int:
        key = (operand_type, data)
        if key not in self._small:
            location = self.constant(data)
            operand = Operand(operand_type, dimensions, lifetime=LifeTime.CONSTANT_COPY, location=location)
            self._small[key] = self.operand(operand)
        return self._small[key]


def _code(operation_type: OperationType, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> OperationType:
    """Return the extension's code of an operation if the HAL's does not accept the types or ranks of the operands."""
    types = {operand.type for operand in (*inputs, *outputs)}
    if OperandType.TENSOR_QUANT16_SYMM in types:
        return extended_code(operation_type, Scheme.SIXTEEN_BITS)
    wider = extended_code(operation_type, Scheme.WIDER)
    if wider == operation_type or _are_usual(operation_type, inputs, outputs):
        return operation_type
    if not types.isdisjoint(WIDE_TYPES):
        return wider
    from nnfmq.importers.shape_inference import accepts_only_wider  # imports the declarations of operations

    return wider if accepts_only_wider(operation_type, inputs, outputs) else operation_type


def _are_usual(operation_type: OperationType, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> bool:
    """Return whether the operands are certainly of types and ranks that the HAL accepts, without a look at it."""
    if operation_type == OperationType.CAST or max(len(operand.dimensions) for operand in inputs) > HAL_RANK:
        return False
    return inputs[0].type in _USUAL or outputs[0].type in _USUAL


def _is_constant(operand: Operand) -> bool:
    return operand.lifetime == LifeTime.CONSTANT_COPY


def _joined(contents: Mapping[int, bytes | memoryview]) -> tuple[bytes, dict[int, int]]:
    """Return constants one after the other, and the new offset of each."""
    chunks: list[bytes | memoryview] = []
    new_offsets, end = {}, 0
    for offset, data in contents.items():
        new_offsets[offset] = aligned_offset(end, len(data))
        chunks += [bytes(new_offsets[offset] - end), data]
        end = new_offsets[offset] + len(data)
    return b"".join(chunks), new_offsets


def _relocated(subgraph: Subgraph, new_offsets: Mapping[int, int]) -> Subgraph:
    """Return a subgraph whose constants are at other offsets."""
    operands = (
        replace(o, location=replace(o.location, offset=new_offsets[o.location.offset])) if _is_constant(o) else o
        for o in subgraph.operands
    )
    return replace(subgraph, operands=tuple(operands))


def _packed(values: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(values)}i", *values)
    except struct.error:
        raise InvalidArgument(f"{max(values, key=abs)} does not fit 32 bits") from None
