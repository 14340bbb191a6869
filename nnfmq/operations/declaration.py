"""Declarations of operations, which validation, shape inference and every engine read.

A `Declaration` has an operation's *overloads* (alternative parameter lists), its *variants* (combinations of types,
each with the feature level that introduced it and the plan that computes it) and its shape rule. The role of a
parameter decides when its value is needed:

    DATA       an array that the kernel reads at each execution; if its contents decide addresses (boxes, batch
               indices), the kernel validates a private copy
    WEIGHT     an array that is packed before the execution; once, if it is constant
    ATTRIBUTE  an index, axis, size, padding or code that decides shapes, addresses or control flow: copied, validated,
               then passed by name as a Python number or an array

A parameter's type is a fixed OperandType, a type variable such as "T" that each variant binds, or ANY. Declarations
contain no arithmetic: shape rules shared by several families are in `shapes`, kernels in the modules of the families,
kernel adapters in `kernel_adapters`. Types, arities and levels are those of the HAL's operation table (HAL 1.0 to 1.3,
AIDL v1 to v4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import (
    TENSOR_COMPLEX64,
    TENSOR_FLOAT64,
    TENSOR_INT64,
    TENSOR_UINT32,
    TENSOR_UINT64,
    WIDE_TYPES,
    Scheme,
)
from nnfmq.hal.types import ChannelQuant, LifeTime, Operand, OperandType, OperationType

__all__ = [
    "REGISTRY",
    "Declaration",
    "Declarations",
    "Extended",
    "Match",
    "Overload",
    "Parameter",
    "Role",
    "Tensor",
    "Variant",
    "accepts_types",
    "attribute",
    "conversions",
    "data",
    "match",
    "of_types",
    "overload",
    "sixteen_bits",
    "tflite",
    "types_since",
    "weight",
    "wider",
]

Array: TypeAlias = npt.NDArray[Any]
Shape: TypeAlias = tuple[int, ...]
ParameterType: TypeAlias = str | OperandType | None  # a type variable, a fixed type, or ANY
Run: TypeAlias = Callable[..., Any]  # DATA arrays in order (None if omitted) -> the output array, or a tuple of them
Plan: TypeAlias = Callable[..., Run]  # Tensors of DATA and WEIGHT in order, output=, attributes by name -> Run

V1_0, V1_1, V1_2, V1_3, AIDL_V1, AIDL_V2, AIDL_V3, AIDL_V4 = range(1, 9)  # feature levels

F32, F16, I32 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16, OperandType.TENSOR_INT32
Q8, Q8S, PC = (
    OperandType.TENSOR_QUANT8_ASYMM,
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
    OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL,
)
S8, B8 = OperandType.TENSOR_QUANT8_SYMM, OperandType.TENSOR_BOOL8
Q16S = OperandType.TENSOR_QUANT16_SYMM
I64, F64, U32, U64, C64 = TENSOR_INT64, TENSOR_FLOAT64, TENSOR_UINT32, TENSOR_UINT64, TENSOR_COMPLEX64
WIDE, WIDE_INTEGERS = WIDE_TYPES, (I64, U32, U64)  # all four are numbers
FLOAT32, FLOAT16, INT32, BOOL = OperandType.FLOAT32, OperandType.FLOAT16, OperandType.INT32, OperandType.BOOL

NUMPY_TYPES: dict[OperandType, np.dtype[Any]] = {  # `extensions.install` adds the types of extensions
    OperandType.FLOAT32: np.dtype("<f4"),
    OperandType.INT32: np.dtype("<i4"),
    OperandType.UINT32: np.dtype("<u4"),
    OperandType.TENSOR_FLOAT32: np.dtype("<f4"),
    OperandType.TENSOR_INT32: np.dtype("<i4"),
    OperandType.TENSOR_QUANT8_ASYMM: np.dtype("u1"),
    OperandType.BOOL: np.dtype("u1"),
    OperandType.TENSOR_QUANT16_SYMM: np.dtype("<i2"),
    OperandType.TENSOR_FLOAT16: np.dtype("<f2"),
    OperandType.TENSOR_BOOL8: np.dtype("u1"),
    OperandType.FLOAT16: np.dtype("<f2"),
    OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL: np.dtype("i1"),
    OperandType.TENSOR_QUANT16_ASYMM: np.dtype("<u2"),
    OperandType.TENSOR_QUANT8_SYMM: np.dtype("i1"),
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED: np.dtype("i1"),
}

ANY = None  # IF and WHILE pass operands of every type to their subgraphs


class Role(Enum):
    """When a parameter's value is needed, and whether it is copied first."""

    DATA = "data"
    WEIGHT = "weight"
    ATTRIBUTE = "attribute"


class Parameter(Struct, frozen=True):
    """One parameter of an overload. `repeated`: takes one or more arguments. `optional`: may be NO_VALUE."""

    name: str
    type: ParameterType
    role: Role = Role.DATA
    optional: bool = False
    repeated: bool = False

    def accepts(self, operand: Operand, types: Mapping[str, OperandType]) -> bool:
        """Return True if `operand` has this parameter's type; `types` binds the type variables."""
        return _has_type(operand, self.type, types)


def _has_type(operand: Operand, type: ParameterType, types: Mapping[str, OperandType]) -> bool:
    return type is ANY or operand.type == (types[type] if isinstance(type, str) else type)


def data(name: str, type: ParameterType = "T", *, optional: bool = False, repeated: bool = False) -> Parameter:
    """Declare an array that the kernel reads at each execution."""
    return Parameter(name, type, Role.DATA, optional, repeated)


def weight(name: str, type: ParameterType = "T", *, optional: bool = False) -> Parameter:
    """Declare an array that the plan packs before the execution."""
    return Parameter(name, type, Role.WEIGHT, optional)


def attribute(name: str, type: ParameterType = INT32, *, optional: bool = False) -> Parameter:
    """Declare a value that decides shapes, addresses or control flow."""
    return Parameter(name, type, Role.ATTRIBUTE, optional)


class Overload(Struct, frozen=True):
    """One parameter list. `arities`: accepted argument count (the minimum if a parameter repeats) → feature level."""

    parameters: tuple[Parameter, ...]
    arities: Mapping[int, int]

    def expand(self, count: int) -> tuple[tuple[Parameter, ...], int] | None:
        """Return a parameter for each of `count` arguments and the feature level; None if the count is not accepted."""
        for position, parameter in enumerate(self.parameters):
            if parameter.repeated:
                min_count, level = next(iter(self.arities.items()))
                if count < min_count:
                    return None
                repeated = (parameter,) * (count - len(self.parameters) + 1)
                return self.parameters[:position] + repeated + self.parameters[position + 1 :], level
        return (self.parameters[:count], self.arities[count]) if count in self.arities else None


def overload(*parameters: Parameter, level: int = V1_0, also: Mapping[int, int] | None = None) -> Overload:
    """Declare an overload: all parameters since `level`, and the shorter lists of `also` (count → level)."""
    return Overload(parameters, {len(parameters): level, **(also or {})})


class Variant(Struct, frozen=True):
    """One binding of the type variables, its feature level, and its plan (None: no engine computes it)."""

    types: Mapping[str, OperandType]
    level: int
    plan: Plan | None = None


_FIRST_LEVELS = {F16: V1_2, Q8S: V1_3}


def types_since(level: int, plan: Plan, *types: OperandType, **others: OperandType) -> tuple[Variant, ...]:
    """Return a variant of the HAL with the same plan for each type as T, since `level` or since the HAL has the type.

    `others` are the types of more variables.
    """
    levels = ((operand_type, max(level, _FIRST_LEVELS.get(operand_type, level))) for operand_type in types)
    return tuple(Variant({"T": operand_type, **others}, since, plan) for operand_type, since in levels)


def of_types(plan: Plan, *types: OperandType, **others: OperandType) -> tuple[Variant, ...]:
    """Return a variant of an extension with the same plan for each type as T; `others` are those of more variables."""
    return tuple(Variant({"T": operand_type, **others}, V1_2, plan) for operand_type in types)


def conversions(plan: Plan, *pairs: tuple[OperandType, OperandType]) -> tuple[Variant, ...]:
    """Return a variant of an extension with the same plan for each pair of an input's and an output's type, T and O."""
    return tuple(Variant({"T": given, "O": result}, V1_2, plan) for given, result in pairs)


class Extended(Struct, frozen=True):
    """An operation of the HAL as the extension `nnfmq.tflite` has it, under a code of its own.

    It has the parameters, the shape rule and everything else of the HAL's operation but what is stated here, at
    feature level 1.2, and not `Declaration.level`. The HAL's operation accepts exactly what the HAL says.

    Attributes:
        scheme: Why the extension has it; the scheme and the HAL's code give the code.
        variants: Its types and plans.
        adds: The HAL's variants belong to it, too.
        changes: Attributes of the `Declaration` that differ, by name.
    """

    scheme: Scheme
    variants: tuple[Variant, ...]
    adds: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)


def wider(*variants: Variant, **changes: Any) -> Extended:
    """Declare types that the HAL's operation does not accept."""
    return Extended(Scheme.WIDER, variants, adds=True, changes=changes)


def tflite(*variants: Variant, **changes: Any) -> Extended:
    """Declare TFLite's arithmetic on tensors of 8 bits."""
    return Extended(Scheme.TFLITE, variants, changes=changes)


def sixteen_bits(*variants: Variant, **changes: Any) -> Extended:
    """Declare the operation on TENSOR_QUANT16_SYMM; input and output may have different scales."""
    return Extended(Scheme.SIXTEEN_BITS, variants, changes={"same_quantization": False, **changes})


class Tensor(Struct, frozen=True):
    """An array's description before an execution; `value` is set for WEIGHT and ATTRIBUTE parameters only.

    `extension_data` are the client's bytes on an operand of an extension type, not validated.
    """

    shape: Shape
    dtype: np.dtype[Any]
    scale: float = 0.0
    zero_point: int = 0
    channel_quant: ChannelQuant | None = None
    value: Array | None = None
    extension_data: bytes = b""

    @property
    def array(self) -> Array:
        """The value of a WEIGHT or ATTRIBUTE parameter."""
        assert self.value is not None, "only WEIGHT and ATTRIBUTE parameters have a value before the execution"
        return self.value


class Declaration(Struct, frozen=True):
    """Everything that nnfmq knows about one operation.

    Attributes:
        since: Feature level that introduced the operation.
        shape: Shape rule `shape(*shapes, **attributes)`: takes the shapes of DATA and WEIGHT parameters in order (None
            if omitted) and returns the output's shape, or a tuple of shapes for several outputs. The rule and the plans
            raise GeneralFailure with the id of a violated constraint.
        outputs: Types of the outputs.
        output_counts: Accepted output count → feature level, if the last outputs may be omitted.
        repeated_outputs: The last output stands for one or more. With this or `output_counts`, shape rules and plans
            get the attribute `output_count`, and shapes, `output` and results are always tuples.
        images: Parameters that are NCHW if the attribute `nchw` is set (an attribute among them is a shape). Shape
            rules and kernels only see NHWC.
        image_outputs: The outputs have the layout of the images.
        zero_sized: Inputs may have a dimension of 0.
        same_quantization: Every quantized DATA parameter and output has the first input's scale and zero point.
        level: `level(operands by name, output)` returns the feature level that the operands' values need.
        extended: The operation in the extension `nnfmq.tflite`.
        unbound: `unbound(*arrays)` takes the arguments in order, checks the values of tensors among the attributes, and
            computes. Set only if those values do not decide the output's shape. The arguments have shapes, and scalars
            have values, with which the operation was bound before, so a binding for each value is not needed.
    """

    code: OperationType
    since: int
    overloads: tuple[Overload, ...]
    variants: tuple[Variant, ...]
    shape: Callable[..., Any]
    outputs: tuple[ParameterType, ...] = ("T",)
    output_counts: Mapping[int, int] = field(default_factory=dict)
    repeated_outputs: bool = False
    images: tuple[str, ...] = ()
    image_outputs: bool = True
    zero_sized: bool = False
    same_quantization: bool = False
    level: Callable[[Mapping[str, Operand], Operand], int] = lambda inputs, output: V1_0
    extended: tuple[Extended, ...] = ()
    unbound: Callable[..., Array] | None = None

    @property
    def name(self) -> str:
        """The HAL's name of the operation."""
        return self.code.name

    @property
    def is_variadic(self) -> bool:
        """Whether the operation accepts different counts of outputs."""
        return self.repeated_outputs or bool(self.output_counts)

    def expand_outputs(self, count: int) -> tuple[tuple[ParameterType, ...], int] | None:
        """Return a type for each of `count` outputs and the feature level; None if that count is not accepted."""
        if self.repeated_outputs:
            missing = count - len(self.outputs)
            return (self.outputs + self.outputs[-1:] * missing, self.since) if missing >= 0 else None
        counts = self.output_counts or {len(self.outputs): self.since}
        return (self.outputs[:count], counts[count]) if count in counts else None


class Match(Struct, frozen=True):
    """A declaration resolved for operands: a parameter for each argument, the variant, the feature level needed."""

    declaration: Declaration
    parameters: tuple[Parameter, ...]
    variant: Variant
    level: int


def match(declaration: Declaration, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> Match:
    """Return the overload and variant that accept the operands.

    Raises:
        InvalidArgument: With the id of the violated rule: S1 argument count, S2 argument types, S3 output count,
            S4 output types, S5 an omitted argument that is not optional.
    """
    if declaration.expand_outputs(len(outputs)) is None:
        allowed = sorted(declaration.output_counts) or len(declaration.outputs)
        raise InvalidArgument(f"{len(outputs)} outputs given, allowed are {allowed} (S3)")
    for parameters, level, variant in _candidates(declaration, len(inputs)):
        if _inputs_fit(parameters, inputs, variant) and _outputs_fit(declaration, outputs, variant):
            for position, (parameter, operand) in enumerate(zip(parameters, inputs, strict=True)):
                if operand.lifetime == LifeTime.NO_VALUE and not parameter.optional:
                    raise InvalidArgument(f"argument {position} ({parameter.name}) must not be omitted (S5)")
            return _matched(declaration, parameters, variant, level, inputs, outputs)
    raise InvalidArgument(_mismatch(declaration, inputs, outputs))


def accepts_types(declaration: Declaration, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> bool:
    """Return whether an overload and a variant accept the operands' types."""
    return declaration.expand_outputs(len(outputs)) is not None and any(
        _inputs_fit(parameters, inputs, variant) and _outputs_fit(declaration, outputs, variant)
        for parameters, _, variant in _candidates(declaration, len(inputs))
    )


def _candidates(declaration: Declaration, count: int) -> Iterator[tuple[tuple[Parameter, ...], int, Variant]]:
    expanded = (overload.expand(count) for overload in declaration.overloads)
    return ((*found, variant) for found in expanded if found for variant in declaration.variants)


def _inputs_fit(parameters: Sequence[Parameter], inputs: Sequence[Operand], variant: Variant) -> bool:
    return all(p.accepts(operand, variant.types) for p, operand in zip(parameters, inputs, strict=True))


def _outputs_fit(declaration: Declaration, outputs: Sequence[Operand], variant: Variant) -> bool:
    types, _ = declaration.expand_outputs(len(outputs)) or ((), V1_0)
    return all(_has_type(operand, type, variant.types) for operand, type in zip(outputs, types, strict=True))


def _matched(
    declaration: Declaration,
    parameters: tuple[Parameter, ...],
    variant: Variant,
    level: int,
    inputs: Sequence[Operand],
    outputs: Sequence[Operand],
) -> Match:
    named = {p.name: operand for p, operand in zip(parameters, inputs, strict=True)}
    _, output_level = declaration.expand_outputs(len(outputs)) or ((), V1_0)
    level = max(declaration.since, level, variant.level, output_level, declaration.level(named, outputs[0]))
    return Match(declaration, parameters, variant, level)


_ANY_NAME = "any"


def _mismatch(declaration: Declaration, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> str:
    """Return the message for operands that no overload and variant accept."""
    received = ", ".join(operand.type.name for operand in inputs)
    candidates = list(_candidates(declaration, len(inputs)))
    if not candidates:
        counts = sorted({count for overload in declaration.overloads for count in overload.arities})
        return f"{len(inputs)} arguments given, allowed are {counts} (S1)"
    if any(_inputs_fit(parameters, inputs, variant) for parameters, _, variant in candidates):
        return f"output types ({', '.join(o.type.name for o in outputs)}) do not match argument types ({received}) (S4)"
    for position, operand in enumerate(inputs):
        accepted = {_type_name(parameters[position], variant) for parameters, _, variant in candidates}
        if not accepted & {operand.type.name, _ANY_NAME}:
            name = candidates[0][0][position].name
            allowed = ", ".join(sorted(accepted))
            return f"argument {position} ({name}) has type {operand.type.name}, allowed are {allowed} (S2)"
    nearest = max(candidates, key=lambda candidate: _fitting(candidate[0], inputs, candidate[2]))
    allowed_types = ", ".join(_type_name(parameter, nearest[2]) for parameter in nearest[0])
    return f"argument types ({received}) are not allowed together; the nearest that are: ({allowed_types}) (S2)"


def _type_name(parameter: Parameter, variant: Variant) -> str:
    if parameter.type is ANY:
        return _ANY_NAME
    return (variant.types[parameter.type] if isinstance(parameter.type, str) else parameter.type).name


def _fitting(parameters: Sequence[Parameter], inputs: Sequence[Operand], variant: Variant) -> int:
    return sum(p.accepts(operand, variant.types) for p, operand in zip(parameters, inputs, strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# REGISTRY: the declaration of each operation that this process can execute, by its code.
#
# `operations` fills it with the families of the HAL, `operations.tflite_extension` with those of the built-in
# extension, and `operations.extensions` with the declarations of vendors. The module of a family is imported when a
# declaration of it is first read: most models use few families, and a driver that imports all of them starts later.


LoadFamily: TypeAlias = Callable[[], Iterable[tuple[OperationType, Declaration]]]


class Declarations(MutableMapping[OperationType, Declaration]):
    """Declarations by code; some are of families that are not loaded yet. Thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[OperationType, Declaration | LoadFamily] = {}

    def add_family(self, codes: Iterable[OperationType], load: LoadFamily) -> None:
        """Add the operations of a family; `load` returns each code with its declaration, when one is first read."""
        self._entries.update(dict.fromkeys(codes, load))

    def __getitem__(self, code: OperationType) -> Declaration:
        entry = self._entries[code]
        if isinstance(entry, Declaration):
            return entry
        found = dict(entry())  # another thread may do the same: both get equal declarations
        self._entries.update(found)
        return found[code]

    def __setitem__(self, code: OperationType, declaration: Declaration) -> None:
        self._entries[code] = declaration

    def __delitem__(self, code: OperationType) -> None:
        del self._entries[code]

    def __contains__(self, code: object) -> bool:
        return code in self._entries

    def __iter__(self) -> Iterator[OperationType]:
        return iter(tuple(self._entries))

    def __len__(self) -> int:
        return len(self._entries)


REGISTRY = Declarations()
