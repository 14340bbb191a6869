"""A Model as bytes: msgpack arrays of the HAL's values; its pools are sent beside them as file descriptors.

The structs below are the field table of both directions: `encode_model` converts the HAL's types to them and
`decode_model` converts them back, and msgspec checks types, enum values and ranges both times. The order of the fields
is the wire format; unknown, missing and surplus fields are rejected. Extensions are sent by name, with the prefixes of
this model. The bytes contain the sizes of the pools; the caller sends their file descriptors in the same order.

A model may have millions of operands, and neither decoding nor converting one array releases the GIL. So the arrays of
operands and operations are divided into their entries first, of which a slice is then decoded at a time.

Whether the model is valid (indexes within the subgraph, locations within the pools, scales) is checked by `validation`.

Annotations are no texts here and in `hal.types`, as in `messages`.

Source: the HAL's Model, Subgraph, Operation and Operand.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from nnfmq.hal.errors import InvalidArgument, ProtocolError
from nnfmq.hal.types import (
    ExtensionNameAndPrefix,
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    Pool,
    Subgraph,
)
from nnfmq.serialize.messages import MAX_NAME
from nnfmq.serialize.packets import BytesLike

__all__ = ["DECODED_BYTES_PER_BYTE", "decode_model", "decoded_model_bytes", "encode_model"]

U32: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]
I32: TypeAlias = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
U63: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]

MAX_EXTENSIONS = 1024  # of one model
SLICE_RECORDS = 512  # operands or operations that are decoded at a time, in about 0.5 ms


_OperandT = TypeVar("_OperandT")
_OperationT = TypeVar("_OperationT")
_RecordT = TypeVar("_RecordT", Operand, Operation)


class _Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base class: an array of the fields, in their order."""


class _Location(_Wire, frozen=True):
    pool_index: U32
    offset: U32
    length: U32
    padding: U32


class _ChannelQuant(_Wire, frozen=True):
    scales: tuple[float, ...]
    channel_dim: U32


class _Operand(_Wire, frozen=True):
    type: OperandType
    dimensions: tuple[U32, ...]
    scale: float
    zero_point: I32
    lifetime: LifeTime
    location: _Location
    channel_quant: _ChannelQuant | None
    extension_data: bytes


class _Operation(_Wire, frozen=True):
    type: OperationType
    inputs: tuple[U32, ...]
    outputs: tuple[U32, ...]


class _Subgraph(_Wire, Generic[_OperandT, _OperationT], frozen=True):
    operands: tuple[_OperandT, ...]
    operations: tuple[_OperationT, ...]
    input_indexes: tuple[U32, ...]
    output_indexes: tuple[U32, ...]


class _Extension(_Wire, frozen=True):
    name: Annotated[str, Meta(max_length=MAX_NAME)]
    prefix: Annotated[int, Meta(ge=0, le=2**16 - 1)]


class _Model(_Wire, Generic[_OperandT, _OperationT], frozen=True):
    main: _Subgraph[_OperandT, _OperationT]
    referenced: tuple[_Subgraph[_OperandT, _OperationT], ...]
    operand_values: bytes
    pool_sizes: tuple[U63, ...]
    relax_computation_float32_to_float16: bool
    extensions: Annotated[tuple[_Extension, ...], Meta(max_length=MAX_EXTENSIONS)]


_encoder = msgspec.msgpack.Encoder()
_WholeSubgraph = _Subgraph[_Operand, _Operation]  # one object, on which msgspec keeps its description
msgspec.convert((), tuple[Subgraph, ...])  # while there is one thread, see `messages.common`
msgspec.convert((), tuple[_WholeSubgraph, ...])
_decoder = msgspec.msgpack.Decoder(_Model[msgspec.Raw, msgspec.Raw])
_operands_decoder = msgspec.msgpack.Decoder(tuple[_Operand, ...])
_operations_decoder = msgspec.msgpack.Decoder(tuple[_Operation, ...])
_ARRAY_32, _ARRAY = 0xDD, struct.Struct(">BI")  # of MessagePack: an array with a length of 32 bits


def _go_on() -> None:
    """Let decoding go on."""


def encode_model(model: Model) -> tuple[bytes, tuple[Pool, ...]]:
    """Return the model's bytes and its pools, whose file descriptors the caller must send in this order.

    The pools stay owned by the model.

    Raises:
        InvalidArgument: If a number is out of the range of its field.
    """
    sizes = tuple(pool.size_bytes for pool in model.pools)
    try:
        wire = _Model(
            main=_encode_subgraph(model.main),
            referenced=tuple(_encode_subgraph(subgraph) for subgraph in model.referenced),
            operand_values=model.operand_values,
            pool_sizes=sizes,
            relax_computation_float32_to_float16=model.relax_computation_float32_to_float16,
            extensions=msgspec.convert(model.extensions, tuple[_Extension, ...], from_attributes=True),
        )
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"the model cannot be written: {error}") from error
    return _encoder.encode(wire), model.pools


def _encode_subgraph(subgraph: Subgraph) -> _Subgraph[_Operand, _Operation]:
    return msgspec.convert(subgraph, _WholeSubgraph, from_attributes=True)


def decode_model(
    data: BytesLike,
    pools: Sequence[Pool],
    check: Callable[[], None] = _go_on,
) -> Model:
    """Return the model in `data` over `pools`, the memories that came with it in their order; it keeps them.

    `operand_values` is a copy.

    Args:
        data: The encoded model.
        pools: The memories.
        check: Called between slices of operands or operations. May raise, to end the decoding.

    Raises:
        ProtocolError: If `data` is not exactly one encoded model, or the number of pools differs, or a pool is smaller
            than the model states.
        Exception: Any error that `check` raises.
    """
    try:
        wire = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{len(data)} bytes are not a model: {error}") from error
    if len(pools) != len(wire.pool_sizes):
        raise ProtocolError(f"the model lists {len(wire.pool_sizes)} pools, {len(pools)} were received")
    for index, (size, pool) in enumerate(zip(wire.pool_sizes, pools, strict=True)):
        if pool.size_bytes < size:
            raise ProtocolError(f"pool {index} of the model has {size} bytes, the received one {pool.size_bytes}")
    return Model(
        main=_decode_subgraph(wire.main, "main", check),
        referenced=tuple(
            _decode_subgraph(subgraph, f"referenced[{index}]", check) for index, subgraph in enumerate(wire.referenced)
        ),
        operand_values=wire.operand_values,
        pools=tuple(pools),
        relax_computation_float32_to_float16=wire.relax_computation_float32_to_float16,
        extensions=msgspec.convert(wire.extensions, tuple[ExtensionNameAndPrefix, ...], from_attributes=True),
    )


def _decode_subgraph(wire: _Subgraph[msgspec.Raw, msgspec.Raw], name: str, check: Callable[[], None]) -> Subgraph:
    return Subgraph(
        _decode_slices(wire.operands, _operands_decoder, tuple[Operand, ...], f"{name}.operands", check),
        _decode_slices(wire.operations, _operations_decoder, tuple[Operation, ...], f"{name}.operations", check),
        wire.input_indexes,
        wire.output_indexes,
    )


def _decode_slices(
    records: Sequence[msgspec.Raw],
    decoder: msgspec.msgpack.Decoder[Any],
    kind: type[tuple[_RecordT, ...]],
    name: str,
    check: Callable[[], None],
) -> tuple[_RecordT, ...]:
    decoded: list[_RecordT] = []
    for begin in range(0, len(records), SLICE_RECORDS):
        if begin:
            check()
        part = records[begin : begin + SLICE_RECORDS]
        try:
            wire = decoder.decode(_ARRAY.pack(_ARRAY_32, len(part)) + b"".join(part))
        except msgspec.DecodeError as error:
            raise ProtocolError(f"the model's {name}, counted from {begin}, cannot be read: {error}") from error
        decoded += msgspec.convert(wire, kind, from_attributes=True)
    return tuple(decoded)


# ----------------------------------------------------------------------------------------------------------------------
# How much memory an encoded model takes when it is decoded, known before an object of it exists.
#
# A few bytes of a message can become an object of a hundred. The constants among a model's bytes are copied once, so
# they are counted by their size; all else by DECODED_BYTES_PER_BYTE.


DECODED_BYTES_PER_BYTE = 48
"""The most memory that one byte of msgpack takes as objects while it is decoded.

Scales of one byte take the most, 42: the wire's objects and the HAL's exist at the same time. A test measures models of
one kind of record in its shortest form.
"""


class _Parts(msgspec.Struct, array_like=True, frozen=True):
    """The beginning of `_Model`, of which nothing is decoded."""

    main: msgspec.Raw
    referenced: msgspec.Raw
    operand_values: msgspec.Raw


_size_decoder = msgspec.msgpack.Decoder(_Parts)


def decoded_model_bytes(data: BytesLike) -> int:
    """Return the most memory that `decode_model` takes for `data`, beside `data`.

    Raises:
        ProtocolError: If `data` is not an encoded model.
    """
    try:
        parts = _size_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{len(data)} bytes are not a model: {error}") from error
    constants = memoryview(parts.operand_values).nbytes
    return constants + (len(data) - constants) * DECODED_BYTES_PER_BYTE
