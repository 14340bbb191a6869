"""Accounts: whose clients a driver serves, the account that it runs under, and the uids of its workers.

A driver that serves several users runs under an account of its own, and each of its workers under a uid of its own: not
that of the client, who could send it signals and look into its memory, and not the driver's. Of all capabilities the
supervisor keeps CAP_SETUID and CAP_SETGID, which no other process of the driver has. They also let it send signals to
its workers: while it sends one it has the worker's effective uid.

The only module that changes uids.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

from nnfmq.base import settings
from nnfmq.base.channel import Channel
from nnfmq.base.paths import SYSTEM_DIRECTORY
from nnfmq.base.sandbox import kernel
from nnfmq.hal.errors import InvalidArgument

__all__ = [
    "ServedUsers",
    "UidPool",
    "as_owner",
    "become",
    "can_change_uids",
    "closed_part",
    "give_up_capabilities",
    "note_holder",
    "pass_capabilities",
    "take_account",
]

_SET_IDS = 1 << 6 | 1 << 7
"""CAP_SETGID and CAP_SETUID."""
_EVERYBODY = "*"
_log = logging.getLogger("nnfmq.accounts")


# ----------------------------------------------------------------------------------------------------------------------
# Whose clients a driver serves.


class ServedUsers(NamedTuple):
    """The users and groups whose clients are served, beside this process's account and root.

    Attributes:
        uids: The uids that are listed.
        gids: The gids whose members are.
        is_open: Whether all users are.
    """

    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()
    is_open: bool = False

    @classmethod
    def of_settings(cls) -> Self:
        """Return the users and groups of the settings.

        Raises:
            InvalidArgument: If an account or a group does not exist.
        """
        users, groups = settings.ALLOW_USERS, settings.ALLOW_GROUPS
        names = users.value()
        uids = [_number(users, name, _uid_of) for name in names if name != _EVERYBODY]
        gids = [_number(groups, name, _gid_of) for name in groups.value()]
        return cls(frozenset(uids), frozenset(gids), _EVERYBODY in names)

    @property
    def are_several(self) -> bool:
        """Whether anybody is served beside this process's account and root."""
        return self != ServedUsers()

    @property
    def socket_mode(self) -> int:
        """The mode of a socket for them: the driver decides by the kernel's record of who has connected."""
        return 0o666 if self.are_several else 0o600

    def refusal(self, channel: Channel) -> str:
        """Return why a connection's peer is not served, for that peer; empty if it is."""
        uid = channel.peer().uid
        if self.is_open or uid in self.uids or uid in (os.getuid(), 0):
            return ""
        if self.gids and not self.gids.isdisjoint(channel.peer_groups()):
            return ""
        if not self.are_several:
            return f"this driver serves uid {os.getuid()}, not {uid}"
        return (
            f"this driver does not serve uid {uid}: its administrator lists users with --allow-user "
            f"(${settings.ALLOW_USERS.variable}) and groups with --allow-group (${settings.ALLOW_GROUPS.variable})"
        )

    def export(self) -> None:
        """Set the lists for this process and those that it starts, as numbers."""
        names = [*([_EVERYBODY] if self.is_open else []), *map(str, sorted(self.uids))]
        settings.ALLOW_USERS.export(",".join(names))
        settings.ALLOW_GROUPS.export(",".join(map(str, sorted(self.gids))))


def _number(setting: settings.Setting[list[str]], name: str, find: Callable[[str], int]) -> int:
    if name.isascii() and name.isdecimal():
        return int(name)
    try:
        return find(name)
    except KeyError:
        origin = setting.effective().origin
        raise InvalidArgument(f"{origin} names {name!r}, which does not exist on this machine; correct it") from None


def _uid_of(name: str) -> int:
    import pwd  # few drivers need it

    return pwd.getpwnam(name).pw_uid


def _gid_of(name: str) -> int:
    import grp

    return grp.getgrnam(name).gr_gid


# ----------------------------------------------------------------------------------------------------------------------
# The account of the supervisor, and the capabilities that it keeps.


_keeps_capabilities: list[bool] = []  # of this process; not empty: it serves several users


def can_change_uids() -> bool:
    """Return whether this process has CAP_SETUID and CAP_SETGID."""
    return kernel.held_capabilities() & _SET_IDS == _SET_IDS


def take_account(*, makes_directory: bool = False) -> range | None:
    """Change to the account of the settings, and keep nothing of root but what gives workers uids of their own.

    Return the uids of workers; None if this driver serves one user, which the log says if the settings ask for more.
    Call it before the process starts threads and opens files. `makes_directory`: root creates /run/nnfmq for the
    account of a driver that serves several users.

    Raises:
        InvalidArgument: If the settings name an account that does not exist, or that this process cannot change to, or
            uids that belong to accounts.
    """
    uids, served, user = settings.WORKER_UIDS.value(), ServedUsers.of_settings(), settings.USER.value()
    if uids is not None:
        _check(uids, served)
        if os.getuid() == 0 and user is None:
            raise InvalidArgument(
                "a driver that serves several users does not run as root: name an account of its own with --user "
                f"(${settings.USER.variable})"
            )
    if user is not None:
        _change_account(user, _SET_IDS if uids is not None else 0, makes_directory and uids is not None)
    if uids is not None and can_change_uids():
        kernel.limit_capabilities(_SET_IDS)
        kernel.hide_memory()
        _keeps_capabilities.append(True)
        served.export()
        return uids
    if uids is not None or served.are_several:
        option = f"--worker-uids (${settings.WORKER_UIDS.variable})"
        lacking = option if uids is None else "CAP_SETUID and CAP_SETGID"
        _log.warning("this driver serves uid %d only: without %s its workers have no uids", os.getuid(), lacking)
        ServedUsers().export()
    return None


def _check(uids: range, served: ServedUsers) -> None:
    """Check that no uid of workers is that of anybody else. Raises InvalidArgument."""
    import pwd

    origin = settings.WORKER_UIDS.effective().origin
    for entry in pwd.getpwall():
        if entry.pw_uid in uids:
            raise InvalidArgument(
                f"{origin} has uid {entry.pw_uid}, which is {entry.pw_name}'s: choose uids that no account has"
            )
    if os.getuid() in uids or any(uid in uids for uid in served.uids):
        raise InvalidArgument(f"{origin} has uids of the driver or of its clients: choose uids that nobody has")


def _change_account(user: str, kept: int, makes_directory: bool) -> None:
    """Run as an account from now on, with the capabilities `kept` if this process is root's."""
    import pwd

    origin = settings.USER.effective().origin
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        raise InvalidArgument(f"{origin} names the account {user!r}, which does not exist; create it") from None
    if account.pw_uid == os.getuid():
        return
    if os.getuid() != 0:
        raise InvalidArgument(
            f"{origin} names the account {user!r}, but only root can change to it; start the driver as root or {user}"
        )
    groups = os.getgrouplist(user, account.pw_gid)
    if makes_directory and not SYSTEM_DIRECTORY.exists():
        SYSTEM_DIRECTORY.mkdir(mode=0o755)
        os.chown(SYSTEM_DIRECTORY, account.pw_uid, account.pw_gid)
    kernel.limit_bounding_set(kept)
    kernel.keep_capabilities_of_root()
    os.setgroups(groups)
    os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
    os.setresuid(account.pw_uid, account.pw_uid, account.pw_uid)
    kernel.limit_capabilities(kept)
    os.environ.update(HOME=account.pw_dir, USER=user, LOGNAME=user)


def give_up_capabilities() -> None:
    """Keep no capability in a child of a supervisor that serves several users. No effect in others. Raises OSError."""
    if _keeps_capabilities:
        kernel.drop_capabilities()
        kernel.show_memory()  # until it enters its sandbox, for which it writes to its folder of /proc
        _keeps_capabilities.clear()


def pass_capabilities() -> None:
    """Let the program that a child of a supervisor executes give workers uids, as the supervisor. Raises OSError."""
    if _keeps_capabilities:
        kernel.pass_capabilities(_SET_IDS)


def become(uid: int) -> None:
    """Run under a uid of workers, and a gid with the same number, without capabilities, in a child of the supervisor.

    Raises:
        OSError: If this process lacks the capabilities.
    """
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    give_up_capabilities()


def closed_part(path: str | os.PathLike[str]) -> Path | None:
    """Return the file, or the folder above it, that users without rights of their own cannot read; None if they can.

    Permission bits tell; access lists are not looked at.
    """
    found = Path(path).resolve()
    for folder in reversed(found.parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            return folder
    return None if found.stat().st_mode & stat.S_IROTH else found


def as_owner(uid: int | None, act: Callable[[], None]) -> None:
    """Call `act`, which needs the uid of a child: a signal to it, its scheduling, a file of its own.

    The child runs under `uid`, or will soon; None: as this process.

    Raises:
        PermissionError: If the child runs under another uid.
    """
    try:
        act()
    except PermissionError:
        if uid is None:
            raise
        own = os.geteuid()
        os.setresuid(-1, uid, -1)
        try:
            act()
        finally:
            os.setresuid(-1, own, -1)


# ----------------------------------------------------------------------------------------------------------------------
# The uids of workers.


class UidPool:
    """Gives each worker a uid that no process has. Used by one thread.

    A worker outlives a killed supervisor. So it holds a lock on a file for its uid, in `folder`, as long as it lives,
    and the next driver there does not give the uid to another worker. A compromised worker may give up the lock, but
    not change what the file says: which process has the uid.
    """

    def __init__(self, uids: Sequence[int], folder: Path) -> None:
        self.first, self.size = uids[0], len(uids)
        self._free = list(uids)
        self._folder = folder

    def take(self) -> tuple[int, int]:
        """Return a free uid and an fd of its lock, which the worker keeps open; the caller closes its own copy.

        Raises:
            OSError: If none is free, or the lock cannot be made.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for uid in list(self._free):
            self._free.remove(uid)
            fd = _lock(self._folder / str(uid))
            if fd is not None:
                return uid, fd
            self._free.append(uid)  # a worker of an earlier driver has it
        raise OSError(errno.EAGAIN, f"all uids of ${settings.WORKER_UIDS.variable} are in use")

    def release(self, uid: int) -> None:
        """Take back the uid of a worker that has exited, or was never started."""
        self._free.append(uid)  # last: it is long before another worker gets it


def _lock(path: Path) -> int | None:
    fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        pid, _, start = os.pread(fd, _HOLDER_BYTES_MAX, 0).partition(b" ")
        if not start or _start_of(pid) != start:
            return fd
    os.close(fd)
    return None


_HOLDER_BYTES_MAX = 64


def note_holder(lock_fd: int) -> None:
    """Write to the file of a uid that this process has it: a child that is about to change to the uid."""
    pid = b"%d" % os.getpid()
    try:
        with open(f"/proc/self/fd/{lock_fd}", "wb", buffering=0) as file:
            file.write(b"%b %b" % (pid, _start_of(pid)))
    except OSError as error:  # the disk is full
        _log.warning("only a lock says which uid of workers process %d has: %s", os.getpid(), error)


def _start_of(pid: bytes) -> bytes:
    """Return when a process was started, in ticks; empty if it has ended. Its first thread may end before it."""
    try:
        with open(b"/proc/%b/stat" % pid, "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
    except OSError:  # it has ended, or /proc is mounted so that others are not seen (hidepid)
        return b""
    has_exited = fields[0] in (b"Z", b"X") and int(fields[17]) <= 1  # its threads
    return b"" if has_exited else fields[19]
