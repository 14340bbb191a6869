"""Shared memory: creation, rejection of unsafe memory from a peer, and that no fd or mapping leaks."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
from support.code_steps import Tracer, made_with_an_interrupt_at_every_line

from nnfmq.base import memory as memory_module
from nnfmq.base.memory import (
    CONSTANT_SEALS,
    F_SEAL_FUTURE_WRITE,
    Memory,
    allocate_pages,
    copy_file,
    read_from_memfd,
    sealed_size,
    write_to_memfd,
)
from nnfmq.hal.errors import InvalidArgument, ProtocolError, ResourceExhaustedTransient

RESIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
HUGE_PAGE_BYTES = 2 << 20


def is_open(fd: int) -> bool:
    return Path(f"/proc/self/fd/{fd}").is_symlink()


def memfd(size_bytes: int, seals: int = RESIZE_SEALS) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def mappings_named(label: str) -> int:
    return Path("/proc/self/maps").read_text().count(f"/memfd:{label}")


# ------------------------------------------------------------------------------------------------ created


def test_created_memory_has_the_requested_size_and_is_zeroed() -> None:
    with Memory.create(10_000) as memory:
        assert memory.size_bytes == 10_000
        assert memory.view.format == "B"
        assert bytes(memory.view) == bytes(10_000)


def test_created_memory_can_be_written_and_read_back_through_its_descriptor() -> None:
    with Memory.create(8) as memory:
        memory.view[2:5] = b"abc"
        assert os.pread(memory.fileno(), 8, 0) == b"\0\0abc\0\0\0"


def test_created_memory_is_sealed_against_resizing_and_against_more_seals() -> None:
    with Memory.create(100) as memory:
        seals = fcntl.fcntl(memory.fileno(), fcntl.F_GET_SEALS)
    assert seals == RESIZE_SEALS | fcntl.F_SEAL_SEAL


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, 10_000])
def test_created_memory_cannot_be_resized(size_bytes: int) -> None:
    with Memory.create(5000) as memory, pytest.raises(PermissionError):
        os.ftruncate(memory.fileno(), size_bytes)


def test_no_seal_can_be_added_to_created_memory() -> None:
    with Memory.create(100) as memory, pytest.raises(PermissionError):
        fcntl.fcntl(memory.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_the_pages_of_created_memory_are_allocated_immediately() -> None:
    with Memory.create(1 << 20) as memory:
        assert os.fstat(memory.fileno()).st_blocks * 512 == 1 << 20


def test_created_memory_is_not_inherited_by_other_programs() -> None:
    with Memory.create(1) as memory:
        assert not os.get_inheritable(memory.fileno())


@pytest.mark.parametrize("size_bytes", [0, -1])
def test_memory_of_no_size_is_rejected(size_bytes: int) -> None:
    with pytest.raises(InvalidArgument, match="at least 1 byte"):
        Memory.create(size_bytes)


def test_memory_that_the_system_cannot_give_is_a_lack_of_resources() -> None:
    with pytest.raises(ResourceExhaustedTransient, match="not enough memory for"):
        Memory.create(1 << 62)


def test_a_lack_of_descriptors_is_a_lack_of_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_label: str, _flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", full)
    with pytest.raises(ResourceExhaustedTransient, match=r"no file descriptor is left.*ulimit -n"):
        Memory.create(1)


def test_memory_with_one_writer_can_be_written_here_and_only_read_by_the_peer() -> None:
    with Memory.create(8, one_writer=True) as own, Memory.adopt(os.dup(own.fileno())) as received:
        own.view[:5] = b"hello"
        assert own.is_writable
        assert not received.is_writable
        assert received.view.readonly
        assert bytes(received.view) == b"hello\0\0\0"


def test_memory_with_one_writer_rejects_all_other_writes() -> None:
    with Memory.create(8, one_writer=True) as memory:
        assert fcntl.fcntl(memory.fileno(), fcntl.F_GET_SEALS) & F_SEAL_FUTURE_WRITE
        with pytest.raises(PermissionError):
            os.pwrite(memory.fileno(), b"x", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(memory.fileno(), 8)


def test_memory_whose_file_is_forgotten_stays_mapped_and_no_fd_can_map_it_again() -> None:
    with Memory.create(8, "forgotten") as memory, Memory.adopt(os.dup(memory.fileno())) as other:
        assert targets().count("/memfd:forgotten (deleted)") >= 2
        memory.forget_file()
        assert "/memfd:forgotten (deleted)" not in targets()
        memory.view[:1] = b"x"
        assert other.view[:1] == b"x"
        with pytest.raises(OSError, match=r"denied|No such device"):
            mmap.mmap(memory.fileno(), 8)


def targets() -> list[str]:
    """Return what the fds of this process are of."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the list
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return found


# ------------------------------------------------------------------------------------------------ constant


def constant(data: bytes = b"content") -> Memory:
    return Memory.create_constant(len(data), lambda fd: os.pwrite(fd, data, 0), "constant")


def test_constant_memory_contains_its_data_and_is_read_only() -> None:
    with constant() as memory:
        assert bytes(memory.view) == b"content" and memory.view.readonly and not memory.is_writable
        assert fcntl.fcntl(memory.fileno(), fcntl.F_GET_SEALS) == CONSTANT_SEALS
        assert sealed_size(memory.fileno()) == memory.size_bytes == 7


def test_constant_memory_cannot_be_written_or_resized() -> None:
    with constant() as memory:
        for change in (
            lambda: os.pwrite(memory.fileno(), b"x", 0),
            lambda: os.ftruncate(memory.fileno(), 1),
            lambda: os.ftruncate(memory.fileno(), 100),
            lambda: mmap.mmap(memory.fileno(), 7),
            lambda: fcntl.fcntl(memory.fileno(), fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE),
        ):
            with pytest.raises(PermissionError):
                change()


def test_received_constant_memory_is_the_same_pages() -> None:
    with constant() as own, Memory.adopt_constant(os.dup(own.fileno())) as received:
        assert bytes(received.view) == b"content" and received.view.readonly
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:constant" in line]
        assert len(lines) == 2 and len({line[4] for line in lines}) == 1


@pytest.mark.parametrize("lacking", [fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL])
def test_memory_that_its_sender_could_change_is_not_constant_and_closed(lacking: int) -> None:
    fd = memfd(4096, CONSTANT_SEALS & ~lacking)
    assert sealed_size(fd) is None
    with pytest.raises(InvalidArgument, match="not sealed against writing"):
        Memory.adopt_constant(fd)
    assert not is_open(fd)


def test_constant_memory_that_cannot_be_filled_leaves_nothing() -> None:
    def fail(_fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(OSError, match="Input/output error"):
        Memory.create_constant(100, fail, "constant")
    with pytest.raises(InvalidArgument, match="at least 1 byte"):
        Memory.create_constant(0, fail, "constant")
    assert mappings_named("constant") == 0


def test_constant_memory_may_be_a_pool() -> None:
    with constant() as own, Memory.adopt(os.dup(own.fileno())) as received:
        assert bytes(received.view) == b"content" and not received.is_writable


# ------------------------------------------------------------------------------------------------ received


def test_received_memory_is_the_same_memory() -> None:
    with Memory.create(8) as own, Memory.adopt(os.dup(own.fileno())) as received:
        received.view[0] = 7
        assert own.view[0] == 7
        assert received.is_writable


def test_received_memory_may_be_larger_than_announced() -> None:
    with Memory.adopt(memfd(9000), 5000) as memory:
        assert memory.size_bytes == 5000


def test_received_memory_without_an_announcement_is_mapped_whole() -> None:
    with Memory.adopt(memfd(9000)) as memory:
        assert memory.size_bytes == 9000


def test_received_memory_through_a_read_only_descriptor_is_read_only(resources: ExitStack) -> None:
    fd = memfd(8)
    resources.callback(os.close, fd)
    with Memory.adopt(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)) as memory:
        assert not memory.is_writable


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL])
def test_memory_that_its_sender_could_resize_is_rejected_and_closed(seals: int) -> None:
    fd = memfd(4096, seals)
    with pytest.raises(InvalidArgument, match="lacks the seals SHRINK and GROW"):
        Memory.adopt(fd)
    assert not is_open(fd)


@pytest.mark.parametrize(("actual", "announced"), [(4096, 4097), (4096, 0), (4096, -1), (0, None), (0, 1)])
def test_memory_shorter_than_announced_is_rejected_and_closed(actual: int, announced: int | None) -> None:
    fd = memfd(actual)
    with pytest.raises(InvalidArgument, match=f"has {actual} bytes"):
        Memory.adopt(fd, announced)
    assert not is_open(fd)


def regular_file(folder: Path) -> int:
    (folder / "file").write_bytes(bytes(4096))
    return os.open(folder / "file", os.O_RDWR | os.O_CLOEXEC)


def read_end(_folder: Path) -> int:
    read, write = os.pipe()
    os.close(write)
    return read


def end_of_a_socketpair(_folder: Path) -> int:
    own, received = socket.socketpair()
    own.close()
    return received.detach()


def folder_itself(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_CLOEXEC)


def device(_folder: Path) -> int:
    return os.open("/dev/zero", os.O_RDWR | os.O_CLOEXEC)


@pytest.mark.parametrize("make", [regular_file, read_end, end_of_a_socketpair, folder_itself, device])
def test_an_fd_that_is_not_a_memfd_is_rejected_and_closed(make: object, tmp_path: Path) -> None:
    assert callable(make)
    fd = make(tmp_path)
    with pytest.raises(InvalidArgument):
        Memory.adopt(fd)
    assert not is_open(fd)


def test_memory_in_huge_pages_is_rejected_and_closed() -> None:
    try:
        fd = os.memfd_create("huge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    except OSError as error:
        pytest.skip(f"this kernel has no huge pages: {error}")
    os.ftruncate(fd, HUGE_PAGE_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, RESIZE_SEALS)
    with pytest.raises(InvalidArgument, match="hugetlb"):
        Memory.adopt(fd)
    assert not is_open(fd)


def test_memory_too_large_for_the_address_space_is_a_lack_of_resources_and_closed() -> None:
    fd = memfd(1 << 60)  # nothing of it exists: a hostile client can announce any size
    with pytest.raises(ResourceExhaustedTransient, match=f"{1 << 60} bytes"):
        Memory.adopt(fd)
    assert not is_open(fd)


# ------------------------------------------------------------------------------------------------ closed


def test_closing_memory_is_idempotent() -> None:
    memory = Memory.create(1)
    fd = memory.fileno()
    memory.close()
    successor = os.open("/dev/null", os.O_RDONLY)
    try:
        memory.close()
        assert successor == fd  # the number was reused immediately, and the second close did not close it
        assert is_open(successor)
    finally:
        os.close(successor)


def test_closed_memory_returns_neither_view_nor_fd() -> None:
    memory = Memory.create(1)
    assert not memory.closed
    memory.close()
    assert memory.closed
    with pytest.raises(InvalidArgument, match="closed"):
        _ = memory.view
    with pytest.raises(InvalidArgument, match="closed"):
        memory.fileno()


def test_closing_unmaps_the_memory() -> None:
    memory = Memory.create(4096, "unmapped")
    assert mappings_named("unmapped") == 1
    memory.close()
    assert mappings_named("unmapped") == 0


def test_an_array_over_the_view_survives_close() -> None:
    memory = Memory.create(16)
    array = np.frombuffer(memory.view, np.int32)
    memory.close()
    array[:] = [1, 2, 3, 4]
    assert array.tolist() == [1, 2, 3, 4]


def test_the_last_array_unmaps_closed_memory_even_if_the_memory_object_is_referenced() -> None:
    memory = Memory.create(4096, "outlived")
    array = np.frombuffer(memory.view, np.int32)
    memory.close()
    assert mappings_named("outlived") == 1
    del array
    assert mappings_named("outlived") == 0
    assert memory.closed


def test_a_view_stays_valid_after_close() -> None:
    memory = Memory.create(4)
    view = memory.view
    memory.close()
    assert bytes(view[1:3]) == b"\0\0"


def test_on_close_is_called_once() -> None:
    memory = Memory.create(1)
    told: list[bool] = []
    memory.on_close = lambda: told.append(memory.closed)
    memory.close()
    memory.close()
    assert told == [True]


def test_memory_that_was_not_closed_warns_and_is_closed() -> None:
    forgotten = [Memory.create(123)]
    fd = forgotten[0].fileno()
    with pytest.warns(ResourceWarning, match="123 bytes was never closed"):
        forgotten.clear()
    assert not is_open(fd)


def test_an_interrupt_while_memory_is_made_leaves_nothing_open() -> None:
    assert made_with_an_interrupt_at_every_line(lambda: Memory.create(4096, "interrupted"), memory_module) > 10


def test_memory_closed_by_two_threads_concurrently_is_closed_once() -> None:
    for step in range(200):
        memory = Memory.create(1)
        told: list[bool] = []
        memory.on_close = lambda told=told: told.append(True)  # type: ignore[misc]
        with Tracer("opcode", step, memory.close, memory_module) as tracer:
            memory.close()
        assert told == [True]
        if not tracer.has_acted:
            break
    assert 10 < step < 199


# ------------------------------------------------------------------------------------------------ bodies


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 1000], ids=["empty", "one", "many"])
def test_a_body_written_to_a_memfd_is_read_back(data: bytes, resources: ExitStack) -> None:
    fd = write_to_memfd(data)
    resources.callback(os.close, fd)
    assert read_from_memfd(fd, len(data)) == data


def test_a_body_is_read_from_its_start_regardless_of_the_file_position(resources: ExitStack) -> None:
    fd = write_to_memfd(b"abcdef")
    resources.callback(os.close, fd)
    os.lseek(fd, 4, os.SEEK_SET)
    assert read_from_memfd(fd, 6) == b"abcdef"


def test_a_body_that_ends_early_is_a_protocol_error_and_the_caller_keeps_the_fd(
    resources: ExitStack,
) -> None:
    fd = write_to_memfd(b"abc")
    resources.callback(os.close, fd)
    with pytest.raises(ProtocolError, match="ends early") as caught:
        read_from_memfd(fd, 4)
    assert caught.value.offset == 3
    assert is_open(fd)


@pytest.mark.parametrize("make", [read_end, end_of_a_socketpair, folder_itself])
def test_a_body_in_an_fd_that_is_not_a_file_is_a_protocol_error(
    make: object, tmp_path: Path, resources: ExitStack
) -> None:
    assert callable(make)
    fd = make(tmp_path)
    resources.callback(os.close, fd)
    with pytest.raises(ProtocolError, match="cannot be read"):
        read_from_memfd(fd, 100)


def test_a_body_in_an_ordinary_file_is_a_protocol_error(resources: ExitStack) -> None:
    fd = os.open(os.__file__, os.O_RDONLY | os.O_CLOEXEC)
    resources.callback(os.close, fd)
    with pytest.raises(ProtocolError, match="no memfd"):
        read_from_memfd(fd, 100)


def test_a_body_in_a_file_that_may_not_be_read_is_a_protocol_error(resources: ExitStack) -> None:
    readable = memfd(100)
    resources.callback(os.close, readable)
    fd = os.open(f"/proc/self/fd/{readable}", os.O_WRONLY | os.O_CLOEXEC)
    resources.callback(os.close, fd)
    with pytest.raises(ProtocolError, match="cannot be read"):
        read_from_memfd(fd, 100)


def test_a_body_that_does_not_fit_in_memory_leaves_no_fd_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, _offset: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with suppress(ResourceExhaustedTransient):
        write_to_memfd(b"x")
    assert mappings_named("nnfmq-body") == 0  # and the leak check of every test looks for the descriptor


def test_sparse_memory_takes_pages_when_they_are_allocated() -> None:
    with Memory.create_sparse(64 << 12, "test") as memory:
        assert os.fstat(memory.fileno()).st_blocks == 0
        allocate_pages(memory.fileno(), 2 << 12, 8 << 12)
        assert os.fstat(memory.fileno()).st_blocks * 512 == 2 << 12
        memory.view[8 << 12] = 7
        assert os.fstat(memory.fileno()).st_blocks * 512 == 2 << 12
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fileno(), 1 << 12)
        with Memory.adopt(os.dup(memory.fileno())) as adopted:
            assert (adopted.size_bytes, adopted.view[8 << 12]) == (64 << 12, 7)


def test_sparse_memory_without_an_fd_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(os, "memfd_create", fail)
    with pytest.raises(ResourceExhaustedTransient, match="no file descriptor is left"):
        Memory.create_sparse(4096, "test")
    with pytest.raises(InvalidArgument):
        Memory.create_sparse(0, "test")


@pytest.mark.parametrize(("begin", "size_bytes"), [(0, 3 << 20), (5, (1 << 20) + 1), (7, 0), (1 << 20, 9 << 20)])
def test_a_part_of_a_file_is_copied_as_far_as_the_file_goes(tmp_path: Path, begin: int, size_bytes: int) -> None:
    content = np.random.default_rng(5).bytes((3 << 20) - 3)
    (tmp_path / "source").write_bytes(content)
    with (tmp_path / "source").open("rb") as source, (tmp_path / "target").open("wb") as target:
        copy_file(source.fileno(), begin, size_bytes, target.fileno())
    assert (tmp_path / "target").read_bytes() == content[begin : begin + size_bytes]
