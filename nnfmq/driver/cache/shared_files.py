"""Model files of hosted runtimes, in memory that the clients and workers of one driver share.

Each client sends a file in sealed memory of its own. The first one's becomes an entry of the shared cache (`shared`).
A client that sends the same bytes later gets that memory, and drops its own. An entry's name is a SHA-256 digest that
the worker computes of what its client has sent; of what it finds under this name it computes the digest again. So a
client gets memory only if it has the same bytes itself, and no other bytes, whatever another worker has published. That
it gets one tells it that another client has sent these bytes, too.

An entry lasts as long as a worker has the file open. If nothing can be shared, each client keeps its own memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from weakref import WeakValueDictionary

from nnfmq.base.digests import sha256_of
from nnfmq.base.file_memory import SLICE_BYTES, FileMemory
from nnfmq.base.memory import Memory, file_identity, sealed_size
from nnfmq.base.ownership import Uncopyable
from nnfmq.driver.cache.programs import cache_limit_bytes
from nnfmq.driver.cache.shared import shared_cache
from nnfmq.hal.errors import ResourceExhausted
from nnfmq.hal.types import Protection

__all__ = ["SHARED_BYTES_MIN", "SharedFile", "shared_file", "shared_file_of"]

SHARED_BYTES_MIN = 256 << 10
"""Smaller files are not shared: the cache has a limited number of entries."""
_log = logging.getLogger("nnfmq.sharing")


class SharedFile(Uncopyable):
    """A file in shared memory. This worker's reference to the entry ends when this object is garbage-collected.

    Attributes:
        fd: The memory, open as long as this object exists.
        is_replacement: Whether it is another memory than the client's.
    """

    def __init__(self) -> None:
        self.fd = -1
        self.is_replacement = False

    def use(self, fd: int) -> None:
        """Keep a duplicate of `fd`."""
        self.fd = os.dup(fd)
        identity = file_identity(self.fd)
        if identity is not None:
            _files[identity] = self

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


_files: WeakValueDictionary[tuple[int, int], SharedFile] = WeakValueDictionary()


def shared_file_of(identity: tuple[int, int]) -> SharedFile | None:
    """Return the shared file with this identity (`memory.file_identity`) that this worker has open; None if none."""
    return _files.get(identity)


def shared_file(memory: FileMemory, check: Callable[[], None]) -> SharedFile | None:
    """Return the shared memory with the bytes of a client's; None if they are not shared. Blocks. Borrows `memory`.

    `check` is called again and again meanwhile. A failure is logged, and nothing is shared.

    Raises:
        Exception: Any error that `check` raises.
    """
    try:
        return _shared(memory, check)
    except (OSError, ResourceExhausted) as error:  # this process has no free fd, or no address space
        _log.warning("a file is not shared: %s", error)
        return None


def _shared(memory: FileMemory, check: Callable[[], None]) -> SharedFile | None:
    client, size = shared_cache(), memory.size_bytes
    is_whole = memory.is_readable and not memory.offset and sealed_size(memory.fileno()) == size
    if client is None or not is_whole or not SHARED_BYTES_MIN <= size <= cache_limit_bytes():
        return None
    identity = file_identity(memory.fileno())
    if identity is not None and (known := _files.get(identity)) is not None:
        return known
    with Memory.adopt(os.dup(memory.fileno()), protection=Protection.READ) as own:
        name = _name(own.view, check)
        found = SharedFile()
        entry = client.look_up(name, found)
        if entry is not None:
            with entry.memory as other:
                if other.size_bytes == size and _name(other.view, check) == name:
                    found.use(other.fileno())
                    found.is_replacement = True
                    return found
            client.invalidate(entry)
        published = SharedFile()
        published.use(own.fileno())
        client.publish(name, own, published)
    return published


def _name(data: memoryview, check: Callable[[], None]) -> str:
    """Return the name of an entry with these bytes, which no program has (`programs.entry_of`)."""

    def slices() -> Iterator[bytes | memoryview]:
        yield b"nnfmq hosted file\0"
        for begin in range(0, len(data), SLICE_BYTES):
            yield data[begin : begin + SLICE_BYTES]
            check()

    return sha256_of(slices()).hex()
