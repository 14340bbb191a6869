"""Cache files of a compilation, sealed so that a driver accepts only what this installation saved.

Each file is a 64-byte header, whose last field is a digest (HMAC-SHA-256, keyed by `cache_key`), and the device's data:

    offset  0  8 bytes   magic "nnfmqCCH"
            8  u16       format (1)
           10  u8        kind: 1 model file, 2 data file
           11  u8        index among the files of this kind
           12  u32       0
           16  u64       number of data bytes
           24  8 bytes   0
           32  32 bytes  digest

The digest covers the token, the device and its version, the driver's build, the CPU's features, and the headers and
data of all files of the compilation in order. So a change of any bit, and a file of another compilation, is detected
before any data is used; in data files too, for which the HAL would allow wrong results.

A file is read once, into private memory, so that the bytes that are verified are the bytes that are used. The fds come
from the client and may be anything: only regular files that are open for reading and writing are accessed, up to the
client's memory quota. Saving never fails a preparation: an error is logged, and the files are left empty or invalid.
(CACHE requirements; docs/how-to/caching.md)
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeAlias

import numpy as np
from msgspec import Struct

from nnfmq.hal.capabilities import NumberOfCacheFiles
from nnfmq.hal.errors import GeneralFailure, InvalidArgument, NnfmqError
from nnfmq.service.caching.cache_key import find_key, find_or_create_key
from nnfmq.service.installation import build_identity, framed
from nnfmq.validation.values import validate_cache_token

__all__ = [
    "BytesLike",
    "CacheContents",
    "CacheFiles",
    "DeviceIdentity",
    "read_file",
    "read_files",
    "read_memory",
    "save_files",
    "seal",
    "write_file",
]

BytesLike: TypeAlias = bytes | bytearray | memoryview

FORMAT = 1
_HEADER = struct.Struct("<8sHBBIQ8x32s")
_MAGIC = b"nnfmqCCH"
_MODEL_FILE, _DATA_FILE = 1, 2
_DIGEST_BYTES = 32
_ALIGNMENT = 64  # bytes; a cache line
_NO_DIGEST = bytes(_DIGEST_BYTES)
_log = logging.getLogger("nnfmq.caching")


class CacheContents(Struct, frozen=True):
    """The data that a device saves: the bytes of its model files, and of its data files, in order."""

    model: tuple[BytesLike, ...] = ()
    data: tuple[BytesLike, ...] = ()


class CacheFiles(Struct, frozen=True):
    """Fds of a client's cache files, which this object borrows, and the client's token of the compilation."""

    token: bytes
    model: Sequence[int] = ()
    data: Sequence[int] = ()

    def __bool__(self) -> bool:
        """Return whether there is any file."""
        return bool(self.model or self.data)

    @property
    def fds(self) -> list[int]:
        """The fds of all files, model files first."""
        return [*self.model, *self.data]

    def check(self, needed: NumberOfCacheFiles) -> None:
        """Check the token, and that there are as many files as the device needs.

        Raises:
            InvalidArgument: If the token has a wrong size, or the number of files is wrong, or a file is not a regular
                file, open for reading and writing.
        """
        if NumberOfCacheFiles(len(self.model), len(self.data)) != needed:
            raise InvalidArgument(
                f"{len(self.model)} model and {len(self.data)} data cache files were passed, the device needs "
                f"{needed.model} and {needed.data} (CACHE-6)"
            )
        validate_cache_token(self.token)
        for index, fd in enumerate(self.fds):
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise InvalidArgument(f"cache file {index} is not a regular file")
            if fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_PATH) != os.O_RDWR:
                raise InvalidArgument(f"cache file {index} is not open for both reading and writing (CACHE-5)")


class DeviceIdentity(Struct, frozen=True):
    """The device that a cache is valid for."""

    name: str
    version: str


# ------------------------------------------------------------------------------------------------ digests


def _digest(key: bytes, device: DeviceIdentity, token: bytes, files: Sequence[tuple[bytes, BytesLike]]) -> bytes:
    """Return the digest of a compilation. Each of `files` is a header without digest, and the data after it."""
    from hmac import new  # it loads OpenSSL, which a supervisor does without

    mac = new(key, digestmod="sha256")
    for field in (device.name.encode(), device.version.encode(), build_identity(), token):
        mac.update(framed(field))
    for header, data in files:  # the header contains the length of the data
        mac.update(header)
        mac.update(data)
    return mac.digest()


def _header(kind: int, index: int, size: int, digest: bytes = _NO_DIGEST) -> bytes:
    return _HEADER.pack(_MAGIC, FORMAT, kind, index, 0, size, digest)


def _kinds(model_count: int, data_count: int) -> list[tuple[int, int]]:
    """Return kind and index of each file of a compilation, in order."""
    return [*((_MODEL_FILE, i) for i in range(model_count)), *((_DATA_FILE, i) for i in range(data_count))]


# ------------------------------------------------------------------------------------------------ saving


def save_files(
    files: CacheFiles,
    needed: NumberOfCacheFiles,
    device: DeviceIdentity,
    get_contents: Callable[[], CacheContents | None],
) -> None:
    """Write the contents that `get_contents` returns (None: the model is not cached) to a client's files.

    Blocks. Errors, including any exception of `get_contents`, are logged and not raised.
    """
    try:
        files.check(needed)
        for fd in files.fds:
            os.ftruncate(fd, 0)  # even if saving fails, the old content is not that of this compilation
        contents = get_contents()
        if contents is None:
            _log.info("device %s does not save this model", device.name)
        else:
            _write_files(files, device, contents)
    except (NnfmqError, OSError) as error:
        _log.warning("a compilation for device %s was not saved: %s", device.name, error)
    except Exception:  # noqa: BLE001  code of a plug-in may raise anything
        _log.exception("a compilation for device %s was not saved", device.name)


def _write_files(files: CacheFiles, device: DeviceIdentity, contents: CacheContents) -> None:
    """Seal `contents` and write them to empty files; truncate the files again if that fails.

    Raises OSError, and GeneralFailure if there is no key or `contents` has a wrong number of files.
    """
    try:
        if (len(contents.model), len(contents.data)) != (len(files.model), len(files.data)):
            raise GeneralFailure(f"device {device.name!r} saved another number of files than it declares")
        sealed = seal(device, files.token, contents)
        # The first model file is written last: until then the compilation is incomplete and fails verification.
        for fd, (header, data) in reversed(list(zip(files.fds, sealed, strict=True))):
            write_file(fd, header, data)
    except BaseException:
        for fd in files.fds:
            with suppress(OSError):
                os.ftruncate(fd, 0)
        raise


def seal(device: DeviceIdentity, token: bytes, contents: CacheContents) -> list[tuple[bytes, BytesLike]]:
    """Return header and data of each file of a compilation. Creates the key if there is none.

    Raises:
        GeneralFailure: If there is no usable key.
    """
    all_data = [*contents.model, *contents.data]
    kinds = _kinds(len(contents.model), len(contents.data))
    unsealed = [(_header(kind, index, len(data)), data) for (kind, index), data in zip(kinds, all_data, strict=True)]
    digest = _digest(find_or_create_key(), device, token, unsealed)
    return [(header[:-_DIGEST_BYTES] + digest, data) for header, data in unsealed]


def write_file(fd: int, header: bytes, data: BytesLike) -> None:
    """Write header and data of one file at offset 0; the fd's file position is not used. Raises OSError."""
    _write(fd, header, 0)
    _write(fd, data, len(header))


def _write(fd: int, data: BytesLike, start: int) -> None:
    done = 0
    with memoryview(data) as view:
        while done < len(view):
            done += os.pwrite(fd, view[done:], start + done)


# ------------------------------------------------------------------------------------------------ loading


class _File(NamedTuple):
    """A file that has been read and not been verified."""

    digest: bytes
    header: bytes  # without the digest
    data: memoryview


def read_files(
    files: CacheFiles, needed: NumberOfCacheFiles, device: DeviceIdentity, limit_bytes: int
) -> tuple[CacheContents, int]:
    """Read and verify a client's files. Return their contents, in private memory, and the number of data bytes. Blocks.

    Raises:
        InvalidArgument: If the token, the number of files or a file is not valid (see `CacheFiles.check`).
        GeneralFailure: If the files are not exactly what this installation saved for this device and token, are larger
            than `limit_bytes` together, or cannot be read.
    """
    if needed == NumberOfCacheFiles():
        raise GeneralFailure(f"device {device.name!r} does not support caching")
    try:
        files.check(needed)
        contents = _read_all(files, limit_bytes)
    except OSError as error:
        raise GeneralFailure(f"the cache cannot be read: {error}") from error
    _verify(contents, device, files.token)
    data = [file.data for file in contents]
    count = len(files.model)
    return CacheContents(tuple(data[:count]), tuple(data[count:])), sum(map(len, data))


def read_memory(file: memoryview, device: DeviceIdentity, token: bytes) -> CacheContents:
    """Verify the single model file of a compilation, in memory that nobody can write. Return views of it. Blocks.

    Raises:
        GeneralFailure: If it is not exactly what this installation saved for this device and token.
    """
    size = len(file) - _HEADER.size
    digest, header = _split_header(bytes(file[: _HEADER.size]), _MODEL_FILE, 0, size)
    data = file[_HEADER.size :]
    _verify([_File(digest, header, data)], device, token)
    return CacheContents((data,))


def _verify(files: Sequence[_File], device: DeviceIdentity, token: bytes) -> None:
    expected = _digest(find_key(), device, token, [(file.header, file.data) for file in files])
    from hmac import compare_digest

    if not all(compare_digest(expected, file.digest) for file in files):
        raise GeneralFailure("the cache is not what this driver saved for this device and token")


def _split_header(header: bytes, kind: int, index: int, size: int) -> tuple[bytes, bytes]:
    """Return the digest of a header, and the header without it. `size` is the number of bytes after the header.

    Raises GeneralFailure unless all other fields are as expected for this kind, index and size.
    """
    expected = _header(kind, index, max(size, 0))
    if size < 0 or header[:-_DIGEST_BYTES] != expected[:-_DIGEST_BYTES]:
        raise GeneralFailure(f"a file of {size + _HEADER.size} bytes is not a cache file for this position")
    return header[-_DIGEST_BYTES:], expected


def _read_all(files: CacheFiles, limit_bytes: int) -> list[_File]:
    result = []
    left = limit_bytes
    for fd, (kind, index) in zip(files.fds, _kinds(len(files.model), len(files.data)), strict=True):
        size = os.fstat(fd).st_size - _HEADER.size
        # The header is checked before the size: a file that is not a cache file is reported as such, however large.
        digest, header = _split_header(os.pread(fd, _HEADER.size, 0), kind, index, size)
        if size > left:
            raise GeneralFailure(f"cache files of more than {limit_bytes} bytes are not read")
        left -= size
        result.append(_File(digest, header, read_file(fd, size, _HEADER.size)))
    return result


def read_file(fd: int, size: int, start: int = 0) -> memoryview:
    """Return a private copy of `size` bytes of a file, aligned to 64 bytes. Another process may change the file.

    Raises:
        OSError: If the file cannot be read.
        GeneralFailure: If the file ends early.
    """
    buffer = np.empty(size + _ALIGNMENT, np.uint8)  # unlike a bytearray, not filled with zeros first
    skip = -buffer.ctypes.data % _ALIGNMENT
    data = buffer[skip : skip + size].data
    done = 0
    while done < size:
        count = os.preadv(fd, [data[done:]], start + done)
        if count == 0:
            raise GeneralFailure("a cache file became shorter while it was read")
        done += count
    return data.toreadonly()
