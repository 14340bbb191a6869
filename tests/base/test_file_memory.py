"""FileMemory: parts of files, read and written in place, whose descriptor goes with the last that needs it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nnfmq.base.file_memory import FileMemory
from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.types import Protection

CONTENT = bytes(range(100))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "content"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def fd(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR)
    yield fd
    os.close(fd)


def is_open(fd: int) -> bool:
    return Path(f"/proc/self/fd/{fd}").is_symlink()


def test_MEM_1_file_memory_keeps_a_duplicate_of_the_fd(path: Path) -> None:
    fd = os.open(path, os.O_RDWR)
    with FileMemory.from_fd(fd, 10, offset=5) as memory:
        os.close(fd)
        assert memory.fileno() != fd
        assert (memory.size_bytes, memory.offset) == (10, 5)
        assert bytes(memory.view) == CONTENT[5:15]


def test_the_view_of_file_memory_is_a_read_only_copy(fd: int) -> None:
    with FileMemory.from_fd(fd, 10) as memory:
        view = memory.view
        os.pwrite(fd, b"x", 0)
        assert view[0] == 0
        assert view.readonly


def test_a_range_is_read_and_written_in_the_file(fd: int, path: Path) -> None:
    with FileMemory.from_fd(fd, 50, offset=20) as memory:
        part, target = memory.range(10, 8), bytearray(8)
        part.read_into(memoryview(target))
        assert bytes(target) == CONTENT[30:38]
        part.write_from(memoryview(b"12345678"))
    assert path.read_bytes() == CONTENT[:30] + b"12345678" + CONTENT[38:]


def test_only_a_range_keeps_the_file_open(fd: int) -> None:
    memory = FileMemory.from_fd(fd, 50)
    number, part = memory.fileno(), memory.range(0, 8)
    memory.close()
    memory.close()
    assert memory.closed
    assert is_open(number)
    part.read_into(memoryview(bytearray(8)))
    del part
    assert not is_open(number)


def test_closed_memory_returns_no_view_fd_or_range(fd: int) -> None:
    memory = FileMemory.from_fd(fd, 50)
    memory.close()
    for use in (memory.fileno, lambda: memory.range(0, 1), lambda: memory.view):
        with pytest.raises(InvalidArgument, match="closed"):
            use()


def test_memory_that_was_never_closed_warns(fd: int) -> None:
    memory = FileMemory.from_fd(fd, 50)
    number = memory.fileno()
    with pytest.warns(ResourceWarning, match="memory of 50 bytes was never closed"):
        del memory
    assert not is_open(number)


@pytest.mark.parametrize(("size", "offset"), [(101, 0), (1, 100), (100, 1), (10, -1), (1 << 62, 1 << 62)])
def test_N_RQX_16_bytes_that_the_file_does_not_have_are_rejected(fd: int, size: int, offset: int) -> None:
    with pytest.raises(InvalidArgument, match="N-RQX-16"):
        FileMemory.from_fd(fd, size, offset=offset)


@pytest.mark.parametrize("size", [0, -1])
def test_N_VAL_13_memory_of_no_size_is_rejected(fd: int, size: int) -> None:
    with pytest.raises(InvalidArgument, match="N-VAL-13"):
        FileMemory.from_fd(fd, size)


def test_N_VAL_13_a_number_that_is_not_an_fd_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="N-VAL-13"):
        FileMemory.from_fd(-1, 1)


@pytest.mark.parametrize("kind", [os.O_DIRECTORY, os.O_DIRECTORY | os.O_PATH])
def test_N_RQX_16_a_file_without_random_access_is_rejected_and_closed(tmp_path: Path, kind: int) -> None:
    fd = os.open(tmp_path, kind)
    with pytest.raises(InvalidArgument, match="N-RQX-16"):
        FileMemory.adopt(fd, 1, 0, Protection.READ)
    assert not is_open(fd)


def test_N_RQX_16_access_beyond_a_truncated_file_raises_and_does_not_extend_it(fd: int, path: Path) -> None:
    with FileMemory.from_fd(fd, 100) as memory:
        os.ftruncate(fd, 60)
        with pytest.raises(InvalidArgument, match="ends after 60 bytes of 100"):
            _ = memory.view
        with pytest.raises(InvalidArgument, match="ends at byte 60; a result would reach to 100"):
            memory.range(0, 100).write_from(memoryview(CONTENT))
    assert path.read_bytes() == CONTENT[:60]


MODES = [
    (os.O_RDWR, Protection.READ_WRITE),
    (os.O_RDONLY, Protection.READ),
    (os.O_WRONLY, Protection.WRITE),
    (os.O_RDWR | os.O_APPEND, Protection.READ),
    (os.O_PATH, Protection.NONE),
]


@pytest.mark.parametrize(("flags", "allowed"), MODES)
@pytest.mark.parametrize("requested", [Protection.READ, Protection.WRITE, Protection.READ_WRITE, Protection.NONE])
def test_MEM_4_file_memory_has_the_requested_access_that_the_fd_allows(
    path: Path, flags: int, allowed: Protection, requested: Protection
) -> None:
    with FileMemory.adopt(os.open(path, flags), 10, 0, requested) as memory:
        assert memory.protection == allowed & requested
        assert memory.is_readable == bool(allowed & requested & Protection.READ)
        assert memory.is_writable == bool(allowed & requested & Protection.WRITE)


def test_a_file_that_cannot_be_read_or_written_raises(path: Path) -> None:
    with FileMemory.adopt(os.open(path, os.O_WRONLY), 10, 0, Protection.READ_WRITE) as memory:
        with pytest.raises(InvalidArgument, match="N-RQX-12"):
            _ = memory.view
        with pytest.raises(InvalidArgument, match="cannot be read"):
            memory.range(0, 1).read_into(memoryview(bytearray(1)))
    memory = FileMemory.adopt(os.open(path, os.O_RDONLY), 10, 0, Protection.READ_WRITE)
    with memory, pytest.raises(GeneralFailure, match="cannot be written"):
        memory.range(0, 1).write_from(memoryview(b"x"))
