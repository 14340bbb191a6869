"""Cache files: what a device saves of a compilation, so sealed that nobody but this installation can have written it.

Each file is a header, whose last field is a keyed digest (HMAC-SHA-256), and the device's bytes. The digest is over
everything that the bytes depend on and that could be exchanged: the token, the device and its version, this build of
the engine, the CPU's features, and *all* files of the compilation in their order. So a bit, a byte, a file that is not
what was saved is seen before any of it is used, in the data cache as well, where the HAL would allow wrong results.

A file is read once, into private memory; what is verified is what is used. Files are the client's, and may be anything:
only regular ones, open for reading and writing, are touched, and none that is larger than the client's account.
Saving never changes how a preparation ends: what goes wrong is logged, and leaves files that are refused.
(REQUIREMENTS CACHE; docs/how-to/caching.md)
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

from nnfmq.hal.capabilities import NumberOfCacheFiles
from nnfmq.hal.errors import GeneralFailure, InvalidArgument, NnfmqError
from nnfmq.service.caching.cache_key import find_key, make_key
from nnfmq.validation.values import validate_cache_token

__all__ = [
    "CacheContents",
    "CacheFiles",
    "Identity",
    "build_identity",
    "open_files",
    "open_memory",
    "read_file",
    "save",
    "sealed",
    "write_file",
]

Buffer: TypeAlias = bytes | bytearray | memoryview

FORMAT = 1
_HEADER = struct.Struct("<8sHBBIQ8x32s")  # magic, format, kind, index, 0, bytes that follow; the digest
_MAGIC = b"nnfmqCCH"
_MODEL, _DATA = 1, 2
_DIGEST_BYTES = 32
_ALIGNMENT = 64
_NO_DIGEST = bytes(_DIGEST_BYTES)
_BUILD_PARTS = (
    "hal",
    "operations",
    "validation",
    "engines",
    "serialize/model_codec.py",
    "service/caching/interpreter_cache_format.py",
)
_PACKAGE = Path(__file__).resolve().parents[2]
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
            _write_files(files, identity, found)
    except (NnfmqError, OSError) as error:
        _log.warning("a compilation for device %s was not saved: %s", identity.name, error)
    except Exception:  # noqa: BLE001  a device's own code may raise anything
        _log.exception("a compilation for device %s was not saved", identity.name)


def _write_files(files: CacheFiles, identity: Identity, contents: CacheContents) -> None:
    """Write sealed `contents` to empty files. Where that fails they are empty again.

    Raises OSError, and GeneralFailure where there is no key to seal by.
    """
    try:
        if (len(contents.model), len(contents.data)) != (len(files.model), len(files.data)):
            raise GeneralFailure(f"device {identity.name!r} saves other numbers of files than it announces")
        parts = sealed(identity, files.token, contents)
        for fd, (header, data) in reversed(list(zip(files.fds, parts, strict=True))):  # the model, which says what
            write_file(fd, header, data)  # all is, last
    except BaseException:
        for fd in files.fds:
            with suppress(OSError):
                os.ftruncate(fd, 0)
        raise


def sealed(identity: Identity, token: bytes, contents: CacheContents) -> list[tuple[bytes, Buffer]]:
    """Return what each file of a compilation consists of: its header and its bytes.

    Raises GeneralFailure where there is no key to seal by.
    """
    places = [
        *((_MODEL, index, data) for index, data in enumerate(contents.model)),
        *((_DATA, index, data) for index, data in enumerate(contents.data)),
    ]
    unsealed = [(_header(kind, index, len(data)), data) for kind, index, data in places]
    digest = _digest(make_key(), identity, token, unsealed)
    return [(_header(kind, index, len(data), digest), data) for kind, index, data in places]


def write_file(fd: int, header: bytes, data: Buffer) -> None:
    """Write one of what `sealed` returned into an empty file, wherever the descriptor stands. Raises OSError."""
    _write(fd, header, 0)
    _write(fd, data, len(header))


def _write(fd: int, data: Buffer, start: int) -> None:
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
    except OSError as error:
        raise GeneralFailure(f"the cache cannot be read: {error}") from error
    _verify(read, identity, files.token)
    data = [content for _, _, content in read]
    count = len(files.model)
    return CacheContents(tuple(data[:count]), tuple(data[count:])), sum(map(len, data))


def open_memory(file: memoryview, identity: Identity, token: bytes) -> CacheContents:
    """Verify a compilation's only file, a model's, in memory that nobody can write to; what is returned lies there.

    Blocks. Raises GeneralFailure as `open_files`.
    """
    size = len(file) - _HEADER.size
    digest, header = _sides_of(bytes(file[: _HEADER.size]), _MODEL, 0, size)
    data = file[_HEADER.size :]
    _verify([(digest, header, data)], identity, token)
    return CacheContents((data,))


def _verify(read: Sequence[tuple[bytes, bytes, memoryview]], identity: Identity, token: bytes) -> None:
    """Raise GeneralFailure unless each file's digest is that of all headers and bytes."""
    expected = _digest(find_key(), identity, token, [(header, data) for _, header, data in read])
    if not all(hmac.compare_digest(expected, digest) for digest, _, _ in read):
        raise GeneralFailure("the cache is not what was saved, by this driver, for this device and token")


def _sides_of(header: bytes, kind: int, index: int, size: int) -> tuple[bytes, bytes]:
    """Return a header's digest, and the header without it, of a file in this place with `size` bytes behind it."""
    expected = _header(kind, index, max(size, 0))
    if size < 0 or header[:-_DIGEST_BYTES] != expected[:-_DIGEST_BYTES]:  # also of what is too large to be read
        raise GeneralFailure(f"a file of {size + _HEADER.size} bytes is no cache that was saved in this place")
    return header[-_DIGEST_BYTES:], expected


def _read_all(files: CacheFiles, limit_bytes: int) -> list[tuple[bytes, bytes, memoryview]]:
    """Return each file's digest, its header without it, and its bytes."""
    places = [*((_MODEL, index) for index in range(len(files.model))), *((_DATA, i) for i in range(len(files.data)))]
    found = []
    left = limit_bytes
    for fd, (kind, index) in zip(files.fds, places, strict=True):
        size = os.fstat(fd).st_size - _HEADER.size
        digest, header = _sides_of(os.pread(fd, _HEADER.size, 0), kind, index, size)
        if size > left:
            raise GeneralFailure(f"cache files of more than {limit_bytes} bytes are not read")
        left -= size
        found.append((digest, header, read_file(fd, size, _HEADER.size)))
    return found


def read_file(fd: int, size: int, start: int = 0) -> memoryview:
    """Return a copy of a part of a file, which may change meanwhile: what is looked at is the copy.

    Raises OSError, and GeneralFailure where the file ends early.
    """
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
