"""DriverDiscovery: the drivers that listen in the runtime directory, or at given sockets."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from nnfmq import settings
from nnfmq.deadlines import remaining_s
from nnfmq.hal.errors import NnfmqError
from nnfmq.paths import SOCKET_NAME, default_socket, runtime_directory
from nnfmq.runtime.client import Client
from nnfmq.runtime.connect import connect
from nnfmq.runtime.devices.driver_access import DriverAccess

__all__ = ["DriverDiscovery", "listening_sockets"]

_SUFFIX = ".sock"
_EMBEDDED = "embedded"
_log = logging.getLogger("nnfmq.runtime")


def listening_sockets() -> list[Path]:
    """Return the paths of drivers' sockets: $NNFMQ_SOCKET, then those of the runtime directory, `nnfmq.sock` first.

    A driver may no longer listen there.
    """
    directory = runtime_directory()
    try:
        found = [directory / name for name in os.listdir(directory) if name.endswith(_SUFFIX)]
    except OSError:  # there is no directory: no driver was ever started
        found = []
    found.sort(key=lambda path: (path.name != SOCKET_NAME, path.name))
    return list(dict.fromkeys([*([default_socket()] if settings.SOCKET.value() else []), *found]))


class DriverDiscovery:
    """Finds drivers and keeps them. Not thread-safe. Whoever calls it closes the drivers that it returned.

    Args:
        sockets: The sockets of drivers; None = those of `listening_sockets`.
        embedded: Whether an embedded driver is one of them.
        timeout: Limit for a query of a driver, in seconds; None = no limit.
    """

    def __init__(self, sockets: Sequence[str | os.PathLike[str]] | None, embedded: bool, timeout: float | None) -> None:
        self._sockets = None if sockets is None else list(dict.fromkeys(map(Path, sockets)))
        self._found: dict[Path | None, DriverAccess] = {}
        self._complaints: dict[Path | None, str] = {}
        self._embedded = embedded
        self._timeout = timeout

    def new_drivers(self, deadline_ns: int | None) -> list[DriverAccess]:
        """Return the drivers that earlier calls did not return; blocks while it connects to all of them concurrently.

        A driver that cannot be reached, or whose replies are not valid, is left out and logged; it is tried again the
        next time.
        """
        paths: list[Path | None] = [*(listening_sockets() if self._sockets is None else self._sockets)]
        paths += [None] if self._embedded else []
        missing = [path for path in paths if path not in self._found]
        accesses = [DriverAccess(self._label(path), partial(_open, path), self._timeout) for path in missing]
        errors = _for_each(accesses, lambda access: access.client(deadline_ns))
        new = []
        for path, access, error in zip(missing, accesses, errors, strict=True):
            if error is None:
                self._found[path] = access
                new.append(access)
            else:
                access.close()
                self._complain(path, error)
        return new

    @staticmethod
    def _label(path: Path | None) -> str:
        return _EMBEDDED if path is None else path.name.removesuffix(_SUFFIX)

    def _complain(self, path: Path | None, error: BaseException) -> None:
        text = str(error)
        if self._complaints.get(path) != text:  # once, not at each call
            self._complaints[path] = text
            _log.warning("the driver at %s is left out: %s", path or "an embedded process", text)


def _open(path: Path | None, deadline_ns: int | None) -> Client:
    timeout = remaining_s(deadline_ns)
    return connect(path, embedded=path is None, timeout=timeout, recover=False)  # DriverAccess connects again


def _for_each(
    accesses: Sequence[DriverAccess], function: Callable[[DriverAccess], object]
) -> list[BaseException | None]:
    """Call `function` for all at the same time; return the error of each, or None."""
    errors: list[BaseException | None] = [None] * len(accesses)

    def call(index: int) -> None:
        try:
            function(accesses[index])
        except (NnfmqError, OSError) as error:
            errors[index] = error

    threads = [threading.Thread(target=call, args=[index], name="nnfmq-probe") for index in range(1, len(accesses))]
    for thread in threads:
        thread.start()
    if accesses:
        call(0)
    for thread in threads:
        thread.join()
    return errors
