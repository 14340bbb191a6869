"""Nodes against the definition of their operator in the model's opset: what it does not allow is rejected.

The package `onnx` knows each version of each operator: its attributes, inputs, outputs, types and shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
from msgspec import Struct

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.summaries import counted
from nnfmq.importers.onnx.file import element_name, inference_errors
from nnfmq.importers.onnx.values import Value

__all__ = ["require_legal"]

_WITHOUT_SCHEMA = frozenset(("LayerNormalization", "SimplifiedLayerNormalization"))
"""Operators of ONNX Runtime that exporters write without a domain, into any opset."""
_UNCHECKED_SHAPES = frozenset(("Constant", "Range", "Resize"))
"""Constant may be large. ONNX's own functions give Range vectors, and exporters Resize empty scales with sizes; the
inference rejects both.
"""
_FLAGS = frozenset(
    ("align_corners", "allowzero", "antialias", "ceil_mode", "count_include_pad", "detect_negative",
     "detect_positive", "exclude_outside", "exclusive", "fmod", "input_forget", "interleaved", "inverse",
     "is_causal", "keepdims", "largest", "layout", "linear_before_reset", "noop_with_empty_axes", "onesided",
     "reverse", "saturate", "select_last_index", "sorted", "spatial", "storage_order", "training_mode", "transA",
     "transB", "upper")
)  # fmt: skip
"""Attributes that are 0 or 1; runtimes take other values to be one or the other."""
_MAX_KNOWN = 1024  # elements of a constant that the inference of shapes reads


class _Parameter(Struct, frozen=True):
    """An input of an operator. `variable`: the name of its type; equal names are equal types."""

    name: str
    is_required: bool
    is_variadic: bool
    variable: str
    types: frozenset[str]


class _Definition(Struct, frozen=True):
    """One version of an operator."""

    schema: Any
    attributes: dict[str, int]
    required: frozenset[str]
    parameters: tuple[_Parameter, ...]


def require_legal(proto: Any, opset: int, values: Sequence[Value | None]) -> None:
    """Require that a node of ONNX's own domain is as its operator's version in `opset` defines it.

    Raises:
        InvalidArgument: If the opset has no such operator, or it has no such attributes, inputs, types or shapes.
    """
    definition = _definition(str(proto.op_type), opset)
    if definition is None:
        return
    _require_attributes(proto, definition, opset)
    schema = definition.schema
    if not schema.min_input <= len(values) <= schema.max_input:
        allowed = _range(schema.min_input, schema.max_input)
        raise InvalidArgument(f"it has {counted(len(values), 'input')}: {allowed} are allowed")
    if not schema.min_output <= len(proto.output) <= schema.max_output:
        allowed = _range(schema.min_output, schema.max_output)
        raise InvalidArgument(f"it has {counted(len(proto.output), 'output')}: {allowed} are allowed")
    _require_types(definition, values)
    has_graph = any(attribute.HasField("g") for attribute in proto.attribute)
    if proto.op_type not in _UNCHECKED_SHAPES and not has_graph and not schema.deprecated:
        _require_shapes(proto, schema, opset, values)


def _range(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"


@cache
def _definition(name: str, opset: int) -> _Definition | None:
    """Return an operator's version; None if ONNX does not define the operator.

    Raises:
        InvalidArgument: If the opset does not have the operator.
    """
    import onnx

    try:
        schema: Any = onnx.defs.get_schema(name, opset, "")
    except onnx.defs.SchemaError:
        if name in _WITHOUT_SCHEMA:
            return None
        if not onnx.defs.has(name, ""):
            raise InvalidArgument("is not supported") from None
        since = min(each.since_version for each in onnx.defs.get_all_schemas_with_history() if each.name == name)
        raise InvalidArgument(f"opset {opset} does not have it: it is in opset {since} and later ones") from None
    if schema.deprecated and not schema.has_context_dependent_function:  # GroupNormalization of opset 18 has one
        raise InvalidArgument(f"opset {opset} does not have it any more since opset {schema.since_version}")
    attributes = {each: int(attribute.type.value) for each, attribute in schema.attributes.items()}
    required = frozenset(each for each, attribute in schema.attributes.items() if attribute.required)
    return _Definition(schema, attributes, required, tuple(_parameters(schema)))


def _parameters(schema: Any) -> Iterator[_Parameter]:
    import onnx

    option = onnx.defs.OpSchema.FormalParameterOption
    for each in schema.inputs:
        variable = each.type_str if each.is_homogeneous else ""
        is_required, is_variadic = each.option == option.Single, each.option == option.Variadic
        yield _Parameter(each.name, is_required, is_variadic, variable, frozenset(each.types))


def _require_attributes(proto: Any, definition: _Definition, opset: int) -> None:
    given = {attribute.name: attribute.type for attribute in proto.attribute}
    for name, kind in given.items():
        if name not in definition.attributes:
            raise InvalidArgument(f"opset {opset} has no attribute {name[:80]!r} of it")
        if kind != definition.attributes[name]:
            raise InvalidArgument(f"attribute {name} is of the type {kind}: it must be {definition.attributes[name]}")
    for attribute in proto.attribute:
        if attribute.name in _FLAGS and attribute.i not in (0, 1):
            raise InvalidArgument(f"attribute {attribute.name} is {attribute.i}: it must be 0 or 1")
        if attribute.name == "block_size" and attribute.i < 0:
            raise InvalidArgument(f"attribute block_size is {attribute.i}: it must not be negative")
    missing = sorted(definition.required - given.keys())
    if missing:
        raise InvalidArgument(f"attribute {missing[0]} is missing")


def _require_types(definition: _Definition, values: Sequence[Value | None]) -> None:
    found: dict[str, str] = {}
    for position, value in enumerate(values):
        parameter = definition.parameters[min(position, len(definition.parameters) - 1)]
        if value is None:
            if parameter.is_required:
                raise InvalidArgument(f"input {position} ({parameter.name}) is missing")
            continue
        kind = _type_name(value.dtype)
        if kind not in parameter.types:
            raise InvalidArgument(f"input {position} ({parameter.name}) has elements of {element_name(value.dtype)}")
        if parameter.variable and found.setdefault(parameter.variable, kind) != kind:
            others = found[parameter.variable].removeprefix("tensor(").removesuffix(")")
            raise InvalidArgument(
                f"input {position} has elements of {element_name(value.dtype)}, and others those of {others}"
            )


@cache
def _type_name(dtype: np.dtype[Any]) -> str:
    """Return the name of the type of tensors with these elements in the definitions."""
    import onnx

    name = onnx.TensorProto.DataType.Name(onnx.helper.np_dtype_to_tensor_dtype(dtype))
    return f"tensor({name.lower()})"


def _require_shapes(proto: Any, schema: Any, opset: int, values: Sequence[Value | None]) -> None:
    import onnx

    given = {name: value for name, value in zip(proto.input, values, strict=True) if value is not None}
    types = {
        name: onnx.helper.make_tensor_type_proto(onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in given.items()
    }
    known = {
        name: onnx.numpy_helper.from_array(value.array)
        for name, value in given.items()
        if value.array is not None and value.array.dtype.kind in "if" and value.size <= _MAX_KNOWN
    }
    opsets = [onnx.helper.make_opsetid("", opset)]
    try:
        onnx.shape_inference.infer_node_outputs(schema, proto, types, known, opset_imports=opsets)
    except inference_errors() as error:
        shapes = ", ".join(str(value.shape) for value in given.values())
        text = " ".join(str(error).split())
        raise InvalidArgument(f"ONNX does not allow inputs of the shapes {shapes}: {text[:200]}") from None
