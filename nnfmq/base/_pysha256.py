"""SHA-256 by Python's standard library: the specification of the compiled core, `_sha256`."""

from __future__ import annotations

__all__ = ["Sha256"]


class Sha256:
    """The SHA-256 (FIPS 180-4) of bytes that come in parts. Used by one thread at a time."""

    __slots__ = ("_hash",)

    def __init__(self, data: bytes | bytearray | memoryview = b"", /) -> None:
        import hashlib  # it loads OpenSSL, which a process with the compiled core does without

        self._hash = hashlib.sha256(data)

    def update(self, data: bytes | bytearray | memoryview, /) -> None:
        """Add contiguous bytes; other threads run meanwhile if they are many."""
        self._hash.update(data)

    def digest(self) -> bytes:
        """Return the 32 bytes of the digest of all bytes until now."""
        return self._hash.digest()
