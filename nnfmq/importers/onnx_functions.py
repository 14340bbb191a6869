"""Nodes that are calls of functions: those of the model, and operators that ONNX defines by a function of others.

`body` finds the function, and `called` returns its nodes with the names and attributes of one call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nnfmq.hal.errors import InvalidArgument

__all__ = ["body", "called"]

_DEFAULT_DOMAINS = ("", "ai.onnx")


def body(proto: Any, opset: int, functions: Mapping[tuple[str, str], Any], types: Sequence[Any]) -> Any | None:
    """Return the onnx.FunctionProto that a node calls; None if its operator is not a function.

    `functions` are the model's, by domain and name, and `types` the onnx.TypeProto of each input.

    Raises:
        InvalidArgument: If ONNX cannot write the function for this node.
    """
    local = functions.get((proto.domain, proto.op_type))
    if local is not None:
        return local
    return _defined(proto, opset, types) if proto.domain in _DEFAULT_DOMAINS else None


def _defined(proto: Any, opset: int, types: Sequence[Any]) -> Any | None:
    """Return the function by which ONNX defines an operator."""
    import onnx

    try:
        schema: Any = onnx.defs.get_schema(proto.op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    plain, dependent = schema.function_opset_versions, schema.context_dependent_function_opset_versions
    if not plain and not dependent:
        return None
    complete = onnx.NodeProto()
    complete.CopyFrom(proto)
    given = {attribute.name for attribute in proto.attribute}
    defaults = (schema.attributes[name].default_value for name in schema.attributes if name not in given)
    complete.attribute.extend(default for default in defaults if default.type)
    try:
        if plain:
            written = schema.get_function_with_opset_version(_version(plain, opset))
        else:
            serialized = [kind.SerializeToString() for kind in types]
            version = _version(dependent, opset)
            written = schema.get_context_dependent_function_with_opset_version(
                version, complete.SerializeToString(), serialized
            )
    except (RuntimeError, ValueError, TypeError) as error:
        raise InvalidArgument(f"ONNX has no function for it: {str(error)[:200]}") from None
    if not written:
        return None
    function = onnx.FunctionProto.FromString(written)
    del proto.attribute[:]
    proto.attribute.extend(complete.attribute)
    return function


def _version(versions: Sequence[int], opset: int) -> int:
    """Return the newest version up to `opset`; else the oldest, whose meaning is the same."""
    return max((version for version in versions if version <= opset), default=min(versions))


def called(proto: Any, function: Any, prefix: str) -> list[Any]:
    """Return the nodes of a function for one call of it: results inside it have names that begin with `prefix`."""
    if len(proto.input) > len(function.input) or len(proto.output) > len(function.output):
        raise InvalidArgument("the call has more inputs or outputs than its function")
    names = dict.fromkeys((*function.input, *function.output), "")
    names.update({formal: prefix + formal for formal in function.output})
    names.update(zip(function.input, proto.input, strict=False))
    actual = zip(function.output, proto.output, strict=False)
    names.update({formal: name or prefix + formal for formal, name in actual})
    attributes = {default.name: default for default in function.attribute_proto}
    attributes.update({attribute.name: attribute for attribute in proto.attribute})
    return [_renamed(node, names, attributes, prefix) for node in function.node]


def _renamed(node: Any, names: dict[str, str], attributes: Mapping[str, Any], prefix: str) -> Any:
    """Return a copy of a node with other names of values and with the call's attributes."""
    copy = type(node)()
    copy.CopyFrom(node)
    for field in (copy.input, copy.output):
        field[:] = [names.setdefault(name, prefix + name) if name else "" for name in field]
    del copy.attribute[:]
    for attribute in node.attribute:
        source = attributes.get(attribute.ref_attr_name) if attribute.ref_attr_name else attribute
        if source is None:
            continue  # an optional attribute that the call does not have
        added = copy.attribute.add()
        added.CopyFrom(source)
        added.name = attribute.name
        if added.HasField("g"):
            _rename_graph(added.g, names, attributes, prefix)
    return copy


def _rename_graph(graph: Any, names: dict[str, str], attributes: Mapping[str, Any], prefix: str) -> None:
    """Rename the values of a graph within a function; those that it makes itself hide those outside."""
    inner = dict(names)
    for value in (*graph.input, *graph.initializer):
        inner[value.name] = prefix + value.name
        value.name = inner[value.name]
    nodes = [_renamed(node, inner, attributes, prefix) for node in graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    for value in graph.output:
        value.name = inner.get(value.name, prefix + value.name)
