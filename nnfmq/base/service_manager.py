"""The service manager, systemd or another one with its protocols: the sockets that it passes, and what it is told.

A manager that starts a service on demand listens itself, and passes its sockets as the descriptors from 3 on
(`sd_listen_fds(3)`). A service tells its state in datagrams to the socket of $NOTIFY_SOCKET (`sd_notify(3)`), and shows
in the same way that it still works, more often than every $WATCHDOG_USEC. The variables are removed from the
environment: they are for this process, and a child that had them would take other descriptors for sockets.

Both protocols are a few lines, so no library of systemd is needed. A message that cannot be sent at once is lost: a
driver does not wait for its manager.
"""

from __future__ import annotations

import os
import socket
from typing import NamedTuple, Self

from nnfmq.base.logs import rate_limited
from nnfmq.hal.errors import InvalidArgument

__all__ = ["ServiceManager", "take_passed_fds"]

_FIRST_FD = 3
_FDS_MAX = 1024
_log = rate_limited("nnfmq.supervisor")


def take_passed_fds() -> list[int]:
    """Return the descriptors that the service manager has passed to this process, which owns them; often none.

    They are close-on-exec from now on. Sockets that were passed to another process, its parent for instance, are left.

    Raises:
        InvalidArgument: If the variables are not valid, or a descriptor is not open.
    """
    pid, count = (_take(name) for name in ("LISTEN_PID", "LISTEN_FDS"))
    _take("LISTEN_FDNAMES")
    if pid is None or count is None or pid != str(os.getpid()):
        return []
    if not count.isdecimal() or not 1 <= int(count) <= _FDS_MAX:
        raise InvalidArgument(f"$LISTEN_FDS is {count!r}; allowed: 1 to {_FDS_MAX}; only a service manager sets it")
    fds = list(range(_FIRST_FD, _FIRST_FD + int(count)))
    for fd in fds:
        try:
            os.set_inheritable(fd, False)
        except OSError:
            raise InvalidArgument(f"$LISTEN_FDS is {count}, but descriptor {fd} is not open") from None
    return fds


def _take(name: str) -> str | None:
    return os.environ.pop(name, None)


class ServiceManager(NamedTuple):
    """Messages about this process to the service manager. None of the calls blocks or raises.

    Attributes:
        address: The address of its socket; empty: there is no manager that wants to know.
        watchdog_us: It ends a process that has not shown for so long that it works; 0: it does not look.
    """

    address: str = ""
    watchdog_us: int = 0

    @classmethod
    def take(cls) -> Self:
        """Return the manager that has started this process."""
        address, pid, watchdog = (_take(name) for name in ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"))
        if not address:
            return cls()
        is_watched = pid in (None, str(os.getpid())) and watchdog is not None and watchdog.isdecimal()
        return cls(address, int(watchdog or 0) if is_watched else 0)

    def tell(self, **values: str | int) -> None:
        """Send variables of `sd_notify(3)`, such as READY=1."""
        if not self.address:
            return
        message = "".join(f"{name}={' '.join(str(value).split())}\n" for name, value in values.items())
        is_abstract = self.address.startswith("@")
        address = f"\0{self.address[1:]}" if is_abstract else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.sendto(message.encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL, address)
        except OSError as error:
            _log.warning("the service manager at %s is not told: %s", self.address, error.strerror or error)
