"""Files of the driver's cache that a hosted runtime maps by their path, because it takes no memory in their place.

All workers that map such a file have the same pages. Its name is the SHA-256 digest of its content, which a worker
checks before the runtime opens it. It counts as an entry of the cache (`programs`): the least recently used are
removed. A worker that may not enter the directory of the cache stores and finds none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nnfmq.base.digests import sha256, sha256_of
from nnfmq.base.file_memory import SLICE_BYTES
from nnfmq.base.memory import Memory
from nnfmq.base.paths import cache_directory
from nnfmq.driver.cache.files import read_file
from nnfmq.driver.cache.programs import cache_limit_bytes, mark_used, open_entry, store_memory
from nnfmq.driver.cache.shared import shared_cache
from nnfmq.hal.errors import GeneralFailure

__all__ = ["may_store", "store_file", "stored_file"]

_log = logging.getLogger("nnfmq.caching")


def may_store(size_bytes: int) -> bool:
    """Return whether this process may store and map files of the cache, as far as it can tell, of so many bytes."""
    client = shared_cache()
    return size_bytes <= cache_limit_bytes() and not (client is not None and client.opens_files)


def store_file(memory: Memory) -> str | None:
    """Store the bytes of constant memory as a file. Blocks; borrows `memory`.

    Returns the name, or None if that failed, which is logged.
    """
    if not may_store(memory.size_bytes):
        return None
    name = sha256(memory.view).hex()
    try:
        path = cache_directory() / name
        store_memory([(name, memory.size_bytes)], memory)
        return name if path.exists() else None
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
        _log.warning("a file is not stored in the cache: %s", error)
        return None


@contextmanager
def stored_file(name: str) -> Iterator[Path]:
    """Yield the path of a stored file, which has the content of its name, for a runtime that opens it. Blocks.

    Raises:
        GeneralFailure: If there is no such file, it has another content, or another file took its place in the block.
    """
    fd = open_entry(name)
    if fd is None:
        raise GeneralFailure(f"the cache has no file {name:.80}")
    path = cache_directory() / name
    try:
        opened = os.fstat(fd)
        begins = range(0, opened.st_size, SLICE_BYTES)
        slices = (read_file(fd, min(SLICE_BYTES, opened.st_size - begin), begin) for begin in begins)
        if sha256_of(slices).hex() != name:
            raise GeneralFailure(f"the file {name:.80} of the cache has another content")
        mark_used(fd)
        yield path
        if not os.path.samestat(opened, os.stat(path)):
            raise GeneralFailure(f"the file {name:.80} of the cache was replaced")
    except OSError as error:
        raise GeneralFailure(f"the file {name:.80} of the cache is not used: {error}") from error
    finally:
        os.close(fd)
