"""The packet codec in use: `_codec` (compiled) or `_pycodec` (Python), which have the same functions.

It is selected at import, as `nnfmq.base.cores` documents; `codec_name`, `codec_path` and `codec_reason` report the
choice. Callers import the functions from here, and the types of their values from `packets`.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from nnfmq.base.cores import CorePair

__all__ = [
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

_CORES = CorePair(compiled="nnfmq.serialize._codec", python="nnfmq.serialize._pycodec")


def load(name: str) -> ModuleType:
    """Import and return the codec `name` (`compiled` or `python`).

    Raises:
        ImportError: If there is no codec of that name, or the compiled one is not built. The text has the remedy.
    """
    return _CORES.load(name)


def available() -> tuple[str, ...]:
    """Return the names of the codecs that can be loaded, the faster one first."""
    return _CORES.available()


codec_name, codec_reason = _CORES.choose()
_active = load(codec_name)
codec_path = str(_active.__file__)

if TYPE_CHECKING:
    from nnfmq.serialize._pycodec import decode_request, decode_result, encode_request, encode_result
else:
    decode_request, decode_result = _active.decode_request, _active.decode_result
    encode_request, encode_result = _active.encode_request, _active.encode_result
