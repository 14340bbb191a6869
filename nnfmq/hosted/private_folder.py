"""A private folder of a runtime, packed as one cache file.

Some runtimes keep compiled artefacts as files of a folder that the application names (OpenVINO's `cache_dir`,
TensorRT's engines). Workers never write to the same folder: each has one of its own while it opens a file, and what is
in it afterwards are the bytes that `HostedModel.save` returns. The driver's cache keeps and seals these.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.hosted import is_file_name

__all__ = ["FILES_MAX", "pack_folder", "private_folder"]

FILES_MAX = 1024
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(dict[str, bytes])


@contextmanager
def private_folder(saved: bytes | None = None) -> Iterator[Path]:
    """Yield a new folder that only this user can access, with the files that `pack_folder` packed; then remove it.

    Raises:
        InvalidArgument: If `saved` is not what `pack_folder` returns.
        OSError: If there is no space.
    """
    with tempfile.TemporaryDirectory(prefix="nnfmq-") as folder:
        for name, data in _unpacked(saved).items():
            (Path(folder) / name).write_bytes(data)
        yield Path(folder)


def _unpacked(saved: bytes | None) -> dict[str, bytes]:
    if saved is None:
        return {}
    try:
        files = _decoder.decode(saved)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"this is no packed folder: {error}") from error
    if len(files) > FILES_MAX or not all(map(is_file_name, files)):
        raise InvalidArgument(f"a packed folder has at most {FILES_MAX} files, with names of one folder")
    return files


def pack_folder(folder: Path, limit_bytes: int) -> bytes | None:
    """Return the regular files of a folder as one; None if there are none, or they exceed the limit.

    Links and folders in it are left out.
    """
    files: dict[str, bytes] = {}
    left = limit_bytes
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            info = entry.stat(follow_symlinks=False)
            if not stat.S_ISREG(info.st_mode):
                continue
            left -= info.st_size
            if left < 0 or len(files) == FILES_MAX:
                return None
            files[entry.name] = Path(entry.path).read_bytes()
    return _encoder.encode(files) if files else None
