"""A private folder of a runtime, packed as one cache file.

Some runtimes keep compiled artefacts as files of a folder that the application names (OpenVINO's `cache_dir`,
TensorRT's engines). Workers never write to the same folder: each has one of its own while it opens a file, and what is
in it afterwards are the bytes that `HostedModel.save` returns. The driver's cache keeps and seals these.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.hosted import is_file_name

__all__ = ["FILES_MAX", "pack_folder", "private_folder"]

FILES_MAX = 1024
_decoder = msgspec.msgpack.Decoder(dict[str, bytes])


@contextmanager
def private_folder(saved: bytes | None = None) -> Iterator[Path]:
    """Yield a new folder that only this user can access, with the files that `pack_folder` packed; then remove it.

    Raises:
        InvalidArgument: If `saved` is not what `pack_folder` returns.
        OSError: If there is no space.
    """
    try:
        files = {} if saved is None else _decoder.decode(saved)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"this is no packed folder: {error}") from error
    if len(files) > FILES_MAX or not all(map(is_file_name, files)):
        raise InvalidArgument(f"a packed folder has at most {FILES_MAX} files, with names of one folder")
    with tempfile.TemporaryDirectory(prefix="nnfmq-") as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        yield Path(folder)


def pack_folder(folder: Path, limit_bytes: int) -> bytes | None:
    """Return the regular files of a folder as one; None if there are none, or they exceed the limit.

    Links and folders in it are left out.
    """
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.is_symlink()]
    if not 0 < len(files) <= FILES_MAX or sum(path.stat().st_size for path in files) > limit_bytes:
        return None
    return msgspec.msgpack.encode({path.name: path.read_bytes() for path in files})
