"""Compilation caches in a directory of the application: the files of one compilation, and its token.

The token that the driver gets, and the files' names, are a hash of the application's token and of everything in which
two compilations of one model differ. For a new compilation the files are created again instead of truncated, so that
another process that has them open keeps their content. The driver rejects files that it did not save
(CACHE-10, CACHE-11; docs/how-to/caching.md).
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nnfmq.base.digests import sha256
from nnfmq.hal.types import Pool
from nnfmq.serialize.messages import DeviceInfo, PrepareModel
from nnfmq.validation.values import validate_cache_token

__all__ = ["CacheDirectory", "Files", "compilation_token", "file_names", "model_token"]

_log = logging.getLogger("nnfmq.client")


class Files(NamedTuple):
    """Open cache files, in their order."""

    model: list[int]
    data: list[int]


def model_token(prepare: PrepareModel, pools: Sequence[Pool]) -> bytes:
    """Return a token that identifies a model by its content."""
    return sha256(prepare.model, *(pool.view for pool in pools))


def compilation_token(token: bytes, device: DeviceInfo, prepare: PrepareModel) -> bytes:
    """Return the token of one compilation: a SHA-256 of the application's token and the compilation's options."""
    fields = [token, device.name.encode(), device.version.encode()]
    fields.append(struct.pack("<iiI", prepare.preference, prepare.priority, len(prepare.hints)))
    for hint in prepare.hints:
        fields += [struct.pack("<i", hint.token), hint.value]
    for extension in prepare.extensions:
        fields += [extension.name.encode(), struct.pack("<I", extension.prefix)]
    return sha256(*(struct.pack("<Q", len(field)) + field for field in fields))


def file_names(token: bytes, model_count: int, data_count: int) -> tuple[list[str], list[str]]:
    """Return the names of the model cache and data cache files, as Android's runtime forms them.

    Each byte of the token is two letters counted from A, the low half first; then 1 for model or 2 for data, and an
    index.
    """
    letters = "".join(chr(ord("A") + half) for byte in token for half in (byte & 15, byte >> 4))
    return [f"{letters}1{i}" for i in range(model_count)], [f"{letters}2{i}" for i in range(data_count)]


@dataclass(frozen=True, slots=True)
class CacheDirectory:
    """The files of one compilation in a directory."""

    token: bytes
    model: tuple[Path, ...]
    data: tuple[Path, ...]

    @classmethod
    def of(
        cls, folder: str | os.PathLike[str], device: DeviceInfo, prepare: PrepareModel, token: bytes
    ) -> CacheDirectory:
        """Return the files of a compilation. Raises InvalidArgument if the token does not have 32 bytes."""
        validate_cache_token(token)
        hashed = compilation_token(token, device, prepare)
        model, data = file_names(hashed, device.model_cache_files, device.data_cache_files)
        return cls(hashed, tuple(Path(folder) / name for name in model), tuple(Path(folder) / name for name in data))

    @contextmanager
    def open_saved_files(self) -> Iterator[Files | None]:
        """Open the files for a `with` block; yield None if the device saves nothing, or a file is missing."""
        with ExitStack() as stack:
            yield self._open(os.O_RDWR, stack) if self.model or self.data else None

    @contextmanager
    def create_files(self) -> Iterator[Files]:
        """Create the files for a `with` block. Afterwards all are removed if one of them is empty."""
        with ExitStack() as stack:
            self._remove()
            files = self._open(os.O_RDWR | os.O_CREAT | os.O_EXCL, stack) or Files([], [])
            try:
                yield files
            finally:
                if not all(os.fstat(fd).st_size for fd in (*files.model, *files.data)):
                    self._remove()

    def _open(self, flags: int, stack: ExitStack) -> Files | None:
        opened = []
        try:
            for path in (*self.model, *self.data):
                opened.append(os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
                stack.callback(os.close, opened[-1])
        except FileNotFoundError:
            if flags & os.O_CREAT:
                _log.warning("nothing is cached: there is no directory %s", path.parent)
            return None
        except OSError as error:
            _log.warning("cache files cannot be %s: %s", "created" if flags & os.O_CREAT else "opened", error)
            return None
        return Files(opened[: len(self.model)], opened[len(self.model) :])

    def _remove(self) -> None:
        for path in (*self.model, *self.data):
            with suppress(OSError):  # creating the file again then fails, too, and is logged
                path.unlink(missing_ok=True)
