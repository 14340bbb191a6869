"""The control channel: AF_UNIX SEQPACKET connections. The only module with sockets of peers, and long because of that.

A frame is a message and its file descriptors. SEQPACKET keeps message boundaries, and fds with their message, so a
frame arrives completely or not at all. A body that is larger than the socket buffer is passed in a memfd, which the
receiver reads into private memory.

    frame: u8 kind (0 = inline, 1 = body in the last fd), then inline: the message; else u64 length of the body

A hang-up is reported only after every copy of the peer's socket is closed. Therefore all fds are close-on-exec, also
received ones (`socket.recv_fds` would leave them inheritable), and a forked child immediately closes its copies of all
channels and listeners.

`serialize.control_protocol` encodes the messages; `client` and `driver` match calls with replies.
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
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

from nnfmq.base.deadlines import has_passed, remaining_ms
from nnfmq.base.logs import LoggedClient
from nnfmq.base.ownership import Closable, Uncopyable
from nnfmq.base.threads import Thread
from nnfmq.hal.errors import (
    DeadObject,
    DeviceUnavailable,
    InvalidArgument,
    MissedDeadlineTransient,
    ProtocolError,
    ResourceExhaustedTransient,
)

INLINE_BYTES = 32 * 1024  # the default socket buffer (212992 bytes) has space for several such frames
BODY_BYTES_MAX = 256 << 20  # as `serialize.control_protocol`: no larger message exists; a test compares these two
FDS_MAX = 250  # of the 253 that Linux passes with a message (SCM_MAX_FD); a body needs another one
BACKLOG = 256  # short, because a client waits for all before it; those beyond it wait in connect(2), in order
SO_PEERPIDFD = 77  # Linux 6.5; Python has no name for it
_SO_PEERGROUPS = 59  # Linux 4.13; the same
_SO_PASSRIGHTS = 83  # Linux 6.16; the same
_GROUPS_BYTES = 1024  # the most that Python asks for: 256 groups

NO_WAIT = 0
"""A deadline that has passed: try once, do not block."""

_INLINE, _IN_FILE = 0, 1
_LAST_FD = 512  # above an application's usual descriptors; select(2) takes those below 1024
_BODY_LENGTH = struct.Struct("<BQ")
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_TIMEVAL = struct.Struct("ll")
_CREDENTIALS = struct.Struct("iII")
_ANCILLARY_BYTES = socket.CMSG_SPACE((FDS_MAX + 1) * 4)
_GONE = frozenset((errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN))


class Credentials(NamedTuple):
    """The peer process, as the kernel recorded it when the connection was made (pid 0: in another PID namespace)."""

    pid: int
    uid: int
    gid: int

    def logged(self, program: str = "") -> LoggedClient:
        """Return the client that has these credentials, for the log."""
        return LoggedClient(self.pid or None, self.uid, program)


class Frame(Closable):
    """A received message and its fds. The frame owns the fds until `detach_fds`; close it, or use `with`.

    If this process had no free fds for all of them (ulimit -n), `fds_truncated` is True and the frame has none.
    """

    __slots__ = ("data", "fds", "fds_truncated")

    def __init__(self, data: bytearray, fds: list[int], fds_truncated: bool = False) -> None:
        self.data = data
        self.fds = fds
        self.fds_truncated = fds_truncated

    @property
    def fd_count(self) -> int | None:
        """The number of fds that came with the message; None if this process could not receive all."""
        return None if self.fds_truncated else len(self.fds)

    def detach_fds(self) -> list[int]:
        """Return all fds; the caller owns them."""
        fds, self.fds = self.fds, []
        return fds

    def close(self) -> None:
        """Close the fds that were not detached. Idempotent."""
        close_all(self.detach_fds())


def close_all(fds: Sequence[int]) -> None:
    """Close file descriptors."""
    for fd in fds:
        os.close(fd)


_FileT = TypeVar("_FileT", socket.socket, io.FileIO)
_inherited: weakref.WeakSet[socket.socket | io.FileIO] = weakref.WeakSet()  # what a forked child has to close
# Held while a file is opened and added to the set, and during a fork: a child inherits no fd that is not in it.
_fork_lock = threading.RLock()


def _close_inherited() -> None:
    for file in list(_inherited):
        with contextlib.suppress(OSError):
            file.close()
    _fork_lock.release()


os.register_at_fork(before=_fork_lock.acquire, after_in_parent=_fork_lock.release, after_in_child=_close_inherited)


def _close_after_fork(file: _FileT) -> _FileT:
    """Make forked children close `file`. `_fork_lock` is held since it was opened."""
    _inherited.add(file)
    return file


def _received_fds(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def _connect(sock: socket.socket, path: Path, deadline_ns: int | None) -> None:
    while not _is_connected(sock):
        # A blocking socket with SO_SNDTIMEO. A non-blocking one, which Python uses for timeouts, fails immediately if
        # the backlog is full, with EAGAIN instead of EINPROGRESS.
        left_ms = remaining_ms(deadline_ns)
        if left_ms >= 0:
            limit = _TIMEVAL.pack(left_ms // 1000, left_ms % 1000 * 1000 or 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            sock.connect(os.fspath(path))  # after EINTR Python only polls, and returns without a connection
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


class Channel(Closable):
    """One end of a connection. Any thread may send; one thread may receive. Close it, or use `with`."""

    def __init__(self, sock: socket.socket, buffer: bytearray | None = None) -> None:
        self._socket = sock
        self._buffer = bytearray(INLINE_BYTES + 1) if buffer is None else buffer  # one for all of a receiving thread
        self._enlargement: threading.Thread | None = None
        self.left_unread = False
        """Whether the peer has closed its end without having read all that was sent, or before it was sent."""

    @classmethod
    def adopt(cls, fd: int) -> Self:
        """Return a channel over a connected SEQPACKET socket. Takes ownership of `fd`.

        Raises:
            InvalidArgument: If it is of another kind, or no socket.
        """
        with _fork_lock:
            try:
                sock = _close_after_fork(socket.socket(fileno=fd))
            except OSError as error:
                os.close(fd)
                raise InvalidArgument(f"a control channel needs a socket: {error.strerror}") from None
        if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET:
            sock.close()
            raise InvalidArgument("a control channel needs an AF_UNIX SEQPACKET socket")
        sock.setblocking(False)
        os.set_inheritable(sock.fileno(), False)
        return cls(sock)

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Return two connected channels, for an embedded driver and for tests."""
        with _fork_lock:
            first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            return cls.adopt(first.detach()), cls.adopt(second.detach())

    @classmethod
    def connect(cls, path: Path, deadline_ns: int | None = None) -> Self:
        """Connect to the driver that listens at `path`. Blocks while its backlog is full.

        Raises:
            DeviceUnavailable: If no driver listens there.
            MissedDeadlineTransient: At the deadline.
        """
        with _fork_lock:
            sock = _close_after_fork(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        try:
            _connect(sock, path, deadline_ns)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    def fileno(self) -> int:
        """Return the socket's fd, which stays owned by the channel; -1 if closed."""
        return self._socket.fileno()

    def detach(self) -> int:
        """Return the socket's fd; the caller owns it, and the channel is closed."""
        return self._socket.detach()

    def enlarge_descriptor_table(self) -> None:
        """Let a thread do what `close_first_at_exit` would wait for, while this thread does other work.

        Before Linux enlarges the table of descriptors of a process with several threads, it waits until each CPU has
        switched tasks (synchronize_rcu), which takes 8 to 30 ms.
        """
        self._enlargement = Thread(target=self._enlarge, daemon=True)
        self._enlargement.start()

    def _enlarge(self) -> None:
        with contextlib.suppress(OSError, ValueError), _fork_lock:  # ValueError: the channel was closed meanwhile
            os.close(fcntl.fcntl(self._socket.fileno(), fcntl.F_DUPFD_CLOEXEC, _LAST_FD))

    def close_first_at_exit(self) -> None:
        """Make the kernel close this socket before the process's memfds when the process exits.

        To free 1 GiB of memfds takes the kernel 200 ms; the peer should see the hang-up before that. Linux releases the
        files of a process in reverse order of their descriptors. Call it before the fd is watched; it changes the fd.
        No effect if ulimit -n is too low.
        """
        if self._enlargement is not None:
            self._enlargement.join()
        with contextlib.suppress(OSError, ValueError), _fork_lock:  # ValueError: the channel was closed meanwhile
            fd = fcntl.fcntl(self._socket.fileno(), fcntl.F_DUPFD_CLOEXEC, _LAST_FD)
            previous, self._socket = self._socket, _close_after_fork(socket.socket(fileno=fd))
            self._socket.setblocking(False)
            previous.close()

    def peer(self) -> Credentials:
        """Return the credentials of the peer (SO_PEERCRED)."""
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return Credentials(*_CREDENTIALS.unpack(raw))

    def peer_groups(self) -> frozenset[int]:
        """Return the gids of the peer's groups when the connection was made; of one with more than 256 its own gid."""
        try:
            raw = self._socket.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
        except OSError:  # ERANGE; or the kernel does not record them
            raw = b""
        return frozenset((self.peer().gid, *struct.unpack(f"{len(raw) // 4}I", raw)))

    def open_peer_pidfd(self) -> int | None:
        """Return a pidfd of the peer, or None if the kernel cannot identify it. The caller owns the fd.

        Before Linux 6.5, which added SO_PEERPIDFD, pidfd_open(2) is used; the pid may have been reused by then.
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
            return None  # it has exited; the hang-up reports that

    def _peer_pidfd(self) -> int:
        fd = self._socket.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
        os.set_inheritable(fd, False)
        return fd

    def send(self, data: bytes, fds: Sequence[int] = (), deadline_ns: int | None = None) -> None:
        """Send one frame. Blocks while the socket buffer is full. Borrows `fds`. Thread-safe.

        Raises:
            DeadObject: If the peer has closed the connection, or the channel is closed.
            MissedDeadlineTransient: At the deadline.
            InvalidArgument: If an fd is not open, or there are more than `FDS_MAX`.
        """
        if len(fds) > FDS_MAX:
            raise InvalidArgument(f"a frame carries at most {FDS_MAX} fds, not {len(fds)}")
        if len(data) <= INLINE_BYTES:
            self._send((b"\0", data), fds, deadline_ns)
            return
        from nnfmq.base.memory import write_to_memfd  # few messages are that large, and it delays the start of a driver

        body = write_to_memfd(data)
        try:
            self._send((_BODY_LENGTH.pack(_IN_FILE, len(data)),), [*fds, body], deadline_ns)
        finally:
            os.close(body)

    def _send(self, parts: Sequence[bytes], fds: Sequence[int], deadline_ns: int | None) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while True:
            try:
                # No lock is needed, because a frame is sent completely or not at all. It would make a thread wait for
                # another thread's deadline.
                self._socket.sendmsg(parts, ancillary, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline_ns)
            except OSError as error:
                if error.errno == errno.EBADF and self._socket.fileno() >= 0:
                    raise InvalidArgument(f"one of the fds {list(fds)} is not open (N-VAL-13)") from error
                self.left_unread |= error.errno in _GONE
                raise self._gone(error) from error

    def receive(
        self, deadline_ns: int | None = None, *, body_bytes_max: int = BODY_BYTES_MAX, takes_fds: bool = True
    ) -> Frame:
        """Block until the next frame has arrived, and return it. The frame owns its fds.

        `body_bytes_max` limits bodies in memfds, because reading them takes time; 0 rejects all of them. Without
        `takes_fds` a frame with fds is malformed, and this process never has them: to close one may block, where the
        peer has chosen the file system.

        Raises:
            DeadObject: If the peer hung up, or the channel is closed.
            ProtocolError: If the frame is truncated or malformed. Its fds are closed.
            MissedDeadlineTransient: At the deadline.
        """
        is_at_end = False
        while True:
            try:
                size, ancillary, flags, _ = self._socket.recvmsg_into(
                    [self._buffer], _ANCILLARY_BYTES * takes_fds, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                if is_at_end:
                    raise DeadObject("the peer sent an empty message") from None
                self._wait(select.POLLIN, deadline_ns)
                continue
            except ConnectionResetError:  # reported once if the peer closed with unread data
                self.left_unread = True
                continue  # what it sent comes next
            except OSError as error:
                raise self._gone(error) from error
            if flags & socket.MSG_CTRUNC and not takes_fds:
                raise ProtocolError("a frame came with file descriptors, which nobody takes here")
            if size == 0 and not ancillary and not is_at_end:
                is_at_end = True  # a last message may still be there, see `_peek`
                continue
            return self._frame(size, _received_fds(ancillary), flags, body_bytes_max)

    def _frame(self, size: int, fds: list[int], flags: int, body_bytes_max: int) -> Frame:
        try:
            if self._is_fds_truncated(size, fds, flags):
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

    def _is_fds_truncated(self, size: int, fds: list[int], flags: int) -> bool:
        """Return whether the kernel dropped fds because this process has no free ones; the message is complete."""
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
            from nnfmq.base.memory import read_from_memfd  # see `send`

            return read_from_memfd(body, length)
        finally:
            os.close(body)

    def _wait(self, events: int, deadline_ns: int | None) -> None:
        if (fd := self._socket.fileno()) < 0:
            raise DeadObject("this channel is closed")
        poll = select.poll()
        poll.register(fd, events)
        if not poll.poll(remaining_ms(deadline_ns)) and has_passed(deadline_ns):
            raise MissedDeadlineTransient("the deadline passed while waiting for the peer's control channel")

    @staticmethod
    def _gone(error: OSError) -> Exception:
        if error.errno == errno.EBADF:
            return DeadObject("this channel is closed")  # by this process
        return DeadObject(f"the peer is gone: {error.strerror}") if error.errno in _GONE else error

    def close(self) -> None:
        """Close the socket. Idempotent. The peer sees a hang-up after every copy of it is closed."""
        self._socket.close()

    def hang_up(self) -> None:
        """Shut down the connection, which ends it in all copies and wakes blocked threads; then close. Idempotent."""
        with contextlib.suppress(OSError):  # the peer has hung up, or the channel is closed
            self._socket.shutdown(socket.SHUT_RDWR)
        self.close()


class FenceSignaler(Uncopyable):
    """The signaling end of a fence. If it is closed without a byte, the other end sees the end of the connection.

    A forked child closes its copy, so the exit of the process that owns it is seen.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, state: int) -> None:
        """Send the state and close. Only the first call has an effect."""
        with contextlib.suppress(OSError):  # closed already, or the other end is
            self._socket.send(bytes([state]), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        self.close()

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()


def open_fence_pair() -> tuple[FenceSignaler, int]:
    """Return both ends of a new fence: the signaler, and the fd on which it is waited for. The caller owns both.

    Raises:
        ResourceExhaustedTransient: If no fds are left.
    """
    with _fork_lock:
        try:
            signaler, waiter = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise ResourceExhaustedTransient(f"no descriptors for a fence (ulimit -n): {error.strerror}") from error
        signaler.shutdown(socket.SHUT_RD)  # nothing can be sent from the other end
        return FenceSignaler(_close_after_fork(signaler)), waiter.detach()


def peek_fence_byte(fd: int) -> bytes | None:
    """Return up to two bytes of a SEQPACKET socket's next message, and leave it there. Borrows `fd`. Does not block.

    Returns:
        None if there is no message; b"" at the end of the connection.

    Raises:
        InvalidArgument: If `fd` is not a connected AF_UNIX SEQPACKET socket.
    """
    try:
        sock = socket.socket(fileno=fd)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"descriptor {fd} is no socket: {error}") from None
    try:
        if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET:
            raise InvalidArgument(f"descriptor {fd} is a socket of another kind than AF_UNIX SEQPACKET")
        message = _peek(sock)
        return _peek(sock) if message == b"" else message
    except OSError as error:
        raise InvalidArgument(f"descriptor {fd} is a socket without a connection: {error}") from None
    finally:
        sock.detach()


def _peek(sock: socket.socket) -> bytes | None:
    """Return up to two bytes of the next message; b"" at the end, which is certain only if a second call returns it.

    The kernel looks for a message, and if there is none, for the end. A peer that sends and closes between these two
    steps leaves a message behind.
    """
    try:
        return sock.recv(2, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        return b""


def _require_no_other_file(path: Path) -> None:
    """Raise DeviceUnavailable if the path is anything else than a socket."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise DeviceUnavailable(f"{path} exists and is no socket; it is not replaced")


def _kind_of(sock: socket.socket) -> str:
    """Return the names of a socket's family and type, or their numbers."""
    family, kind = (getattr(value, "name", str(value)) for value in (sock.family, sock.type))
    return f"{family} {kind.removeprefix('SOCK_')}"


def _file_at(path: Path) -> tuple[int, int] | None:
    """Return which file is at a path: its device and inode; None if there is none."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def is_listening(path: Path) -> bool:
    """Return whether a process listens at `path`. It sees a connection that hangs up."""
    try:
        Channel.connect(path, NO_WAIT).close()
    except DeviceUnavailable:
        return False
    except MissedDeadlineTransient:  # its backlog is full
        return True
    return True


def _open_lock(path: str) -> int:
    """Return an fd of a lock file, which is created if there is none. The caller owns it.

    Raises:
        DeviceUnavailable: If it is a file of another user, who could keep the lock, or is no regular file.
    """
    try:
        fd = os.open(path, _LOCK_FLAGS, 0o600)
    except OSError as error:
        if not os.path.lexists(path):
            raise
        owner = os.lstat(path).st_uid
        raise DeviceUnavailable(
            f"the lock file {path}, of uid {owner}, cannot be opened: {error.strerror}. Remove it, or choose another "
            "path for the socket"
        ) from error
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_uid in (os.geteuid(), 0):
        return fd
    os.close(fd)
    kind = "a file" if stat.S_ISREG(found.st_mode) else "no regular file, and"
    raise DeviceUnavailable(
        f"the lock file {path} is {kind} of uid {found.st_uid}, but has to be one of uid {os.geteuid()}. "
        "Remove it, or choose another path for the socket"
    )


class Listener(Closable):
    """A listening socket at a path, and the lock file that protects the path. Close it, or use `with`. One thread.

    A process that has adopted the socket owns neither the path nor the lock.
    """

    def __init__(self, sock: socket.socket, path: Path | None = None, lock: io.FileIO | None = None) -> None:
        self._socket = sock
        self._buffer = bytearray(INLINE_BYTES + 1)
        self._path = path
        self._file = None if path is None else _file_at(path)
        self._lock = lock

    @classmethod
    def adopt(cls, fd: int) -> Self:
        """Return a listener over a socket that another process listens on, too. Takes ownership of `fd`.

        Raises:
            InvalidArgument: If it is no listening AF_UNIX SEQPACKET socket.
        """
        needed = "a listener needs a listening AF_UNIX SEQPACKET socket"
        with _fork_lock:
            try:
                sock = _close_after_fork(socket.socket(fileno=fd))
            except OSError as error:
                os.close(fd)
                raise InvalidArgument(f"{needed}: {error.strerror}") from None
        is_seqpacket = sock.family == socket.AF_UNIX and sock.type == socket.SOCK_SEQPACKET
        if not is_seqpacket or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            found = "does not listen" if is_seqpacket else f"is an {_kind_of(sock)} socket"
            sock.close()
            raise InvalidArgument(f"{needed}, and this one {found}")
        sock.setblocking(False)
        os.set_inheritable(sock.fileno(), False)
        return cls(sock)

    @classmethod
    def create(cls, path: Path, mode: int = 0o600) -> Self:
        """Listen at `path`, a socket with this mode. Replaces the socket of a driver that was killed.

        Raises:
            DeviceUnavailable: If another driver listens there, or the path is not a socket, or the lock file is not
                one of this user.
        """
        _require_no_other_file(path)  # before the lock file is created beside it
        with contextlib.ExitStack() as undo:
            with _fork_lock:
                lock = undo.enter_context(_close_after_fork(io.FileIO(_open_lock(f"{path}.lock"), "r+")))
                sock = undo.enter_context(_close_after_fork(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DeviceUnavailable(f"another driver already listens at {path}") from None
            _require_no_other_file(path)
            path.unlink(missing_ok=True)  # the socket of a driver that was killed
            sock.bind(os.fspath(path))
            path.chmod(mode)
            sock.listen(BACKLOG)
            sock.setblocking(False)
            undo.pop_all()
        return cls(sock, path, lock)

    def fileno(self) -> int:
        """Return the listening fd, which stays owned by this object."""
        return self._socket.fileno()

    @property
    def is_owner(self) -> bool:
        """Whether the path and the lock are this object's."""
        return self._lock is not None

    def refuse_fds(self) -> None:
        """Let the kernel refuse fds that clients send on connections from now on, where it can (Linux 6.16)."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)

    def path(self) -> Path | None:
        """Return the path at which the socket was made; None if it has none, such as an abstract one."""
        name = self._socket.getsockname()
        return Path(name) if isinstance(name, str) and name else None

    def fds(self) -> list[int]:
        """Return the fds of the socket and, if it is this object's, of the lock; they stay owned by this object."""
        return [part.fileno() for part in (self._socket, self._lock) if part is not None]

    def own(self, path: Path, lock_fd: int) -> None:
        """Own the path of an adopted socket, and its lock, which come from the process that listened there before.

        Takes ownership of `lock_fd`.
        """
        with _fork_lock:
            self._path, self._lock = path, _close_after_fork(io.FileIO(lock_fd, "r+"))
            self._file = _file_at(path)

    def give_up(self) -> None:
        """Close the socket, and leave the path and the lock to the process that has them now. Idempotent."""
        self._path = None
        self.close()

    def accept(self) -> Channel | None:
        """Return the next connection, or None if there is none. Does not block."""
        with _fork_lock:
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return None
            accepted.setblocking(False)
            return Channel(_close_after_fork(accepted), self._buffer)  # one buffer: the same thread receives

    def close(self) -> None:
        """Stop listening and remove the path, unless another socket has taken its place. Idempotent.

        The lock file stays: if it were removed, two drivers could lock two files of that name.
        """
        if self._socket.fileno() < 0:
            return
        if self._path is not None and _file_at(self._path) == self._file:
            self._path.unlink(missing_ok=True)
        self._socket.close()
        if self._lock is not None:
            self._lock.close()
