"""The packet codec in use: `_codec` (compiled) or `_pycodec` (Python), which have the same functions.

It is selected at import, as `nnfmq.base.cores` documents; `codec_name`, `codec_path` and `codec_reason` report the
choice. Callers import the functions from here, and the types of their values from `packets`.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from nnfmq.base.cores import CorePair

__all__ = [
    "CORES",
    "codec_name",
    "codec_path",
    "codec_reason",
    "decode_request",
    "decode_result",
    "encode_request",
    "encode_result",
]

CORES: CorePair[ModuleType] = CorePair(compiled="nnfmq.serialize._codec", python="nnfmq.serialize._pycodec")
codec_name, codec_reason = CORES.choose()
_active = CORES.load(codec_name)
codec_path = str(_active.__file__)

if TYPE_CHECKING:
    from nnfmq.serialize._pycodec import decode_request, decode_result, encode_request, encode_result
else:
    decode_request, decode_result = _active.decode_request, _active.decode_result
    encode_request, encode_result = _active.encode_request, _active.encode_result
