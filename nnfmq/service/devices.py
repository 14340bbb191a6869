"""The devices of this driver: those that its configuration lists, and those that plug-ins bring.

The configuration is a TOML file, `$NNFMQ_DEVICES` or the one that comes with the package (docs/how-to/devices.md has
its keys), read once for all workers: one that cannot be read stops the driver. A plug-in is an entry point of
the group `nnfmq.devices` that names a subclass of `Device`; each worker makes its own, as hardware does not survive a
fork. One that cannot be loaded, or whose answers are impossible, is left out with a log line and does not break the
others (DEV-10). A device's status is one byte, which all workers share and an administrator sets (DEV-14).
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

from nnfmq.engines import interpreter
from nnfmq.engines.execution import DEFAULT_RUN_OPTIONS, BoundProgram, PreparedProgram, RunOptions
from nnfmq.hal.capabilities import Capabilities, NumberOfCacheFiles
from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.extension_codes import is_extension
from nnfmq.hal.types import DeviceStatus, DeviceType, Model, Operation, OperationType, OutputShape, Subgraph
from nnfmq.operations.extensions import INSTALLED, VendorExtension
from nnfmq.serialize import control_protocol, messages
from nnfmq.service import compile_jobs
from nnfmq.service.caching import interpreter_cache_format, program_cache
from nnfmq.service.caching.compilation_cache import CacheContents, Identity
from nnfmq.service.caching.interpreter_cache_format import Groups
from nnfmq.service.device import FEATURE_LEVEL, Device
from nnfmq.service.device_configuration import DEVICES_MAX, DeviceEntry, read_configuration, require_device_name
from nnfmq.service.error_translation import wrap_plugin_call
from nnfmq.validation.values import validate_cache_counts, validate_capabilities, validate_extension

__all__ = [
    "CompiledDevice",
    "Devices",
    "InterpreterDevice",
    "PlugInDevice",
    "load_devices",
    "make_devices",
]

GROUP = "nnfmq.devices"
_log = logging.getLogger("nnfmq.devices")


class InterpreterDevice(Device):
    """The reference interpreter, whole or limited to some operations, as its entry in the configuration says."""

    def __init__(self, entry: DeviceEntry) -> None:
        super().__init__()
        self.name = entry.name
        self._types = entry.types()
        self._operations = entry.operation_types()
        self._capabilities = entry.capabilities()

    @property
    def capabilities(self) -> Capabilities:
        """What the configuration says."""
        return self._capabilities

    @property
    def extensions(self) -> Iterable[VendorExtension]:
        """All that plug-ins brought, where nothing is left out."""
        return INSTALLED.values() if self._types is None and self._operations is None else ()

    def supports(self, _model: Model, subgraph: Subgraph, operation: Operation) -> bool:
        """Return True for what the interpreter computes and the configuration does not leave out."""
        return self._admits(subgraph, operation) and interpreter.supports(subgraph, operation)

    def _admits(self, subgraph: Subgraph, operation: Operation) -> bool:
        if self._types is None and self._operations is None:
            return True
        if is_extension(operation.type) or not operation.inputs:
            return False
        first = operation.inputs[operation.type == OperationType.SELECT]  # its first one is always a boolean
        return _is_one_of(operation.type, self._operations) and _is_one_of(subgraph.operands[first].type, self._types)

    def compile(self, model: Model) -> PreparedProgram:
        """Prepare the model for the interpreter."""
        return interpreter.prepare(model)

    @property
    def cache_files_needed(self) -> NumberOfCacheFiles:
        """The model's file, and the constants'."""
        return NumberOfCacheFiles(1, 1)

    def save(self, model: Model, program: PreparedProgram) -> CacheContents | None:
        """Return the model and its packed constants."""
        assert isinstance(program, interpreter.Program)
        return interpreter_cache_format.save(model, program.packed)

    def restore(self, contents: CacheContents) -> tuple[Model, PreparedProgram]:
        """Bind the saved model, without validating or packing again."""
        return interpreter_cache_format.restore(contents)


class CompiledDevice(InterpreterDevice):
    """As the interpreter, with machine code for what the compiling engine has kernels for (the extra `compiled`)."""

    @property
    def obstacle(self) -> str:
        """That llvmlite is not installed."""
        return "" if _llvmlite() else "llvmlite is not installed: pip install 'nnfmq[compiled]'"

    @property
    def version_string(self) -> str:
        """What generates the code belongs to it."""
        return f"{super().version_string} llvmlite-{_llvmlite() or 'none'}"

    @property
    def identity(self) -> Identity:
        """The instruction set, which may be forced, is part of it."""
        from nnfmq.engines.compiled.objects import host_target

        return Identity(self.name, f"{self.version_string} {host_target().name}")

    def compile(self, model: Model) -> PreparedProgram:
        """Generate machine code, which takes long, and keep it in the driver's cache.

        Where workers share it the program is linked once more, over the memory that they share: its own goes.
        """
        compile_jobs.warm()
        from nnfmq.engines.compiled.program import prepare  # what it imports need not be installed

        program = prepare(model, compile=compile_jobs.compile_in_processes)
        entry = program_cache.entry_for(self.identity, model)
        shared = None if entry is None else entry.store(program.packed)
        if entry is None or shared is None:
            return program
        try:
            return _linked(entry, model, shared) or program
        except MemoryError:  # for both at once: its own will do
            return program

    def stored(self, model: Model) -> PreparedProgram | None:
        """Link what the driver's cache has. What cannot be linked is forgotten: else it would fail for good."""
        entry = program_cache.entry_for(self.identity, model)
        packed = None if entry is None else entry.find()
        return None if entry is None or packed is None else _linked(entry, model, packed)

    def stand_in(self, model: Model) -> PreparedProgram | None:
        """Prepare the model for the interpreter."""
        return interpreter.prepare(model)

    def restore(self, contents: CacheContents) -> tuple[Model, PreparedProgram]:
        """Link the saved code, without validating, packing or generating again."""
        from nnfmq.engines.compiled.program import prepare

        return interpreter_cache_format.restore(contents, prepare)


def _linked(entry: program_cache.Entry, model: Model, packed: Groups) -> PreparedProgram | None:
    """Return the program that lies in `packed`; None where it cannot be linked, after removing it from the cache."""
    from nnfmq.engines.compiled.program import prepare

    try:
        return prepare(model, packed)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  the linker's too: the model is compiled afresh
        _log.error("an entry of the cache is removed: it cannot be linked\n%s", traceback.format_exc())
        entry.remove()
        return None


@cache
def _llvmlite() -> str | None:
    """Return its version, None where it is not installed."""
    try:
        return version("llvmlite")
    except PackageNotFoundError:
        return None


def _is_one_of(code: IntEnum, allowed: frozenset[int] | None) -> bool:
    return allowed is None or code in allowed


class PlugInDevice(Device):
    """A plug-in's device: it is asked once what it is, and what it raises later fails one call (LIFE-8)."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.name, self.type, self.feature_level = device.name, DeviceType(device.type), device.feature_level
        self._version, self._capabilities = device.version_string, device.capabilities
        self._extensions, self._cache_files = tuple(device.extensions), device.cache_files_needed
        self._what = f"device {device.name!r}"
        self._supports, self._compile = (
            wrap_plugin_call(self._what, device.supports),
            wrap_plugin_call(self._what, device.compile),
        )
        self._save, self._restore = (
            wrap_plugin_call(self._what, device.save),
            wrap_plugin_call(self._what, device.restore),
        )

    @property
    def version_string(self) -> str:
        """What the plug-in said."""
        return self._version

    @property
    def capabilities(self) -> Capabilities:
        """What the plug-in said."""
        return self._capabilities

    @property
    def extensions(self) -> Iterable[VendorExtension]:
        """What the plug-in said."""
        return self._extensions

    def supports(self, model: Model, subgraph: Subgraph, operation: Operation) -> bool:
        """Ask the plug-in. Raises GeneralFailure where it fails."""
        return bool(self._supports(model, subgraph, operation))

    def compile(self, model: Model) -> PreparedProgram:
        """Let the plug-in make the model ready. Raises GeneralFailure where it fails, then and whenever it is used."""
        return _PlugInProgram(self._what, self._compile(model))

    @property
    def cache_files_needed(self) -> NumberOfCacheFiles:
        """What the plug-in said."""
        return self._cache_files

    def save(self, model: Model, program: PreparedProgram) -> CacheContents | None:
        """Ask the plug-in for what it needs to make its program again. Raises GeneralFailure where it fails."""
        assert isinstance(program, _PlugInProgram)
        contents: CacheContents | None = self._save(model, program.program)
        return contents

    def restore(self, contents: CacheContents) -> tuple[Model, PreparedProgram]:
        """Let the plug-in make its program again. Raises GeneralFailure where it fails."""
        restored = self._restore(contents)
        if not (isinstance(restored, tuple) and len(restored) == 2 and isinstance(restored[0], Model)):
            raise GeneralFailure(f"{self._what} restored {restored!r:.80}, not a model and its program")
        return restored[0], _PlugInProgram(self._what, restored[1])


class _PlugInProgram:
    def __init__(self, name: str, program: PreparedProgram) -> None:
        self._name = name
        self.program = program

    def bind(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> BoundProgram:
        return _PlugInExecution(self._name, wrap_plugin_call(self._name, lambda: self.program.bind(inputs, outputs))())


class _PlugInExecution:
    def __init__(self, name: str, execution: BoundProgram) -> None:
        self._name = name
        self._execution = execution

    def run(self, limits: RunOptions = DEFAULT_RUN_OPTIONS) -> tuple[OutputShape, ...]:
        shapes: tuple[OutputShape, ...] = wrap_plugin_call(self._name, lambda: self._execution.run(limits))()
        return shapes


class Devices(Mapping[str, Device]):
    """The devices of a driver by name, in the order in which it lists them."""

    def __init__(self, devices: Iterable[Device]) -> None:
        self._by_name = {device.name: device for device in devices}

    def __getitem__(self, name: str) -> Device:
        return self._by_name[name]

    def __iter__(self) -> Iterable[str]:  # type: ignore[override]
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str) -> Device:
        """Return the device called `name`. Raises InvalidArgument that lists the known ones."""
        try:
            return self._by_name[name]
        except KeyError:
            known = ", ".join(sorted(self._by_name))
            raise InvalidArgument(f"there is no device {name!r}; this driver has: {known}") from None

    def share_status(self, page: memoryview) -> None:
        """Let `page`, DEVICES_MAX bytes that all workers of a driver see, hold every device's status."""
        for number, device in enumerate(self._by_name.values()):
            device.status_byte = page[number : number + 1]

    def set_status(self, name: str, status: DeviceStatus) -> None:
        """Make a device AVAILABLE, BUSY or OFFLINE, for all workers. Raises InvalidArgument."""
        if status not in (DeviceStatus.AVAILABLE, DeviceStatus.BUSY, DeviceStatus.OFFLINE):
            raise InvalidArgument(f"a device is made AVAILABLE, BUSY or OFFLINE, not {status.name}")
        self.find(name).status_byte[0] = status


@cache
def load_devices() -> Devices:
    """Return this process's devices, loaded at the first call. Raises as `read_configuration`."""
    return make_devices(read_configuration())


def make_devices(configured: Iterable[DeviceEntry]) -> Devices:
    """Return the devices that a configuration lists, and those of plug-ins."""
    found: dict[str, Device] = {}
    for device in (*map(_configured, configured), *_plugged_in()):
        if device.name in found:
            _log.warning("a second device called %r is left out", device.name)
        elif len(found) == DEVICES_MAX:
            _log.warning("device %r is left out: there are %d already", device.name, DEVICES_MAX)
        else:
            found[device.name] = device
    return Devices(found.values())


def _configured(entry: DeviceEntry) -> Device:
    return CompiledDevice(entry) if entry.engine == "compiled" else InterpreterDevice(entry)


def _plugged_in() -> list[Device]:
    devices = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            devices.append(_checked(_made(entry.load())))
        except (Exception, SystemExit) as error:  # noqa: BLE001  a vendor's code may raise anything
            _log.warning("device %s (%s) is left out: %s: %s", entry.name, entry.value, type(error).__name__, error)
    return devices


def _made(kind: Callable[[], object]) -> Device:
    device = kind()
    if not isinstance(device, Device):
        raise InvalidArgument(f"a plug-in names a subclass of nnfmq.service.device.Device, not {kind!r}")
    return PlugInDevice(device)


def _checked(device: Device) -> Device:
    """Return a plug-in's device, whose answers are possible, and can be sent. Raises InvalidArgument."""
    require_device_name(device.name)
    if not device.version_string:
        raise InvalidArgument("a version string must not be empty (DEV-4)")
    if not 1 <= device.feature_level <= FEATURE_LEVEL:
        raise InvalidArgument(f"feature level {device.feature_level}; this driver has 1 to {FEATURE_LEVEL}")
    for extension in device.extensions:
        validate_extension(extension.described)
    validate_capabilities(device.capabilities)
    validate_cache_counts(device.cache_files_needed.model, device.cache_files_needed.data)
    control_protocol.encode(messages.DeviceList(0, (device.info,)))
    return device
