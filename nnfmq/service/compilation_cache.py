"""Cache files: what a device saves of a compilation, so sealed that nobody but this installation can have written it.

Each file is a header, whose last field is a keyed digest (HMAC-SHA-256), and the device's bytes. The digest is over
everything that the bytes depend on and that could be exchanged: the token, the device and its version, this build of
the engine, the CPU's features, and *all* files of the compilation in their order. So a bit, a byte, a file that is not
what was saved is seen before any of it is used, in the data cache as well, where the HAL would allow wrong results.

A file is read once, into private memory; what is verified is what is used. Files are the client's, and may be anything:
only regular ones, open for reading and writing, are touched, and none that is larger than the client's account.
Saving never changes how a preparation ends: what goes wrong is logged, and leaves files that are refused.
(REQUIREMENTS CACHE; docs/caching.md)
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import logging
import os
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np

from nnfmq.hal.device import NumberOfCacheFiles
from nnfmq.hal.errors import GeneralFailure, InvalidArgument, NnfmqError
from nnfmq.service.installation_key import find_key, make_key
from nnfmq.validation.values import validate_cache_token

__all__ = ["CacheContents", "CacheFiles", "Identity", "build_identity", "open_files", "save", "write_files"]

Buffer: TypeAlias = bytes | bytearray | memoryview

FORMAT = 1
_HEADER = struct.Struct("<8sHBBIQ8x32s")  # magic, format, kind, index, 0, bytes that follow; the digest
_MAGIC = b"nnfmqCCH"
_MODEL, _DATA = 1, 2
_DIGEST_BYTES = 32
_ALIGNMENT = 64
_NO_DIGEST = bytes(_DIGEST_BYTES)
_BUILD_PARTS = ("hal", "operations", "validation", "engines", "serialize/model.py", "service/interpreter_cache.py")
_PACKAGE = Path(__file__).resolve().parent.parent
_log = logging.getLogger("nnfmq.caching")


@dataclass(frozen=True, slots=True)
class CacheContents:
    """What a device saves: bytes for each of its model files and its data files, in their order."""

    model: tuple[Buffer, ...] = ()
    data: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheFiles:
    """The files that a client gave, which stay the caller's, and the token that names their compilation."""

    token: bytes
    model: Sequence[int] = ()
    data: Sequence[int] = ()

    def __bool__(self) -> bool:
        """True where any file was given."""
        return bool(self.model or self.data)

    @property
    def fds(self) -> list[int]:
        """All of them, those of the model first."""
        return [*self.model, *self.data]

    def check(self, needed: NumberOfCacheFiles) -> None:
        """Raise InvalidArgument unless these are as many regular files as announced, open for both, and a token."""
        given = NumberOfCacheFiles(len(self.model), len(self.data))
        if given != needed:
            raise InvalidArgument(
                f"{given.model} model and {given.data} data cache files given, the device needs {needed.model} and "
                f"{needed.data} (CACHE-6)"
            )
        validate_cache_token(self.token)
        for number, fd in enumerate(self.fds):
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise InvalidArgument(f"cache file {number} is no regular file")
            if fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_PATH) != os.O_RDWR:
                raise InvalidArgument(f"cache file {number} is not open for both reading and writing (CACHE-5)")


@dataclass(frozen=True, slots=True)
class Identity:
    """The device that a cache is for."""

    name: str
    version: str


# ------------------------------------------------------------------------------------------------ what it is bound to


@cache
def build_identity() -> bytes:
    """Return a digest of what decides, beside the device's version, what saved bytes mean: code, NumPy, processor.

    The code counts itself, and not only its release: a cache must not outlive an edit of the source.
    """
    digest = hashlib.sha256()
    for text in (np.__version__, os.uname().machine, *sorted(_cpu_features())):
        digest.update(_framed(text.encode()))
    for path in _sources():
        digest.update(_framed(path.read_bytes()))
    return digest.digest()


def _sources() -> Iterator[Path]:
    for part in _BUILD_PARTS:
        place = _PACKAGE / part
        yield from [place] if place.is_file() else sorted(place.rglob("*.py"))


def _cpu_features() -> set[str]:
    """Return the features that the kernel lists for the first processor."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return set(value.split())
    return set()


def _framed(field: bytes) -> bytes:
    return struct.pack("<Q", len(field)) + field


def _digest(key: bytes, identity: Identity, token: bytes, files: Sequence[tuple[bytes, Buffer]]) -> bytes:
    """Return what binds files (header without its digest, bytes) to each other and to where they may be used."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for field in (identity.name.encode(), identity.version.encode(), build_identity(), token):
        mac.update(_framed(field))
    for header, data in files:
        mac.update(header)
        mac.update(data)
    return mac.digest()


def _header(kind: int, index: int, size: int, digest: bytes = _NO_DIGEST) -> bytes:
    return _HEADER.pack(_MAGIC, FORMAT, kind, index, 0, size, digest)


# ------------------------------------------------------------------------------------------------ saving


def save(
    files: CacheFiles, needed: NumberOfCacheFiles, identity: Identity, contents: Callable[[], CacheContents | None]
) -> None:
    """Write what `contents` returns, None for nothing, to the client's files; blocks. Raises nothing of its own."""
    try:
        files.check(needed)
        for fd in files.fds:
            os.ftruncate(fd, 0)  # whatever comes now, what was there is not what is asked to be saved
        found = contents()
        if found is None:
            _log.info("device %s does not save this model", identity.name)
        else:
            write_files(files, identity, found)
    except (NnfmqError, OSError) as error:
        _log.warning("a compilation for device %s was not saved: %s", identity.name, error)
    except Exception:  # noqa: BLE001  a device's own code may raise anything
        _log.exception("a compilation for device %s was not saved", identity.name)


def write_files(files: CacheFiles, identity: Identity, contents: CacheContents) -> None:
    """Write sealed `contents` to empty files; blocks. Where that fails they are empty again.

    Raises OSError, and GeneralFailure where there is no key to seal by.
    """
    try:
        for fd, header, data in reversed(_sealed(files, identity, contents)):  # the model, which says what all is, last
            _write(fd, header, 0)
            _write(fd, data, len(header))
    except BaseException:
        for fd in files.fds:
            with suppress(OSError):
                os.ftruncate(fd, 0)
        raise


def _sealed(files: CacheFiles, identity: Identity, contents: CacheContents) -> list[tuple[int, bytes, Buffer]]:
    places = [
        *((_MODEL, index, data) for index, data in enumerate(contents.model)),
        *((_DATA, index, data) for index, data in enumerate(contents.data)),
    ]
    if (len(contents.model), len(contents.data)) != (len(files.model), len(files.data)):
        raise GeneralFailure(f"device {identity.name!r} saves other numbers of files than it announces")
    unsealed = [(_header(kind, index, len(data)), data) for kind, index, data in places]
    digest = _digest(make_key(), identity, files.token, unsealed)
    headers = [_header(kind, index, len(data), digest) for kind, index, data in places]
    return [(fd, header, data) for fd, header, (_, _, data) in zip(files.fds, headers, places, strict=True)]


def _write(fd: int, data: Buffer, start: int) -> None:
    """Write `data` at `start`, wherever the client's descriptor stands."""
    done = 0
    with memoryview(data) as rest:
        while done < len(rest):
            done += os.pwrite(fd, rest[done:], start + done)


# ------------------------------------------------------------------------------------------------ loading


def open_files(
    files: CacheFiles, needed: NumberOfCacheFiles, identity: Identity, limit_bytes: int
) -> tuple[CacheContents, int]:
    """Read and verify a client's files; return what a device saved in them, private, and how many bytes that is.

    Blocks. Raises InvalidArgument for wrong numbers, files or tokens, GeneralFailure for whatever is not exactly what
    this installation saved for this device and token, or is larger than `limit_bytes`.
    """
    if needed == NumberOfCacheFiles():
        raise GeneralFailure(f"device {identity.name!r} caches nothing")
    try:
        files.check(needed)
        read = _read_all(files, limit_bytes)
        expected = _digest(find_key(), identity, files.token, [(header, data) for _, header, data in read])
    except OSError as error:
        raise GeneralFailure(f"the cache cannot be read: {error}") from error
    if not all(hmac.compare_digest(expected, digest) for digest, _, _ in read):
        raise GeneralFailure("the cache is not what was saved, by this driver, for this device and token")
    data = [content for _, _, content in read]
    count = len(files.model)
    return CacheContents(tuple(data[:count]), tuple(data[count:])), sum(map(len, data))


def _read_all(files: CacheFiles, limit_bytes: int) -> list[tuple[bytes, bytes, memoryview]]:
    """Return each file's digest, its header without it, and its bytes."""
    places = [*((_MODEL, index) for index in range(len(files.model))), *((_DATA, i) for i in range(len(files.data)))]
    found = []
    left = limit_bytes
    for fd, (kind, index) in zip(files.fds, places, strict=True):
        size = os.fstat(fd).st_size - _HEADER.size
        expected = _header(kind, index, max(size, 0))
        header = os.pread(fd, _HEADER.size, 0)
        if size < 0 or header[:-_DIGEST_BYTES] != expected[:-_DIGEST_BYTES]:  # also of what is too large to be read
            raise GeneralFailure(f"a file of {size + _HEADER.size} bytes is no cache that was saved in this place")
        if size > left:
            raise GeneralFailure(f"cache files of more than {limit_bytes} bytes are not read")
        left -= size
        found.append((header[-_DIGEST_BYTES:], expected, _read(fd, size, _HEADER.size)))
    return found


def _read(fd: int, size: int, start: int) -> memoryview:
    """Return a copy of a part of a file, which may change meanwhile: what is looked at is the copy."""
    room = np.empty(size + _ALIGNMENT, np.uint8)  # unlike a bytearray not filled first
    skip = -room.ctypes.data % _ALIGNMENT  # so that arrays at multiples of it lie at cache lines in memory, too
    data = room[skip : skip + size].data
    done = 0
    while done < size:
        count = os.preadv(fd, [data[done:]], start + done)
        if count == 0:
            raise GeneralFailure("a cache file became shorter while it was read")
        done += count
    return data.toreadonly()
