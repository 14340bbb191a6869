"""Units of systemd for a driver: `nnfmq serve ... --print-unit socket`, and `service`.

The other options of the command become those of the unit's command line. A driver with an account or uids for workers
gets units of the system, any other one units of its user. `systemd-analyze verify` reads all of them in the tests.

systemd listens and passes the socket on: so clients wait while the driver is restarted, and its sockets need no place
in the manager's store of descriptors.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from nnfmq.base import settings
from nnfmq.base.paths import SOCKET_NAME, SYSTEM_DIRECTORY, models_socket
from nnfmq.hal.errors import InvalidArgument

__all__ = ["UNITS", "unit_text"]

UNITS = ("socket", "service")
_ACCOUNT = "nnfmq"

_SOCKET = """\
# {folder}/nnfmq.socket
[Unit]
Description=Socket of the nnfmq driver

[Socket]
{paths}
SocketMode={socket_mode}
DirectoryMode={directory_mode}

[Install]
WantedBy=sockets.target
"""

_SERVICE = """\
# {folder}/nnfmq.service
[Unit]
Description=nnfmq driver
Requires=nnfmq.socket
After=nnfmq.socket

[Service]
Type=notify
ExecStart={command}
# The driver starts its successor, which reads the whole configuration, and hands over to it, or goes on if that fails.
ExecReload={restart}
Restart=on-failure
# A supervisor whose loop has not turned for so long is ended, and started again.
WatchdogSec=30
# SIGTERM is for the supervisor, which lets its workers finish: another one would end them at once.
KillMode=mixed
# A worker that takes too much memory is killed alone.
OOMPolicy=continue
{account}
# Around the driver; the sandbox of its workers is inside, and much smaller.
NoNewPrivileges=yes
UMask=0077
LockPersonality=yes
RestrictAddressFamilies=AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self
SystemCallErrorNumber=EPERM
{files}
[Install]
WantedBy={target}
Also=nnfmq.socket
"""

_OF_THE_SYSTEM = """\
User={user}
RuntimeDirectory=nnfmq
# The socket is in it, and stays when the driver ends.
RuntimeDirectoryPreserve=yes
StateDirectory=nnfmq
CacheDirectory=nnfmq
Environment=XDG_STATE_HOME=/var/lib/nnfmq XDG_CACHE_HOME=/var/cache/nnfmq
"""
_OF_WORKERS = """\
# Uids for workers; none of them keeps a capability.
AmbientCapabilities=CAP_SETUID CAP_SETGID
"""
_FILES = """\
PrivateTmp=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHome=read-only
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectSystem=strict
"""


def unit_text(name: str, arguments: argparse.Namespace) -> str:
    """Return the unit `name` of UNITS for a driver with these arguments of `nnfmq serve`.

    Raises:
        InvalidArgument: If they are not for a driver that a service manager starts.
    """
    for option, is_given in (
        ("--replace", arguments.replace),
        ("--restart", arguments.restart),
        ("--exit-with", arguments.exit_with is not None),
    ):
        if is_given:
            raise InvalidArgument(f"{option} is not for a driver of a service manager: print the unit without it")
    user, uids = arguments.user or settings.USER.value(), arguments.worker_uids or settings.WORKER_UIDS.value()
    is_system = user is not None or uids is not None
    folder = "/etc/systemd/system" if is_system else "~/.config/systemd/user"
    if name == "socket":
        return _SOCKET.format(
            folder=folder,
            paths="\n".join(f"ListenSequentialPacket={path}" for path in _paths(arguments, is_system)),
            socket_mode="0666" if is_system else "0600",  # the driver decides whom it serves
            directory_mode="0755" if is_system else "0700",
        )
    account = _OF_THE_SYSTEM.format(user=user or _ACCOUNT) if is_system else ""
    capabilities = "CAP_SETUID CAP_SETGID" if uids is not None else ""
    return _SERVICE.format(
        folder=folder,
        command=" ".join(_command(arguments)),
        restart=" ".join(_restart(arguments, is_system)),
        account=account + (_OF_WORKERS if uids is not None else ""),
        files=f"CapabilityBoundingSet={capabilities}\n{_FILES}" if is_system else "",
        target="multi-user.target" if is_system else "default.target",
    )


def _path(arguments: argparse.Namespace, is_system: bool) -> str:
    """Return the path of the driver's socket, with specifiers of systemd; %t is the user's runtime directory."""
    path = arguments.socket.absolute() if arguments.socket else None
    if path is None:
        return str((SYSTEM_DIRECTORY if is_system else Path("%t/nnfmq")) / SOCKET_NAME)
    if is_system and path.parent != SYSTEM_DIRECTORY:
        raise InvalidArgument(
            f"a driver of the system listens in {SYSTEM_DIRECTORY}, not at {path}: leave out --socket"
        )
    return str(path).replace("%", "%%")


def _paths(arguments: argparse.Namespace, is_system: bool) -> Iterator[str]:
    """Yield the paths of all sockets, as `_path`."""
    path = _path(arguments, is_system)
    yield path
    if arguments.models is not None:
        yield str(models_socket(Path(path)))


def _program() -> list[str]:
    """Return the words that start `nnfmq`."""
    program = Path(sys.argv[0])
    return [str(program.absolute())] if program.name == "nnfmq" else [sys.executable, "-P", "-m", "nnfmq"]


def _command(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the words that start the driver, as systemd reads them."""
    yield from map(_quoted, [*_program(), "serve"])
    for option, values in {
        "--models": _absolute(arguments.models),
        "--devices": _absolute(arguments.devices),
        "--extensions": arguments.extensions,
        "--runtimes": arguments.runtimes,
        "--memory": arguments.memory,
        "--sandbox": arguments.sandbox,
        "--worker-start": arguments.worker_start,
        "--worker-uids": arguments.worker_uids,
        "--allow-user": arguments.allow_user,
        "--allow-group": arguments.allow_group,
        "--log-level": arguments.log_level,
        "--log-format": arguments.log_format,
        "--allow-device-status": [] if arguments.allow_device_status else None,
    }.items():
        if values is not None:
            yield option
            yield from map(_quoted, values if isinstance(values, list) else [str(values)])


def _restart(arguments: argparse.Namespace, is_system: bool) -> Iterator[str]:
    """Yield the words that restart the driver, as systemd reads them."""
    yield from map(_quoted, [*_program(), "serve", "--restart", "--socket"])
    yield _in_quotes(_path(arguments, is_system).replace("$", "$$"))


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()


def _quoted(word: str) -> str:
    """Return a word of a command line of systemd."""
    return _in_quotes(word.replace("%", "%%").replace("$", "$$"))


def _in_quotes(text: str) -> str:
    if re.fullmatch(r"[^\s\"'\\;]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
