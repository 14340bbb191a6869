"""The control channel: one AF_UNIX SEQPACKET connection. A frame is a message and its fds. The only door to sockets.

SEQPACKET keeps a message and its fds together, so a frame arrives whole or not at all. A body over the socket buffer
travels in a memfd that the receiver reads into private memory. Hang-up is seen only when every copy of the peer's end
is closed: all fds here are close-on-exec, received ones too (`socket.recv_fds` would leave them inheritable), and a
forked child closes its copies of all channels and listeners at once.

    frame: u8 kind (0 inline, 1 body in the last fd), then inline: the message; else u64 length of the body

What the bytes mean is `serialize.control_protocol`'s business; who waits for what, `runtime`'s and `service`'s.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import io
import os
import select
import socket
import stat
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

from nnfmq.hal.errors import (
    DeadObject,
    DeviceUnavailable,
    InvalidArgument,
    MissedDeadlineTransient,
    ProtocolError,
    ResourceExhaustedTransient,
)
from nnfmq.memory import read_from_memfd, write_to_memfd

INLINE_BYTES = 32 * 1024  # comfortably under the default socket buffer, with room for several frames
BODY_BYTES_MAX = 256 << 20  # as `serialize.control_protocol`: no larger message exists; a test compares these two
FDS_MAX = 250  # Linux passes 253 at a time (SCM_MAX_FD), and a body may travel in one more
SO_PEERPIDFD = 77  # Linux 6.5; Python has no name for it

NO_WAIT = 0  # a deadline that has passed: one try, never block

_INLINE, _IN_FILE = 0, 1
_POLL_MS_MAX = 2**31 - 1  # poll(2) takes an int: 24 days
_BODY_LENGTH = struct.Struct("<BQ")
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_TIMEVAL = struct.Struct("ll")
_CREDENTIALS = struct.Struct("iII")
_ANCILLARY_BYTES = socket.CMSG_SPACE((FDS_MAX + 1) * 4)
_GONE = frozenset((errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN))


class Credentials(NamedTuple):
    """Who is at the other end, as the kernel recorded it when the connection was made (pid 0: another namespace)."""

    pid: int
    uid: int
    gid: int


class Frame:
    """A received message and the fds that came with it. The receiver owns the fds: take them, or close the frame.

    Where this process had no room for all of them (ulimit -n) `fds_truncated` is True, and the frame has none.
    """

    __slots__ = ("data", "fds", "fds_truncated")

    def __init__(self, data: bytearray, fds: list[int], fds_truncated: bool = False) -> None:
        self.data = data
        self.fds = fds
        self.fds_truncated = fds_truncated

    def detach_fds(self) -> list[int]:
        """Hand over all fds; the frame forgets them."""
        fds, self.fds = self.fds, []
        return fds

    def close(self) -> None:
        """Close the fds that nobody took."""
        close_all(self.detach_fds())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def close_all(fds: Sequence[int]) -> None:
    """Close received fds."""
    for fd in fds:
        os.close(fd)


_CopiedT = TypeVar("_CopiedT", socket.socket, io.FileIO)
_copied: weakref.WeakSet[socket.socket | io.FileIO] = weakref.WeakSet()  # what a fork copies, open or closed
_creating = threading.RLock()  # held while one of them is made; fork waits for it


def _close_copies() -> None:
    for copy in list(_copied):
        with contextlib.suppress(OSError):
            copy.close()
    _creating.release()


os.register_at_fork(before=_creating.acquire, after_in_parent=_creating.release, after_in_child=_close_copies)


def _remembered(made: _CopiedT) -> _CopiedT:
    """Note for a fork what was just made (with `_creating` held)."""
    _copied.add(made)
    return made


def _milliseconds_left(deadline_ns: int | None) -> int | None:
    if deadline_ns is None:
        return None
    left = -(-(deadline_ns - time.monotonic_ns()) // 1_000_000)
    return min(max(0, left), _POLL_MS_MAX)


def _has_passed(deadline_ns: int | None) -> bool:
    return deadline_ns is not None and time.monotonic_ns() >= deadline_ns


def _received_fds(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def _connect(sock: socket.socket, path: Path, deadline_ns: int | None) -> None:
    while not _is_connected(sock):
        # Blocking, with the kernel's own limit: a socket with a Python timeout fails at once at a full backlog.
        left = _milliseconds_left(deadline_ns)
        if left is not None:
            limit = _TIMEVAL.pack(left // 1000, left % 1000 * 1000 or 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            sock.connect(os.fspath(path))  # returns as if all were well when a signal interrupts it
        except BlockingIOError:
            raise MissedDeadlineTransient(f"the driver at {path} took no new client before the deadline") from None
        except OSError as error:
            raise DeviceUnavailable(f"no driver listens at {path}: {error.strerror or error}") from error


def _is_connected(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


class Channel:
    """One end of a connection. Any thread may send; one thread receives. Close it, or use `with`."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray(INLINE_BYTES + 1)

    @classmethod
    def adopt(cls, fd: int) -> Self:
        """Take over a connected SEQPACKET socket by its fd."""
        with _creating:
            sock = _remembered(socket.socket(fileno=fd))
        if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET:
            sock.close()
            raise InvalidArgument("a control channel needs an AF_UNIX SEQPACKET socket")
        sock.setblocking(False)
        os.set_inheritable(sock.fileno(), False)
        return cls(sock)

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Return two connected ends, for an embedded driver and for tests."""
        with _creating:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            return cls.adopt(ours.detach()), cls.adopt(theirs.detach())

    @classmethod
    def connect(cls, path: Path, deadline_ns: int | None = None) -> Self:
        """Connect to a listening driver; blocks while its backlog is full.

        Raises DeviceUnavailable where none listens at `path`, MissedDeadlineTransient at the deadline.
        """
        with _creating:
            sock = _remembered(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        try:
            _connect(sock, path, deadline_ns)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    def fileno(self) -> int:
        """Lend the socket's fd, for polling; -1 once closed."""
        return self._socket.fileno()

    def detach(self) -> int:
        """Give up the socket's fd: the caller owns it."""
        return self._socket.detach()

    def peer(self) -> Credentials:
        """Return who is at the other end (SO_PEERCRED)."""
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return Credentials(*_CREDENTIALS.unpack(raw))

    def open_peer_pidfd(self) -> int | None:
        """Return a pidfd of the peer (the caller owns it), or None where the kernel cannot say who it is.

        SO_PEERPIDFD names the very process; pidfd_open by pid, before Linux 6.5, can race with a reused pid.
        """
        try:
            return self._peer_pidfd()
        except OSError as error:
            if error.errno not in (errno.ENOPROTOOPT, errno.EINVAL, errno.ENODATA, errno.ESRCH):
                raise
        pid = self.peer().pid
        try:
            return os.pidfd_open(pid) if pid > 0 else None
        except ProcessLookupError:
            return None  # gone already: the hang-up says so

    def _peer_pidfd(self) -> int:
        fd = self._socket.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
        os.set_inheritable(fd, False)
        return fd

    def send(self, data: bytes, fds: Sequence[int] = (), deadline_ns: int | None = None) -> None:
        """Send one frame; blocks while the peer does not read. The fds stay the caller's.

        Raises DeadObject where the peer is gone, MissedDeadlineTransient at the deadline, InvalidArgument for fds that
        are not open.
        """
        if len(fds) > FDS_MAX:
            raise InvalidArgument(f"a frame carries at most {FDS_MAX} fds, not {len(fds)}")
        if len(data) <= INLINE_BYTES:
            self._send((b"\0", data), fds, deadline_ns)
            return
        body = write_to_memfd(data)
        try:
            self._send((_BODY_LENGTH.pack(_IN_FILE, len(data)),), [*fds, body], deadline_ns)
        finally:
            os.close(body)

    def _send(self, parts: Sequence[bytes], fds: Sequence[int], deadline_ns: int | None) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while True:
            try:
                # No lock: a frame goes whole, and nobody must wait for another thread's longer than his own deadline.
                self._socket.sendmsg(parts, ancillary, socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline_ns)
            except OSError as error:
                if error.errno == errno.EBADF and self._socket.fileno() >= 0:
                    raise InvalidArgument(f"N-VAL-13: of the fds {list(fds)} one is no open descriptor") from error
                raise self._gone(error) from error

    def receive(self, deadline_ns: int | None = None, *, body_bytes_max: int = BODY_BYTES_MAX) -> Frame:
        """Return the next frame; blocks until one is there. The caller owns its fds.

        A body in a file, whose reading takes time, has at most `body_bytes_max` bytes; 0 refuses all of them.
        Raises DeadObject on hang-up, ProtocolError for a truncated or malformed frame (its fds are closed),
        MissedDeadlineTransient at the deadline.
        """
        while True:
            try:
                size, ancillary, flags, _ = self._socket.recvmsg_into(
                    [self._buffer], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                self._wait(select.POLLIN, deadline_ns)
                continue
            except ConnectionResetError:
                continue  # said once, of a peer that closed without reading everything: what it sent comes next
            except OSError as error:
                raise self._gone(error) from error
            return self._frame(size, _received_fds(ancillary), flags, body_bytes_max)

    def _frame(self, size: int, fds: list[int], flags: int, body_bytes_max: int) -> Frame:
        try:
            if self._lacks_fds(size, fds, flags):
                close_all(fds)
                return Frame(self._buffer[1:size], [], fds_truncated=True)
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ProtocolError(f"a frame was cut short: at most {INLINE_BYTES} bytes and {FDS_MAX} fds fit")
            if size == 0:
                raise DeadObject("the peer closed its end of the connection")
            return Frame(self._body(size, fds, body_bytes_max), fds)
        except BaseException:
            close_all(fds)
            raise

    def _lacks_fds(self, size: int, fds: list[int], flags: int) -> bool:
        """Return True where the message is whole, and fds are missing that no fault of the peer's can have cut off."""
        is_cut = flags & socket.MSG_CTRUNC and not flags & socket.MSG_TRUNC
        return bool(is_cut) and len(fds) <= FDS_MAX and size > 0 and self._buffer[0] == _INLINE

    def _body(self, size: int, fds: list[int], body_bytes_max: int) -> bytearray:
        kind = self._buffer[0]
        if kind == _INLINE:
            return self._buffer[1:size]
        if kind != _IN_FILE or size != _BODY_LENGTH.size or not fds:
            raise ProtocolError(f"frame of kind {kind} with {size} bytes and {len(fds)} fds is malformed", 0)
        length = _BODY_LENGTH.unpack_from(self._buffer)[1]
        if not INLINE_BYTES < length <= body_bytes_max:
            allowed = f"has {INLINE_BYTES + 1} to {body_bytes_max} bytes" if body_bytes_max else "is not taken here"
            raise ProtocolError(f"a body in a file {allowed}, not {length}", 1)
        body = fds.pop()
        try:
            return read_from_memfd(body, length)
        finally:
            os.close(body)

    def _wait(self, events: int, deadline_ns: int | None) -> None:
        fd = self._socket.fileno()
        if fd < 0:
            raise DeadObject("this channel is closed")
        poll = select.poll()
        poll.register(fd, events)
        if not poll.poll(_milliseconds_left(deadline_ns)) and _has_passed(deadline_ns):
            raise MissedDeadlineTransient("the deadline passed while waiting for the peer's control channel")

    @staticmethod
    def _gone(error: OSError) -> Exception:
        if error.errno == errno.EBADF:
            return DeadObject("this channel is closed")  # here, by us: it says nothing of the peer
        return DeadObject(f"the peer is gone: {error.strerror}") if error.errno in _GONE else error

    def close(self) -> None:
        """Close the socket: the peer sees the hang-up once no copy of it is left."""
        self._socket.close()

    def hang_up(self) -> None:
        """End the connection in all its copies, and wake our own threads that wait in it; then close."""
        with contextlib.suppress(OSError):  # the peer was faster, or it is closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FenceSignaler:
    """The sending end of a fence: one byte, once; closed without it, the other end sees the end of the connection.

    A forked child closes its copy at once, so that the end of the process that has the sender is seen.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, state: int) -> None:
        """Send the state and close; harmless once closed."""
        with contextlib.suppress(OSError):  # closed already, or nobody is left to see it
            self._socket.send(bytes([state]), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        self.close()

    def close(self) -> None:
        """Close it. Harmless when repeated."""
        self._socket.close()


def open_fence_pair() -> tuple[FenceSignaler, int]:
    """Return a sender and the fd of the end where its state is seen, by any number of holders; the caller owns both.

    Raises ResourceExhaustedTransient where there is no room for them.
    """
    with _creating:
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise ResourceExhaustedTransient(f"no descriptors for a fence (ulimit -n): {error.strerror}") from error
        ours.shutdown(socket.SHUT_RD)  # what is written into the other end goes nowhere
        return FenceSignaler(_remembered(ours)), theirs.detach()


def peek_fence_byte(fd: int) -> bytes | None:
    """Return what lies in a SEQPACKET socket, at most two bytes, and leave it there: b"" at the end, None for nothing.

    The fd stays the caller's. Raises InvalidArgument for anything else than such a socket.
    """
    try:
        sock = socket.socket(fileno=fd)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"descriptor {fd} is no socket: {error}") from None
    try:
        if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET:
            raise InvalidArgument(f"descriptor {fd} is a socket of another kind than AF_UNIX SEQPACKET")
        return sock.recv(2, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        return b""
    except OSError as error:
        raise InvalidArgument(f"descriptor {fd} is a socket without a connection: {error}") from None
    finally:
        sock.detach()


def _remove_stale(path: Path) -> None:
    """Remove the socket of a driver that is gone, and nothing else."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise DeviceUnavailable(f"{path} exists and is no socket; it is not replaced")
        path.unlink()
    except FileNotFoundError:
        pass


class Listener:
    """A listening socket at a path, and the lock that says whose path it is."""

    def __init__(self, sock: socket.socket, path: Path, lock: io.FileIO) -> None:
        self._socket = sock
        self._path = path
        self._lock = lock

    @classmethod
    def create(cls, path: Path) -> Self:
        """Listen at `path` (mode 0600), replacing what a killed driver left there.

        Raises DeviceUnavailable where a living driver holds the path.
        """
        with contextlib.ExitStack() as undo:
            with _creating:
                lock = undo.enter_context(_remembered(io.FileIO(os.open(f"{path}.lock", _LOCK_FLAGS, 0o600), "r+")))
                sock = undo.enter_context(_remembered(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DeviceUnavailable(f"another driver already listens at {path}") from None
            _remove_stale(path)
            sock.bind(os.fspath(path))
            path.chmod(0o600)
            sock.listen(64)
            sock.setblocking(False)
            undo.pop_all()
        return cls(sock, path, lock)

    def fileno(self) -> int:
        """Lend the listening fd, for polling."""
        return self._socket.fileno()

    def accept(self) -> Channel | None:
        """Return the next connection, or None where none is waiting (any more)."""
        with _creating:
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return None
            return Channel.adopt(accepted.detach())

    def close(self) -> None:
        """Stop listening and remove the path. The lock file stays: removing it would let two drivers lock two files."""
        if self._socket.fileno() < 0:
            return
        self._path.unlink(missing_ok=True)
        self._socket.close()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
