"""Whether an ONNX file names other files. A runtime that got its bytes would open them by path, in the worker.

The file is a client's: it is walked as the protocol buffer that it is (onnx.proto), without a copy, and whatever is not
well formed is refused here, because another parser might read it in another way.
"""

from __future__ import annotations

from nnfmq.hal.errors import InvalidArgument

__all__ = ["has_external_data"]

_EXTERNAL_DATA = 13  # of TensorProto
_MESSAGES: dict[str, dict[int, str]] = {
    "Model": {7: "Graph", 20: "Training", 25: "Function"},
    "Training": {1: "Graph", 2: "Graph"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Function": {7: "Node", 11: "Attribute"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Tensor": {},
}
"""The fields of each message that lead to tensors."""
_FIXED_BYTES = {1: 8, 5: 4}  # of the wire types for numbers of fixed size
_BYTES = 2  # the wire type of what has a length: bytes, strings, messages
_VARINT_BYTES = 10
_TAG_MAX, _SIZE_MAX = 2**32 - 1, 2**31 - 1  # what a parser with 32 bits reads in the same way


def has_external_data(data: memoryview) -> bool:
    """Return whether a tensor of an ONNX file is in another file.

    Raises:
        InvalidArgument: If it is not a well-formed protocol buffer.
    """
    pending = [("Model", 0, len(data))]
    while pending:
        kind, at, end = pending.pop()
        inner = _MESSAGES[kind]
        while at < end:
            tag, at = _varint(data, at, end)
            number, wire_type = tag >> 3, tag & 7
            if tag > _TAG_MAX:
                raise InvalidArgument(f"not an ONNX file: field number {number}")
            if kind == "Tensor" and number == _EXTERNAL_DATA:
                return True
            begin = at
            if wire_type == 0:
                _, at = _varint(data, at, end)
            elif wire_type in _FIXED_BYTES:
                at += _FIXED_BYTES[wire_type]
            elif wire_type == _BYTES:
                size, begin = _varint(data, at, end)
                at = begin + size
                if size > _SIZE_MAX:
                    raise InvalidArgument(f"not an ONNX file: a field of {size} bytes")
                if number in inner and at <= end:
                    pending.append((inner[number], begin, at))
            else:
                raise InvalidArgument(f"not an ONNX file: wire type {wire_type} at byte {begin}")
            if at > end:
                raise InvalidArgument(f"not an ONNX file, or truncated: byte {end} is in the middle of a field")
    return False


def _varint(data: memoryview, at: int, end: int) -> tuple[int, int]:
    """Return the number at `at` and the position after it."""
    value = 0
    for shift in range(0, 7 * _VARINT_BYTES, 7):
        if at >= end:
            raise InvalidArgument(f"not an ONNX file, or truncated: byte {end} is in the middle of a number")
        byte = data[at]
        value, at = value | (byte & 127) << shift, at + 1
        if byte < 128:
            return value, at
    raise InvalidArgument(f"not an ONNX file: a number of more than {_VARINT_BYTES} bytes at byte {at}")
