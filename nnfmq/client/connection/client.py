"""Client: a connection to a driver and its devices; if it recovers, to the driver's successor after its death.

A client notices at a call that its driver has died. One thread then connects to the driver that listens
at the same path, or starts another embedded one; other threads wait for it. A device whose description has changed,
except in its status, is unavailable to this client from then on (LIFE-6).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, Self, TypeAlias, TypeVar, Unpack

from msgspec import Struct

from nnfmq.base.deadlines import deadline_after, has_passed, remaining_s
from nnfmq.base.memory import Memory
from nnfmq.base.ownership import Closable
from nnfmq.base.verbose_log import vlog
from nnfmq.client.connection.connection import Connection
from nnfmq.client.connection.defaults import DEFAULT_TIMEOUT_S
from nnfmq.client.connection.device import Device
from nnfmq.client.connection.garbage import weak_call
from nnfmq.client.connection.hosted_choice import FileOptions, GivenModel, Hosting
from nnfmq.client.connection.open_connections import CLOSED, DriverEnding, NotAccepted
from nnfmq.client.connection.prepare_arguments import (
    ClassArgument,
    ModelArgument,
    PrepareOptions,
    to_client_class,
    to_member,
    with_time_left,
)
from nnfmq.client.connection.recovery import DriverRecovery, RecoveryCounts
from nnfmq.client.model.handle import ModelHandle
from nnfmq.client.waiting import SingleAttempt
from nnfmq.hal.capabilities import MAX_NUMBER_OF_CACHE_FILES
from nnfmq.hal.errors import (
    BadState,
    DeadObject,
    DeviceUnavailable,
    GeneralFailure,
    InvalidArgument,
    NnfmqError,
)
from nnfmq.hal.extensions import is_extension_name
from nnfmq.hal.hosted import is_runtime_name
from nnfmq.hal.summaries import nearest
from nnfmq.hal.types import DeviceStatus
from nnfmq.serialize import messages
from nnfmq.serialize.messages import DeviceInfo

if TYPE_CHECKING:
    import subprocess

    from nnfmq.base.channel import Channel
    from nnfmq.client.model.compiled_model import CompiledModel
    from nnfmq.client.named.models import ConnectRepository, NamedModels, ServedModel
    from nnfmq.hal.client_class import ClientClass
    from nnfmq.hal.preparation import DeviceChoice
    from nnfmq.importers.file_format import ModelSource, SourceArgument
    from nnfmq.importers.loaded_model import LoadedModel
    from nnfmq.observe.driver_statistics import DriverStatistics
    from nnfmq.serialize.repository_protocol import ModelEntry

__all__ = [
    "Client",
    "Compilation",
    "is_same_device",
    "valid_devices",
]


# ----------------------------------------------------------------------------------------------------------------------
# Validation of the driver's device list (DEV-10).
#
# The driver is not trusted: a device with an invalid description is left out.


def valid_devices(devices: Sequence[DeviceInfo]) -> list[DeviceInfo]:
    """Return the devices with a valid description, and log the others (DEV-10)."""
    found = []
    for info in devices:
        problem = next(_problems(info), None)
        if problem is None:
            vlog("manager", "found device %s", info.summary())
            found.append(info)
        else:
            _log.warning("device %r of the driver is left out: %s", info.name, problem)
    return found


def _problems(info: DeviceInfo) -> Iterator[str]:
    if not info.version:
        yield "its version string is empty (DEV-4)"
    if not info.feature_level:
        yield "its feature level is 0, the lowest is 1"
    for count in (info.model_cache_files, info.data_cache_files):
        if count > MAX_NUMBER_OF_CACHE_FILES:
            yield f"it wants {count} cache files of a kind, {MAX_NUMBER_OF_CACHE_FILES} are allowed (DEV-6)"
    for extension in info.extensions:
        types = [element.type for element in extension.operand_types]
        if not is_extension_name(extension.name):
            yield f"no extension is called {extension.name!r} (EXT-1)"
        if len(set(types)) != len(types) or not all(element.byte_size for element in extension.operand_types):
            yield f"extension {extension.name} has a type twice, or one of no bytes (EXT-1)"


# ----------------------------------------------------------------------------------------------------------------------
# Client: a connection to a driver and its devices; if it recovers, to the driver's successor after its death.


IsClosed: TypeAlias = Callable[[], bool]
"""Returns whether the client is closed, which ends a wait for a driver."""
ConnectAgain: TypeAlias = "Callable[[int | None, IsClosed | None], Client]"
"""Connects to the successor of a driver, before a deadline; waits until it listens, unless None."""
StatusArgument: TypeAlias = DeviceStatus | Literal["available", "busy", "offline"]
"""A status, or its name."""
_MOVE_S = 10.0  # for preparing a move; then the client leaves a driver that was replaced in any case
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.02, 0.5  # between attempts to connect to its successor
_ONLY = 0  # the key of a dict of one object, which threads create at most once
ResultT = TypeVar("ResultT")
_log = logging.getLogger("nnfmq.client")


class Compilation(Protocol):
    """Prepares models on the devices that suit them, as `ClientCompilation`."""

    def prepare(
        self, client: Client, infos: Sequence[DeviceInfo], given: GivenModel, options: PrepareOptions
    ) -> CompiledModel:
        """Return the prepared model; blocks."""
        ...

    def hosting(self, client: Client, infos: Sequence[DeviceInfo]) -> Hosting:
        """Return the devices that host runtimes."""
        ...

    def close(self) -> None:
        """End the processes that were started for it. Idempotent."""
        ...


class _NextDriver(Struct, eq=False):
    """A driver that has replaced a client's: a client of it, and its devices once it has prepared the models."""

    client: Client
    devices: dict[str, DeviceInfo] | None = None


class Client(Closable):
    """A connection to a driver. Close it, or use `with`; the models and bursts made through it are closed with it.

    Thread-safe. Once it is closed, all calls raise BadState. When the driver has died, a call connects to the next one
    and is repeated once, and models are prepared again. It waits for a driver until its timeout passes, 10 s if it has
    none. A client that was made with `connect(recover=False)` raises DeadObject immediately instead.
    """

    def __init__(
        self,
        connection: Connection,
        process: subprocess.Popen[bytes] | None,
        connect_again: ConnectAgain | None = None,
        compilation: Compilation | None = None,
        connect_repository: ConnectRepository | None = None,
        *,
        recovers: bool = False,
    ) -> None:
        self._connection = connection
        connection.moves = recovers
        self._left: list[Connection] = []  # to drivers that asked this client to leave, while calls are in progress
        self._process = process
        self._recovers = recovers
        self._connect_again = connect_again
        self._attempt: SingleAttempt[Connection] = SingleAttempt()
        self._recovery = DriverRecovery()
        self._compilation = compilation
        self._connect_repository = connect_repository
        self._named_models: dict[int, NamedModels] = {}  # one, once a model was opened by name
        self._pid = os.getpid()
        self._is_closed = False
        self._next: Client | None = None  # of the driver's successor, until it is known to have the same devices
        self._ahead: list[_NextDriver] = []  # that have replaced this client's, which serves it until it has moved
        self._dead: Connection | None = None  # whose driver's death is counted
        self._known_devices: dict[str, DeviceInfo] = {}  # as they were when they were used first
        self._lost_devices: set[str] = set()  # missing or different in the driver of a later connection

    def __repr__(self) -> str:
        connection, process = self._connection, self._process
        state = f", {self._state_text()}" if self._state_text() else ""
        kind = "embedded driver" if self.is_embedded else "driver"
        pid = f" {self.driver_pid}" if connection.has_started else f" {process.pid}" if process is not None else ""
        return f"<Client of {kind}{pid}, {self.interface}{state}>"

    def _state_text(self) -> str:
        connection = self._connection
        if self._is_closed or connection.is_abandoned:
            return "closed"
        if connection.is_open:
            return "" if connection.has_started else "starting"
        if connection.has_left:
            return "driver ends, connects to the next one at the next call"
        return "driver has died" + (", connects again at the next call" if self.recovers else "")

    @property
    def recovery(self) -> RecoveryCounts:
        """The number of deaths of the client's drivers, and of its connections after them."""
        return self._recovery.counts

    @property
    def driver_pid(self) -> int:
        """The pid of the driver, `nnfmq serve`, as the driver knows it; of an embedded driver that of its process."""
        return self._connection.wait_until_ready().driver_pid

    @property
    def worker_pid(self) -> int:
        """The pid of the process that serves this client: the driver's worker, or the embedded driver."""
        return self._connection.wait_until_ready().worker_pid

    @property
    def driver_core(self) -> str:
        """The queue core of the driver, as `nnfmq doctor` names it."""
        return self._connection.wait_until_ready().core

    @property
    def connection(self) -> Connection:
        """The connection, for the methods of HIDL in `lab.hidl`."""
        return self._connection

    @property
    def is_connected(self) -> bool:
        """Whether the driver lives, as the kernel says. Does not block."""
        return self._connection.is_open

    @property
    def interface(self) -> str:
        """The HAL version of this connection, as passed to `connect`."""
        return self._connection.interface

    @property
    def is_embedded(self) -> bool:
        """True if the driver is a private process of this application."""
        return self._process is not None

    def devices(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> list[DeviceInfo]:
        """Return the driver's devices: name, type, version, feature level, status, extensions; blocks.

        A device whose description is invalid is left out and logged (DEV-10).
        """
        return self._call(_list_devices, deadline_after(timeout))

    def set_device_status(
        self, name: str, status: StatusArgument, *, keep: bool = False, timeout: float | None = DEFAULT_TIMEOUT_S
    ) -> None:
        """Make a device AVAILABLE, BUSY or OFFLINE, also given as "busy", for all clients of this driver; blocks.

        While it is not AVAILABLE, every call on it, its models, buffers and bursts raises DeviceUnavailable. When this
        client is closed or dies, the device gets back the status that was last kept, AVAILABLE at first. With `keep`
        the change outlives this client; AVAILABLE is always kept. The driver must have been started with
        `nnfmq serve --allow-device-status`, or be embedded.

        Raises:
            InvalidArgument: If there is no such device, or the status is another one.
            GeneralFailure: If the driver does not allow it, or this user is neither the driver's nor root.
        """
        status = to_member(DeviceStatus, status, "status")

        def set_status(connection: Connection, deadline_ns: int | None) -> None:
            message = messages.SetDeviceStatus(connection.next_call_id(), name, status, keep)
            connection.call(message, messages.Reply, (), deadline_ns)

        self._call(set_status, deadline_after(timeout))

    def set_client_class(
        self, client_class: ClassArgument, worker_pid: int = 0, *, timeout: float | None = DEFAULT_TIMEOUT_S
    ) -> None:
        """Give a client of this driver the class "interactive", "normal" or "batch"; blocks until it has effect.

        `worker_pid` is the pid of the process that serves it (`ClientStatistics.worker_pid`); by default this client's.
        A client that connects again asks for this class, and gets it if the driver gives it by request.

        Raises:
            InvalidArgument: If the class is another one.
            GeneralFailure: If the driver does not give this client the class, or no client has this worker, or it is
                another client's, and this user is neither the driver's nor root.
        """
        chosen = to_client_class(client_class)

        def set_class(connection: Connection, deadline_ns: int | None) -> None:
            message = messages.SetClientClass(connection.next_call_id(), worker_pid, chosen)
            connection.call(message, messages.Reply, (), deadline_ns)

        self._call(set_class, deadline_after(timeout))

    def statistics(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> DriverStatistics:
        """Return the driver's statistics: its clients, their models and bursts, latencies, caches; blocks.

        Other clients of the driver are included. An execution may be counted some microseconds after its result has
        arrived.

        Raises:
            GeneralFailure: If this user is neither the driver's nor root.
        """
        from nnfmq.client.connection.statistics import driver_statistics  # few applications read them

        return self._call(driver_statistics, deadline_after(timeout))

    def statistics_memory(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> Memory:
        """Return the driver's statistics as a memory for reading, which stays current without further calls; blocks.

        The caller closes it; it outlives this client. The functions of `nnfmq.observe.driver_statistics` read it. That
        of an embedded driver is a copy.

        Raises:
            GeneralFailure: If this user is neither the driver's nor root.
        """
        from nnfmq.client.connection.statistics import statistics_memory  # as above

        return self._call(statistics_memory, deadline_after(timeout))

    def device(self, name: str, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> Device:
        """Return the device named `name`; blocks.

        Raises:
            InvalidArgument: If there is none. The message lists the driver's devices.
            DeviceUnavailable: If the driver has died, and its successor has another device of that name.
        """
        return self._device(name, self.devices(timeout=timeout))

    def _device(self, name: str, infos_now: list[DeviceInfo]) -> Device:
        infos = {info.name: info for info in infos_now}
        self._require_unchanged(name)
        if name not in infos:
            devices = ", ".join(sorted(infos))
            absent = self.why_absent(name) if is_runtime_name(name) else ""
            raise InvalidArgument(
                absent or f"there is no device {name!r}; this driver has: {devices}{nearest(name, infos)}"
            )
        return self.device_of(infos[name])

    def why_absent(self, name: str, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> str:
        """Return why the driver has no device of this name, and how to get it; "" if it has one. Blocks.

        The driver says it, because a runtime that it hosts is installed in its environment.
        """

        def query(connection: Connection, deadline_ns: int | None) -> None:
            message = messages.GetCapabilities(connection.next_call_id(), name)
            connection.call(message, messages.DeviceCapabilities, (), deadline_ns)

        try:
            self._call(query, deadline_after(timeout))
        except InvalidArgument as error:
            return str(error)
        except DeviceUnavailable:
            return ""
        return ""

    def device_of(self, info: DeviceInfo, choice: DeviceChoice = "application") -> Device:
        """Return the device that the driver has described by `info`; `choice` says who chose it, for observers."""
        self._known_devices.setdefault(info.name, info)
        reach = self._reach if self._recovers else None
        return Device(info, self._connection, choice, reach, None if reach is None else self._recovery)

    def prepare(self, model: ModelArgument, **options: Unpack[PrepareOptions]) -> CompiledModel:
        """Prepare a model, a file or its content, on the best available device; blocks. The caller closes the result.

        That is `compiled`, which generates machine code, if it is available, otherwise `reference`, with one warning in
        the log; devices of plug-ins that are faster at some operations execute these. If the devices fail, the CPU
        device executes the model, in an embedded driver (docs/how-to/partitioning.md). `device` chooses one device.

        A file that these do not support, or whose sizes are not known, goes to the first device that hosts another
        runtime and loads it; a line in the log says so, once (docs/how-to/hosted-runtimes.md). `runtime_options` are
        for such devices, so with them no other one is tried.

        Takes the keyword arguments of `Device.prepare`. Cache files and hints need a model on one device; a timeout
        holds for all devices together.

        Raises:
            UnsupportedModel: If no device supports the model file. The message lists the operators, and how to install
                a runtime that may run it, or why the hosted ones reject it.
            InvalidArgument: If the model, its file or an option is not valid.
            OSError: If the model's file cannot be read.
            MissedDeadline: If the timeout passes.
            NnfmqError: As `Device.prepare`, if the CPU device may not be used instead.
        """
        deadline_ns = deadline_after(options.get("timeout"))
        given = GivenModel.of(model, options)  # while an embedded driver starts
        devices, compilation = self._usable_devices(deadline_ns)
        return compilation.prepare(self, devices, given, with_time_left(options, deadline_ns))

    def prepare_hosted(
        self,
        runtime: str | None,
        file: ModelSource,
        refusal: InvalidArgument | GeneralFailure | None,
        **options: Unpack[PrepareOptions],
    ) -> CompiledModel:
        """Prepare a model file on the device that hosts `runtime`, or the first that loads it; blocks; close the model.

        For a caller that imports the file itself: `refusal` is why nnfmq's own engine does not run it; None if the
        caller wants the runtime. Takes the keyword arguments of `prepare`, and raises as that.
        """
        deadline_ns = deadline_after(options.get("timeout"))
        given = GivenModel.of_read_file(file, refusal, options)
        devices, compilation = self._usable_devices(deadline_ns)
        hosts = [info for info in devices if runtime in (None, info.name)]
        return compilation.prepare(self, hosts, given, with_time_left(options, deadline_ns))

    def load_hosted(
        self,
        file: SourceArgument,
        refusal: InvalidArgument | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[FileOptions],
    ) -> tuple[str, LoadedModel]:
        """Return the first device that hosts a runtime and loads a file, by name, and the model for it; blocks.

        `refusal` is the error of `nnfmq.load`, which the error begins with if there is no such device; `options` are
        `shapes`, `signature` and `runtime_options`, as for `Device.prepare`. Raises as `prepare`.
        """
        deadline_ns = deadline_after(timeout)
        devices, compilation = self._usable_devices(deadline_ns)
        given = GivenModel(None, file, options, refusal)
        return compilation.hosting(self, devices).first(given, deadline_ns, lambda host, loaded: (host.name, loaded))

    def _usable_devices(self, deadline_ns: int | None) -> tuple[list[DeviceInfo], Compilation]:
        devices = self.devices(timeout=DEFAULT_TIMEOUT_S if deadline_ns is None else remaining_s(deadline_ns))
        if self._compilation is None:
            raise InvalidArgument("this client has no runtime: call nnfmq.connect(), or `device` to choose a device")
        for info in devices:
            self._known_devices.setdefault(info.name, info)
        return [info for info in devices if info.name not in self._lost_devices], self._compilation

    # ------------------------------------------------------------------------------------------------ models by name

    def model(self, name: str, version: int = 0, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> ServedModel:
        """Return a model of the driver's model repository, `nnfmq serve --models DIR`; blocks. The caller closes it.

        With version 0 the model moves to new versions as they are served (docs/how-to/models-by-name.md); any other
        version is the only one that it executes. Waits, within the timeout, for a model that is being loaded.

        Raises:
            ModelNotFound: If there is no model of this name, or no such version. The message lists the models.
            DeviceUnavailable: If the driver has no model repository, or no version of the model could be prepared.
            InvalidArgument: If the name or the version cannot be one.
            MissedDeadline: If `timeout` (seconds; None = no limit) passes.
            DeadObject: If the driver exits.
        """
        return self._models_by_name().open(name, version, deadline_after(timeout))

    def models(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> list[ModelEntry]:
        """Return the models of the driver's model repository, by name: state, version, device, failures; blocks.

        Raises:
            DeviceUnavailable: If the driver has no model repository.
            MissedDeadline: If `timeout` (seconds; None = no limit) passes.
            DeadObject: If the driver exits.
        """
        return self._models_by_name().entries(deadline_after(timeout))

    def _models_by_name(self) -> NamedModels:
        if not self._named_models:
            from nnfmq.client.named.models import NamedModels  # few applications need it

            connect = self._connect_repository or _refuse_repository
            self._named_models.setdefault(_ONLY, NamedModels(self, connect))
        return self._named_models[_ONLY]

    @property
    def recovers(self) -> bool:
        """Whether the client connects again after the driver has died; see `connect`."""
        return self._recovers

    def _successor(self) -> ConnectAgain | None:
        """Return the function that connects to the successor, if this client may; also if no driver has accepted it."""
        return self._connect_again if self._recovers or self._connection.was_not_accepted else None

    def require_usable(self) -> None:
        """Raise BadState if the client is closed, DeadObject if its driver has died and the client does not recover."""
        if self._is_closed or not self.recovers or self._connection.is_abandoned:
            self._connection.raise_if_closed()

    # ------------------------------------------------------------------------------------------------ recovery

    def require_driver(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Connect to the driver's successor if the driver has died; blocks, but waits for none that does not listen.

        Raises:
            DeviceUnavailable: If no driver listens.
            DeadObject: If the client does not recover, or the next driver may not be started yet.
            BadState: If the client is closed.
            MissedDeadline: If `timeout` (seconds; None = no limit) passes.
        """
        self._live_connection(deadline_after(timeout), wait=False).raise_if_closed()

    def _call(self, call: Callable[[Connection, int | None], ResultT], deadline_ns: int | None) -> ResultT:
        """Return `call(connection, deadline)`; again, once, if the driver has died and the client recovers.

        A call that the driver has rejected because it ends is repeated as often as that happens.
        """
        has_died = False
        while True:
            try:
                return call(self._live_connection(deadline_ns), deadline_ns)
            except (DeadObject, NotAccepted) as error:
                is_ending = isinstance(error, DriverEnding)
                if self._successor() is None or (has_died and not is_ending):
                    raise
                has_died |= not is_ending

    def _reach(self, device: str, deadline_ns: int | None, wait: bool) -> Connection:
        """Return the connection for a call to a device. Raises DeviceUnavailable if the device has changed."""
        connection = self._live_connection(deadline_ns, wait)
        self._require_unchanged(device)
        return connection

    def _require_unchanged(self, device: str) -> None:
        if device in self._lost_devices:
            raise DeviceUnavailable(f"device {device!r} has changed since the driver died; connect again to use it")

    def _live_connection(self, deadline_ns: int | None, wait: bool = True) -> Connection:
        """Return the connection, to the driver's successor if it has died; blocks. One that is closed stays so.

        Raises:
            DeviceUnavailable: If no driver can be reached.
            MissedDeadline: If the deadline passes while connecting.
        """
        connection = self._connection
        if self._is_closed and not connection.is_abandoned:
            raise BadState(CLOSED)  # the connection, which had ended before, would say that the driver is gone
        if connection.is_open or self._successor() is None or connection.is_abandoned:
            return connection
        limit_ns = deadline_after(DEFAULT_TIMEOUT_S) if deadline_ns is None else deadline_ns
        return self._attempt.run(lambda: self._connect_to_successor(limit_ns, wait), limit_ns, waits=wait)

    def follow_driver(self) -> None:
        """Move to another driver when it has replaced this client's. Call it once, for a client that is complete."""
        self._connection.call_when_replaced(weak_call(self._begin_move))

    def follow(self, model: ModelHandle) -> None:
        """Prepare a model ahead of a move to another driver, while it is open."""
        self._recovery.follow(model)

    def _begin_move(self) -> None:
        """Move on a thread of its own; if there is none, the next call does it. Does not block.

        A client with managed buffers stays until the last one is closed.
        """
        old = self._connection
        if old.has_buffers:
            _log.info("another driver has replaced this client's, and it stays until its buffers are closed")
        elif not self._recovery.start_moving(self._move):
            old.depart()

    def _move(self) -> None:
        """Have the driver's successor prepare the models, then leave the driver, which serves calls until then."""
        old, models, deadline_ns = self._connection, self._recovery.open_models(), deadline_after(_MOVE_S)
        if not old.is_replaced:  # this client has moved meanwhile, because the driver has died
            return
        ahead = self._prepare_move(models, deadline_ns)
        if not old.depart_without_buffers():
            if ahead is not None:
                self._give_up(ahead)
            return
        try:
            self._live_connection(deadline_ns, wait=False)
            for model in models:
                with suppress(NnfmqError):  # it is closed, or the call that needs it raises the error
                    model.recover_now(deadline_ns, wait=False)
        except NnfmqError as error:
            _log.info("the next call moves to the next driver: %s", error)
        if ahead is not None:  # a call had connected before
            self._give_up(ahead)

    def _prepare_move(self, models: Sequence[ModelHandle], deadline_ns: int | None) -> _NextDriver | None:
        """Return the driver's successor when it has prepared the models; None if there is none. Blocks.

        Tries it again until the deadline, because the driver serves the calls meanwhile.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return self._prepare_move_once(models, deadline_ns)
            except NnfmqError as error:
                _log.info("the move to the next driver is not prepared: %s", error)
                if has_passed(deadline_ns) or self._recovery.pause(pause_s):
                    return None
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _prepare_move_once(self, models: Sequence[ModelHandle], deadline_ns: int | None) -> _NextDriver:
        assert self._connect_again is not None  # else the driver does not ask this client to move
        ahead = _NextDriver(self._connect_again(deadline_ns, None))
        self._ahead.append(ahead)
        try:
            if self._is_closed:  # by another thread, which did not see it
                raise BadState(CLOSED)
            connection = ahead.client.connection
            devices = {info.name: info for info in _list_devices(connection, deadline_ns)}
            for model in models:
                try:
                    model.prepare_ahead(partial(self._device_ahead, connection, devices), deadline_ns)
                except NnfmqError as error:
                    _log.info("a model on %s is not prepared ahead of a move: %s", model.device, error)
            connection.raise_if_closed()
        except BaseException:
            self._give_up(ahead)
            raise
        ahead.devices = devices
        return ahead

    def _device_ahead(self, connection: Connection, devices: Mapping[str, DeviceInfo], name: str) -> Device:
        known, info = self._known_devices.get(name), devices.get(name)
        if info is None or (known is not None and not is_same_device(known, info)):
            raise DeviceUnavailable(f"the next driver has another device {name!r}, or none")
        return Device(info, connection)

    def _claim(self, ahead: _NextDriver) -> bool:
        """Take what `_ahead` has; return False if another thread has it, or has closed it."""
        try:
            self._ahead.remove(ahead)
        except ValueError:
            return False
        return True

    def _give_up(self, ahead: _NextDriver) -> None:
        """Close what `_ahead` has, unless it was taken."""
        if self._claim(ahead):
            ahead.client.close()

    def _connected_ahead(self) -> _NextDriver | None:
        """Take a driver that has prepared the models, if there is one and it still runs."""
        for ahead in list(self._ahead):
            if ahead.devices is not None and self._claim(ahead):
                if ahead.client.connection.is_open:
                    return ahead
                ahead.client.close()
        return None

    def _connect_to_successor(self, deadline_ns: int | None, wait: bool) -> Connection:
        connect_again = self._successor()
        if not self._connection.is_open and connect_again is not None:
            was_accepted = not self._connection.was_not_accepted
            if was_accepted and not self._connection.has_left:
                self._note_death()
            try:
                ahead = self._connected_ahead()
                if ahead is None:
                    ahead = _NextDriver(connect_again(deadline_ns, (lambda: self._is_closed) if wait else None))
                self._replace_connection(ahead, deadline_ns)
            except DeviceUnavailable:
                if self.is_embedded:
                    self._recovery.limit.fail()
                raise
            self._recovery.limit.begin()
            self._recovery.count(reconnections=int(was_accepted))
        if self._is_closed:  # by another thread, meanwhile
            self.close()
        return self._connection

    def _note_death(self) -> None:
        """Count the death of the driver, once. Raises DeadObject if the next one may not be started yet."""
        if self._dead is not self._connection:
            self._dead = self._connection
            self._recovery.count(deaths=1)
        self._recovery.limit.require_allowed(self._connection.ended_ns)

    def _replace_connection(self, ahead: _NextDriver, deadline_ns: int | None) -> None:
        """Use the connection and the process of another driver from now on, and close the old ones."""
        self._next = new = ahead.client
        try:
            if self._is_closed:  # by another thread, which did not see the new one
                new.close()
            infos = ahead.devices
            if infos is None:
                infos = {info.name: info for info in _list_devices(new._connection, deadline_ns)}
            _request_class(new._connection, self._connection.page.given_class, deadline_ns)
        except BaseException:
            new.close()
            raise
        finally:
            self._next = None
        for name, known in self._known_devices.items():
            if not is_same_device(known, infos.get(name)):
                self._lost_devices.add(name)
        old, self._connection = self._connection, new._connection
        process, self._process = self._process, new._process
        if old.has_left:
            self._left = [*(each for each in self._left if not each.has_hung_up), old]
            old.leave()
            _log.info("the driver has asked to leave; connected to process %d", self.driver_pid)
        else:
            old.close()
            if old.was_not_accepted:
                _log.info("the driver ended before it accepted this client; connected to process %d", self.driver_pid)
            else:
                _log.warning("the driver has died; connected again, to process %d", self.driver_pid)
        if process is not None:
            old.end_driver()
        self.follow_driver()

    def close(self) -> None:
        """Hang up; an embedded driver exits and is reaped. Idempotent, also in a forked child."""
        self._is_closed = True
        self._recovery.end()
        for models in self._named_models.values():
            models.end()
        has_started = self._connection.has_started
        for connection in (*self._left, self._connection):
            connection.close()
        for successor in (self._next, *(ahead.client for ahead in self._ahead)):
            if successor is not None:
                successor.close()
        for models in self._named_models.values():
            models.join()
        self._recovery.join()
        if self._compilation is not None:
            self._compilation.close()
        process, self._process = self._process, None  # of several threads one ends it
        if process is not None and os.getpid() == self._pid:
            self._connection.end_driver(has_started)

    async def __aenter__(self) -> Self:
        """Return when the driver has accepted this client; other tasks of the event loop run meanwhile.

        Raises what `connect` raises.
        """
        try:
            await _beside_tasks(self._wait_until_ready)
        except BaseException:
            await _beside_tasks(self.close)
            raise
        return self

    def _wait_until_ready(self) -> None:
        """Wait for the driver's reply to Hello; if it ends before it has accepted this client, for its successor's."""
        connection = self._connection
        try:
            connection.wait_until_ready()
        except NotAccepted:
            self._live_connection(connection.start_deadline_ns)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Close the client; other tasks of the event loop run meanwhile."""
        await _beside_tasks(self.close)


async def _beside_tasks(function: Callable[[], object]) -> None:
    """Call `function`, which blocks, in a thread; other tasks of the event loop run meanwhile."""
    import asyncio  # it costs more to import than this package

    await asyncio.to_thread(function)


def _list_devices(connection: Connection, deadline_ns: int | None) -> list[DeviceInfo]:
    message = messages.ListDevices(connection.next_call_id())
    return valid_devices(connection.exchange(message, messages.DeviceList, (), deadline_ns).devices)


def _request_class(connection: Connection, given: ClientClass | None, deadline_ns: int | None) -> None:
    """Ask a driver for the class that its predecessor has given this client, if it has; a refusal changes nothing."""
    if given is None:
        return
    try:
        message = messages.SetClientClass(connection.next_call_id(), 0, given)
        connection.call(message, messages.Reply, (), deadline_ns)
    except GeneralFailure as error:
        _log.warning("the class %s is not kept: %s", given.name.lower(), error)


def _refuse_repository(_deadline_ns: int | None, _is_closed: IsClosed, _has_listened: bool) -> Channel:
    raise DeviceUnavailable(
        "an embedded driver has no model repository: start a driver with `nnfmq serve --models DIR`, "
        "and connect to its socket"
    )


def is_same_device(old: DeviceInfo, new: DeviceInfo | None) -> bool:
    """Return True if the descriptions are equal except for the status."""
    names = [name for name in old.__struct_fields__ if name != "status"]
    return new is not None and all(getattr(old, name) == getattr(new, name) for name in names)
