"""create_memory_from_fd: memory over a file of the application (ANeuralNetworksMemory_createFromFd)."""

from __future__ import annotations

import os

from nnfmq.file_memory import FileMemory
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import Protection
from nnfmq.memory import Memory, is_mappable
from nnfmq.runtime.managed_buffer import AnyMemory

__all__ = ["create_memory_from_fd"]


def create_memory_from_fd(size_bytes: int, protection: Protection, fd: int, offset: int = 0) -> AnyMemory:
    """Return memory over `size_bytes` of a file from `offset` on. The caller closes it. Duplicates `fd`.

    A memfd with the seals SHRINK and GROW is mapped. Any other file is read and written by the driver with system
    calls, because a process that may shrink it could end all that have it mapped.

    Raises:
        InvalidArgument: If `fd` is not an open regular file, or the file is too short.
    """
    try:
        maps, allowed = is_mappable(fd), Protection(protection)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidArgument(
            f"file descriptor {fd!r} with protection {protection!r}: one of them is invalid"
        ) from error
    if maps and size_bytes > 0 and offset >= 0:
        memory = Memory.adopt(os.dup(fd), size_bytes, offset, allowed)
        memory.protection = allowed
        return memory
    return FileMemory.from_fd(fd, size_bytes, offset=offset, protection=allowed)
