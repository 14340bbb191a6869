"""Fences: the states of each kind of fd, access by holders, and that a signaler's death is an error immediately."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest
from support.code_steps import Tracer, interrupt
from support.descriptors import no_more_descriptors

from nnfmq.base import fence as fences
from nnfmq.base.channel import Channel, open_fence_pair
from nnfmq.base.fence import Fence, fence_state, sync_wait
from nnfmq.hal.errors import InvalidArgument, ResourceExhaustedTransient
from nnfmq.hal.types import FenceState

ACTIVE, SIGNALED, ERROR, UNKNOWN = FenceState
LIMIT_S = 20.0


@pytest.fixture
def fence(resources: ExitStack) -> Fence:
    return resources.enter_context(Fence.create())


def test_FEN_11_a_fence_is_active_until_it_is_signaled(fence: Fence) -> None:
    assert fence.state is ACTIVE
    assert fence.wait(timeout=0) is ACTIVE
    assert fence.wait(timeout=0.01) is ACTIVE
    fence.signal()
    assert fence.wait() is SIGNALED
    assert fence.state is SIGNALED


def test_an_interrupt_while_a_fence_is_made_leads_to_no_other_error() -> None:
    """What `Fence.__del__` raises fails a test."""
    for step in range(2):
        signaler, fd = open_fence_pair()
        with pytest.raises(KeyboardInterrupt), Tracer("line", step, interrupt, fences):
            Fence(fd, signaler)
        signaler.close()
        with suppress(OSError):  # its fence has closed it
            os.close(fd)


def test_FEN_11_a_fence_that_failed_is_in_error(fence: Fence) -> None:
    fence.fail()
    assert fence.wait() is ERROR


def test_a_signal_between_the_kernel_s_two_checks_is_seen(fence: Fence, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel finds no message, the creator signals and closes, the kernel finds the end of the connection."""

    class Late(socket.socket):
        def recv(self, *arguments: int) -> bytes:
            if fence.fileno() in ends:
                return super().recv(*arguments)
            ends.add(fence.fileno())
            fence.signal()
            return b""

    ends: set[int] = set()
    monkeypatch.setattr(socket, "socket", Late)
    assert fence.state is SIGNALED


def test_only_the_first_signal_or_failure_counts(fence: Fence) -> None:
    fence.signal()
    fence.fail()
    assert fence.state is SIGNALED


def test_every_holder_reads_the_same_state_repeatedly(fence: Fence, resources: ExitStack) -> None:
    holders = [resources.enter_context(Fence.adopt(os.dup(fence.fileno()))) for _ in range(3)]
    assert {holder.state for holder in holders} == {ACTIVE}
    fence.signal()
    assert [holder.state for holder in (*holders, *holders)] == [SIGNALED] * 6
    fence.close()
    assert {holder.state for holder in holders} == {SIGNALED}


def test_a_fence_for_which_there_are_no_descriptors_is_rejected() -> None:
    with no_more_descriptors(but=1), pytest.raises(ResourceExhaustedTransient, match="ulimit -n"):
        Fence.create()


def test_a_fence_becomes_readable_when_it_is_no_longer_active(fence: Fence) -> None:
    poll = select.poll()
    poll.register(fence.fileno(), select.POLLIN)
    assert not poll.poll(0)
    fence.signal()
    assert poll.poll(0)


def test_a_wait_ends_when_another_thread_signals(fence: Fence) -> None:
    states: list[FenceState] = []
    thread = threading.Thread(target=lambda: states.append(fence.wait(LIMIT_S)))
    thread.start()
    fence.signal()
    thread.join()
    assert states == [SIGNALED]


def test_FEN_11_a_fence_whose_creator_closes_it_is_in_error(fence: Fence, resources: ExitStack) -> None:
    holder = resources.enter_context(Fence.adopt(os.dup(fence.fileno())))
    fence.close()
    fence.close()
    assert holder.wait(LIMIT_S) is ERROR


def test_FEN_11_a_fence_passes_between_processes_and_a_dead_signaler_is_an_error(resources: ExitStack) -> None:
    code = "import sys; from nnfmq.base.channel import Channel; from nnfmq.base.fence import Fence\n"
    code += "f = Fence.create(); Channel.adopt(int(sys.argv[1])).send(b'f', [f.fileno()]); sys.stdin.read()"
    local, remote = Channel.pair()
    resources.callback(local.close)
    arguments = [sys.executable, "-P", "-c", code, str(remote.fileno())]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, pass_fds=[remote.fileno()]) as process:
        remote.close()
        (fd,) = local.receive().detach_fds()
        holder = resources.enter_context(Fence.adopt(fd))
        assert holder.state is ACTIVE
        process.send_signal(signal.SIGKILL)
        assert holder.wait(LIMIT_S) is ERROR


def test_a_forked_child_does_not_keep_its_parent_s_fences_from_failing(fence: Fence, resources: ExitStack) -> None:
    holder = resources.enter_context(Fence.adopt(os.dup(fence.fileno())))
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        fence.close()
        assert holder.wait(LIMIT_S) is ERROR
    finally:
        os.close(read)
        os.close(write)
        os.waitpid(pid, 0)


def test_a_holder_cannot_signal_for_the_signaler(fence: Fence) -> None:
    with socket.socket(fileno=os.dup(fence.fileno())) as holder, contextlib.suppress(OSError):
        holder.send(b"\x01")
    assert fence.state is ACTIVE
    fence.signal()
    assert fence.state is SIGNALED


def test_an_adopted_fence_can_be_waited_for_and_not_signaled(fence: Fence, resources: ExitStack) -> None:
    holder = resources.enter_context(Fence.adopt(os.dup(fence.fileno())))
    for report in (holder.signal, holder.fail):
        with pytest.raises(InvalidArgument, match="only its creator"):
            report()
    assert fence.state is ACTIVE


def test_a_closed_fence_cannot_be_used(fence: Fence) -> None:
    fence.close()
    for use in (fence.fileno, fence.wait, lambda: fence.state):
        with pytest.raises(InvalidArgument, match="closed"):
            use()


def test_a_fence_that_is_collected_open_warns() -> None:
    fences_ = [Fence.create()]
    with pytest.warns(ResourceWarning, match="never closed"):
        fences_.clear()


# ------------------------------------------------------------------------------------------------ other descriptors


def test_FEN_11_an_eventfd_is_a_fence_of_two_states(resources: ExitStack) -> None:
    fd = os.eventfd(0, os.EFD_CLOEXEC)
    holder = resources.enter_context(Fence.adopt(fd))
    assert holder.wait(timeout=0) is ACTIVE
    os.eventfd_write(fd, 1)
    assert holder.wait() is SIGNALED
    assert holder.wait() is SIGNALED


class FakeSyncFile:
    """An eventfd that passes for a sync_file with a status: this kernel makes none that a test can have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, status: int | None) -> None:
        self._status = status
        monkeypatch.setattr(fences, "_SYNC_FILE", "anon_inode:[eventfd]")
        monkeypatch.setattr(fences.fcntl, "ioctl", self._ioctl)

    def _ioctl(self, _fd: int, request: int, info: bytearray) -> None:
        if self._status is None:
            raise OSError
        assert (request, len(info)) == (0xC0383E04, 56)  # as a C program with linux/sync_file.h prints them
        info[32:36] = self._status.to_bytes(4, "little", signed=True)


@pytest.mark.parametrize(("status", "state"), [(1, SIGNALED), (-22, ERROR), (None, SIGNALED)])
def test_FEN_11_the_status_of_a_sync_file_shows_whether_it_failed(
    status: int | None, state: FenceState, resources: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = os.eventfd(0, os.EFD_CLOEXEC)
    resources.callback(os.close, fd)
    FakeSyncFile(monkeypatch, status)
    assert fence_state(fd) is ACTIVE
    os.eventfd_write(fd, 1)
    assert fence_state(fd) is state


def pipe_end() -> int:
    read, write = os.pipe()
    os.close(write)
    return read


def stream_socket() -> int:
    local, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    remote.close()
    return local.detach()


def unconnected_socket() -> int:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).detach()


def chattering_socket() -> int:
    local, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    remote.send(b"\x01\x01")
    remote.close()
    return local.detach()


def file() -> int:
    fd, path = tempfile.mkstemp()
    os.unlink(path)
    return fd


NO_FENCES = [pipe_end, stream_socket, unconnected_socket, chattering_socket, file, lambda: os.memfd_create("no fence")]


@pytest.mark.parametrize("make", NO_FENCES, ids=["pipe", "stream", "unconnected", "chattering", "file", "memfd"])
def test_N_RQX_15_an_fd_of_another_kind_is_rejected(make: Callable[[], int]) -> None:
    fd = make()
    assert sync_wait(fd, timeout=0) is UNKNOWN
    assert sync_wait(fd) is UNKNOWN  # immediately, not indefinitely
    with pytest.raises(InvalidArgument, match="no fence"):
        Fence.adopt(fd)
    with pytest.raises(OSError):
        os.fstat(fd)  # Fence took ownership of it, and closed it


@pytest.mark.parametrize("fd", [-1, 999_999, 2**40])
def test_N_RQX_15_a_number_that_is_not_an_fd_is_rejected(fd: int) -> None:
    assert sync_wait(fd) is UNKNOWN
    with pytest.raises(InvalidArgument, match="no fence"):
        Fence.adopt(fd)
