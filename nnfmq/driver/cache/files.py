"""Cache files of a compilation, sealed so that a driver accepts only what this installation saved.

Each file is a 64-byte header, whose last field is a digest (HMAC-SHA-256, the driver's key), and the device's data:

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

import errno
import fcntl
import logging
import os
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from nnfmq.base.digests import DIGEST_BYTES, are_equal, hmac_sha256
from nnfmq.base.memory import write_all
from nnfmq.base.paths import check_directory, creation_problem, make_state_directory, state_directory
from nnfmq.driver.devices.installation import build_identity, framed
from nnfmq.driver.memory.private import ConstantPool
from nnfmq.engines import interpreter
from nnfmq.engines.execution import PreparedProgram
from nnfmq.hal.capabilities import NumberOfCacheFiles
from nnfmq.hal.errors import GeneralFailure, InvalidArgument, NnfmqError, ResourceExhaustedTransient
from nnfmq.hal.types import Model
from nnfmq.operations.declaration import Array
from nnfmq.operations.extensions import uses_plugins
from nnfmq.serialize.models import decode_model, encode_model
from nnfmq.serialize.packets import BytesLike
from nnfmq.validation.values import validate_cache_token

__all__ = [
    "KEY_BYTES",
    "KEY_NAME",
    "CacheContents",
    "CacheFiles",
    "DeviceIdentity",
    "PackedConstants",
    "decode_constants",
    "decode_program",
    "encode_constants",
    "encode_program",
    "find_key",
    "find_or_create_key",
    "given_key",
    "is_key_available",
    "key_problem",
    "read_file",
    "read_files",
    "read_memory",
    "save_files",
    "seal",
    "use_key",
    "write_file",
]


# ----------------------------------------------------------------------------------------------------------------------
# The key that seals cache files: 32 random bytes in a file that only the driver's user can read.
#
# The key is created when the first cache is saved. It is written under a temporary name and linked to its own name when
# it is complete, so any number of drivers may create it concurrently: all of them use the one that was linked first. A
# key that other users can read or write is rejected, because whoever has the key can forge cache contents. Without a
# usable key nothing is cached. (CACHE-12)


KEY_NAME = "cache.key"
KEY_BYTES = 32
_ERRORS = (NnfmqError, OSError, RuntimeError)  # RuntimeError: the user has no home directory
_SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))


_given: list[bytes] = []  # of this process


def use_key(key: bytes) -> None:
    """Use this key in this process from now on, which may not read the file of the key itself."""
    _given[:] = [key]


def given_key() -> bytes | None:
    """Return the key of `use_key`; None if it was not called."""
    return _given[0] if _given else None


def is_key_available() -> bool:
    """Return whether a key exists or could be created. Creates nothing; raises nothing."""
    problem = key_problem()
    if problem:
        _log.info("nothing is cached: %s", problem)
    return not problem


def key_problem() -> str:
    """Return why there is no key and none can be created; "" if that is not so. Creates nothing; raises nothing."""
    if _given:
        return ""
    try:
        directory = state_directory()
        if directory.exists():
            check_directory(directory)
            if _read(directory) is not None:
                return ""
        return creation_problem(directory)
    except _ERRORS as error:
        return str(error)


def find_key() -> bytes:
    """Return the key.

    Raises:
        GeneralFailure: If there is no key, or other users can access its file or directory.
        ResourceExhaustedTransient: If the key could not be read because of a shortage (EMFILE, ENFILE, ENOMEM). Caches
            must not be treated as invalid then.
    """
    if _given:
        return _given[0]
    try:
        directory = state_directory()
        check_directory(directory)
        key = _read(directory)
    except _ERRORS as error:
        is_shortage = isinstance(error, OSError) and error.errno in _SHORTAGES
        error_type = ResourceExhaustedTransient if is_shortage else GeneralFailure
        raise error_type(f"this installation's cache key cannot be used: {error}") from error
    if key is None:
        raise GeneralFailure("this installation has no cache key: it has never saved a compilation")
    return key


def find_or_create_key() -> bytes:
    """Return the key, which is created if there is none.

    Raises:
        GeneralFailure: If the key cannot be created, or as `find_key`.
        ResourceExhaustedTransient: As `find_key`.
    """
    if _given:
        return _given[0]
    try:
        directory = make_state_directory()
        if _read(directory) is None:
            _create(directory)
    except _ERRORS as error:
        remedy = "" if isinstance(error, NnfmqError) else ": set XDG_STATE_HOME to a directory that this user can write"
        raise GeneralFailure(f"there is no cache key: {error}{remedy}") from error
    return find_key()


def _read(directory: Path) -> bytes | None:
    """Return the key in `directory`, or None. Raises GeneralFailure if the file is not private to this user."""
    path = directory / KEY_NAME
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        info = os.fstat(fd)
        is_private = stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077
        key = os.read(fd, KEY_BYTES + 1) if is_private else b""
    finally:
        os.close(fd)
    if len(key) != KEY_BYTES:
        raise GeneralFailure(
            f"{path} must be a file of {KEY_BYTES} bytes that uid {os.geteuid()} owns and nobody else may read or "
            "write. Remove it: a new key is created, and models with old caches are compiled again"
        )
    return key


def _create(directory: Path) -> None:
    """Create the key. link(2) fails if the name exists, so a key is never replaced and never seen incomplete."""
    temporary = directory / f".{KEY_NAME}.{os.getpid()}.{os.urandom(8).hex()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.write(fd, os.urandom(KEY_BYTES))
            os.fsync(fd)
        finally:
            os.close(fd)
        with suppress(FileExistsError):  # another driver was faster: its key is used
            os.link(temporary, directory / KEY_NAME)
    finally:
        os.unlink(temporary)


# ----------------------------------------------------------------------------------------------------------------------
# Cache files of a compilation, sealed so that a driver accepts only what this installation saved.


FORMAT = 1
_HEADER = struct.Struct("<8sHBBIQ8x32s")
_MAGIC = b"nnfmqCCH"
_MODEL_FILE, _DATA_FILE = 1, 2
_ALIGNMENT = 64  # bytes; a cache line
_NO_DIGEST = bytes(DIGEST_BYTES)
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
    fields = (device.name.encode(), device.version.encode(), build_identity(), token)
    parts = (part for file in files for part in file)  # a header contains the length of the data
    return hmac_sha256(key, *map(framed, fields), *parts)


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


def seal(
    device: DeviceIdentity, token: bytes, contents: CacheContents, key: bytes | None = None
) -> list[tuple[bytes, BytesLike]]:
    """Return header and data of each file of a compilation. `key` is that of `find_or_create_key`, if it is known.

    Raises:
        GeneralFailure: If there is no usable key.
    """
    all_data = [*contents.model, *contents.data]
    kinds = _kinds(len(contents.model), len(contents.data))
    unsealed = [(_header(kind, index, len(data)), data) for (kind, index), data in zip(kinds, all_data, strict=True)]
    digest = _digest(key or find_or_create_key(), device, token, unsealed)
    return [(header[:-DIGEST_BYTES] + digest, data) for header, data in unsealed]


def write_file(fd: int, header: bytes, data: BytesLike) -> None:
    """Write header and data of one file at offset 0; the fd's file position is not used. Raises OSError."""
    write_all(fd, header)
    write_all(fd, data, len(header))


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
    if not all(are_equal(expected, file.digest) for file in files):
        raise GeneralFailure("the cache is not what this driver saved for this device and token")


def _split_header(header: bytes, kind: int, index: int, size: int) -> tuple[bytes, bytes]:
    """Return the digest of a header, and the header without it. `size` is the number of bytes after the header.

    Raises GeneralFailure unless all other fields are as expected for this kind, index and size.
    """
    expected = _header(kind, index, max(size, 0))
    if size < 0 or header[:-DIGEST_BYTES] != expected[:-DIGEST_BYTES]:
        raise GeneralFailure(f"a file of {size + _HEADER.size} bytes is not a cache file for this position")
    return header[-DIGEST_BYTES:], expected


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


# ----------------------------------------------------------------------------------------------------------------------
# The content of the interpreter's cache files: the validated model, and the constants that preparation packed.
#
# The model file contains the model without its constants, and the position of each array in the data file. The data
# file contains the model's own constants, its memory pools and the packed constants, each aligned to 64 bytes. Loading
# binds the operations again, which is quick for the interpreter; it skips validation and packing, which are not.
#
# Packed constants without a model are a single file (`encode_constants`). Files have been verified when they are
# decoded here, so decoding does not check them again.


_LARGE_BYTES = 1 << 16

PackedConstants: TypeAlias = Sequence[tuple[Array, ...]]
"""`Program.prepacked`: the groups of arrays that preparation packed, in order; of a compiled program also its code."""
Prepare: TypeAlias = Callable[[Model, PackedConstants], PreparedProgram]


class _ArrayLocation(msgspec.Struct, frozen=True, array_like=True):
    """The position of an array in the data file, in bytes, and its type."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


_PackedLocations: TypeAlias = tuple[tuple[_ArrayLocation, ...], ...]


class _ModelFile(msgspec.Struct, frozen=True, array_like=True):
    """The model file: the encoded model, and the locations of its constants, its pools and the packed constants."""

    model: bytes
    operand_values: _ArrayLocation
    pools: tuple[_ArrayLocation, ...]
    packed: _PackedLocations


_encoder = msgspec.msgpack.Encoder()
_model_file_decoder = msgspec.msgpack.Decoder(_ModelFile)
_locations_decoder = msgspec.msgpack.Decoder(_PackedLocations)
_LENGTH = struct.Struct("<Q")


class _DataFile:
    """A data file under construction."""

    def __init__(self) -> None:
        self.data = bytearray()

    def add(self, array: Array) -> _ArrayLocation:
        """Append an array, aligned, and return its location."""
        self.data += bytes(-len(self.data) % _ALIGNMENT)
        location = _ArrayLocation(len(self.data), array.dtype.str, array.shape)
        self.data += np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        return location

    def add_packed(self, packed: PackedConstants) -> _PackedLocations:
        """Append all arrays, and return their locations."""
        return tuple(tuple(self.add(array) for array in arrays) for arrays in packed)


def encode_program(model: Model, packed: PackedConstants) -> CacheContents | None:
    """Return the two files of a model and its packed constants, or None for a model with extensions of plug-ins.

    What a plug-in's operation packs may change with the plug-in, whose version the caches do not record.
    """
    if uses_plugins(model):
        return None
    data, pools = encode_model(replace(model, operand_values=b""))
    file = _DataFile()
    header = _ModelFile(
        data,
        file.add(np.frombuffer(model.operand_values, np.uint8)),
        tuple(file.add(np.frombuffer(pool.view, np.uint8)) for pool in pools),
        file.add_packed(packed),
    )
    return CacheContents((_encoder.encode(header),), (file.data,))


def encode_constants(packed: PackedConstants) -> CacheContents:
    """Return one file of packed constants: the arrays, their encoded locations, and the length of the locations."""
    file = _DataFile()
    locations = _encoder.encode(file.add_packed(packed))
    file.data += locations + _LENGTH.pack(len(locations))
    return CacheContents((file.data,))


def decode_constants(contents: CacheContents) -> PackedConstants:
    """Return the arrays that `encode_constants` wrote. Large ones are views of `contents`."""
    data = memoryview(contents.model[0])
    (length,) = _LENGTH.unpack(data[-_LENGTH.size :])
    end = len(data) - _LENGTH.size
    return list(_packed(data, _locations_decoder.decode(data[end - length : end])))


def decode_program(contents: CacheContents, prepare: Prepare = interpreter.prepare) -> tuple[Model, PreparedProgram]:
    """Return the model that `encode_program` wrote, and its program, prepared by `prepare`.

    Pools and large constants are views of `contents`.
    """
    header = _model_file_decoder.decode(contents.model[0])
    data = memoryview(contents.data[0])
    pools = [ConstantPool(_array(data, location).data) for location in header.pools]
    operand_values = _array(data, header.operand_values).tobytes()
    model = replace(decode_model(header.model, pools), operand_values=operand_values)
    return model, prepare(model, list(_packed(data, header.packed)))


def _packed(data: memoryview, locations: _PackedLocations) -> Iterator[tuple[Array, ...]]:
    """Yield each group of arrays. Small ones are copied, because a view keeps the whole file in memory."""
    for group in locations:
        arrays = (_array(data, location) for location in group)
        yield tuple(array if array.nbytes >= _LARGE_BYTES else array.copy() for array in arrays)


def _array(data: memoryview, location: _ArrayLocation) -> np.ndarray[Any, Any]:
    dtype = np.dtype(location.dtype)
    count = int(np.prod(location.shape, dtype=np.int64))
    if count == 0:
        return np.empty(location.shape, dtype)  # numpy.frombuffer rejects a count of 0
    return np.frombuffer(data, dtype, count, location.offset).reshape(location.shape)
