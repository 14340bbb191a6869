"""Device: a device of the driver, which prepares models and allocates buffers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from nnfmq.base.channel import close_all
from nnfmq.base.deadlines import deadline_after, remaining_s
from nnfmq.base.memory import Memory
from nnfmq.base.verbose_log import vlog
from nnfmq.client.connection.connection import Connection
from nnfmq.client.connection.defaults import DEFAULT_TIMEOUT_S
from nnfmq.client.connection.prepare_arguments import (
    FinishedModel,
    ModelArgument,
    ModelSignature,
    NamedModel,
    Preference,
    PrepareOptions,
    PriorityArgument,
    ProgressCallback,
    ProgressReport,
    compile_notice,
    is_file,
    name_for_display,
    to_hal_model,
    to_model,
    to_preference,
    to_priority,
    to_token,
    with_time_left,
)
from nnfmq.client.connection.recovery import DriverRecovery
from nnfmq.client.execution.requests import memory_fds, require_supported_hints, to_wire_deadline
from nnfmq.client.model.handle import DeviceOf, ModelHandle, PrepareAgain
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.client.observation import Preparation, begin_preparation
from nnfmq.hal.capabilities import Capabilities
from nnfmq.hal.deterministic import DETERMINISTIC, with_deterministic_hint
from nnfmq.hal.errors import (
    DeadObject,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadlineTransient,
    NnfmqError,
    ProtocolError,
    error_for_status,
)
from nnfmq.hal.extensions import HIDL_PREFIX_BITS, extension_code, extension_prefix, extension_type, is_extension
from nnfmq.hal.feature_levels import number_of_consumers
from nnfmq.hal.hosted import NAME as HOSTED
from nnfmq.hal.hosted import HostedCall, HostedDescription
from nnfmq.hal.preparation import DeviceChoice
from nnfmq.hal.tensor_info import ElementInfo, TensorInfo, operand_info
from nnfmq.hal.timing import to_limit_field
from nnfmq.hal.types import (
    DEFAULT_PREFERENCE,
    ExecutionPreference,
    ExtensionNameAndPrefix,
    Model,
    OperandType,
    Pool,
    Priority,
    TokenValuePair,
)
from nnfmq.serialize import messages
from nnfmq.serialize.messages import DeviceInfo, OperandTypeData
from nnfmq.serialize.models import encode_model

if TYPE_CHECKING:
    from nnfmq.base.shared_constants import SharedConstants
    from nnfmq.client.connection.cache_directory import CacheDirectory
    from nnfmq.client.model.buffer_allocation import ModelRole
    from nnfmq.client.model.buffers import Buffer
    from nnfmq.importers.file_format import SourceArgument
    from nnfmq.importers.hosted import HostedSource
    from nnfmq.importers.loaded_model import LoadedModel

__all__ = ["Device", "DeviceInfo", "extension_types", "hosts_runtime", "model_signature"]

_LARGE_BYTES = 1 << 20  # of a model, after whose preparation freed memory is returned to the kernel
_log = logging.getLogger("nnfmq.client")


Reach: TypeAlias = Callable[[str, int | None, bool], Connection]
"""Returns the connection to the driver of a device, or to its successor, as `Client._reach`."""
ResultT = TypeVar("ResultT")


class Device(Struct, frozen=True):
    """A device of the driver; `info` is the description that the driver sent."""

    info: DeviceInfo
    _connection: Connection
    _choice: DeviceChoice = "application"
    _reach: Reach | None = None  # None = this device dies with its driver
    _recovery: DriverRecovery | None = None

    def __repr__(self) -> str:
        return f"<Device {self.info.summary()}>"

    @property
    def is_aidl(self) -> bool:
        """Whether the interface version of the client is one of AIDL, else of HIDL."""
        return self._connection.is_aidl

    @property
    def connection(self) -> Connection:
        """The connection over which the driver has described this device."""
        return self._connection

    @property
    def choice(self) -> DeviceChoice:
        """The chooser of this device, for observers."""
        return self._choice

    def chosen_by(self, choice: DeviceChoice) -> Device:
        """Return this device, of whose preparations observers are told that `choice` chose it."""
        return Device(self.info, self._connection, choice, self._reach, self._recovery)

    def capabilities(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> Capabilities:
        """Return the speed and the power of this device, relative to the CPU; blocks.

        Raises:
            DeviceUnavailable: If the device is not available.
            GeneralFailure: If the driver sent invalid performance info: a driver is not trusted (VAL-7).
        """
        deadline_ns = deadline_after(timeout)

        def query(connection: Connection) -> messages.DeviceCapabilities:
            message = messages.GetCapabilities(connection.next_call_id(), self.info.name)
            return connection.call(message, messages.DeviceCapabilities, (), deadline_ns)

        from nnfmq.validation.values import validate_capabilities  # few applications have other than packaged devices

        reply = self._call(query, deadline_ns)
        try:
            if reply.capabilities is None:
                raise InvalidArgument("the reply has none")
            capabilities = messages.capabilities_from_data(reply.capabilities)
            validate_capabilities(capabilities)
        except InvalidArgument as error:
            raise GeneralFailure(f"invalid capabilities of device {self.info.name!r}: {error}") from error
        return capabilities

    def supported_operations(self, model: ModelArgument, *, timeout: float | None = None) -> list[bool]:
        """Return for each operation of the main subgraph whether this device can execute it; blocks."""
        hal_model, deadline_ns = to_hal_model(to_model(model)), deadline_after(timeout)
        data, pools = encode_model(hal_model)

        def query(connection: Connection) -> messages.SupportedOperations:
            message = messages.GetSupportedOperations(
                connection.next_call_id(),
                self.info.name,
                data,
                tuple(map(messages.memory_to_data, pools)),
                self._consumers(hal_model),
            )
            return connection.exchange(message, messages.SupportedOperations, memory_fds(pools), deadline_ns)

        reply = self._call(query, deadline_ns)
        if reply.status is not ErrorStatus.NONE:
            raise error_for_status(reply.status, reply.message)
        if len(reply.supported) != len(hal_model.main.operations):
            counts = f"{len(reply.supported)} operations of a model that has {len(hal_model.main.operations)}"
            raise ProtocolError(f"the driver replied for {counts}")
        return list(reply.supported)

    def prepare(
        self,
        model: ModelArgument,
        *,
        preference: Preference = DEFAULT_PREFERENCE,
        priority: PriorityArgument = Priority.MEDIUM,
        hints: Sequence[TokenValuePair] = (),
        extensions: Sequence[ExtensionNameAndPrefix] = (),
        cache_dir: str | os.PathLike[str] | None = None,
        token: bytes | None = None,
        model_cache: Sequence[int] = (),
        data_cache: Sequence[int] = (),
        timeout: float | None = None,
        progress: ProgressCallback | None = None,
        name: str | None = None,
        shapes: Mapping[str | int, Sequence[int]] | None = None,
        signature: str | None = None,
        runtime_options: Mapping[str, Any] | None = None,
        deterministic: bool = False,
    ) -> PreparedModel:
        """Validate and compile a model in the driver; blocks until it is ready. The caller closes the result.

        If the device compiles it for more than a quarter of a second, a line on stderr says so, once, unless
        `$NNFMQ_COMPILE_NOTICE` is 0; on a terminal another one shows the progress.

        Args:
            model: The model; or the path, or the content, of a file that `nnfmq.load` reads.
            preference: What the compilation optimizes; also by name: "low_power", "fast_single_answer",
                "sustained_speed". Only with "fast_single_answer" the model is ready before the device `compiled` has
                compiled it: it executes on the interpreter, and changes to the compiled program while it is in use, so
                later results may have other bits.
            priority: The priority of the model's executions among those of this client; also by name: "low", "medium",
                "high".
            hints: Vendor hints, of extensions that this device supports; it ignores those that it does not know.
            extensions: The prefixes of extensions in `hints`.
            cache_dir: An existing directory. The compilation is read from cache files there if this driver wrote them,
                otherwise made and saved. A cache that cannot be used is logged and has no other effect.
            token: 32 bytes that identify the model in a cache; by default a hash of its content.
            model_cache: As in the HAL, instead of `cache_dir`: fds of cache files, as many as `info` specifies, to
                which the driver saves under `token`. It saves nothing if they are invalid. Borrowed.
            data_cache: As `model_cache`.
            timeout: In seconds; also the preparation's deadline. None = no limit.
            progress: Called on this thread with the numbers of compiled units and of all units, if the device
                compiles, instead of writing to stderr. An exception that it raises ends the call.
            name: What the driver's statistics call the model; by default the name of its file.
            shapes: For a model file, the shapes of inputs, as for `nnfmq.load`: `{"ids": (1, 128)}`.
            signature: For a .tflite file, as for `nnfmq.load`.
            runtime_options: For a model file on a device that hosts another runtime, such as `onnxruntime`: its
                options, values of JSON; `{"threads": 1}` for all of them (docs/how-to/hosted-runtimes.md).
            deterministic: Whether floats must have the same bits on every machine, with every number of threads and in
                every execution (docs/how-to/deterministic-results.md). Only the device `compiled` promises that.

        Raises:
            InvalidArgument: If the model, its file, the preference, the priority or a hint is invalid, or the device
                cannot promise what `deterministic` demands.
            OSError: If the model's file cannot be read.
            GeneralFailure: If the device cannot execute the model, or not as `deterministic` demands.
            MissedDeadline: If the timeout passes.
            DeadObject: If the driver exits.
        """
        if cache_dir is not None and (model_cache or data_cache):
            raise InvalidArgument("caches are either in `cache_dir` or the files given, not both")
        if deterministic:
            hints, extensions = self._with_deterministic_hint(hints, extensions)
        require_supported_hints(self.info.name, self._extension_names(), hints, extensions)
        deadline_ns = deadline_after(timeout)
        loaded = self._loaded(model, shapes, signature, runtime_options, deadline_ns)
        preference, priority = to_preference(preference), to_priority(priority)
        token = None if token is None else to_token(token)
        data, pools = encode_model(to_hal_model(loaded))
        wire_hints, prefixes = messages.hints_to_data(hints, extensions)
        shown_name = name_for_display(model, name)
        message = replace(
            self._prepare_message(loaded, data, pools, preference, priority, deadline_ns),
            caches=messages.CachesData(token or b"", len(model_cache), len(data_cache)),
            hints=wire_hints,
            extensions=prefixes,
            name=shown_name,
        )
        fds = [*memory_fds(pools), *model_cache, *data_cache]
        with compile_notice(shown_name, progress, self._choice) as shown:
            message = replace(message, tells_progress=shown is not None)
            if cache_dir is None:
                prepared = self._prepare(message, fds, loaded, deadline_ns, shown)
            else:
                from nnfmq.client.connection.cache_directory import CacheDirectory, model_token  # few applications

                key = model_token(message, pools) if token is None else token
                directory = CacheDirectory.of(cache_dir, self.info, message, key)
                prepared = self._prepare_in(directory, message, fds, loaded, deadline_ns, shown)
        options = PrepareOptions(
            preference=preference, priority=priority, hints=hints, extensions=extensions,
            cache_dir=cache_dir, token=token, name=message.name,
        )  # fmt: skip
        self._recover(prepared, loaded, options)
        if len(data) >= _LARGE_BYTES:
            from nnfmq.engines.memory import trim_memory  # most models of a first start are smaller

            del data, message
            trim_memory()  # what the message, and the importer of the model's file, have freed
        return prepared

    def _recover(self, prepared: PreparedModel, model: Model | FinishedModel, options: PrepareOptions) -> None:
        """Let a model be prepared again with these options after the driver's death, if the client recovers."""
        if self._reach is None:
            return
        prepared.handle.prepare_again = _PrepareAgain(self, model, options)
        if self._recovery is not None:
            prepared.handle.recover_later = self._recovery.request
            self._recovery.follow(prepared.handle)

    def _with_deterministic_hint(
        self, hints: Sequence[TokenValuePair], extensions: Sequence[ExtensionNameAndPrefix]
    ) -> tuple[Sequence[TokenValuePair], Sequence[ExtensionNameAndPrefix]]:
        if DETERMINISTIC not in self._extension_names():
            raise InvalidArgument(
                f"device {self.info.name!r} does not promise the same bits on every machine, which `deterministic` "
                "demands: use the device compiled"
            )
        return with_deterministic_hint(hints, extensions)

    def _loaded(
        self,
        model: ModelArgument,
        shapes: Mapping[str | int, Sequence[int]] | None,
        signature: str | None,
        runtime_options: Mapping[str, Any] | None,
        deadline_ns: int | None,
    ) -> Model | FinishedModel:
        """Return the model; a file for a device that hosts a runtime is opened there."""
        is_hosting = hosts_runtime(self.info)
        if is_hosting and is_file(model):
            left_s = remaining_s(deadline_ns)
            return FinishedModel.of(
                self.load(model, shapes=shapes, signature=signature, runtime_options=runtime_options, timeout=left_s)
            )
        if runtime_options:
            raise InvalidArgument(
                f"`runtime_options` are for a model file on a device that hosts a runtime; {self.info.name!r} does not"
                if not is_hosting
                else f"`runtime_options` are for a model file; this is a {type(model).__name__}, which has its own"
            )
        return to_model(model, shapes, signature)

    def load(
        self,
        file: SourceArgument | HostedSource,
        *,
        shapes: Mapping[str | int, Sequence[int]] | None = None,
        signature: str | None = None,
        runtime_options: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> LoadedModel:
        """Return the model that runs a file on this device, which hosts a runtime and opens the file; blocks.

        It is for `prepare` on this device, or on another one that hosts the same runtime. `file` may be what
        `importers.hosted.read_hosted` has returned; the other arguments are those of `prepare`.

        Raises:
            InvalidArgument: If the runtime rejects the file, an argument is not valid, or this device hosts no runtime.
            OSError: If the file cannot be read.
            MissedDeadline: If `timeout` (seconds; None = no limit) passes.
            DeadObject: If the driver exits.
        """
        from nnfmq.importers.hosted import load_hosted  # most applications have no such device

        describe = partial(self._describe_file, deadline_after(timeout))
        return load_hosted(file, describe, shapes=shapes, signature=signature, options=runtime_options)

    def describe(self, file: SourceArgument, *, timeout: float | None = None) -> HostedDescription:
        """Return the description of a file by this device, which hosts a runtime; blocks. Raises as `load`."""
        from nnfmq.importers.hosted import describe_hosted  # most applications have no such device

        return describe_hosted(file, partial(self._describe_file, deadline_after(timeout)))

    def _describe_file(
        self, deadline_ns: int | None, call: HostedCall, parts: Sequence[SharedConstants]
    ) -> tuple[HostedDescription, Sequence[SharedConstants]]:
        """Return the device's description of a file, and the file's parts, in memory that clients share; blocks."""

        def query(connection: Connection) -> tuple[messages.FileDescription, list[int]]:
            pools = tuple(map(messages.memory_to_data, parts))
            message = messages.DescribeFile(
                connection.next_call_id(),
                self.info.name,
                to_wire_deadline(connection, deadline_ns),
                call.encode(),
                pools,
            )
            fds: list[int] = []
            with ExitStack() as undo:
                undo.callback(close_all, fds)
                reply = connection.call(
                    message, messages.FileDescription, memory_fds(parts), deadline_ns, on_fds=fds.extend
                )
                undo.pop_all()
            return reply, fds

        reply, fds = self._call(query, deadline_ns)
        used = _with_replacements(parts, reply.replaced, fds)
        try:
            return msgspec.json.decode(reply.description, type=HostedDescription), used
        except msgspec.DecodeError as error:
            raise ProtocolError(f"the driver describes a file wrongly: {error}") from error

    def prepare_encoded(
        self,
        model: ModelSignature,
        data: bytes,
        pools: Sequence[Pool],
        *,
        preference: ExecutionPreference,
        priority: Priority,
        deterministic: bool,
        deadline_ns: int | None,
        name: str,
        version: int,
    ) -> PreparedModel:
        """Prepare the model that `serialize.models.encode_model` has returned as `data` and `pools`; blocks.

        `model` describes its inputs and outputs. Of an interface version of HIDL it must be a NamedModel. If the
        driver dies, the model is not prepared again. The driver's statistics show `name` and `version`, which are those
        of the model repository. Raises as `prepare`. The caller closes the result.
        """
        message = self._prepare_message(model, data, pools, preference, priority, deadline_ns)
        hints, extensions = (
            messages.hints_to_data(*self._with_deterministic_hint((), ())) if deterministic else ((), ())
        )
        message = replace(message, hints=hints, extensions=extensions, name=name, version=version)
        return self._prepare(message, memory_fds(pools), model, deadline_ns)

    def _prepare_message(
        self,
        model: Model | ModelSignature,
        data: bytes,
        pools: Sequence[Pool],
        preference: ExecutionPreference,
        priority: Priority,
        deadline_ns: int | None,
    ) -> messages.PrepareModel:
        """Return the call; `_prepare` sets its id."""
        return messages.PrepareModel(
            0,
            self.info.name,
            preference,
            priority,
            to_wire_deadline(self._connection, deadline_ns),
            data,
            tuple(map(messages.memory_to_data, pools)),
            self._consumers(model),
        )

    def reach(self, deadline_ns: int | None, wait: bool) -> Connection:
        """Return the connection to the driver, or to its successor, of a device that does not die with it; blocks."""
        assert self._reach is not None
        return self._reach(self.info.name, deadline_ns, wait)

    def _prepare_in(
        self,
        directory: CacheDirectory,
        message: messages.PrepareModel,
        fds: Sequence[int],
        model: Model | NamedModel,
        deadline_ns: int | None,
        progress: ProgressReport | None,
    ) -> PreparedModel:
        """Try the directory's saved files first; on any failure compile again, with new files (CACHE-11)."""
        with directory.open_saved_files() as saved:
            if saved is not None:
                try:
                    return self._prepare_from_cache(directory.token, saved, model, deadline_ns, message.name)
                except NnfmqError as error:
                    _log.info("preparing from scratch, because the cache cannot be used: %s", error)
        with directory.create_files() as created:
            message = replace(message, caches=messages.CachesData(directory.token, *map(len, created)))
            return self._prepare(message, [*fds, *created.model, *created.data], model, deadline_ns, progress)

    def prepare_from_cache(
        self,
        token: bytes,
        model_cache: Sequence[int],
        data_cache: Sequence[int],
        *,
        model: Model | ModelSignature,
        timeout: float | None = None,
    ) -> PreparedModel:
        """Prepare the model that was saved under `token` (prepareModelFromCache); blocks. The caller closes the result.

        Args:
            token: 32 bytes.
            model_cache: Fds of the cache files, as many as `info` specifies, open for reading and writing. Borrowed.
            data_cache: As `model_cache`.
            model: Describes the inputs and outputs, against which the driver's results are validated.
            timeout: In seconds; also the preparation's deadline. None = no limit.

        Raises:
            InvalidArgument: If the number of files or the token's length is wrong.
            GeneralFailure: If the files are not exactly what this driver saved.
            MissedDeadline: If the timeout passes.
            DeadObject: If the driver exits.
        """
        return self._prepare_from_cache(to_token(token), (model_cache, data_cache), model, deadline_after(timeout))

    def _prepare_from_cache(
        self,
        token: bytes,
        files: tuple[Sequence[int], Sequence[int]],
        model: Model | ModelSignature,
        deadline_ns: int | None,
        name: str = "",
    ) -> PreparedModel:
        caches = messages.CachesData(token, *map(len, files))
        message = messages.PrepareModelFromCache(0, self.info.name, to_limit_field(deadline_ns), caches, name)
        return self._prepare(message, [*files[0], *files[1]], model, deadline_ns)

    def _prepare(
        self,
        message: messages.PrepareModel | messages.PrepareModelFromCache,
        fds: Sequence[int],
        model: Model | ModelSignature,
        deadline_ns: int | None,
        progress: ProgressReport | None = None,
    ) -> PreparedModel:
        """Send either call, and return the prepared model."""

        def prepare(connection: Connection) -> PreparedModel:
            return self._prepare_over(connection, message, fds, model, deadline_ns, progress)

        return self._call(prepare, deadline_ns)

    def _prepare_over(
        self,
        connection: Connection,
        message: messages.PrepareModel | messages.PrepareModelFromCache,
        fds: Sequence[int],
        model: Model | ModelSignature,
        deadline_ns: int | None,
        progress: ProgressReport | None,
    ) -> PreparedModel:
        def on_notification(notification: messages.PreparationProgress) -> None:
            if progress is not None:
                progress(notification.done, notification.total, notification.is_kept)

        vlog("compilation", "device %s prepares model %r", self.info.name, message.name)
        inputs, outputs = model_signature(model, [self.info])
        states = () if isinstance(model, Model) else tuple(getattr(model, "states", ()))
        prepared = PreparedModel(connection, None, inputs, outputs, self.info.name, self._extension_names(), states)
        prepared.metadata = getattr(model, "metadata", None)
        prepared.data_files = getattr(model, "data_files", ())
        preparation = self._observe(message, model, prepared)
        try:
            connection.call(
                replace(message, call=connection.next_call_id()),
                messages.PreparedModelReady,
                fds,
                deadline_ns,
                on_reply=prepared.handle.on_prepared,
                on_notification=on_notification,
            )
        except BaseException as error:
            vlog("compilation", "device %s does not prepare model %r: %s", self.info.name, message.name, error)
            prepared.close()  # the driver may have replied just before a signal handler raised
            if preparation is not None:
                preparation.fail(error)
            if isinstance(error, MissedDeadlineTransient):
                waited = f"the deadline passed before device {self.info.name!r} had prepared the model"
                raise MissedDeadlineTransient(f"{waited}, which it may have to compile first: {error}") from None
            raise
        vlog("compilation", "%r is ready, with id %d", prepared, prepared.model_id)
        if preparation is not None:
            prepared.handle.observed = preparation.finish(prepared.handle.inputs, prepared.handle.outputs)
        return prepared

    def _observe(
        self,
        message: messages.PrepareModel | messages.PrepareModelFromCache,
        model: Model | ModelSignature,
        prepared: PreparedModel,
    ) -> Preparation | None:
        """Return a report of a preparation to the observers of this process; None if there are none."""
        options: tuple[int, int] = DEFAULT_PREFERENCE, Priority.MEDIUM  # a preparation from a cache has none
        is_cached = True
        if isinstance(message, messages.PrepareModel):
            options, is_cached = (message.preference, message.priority), bool(message.caches.token)
        handle, device = prepared.handle, (self.info.name, self.info.version)
        return begin_preparation(
            model, handle.inputs, handle.outputs, len(handle.states), self._choice, options, is_cached, device=device
        )

    def _extension_names(self) -> frozenset[str]:
        return frozenset(extension.name for extension in self.info.extensions)

    def _consumers(self, model: Model | ModelSignature) -> tuple[tuple[int, ...], ...]:
        """Return numberOfConsumers of each subgraph's operands, which only HIDL has."""
        if self._connection.is_aidl:
            return ()
        hal_model = to_hal_model(model)
        return tuple(tuple(number_of_consumers(graph)) for graph in (hal_model.main, *hal_model.referenced))

    def allocate(
        self,
        *,
        inputs: Sequence[ModelRole] = (),
        outputs: Sequence[ModelRole] = (),
        dimensions: Sequence[int] = (),
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> Buffer:
        """Return a buffer in the device's memory for these inputs and outputs of its models; blocks.

        The caller closes it. `nnfmq.allocate` falls back to shared memory if the device cannot hold the tensor.

        Args:
            inputs: Models of this device and indexes of their inputs that the buffer will be.
            outputs: Models of this device and indexes of their outputs that the buffer will be. All roles have the same
                type, scale and zero point.
            dimensions: Dimensions that the models leave unknown. One of 0, or none at all, stays unknown: the buffer
                then takes any.
            timeout: In seconds; None = no limit.

        Raises:
            InvalidArgument: If there is no role, or roles are invalid, occur twice or contradict each other.
            GeneralFailure: If the type has no arrays.
            ResourceExhausted: If the client's memory quota is exceeded.
            MissedDeadline: If the timeout passes.
            DeadObject: If the driver exits.
        """
        deadline_ns = deadline_after(timeout)

        def allocate(connection: Connection) -> Buffer:
            from nnfmq.client.model.buffer_allocation import allocate_in_device  # few applications have buffers

            left_s = remaining_s(deadline_ns)
            return allocate_in_device(connection, self.info.name, inputs, outputs, tuple(dimensions), left_s)

        return self._call(allocate, deadline_ns)

    def _call(self, call: Callable[[Connection], ResultT], deadline_ns: int | None) -> ResultT:
        """Return `call(connection)`; again if the driver has died and the client recovers."""
        reach = self._reach
        if reach is None:
            return call(self._connection)
        try:
            return call(reach(self.info.name, deadline_ns, True))
        except DeadObject:
            return call(reach(self.info.name, deadline_ns, True))


class _PrepareAgain(PrepareAgain):
    """Prepares a model of `device` again, with the options that it was prepared with."""

    def __init__(self, device: Device, model: Model | FinishedModel, options: PrepareOptions) -> None:
        super().__init__()
        self._device, self._model, self._options = device, model, options

    def _reach(self, deadline_ns: int | None, wait: bool) -> tuple[Connection, DeviceOf]:
        return self._device.reach(deadline_ns, wait), lambda _name: self._device

    def _prepare(self, device_of: DeviceOf, deadline_ns: int | None) -> ModelHandle:
        device: Device = device_of(self._device.info.name).chosen_by(self._device.choice)
        return device.prepare(self._model, **with_time_left(self._options, deadline_ns)).handle


def hosts_runtime(info: DeviceInfo) -> bool:
    """Return whether a device runs model files of another runtime, and nothing else."""
    return any(extension.name == HOSTED for extension in info.extensions)


def model_signature(
    model: Model | ModelSignature, devices: Sequence[DeviceInfo]
) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]:
    """Return the inputs and outputs of a model, whose extensions one of `devices` supports."""
    if not isinstance(model, Model):
        return tuple(model.inputs), tuple(model.outputs)
    main, types = model.main, None
    if model.extensions:  # few models have any
        types = extension_types(model, devices)
    inputs = [operand_info(main.operands[index], f"input {i}", types) for i, index in enumerate(main.input_indexes)]
    outputs = [operand_info(main.operands[index], f"output {i}", types) for i, index in enumerate(main.output_indexes)]
    return tuple(inputs), tuple(outputs)


# ----------------------------------------------------------------------------------------------------------------------
# The operand types of extensions, as the device that supports them reports them.
#
# The client library has no plug-ins: the element types that it needs for arrays come from the driver, and are
# validated.


def extension_types(model: Model, devices: Sequence[DeviceInfo]) -> dict[OperandType, ElementInfo]:
    """Return the element types of a model's extensions by the model's type codes, as `devices` report them.

    Of several devices with one extension, the last decides.

    Raises:
        GeneralFailure: If an input or output has an extension's type that no device has.
        ProtocolError: If a device reports an invalid type.
    """
    stated = {extension.name: extension.operand_types for device in devices for extension in device.extensions}
    known = {
        OperandType(extension_code(entry.prefix, kind.type, prefix_bits=HIDL_PREFIX_BITS)): _element(entry.name, kind)
        for entry in model.extensions
        if entry.prefix  # the driver rejects a prefix of 0
        for kind in stated.get(entry.name, ())
    }
    _require_known(model, known, devices)
    return known


def _require_known(model: Model, known: dict[OperandType, ElementInfo], devices: Sequence[DeviceInfo]) -> None:
    names = {entry.prefix: entry.name for entry in model.extensions}
    for index in (*model.main.input_indexes, *model.main.output_indexes):
        code = model.main.operands[index].type
        name = names.get(extension_prefix(code)) if is_extension(code) else None
        if name is not None and code not in known:
            where = f"operand {index}: device {', '.join(device.name for device in devices)}"
            found = [extension.name for device in devices for extension in device.extensions]
            raise GeneralFailure(
                f"{where} has no type {extension_type(code)} of extension {name}; its extensions are: {found}"
            )


def _element(extension: str, kind: OperandTypeData) -> ElementInfo:
    from nnfmq.validation.values import element_info  # few models have such types

    try:
        return element_info(extension, kind)
    except InvalidArgument as error:
        raise ProtocolError(f"the driver reports {error}") from error


def _with_replacements(
    parts: Sequence[SharedConstants], indexes: Sequence[int], fds: list[int]
) -> list[SharedConstants]:
    """Return the parts of files, those with these indexes in the memory that a driver has sent for each instead.

    Takes ownership of `fds`.

    Raises:
        ProtocolError: If a memory is not sealed against writing, or cannot have the bytes of its part.
    """
    from nnfmq.base.shared_constants import SharedConstants  # imported with the files; most applications have none

    found = list(parts)
    with ExitStack() as undo:
        undo.callback(close_all, fds)
        for index in indexes:
            if index >= len(parts) or not fds:
                raise ProtocolError(f"the driver replaces part {index} of {len(parts)}, without a memory or a part")
            try:
                memory = Memory.adopt_constant(fds.pop(0))
            except InvalidArgument as error:
                raise ProtocolError(f"the driver sent memory that cannot replace a file's: {error}") from error
            found[index] = SharedConstants(memory)
            if memory.size_bytes != parts[index].size_bytes:
                raise ProtocolError(f"the driver replaces {parts[index].size_bytes} bytes by {memory.size_bytes}")
    return found
