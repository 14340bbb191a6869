"""Values of an ONNX graph and the conversion of one node: what the modules of `operators` work with.

A Value is a constant, or the result of HAL operations. Every shape is known. A tensor of rank 0 has an operand of
shape (1,): the HAL has no tensors of rank 0. Integers of less than 32 bits become INT32, floats of 8 and bfloat16
FLOAT32: results are wrapped, or rounded, to what their type has. int64, uint32, uint64 and float64 have types of the
extension. Elements of int64 that certainly fit 32 bits are INT32 instead, which devices compute faster: those of an
input that are indices, and what operators make of such elements if they stay within 32 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from msgspec.structs import replace

from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.extensions import (
    TENSOR_FLOAT64,
    TENSOR_INT64,
    TENSOR_UINT32,
    TENSOR_UINT64,
    WIDE_TYPES,
    TfliteOperation,
    operation_code,
)
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.summaries import tensor_text
from nnfmq.hal.types import LifeTime, Operand, OperandType
from nnfmq.importers.graph_builder import GraphBuilder
from nnfmq.importers.onnx.file import FLOAT_FORMATS, element_name, integer_limits

__all__ = [
    "ARITHMETIC",
    "Array",
    "Bounds",
    "Node",
    "QuantizedForm",
    "Value",
    "nothing",
    "operand_type_of",
    "result_bounds",
]


# ----------------------------------------------------------------------------------------------------------------------
# Bounds of the integers that a node returns: elements of int64 that certainly fit 32 bits are computed in 32.


Bounds: TypeAlias = tuple[int, int]
"""The smallest and the largest integer that a tensor can have."""


def _sum(bounds: Sequence[Bounds], count: int) -> Bounds:
    (low, high), (other_low, other_high) = bounds
    return low + other_low, high + other_high


def _difference(bounds: Sequence[Bounds], count: int) -> Bounds:
    (low, high), (other_low, other_high) = bounds
    return low - other_high, high - other_low


def _product(bounds: Sequence[Bounds], count: int) -> Bounds:
    products = [one * other for one in bounds[0] for other in bounds[1]]
    return min(products), max(products)


def _total(bounds: Sequence[Bounds], count: int) -> Bounds:
    """Return the bounds of sums of any of the first input's elements, which are `count`; further inputs are axes."""
    low, high = bounds[0]
    return min(low * count, 0), max(high * count, 0)


def _negative(bounds: Sequence[Bounds], count: int) -> Bounds:
    low, high = bounds[0]
    return -high, -low


def _size(bounds: Sequence[Bounds], count: int) -> Bounds:
    low, high = bounds[0]
    return 0, max(-low, high, 0)


ARITHMETIC: Mapping[str, Callable[[Sequence[Bounds], int], Bounds]] = {
    "Abs": _size,
    "Add": _sum,
    "CumSum": _total,
    "Mul": _product,
    "Neg": _negative,
    "ReduceSum": _total,
    "Sub": _difference,
}
"""What bounds the results of operators, given the bounds of their inputs and the first input's number of elements."""
_SELECTIONS = frozenset(
    ("Concat", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Max", "Min", "ReduceMax",
     "ReduceMin", "Reshape", "ReverseSequence", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Where")
)  # fmt: skip


def result_bounds(operator: str, bounds: Sequence[Bounds], count: int) -> Bounds | None:
    """Return the bounds of an operator's results, given those of the inputs on which they depend; None if unknown."""
    if operator in ARITHMETIC:
        return ARITHMETIC[operator](bounds, count)
    if operator in _SELECTIONS and bounds:
        return min(low for low, _ in bounds), max(high for _, high in bounds)
    return None


# ----------------------------------------------------------------------------------------------------------------------
# Values of an ONNX graph and the conversion of one node: what the modules of `operators` work with.


Array: TypeAlias = npt.NDArray[Any]
Shape: TypeAlias = tuple[int, ...]
_OPERAND_TYPES = {
    "float32": OperandType.TENSOR_FLOAT32,
    "float16": OperandType.TENSOR_FLOAT16,
    "float64": TENSOR_FLOAT64,
    "int32": OperandType.TENSOR_INT32,
    "int64": TENSOR_INT64,
    "uint32": TENSOR_UINT32,
    "uint64": TENSOR_UINT64,
    "bool": OperandType.TENSOR_BOOL8,
    **dict.fromkeys(("int8", "int16", "uint8", "uint16"), OperandType.TENSOR_INT32),
    **dict.fromkeys(("int2", "int4", "uint2", "uint4"), OperandType.TENSOR_INT32),
    **dict.fromkeys(FLOAT_FORMATS, OperandType.TENSOR_FLOAT32),
}
_INT64 = np.dtype(np.int64)
_LIMITS_32 = np.iinfo(np.int32)
_UNCHANGED = frozenset(
    ("Concat", "Expand", "Flatten", "Gather", "Identity", "Max", "Min", "Reshape", "Slice", "Split", "Squeeze",
     "Transpose", "Unsqueeze", "Where")
)  # fmt: skip
"""Operators whose results are elements of their inputs: they need no wrapping to the bits of a type."""
_INSIDE = {
    **dict.fromkeys(
        ("ArgMax", "ArgMin", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "Clip", "Concat", "Equal",
         "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod", "ReduceMax", "ReduceMin", "Sign",
         "TopK", "Where")
    ),
    **dict.fromkeys(
        ("CastLike", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Reshape",
         "ReverseSequence", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze"), (0,)
    ),
    "Pad": (0, 2),
}  # fmt: skip
"""Operators whose results fit 32 bits if certain inputs do, by default all: the positions of these inputs."""
_STORED = {
    OperandType.TENSOR_BOOL8: np.uint8,
    OperandType.TENSOR_FLOAT32: np.float32,
    OperandType.TENSOR_FLOAT16: np.float16,
    OperandType.TENSOR_INT32: np.int32,
    TENSOR_INT64: np.int64,
    TENSOR_FLOAT64: np.float64,
    TENSOR_UINT32: np.uint32,
    TENSOR_UINT64: np.uint64,
}


def operand_type_of(dtype: np.dtype[Any]) -> OperandType:
    """Return the operand type of tensors of `dtype`. Raises InvalidArgument if there is none."""
    try:
        return _OPERAND_TYPES[dtype.name]
    except KeyError:
        raise InvalidArgument(f"tensors of {element_name(dtype)} are not supported") from None


def nothing(shape: Shape, dtype: np.dtype[Any]) -> Array:
    """Return an array without elements. Raises InvalidArgument if NumPy has none of this shape."""
    try:
        return np.zeros(shape, dtype)
    except ValueError as error:
        raise InvalidArgument(f"a tensor of the shape {shape}: {error}") from None


class Value(Struct):
    """A tensor: `array` if it is a constant, else `operand`; a constant gets an operand when it is first needed.

    `node` computed it, and `quantized` are the integers of dequantized floats, as far as they are known. `forms` are
    the operands of int64 elements as INT32 and as TENSOR_INT64, and that of uint8 elements as bytes; `bounds` are those
    of int64 elements.
    """

    shape: Shape
    dtype: np.dtype[Any]
    operand: int | None = None
    array: Array | None = None
    node: Node | None = None
    quantized: QuantizedForm | None = None
    forms: dict[OperandType, int] = field(default_factory=dict)
    bounds: Bounds | None = None

    def __repr__(self) -> str:
        return f"<Value: {tensor_text(self.dtype.name, self.shape)}>"  # without the node, which refers to its values

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @staticmethod
    def of_operand(shape: Shape, dtype: np.dtype[Any], operand: int) -> Value:
        """Return an input or a result; one that has no elements is a constant, and its operand means nothing."""
        return Value.of(nothing(shape, dtype)) if 0 in shape else Value(shape, dtype, operand)

    @staticmethod
    def of(array: Array) -> Value:
        """Return a constant."""
        return Value(array.shape, array.dtype, None, array)


class QuantizedForm(Struct, frozen=True):
    """Integers of which floats are (integer - zero point) * scale; a constant may have scales along an axis."""

    value: Value
    scale: Array
    zero_point: Array
    axis: int


class Node(Struct):
    """One node under conversion: its inputs (None if omitted), its attributes, and the results so far.

    `unread` are the names of outputs that nothing reads.
    """

    name: str
    operator: str
    opset: int
    builder: GraphBuilder
    inputs: list[Value | None]
    output_names: list[str]
    attributes: dict[str, Any] = field(default_factory=dict)
    results: dict[int, Value] = field(default_factory=dict)
    attributes_read: set[str] = field(default_factory=set)
    unread: frozenset[str] = frozenset()

    def attribute(self, name: str, default: Any) -> Any:
        """Return an attribute; a float has the precision of float32.

        Raises:
            InvalidArgument: If it has another type than `default`.
        """
        self.attributes_read.add(name)
        value = self.attributes.get(name, float(np.float32(default)) if isinstance(default, float) else default)
        kind = (int, float) if isinstance(default, float) else type(default)
        if default is not None and not isinstance(value, kind):
            raise InvalidArgument(f"attribute {name} is {value!r}: it must be of type {type(default).__name__}")
        return value

    def given(self, position: int) -> bool:
        """Return True if the input is given."""
        return position < len(self.inputs) and self.inputs[position] is not None

    def value(self, position: int) -> Value:
        """Return an input. Raises InvalidArgument if it is omitted."""
        found = self.inputs[position] if position < len(self.inputs) else None
        if found is None:
            raise InvalidArgument(f"input {position} is missing")
        return found

    def constant(self, position: int, name: str) -> Array:
        """Return the value of an input that must be a constant. Raises InvalidArgument if it is not one."""
        array = self.value(position).array
        if array is None:
            raise InvalidArgument(f"its {name} is not a constant")
        return array

    def integers(self, name: str, position: int) -> tuple[int, ...] | None:
        """Return integers that are an attribute in old opsets and an input in new ones; None if they are omitted."""
        self.attributes_read.add(name)
        if self.given(position):
            array = self.constant(position, name)
            if array.dtype.kind not in "iu":
                raise InvalidArgument(f"its {name} has elements of {array.dtype.name}: they must be integers")
            if array.ndim > 1 and not self.operator.startswith("com.microsoft."):
                raise InvalidArgument(f"its {name} has the shape {array.shape}: it must be a vector")
            return tuple(int(number) for number in array.reshape(-1))
        found = self.attributes.get(name)
        return None if found is None else tuple(int(number) for number in found)

    def used(self, position: int) -> bool:
        """Return True if an output has a name that something reads."""
        name = self.output_names[position] if position < len(self.output_names) else ""
        return bool(name) and name not in self.unread

    def operand(self, value: Value | int) -> int:
        """Return the operand of an input, given its position or its value."""
        value = self.value(value) if isinstance(value, int) else value
        if value.dtype == _INT64:
            is_inside = self._bounds_of(value) is not None and self._is_inside()
            return self._form(value, OperandType.TENSOR_INT32 if is_inside else TENSOR_INT64)
        if value.operand is None:
            assert value.array is not None
            value.operand = self.add_constant(value.array)
        return value.operand

    def index_operand(self, value: Value | int) -> int:
        """Return the INT32 operand of an input whose elements are indices or sizes; others stay beyond any extent."""
        value = self.value(value) if isinstance(value, int) else value
        if value.dtype == _INT64:
            return self._form(value, OperandType.TENSOR_INT32)
        found = self.operand(value)
        return self._saturated(found) if self.builder[found].type in (TENSOR_UINT32, TENSOR_UINT64) else found

    def _is_inside(self) -> bool:
        """Return whether all results of elements of int64 are known to fit 32 bits."""
        if self.operator not in _INSIDE and self.operator not in ARITHMETIC:
            return False
        known = self._input_bounds()
        if not known or self.operator not in ARITHMETIC:
            return known is not None
        low, high = ARITHMETIC[self.operator](known, self.value(0).size)
        return bool(_LIMITS_32.min <= low and high <= _LIMITS_32.max)

    def _input_bounds(self) -> list[Bounds] | None:
        """Return the bounds of the int64 inputs on which the results depend; None if one is beyond 32 bits."""
        positions: Iterable[int] = _INSIDE.get(self.operator) or range(len(self.inputs))
        values = [self.inputs[position] for position in positions if position < len(self.inputs)]
        found = [self._bounds_of(value) for value in values if value is not None and value.dtype == _INT64]
        return [each for each in found if each is not None] if None not in found else None

    def _bounds_of(self, value: Value) -> Bounds | None:
        """Return the bounds of elements of int64 that fit 32 bits; None if they may not."""
        if value.array is not None:
            low, high = int(value.array.min(initial=0)), int(value.array.max(initial=0))
            return (low, high) if _LIMITS_32.min <= low and high <= _LIMITS_32.max else None
        if value.operand is None or self.builder[value.operand].type != OperandType.TENSOR_INT32:
            return None
        return value.bounds or (_LIMITS_32.min, _LIMITS_32.max)

    def _result_bounds(self, dtype: np.dtype[Any]) -> Bounds | None:
        """Return the bounds of results of int64 as far as they are known."""
        if dtype != _INT64:
            return None
        given = self.inputs[0] if self.inputs else None
        if given is not None and given.dtype != _INT64 and self.operator in ("Cast", "CastLike"):
            return (0, 1) if given.dtype == np.bool_ else integer_limits(given.dtype)
        known = self._input_bounds()
        return result_bounds(self.operator, known, given.size) if known and given is not None else None

    def _form(self, value: Value, kind: OperandType) -> int:
        """Return elements of int64 as an operand of a type; INT32 saturates."""
        if kind not in value.forms:
            value.forms[kind] = self._converted(value, kind)
        return value.forms[kind]

    def _converted(self, value: Value, kind: OperandType) -> int:
        if value.array is not None:
            array = value.array
            return self.add_constant(array if kind == TENSOR_INT64 else _saturated(array))
        assert value.operand is not None
        if self.builder[value.operand].type == kind:
            return value.operand
        if kind == OperandType.TENSOR_INT32:
            return self._saturated(value.operand)
        return self.emit(OperationType.CAST, [value.operand], kind)

    def _saturated(self, operand: int) -> int:
        """Return integers as INT32; those beyond it become its limits."""
        return self.emit(operation_code(TfliteOperation.SATURATE), [operand], OperandType.TENSOR_INT32)

    def output(self) -> int:
        """Return the operand of the first input for users: integers that are FLOAT32 in the model become INT32.

        Outputs of the model are bytes if there are such.
        """
        as_bytes = self.value(0).forms.get(OperandType.TENSOR_QUANT8_ASYMM)
        if as_bytes is not None and self.operator == "Identity":
            return as_bytes
        found = self.operand(0)
        if self.value(0).dtype.kind in "iu" and self.builder[found].type == OperandType.TENSOR_FLOAT32:
            return self.emit(OperationType.CAST, [found], OperandType.TENSOR_INT32)
        return found

    def add_constant(self, array: Array) -> int:
        """Add a constant tensor. Raises InvalidArgument if the HAL and the extension have no such type."""
        kind = operand_type_of(array.dtype)
        stored = np.ascontiguousarray(array, _STORED.get(kind))
        if not array.size:
            raise InvalidArgument(f"an input of shape {array.shape} has no elements, which is not supported here")
        self.builder.reserve(stored.nbytes)
        location = self.builder.stored(stored.tobytes())
        return self.builder.operand(Operand(kind, array.shape or (1,), 0.0, 0, LifeTime.CONSTANT_COPY, location))

    def shape(self, operand: int) -> Shape:
        """Return the shape of an operand."""
        return self.builder[operand].dimensions

    def emit(
        self,
        operation: OperationType,
        operands: Sequence[int],
        kind: OperandType | None = None,
        quantization: tuple[float, int] | None = None,
    ) -> int:
        """Add an operation with one output, of the first operand's type if `kind` is None; return the output."""
        kinds = [self.builder[operands[0]].type if kind is None else kind]
        return self.emit_many(operation, operands, kinds, quantization)[0]

    def emit_many(
        self,
        operation: OperationType,
        operands: Sequence[int],
        kinds: Sequence[OperandType],
        quantization: tuple[float, int] | None = None,
    ) -> tuple[int, ...]:
        """Add an operation and return its outputs, which have the shapes that follow from the operands.

        Outputs of the first operand's type have its scale and zero point, or `quantization`.

        Raises:
            InvalidArgument: If the HAL's operation does not accept the operands.
        """
        begin, first = self.builder.operation_count, self.builder[operands[0]]
        quantization = quantization or (first.scale, first.zero_point)
        outputs = tuple(
            self.builder.operand(Operand(kind, (), *(quantization if kind == first.type else ()))) for kind in kinds
        )
        self.builder.operation(operation, operands, *outputs)
        try:
            self.builder.infer_shapes(begin)
        except GeneralFailure as error:
            raise InvalidArgument(str(error)) from None
        return outputs

    def result(self, operand: int, shape: Shape, dtype: np.dtype[Any] | None = None, position: int = 0) -> None:
        """Make an operand the output at `position`, reshaped if it has another shape than `shape`."""
        dtype = self.value(0).dtype if dtype is None else dtype
        operand = operand if self.operator in _UNCHANGED else self.narrowed(operand, dtype)
        bounds = self._result_bounds(dtype)
        self.results[position] = Value(tuple(shape), dtype, self.reshaped(operand, shape), bounds=bounds)

    def narrowed(self, operand: int, dtype: np.dtype[Any]) -> int:
        """Return elements of INT32 or FLOAT32 as a narrower type has them: integers wrap, and floats are rounded."""
        kind, limits = self.builder[operand].type, integer_limits(dtype)
        if limits is not None and limits[1] - limits[0] < 1 << 16 and kind == OperandType.TENSOR_INT32:
            return self._wrapped(operand, *limits)
        form = FLOAT_FORMATS.get(dtype.name)
        if form is None or kind != OperandType.TENSOR_FLOAT32:
            return operand
        saturates = dtype.name.startswith("float8") and self.attribute("saturate", 1)
        numbers = [self.builder.int32(form.fraction), self.builder.int32(form.exponent)]
        largest = self.builder.float_scalar(OperandType.TENSOR_FLOAT32, form.largest)
        overflow = self.builder.int32(0 if saturates else form.overflow)
        return self.emit(operation_code(TfliteOperation.ROUND_TO_FORMAT), [operand, *numbers, largest, overflow])

    def _wrapped(self, operand: int, lowest: int, highest: int) -> int:
        """Return INT32 elements modulo a range."""
        first, none = self.filled(OperandType.TENSOR_INT32, lowest), self.builder.int32(0)
        count = self.filled(OperandType.TENSOR_INT32, highest - lowest + 1)
        from_zero = self.emit(OperationType.SUB, [operand, first, none])
        rest = self.emit(operation_code(TfliteOperation.FLOOR_MOD), [from_zero, count])
        return self.emit(OperationType.ADD, [rest, first, none])

    def computed(self, position: int) -> Value:
        """Return a result, which knows from then on that this node computed it, unless another one did."""
        found = self.results[position]
        found.node = found.node or replace(self, results={})  # no cycle, which would keep the file's content
        return found

    def constant_result(self, array: Array, position: int = 0) -> None:
        """Make a constant the output at `position`."""
        self.results[position] = Value.of(array)

    def reshaped(self, operand: int, shape: Shape) -> int:
        """Return the operand in another shape; () becomes (1,)."""
        wanted = tuple(shape) or (1,)
        if self.shape(operand) == wanted:
            return operand
        if self.builder[operand].type == OperandType.TENSOR_BOOL8:
            return self.to_bool(self.reshaped(self.from_bool(operand), wanted))
        return self.emit(OperationType.RESHAPE, [operand, self.builder.int32_vector(wanted)])

    def from_bool(self, operand: int, kind: OperandType = OperandType.TENSOR_FLOAT32) -> int:
        """Return 1 where a BOOL8 operand is true, else 0; few operations take BOOL8, and the HAL's CAST does not."""
        if kind in WIDE_TYPES:
            return self.emit(OperationType.CAST, [operand], kind)
        filled = [self.uniform(kind, self.shape(operand), number) for number in (1.0, 0.0)]
        return self.emit(OperationType.SELECT, [operand, *filled], kind)

    def to_bool(self, operand: int) -> int:
        """Return BOOL that is true at the elements of an operand that are not 0."""
        zero = self.filled(self.builder[operand].type, 0.0)
        return self.emit(OperationType.NOT_EQUAL, [operand, zero], OperandType.TENSOR_BOOL8)

    def scalar(self, kind: OperandType, number: float) -> int:
        """Return a constant scalar of the type that goes with tensors of type `kind`.

        Raises:
            InvalidArgument: If there is no such type.
        """
        if kind in WIDE_TYPES:
            raise InvalidArgument(f"elements of {kind.name} are not supported")
        if kind == OperandType.TENSOR_INT32:
            return self.builder.int32(int(number))
        return self.builder.float_scalar(kind, float(number))

    def filled(self, kind: OperandType, number: float) -> int:
        """Return a constant tensor of shape (1,)."""
        dtype = bool if kind == OperandType.TENSOR_BOOL8 else _STORED[kind]
        with np.errstate(over="ignore"):
            return self.add_constant(np.asarray([number]).astype(dtype))

    def uniform(self, kind: OperandType, shape: Shape, number: float) -> int:
        """Return a tensor of a shape with all elements equal."""
        if kind not in WIDE_TYPES:
            return self.emit(OperationType.FILL, [self.builder.int32_vector(shape), self.scalar(kind, number)], kind)
        one = self.reshaped(self.filled(kind, number), (1,) * len(shape))
        return self.emit(OperationType.TILE, [one, self.builder.int32_vector(shape)])


def _saturated(array: Array) -> Array:
    return np.clip(array, _LIMITS_32.min, _LIMITS_32.max).astype(np.int32)
