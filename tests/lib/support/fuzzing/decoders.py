"""The decoders of bytes that nnfmq gets from a peer or a user, as fuzz targets: a function of bytes for each.

A target returns "decoded", or the name of the exception that the decoder documents for wrong input. It raises any other
exception, and AssertionError if a decoded value does not survive its encoding. `SEEDS` are valid inputs, made by the
encoders and writers, so that new messages are among them; the corpora have inputs that a fuzzer has found.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np

from nnfmq.base import settings
from nnfmq.driver.cache import files, shared
from nnfmq.driver.cache.files import CacheContents, DeviceIdentity
from nnfmq.driver.devices.configuration import PACKAGED_DEVICES, read_configuration
from nnfmq.hal.errors import ErrorStatus, GeneralFailure, InvalidArgument, ProtocolError, QueueCorrupted
from nnfmq.hal.timing import Timing
from nnfmq.hal.types import DataLocation, OutputShape, RequestArgument
from nnfmq.importers import load
from nnfmq.queue import descriptor_formats
from nnfmq.queue.layout import MQDescriptor, compute_layout, resolve, to_descriptor
from nnfmq.repository import version_import
from nnfmq.repository.version_import import read_options
from nnfmq.serialize import _pycodec, codec, control_protocol, repository_protocol
from nnfmq.serialize.control_protocol import PeerRole
from nnfmq.serialize.message_codec import MessageCodec
from nnfmq.serialize.models import decode_model, encode_model
from nnfmq.serving.inference_protocol.http import decode_infer_request, find_route
from nnfmq.validation import validate_model
from support.onnx_files import OnnxCase
from support.small_models import two_adds
from support.tflite_files import Operator, Tensor, writer

DECODED = "decoded"
_Errors = tuple[type[Exception], ...]


def decode(data: bytes) -> bytes:
    """Return an input as it is, which `tools/fuzz.py --input` shows."""
    return data


def _decoded(call: Callable[[], object], *errors: type[Exception]) -> str:
    try:
        call()
    except errors as error:
        return type(error).__name__
    return DECODED


# ----------------------------------------------------------------------------------------------------------------------
# Packets, messages, models, descriptors: from the other end of a connection


def run_packets(data: bytes) -> str:
    """Decode a packet of records with both codecs: the first byte says whether it is a request or a result."""
    packet, is_result = data[1:], data[:1] > b"\x7f"
    kinds = [_pycodec, codec.CORES.load("compiled")] if codec.codec_name == "compiled" else [_pycodec]
    outcomes = {_decoded(partial(_decode_packet, kind, packet, is_result), ProtocolError) for kind in kinds}
    (outcome,) = outcomes
    return outcome


def _decode_packet(kind: Any, packet: bytes, is_result: bool) -> None:
    if is_result:
        result = kind.decode_result(packet)
        again = kind.encode_result(result.status, result.output_shapes, result.timing)
        assert kind.decode_result(again).output_shapes == result.output_shapes
    else:
        found = kind.decode_request(packet)
        again = kind.encode_request(found.inputs, found.outputs, found.slots, found.measure)
        assert kind.decode_request(again) == found


def _packet_seeds() -> Iterator[bytes]:
    arguments = [RequestArgument(location=DataLocation(0, 64, 16), dimensions=(2, 2)), RequestArgument(True)]
    yield b"\0" + codec.encode_request(arguments, arguments[:1], (0, 1))
    yield b"\xff" + codec.encode_result(ErrorStatus.NONE, [OutputShape((2, 3), True)], Timing(5000, 7000))
    yield b"\xff" + codec.encode_result(ErrorStatus.GENERAL_FAILURE, [])


@cache
def _codecs() -> list[tuple[MessageCodec[Any], Enum, tuple[type, ...]]]:
    """Return each codec with each sender and what that may send."""
    control: list[tuple[Any, Enum, tuple[type, ...]]] = [
        (control_protocol._codec, role, control_protocol.message_types_of(role)) for role in PeerRole
    ]
    for found in (repository_protocol._codec, shared._codec, version_import._codec):
        for sender, decoder in found._decoders.items():
            sent: Any = decoder.type  # a class or a union of classes
            control.append((found, sender, get_args(sent) or (sent,)))
    return control


def run_messages(data: bytes) -> str:
    """Decode a message: the first byte chooses the protocol and the sender."""
    known = _codecs()
    of, sender, _ = known[(data[0] if data else 0) % len(known)]

    def message() -> None:
        found = of.decode(data[1:], sender=sender, fds=None)
        again = of.decode(of.encode(found), sender=sender, fds=None)
        assert of.encode(again) == of.encode(found)  # NaN is not equal to itself

    if of is control_protocol._codec:
        _decoded(lambda: control_protocol.message_size(data[1:]), ProtocolError)
    return _decoded(message, ProtocolError)


def _message_seeds() -> Iterator[bytes]:
    for number, (of, _, kinds) in enumerate(_codecs()):
        for kind in kinds:
            yield bytes([number]) + of.encode(example(msgspec.inspect.type_info(kind)))


def example(kind: Any) -> Any:
    """Return a value of a type that msgspec describes: one element in each list, the first of an enumeration."""
    of = msgspec.inspect
    if isinstance(kind, of.StructType):
        return kind.cls(**{field.name: example(field.type) for field in kind.fields})
    if isinstance(kind, of.UnionType):
        return example(next(each for each in kind.types if not isinstance(each, of.NoneType)))
    if isinstance(kind, of.VarTupleType | of.ListType):
        items = [example(kind.item_type)] * max(1, kind.min_length or 0)
        return tuple(items) if isinstance(kind, of.VarTupleType) else items
    if isinstance(kind, of.TupleType):
        return tuple(example(item) for item in kind.item_types)
    if isinstance(kind, of.EnumType):
        return next(iter(kind.cls))
    if isinstance(kind, of.StrType):
        return "0" * max(1, kind.min_length or 0)
    if isinstance(kind, of.BytesType):
        return bytes(kind.min_length or 0)
    if isinstance(kind, of.CustomType | of.RawType):
        return msgspec.Raw(b"\xc0")
    if isinstance(kind, of.IntType):
        return max(1, kind.ge or 0)
    if isinstance(kind, of.FloatType):
        return 1.0
    if isinstance(kind, of.DictType):
        return {}
    assert isinstance(kind, of.BoolType), kind
    return True


def run_models(data: bytes) -> str:
    """Decode a model without pools, and validate it."""

    def model() -> None:
        found = decode_model(data, ())
        again, _ = encode_model(found)
        assert encode_model(decode_model(again, ()))[0] == again
        validate_model(found)

    return _decoded(model, ProtocolError, InvalidArgument)


def _model_seeds() -> Iterator[bytes]:
    yield encode_model(two_adds())[0]


def run_descriptors(data: bytes) -> str:
    """Decode a queue's descriptor in the format that the first byte chooses, and find the layout in 64 KiB."""
    number = (data[0] if data else 0) % 3

    def descriptor() -> None:
        resolve(_DESCRIPTORS[number](data[1:]), 1 << 16)

    return _decoded(descriptor, QueueCorrupted)


def _trailer(data: bytes) -> MQDescriptor:
    size = descriptor_formats.TRAILER.size
    return descriptor_formats.from_trailer(data[:size].ljust(size, b"\0"))  # the reader takes so many


_DESCRIPTORS = (descriptor_formats.from_hidl, descriptor_formats.from_json, _trailer)


def _descriptor_seeds() -> Iterator[bytes]:
    for event_flag in (True, False):
        found = to_descriptor(compute_layout(24, 64, event_flag))
        yield b"\0" + descriptor_formats.to_hidl(found)
        yield b"\1" + descriptor_formats.to_json(found).encode()
        yield b"\2" + descriptor_formats.to_trailer(found)


# ----------------------------------------------------------------------------------------------------------------------
# Files


def _run_model_file(data: bytes) -> str:
    return _decoded(lambda: load(data), InvalidArgument)


def run_tflite(data: bytes) -> str:
    """Import a .tflite file."""
    return _run_model_file(data)


def run_onnx(data: bytes) -> str:
    """Import an .onnx file."""
    return _run_model_file(data)


def _tflite_seeds() -> Iterator[bytes]:
    x, y, condition = Tensor("x", (2, 3)), Tensor("y", (2, 3)), Tensor("c", (), "BOOL")
    yield writer.write([x, y], [Operator("ABS", (0,), (1,))], (0,), (1,))
    callee = writer.Subgraph([x, y], [Operator("ABS", (0,), (1,))], (0,), (1,))
    options = {"ThenSubgraphIndex": 1, "ElseSubgraphIndex": 1}
    yield writer.write(
        [condition, x, y], [Operator("IF", (0, 1), (2,), "IfOptions", options)], (0, 1), (2,), more=[callee]
    )


def _onnx_seeds() -> Iterator[bytes]:
    two = np.zeros((2, 3), np.float32)
    yield OnnxCase("Add", [two, two], constants=frozenset((1,))).content()
    yield OnnxCase("Softmax", [two], {"axis": 1}).content()
    yield OnnxCase("MatMul", [two, two.T]).content()


_IDENTITY, _TOKEN = DeviceIdentity("reference", "1"), bytes(32)


@cache
def _sealed() -> bytes:
    ((header, content),) = files.seal(_IDENTITY, _TOKEN, CacheContents((b"a program",)))
    return header + bytes(content)


def run_caches(data: bytes) -> str:
    """Verify a cache file that is in memory; only the one that was saved is valid."""
    outcome = _decoded(lambda: files.read_memory(memoryview(data), _IDENTITY, _TOKEN), GeneralFailure)
    assert (outcome == DECODED) is (data == _sealed())
    return outcome


def _cache_seeds() -> Iterator[bytes]:
    yield _sealed()


@cache
def _folder() -> Path:
    """Return a folder for the files of this process, on a file system in memory."""
    found = tempfile.TemporaryDirectory(prefix="nnfmq-fuzz-", dir="/dev/shm")
    _kept.append(found)
    return Path(found.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


def run_toml(data: bytes) -> str:
    """Read a file of devices, options of a version, or settings: the first byte says which."""
    number = (data[0] if data else 0) % 3
    path = _folder() / version_import.FILE_NAME
    path.write_bytes(data[1:])
    readers: tuple[Callable[[], object], ...] = (
        lambda: read_configuration(path),
        lambda: read_options(path.parent),
        lambda: settings._parse(str(path), data[1:], settings._file_keys()),
    )
    return _decoded(readers[number], InvalidArgument)


def _toml_seeds() -> Iterator[bytes]:
    yield b"\0" + PACKAGED_DEVICES.read_bytes()[:2000].rpartition(b"[[")[0]
    yield b'\1device = "compiled"\npreference = "low_power"\nbatch = 8\nshapes = {x = [1, 2]}\n'
    yield b'\2process_clients = 4\ncache_mib = 8\nruntimes = ["onnxruntime"]\n'


# ----------------------------------------------------------------------------------------------------------------------
# Bodies of the Open Inference Protocol


def run_http(data: bytes) -> str:
    """Decode the body of an inference request; the first byte is the length of the JSON, 0 = all is JSON."""
    length = (data[0] if data else 0) or None
    find_route(data[1:].decode("latin-1"))
    return _decoded(lambda: decode_infer_request(data[1:], length, model="m"), InvalidArgument)


def _http_seeds() -> Iterator[bytes]:
    tensor: dict[str, Any] = {"name": "x", "shape": [2], "datatype": "FP32"}
    whole = {"id": "1", "inputs": [tensor | {"data": [1.5, 2]}], "outputs": [{"name": "y"}]}
    yield b"\0" + json.dumps(whole).encode()
    sized = {"inputs": [tensor | {"parameters": {"binary_data_size": 8}}], "parameters": {"timeout": 5}}
    text = json.dumps(sized, separators=(",", ":")).encode()
    yield bytes([len(text)]) + text + bytes(8)


def run_grpc(data: bytes) -> str:
    """Decode a ModelInferRequest."""
    from nnfmq.serving.inference_protocol.grpc import decode_infer_message  # needs protobuf

    return _decoded(lambda: decode_infer_message(data), InvalidArgument)


def _grpc_seeds() -> Iterator[bytes]:
    from nnfmq.serving.inference_protocol.grpc import message_classes

    request = message_classes()["ModelInferRequest"](model_name="m", id="1")
    tensor = request.inputs.add(name="x", datatype="FP32", shape=[2])
    tensor.contents.fp32_contents.extend([1.0, 2.0])
    yield request.SerializeToString()
    tensor.ClearField("contents")
    request.raw_input_contents.append(bytes(8))
    yield request.SerializeToString()


# ----------------------------------------------------------------------------------------------------------------------
# All of them


DECODERS: dict[str, tuple[Callable[[bytes], str], Callable[[], Iterable[bytes]]]] = {
    "packets": (run_packets, _packet_seeds), "messages": (run_messages, _message_seeds),
    "models": (run_models, _model_seeds), "descriptors": (run_descriptors, _descriptor_seeds),
    "tflite": (run_tflite, _tflite_seeds), "onnx": (run_onnx, _onnx_seeds), "caches": (run_caches, _cache_seeds),
    "toml": (run_toml, _toml_seeds), "http": (run_http, _http_seeds), "grpc": (run_grpc, _grpc_seeds),
}  # fmt: skip
"""Name → the target, and the function that makes its seeds."""


def mutated(seeds: list[bytes], count: int, seed: int) -> Iterator[bytes]:
    """Yield seeds with random changes, always the same: bytes that are flipped, replaced, removed, repeated, joined."""
    chance = random.Random(seed)
    for _ in range(count):
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.randint(1, 4)):
            place, length = chance.randrange(len(data) + 1), chance.randint(1, 8)
            change = chance.randrange(6)
            if change == 0 and place < len(data):
                data[place] ^= 1 << chance.randrange(8)
            elif change == 1:
                data[place : place + length] = chance.choice(_INTERESTING)
            elif change == 2:
                del data[place : place + length]
            elif change == 3:
                data[place:place] = data[place : place + length] * chance.randint(1, 50)
            elif change == 4:
                data[place:place] = chance.randbytes(length)
            else:
                data[place:] = chance.choice(seeds)[place:]
        yield bytes(data)


_INTERESTING = (
    b"\xff" * 4,
    b"\0" * 4,
    b"\xff\xff\xff\x7f",
    b"\x80",
    b"\xc1",
    b"\xdf\xff\xff\xff\xff",
    b"[" * 2000,
    b"9" * 40,
)
