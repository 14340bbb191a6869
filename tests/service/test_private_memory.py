"""Private copies of client memory: read once, in slices, also when the memory is exhausted or nobody waits any more."""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest

from nnfmq.file_memory import SLICE_BYTES, FileMemory
from nnfmq.hal.errors import GeneralFailure, ResourceExhaustedTransient
from nnfmq.memory import PrivateBytes
from nnfmq.service.private_memory import copy_constant_pools


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
