"""The kernel's restrictions of a process, and the calls that request them. The only module that requests them.

Every function acts on the calling thread and the threads and processes that it starts later, and nothing that it does
can be reversed. A process therefore enters its sandbox before it starts threads.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable
from contextlib import suppress
from enum import IntFlag
from typing import NamedTuple

from nnfmq.base.sandbox.filter_program import KILL, MACHINES

__all__ = [
    "PathAccess",
    "PathRule",
    "drop_capabilities",
    "forbid_new_privileges",
    "held_capabilities",
    "hide_memory",
    "install_filter",
    "keep_capabilities_of_root",
    "landlock_version",
    "limit_bounding_set",
    "limit_capabilities",
    "path_rule",
    "restrict_paths",
    "show_memory",
    "supports_filter",
]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 4, 8, 24, 38, 47
_AMBIENT_RAISE, _AMBIENT_CLEAR_ALL = 2, 4
_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITIES_MAX = 64


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _prctl(what: str, option: int, *arguments: int) -> None:
    _check(_libc.prctl(option, *(*arguments, 0, 0, 0, 0)[:4]), what)


def forbid_new_privileges() -> None:
    """Let no program that this process executes have more privileges than it has. Raises OSError."""
    _prctl("no-new-privileges", _PR_SET_NO_NEW_PRIVS, 1)


def hide_memory() -> None:
    """Let no process of the same user look into this one: no ptrace(2), no core dump; /proc/PID belongs to root.

    Raises:
        OSError: If the kernel refuses.
    """
    _prctl("not dumpable", _PR_SET_DUMPABLE, 0)


def show_memory() -> None:
    """Let this process own its folder of /proc again, after a change of its uid. Raises OSError."""
    _prctl("dumpable", _PR_SET_DUMPABLE, 1)


def held_capabilities() -> int:
    """Return the capabilities that this process may use, as bits; 0 if /proc does not tell."""
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as lines:
        for line in lines:
            if line.startswith("CapPrm:"):
                return int(line.split()[1], 16)
    return 0


def keep_capabilities_of_root() -> None:
    """Let the next change from uid 0 to another uid leave the permitted capabilities. Raises OSError."""
    _prctl("keep capabilities", _PR_SET_KEEPCAPS, 1)


def limit_bounding_set(kept: int) -> None:
    """Let no program that this process starts have other capabilities than `kept`, as bits; for a process of root's."""
    for number in range(_CAPABILITIES_MAX):
        if not kept >> number & 1:
            _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)  # it fails for numbers that the kernel does not have


def limit_capabilities(kept: int) -> None:
    """Give up all capabilities but `kept`, as bits; programs that this process starts get none.

    Raises:
        OSError: If this process does not have them.
    """
    _clear_ambient()
    low, high = kept & 0xFFFFFFFF, kept >> 32
    _set_capabilities(struct.pack("=6I", low, low, 0, high, high, 0))


def pass_capabilities(kept: int) -> None:
    """Let programs that this process starts have the capabilities `kept`, as bits, which it has itself.

    Raises:
        OSError: If it does not have them.
    """
    low, high = kept & 0xFFFFFFFF, kept >> 32
    _set_capabilities(struct.pack("=6I", low, low, low, high, high, high))
    for number in range(kept.bit_length()):
        if kept >> number & 1:
            _prctl("ambient capabilities", _PR_CAP_AMBIENT, _AMBIENT_RAISE, number)


def drop_capabilities() -> None:
    """Give up all capabilities, also those that a program with set-uid would have. Raises OSError."""
    for number in range(_CAPABILITIES_MAX):
        if _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) < 0:
            break  # EINVAL: there are no more; EPERM: not root, and no-new-privileges keeps them from returning
    _clear_ambient()
    _set_capabilities(bytes(24))


def _clear_ambient() -> None:
    with suppress(OSError):  # Linux 4.3
        _prctl("ambient capabilities", _PR_CAP_AMBIENT, _AMBIENT_CLEAR_ALL)


def _set_capabilities(data: bytes) -> None:
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc.syscall(_CAPSET[platform.machine()], header, data), "capset(2)")


# ----------------------------------------------------------------------------------------------------------------------
# Landlock: which files a process may open, and what else outside of it it may reach (landlock(7)).


class PathAccess(IntFlag):
    """Rights of Landlock, LANDLOCK_ACCESS_FS_*."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    REFER = 1 << 13
    TRUNCATE = 1 << 14
    IOCTL_DEV = 1 << 15


class PathRule(NamedTuple):
    """A path, and what a process may do with what is below it."""

    path: bytes
    access: int


_OF_FILES = (
    PathAccess.EXECUTE | PathAccess.WRITE_FILE | PathAccess.READ_FILE | PathAccess.TRUNCATE | PathAccess.IOCTL_DEV
)
_RIGHTS_BY_VERSION = {1: 13, 2: 14, 3: 15, 5: 16}  # version → number of the rights that it has
_PORTS, _PORTS_SINCE = 0b11, 4  # TCP: bind and connect
_SCOPES, _SCOPES_SINCE = 0b11, 6  # abstract unix sockets, and signals
_QUERY_VERSION = 1
_PATH_BENEATH = 1


def landlock_version() -> int:
    """Return the version of Landlock's interface; 0 if the kernel has none, or it is switched off."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, 0, _QUERY_VERSION)))


def path_rule(path: str, access: PathAccess) -> PathRule:
    """Return the rule for an existing path, without the rights that only folders have if it is none."""
    return PathRule(os.fsencode(path), int(access if os.path.isdir(path) else access & _OF_FILES))


def restrict_paths(rules: Iterable[PathRule]) -> None:
    """Let this process open nothing but what is below the paths of `rules`, with their rights.

    Since version 4 it reaches no TCP port, since version 6 no abstract unix socket and no process outside by a signal.
    Paths that do not exist any more are left out.

    Raises:
        OSError: If the kernel has no Landlock, or refuses.
    """
    version = landlock_version()
    handled = (1 << max((bits for since, bits in _RIGHTS_BY_VERSION.items() if since <= version), default=0)) - 1
    ports, scopes = _PORTS * (version >= _PORTS_SINCE), _SCOPES * (version >= _SCOPES_SINCE)
    size = 8 * (1 + (version >= _PORTS_SINCE) + (version >= _SCOPES_SINCE))
    attributes = struct.pack("=3Q", handled, ports, scopes)
    ruleset = _check(_libc.syscall(_CREATE_RULESET, attributes, size, 0), "Landlock")
    try:
        for path, access in rules:
            _add_rule(ruleset, path, access & handled)
        _check(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "Landlock")
    finally:
        os.close(ruleset)


def _add_rule(ruleset: int, path: bytes, access: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
            return
        raise
    try:
        rule = struct.pack("=Qi", access, fd)
        _check(_libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0), f"Landlock: {path!r}")
    finally:
        os.close(fd)


# ----------------------------------------------------------------------------------------------------------------------
# The filter of system calls (seccomp(2)).


_SET_MODE_FILTER, _GET_ACTION_AVAIL = 1, 2
_SPEC_ALLOW = 4  # without it kernels before 5.16 switch off speculation for the process, which makes kernels slower


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def supports_filter() -> bool:
    """Return whether the kernel can filter system calls and end a process by it, and this module knows the machine."""
    machine = platform.machine()
    if machine not in MACHINES:
        return False
    action = ctypes.c_uint32(KILL)
    return bool(_libc.syscall(_SECCOMP[machine], _GET_ACTION_AVAIL, 0, ctypes.byref(action)) == 0)


def install_filter(program: bytes) -> None:
    """Let the kernel run `program`, an array of struct sock_filter, for each system call. Borrows it.

    Call `forbid_new_privileges` before.

    Raises:
        OSError: If the kernel refuses.
    """
    data = _Program(len(program) // 8, program)
    number = _SECCOMP[platform.machine()]
    _check(_libc.syscall(number, _SET_MODE_FILTER, _SPEC_ALLOW, ctypes.byref(data)), "seccomp(2)")
