"""The control channel: frames and their descriptors, hang-up, deadlines, who is there, and the listening side."""

from __future__ import annotations

import array
import errno
import fcntl
import os
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.descriptors import no_more_descriptors
from support.forking import fork

from nnfmq.base import channel as channel_module
from nnfmq.base.channel import BODY_BYTES_MAX, FDS_MAX, INLINE_BYTES, NO_WAIT, Channel, Frame, Listener
from nnfmq.hal.errors import (
    DeadObject,
    DeviceUnavailable,
    InvalidArgument,
    MissedDeadlineTransient,
    NnfmqError,
    ProtocolError,
)
from nnfmq.serialize import control_protocol, messages

SECOND_NS = 1_000_000_000
SHORT_NS = 30_000_000
FOREVER_NS = 2**63 - 1


def soon(ns: int = 20 * SECOND_NS) -> int:
    return time.monotonic_ns() + ns


@pytest.fixture
def pair(resources: ExitStack) -> tuple[Channel, Channel]:
    local, remote = Channel.pair()
    resources.callback(local.close)
    resources.callback(remote.close)
    return local, remote


@pytest.fixture
def raw(resources: ExitStack) -> tuple[socket.socket, Channel]:
    """A bare socket, for sending what no channel sends, and the channel at its other end."""
    local, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel.adopt(remote.detach())
    resources.callback(local.close)
    resources.callback(channel.close)
    return local, channel


@pytest.fixture
def files(resources: ExitStack) -> Callable[[int], list[int]]:
    """Open some distinct memfds: number i holds i bytes."""

    def make(count: int) -> list[int]:
        made = []
        for size in range(count):
            made.append(os.memfd_create("sent", os.MFD_CLOEXEC))
            resources.callback(os.close, made[-1])
            os.ftruncate(made[-1], size)
        return made

    return make


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def fill(channel: Channel) -> int:
    """Send until nothing more fits into the socket; return how many frames did."""
    sent = 0
    try:
        while True:
            channel.send(bytes(1000), (), NO_WAIT)
            sent += 1
    except MissedDeadlineTransient:
        return sent


def open_in_a_forked_child(find: Callable[[], list[int]], forked: Callable[[], object] = lambda: None) -> int:
    """Fork and return how many of the descriptors that `find` names are open in the child; `forked` runs in both."""
    pid = fork()
    if pid == 0:
        count = 99
        try:
            count = sum(os.path.islink(f"/proc/self/fd/{fd}") for fd in find())
        finally:
            os._exit(count)  # never back into pytest
    forked()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def sendmsg(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


# ------------------------------------------------------------------------------------------------ frames


@pytest.mark.parametrize("size", [0, 1, 1000, INLINE_BYTES, INLINE_BYTES + 1, 5_000_000])
def test_a_frame_arrives_whole(size: int, pair: tuple[Channel, Channel]) -> None:
    data = os.urandom(size)
    pair[0].send(data)
    with pair[1].receive(soon()) as frame:
        assert frame.data == data
        assert frame.fds == []


@pytest.mark.parametrize("size", [10, INLINE_BYTES + 1], ids=["inline", "in a file"])
@pytest.mark.parametrize("count", [1, 3, FDS_MAX])
def test_descriptors_arrive_in_order_with_their_frame(
    size: int, count: int, pair: tuple[Channel, Channel], files: Callable[[int], list[int]]
) -> None:
    pair[0].send(bytes(size), files(count))
    with pair[1].receive(soon()) as frame:
        assert len(frame.data) == size
        assert [os.fstat(fd).st_size for fd in frame.fds] == list(range(count))


def test_frames_keep_their_order_and_their_own_descriptors(
    pair: tuple[Channel, Channel], files: Callable[[int], list[int]]
) -> None:
    made = files(3)
    for fd in made:
        pair[0].send(bytes(os.fstat(fd).st_size), [fd])
    for size in range(3):
        with pair[1].receive(soon()) as frame:
            assert len(frame.data) == size
            assert [os.fstat(fd).st_size for fd in frame.fds] == [size]


def test_both_ends_may_send(pair: tuple[Channel, Channel]) -> None:
    pair[0].send(b"ping")
    pair[1].send(b"pong")
    assert pair[0].receive(soon()).data == b"pong"
    assert pair[1].receive(soon()).data == b"ping"


def test_received_descriptors_are_close_on_exec(
    pair: tuple[Channel, Channel], files: Callable[[int], list[int]]
) -> None:
    pair[0].send(b"", files(2))
    with pair[1].receive(soon()) as frame:
        assert [os.get_inheritable(fd) for fd in frame.fds] == [False, False]


def test_the_sockets_are_close_on_exec(pair: tuple[Channel, Channel]) -> None:
    assert [os.get_inheritable(channel.fileno()) for channel in pair] == [False, False]


def test_a_socket_that_closes_first_at_exit_has_a_higher_descriptor_than_others_and_works(
    pair: tuple[Channel, Channel], files: Callable[[int], list[int]]
) -> None:
    count = open_descriptors()
    pair[0].close_first_at_exit()
    assert open_descriptors() == count
    assert pair[0].fileno() > max(files(100))
    assert not os.get_inheritable(pair[0].fileno())
    pair[0].send(b"there")
    pair[1].send(b"back")
    assert pair[1].receive(soon()).data == b"there" and pair[0].receive(soon()).data == b"back"
    with pytest.raises(MissedDeadlineTransient):
        pair[0].receive(NO_WAIT)
    fd = pair[0].fileno()
    assert open_in_a_forked_child(lambda: [fd]) == 0


def descriptor_table_size() -> int:
    return int(re.findall(r"FDSize:\s+(\d+)", Path("/proc/self/status").read_text())[0])


def test_a_thread_enlarges_the_table_of_descriptors_in_advance_and_ends(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    table_size = descriptor_table_size()
    monkeypatch.setattr("nnfmq.base.channel._LAST_FD", table_size)
    count, fd = open_descriptors(), pair[0].fileno()
    pair[0].enlarge_descriptor_table()
    pair[0].close_first_at_exit()
    assert descriptor_table_size() > table_size
    assert open_descriptors() == count
    assert threading.active_count() == 1
    assert pair[0].fileno() == table_size != fd


@pytest.mark.parametrize("in_advance", [False, True], ids=["", "which a thread finds out"])
def test_a_socket_keeps_its_descriptor_if_the_limit_allows_no_higher_one(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch, in_advance: bool
) -> None:
    monkeypatch.setattr("nnfmq.base.channel._LAST_FD", 1 << 30)
    fd = pair[0].fileno()
    if in_advance:
        pair[0].enlarge_descriptor_table()
    pair[0].close_first_at_exit()
    assert pair[0].fileno() == fd
    pair[0].send(b"there")
    assert pair[1].receive(soon()).data == b"there"


def test_sent_descriptors_remain_open_in_the_sender(
    pair: tuple[Channel, Channel], files: Callable[[int], list[int]]
) -> None:
    made = files(2)
    pair[0].send(bytes(INLINE_BYTES + 1), made)
    pair[1].receive(soon()).close()
    assert [os.fstat(fd).st_size for fd in made] == [0, 1]


def test_a_descriptor_taken_from_a_frame_is_not_closed_with_it(
    pair: tuple[Channel, Channel], files: Callable[[int], list[int]]
) -> None:
    pair[0].send(b"", files(1))
    with pair[1].receive(soon()) as frame:
        taken = frame.detach_fds()
    assert os.fstat(taken[0]).st_size == 0
    os.close(taken[0])


def test_closing_a_frame_is_idempotent() -> None:
    frame = Frame(bytearray(), [os.open("/dev/null", os.O_RDONLY)])
    frame.close()
    frame.close()
    assert frame.fds == []


def test_more_descriptors_than_a_frame_carries_are_rejected(pair: tuple[Channel, Channel]) -> None:
    with pytest.raises(InvalidArgument, match=f"at most {FDS_MAX} fds, not {FDS_MAX + 1}"):
        pair[0].send(b"", [0] * (FDS_MAX + 1))


# ------------------------------------------------------------------------------------------------ malformed frames


def rejected(channel: Channel) -> ProtocolError:
    """Receive a malformed frame; nothing of it may stay open."""
    before = open_descriptors()
    with pytest.raises(ProtocolError) as caught:
        channel.receive(soon())
    assert open_descriptors() == before
    return caught.value


def test_a_datagram_longer_than_a_frame_is_rejected(raw: tuple[socket.socket, Channel]) -> None:
    raw[0].send(bytes(INLINE_BYTES + 2))
    assert "cut short" in str(rejected(raw[1]))


def test_the_descriptors_of_a_datagram_longer_than_a_frame_are_closed(raw: tuple[socket.socket, Channel]) -> None:
    sendmsg(raw[0], bytes(INLINE_BYTES + 2), [0, 1, 2])
    assert "cut short" in str(rejected(raw[1]))


def test_more_descriptors_than_a_frame_carries_are_rejected_and_closed(raw: tuple[socket.socket, Channel]) -> None:
    sendmsg(raw[0], b"\0", [0] * 253)  # all that Linux passes at a time
    assert "cut short" in str(rejected(raw[1]))


def test_a_channel_is_usable_after_a_frame_was_cut_short(raw: tuple[socket.socket, Channel]) -> None:
    raw[0].send(bytes(INLINE_BYTES + 2))
    rejected(raw[1])
    raw[0].send(b"\0next")
    assert raw[1].receive(soon()).data == b"next"


def test_a_message_whose_fds_do_not_fit_arrives_without_them(raw: tuple[socket.socket, Channel]) -> None:
    before = open_descriptors()
    with no_more_descriptors(but=1):
        sendmsg(raw[0], b"\0said", [0, 1, 2])
        frame = raw[1].receive(soon())
    assert (frame.data, frame.fds, frame.fds_truncated) == (b"said", [], True)
    assert open_descriptors() == before


def test_a_body_whose_fd_does_not_fit_is_rejected(raw: tuple[socket.socket, Channel]) -> None:
    with no_more_descriptors(but=1):
        sendmsg(raw[0], struct.pack("<BQ", 1, INLINE_BYTES + 1), [0, 1, 2])
        assert "cut short" in str(rejected(raw[1]))


@pytest.mark.parametrize("kind", [2, 255])
def test_a_frame_of_an_unknown_kind_is_rejected(kind: int, raw: tuple[socket.socket, Channel]) -> None:
    sendmsg(raw[0], bytes([kind, 1, 2, 3]), [0])
    error = rejected(raw[1])
    assert f"kind {kind}" in str(error)
    assert error.offset == 0


@pytest.mark.parametrize("size", [0, 7, 9, 100], ids=lambda size: f"{size} bytes instead of 8")
def test_a_body_length_of_the_wrong_size_is_rejected(size: int, raw: tuple[socket.socket, Channel]) -> None:
    sendmsg(raw[0], b"\1" + bytes(size), [0])
    assert "malformed" in str(rejected(raw[1]))


def test_a_body_without_its_fd_is_rejected(raw: tuple[socket.socket, Channel]) -> None:
    raw[0].send(struct.pack("<BQ", 1, INLINE_BYTES + 1))
    assert "0 fds" in str(rejected(raw[1]))


@pytest.mark.parametrize("length", [0, INLINE_BYTES, BODY_BYTES_MAX + 1, 2**64 - 1])
def test_a_body_length_out_of_range_is_rejected(length: int, raw: tuple[socket.socket, Channel]) -> None:
    sendmsg(raw[0], struct.pack("<BQ", 1, length), [0, 0])
    error = rejected(raw[1])
    assert str(length) in str(error)
    assert error.offset == 1


def test_a_body_in_a_file_is_rejected_unread_if_bodies_are_not_accepted(pair: tuple[Channel, Channel]) -> None:
    local, remote = pair
    local.send(bytes(INLINE_BYTES + 1))
    with pytest.raises(ProtocolError, match="a body in a file is not taken here"):
        remote.receive(soon(), body_bytes_max=0)
    local.send(bytes(INLINE_BYTES))
    with remote.receive(soon(), body_bytes_max=0) as frame:
        assert len(frame.data) == INLINE_BYTES


def test_a_body_longer_than_its_file_is_rejected(
    raw: tuple[socket.socket, Channel], files: Callable[[int], list[int]]
) -> None:
    sendmsg(raw[0], struct.pack("<BQ", 1, INLINE_BYTES + 1), files(3))
    assert "ends early" in str(rejected(raw[1]))


def test_a_body_in_a_pipe_is_rejected(raw: tuple[socket.socket, Channel], resources: ExitStack) -> None:
    read, write = os.pipe()
    resources.callback(os.close, read)
    resources.callback(os.close, write)
    sendmsg(raw[0], struct.pack("<BQ", 1, INLINE_BYTES + 1), [0, read])
    assert "cannot be read" in str(rejected(raw[1]))


def test_a_body_in_an_ordinary_file_is_rejected_unread(
    raw: tuple[socket.socket, Channel], resources: ExitStack
) -> None:
    """Its file system may be the sender's own, and keep the reader waiting."""
    fd = os.open(os.__file__, os.O_RDONLY | os.O_CLOEXEC)
    resources.callback(os.close, fd)
    assert os.fstat(fd).st_size > INLINE_BYTES
    sendmsg(raw[0], struct.pack("<BQ", 1, INLINE_BYTES + 1), [fd])
    assert "no memfd" in str(rejected(raw[1]))


def test_frames_and_messages_have_the_same_limits() -> None:
    assert (FDS_MAX, BODY_BYTES_MAX) == (messages.MAX_FDS, control_protocol.MAX_BODY_BYTES)


# ------------------------------------------------------------------------------------------------ hang-up and deadlines


def test_receiving_after_a_hang_up_is_a_dead_object(pair: tuple[Channel, Channel]) -> None:
    pair[0].close()
    with pytest.raises(DeadObject, match="closed its end"):
        pair[1].receive(soon())


def test_frames_sent_before_a_hang_up_still_arrive(pair: tuple[Channel, Channel]) -> None:
    pair[0].send(b"last words")
    pair[0].close()
    assert pair[1].receive(soon()).data == b"last words"
    with pytest.raises(DeadObject):
        pair[1].receive(soon())


def test_a_frame_sent_between_the_kernel_s_two_checks_arrives(pair: tuple[Channel, Channel]) -> None:
    """The kernel finds no message, the peer sends and hangs up, the kernel finds the end of the connection."""
    receiver = pair[1]._socket

    class Late:
        def recvmsg_into(self, *_arguments: object) -> tuple[int, list[object], int, None]:
            pair[1]._socket = receiver
            pair[0].send(b"last words")
            pair[0].close()
            return 0, [], 0, None

    pair[1]._socket = Late()  # type: ignore[assignment]
    assert pair[1].receive(soon()).data == b"last words"
    with pytest.raises(DeadObject, match="closed its end"):
        pair[1].receive(soon())


def test_an_empty_message_ends_the_connection(raw: tuple[socket.socket, Channel]) -> None:
    raw[0].send(b"")
    with pytest.raises(DeadObject, match="empty message"):
        raw[1].receive(soon())


def test_a_hang_up_ends_a_receive_that_waits(pair: tuple[Channel, Channel], start: Callable[..., Future[Any]]) -> None:
    waiting = start(pair[1].receive)
    pair[0].close()
    assert isinstance(waiting.exception(20), DeadObject)


def test_sending_after_a_hang_up_is_a_dead_object(pair: tuple[Channel, Channel]) -> None:
    pair[1].close()
    with pytest.raises(DeadObject, match="the peer is gone"):
        pair[0].send(b"anybody there?")


@pytest.mark.parametrize("size", [10, INLINE_BYTES + 1], ids=["inline", "in a file"])
def test_a_hang_up_ends_a_send_that_waits(
    size: int, pair: tuple[Channel, Channel], start: Callable[..., Future[Any]]
) -> None:
    assert fill(pair[0]) > 0
    waiting = start(pair[0].send, bytes(size))
    pair[1].close()
    assert isinstance(waiting.exception(20), DeadObject)


def test_a_hang_up_is_seen_only_when_the_last_copy_is_closed(pair: tuple[Channel, Channel]) -> None:
    copy = os.dup(pair[0].fileno())
    pair[0].close()
    with pytest.raises(MissedDeadlineTransient):
        pair[1].receive(NO_WAIT)
    os.close(copy)
    with pytest.raises(DeadObject):
        pair[1].receive(NO_WAIT)


def test_using_a_closed_channel_is_a_dead_object(pair: tuple[Channel, Channel]) -> None:
    pair[0].close()
    pair[0].close()
    assert pair[0].fileno() == -1
    with pytest.raises(DeadObject, match="this channel is closed"):
        pair[0].send(b"")
    with pytest.raises(DeadObject, match="this channel is closed"):
        pair[0].receive(NO_WAIT)


def test_hanging_up_ends_the_caller_s_own_blocked_send(
    pair: tuple[Channel, Channel], start: Callable[..., Future[Any]]
) -> None:
    fill(pair[0])
    waiting = start(pair[0].send, b"stuck")
    pair[0].hang_up()
    assert isinstance(waiting.exception(20), DeadObject)
    assert pair[0].fileno() == -1


def test_hanging_up_is_idempotent(pair: tuple[Channel, Channel]) -> None:
    pair[0].hang_up()
    pair[0].hang_up()
    with pytest.raises(DeadObject):
        pair[1].receive(NO_WAIT)


def test_closing_one_of_two_copies_does_not_hang_up_the_other(resources: ExitStack) -> None:
    """The supervisor closes its copy of a client's socket when a worker has one."""
    local, remote = Channel.pair()
    handed_over = Channel.adopt(os.dup(local.fileno()))
    resources.callback(remote.close)
    resources.callback(handed_over.close)
    local.close()
    handed_over.send(b"still here")
    assert remote.receive(soon()).data == b"still here"


def test_a_nonblocking_receive_returns_immediately(pair: tuple[Channel, Channel]) -> None:
    with pytest.raises(MissedDeadlineTransient):
        pair[1].receive(NO_WAIT)


def test_a_nonblocking_receive_returns_a_frame_that_has_arrived(pair: tuple[Channel, Channel]) -> None:
    pair[0].send(b"there")
    assert pair[1].receive(NO_WAIT).data == b"there"


def test_a_receive_ends_at_its_deadline_and_not_before(pair: tuple[Channel, Channel]) -> None:
    deadline_ns = soon(SHORT_NS)
    with pytest.raises(MissedDeadlineTransient):
        pair[1].receive(deadline_ns)
    assert time.monotonic_ns() >= deadline_ns


def test_a_send_ends_at_its_deadline_and_not_before(pair: tuple[Channel, Channel]) -> None:
    fill(pair[0])
    deadline_ns = soon(SHORT_NS)
    with pytest.raises(MissedDeadlineTransient):
        pair[0].send(b"", (), deadline_ns)
    assert time.monotonic_ns() >= deadline_ns


@pytest.mark.parametrize("left_ns", [None, SHORT_NS], ids=["one try", "a little"])
def test_a_send_waits_for_another_thread_s_send_until_its_own_deadline(
    left_ns: int | None,
    pair: tuple[Channel, Channel],
    start: Callable[..., Future[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill(pair[0])
    waits, wait = threading.Event(), Channel._wait

    def noted(channel: Channel, events: int, deadline_ns: int | None) -> None:
        waits.set()
        wait(channel, events, deadline_ns)

    monkeypatch.setattr(Channel, "_wait", noted)
    stuck = start(pair[0].send, b"stuck")
    assert waits.wait(20)
    second = start(pair[0].send, b"", (), NO_WAIT if left_ns is None else soon(left_ns))
    try:
        assert isinstance(second.exception(20), MissedDeadlineTransient)
        assert not stuck.done()
    finally:
        pair[0].hang_up()


def test_a_blocked_send_continues_when_the_peer_reads(
    pair: tuple[Channel, Channel], start: Callable[..., Future[Any]]
) -> None:
    frames = fill(pair[0])
    waiting = start(pair[0].send, b"at last", (), soon())
    for _ in range(frames):
        pair[1].receive(soon())
    assert pair[1].receive(soon()).data == b"at last"
    assert waiting.result(20) is None


def test_the_last_deadline_that_the_clock_knows_is_no_error(
    pair: tuple[Channel, Channel], start: Callable[..., Future[Any]]
) -> None:
    waiting = start(pair[1].receive, FOREVER_NS)
    pair[0].send(b"")
    assert waiting.result(20).data == b""


# ------------------------------------------------------------------------------------------------ who is there


def test_the_peer_of_a_pair_is_this_process(pair: tuple[Channel, Channel]) -> None:
    assert pair[0].peer() == (os.getpid(), os.getuid(), os.getgid())


CLIENT = """
import socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1])
sock.recv(1)
"""


@pytest.fixture
def client(tmp_path: Path, resources: ExitStack) -> tuple[subprocess.Popen[bytes], Channel]:
    """Another process that has connected, and our end of the connection."""
    listener = resources.enter_context(Listener.create(tmp_path / "socket"))
    process = subprocess.Popen([sys.executable, "-c", CLIENT, str(tmp_path / "socket")])
    resources.callback(process.wait)
    resources.callback(process.kill)
    accepted = accept(listener)
    resources.callback(accepted.close)
    return process, accepted


def accept(listener: Listener) -> Channel:
    """Wait for the next connection."""
    poller = socket.socket(fileno=os.dup(listener.fileno()))
    try:
        poller.settimeout(20)
        connection, _ = poller.accept()
    finally:
        poller.setblocking(False)
        poller.close()
    return Channel.adopt(connection.detach())


def test_user_numbers_are_not_negative(resources: ExitStack) -> None:
    """Who is not connected has no peer, which the kernel says by the largest numbers."""
    channel = Channel.adopt(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).detach())
    resources.callback(channel.close)
    assert channel.peer() == (0, 2**32 - 1, 2**32 - 1)


def test_the_peer_is_the_process_that_connected(client: tuple[subprocess.Popen[bytes], Channel]) -> None:
    process, channel = client
    assert channel.peer() == (process.pid, os.getuid(), os.getgid())


def test_the_peers_pidfd_reports_its_exit(
    client: tuple[subprocess.Popen[bytes], Channel], resources: ExitStack
) -> None:
    process, channel = client
    pidfd = channel.open_peer_pidfd()
    assert pidfd is not None
    resources.callback(os.close, pidfd)
    assert not os.get_inheritable(pidfd)
    assert f"Pid:\t{process.pid}\n" in Path(f"/proc/self/fdinfo/{pidfd}").read_text()


@pytest.mark.parametrize("code", [errno.ENOPROTOOPT, errno.EINVAL])
def test_on_an_older_kernel_the_pidfd_is_opened_by_pid(
    code: int,
    client: tuple[subprocess.Popen[bytes], Channel],
    resources: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reject(_channel: Channel) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Channel, "_peer_pidfd", reject)
    pidfd = client[1].open_peer_pidfd()
    assert pidfd is not None
    resources.callback(os.close, pidfd)
    assert f"Pid:\t{client[0].pid}\n" in Path(f"/proc/self/fdinfo/{pidfd}").read_text()


def test_a_peer_that_ended_and_was_reaped_has_no_pidfd_or_an_ended_one(
    client: tuple[subprocess.Popen[bytes], Channel],
) -> None:
    process, channel = client
    process.kill()
    process.wait()
    pidfd = channel.open_peer_pidfd()
    if pidfd is not None:  # newer kernels still hand one out
        os.close(pidfd)
    with pytest.raises(DeadObject):
        channel.receive(soon())


@pytest.mark.parametrize(
    ("family", "kind"),
    [(socket.AF_UNIX, socket.SOCK_STREAM), (socket.AF_UNIX, socket.SOCK_DGRAM), (socket.AF_INET, socket.SOCK_STREAM)],
)
def test_another_kind_of_socket_is_rejected_and_closed(family: int, kind: int) -> None:
    before = open_descriptors()
    with pytest.raises(InvalidArgument, match="SEQPACKET"):
        Channel.adopt(socket.socket(family, kind).detach())
    assert open_descriptors() == before


def test_the_caller_owns_a_detached_socket(resources: ExitStack) -> None:
    local, remote = Channel.pair()
    resources.callback(remote.close)
    fd = local.detach()
    local.close()
    with Channel.adopt(fd) as channel:
        channel.send(b"moved")
    assert remote.receive(soon()).data == b"moved"


# ------------------------------------------------------------------------------------------------ listening


def test_a_client_connects_to_a_listener(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with Listener.create(path) as listener, Channel.connect(path, soon()) as client:
        accepted = listener.accept()
        assert accepted is not None
        with accepted:
            client.send(b"hello")
            assert accepted.receive(soon()).data == b"hello"
            assert not os.get_inheritable(accepted.fileno())


def test_accept_without_a_connection_returns_none(tmp_path: Path) -> None:
    with Listener.create(tmp_path / "socket") as listener:
        assert listener.accept() is None


def test_only_this_user_may_connect(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    before = os.umask(0)
    try:
        with Listener.create(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(Path(f"{path}.lock").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_closing_a_listener_removes_its_path(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    listener = Listener.create(path)
    listener.close()
    listener.close()
    assert not path.exists()
    with pytest.raises(DeviceUnavailable, match=str(path)):
        Channel.connect(path, soon())


def test_the_path_of_a_killed_driver_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as killed:
        killed.bind(str(path))
    with pytest.raises(DeviceUnavailable, match="refused"):
        Channel.connect(path, soon())
    with Listener.create(path), Channel.connect(path, soon()):
        pass


def test_a_second_listener_is_rejected_and_the_first_is_not_affected(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with Listener.create(path):
        with pytest.raises(DeviceUnavailable, match="another driver already listens"):
            Listener.create(path)
        with Channel.connect(path, soon()):
            pass


OTHER_UID = 12345


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
@pytest.mark.parametrize("is_locked", [False, True], ids=["free", "locked"])
def test_a_lock_file_of_another_user_is_named_with_its_owner(tmp_path: Path, is_locked: bool) -> None:
    lock = tmp_path / "d.sock.lock"
    lock.touch()
    os.chown(lock, OTHER_UID, OTHER_UID)
    with lock.open() as held:
        if is_locked:
            fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DeviceUnavailable, match=rf"{lock} is a file of uid {OTHER_UID}, but .* uid 0\. Remove"):
            Listener.create(tmp_path / "d.sock")
    assert not (tmp_path / "d.sock").exists()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkdir, "of uid .*, cannot be opened: Is a directory"),
        (lambda path: os.symlink("elsewhere", path), "of uid .*, cannot be opened: Too many levels"),
        (os.mkfifo, "is no regular file, and of uid"),
    ],
    ids=["directory", "link", "FIFO"],
)
def test_a_lock_file_that_is_no_file_is_named(tmp_path: Path, make: Callable[[str], None], reason: str) -> None:
    make(f"{tmp_path}/d.sock.lock")
    with pytest.raises(DeviceUnavailable, match=f"the lock file {tmp_path}/d.sock.lock,? {reason}"):
        Listener.create(tmp_path / "d.sock")


def test_a_listener_can_follow_one_that_was_closed(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with Listener.create(path):
        pass
    with Listener.create(path), Channel.connect(path, soon()):
        pass


def test_a_file_that_is_not_a_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("years of work")
    with pytest.raises(DeviceUnavailable, match="no socket"):
        Listener.create(path)
    assert path.read_text() == "years of work"
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]  # and no lock file


def test_a_listener_that_cannot_be_made_leaves_nothing_open(tmp_path: Path) -> None:
    before = open_descriptors()
    with pytest.raises((OSError, NnfmqError)):
        Listener.create(tmp_path / ("long" * 30))
    assert open_descriptors() == before


def test_connecting_without_a_driver_raises_unavailable(tmp_path: Path) -> None:
    with pytest.raises(DeviceUnavailable, match="no driver listens"):
        Channel.connect(tmp_path / "nothing", soon())


@pytest.fixture
def _short_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "BACKLOG", 64)


@pytest.mark.usefixtures("_short_backlog")
def test_clients_beyond_the_backlog_wait_until_they_are_accepted(tmp_path: Path, resources: ExitStack) -> None:
    """A full backlog is no absent driver: a client waits there until its deadline."""
    path = tmp_path / "socket"
    listener = resources.enter_context(Listener.create(path))
    for _ in range(65):  # one more than the backlog of 64 holds
        resources.enter_context(Channel.connect(path, soon()))
    deadline_ns = soon(SHORT_NS)
    with pytest.raises(MissedDeadlineTransient):
        Channel.connect(path, deadline_ns)
    assert time.monotonic_ns() >= deadline_ns
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(Channel.connect, path, soon())
        first = accept(listener)
        resources.callback(first.close)
        resources.enter_context(late.result(20))


@pytest.mark.usefixtures("_short_backlog")
def test_a_signal_does_not_make_a_waiting_client_connected(tmp_path: Path, resources: ExitStack) -> None:
    """Python takes an AF_UNIX connect that a signal interrupts for done."""
    path = tmp_path / "socket"
    resources.enter_context(Listener.create(path))
    for _ in range(65):
        resources.enter_context(Channel.connect(path, soon()))
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    resources.callback(signal.signal, signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    resources.callback(signal.setitimer, signal.ITIMER_REAL, 0)
    deadline_ns = soon(SHORT_NS)
    with pytest.raises(MissedDeadlineTransient, match=str(path)):
        Channel.connect(path, deadline_ns)
    assert time.monotonic_ns() >= deadline_ns


# ------------------------------------------------------------------------------------------------ forks


def test_a_forked_child_has_no_copy_of_any_channel_or_listener(tmp_path: Path, resources: ExitStack) -> None:
    path = tmp_path / "socket"
    listener = resources.enter_context(Listener.create(path))
    client = resources.enter_context(Channel.connect(path, soon()))
    accepted = listener.accept()
    assert accepted is not None
    resources.enter_context(accepted)
    ends = [resources.enter_context(end) for end in Channel.pair()]
    fds = [channel.fileno() for channel in (client, accepted, *ends)] + [listener.fileno(), listener._lock.fileno()]
    assert open_in_a_forked_child(lambda: fds) == 0
    client.send(b"all as before")
    assert accepted.receive(soon()).data == b"all as before"
    with Channel.connect(path, soon()):
        pass


def test_closing_in_a_forked_child_has_no_effect(pair: tuple[Channel, Channel], tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with Listener.create(path) as listener:

        def close() -> list[int]:
            for end in (*pair, listener):
                end.close()
            pair[0].hang_up()
            return []

        assert open_in_a_forked_child(close) == 0
        pair[0].send(b"still open")
        assert pair[1].receive(soon()).data == b"still open"
        assert path.exists()


def test_a_fork_waits_for_a_channel_that_is_just_being_made(
    start: Callable[..., Future[Any]], resources: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    socketpair, made, forked = socket.socketpair, threading.Event(), threading.Event()
    ends: list[socket.socket] = []

    def slow(*kind: int) -> tuple[socket.socket, socket.socket]:
        ends.extend(socketpair(*kind))
        made.set()
        forked.wait(0.1)  # long enough for a fork that does not wait
        return ends[0], ends[1]

    monkeypatch.setattr(socket, "socketpair", slow)
    making = start(Channel.pair)
    assert made.wait(20)
    fds = [end.fileno() for end in ends]
    assert open_in_a_forked_child(lambda: fds, forked.set) == 0
    for channel in making.result(20):
        channel.close()


def test_a_process_that_adopts_a_listening_socket_accepts_and_leaves_the_path(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with Listener.create(path) as listener:
        with Listener.adopt(os.dup(listener.fileno())) as adopted, Channel.connect(path, soon()) as client:
            assert not os.get_inheritable(adopted.fileno())
            served = accept(adopted)
            with served:
                client.send(b"hello")
                assert served.receive(soon()).data == b"hello"
            adopted.close()
            adopted.close()
        assert path.is_socket()
        with pytest.raises(DeviceUnavailable, match="another driver already listens"):
            Listener.create(path)


@pytest.mark.parametrize(
    ("family", "kind", "is_listening"),
    [
        (socket.AF_INET, socket.SOCK_STREAM, True),
        (socket.AF_UNIX, socket.SOCK_STREAM, True),
        (socket.AF_UNIX, socket.SOCK_SEQPACKET, False),
    ],
)
def test_only_a_listening_socket_of_the_kind_of_a_channel_is_adopted(
    family: int, kind: int, is_listening: bool
) -> None:
    with socket.socket(family, kind) as sock:
        if is_listening:
            sock.bind("" if family == socket.AF_UNIX else ("127.0.0.1", 0))
            sock.listen()
        fd = os.dup(sock.fileno())
        with pytest.raises(InvalidArgument, match="a listener needs a listening AF_UNIX SEQPACKET socket"):
            Listener.adopt(fd)
        with pytest.raises(OSError):
            os.fstat(fd)


def test_a_peer_that_shares_the_socket_cannot_make_a_call_without_a_wait_block(pair: tuple[Channel, Channel]) -> None:
    """As a compile process's connection, of which the worker that has sent it may keep a copy."""
    local, _remote = pair
    os.set_blocking(local.fileno(), True)
    with pytest.raises(MissedDeadlineTransient):
        local.receive(NO_WAIT)

    def fill() -> None:
        for _ in range(1000):
            local.send(bytes(1000), (), NO_WAIT)

    with pytest.raises(MissedDeadlineTransient):
        fill()


def test_where_no_fds_are_taken_a_frame_with_some_is_malformed_and_the_next_one_arrives(
    pair: tuple[Channel, Channel],
) -> None:
    local, remote = pair
    remote.send(b"with", [0])
    remote.send(b"without")
    with no_more_descriptors(), pytest.raises(ProtocolError, match="came with file descriptors"):
        local.receive(soon(), takes_fds=False)
    with local.receive(soon(), takes_fds=False) as frame:
        assert frame.data == b"without"


def test_a_listener_that_refuses_fds_has_the_kernel_refuse_them(tmp_path: Path) -> None:
    with Listener.create(tmp_path / "s") as listener:
        listener.refuse_fds()
        with Channel.connect(tmp_path / "s", soon()) as client:
            try:
                client.send(b"with", [0])
            except PermissionError:
                return
            accepted = listener.accept()  # before Linux 6.16
            assert accepted is not None
            with accepted, pytest.raises(ProtocolError):
                accepted.receive(soon(), takes_fds=False)
