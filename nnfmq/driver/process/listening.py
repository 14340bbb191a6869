"""The sockets at which a driver listens: new ones, those of the driver that it replaces, or the service manager's.

A driver that makes its socket owns the path, and a lock that keeps other drivers away. A socket of the service manager
stays the manager's, which listens before the driver starts and after it has ended: clients wait for the next driver
then, and nobody but the manager starts one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from nnfmq.base.channel import Listener, is_listening
from nnfmq.base.paths import (
    check_socket_directory,
    default_socket,
    is_socket_named,
    make_runtime_directory,
    models_socket,
    runtime_directory,
    system_socket,
)
from nnfmq.base.service_manager import take_passed_fds
from nnfmq.driver.process.hand_over import Predecessor
from nnfmq.hal.errors import DeviceUnavailable, InvalidArgument

__all__ = ["PassedSockets", "checked_path", "open_listeners", "take_passed_sockets"]

_PATH_BYTES_MAX = 107  # of sun_path
_REMEDY = "write ListenSequentialPacket=PATH into the .socket unit, and neither ListenStream= nor Accept=yes"


# ----------------------------------------------------------------------------------------------------------------------
# Those of the service manager.


class PassedSockets(NamedTuple):
    """The sockets that a service manager has passed.

    Attributes:
        path: Where the driver listens.
        listener: Its listener.
        models: That of its model repository; None: the driver makes one if it needs it.
    """

    path: Path
    listener: Listener
    models: Listener | None


def take_passed_sockets(stack: ExitStack, named: Path | None) -> PassedSockets | None:
    """Return the sockets that this process was started with; None if there are none. `stack` closes them.

    Raises:
        InvalidArgument: If they are not those of a driver with the socket `named`; None: with any.
    """
    found: dict[Path, Listener] = {}
    for fd in take_passed_fds():
        listener = stack.enter_context(_adopted(fd))
        found[_path_of(listener)] = listener
    if not found:
        return None
    path = min(found, key=lambda each: len(os.fsencode(each)))  # the repository's is longer
    passed = PassedSockets(path, found.pop(path), found.pop(models_socket(path), None))
    _check_passed(passed, list(found), named)
    return passed


def _adopted(fd: int) -> Listener:
    try:
        return Listener.adopt(fd)
    except InvalidArgument as error:
        raise InvalidArgument(f"the service manager passes descriptor {fd}: {error}; {_REMEDY}") from None


def _path_of(listener: Listener) -> Path:
    path = listener.path()
    if path is None:
        raise InvalidArgument(f"the service manager passes a socket that has no path; {_REMEDY}")
    return path


def _check_passed(passed: PassedSockets, others: list[Path], named: Path | None) -> None:
    if others:
        raise InvalidArgument(
            f"the service manager passes the sockets {passed.path} and {others[0]}; allowed beside the first is "
            f"{models_socket(passed.path)}, for models by name"
        )
    if named is not None and named.absolute() != passed.path:
        raise InvalidArgument(
            f"the service manager passes the socket {passed.path}, but --socket names {named}: leave out --socket, or "
            "change ListenSequentialPacket= in the .socket unit"
        )


# ----------------------------------------------------------------------------------------------------------------------
# All of them.


def open_listeners(
    stack: ExitStack,
    path: Path,
    has_models: bool,
    predecessor: Predecessor | None,
    passed: PassedSockets | None,
    mode: int,
) -> tuple[Listener, Listener | None]:
    """Return the listeners of the driver and of its model repository: the manager's, the predecessor's, or new ones.

    `stack` closes them; those of a predecessor have no path before `Predecessor.confirm`.

    Raises:
        DeviceUnavailable: If another driver listens at `path`, or the service manager in its place.
        InvalidArgument: If the service manager has a socket for models by name, and this driver has none.
    """
    if passed is not None:
        listener, named = passed.listener, passed.models
        if named is not None and not has_models:
            raise InvalidArgument(
                f"the service manager passes {models_socket(path)} for models by name, but this driver has none: name "
                "their directory with --models, or take the line out of the .socket unit"
            )
    elif predecessor is not None:
        listener, named = stack.enter_context(predecessor.listener), predecessor.models
        if named is not None:
            stack.enter_context(named)
        stack.enter_context(predecessor)  # first to be closed: with the locks
    elif is_listening(path):  # a service manager has no lock
        raise DeviceUnavailable(
            f"another driver already listens at {path}: clients can use that; --replace takes its place, and --socket "
            "names another path"
        )
    else:
        listener, named = stack.enter_context(Listener.create(path, mode)), None
    if has_models and named is None:
        named = stack.enter_context(Listener.create(models_socket(path), mode))
    elif named is None and models_socket(path).is_socket():
        # Of a driver that was killed: clients would wait for its repository. Another driver may listen there.
        with contextlib.suppress(DeviceUnavailable):
            Listener.create(models_socket(path)).close()
    return listener, named


def checked_path(path: Path | None, has_models: bool, *, is_system: bool) -> Path:
    """Return the path of the socket. Raises DeviceUnavailable if it is too long, or others could replace it."""
    if path is None:
        path = system_socket() if is_system and not is_socket_named() else default_socket()
        if path.parent == runtime_directory():
            with _remedied(path):
                make_runtime_directory()
    _check_length(path)
    if has_models:
        _check_length(models_socket(path))
    with _remedied(path):
        check_socket_directory(path)
    return path


@contextlib.contextmanager
def _remedied(path: Path) -> Iterator[None]:
    """Let an OSError of the directory of a driver's socket say what it is for, and what to do."""
    try:
        yield
    except OSError as error:
        raise DeviceUnavailable(
            f"the driver cannot listen at {path}: {error.filename or path.parent}: {error.strerror}: create the "
            "directory, or choose another one (`--socket`, $NNFMQ_SOCKET or $XDG_RUNTIME_DIR)"
        ) from error


def _check_length(path: Path) -> None:
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise DeviceUnavailable(f"the path of a driver's socket has at most {_PATH_BYTES_MAX} bytes; {path} is longer")
