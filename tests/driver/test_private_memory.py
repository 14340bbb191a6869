"""Constants of client memory: read once, in slices, also when the memory is exhausted or nobody waits; or sealed."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from nnfmq.base.file_memory import SLICE_BYTES, FileMemory
from nnfmq.base.memory import CONSTANT_SEALS, Memory, PrivateBytes, file_identity
from nnfmq.driver.memory.private import copy_constant_pools
from nnfmq.hal.errors import GeneralFailure, ResourceExhaustedTransient
from nnfmq.hal.types import Protection


def go_on() -> None:
    """Let a copy go on."""


def file_of(resources: ExitStack, data: bytes, size: int | None = None) -> FileMemory:
    fd = os.memfd_create("constants", os.MFD_CLOEXEC)
    resources.callback(os.close, fd)
    os.write(fd, data)
    size = len(data) if size is None else size
    os.ftruncate(fd, size)
    return resources.enter_context(FileMemory.from_fd(fd, size))


def test_memories_are_copied_and_closed(resources: ExitStack) -> None:
    memories = [file_of(resources, data) for data in (b"now", b"later")]
    pools = copy_constant_pools(memories, go_on)
    assert [bytes(pool.view) for pool in pools] == [b"now", b"later"]
    assert all(pool.view.readonly for pool in pools)
    assert [memory.closed for memory in memories] == [True, True]


def sealed(data: bytes) -> Memory:
    return Memory.create_constant(len(data), lambda fd: os.pwrite(fd, data, 0), "constants")


def test_memory_that_is_sealed_against_writing_is_mapped(resources: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrivateBytes, "allocate", None)  # nothing is copied
    shared = resources.enter_context(sealed(b"xx" + b"now" * 2000))
    memory = FileMemory.adopt(os.dup(shared.fileno()), 3, 2, Protection.READ)
    (pool,) = copy_constant_pools([memory], go_on)
    assert bytes(pool.view) == b"now"
    assert (pool.offset, pool.identity, pool.size_bytes) == (2, file_identity(shared.fileno()), 3)
    assert pool.view.readonly
    assert memory.closed
    assert mappings_of("constants") == 2  # this one and that of `shared`
    del pool
    assert mappings_of("constants") == 1


@pytest.mark.parametrize("missing", [fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL])
def test_memory_that_lacks_a_seal_is_copied(missing: int, resources: ExitStack) -> None:
    fd = os.memfd_create("constants", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    resources.callback(os.close, fd)
    os.write(fd, b"now")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, CONSTANT_SEALS & ~missing)
    (pool,) = copy_constant_pools([FileMemory.from_fd(fd, 3)], go_on)
    assert bytes(pool.view) == b"now"
    assert mappings_of("constants") == 0


def mappings_of(label: str) -> int:
    """Return how many mappings of memfds of this name this process has."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count(f"/memfd:{label}")


def test_memory_that_cannot_be_copied_is_rejected(resources: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(_size: int) -> PrivateBytes:
        raise MemoryError

    monkeypatch.setattr(PrivateBytes, "allocate", no_memory)
    with pytest.raises(ResourceExhaustedTransient, match="not enough memory"):
        copy_constant_pools([file_of(resources, b"now")], go_on)


def test_a_size_beyond_the_address_space_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        PrivateBytes.allocate(1 << 60)


def test_a_copy_ends_at_the_first_check_that_fails(resources: ExitStack) -> None:
    checks = []

    def fail_at_the_second() -> None:
        checks.append(None)
        if len(checks) == 2:
            raise GeneralFailure("nobody waits")

    memory = file_of(resources, b"", 4 * SLICE_BYTES)
    with pytest.raises(GeneralFailure, match="nobody waits"):
        copy_constant_pools([memory], fail_at_the_second)
    assert len(checks) == 2
    assert memory.closed
