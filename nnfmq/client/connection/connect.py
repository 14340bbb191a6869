"""connect: reach a driver that listens, or start an embedded one.

This module imports what it needs to start an embedded driver. What a client needs is imported while the driver starts.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from nnfmq.base import settings
from nnfmq.base.channel import Channel
from nnfmq.base.deadlines import deadline_after, has_passed, remaining_s
from nnfmq.base.paths import accounts_of, check_socket_directory, client_socket, is_socket_named, models_socket
from nnfmq.client.connection.defaults import DEFAULT_TIMEOUT_S, INTERFACE, level_of
from nnfmq.client.connection.open_connections import CLOSED, NotAccepted
from nnfmq.hal.errors import BadState, DeviceUnavailable, InvalidArgument

if TYPE_CHECKING:
    import subprocess

    from nnfmq.client.connection.client import Client, ConnectAgain, IsClosed
    from nnfmq.client.connection.connection import Connection
    from nnfmq.client.connection.prepare_arguments import ClassArgument
    from nnfmq.client.named.models import ConnectRepository
    from nnfmq.hal.client_class import ClientClass

_RETRY_S = 0.02  # between two attempts to reach a driver that does not listen yet
_ENDED_MAX = 3  # attempts; what closes each connection without reading is no driver that ends
_Connected = TypeVar("_Connected")


def connect(
    path: str | os.PathLike[str] | None = None,
    *,
    embedded: bool | None = None,
    timeout: float | None = DEFAULT_TIMEOUT_S,
    server_uid: int | None = None,
    wait: bool = False,
    wait_ready: bool = False,
    interface: str = INTERFACE,
    recover: bool = True,
    client_class: ClassArgument | None = None,
    monitor: bool = False,
) -> Client:
    """Connect to a driver and return a client, which the caller closes; blocks.

    In a task of asyncio write `async with nnfmq.connect() as client`: other tasks run while the driver starts.

    Without arguments: to the driver that listens at `$NNFMQ_SOCKET`, or in the runtime directory, or at
    `/run/nnfmq/nnfmq.sock`; if there is none, to an embedded driver, a private process that exits with this one. A
    driver must run as this user or as root, one in `/run/nnfmq` as the owner of that directory.

    An embedded driver still starts when this returns, so that an application can load its model meanwhile. The first
    call waits for it, and raises what `wait_ready` would raise. Where an event loop runs, the same holds for a driver
    that listens, and, with `wait`, for one that does not listen yet.

    Args:
        path: The socket of a driver.
        embedded: True = start an embedded driver without looking for another one; False = never start one.
        timeout: In seconds, also of an embedded driver's start; None = no limit.
        server_uid: The driver may also run as this user.
        wait: Whether to wait for a driver that does not listen yet; none is started then (DEV-11).
        wait_ready: Whether to wait until an embedded driver has started. No effect where an event loop runs:
            `async with` waits.
        interface: The HAL version of this connection: "HIDL 1.0" to "HIDL 1.3", "AIDL v1" to "AIDL v4". An older one
            has fewer calls, and rejects newer models (docs/reference/hal-versions.md).
        recover: Whether the client connects again after the driver has died, and prepares its models again (LIFE-6);
            see docs/how-to/handle-errors.md. False = all calls raise DeadObject at once, and the CPU executes nothing
            in place of the driver.
        client_class: "interactive", "normal" or "batch": which of several clients of a driver goes first; by default
            $NNFMQ_CLIENT_CLASS, or what the driver decides (docs/how-to/run-a-driver.md).
        monitor: Whether the client only looks at the driver: its devices, its statistics, its traces. It gets a place
            that the driver keeps for that when all others are taken, and can prepare no model.

    Raises:
        DeviceUnavailable: If no driver can be reached, or it runs as another user, or it exits while it starts. One
            that ends before it has read the client's first message is no error: the client connects to its successor
            and, if it recovers, waits for that within `timeout`, or 10 s.
        GeneralFailure: If the driver rejects this client, for example because its configuration is not valid, or it
            does not give the class.
        MissedDeadlineTransient: If the timeout passes.
        InvalidArgument: If the arguments contradict each other, or the interface version or the class is unknown.
    """
    deadline_ns = deadline_after(timeout)
    level_of(interface)  # check it before a driver is started
    if settings.TRACE.value():
        from nnfmq.client.connection import trace  # few processes are traced

        trace.start()
    if embedded and (path is not None or wait):
        raise InvalidArgument("a driver is either listening at `path`, now or soon (`wait`), or embedded, not both")
    options = _Options(interface, recover, server_uid, _class_of(client_class), monitor)
    if embedded:
        return _connect_embedded(deadline_ns, options, wait_ready=wait_ready)
    socket_path = client_socket() if path is None else Path(path)
    if wait and _has_event_loop():
        from nnfmq.client.connection.late_client import LateClient  # few applications

        return LateClient(partial(_connect_when_listening, socket_path, options), deadline_ns)
    if wait:
        return _following(_connect_when_listening(socket_path, options, deadline_ns))
    may_embed = path is None and embedded is None
    try:
        return _following(_connect_or_wait(socket_path, options, deadline_ns, waits=recover and not may_embed))
    except DeviceUnavailable as error:
        if not may_embed:
            raise _with_remedy(error, socket_path, is_default=path is None) from error
        if is_socket_named():
            _check_directory(socket_path, server_uid)  # an error in the configuration must not go unnoticed
        client = _connect_embedded(deadline_ns, options, wait_ready=wait_ready)
        _log_start(error)
        return client


def _class_of(argument: ClassArgument | None) -> ClientClass | None:
    """Return the class of the argument, or of the setting; None = the driver decides."""
    chosen = settings.CLIENT_CLASS.value() if argument is None else argument
    if chosen is None:
        return None
    from nnfmq.client.connection.prepare_arguments import to_client_class  # few applications choose one

    return to_client_class(chosen)


def _with_remedy(error: DeviceUnavailable, path: Path, *, is_default: bool) -> DeviceUnavailable:
    """Return the error, with what to do if nothing listens at `path`."""
    if isinstance(error.__cause__, ConnectionRefusedError) and not path.is_socket():
        return DeviceUnavailable(f"no driver listens at {path}, which is no socket: give the one of `nnfmq serve`")
    if isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError):
        option = "" if is_default else f" --socket {path}"
        return DeviceUnavailable(f"{error}: start one with `nnfmq serve{option}`")
    return error


def _log_start(error: DeviceUnavailable) -> None:
    import logging  # not before the driver has been started

    logging.getLogger("nnfmq.client").info("started an embedded driver: %s", error)


class _Options(NamedTuple):
    """The arguments that all attempts to connect have in common; see `connect`."""

    interface: str = INTERFACE
    recover: bool = False
    server_uid: int | None = None
    client_class: ClientClass | None = None
    is_monitor: bool = False
    variables: Mapping[str, str] = MappingProxyType({})
    """Of an embedded driver's environment."""


def _check_directory(path: Path, server_uid: int | None) -> None:
    """Raise DeviceUnavailable if another user could replace the socket. No effect while its directory is missing."""
    try:
        check_socket_directory(path, _trusted(path, server_uid))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise DeviceUnavailable(f"the directory of {path} cannot be examined: {error.strerror}") from error


def _connect_to(path: Path, options: _Options, deadline_ns: int | None) -> Client:
    connection = _start_connection(_open_channel(path, options.server_uid, deadline_ns), options, deadline_ns)
    with ExitStack() as undo:
        undo.callback(connection.close)
        again = partial(_connect_to_successor, path, options)
        repository = partial(_connect_repository, path, options.server_uid)
        client = _new_client(connection, None, again, options, repository)  # while the driver starts a worker
        connection.watch()
        if not _has_event_loop():
            connection.wait_until_ready(deadline_ns)
        undo.pop_all()
    return client


def _connect_or_wait(
    path: Path, options: _Options, deadline_ns: int | None, is_closed: IsClosed | None = None, *, waits: bool
) -> Client:
    """Connect to the driver that listens; if it ends before it accepts this client, to its successor.

    `waits`: for a successor that does not listen yet, until the deadline or for 10 s. One that has ended has left the
    socket to its service manager or its successor, or another one is about to start: nobody knows which.
    """
    limit_ns = deadline_after(DEFAULT_TIMEOUT_S) if deadline_ns is None else deadline_ns
    ended = 0

    def may_follow(error: DeviceUnavailable) -> bool:
        nonlocal ended
        is_ending = isinstance(error, NotAccepted)
        ended += is_ending
        return (is_ending or (waits and ended > 0)) and ended < _ENDED_MAX and not has_passed(limit_ns)

    return _repeatedly(partial(_connect_to, path, options, deadline_ns), deadline_ns, is_closed, may_follow)


def _following(client: Client) -> Client:
    """Return a client, which moves when its driver is replaced."""
    client.follow_driver()
    return client


def _connect_when_listening(
    path: Path, options: _Options, deadline_ns: int | None, is_closed: IsClosed | None = None, waits: bool = True
) -> Client:
    """Connect as soon as a driver listens. Raises the error of the last attempt when the deadline passes.

    Unless it `waits`, there is one attempt.
    """
    return _repeatedly(partial(_connect_to, path, options, deadline_ns), deadline_ns, is_closed, lambda _error: waits)


def _repeatedly(
    attempt: Callable[[], _Connected],
    deadline_ns: int | None,
    is_closed: IsClosed | None,
    goes_on: Callable[[DeviceUnavailable], bool],
) -> _Connected:
    """Return the result of an attempt to connect; after an error again, if `goes_on(error)` and until the deadline.

    Raises BadState when `is_closed()`, asked every 20 ms: a lock could be held by what a signal interrupts.
    """
    while True:
        try:
            return attempt()
        except DeviceUnavailable as error:
            if not goes_on(error) or has_passed(deadline_ns):
                raise
        left_s = remaining_s(deadline_ns)
        time.sleep(_RETRY_S if left_s is None else min(_RETRY_S, left_s))
        if is_closed is not None and is_closed():
            raise BadState(CLOSED)


def _start_connection(channel: Channel, options: _Options, deadline_ns: int | None) -> Connection:
    """Say hello over `channel`, and return the connection, which owns it. The driver may still start."""
    channel.enlarge_descriptor_table()
    from nnfmq.client.connection.connection import Connection  # while the driver starts

    return Connection.start(channel, deadline_ns, options.interface, options.client_class, options.is_monitor)


def _new_client(
    connection: Connection,
    process: subprocess.Popen[bytes] | None,
    again: ConnectAgain,
    options: _Options,
    repository: ConnectRepository | None = None,
) -> Client:
    from nnfmq.client.connection.client import Client  # while the driver starts
    from nnfmq.client.connection.client_compilation import ClientCompilation

    compilation = ClientCompilation(connect_cpu_driver)
    return Client(connection, process, again, compilation, repository, recovers=options.recover)


def _has_event_loop() -> bool:
    """Return whether an event loop of asyncio runs in this thread."""
    asyncio = sys.modules.get("asyncio")  # it runs none if it is not imported
    try:
        return asyncio is not None and asyncio.get_running_loop() is not None
    except RuntimeError:
        return False


def _trusted(path: Path, server_uid: int | None) -> tuple[int, ...]:
    """Return the uids of the accounts of which a driver at `path` is trusted, beside this user's and root's."""
    return (*accounts_of(path), *(() if server_uid is None else (server_uid,)))


def _open_channel(path: Path, server_uid: int | None, deadline_ns: int | None) -> Channel:
    _check_directory(path, server_uid)
    channel = Channel.connect(path, deadline_ns)
    uid = channel.peer().uid
    if uid not in {os.getuid(), 0, *_trusted(path, server_uid)}:
        channel.close()
        raise DeviceUnavailable(f"the driver at {path} runs as uid {uid}, not as {os.getuid()} or root; see server_uid")
    return channel


def _connect_repository(
    path: Path, server_uid: int | None, deadline_ns: int | None, is_closed: IsClosed, has_listened: bool
) -> Channel:
    """Connect to the model repository of the driver at `path`; blocks while it is started again, until `is_closed()`.

    If it does not listen, but there is a socket, or `has_listened` is True, it has died.
    """
    socket_path = models_socket(path)

    def has_died(error: DeviceUnavailable) -> bool:
        if has_listened or socket_path.exists():
            return True
        text = f"the driver at {path} has no model repository: start it with `nnfmq serve --models DIR`"
        raise DeviceUnavailable(text) from error

    return _repeatedly(partial(_open_channel, socket_path, server_uid, deadline_ns), deadline_ns, is_closed, has_died)


def _connect_to_successor(path: Path, options: _Options, deadline_ns: int | None, is_closed: IsClosed | None) -> Client:
    """Connect in place of a client's earlier connection; `is_closed` is None if it does not wait for a driver."""
    if options.recover and is_closed is not None:
        return _connect_when_listening(path, options, deadline_ns, is_closed)
    return _connect_or_wait(path, options, deadline_ns, is_closed, waits=False)


def connect_cpu_driver(deadline_ns: int | None) -> Client:
    """Start an embedded driver with the packaged devices, whichever the settings name; return its client.

    It hosts no runtime. The caller closes it. Blocks as `connect`.
    """
    packaged = Path(__file__).parents[2] / "driver" / "devices" / "devices.toml"
    variables = {settings.DEVICES.variable: str(packaged), settings.RUNTIMES.variable: ""}
    return _connect_embedded(deadline_ns, _Options(variables=variables), wait_ready=False)


def _connect_embedded(deadline_ns: int | None, options: _Options, *, wait_ready: bool) -> Client:
    from nnfmq.client.connection.embedded import end_embedded_driver, start_embedded_driver  # imports subprocess

    channel, process = start_embedded_driver(options.variables)
    with ExitStack() as undo:
        undo.callback(process.wait)
        undo.callback(process.kill)
        undo.callback(channel.close)
        connection = _start_connection(channel, options, deadline_ns)
        undo.callback(connection.close)
        connection.end_process = partial(end_embedded_driver, process)
        client = _new_client(connection, process, partial(_replace_embedded, options), options)
        connection.watch(process.pid)
        if wait_ready and not _has_event_loop():
            connection.wait_until_ready(deadline_ns)
        undo.pop_all()
    return client


def _replace_embedded(options: _Options, deadline_ns: int | None, _is_closed: IsClosed | None) -> Client:
    return _connect_embedded(deadline_ns, options, wait_ready=True)
