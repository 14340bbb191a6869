"""CompilationBuilder: NNAPI's compilation, which prepares a model with the options that were set before."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from nnfmq.base.deadlines import deadline_after, remaining_s
from nnfmq.base.ownership import Closable, Uncopyable
from nnfmq.client.connection.device import Device
from nnfmq.client.connection.prepare_arguments import FinishedModel, NamedModel, PrepareOptions, to_token
from nnfmq.client.model.arrays import check_index
from nnfmq.client.model.compiled_model import CompiledModel
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.client.partitioned.devices import RuntimeDevice
from nnfmq.client.partitioned.runtime import Runtime
from nnfmq.hal.capabilities import PriorityCode
from nnfmq.hal.errors import BadState, InvalidArgument, NnfmqError
from nnfmq.hal.types import ExecutionPreference, Model, Priority
from nnfmq.nnapi.checks import ExtensionAttributes, required
from nnfmq.validation.values import validate_cache_token

__all__ = [
    "ChosenDevice",
    "CompilationBuilder",
    "OpenCacheFiles",
    "SharedModel",
    "UserCount",
    "checked_devices",
    "device_name",
    "driver_device",
    "extension_names",
    "prepare_with_files",
    "runtime_devices",
]


# ----------------------------------------------------------------------------------------------------------------------
# The devices that an application chooses for a compilation: those of a Client, or of a Runtime.


ChosenDevice: TypeAlias = Device | RuntimeDevice


def checked_devices(devices: Sequence[ChosenDevice]) -> tuple[ChosenDevice, ...]:
    """Return the devices of an application's list (N-API-13).

    Raises:
        InvalidArgument: If the list is empty, or has None or a device twice.
    """
    found = tuple(devices)
    for device in found:
        required(device, "a device")
    if not found:
        raise InvalidArgument("the list of devices is empty; None lets the runtime choose among all devices")
    names = [device_name(device) for device in found]
    if len(set(names)) != len(names):
        raise InvalidArgument(f"a device is listed twice: {', '.join(names)}")
    return found


def runtime_devices(devices: Sequence[ChosenDevice]) -> list[RuntimeDevice]:
    """Return the devices of a compilation with a runtime.

    Raises:
        InvalidArgument: If one is a device of a Client, which the runtime does not have.
    """
    found = [device for device in devices if isinstance(device, RuntimeDevice)]
    if len(found) != len(devices):
        raise InvalidArgument("a device of a Client is compiled for without `runtime`, and as the only device")
    return found


def device_name(device: ChosenDevice) -> str:
    """Return the name of a device."""
    return device.info.name if isinstance(device, Device) else device.name


def extension_names(device: ChosenDevice) -> list[str]:
    """Return the names of the extensions that a device supports."""
    extensions = device.info.extensions if isinstance(device, Device) else device.extensions
    return [extension.name for extension in extensions]


def driver_device(device: ChosenDevice) -> Device:
    """Return the device of a driver's connection; blocks while it connects. Raises as `RuntimeDevice.connected`."""
    return device if isinstance(device, Device) else device.connected()


# ----------------------------------------------------------------------------------------------------------------------
# UserCount: when to close what several objects share.


class UserCount:
    """The number of users of something that is closed when the last one has released it. Thread-safe.

    There is one user at first. `what` names it in errors.
    """

    def __init__(self, what: str, close: Callable[[], object]) -> None:
        self._what = what
        self._close = close
        self._lock = threading.Lock()
        self._count = 1

    def acquire(self) -> None:
        """Add a user, which calls `release` once.

        Raises:
            BadState: If the last user has released it.
        """
        with self._lock:
            if not self._count:
                raise BadState(f"this {self._what} is closed")
            self._count += 1

    def release(self) -> None:
        """Remove a user; after the last one, close what they shared."""
        with self._lock:
            self._count -= 1
            is_last = self._count == 0
        if is_last:
            self._close()


# ----------------------------------------------------------------------------------------------------------------------
# SharedModel: a compiled model that a compilation, its executions and its bursts use.


class SharedModel(Uncopyable):
    """A compiled model that a compilation, its executions and its bursts share: its `users`.

    `inputs` and `outputs` are those of requests: with the states.
    """

    def __init__(self, model: CompiledModel) -> None:
        states = tuple(state.tensor for state in model.states)
        self.model = model
        self.inputs = (*model.inputs, *states)
        self.outputs = (*model.outputs, *states)
        self.users = UserCount("model", model.close)

    @property
    def sends_padding(self) -> bool:
        """Whether a request tells the driver of an argument's padding: HIDL has no field for it (MEM-6)."""
        return self.model.memory_preference("output", 0).padding > 1


# ----------------------------------------------------------------------------------------------------------------------
# Compilation caches in files that the application has opened (the support library's setCachingFromFds).


_log = logging.getLogger("nnfmq.nnapi")


class OpenCacheFiles(NamedTuple):
    """A token, and fds of cache files, open for reading and writing. The application owns the fds."""

    token: bytes
    model: tuple[int, ...]
    data: tuple[int, ...]


def prepare_with_files(
    device: Device, model: Model | NamedModel, files: OpenCacheFiles, options: PrepareOptions
) -> PreparedModel:
    """Prepare from the files if the device accepts their content, otherwise compile and save to them (CACHE-11).

    Raises:
        InvalidArgument: If an fd is not open.
        NnfmqError: As `Device.prepare`.
    """
    deadline_ns = deadline_after(options.get("timeout"))
    if _are_filled(files):
        try:
            return device.prepare_from_cache(*files, model=model, timeout=remaining_s(deadline_ns))
        except NnfmqError as error:
            _log.info("preparing from scratch, because the cache cannot be used: %s", error)
    with_files = PrepareOptions(**options)
    with_files["token"], with_files["model_cache"], with_files["data_cache"] = files
    with_files["timeout"] = remaining_s(deadline_ns)
    return device.prepare(model, **with_files)


def _are_filled(files: OpenCacheFiles) -> bool:
    try:
        sizes = [os.fstat(fd).st_size for fd in (*files.model, *files.data)]
    except OSError as error:
        raise InvalidArgument(f"a cache file is not open: {error}") from error
    return bool(sizes) and all(sizes)


# ----------------------------------------------------------------------------------------------------------------------
# CompilationBuilder: NNAPI's compilation, which prepares a model with the options that were set before.


_EnumT = TypeVar("_EnumT", ExecutionPreference, PriorityCode)


class CompilationBuilder(Closable):
    """A compilation: set its options, then `finish` it. Close it, or use `with`.

    It may be closed when its executions and bursts were made: they keep the model.

    Args:
        model: A finished model: a ModelBuilder, a Model, or what `nnfmq.load` returns.
        devices: The devices that may execute it, each once. None = the runtime chooses among all devices, and uses the
            CPU device if they fail.
        runtime: The runtime that has the devices. For one device it may be None; the device may then be a Client's.

    Raises:
        InvalidArgument: If there is no model, no device or no runtime, or a device is listed twice.
        BadState: If the model is a ModelBuilder that is not finished.
    """

    def __init__(
        self,
        model: Model | NamedModel,
        devices: Sequence[ChosenDevice] | None = None,
        *,
        runtime: Runtime | None = None,
    ) -> None:
        required(model, "the model")
        self._model = model if isinstance(model, Model) else FinishedModel.of(model)
        self._devices = None if devices is None else checked_devices(devices)
        self._runtime = runtime
        if runtime is None:
            self.require_one_device("`runtime` is None, which")
        elif self._devices is not None:
            runtime_devices(self._devices)
        self._options = PrepareOptions()
        self._attributes = ExtensionAttributes()
        self._cache_files: OpenCacheFiles | None = None
        self._is_finished = False
        self._compiled: SharedModel | None = None

    # ------------------------------------------------------------------------------------------------ options

    def set_preference(self, preference: ExecutionPreference) -> None:
        """Set what the compilation optimizes; SUSTAINED_SPEED if it is not called (`hal.types.DEFAULT_PREFERENCE`).

        Raises:
            BadState: If the compilation is finished.
            InvalidArgument: If there is no such preference.
        """
        self._require_unfinished("set_preference")
        self._options["preference"] = _member(ExecutionPreference, preference)

    def set_priority(self, priority: PriorityCode) -> None:
        """Set the priority of the model's executions among those of this client; MEDIUM if it is not called.

        Raises:
            BadState: If the compilation is finished.
            InvalidArgument: If there is no such priority.
        """
        self._require_unfinished("set_priority")
        self._options["priority"] = Priority[_member(PriorityCode, priority).name]

    def set_timeout(self, timeout: float | None) -> None:
        """Limit the time that `finish` may take, in seconds; None = no limit.

        Raises:
            BadState: If the compilation is finished.
            InvalidArgument: If it is not for exactly one device, or `timeout` is negative.
        """
        self._require_unfinished("set_timeout")
        self.require_one_device("a timeout")
        if timeout is not None and not timeout >= 0:  # written so that NaN is rejected as well
            raise InvalidArgument(f"a timeout is 0 or more seconds, or None for no limit; got {timeout}")
        self._options["timeout"] = timeout

    def set_caching(self, cache_dir: str | os.PathLike[str], token: bytes) -> None:
        """Read the compilation from cache files in a directory, or save it there. `token` identifies the model.

        Raises:
            BadState: If the compilation is finished.
            InvalidArgument: If the token does not have 32 bytes.
        """
        self._require_unfinished("set_caching")
        required(cache_dir, "the directory")
        validate_cache_token(to_token(required(token, "the token")))
        self._options["cache_dir"], self._options["token"] = cache_dir, token
        self._cache_files = None

    def set_caching_from_fds(self, model_cache: Sequence[int], data_cache: Sequence[int], token: bytes) -> None:
        """Read the compilation from open cache files, or save it there: as many as the device needs. Borrows the fds.

        Raises:
            BadState: If the compilation is finished.
            InvalidArgument: If it is not for exactly one device, or the token does not have 32 bytes.
        """
        self._require_unfinished("set_caching_from_fds")
        self.require_one_device("caching in open files")
        validate_cache_token(to_token(required(token, "the token")))
        files = required(model_cache, "the list of model cache files"), required(data_cache, "that of data cache files")
        self._cache_files = OpenCacheFiles(token, tuple(files[0]), tuple(files[1]))
        self._options.pop("cache_dir", None)
        self._options.pop("token", None)

    def add_extension_attribute(self, extension_name: str, code: int, value: bytes) -> None:
        """Add a vendor's hint for the compilation; the device ignores attributes that it does not know.

        Raises:
            BadState: If the compilation is finished.
            InvalidArgument: If it is not for exactly one device, which supports the extension.
        """
        self._require_unfinished("add_extension_attribute")
        self.check_extension(extension_name)
        self._attributes.add(extension_name, code, value)

    def _require_unfinished(self, function: str) -> None:
        if self._is_finished:
            raise BadState(f"{function}: this compilation is finished; make another one for other options")

    def require_one_device(self, what: str) -> ChosenDevice:
        """Return the device of an explicit list of exactly one (QOS-5, TIM-1).

        Raises:
            InvalidArgument: If there are several, or the runtime chooses.
        """
        if self._devices is None or len(self._devices) != 1:
            raise InvalidArgument(
                f"{what} needs a compilation for exactly one device: CompilationBuilder(model, [device])"
            )
        return self._devices[0]

    def check_extension(self, name: str) -> None:
        """Require exactly one device, which supports an extension (EXT-6).

        Raises:
            InvalidArgument: If it does not.
        """
        device = self.require_one_device("an extension attribute")
        supported = extension_names(device)
        if required(name, "the extension's name") not in supported:
            raise InvalidArgument(
                f"device {device_name(device)!r} does not support {name!r}; its extensions are: {supported}"
            )

    # ------------------------------------------------------------------------------------------------ compiling

    def finish(self) -> None:
        """Compile the model; blocks until it is ready. The compilation is finished, too, if this raises.

        Raises:
            BadState: If the compilation is finished.
            InvalidArgument: If the model or an option is invalid.
            GeneralFailure: If the device cannot execute the model.
            MissedDeadline: If the timeout passes.
            DeadObject: If the driver exits.
            NnfmqError: The error that the driver replied.
        """
        self._require_unfinished("finish")
        self._is_finished = True
        self._options["hints"] = self._attributes.hints
        self._options["extensions"] = self._attributes.extensions
        self._compiled = SharedModel(self._compile())

    def _compile(self) -> CompiledModel:
        if self._cache_files is not None:
            device = driver_device(self.require_one_device("caching in open files"))
            return prepare_with_files(device, self._model, self._cache_files, self._options)
        if self._runtime is None:
            return self.require_one_device("a compilation without a runtime").prepare(self._model, **self._options)
        devices = None if self._devices is None else runtime_devices(self._devices)
        return self._runtime.prepare(self._model, devices, **self._options)

    @property
    def is_explicit(self) -> bool:
        """Whether the application has chosen the devices: then nothing falls back to other memory or devices."""
        return self._devices is not None

    @property
    def is_compiled(self) -> bool:
        """Whether `finish` has succeeded, and this object is not closed."""
        return self._compiled is not None

    def require_compiled(self, user: str) -> SharedModel:
        """Return the compiled model.

        Raises:
            BadState: If the compilation is not finished, has failed or is closed. The text begins with `user`.
        """
        if self._compiled is None:
            state = "has failed, or is closed" if self._is_finished else "is not finished: call finish() first"
            raise BadState(f"{user}: the compilation {state}")
        return self._compiled

    def get_preferred_memory_alignment_for_input(self, index: int) -> int:
        """Return of what number of bytes the offset of an input in a memory is best a multiple.

        Raises:
            BadState: If the compilation is not finished, or has failed.
            InvalidArgument: If there is no such input.
        """
        return self._preference("input", index)[0]

    def get_preferred_memory_padding_for_input(self, index: int) -> int:
        """Return to a multiple of what number of bytes an input's space is best padded. Otherwise as the alignment."""
        return self._preference("input", index)[1]

    def get_preferred_memory_alignment_for_output(self, index: int) -> int:
        """Return of what number of bytes the offset of an output in a memory is best a multiple. As for inputs."""
        return self._preference("output", index)[0]

    def get_preferred_memory_padding_for_output(self, index: int) -> int:
        """Return to a multiple of what number of bytes an output's space is best padded. As for inputs."""
        return self._preference("output", index)[1]

    def _preference(self, kind: Literal["input", "output"], index: int) -> tuple[int, int]:
        shared = self.require_compiled(f"the preferred memory of an {kind}")
        check_index(kind, shared.inputs if kind == "input" else shared.outputs, index)
        return shared.model.memory_preference(kind, index)

    def close(self) -> None:
        """Release the model, unless an execution or a burst still uses it. Idempotent."""
        self._is_finished = True
        compiled, self._compiled = self._compiled, None
        if compiled is not None:
            compiled.users.release()


def _member(kind: type[_EnumT], value: _EnumT) -> _EnumT:
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(f"{member.name} ({member.value})" for member in kind)
        raise InvalidArgument(f"{kind.__name__} {value!r}: allowed are {allowed}") from None
