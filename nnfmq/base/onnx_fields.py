"""External files and shapes of an ONNX model, read from its protocol buffer without the package onnx or a runtime.

A client reads the files beside the model that have its external data, and a driver that hosts a runtime checks that
the model names no others: what a runtime would open by its path. The file is not trusted. What readers of protocol
buffers understand in different ways, such as a message that is given twice and merged, is refused; where a file is
truncated, reading ends, as the runtime will reject it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TypeAlias

from nnfmq.hal.errors import InvalidArgument

__all__ = [
    "Dimensions",
    "declared_shapes",
    "external_files",
    "require_files",
    "with_external_data",
    "without_initializers",
    "without_output_shapes",
]

_TREE: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
"""The messages within which tensors are, by the fields of their parents (onnx.proto)."""
_SINGLE = {("model", 7), ("training", 1), ("training", 2), ("attribute", 5), ("attribute", 6), ("attribute", 22),
           ("sparse", 1), ("sparse", 2)}  # fmt: skip
"""Fields that occur once. If they occurred twice, their parts would be read as one message."""
_RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION, _EXTERNAL = 9, 13, 14, 1  # of TensorProto
_PLACE = (_EXTERNAL_DATA, _DATA_LOCATION)
_INT_BITS = 2**32 - 1
_NEGATIVE = 1 << 63  # numbers from here on are negative ones of 64 bits
_DEPTH_MAX = 100  # readers of protocol buffers refuse more
_SEARCHED_BYTES = 1 << 16  # in a message of at most as many bytes, finding a word is faster than reading the fields

Dimensions: TypeAlias = tuple[int | str | None, ...]
_Replace: TypeAlias = Callable[[memoryview], bytes | memoryview]
_Test: TypeAlias = Callable[[memoryview], bool]

_Field: TypeAlias = tuple[int, int | memoryview | None, int, int]
"""The number of a field, its value (None: of a fixed size), and where it begins and ends in the message."""


def external_files(model: memoryview) -> tuple[str, ...]:
    """Return the names of the files that have tensors of an ONNX model, in the order in which it names them.

    Raises:
        InvalidArgument: If the file cannot be read without doubt.
    """
    names: dict[str, None] = {}

    def note(tensor: memoryview) -> memoryview:
        location = _external_data(tensor).get("location")
        if location is not None:
            names.setdefault(location)
        return tensor

    _replaced(model, "model", note)
    return tuple(names)


def require_files(model: memoryview, files: Container[str]) -> None:
    """Require that the tensors of an ONNX model are in no other files than these. Raises InvalidArgument."""
    for name in external_files(model):
        if name not in files:
            raise InvalidArgument(f"the model has tensors in {name!r:.80}, which is not one of the files given")


def with_external_data(
    model: memoryview, files: Mapping[str, memoryview], *, is_nested_only: bool = False
) -> bytes | memoryview:
    """Return the model with the tensors that are in the files, which `require_files` has found to be complete.

    The result is `model` itself if there are none. If `is_nested_only`, the initializers of the main graph stay where
    they are.

    Raises:
        InvalidArgument: If a tensor's data are not within the file.
    """

    def include(tensor: memoryview) -> bytes | memoryview:
        external = _external_data(tensor)
        places = [value for number, value, _, _ in _fields(tensor) if number == _DATA_LOCATION]
        if "location" not in external or not places or not isinstance(places[-1], int):
            return tensor
        if places[-1] & _INT_BITS != _EXTERNAL:
            return tensor
        kept = [tensor[begin:end] for number, _, begin, end in _fields(tensor) if number not in _PLACE]
        data = _range(files, external)
        return b"".join([*kept, _tag(_RAW_DATA), _encoded(len(data)), data])

    return _replaced(model, "model", include, is_nested_only)


def declared_shapes(model: memoryview) -> dict[str, Dimensions | None]:
    """Return the shape of each input and output as the file states it; None if it has none, which is an unknown rank.

    A dimension is a number, the name of a symbol, or None.
    """
    found: dict[str, Dimensions | None] = {}
    for graph in _values(model, 7):
        for info in _values(graph, 11, 12):
            tensors = [tensor for kind in _values(info, 2) for tensor in _values(kind, 1)]
            shapes = [shape for tensor in tensors for shape in _values(tensor, 2)]
            dimensions = tuple(_dimension(each) for shape in shapes for each in _values(shape, 1))
            found |= {str(name, "utf-8", "replace"): dimensions if shapes else None for name in _values(info, 1)}
    return found


def _dimension(data: memoryview) -> int | str | None:
    found: int | str | None = None
    for number, value, _, _ in _fields(data):
        if number == 1 and isinstance(value, int):
            found = value if value < _NEGATIVE else None
        elif number == 2 and isinstance(value, memoryview):
            found = str(value, "utf-8", "replace") or None
    return found


def without_output_shapes(model: memoryview) -> bytes:
    """Return a copy of the model that states no shapes of its outputs."""
    return b"".join(_without(model, (7, 12, 2, 1, 2), lambda _: True))  # graph, output, type, tensor, shape


def without_initializers(model: memoryview, names: Container[str]) -> bytes:
    """Return a copy of the model without the initializers of these names, which then are inputs without a default."""

    def is_named(tensor: memoryview) -> bool:
        return any(str(name, "utf-8", "replace") in names for name in _values(tensor, 8)[-1:])

    return b"".join(_without(model, (7, 5), is_named))  # graph, initializer


def _without(data: memoryview, path: Sequence[int], is_removed: _Test) -> list[bytes | memoryview]:
    """Return the parts of a message without those fields at the end of a path that `is_removed` selects."""
    first, *rest = path
    parts: list[bytes | memoryview] = []
    for number, value, begin, end in _fields(data):
        if number != first or not isinstance(value, memoryview) or not (rest or is_removed(value)):
            parts.append(data[begin:end])
        elif rest:
            inner = _without(value, rest, is_removed)
            parts += [_tag(number), _encoded(sum(map(len, inner))), *inner]
    return parts


def _replaced(
    data: memoryview, kind: str, replace: _Replace, is_nested_only: bool = False, depth: int = 0
) -> bytes | memoryview:
    """Return a message in which `replace` has replaced each tensor; `data` itself if all are the same."""
    if depth > _DEPTH_MAX:
        raise InvalidArgument(f"the ONNX model has graphs that are nested more than {_DEPTH_MAX} messages deep")
    if len(data) <= _SEARCHED_BYTES and b"location" not in bytes(data):
        return data
    parts: list[bytes | memoryview] = []
    kept, seen = 0, set()  # where what follows the parts begins; fields that occur once
    inner_kinds = _TREE[kind]
    for number, old, begin, end in _fields(data):
        inner = inner_kinds.get(number)
        if inner is None or not isinstance(old, memoryview):
            continue
        if (kind, number) in _SINGLE and number in seen:
            raise InvalidArgument(f"the ONNX model is ambiguous: field {number} of a {kind} is given twice")
        seen.add(number)
        if inner != "tensor":
            new = _replaced(old, inner, replace, is_nested_only, depth + 1)
        else:
            new = old if is_nested_only and depth == 1 and kind == "graph" else replace(old)
        if new is not old:
            parts += [data[kept:begin], _tag(number), _encoded(len(new)), new]
            kept = end
    return b"".join([*parts, data[kept:]]) if parts else data


def _external_data(tensor: memoryview) -> dict[str, str]:
    """Return the place of a tensor's external data: "location", "offset", "length"; empty if they are within it."""
    entries: dict[str, str] = {}
    for entry in _values(tensor, _EXTERNAL_DATA):
        (key, value) = (b"".join(_values(entry, number)[-1:]).decode("utf-8", "replace") for number in (1, 2))
        if key in entries:
            raise InvalidArgument(f"the ONNX model is ambiguous: a tensor's external data has {key!r:.80} twice")
        entries[key] = value
    return entries


def _range(files: Mapping[str, memoryview], external: Mapping[str, str]) -> memoryview:
    """Return the bytes of a tensor in another file."""
    name = external["location"]
    data = files[name]
    try:
        offset = int(external.get("offset", "0"))
        length = int(external.get("length", str(len(data) - offset)))
    except ValueError:
        raise InvalidArgument(f"a tensor's external data in {name!r:.80} has no valid range") from None
    if not 0 <= offset <= offset + length <= len(data):
        raise InvalidArgument(f"{name!r:.80} has {len(data)} bytes; a tensor's data are {length} bytes at {offset}")
    return data[offset : offset + length]


# ----------------------------------------------------------------------------------------------------------------------
# The fields of a message.


def _values(data: memoryview, *numbers: int) -> list[memoryview]:
    """Return the messages, strings or bytes of some fields."""
    return [value for number, value, _, _ in _fields(data) if number in numbers and isinstance(value, memoryview)]


def _fields(data: memoryview) -> Iterator[_Field]:
    """Yield the fields of a message. A truncated one, with what follows it, has the number 0.

    Raises:
        InvalidArgument: If a field is of a kind that ONNX does not have.
    """
    at = 0
    while at < len(data):
        begin = at
        tag, at = _decoded(data, at)
        number, wire_type = tag >> 3, tag & 7
        if tag > _INT_BITS or (number == 0 and at <= len(data)):  # readers refuse 0; zeros are not read to their end
            raise InvalidArgument(f"a truncated or corrupt ONNX model: a field has the number {number}")
        value: int | memoryview | None = None
        if wire_type == 0:
            value, at = _decoded(data, at)
        elif wire_type == 1:
            at += 8
        elif wire_type == 5:
            at += 4
        elif wire_type == 2:
            size, start = _decoded(data, at)
            at = start + size
            value = data[start:at]
        else:
            raise InvalidArgument(f"a truncated or corrupt ONNX model: a field has the wire type {wire_type}")
        if at > len(data):
            yield 0, None, begin, len(data)
            return
        yield number, value, begin, at


def _decoded(data: memoryview, at: int) -> tuple[int, int]:
    """Return the number at `at` and the position after it, which is beyond the end if it is truncated."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            return 0, len(data) + 1
        byte = data[at]
        value, at = value | (byte & 127) << shift, at + 1
        if byte < 128:
            return value, at
    raise InvalidArgument("a truncated or corrupt ONNX model: a number of more than 10 bytes")


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _tag(number: int) -> bytes:
    return _encoded(number << 3 | 2)
