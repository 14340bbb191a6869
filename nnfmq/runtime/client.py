"""`connect`: the way in. A running driver, or an embedded one; whoever uses the client need not know which.

A client is one connection. Its devices are the driver's; a device prepares models. Everything here is thread-safe and
ends with DEAD_OBJECT at once when the driver does; the client itself can then `reconnect`.

Long because the ways to reach a driver again need the ways to reach one.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

from msgspec.structs import replace

from nnfmq.channel import Channel
from nnfmq.deadlines import deadline_after
from nnfmq.hal.capabilities import Capabilities
from nnfmq.hal.errors import (
    DeviceUnavailable,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    NnfmqError,
    ProtocolError,
    error_for_status,
)
from nnfmq.hal.tensor_info import TensorInfo, operand_info
from nnfmq.hal.types import (
    DeviceStatus,
    ExecutionPreference,
    ExtensionNameAndPrefix,
    Model,
    Priority,
    TokenValuePair,
)
from nnfmq.paths import default_socket
from nnfmq.runtime.buffer_allocation import TIMEOUT_S, ModelRole, allocate_in_device
from nnfmq.runtime.connection import INTERFACE, Connection
from nnfmq.runtime.device_validation import valid_devices
from nnfmq.runtime.embedded_driver import end_embedded_driver, start_embedded_driver
from nnfmq.runtime.execution_result import memory_fds, to_wire_deadline
from nnfmq.runtime.managed_buffer import Buffer
from nnfmq.runtime.prepared_model import PreparedModel
from nnfmq.serialize import messages
from nnfmq.serialize.messages import DeviceInfo
from nnfmq.serialize.model_codec import encode_model

if TYPE_CHECKING:
    from nnfmq.runtime.cache_directory import CacheDirectory

__all__ = ["Client", "Device", "DeviceInfo", "ModelRole", "NamedModel", "connect"]

CONNECT_SECONDS = TIMEOUT_S
Progress: TypeAlias = Callable[[int, int], None]
RETRY_SECONDS = 0.02  # between two looks for a driver that does not listen yet
_log = logging.getLogger("nnfmq.client")


class ModelSignature(Protocol):
    """The inputs and outputs of a model: a NamedModel, a PreparedModel, or what an application has kept of one."""

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        """Its inputs, in order."""
        ...

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """Its outputs, in order."""
        ...


class NamedModel(ModelSignature, Protocol):
    """A model with names for its inputs and outputs: what `nnfmq.load` returns."""

    @property
    def model(self) -> Model:
        """The HAL's model."""
        ...


def connect(
    path: str | os.PathLike[str] | None = None,
    *,
    embedded: bool | None = None,
    timeout: float | None = CONNECT_SECONDS,
    server_uid: int | None = None,
    wait: bool = False,
    interface: str = INTERFACE,
) -> Client:
    """Connect to a driver and return a client, which the caller closes; blocks up to `timeout` seconds.

    Without arguments: the driver that listens at `$NNFMQ_SOCKET` or in the runtime directory, else an embedded one, a
    private process that ends with this one. `path` names a driver's socket. `embedded` True starts a private driver
    without looking for another, False never starts one. A driver must run as this user or as root; `server_uid` allows
    one other user. With `wait` a driver that does not listen yet is waited for, and none is started (DEV-11).
    `interface` is the version of the HAL that is spoken: "HIDL 1.0" to "HIDL 1.3", "AIDL v1" to "AIDL v4"; an older one
    has less to say, and newer models are refused (docs/reference/hal-versions.md).

    Raises DeviceUnavailable, MissedDeadlineTransient, InvalidArgument.
    """
    deadline_ns = deadline_after(timeout)
    if interface != INTERFACE:  # judge it before anything is started
        from nnfmq.hal.feature_levels import interface_level

        interface_level(interface)
    if embedded and (path is not None or wait):
        raise InvalidArgument("a driver is either listening at `path`, now or soon (`wait`), or embedded, not both")
    if embedded:
        return _embedded(deadline_ns, interface)
    place = default_socket() if path is None else Path(path)
    if wait:
        return _listening_soon(place, server_uid, interface, deadline_ns)
    try:
        return _listening(place, deadline_ns, server_uid, interface)
    except DeviceUnavailable as error:
        if path is not None or embedded is False:
            raise
        _log.info("starting an embedded driver: %s", error)
        return _embedded(deadline_ns, interface)


def _listening(path: Path, deadline_ns: int | None, server_uid: int | None, interface: str) -> Client:
    channel = Channel.connect(path, deadline_ns)
    uid = channel.peer().uid
    if uid not in {os.getuid(), 0, server_uid}:
        channel.close()
        raise DeviceUnavailable(f"the driver at {path} runs as uid {uid}, not as {os.getuid()} or root; see server_uid")
    return Client(
        Connection.open(channel, deadline_ns, interface=interface),
        None,
        partial(_listening_soon, path, server_uid, interface),
    )


def _listening_soon(path: Path, server_uid: int | None, interface: str, deadline_ns: int | None) -> Client:
    """Connect as soon as a driver listens. Raises what the last try raised when the deadline has passed."""
    while True:
        try:
            return _listening(path, deadline_ns, server_uid, interface)
        except DeviceUnavailable:
            if deadline_ns is not None and time.monotonic_ns() + RETRY_SECONDS * 1e9 >= deadline_ns:
                raise
        time.sleep(RETRY_SECONDS)


def _embedded(deadline_ns: int | None, interface: str) -> Client:
    channel, process = start_embedded_driver()
    try:
        again = partial(_embedded, interface=interface)
        return Client(Connection.open(channel, deadline_ns, process.pid, interface), process, again)
    except BaseException:
        process.kill()
        process.wait()
        raise


class Client:
    """A connection to a driver. Close it, or use `with`: models and bursts made through it end with it."""

    def __init__(
        self,
        connection: Connection,
        process: subprocess.Popen[bytes] | None,
        again: Callable[[int | None], Client] | None = None,
    ) -> None:
        self._connection = connection
        self._process = process
        self._again = again
        self._pid = os.getpid()
        self._is_closed = False
        self._reconnecting = threading.Lock()
        self._known: dict[str, DeviceInfo] = {}  # devices that were asked for, as they were then
        self._lost: set[str] = set()  # those that another driver has not, or has as something else

    @property
    def driver_pid(self) -> int:
        """The process that serves this client: the worker, or the embedded driver."""
        return self._connection.greeting.pid

    @property
    def driver_core(self) -> str:
        """Which queue core the driver runs on: "compiled" or "python"."""
        return self._connection.greeting.core

    @property
    def connection(self) -> Connection:
        """What `runtime.hidl` sends its calls over."""
        return self._connection

    @property
    def interface(self) -> str:
        """The HAL's version that is spoken: "AIDL v4" unless `connect` was told otherwise."""
        return self._connection.greeting.interface

    @property
    def is_embedded(self) -> bool:
        """True where the driver is a private process of this application."""
        return self._process is not None

    def devices(self, *, timeout: float | None = CONNECT_SECONDS) -> list[DeviceInfo]:
        """Return the driver's devices: name, type, version, feature level, status, extensions; blocks.

        One whose description cannot be true is left out, and logged (DEV-10).
        """
        message = messages.ListDevices(self._connection.new_call())
        answer = self._connection.ask(message, messages.DeviceList, (), deadline_after(timeout))
        return valid_devices(answer.devices)

    def set_device_status(self, name: str, status: DeviceStatus, *, timeout: float | None = CONNECT_SECONDS) -> None:
        """Make a device AVAILABLE, BUSY or OFFLINE for all clients of this driver; blocks.

        While it is not AVAILABLE every call on it, its models, buffers and bursts raises DeviceUnavailable. For the
        driver's own user and root. Raises InvalidArgument, GeneralFailure.
        """
        message = messages.SetDeviceStatus(self._connection.new_call(), name, status)
        self._connection.call(message, messages.Reply, (), deadline_after(timeout))

    def device(self, name: str, *, timeout: float | None = CONNECT_SECONDS) -> Device:
        """Return the device called `name`; blocks. Raises InvalidArgument that lists the known ones."""
        infos = {info.name: info for info in self.devices(timeout=timeout)}
        if name in self._lost:
            raise DeviceUnavailable(f"device {name!r} was another one before the driver died; connect anew to use it")
        if name not in infos:
            raise InvalidArgument(f"there is no device {name!r}; this driver has: {', '.join(sorted(infos))}")
        self._known.setdefault(name, infos[name])
        return Device(infos[name], self._connection)

    def reconnect(self, *, timeout: float | None = CONNECT_SECONDS) -> None:
        """Reach the driver again that has died, or its successor; blocks until it listens, up to `timeout` seconds.

        Devices, models and bursts of before stay dead: ask for the device and prepare again. A device that is no longer
        what it was (its status aside) is unavailable to this client for good (LIFE-6). Nothing happens while the driver
        lives. Raises DeviceUnavailable, MissedDeadlineTransient, and InvalidArgument for a closed client.
        """
        if os.getpid() != self._pid or self._again is None:
            raise InvalidArgument("this client cannot reconnect: connect anew")
        with self._reconnecting:
            if self._is_closed:
                raise InvalidArgument("this client is closed")
            if not self._connection.is_open:
                self._replace(self._again(deadline_after(timeout)))
            if self._is_closed:  # by another thread, meanwhile
                self.close()
                raise InvalidArgument("this client is closed")

    def _replace(self, fresh: Client) -> None:
        """Go on with the connection of `fresh`, which is ours."""
        try:
            infos = {info.name: info for info in fresh.devices()}
        except BaseException:
            fresh.close()
            raise
        self._lost |= {name for name, old in self._known.items() if not _is_same(old, infos.get(name))}
        old, self._connection = self._connection, fresh._connection
        process, self._process = self._process, fresh._process
        old.close()
        if process is not None:
            end_embedded_driver(process)

    def close(self) -> None:
        """Hang up; an embedded driver ends and is reaped. Harmless when repeated, and in a forked child."""
        self._is_closed = True
        self._connection.close()
        process, self._process = self._process, None
        if process is not None and os.getpid() == self._pid:
            end_embedded_driver(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _is_same(old: DeviceInfo, new: DeviceInfo | None) -> bool:
    """Return whether a driver's answers are still the same, whatever the device's status is."""
    names = [name for name in old.__struct_fields__ if name != "status"]
    return new is not None and all(getattr(old, name) == getattr(new, name) for name in names)


@dataclass(frozen=True, slots=True)
class Device:
    """A device of the driver; `info` is what it says of itself."""

    info: DeviceInfo
    _connection: Connection

    def capabilities(self, *, timeout: float | None = CONNECT_SECONDS) -> Capabilities:
        """Return how fast this device is, relative to the CPU; blocks. Raises DeviceUnavailable.

        Raises GeneralFailure for figures that cannot be: a driver is not trusted (VAL-7).
        """
        from nnfmq.validation.values import validate_capabilities

        message = messages.GetCapabilities(self._connection.new_call(), self.info.name)
        answer = self._connection.call(message, messages.DeviceCapabilities, (), deadline_after(timeout))
        try:
            if answer.capabilities is None:
                raise InvalidArgument("none were given")
            found = messages.capabilities_from_data(answer.capabilities)
            validate_capabilities(found)
        except InvalidArgument as error:
            raise GeneralFailure(f"impossible capabilities of device {self.info.name!r}: {error}") from error
        return found

    def supported_operations(self, model: Model | NamedModel, *, timeout: float | None = None) -> list[bool]:
        """Return for each operation of the main subgraph whether this device can run it; blocks."""
        bare = _bare(model)
        data, pools = encode_model(bare)
        lent = tuple(map(messages.memory_to_data, pools))
        call, consumers = self._connection.new_call(), self._consumers(bare)
        message = messages.GetSupportedOperations(call, self.info.name, data, lent, consumers)
        deadline_ns = deadline_after(timeout)
        answer = self._connection.ask(message, messages.SupportedOperations, memory_fds(pools), deadline_ns)
        if answer.status is not ErrorStatus.NONE:
            raise error_for_status(answer.status, answer.message)
        if len(answer.supported) != len(bare.main.operations):
            counts = f"{len(answer.supported)} operations of a model that has {len(bare.main.operations)}"
            raise ProtocolError(f"the driver answers for {counts}")
        return list(answer.supported)

    def prepare(
        self,
        model: Model | NamedModel,
        *,
        preference: ExecutionPreference = ExecutionPreference.FAST_SINGLE_ANSWER,
        priority: Priority = Priority.MEDIUM,
        hints: Sequence[TokenValuePair] = (),
        extensions: Sequence[ExtensionNameAndPrefix] = (),
        cache_dir: str | os.PathLike[str] | None = None,
        token: bytes | None = None,
        model_cache: Sequence[int] = (),
        data_cache: Sequence[int] = (),
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> PreparedModel:
        """Let the device validate and compile a model; blocks until it is ready. The caller closes the result.

        With `cache_dir`, a folder that exists, the compilation is taken from its files there if they are what this
        driver saved, else made anew and saved. `token`, 32 bytes of the application's, stands for this model then; by
        default the model's content does. What goes wrong with a cache is logged, and changes nothing else.

        `model_cache` and `data_cache` are the HAL's form instead: descriptors, the caller's, as many as `info` says, to
        which the driver saves under `token`, and to nothing if anything is wrong with them.

        `hints` are for devices that know their extensions, whose prefixes `extensions` names. `timeout` in seconds is
        also the preparation's deadline in the driver; None = no limit. `progress` is called on this thread with how
        many pieces of code are compiled, of how many, where a device compiles; what it raises ends the call.

        Raises InvalidArgument for an invalid model or hints, GeneralFailure for a model that the device cannot run,
        MissedDeadline, DeadObject.
        """
        if cache_dir is not None and (model_cache or data_cache):
            raise InvalidArgument("caches are either in `cache_dir` or the files given, not both")
        bare = _bare(model)
        data, pools = encode_model(bare)
        lent = tuple(map(messages.memory_to_data, pools))
        deadline_ns = deadline_after(timeout)
        files = messages.CachesData(token or b"", len(model_cache), len(data_cache))
        message = messages.PrepareModel(
            0,  # its number comes when it is sent
            self.info.name,
            preference,
            priority,
            to_wire_deadline(self._connection, deadline_ns),
            data,
            lent,
            self._consumers(bare),
            files,
            *messages.hints_to_data(hints, extensions),
            progress is not None,
        )
        fds = [*memory_fds(pools), *model_cache, *data_cache]
        if cache_dir is None:
            return self._prepare(message, fds, model, deadline_ns, progress)
        from nnfmq.runtime.cache_directory import CacheDirectory, model_token

        folder = CacheDirectory.of(
            cache_dir, self.info, message, model_token(message, pools) if token is None else token
        )
        return self._prepare_in(folder, message, fds, model, deadline_ns, progress)

    def _prepare_in(
        self,
        folder: CacheDirectory,
        message: messages.PrepareModel,
        fds: Sequence[int],
        model: Model | NamedModel,
        deadline_ns: int | None,
        progress: Progress | None,
    ) -> PreparedModel:
        """Try the folder's files first, and on any failure prepare afresh, with fresh ones (CACHE-11)."""
        with folder.open_saved_files() as saved:
            if saved is not None:
                try:
                    return self._prepare_from_cache(folder.token, saved, model, deadline_ns)
                except NnfmqError as error:
                    _log.info("preparing afresh, since the cache cannot be used: %s", error)
        with folder.create_files() as fresh:
            files = messages.CachesData(folder.token, *map(len, fresh))
            message = replace(message, caches=files)
            return self._prepare(message, [*fds, *fresh.model, *fresh.data], model, deadline_ns, progress)

    def prepare_from_cache(
        self,
        token: bytes,
        model_cache: Sequence[int],
        data_cache: Sequence[int],
        *,
        model: Model | ModelSignature,
        timeout: float | None = None,
    ) -> PreparedModel:
        """Prepare what was saved under `token`, as the HAL's prepareModelFromCache; blocks. The caller closes it.

        The files are descriptors that stay the caller's: as many as `info` says, open for reading and writing. `model`
        only says what the inputs and outputs are, by which the driver's results are judged. Raises InvalidArgument for
        other files or a token that has not 32 bytes, GeneralFailure for whatever is not exactly what this driver saved,
        MissedDeadline, DeadObject.
        """
        return self._prepare_from_cache(token, (model_cache, data_cache), model, deadline_after(timeout))

    def _prepare_from_cache(
        self,
        token: bytes,
        files: tuple[Sequence[int], Sequence[int]],
        model: Model | ModelSignature,
        deadline_ns: int | None,
    ) -> PreparedModel:
        caches = messages.CachesData(token, *map(len, files))
        message = messages.PrepareModelFromCache(0, self.info.name, -1 if deadline_ns is None else deadline_ns, caches)
        return self._prepare(message, [*files[0], *files[1]], model, deadline_ns)

    def _prepare(
        self,
        message: messages.PrepareModel | messages.PrepareModelFromCache,
        fds: Sequence[int],
        model: Model | ModelSignature,
        deadline_ns: int | None,
        progress: Progress | None = None,
    ) -> PreparedModel:
        """Send either call, under a number of its own, and return what the driver made."""

        def on_notice(notice: messages.PreparationProgress) -> None:
            if progress is not None:
                progress(notice.done, notice.total)

        prepared = PreparedModel(self._connection, None, *_described(model, self.info), self.info.name)
        try:
            self._connection.call(
                replace(message, call=self._connection.new_call()),
                messages.PreparedModelReady,
                fds,
                deadline_ns,
                on_answer=prepared.take_answer,
                on_notice=on_notice,
            )
        except BaseException:
            prepared.close()  # the driver may have made it just before a signal came
            raise
        return prepared

    def _consumers(self, model: Model) -> tuple[tuple[int, ...], ...]:
        if self._connection.is_aidl:
            return ()
        from nnfmq.hal.feature_levels import number_of_consumers

        return tuple(tuple(number_of_consumers(graph)) for graph in (model.main, *model.referenced))

    def allocate(
        self,
        *,
        inputs: Sequence[ModelRole] = (),
        outputs: Sequence[ModelRole] = (),
        dimensions: Sequence[int] = (),
        timeout: float | None = CONNECT_SECONDS,
    ) -> Buffer:
        """Let the device keep a tensor that is to be these inputs and outputs of these models; blocks.

        A role is a prepared model of this device and the number of one of its inputs or outputs; all have the same
        type, scale and zero point. `dimensions` fix what the models leave open; an extent of 0, or no dimensions, stays
        open, and the buffer then takes any. The caller closes the result.

        Raises InvalidArgument for no role, one that does not exist or is given twice, and roles that disagree;
        GeneralFailure for a type that has no arrays; ResourceExhausted, MissedDeadline, DeadObject. `nnfmq.allocate`
        falls back to shared memory instead.
        """
        return allocate_in_device(self._connection, self.info.name, inputs, outputs, tuple(dimensions), timeout)


def _bare(model: Model | NamedModel) -> Model:
    bare = model if isinstance(model, Model) else getattr(model, "model", None)
    if not isinstance(bare, Model):
        raise InvalidArgument(f"N-VAL-24: a {type(model).__name__} is no model")
    return bare


def _described(
    model: Model | ModelSignature, device: DeviceInfo
) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]:
    if not isinstance(model, Model):
        return tuple(model.inputs), tuple(model.outputs)
    main, types = model.main, None
    if model.extensions:  # few models name any
        from nnfmq.runtime.extension_types import extension_types

        types = extension_types(model, device)
    inputs = [operand_info(main.operands[index], f"input {i}", types) for i, index in enumerate(main.input_indexes)]
    outputs = [operand_info(main.operands[index], f"output {i}", types) for i, index in enumerate(main.output_indexes)]
    return tuple(inputs), tuple(outputs)
