"""The codec that runs: `_codec`, compiled, or `packet`, the same in plain Python and its specification.

Chosen once, at import, as `nnfmq.core_selection` says; `codec_name`, `codec_path` and `codec_reason` say what and
why. Whoever encodes or decodes packets takes the functions and classes from here, and the types of their values from
`packet`.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from nnfmq.core_selection import CorePair

__all__ = [
    "Decoder",
    "RequestTemplate",
    "available",
    "codec_name",
    "codec_path",
    "codec_reason",
    "decode_request",
    "decode_result",
    "encode_request",
    "encode_result",
    "load",
]

_CORES = CorePair(compiled="nnfmq.serialize._codec", python="nnfmq.serialize.packet")


def load(name: str) -> ModuleType:
    """Import the codec `name` (`compiled` or `python`). Raises ImportError with the remedy where it cannot be had."""
    return _CORES.load(name)


def available() -> tuple[str, ...]:
    """Return the names of the codecs that can be loaded here, the faster one first."""
    return _CORES.available()


codec_name, codec_reason = _CORES.choose()
_active = load(codec_name)
codec_path = str(_active.__file__)

if TYPE_CHECKING:
    from nnfmq.serialize.packet import (
        Decoder,
        RequestTemplate,
        decode_request,
        decode_result,
        encode_request,
        encode_result,
    )
else:
    Decoder, RequestTemplate = _active.Decoder, _active.RequestTemplate
    decode_request, decode_result = _active.decode_request, _active.decode_result
    encode_request, encode_result = _active.encode_request, _active.encode_result
