"""How much memory an encoded model takes when it is decoded, known before an object of it exists.

A few bytes of a message can become an object of a hundred. The constants among a model's bytes are copied once, so they
are counted by their size; all else by DECODED_BYTES_PER_BYTE.
"""

from __future__ import annotations

import msgspec

from nnfmq.hal.errors import ProtocolError
from nnfmq.serialize.packets import BytesLike

__all__ = ["DECODED_BYTES_PER_BYTE", "decoded_model_bytes"]

DECODED_BYTES_PER_BYTE = 48
"""The most memory that one byte of msgpack takes as objects while it is decoded.

Scales of one byte take the most, 42: the wire's objects and the HAL's exist at the same time. A test measures models of
one kind of record in its shortest form.
"""


class _Parts(msgspec.Struct, array_like=True, frozen=True):
    """The beginning of `model_codec._Model`, of which nothing is decoded."""

    main: msgspec.Raw
    referenced: msgspec.Raw
    operand_values: msgspec.Raw


_decoder = msgspec.msgpack.Decoder(_Parts)


def decoded_model_bytes(data: BytesLike) -> int:
    """Return the most memory that `model_codec.decode_model` takes for `data`, beside `data`.

    Raises:
        ProtocolError: If `data` is not an encoded model.
    """
    try:
        parts = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{len(data)} bytes are not a model: {error}") from error
    constants = memoryview(parts.operand_values).nbytes
    return constants + (len(data) - constants) * DECODED_BYTES_PER_BYTE
