"""SHA-256, and the HMAC of it: by `_sha256` (Cython and the CPU's instructions for it), or by OpenSSL.

OpenSSL takes 2 MiB of each process and some milliseconds of its start, so it is loaded only if the compiled core is not
built, the setting `core` asks for Python, or the CPU has no such instructions. Both return the same, equally fast.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from nnfmq.base import settings

__all__ = ["DIGEST_BYTES", "Sha256", "are_equal", "hmac_sha256", "is_compiled", "sha256", "sha256_of"]

DIGEST_BYTES = 32
_BLOCK_BYTES = 64
_INNER, _OUTER = 0x36, 0x5C  # of RFC 2104

if TYPE_CHECKING:
    from nnfmq.base._pysha256 import Sha256


def _compiled() -> type[Sha256] | None:
    """Return the class of the compiled core; None if it is not used."""
    if settings.CORE.value() == "python":
        return None
    try:
        from nnfmq.base import _sha256
    except ImportError:  # not built
        return None
    return _sha256.Sha256 if _sha256.is_supported() else None


_found = _compiled()
is_compiled = _found is not None
"""Whether digests are computed without OpenSSL."""
if not TYPE_CHECKING:
    if is_compiled:
        Sha256 = _found
    else:
        from nnfmq.base._pysha256 import Sha256


def sha256(*parts: bytes | bytearray | memoryview) -> bytes:
    """Return the digest of `parts`, one after the other. Blocks: about 1 ms for each MiB."""
    return sha256_of(parts)


def sha256_of(parts: Iterable[bytes | bytearray | memoryview]) -> bytes:
    """Return the digest of `parts`, one after the other; each is asked for when those before it are in the digest."""
    digest = Sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def hmac_sha256(key: bytes, *parts: bytes | bytearray | memoryview) -> bytes:
    """Return the HMAC (RFC 2104) of `parts`, one after the other, with a key of at most 64 bytes. Blocks."""
    assert len(key) <= _BLOCK_BYTES
    padded = key.ljust(_BLOCK_BYTES, b"\0")
    inner = sha256(bytes(byte ^ _INNER for byte in padded), *parts)
    return sha256(bytes(byte ^ _OUTER for byte in padded), inner)


def are_equal(digest: bytes, other: bytes) -> bool:
    """Compare two digests of the same size, in a time that does not tell where they differ."""
    return sum(a ^ b for a, b in zip(digest, other, strict=True)) == 0
