"""Plug-ins: devices and vendor extensions from the entry points of installed packages.

An entry point names a subclass of `DeviceBase`. Each worker creates its own instances, because hardware handles do not
survive a fork. A plug-in that cannot be loaded, or that describes its device with invalid values, is skipped with a log
line (DEV-10); an exception of a plug-in during a call fails that call only (LIFE-8).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from nnfmq.base import settings
from nnfmq.base.packages import entry_points_of
from nnfmq.driver.cache.files import CacheContents
from nnfmq.driver.devices.configuration import require_device_name
from nnfmq.driver.devices.device import FEATURE_LEVEL, DeviceBase, SandboxNeeds
from nnfmq.driver.devices.hosted_runtimes import LazyDevice, allowed_runtimes
from nnfmq.driver.devices.installation import DEVICES_GROUP, OPERATIONS_GROUP
from nnfmq.driver.memory.private import ConstantPool
from nnfmq.driver.session.error_translation import wrap_plugin_call
from nnfmq.engines.execution import BoundProgram, PreparedProgram
from nnfmq.hal.capabilities import Capabilities, NumberOfCacheFiles
from nnfmq.hal.errors import GeneralFailure, InvalidArgument, NnfmqError
from nnfmq.hal.hosted import HostedCall, HostedDescription
from nnfmq.hal.types import DeviceType, Model, Operation, OutputShape, Subgraph
from nnfmq.operations.declaration import Declaration, Plan
from nnfmq.operations.extensions import VendorExtension, install
from nnfmq.serialize import control_protocol, messages
from nnfmq.validation.values import validate_cache_counts, validate_capabilities, validate_extension

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["PlugInDevice", "load_extensions", "load_plugin_devices"]

_log = logging.getLogger("nnfmq.devices")
_THREADS_MAX = 255  # a byte of the page of the cores has their number


class PlugInDevice(DeviceBase):
    """Wrapper of a plug-in's device that isolates the driver from its errors.

    The properties are read once. An exception in a method becomes GeneralFailure for that call (LIFE-8).
    """

    def __init__(self, device: DeviceBase) -> None:
        super().__init__()
        self.name, self.type, self.feature_level = device.name, DeviceType(device.type), device.feature_level
        self._version, self._capabilities = device.version_string, device.capabilities
        self._extensions, self._cache_files = tuple(device.extensions), device.cache_files_needed
        self._unavailable_reason = str(device.unavailable_reason)
        self._label = f"device {device.name!r}"
        self._supports = wrap_plugin_call(self._label, device.supports)
        self._compile = wrap_plugin_call(self._label, device.compile)
        self._save = wrap_plugin_call(self._label, device.save)
        self._restore = wrap_plugin_call(self._label, device.restore)
        self._load_cached = wrap_plugin_call(self._label, device.load_cached)
        self._compile_baseline = wrap_plugin_call(self._label, device.compile_baseline)
        self._prefetch_imports = wrap_plugin_call(self._label, device.prefetch_imports)
        self._describe_file = wrap_plugin_call(self._label, device.describe_file)
        self.uses_cores = bool(device.uses_cores)
        self.sandbox_needs = device.sandbox_needs

    @property
    def version_string(self) -> str:
        """The plug-in's version string, as read when the device was created."""
        return self._version

    @property
    def capabilities(self) -> Capabilities:
        """The plug-in's capabilities, as read when the device was created."""
        return self._capabilities

    @property
    def extensions(self) -> Iterable[VendorExtension]:
        """The plug-in's extensions, as read when the device was created."""
        return self._extensions

    @property
    def unavailable_reason(self) -> str:
        """The plug-in's reason, as read when the device was created."""
        return self._unavailable_reason

    def prefetch_imports(self) -> None:
        """Let the plug-in import what it needs. An exception is logged."""
        with suppress(NnfmqError, MemoryError):
            self._prefetch_imports()

    def supports(self, model: Model, subgraph: Subgraph, operation: Operation) -> bool:
        """Return the plug-in's result. Raises GeneralFailure if the plug-in raises."""
        return bool(self._supports(model, subgraph, operation))

    def compile(self, model: Model) -> PreparedProgram:
        """Return the plug-in's program, wrapped. Raises GeneralFailure if the plug-in raises."""
        return _PlugInProgram(self._label, self._compile(model))

    def describe_file(self, call: HostedCall, pools: Sequence[ConstantPool]) -> HostedDescription:
        """Return the plug-in's description of a file. Raises GeneralFailure if it raises, or returns something else."""
        found = self._describe_file(call, pools)
        if not isinstance(found, HostedDescription):
            raise GeneralFailure(f"{self._label} returned {found!r:.80}, not what is in a file")
        return found

    def load_cached(self, model: Model) -> PreparedProgram | None:
        """Return the plug-in's program, wrapped, or None. Raises GeneralFailure if the plug-in raises."""
        return self._wrapped(self._load_cached(model))

    def compile_baseline(self, model: Model) -> PreparedProgram | None:
        """Return the plug-in's program, wrapped, or None. Raises GeneralFailure if the plug-in raises."""
        return self._wrapped(self._compile_baseline(model))

    def _wrapped(self, program: PreparedProgram | None) -> PreparedProgram | None:
        return None if program is None else _PlugInProgram(self._label, program)

    @property
    def cache_files_needed(self) -> NumberOfCacheFiles:
        """The plug-in's number of cache files, as read when the device was created."""
        return self._cache_files

    def save(self, model: Model, program: PreparedProgram) -> CacheContents | None:
        """Return the plug-in's cache contents. Raises GeneralFailure if the plug-in raises."""
        assert isinstance(program, _PlugInProgram)
        contents: CacheContents | None = self._save(model, program.program)
        return contents

    def restore(self, contents: CacheContents) -> tuple[Model, PreparedProgram]:
        """Return model and program from the plug-in.

        Raises:
            GeneralFailure: If the plug-in raises, or returns something else.
        """
        restored = self._restore(contents)
        if not (isinstance(restored, tuple) and len(restored) == 2 and isinstance(restored[0], Model)):
            raise GeneralFailure(f"{self._label} restored {restored!r:.80}, not a model and its program")
        return restored[0], _PlugInProgram(self._label, restored[1])


class _PlugInProgram:
    """A plug-in's program. Exceptions become GeneralFailure.

    `threads` is how many threads an execution uses, as the plug-in's program says; otherwise 1.
    """

    def __init__(self, label: str, program: PreparedProgram) -> None:
        self._label = label
        self.program = program
        threads = wrap_plugin_call(label, lambda: int(getattr(program, "threads", 1)))()
        self.threads = min(threads, _THREADS_MAX)

    def bind(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> BoundProgram:
        # The attributes are looked up inside the wrapped call, too: a plug-in may have returned objects without them.
        run = wrap_plugin_call(self._label, lambda: self.program.bind(inputs, outputs).run)()
        return _PlugInExecution(wrap_plugin_call(self._label, run))


class _PlugInExecution:
    """A plug-in's bound program: `run` is its own, whose exceptions become GeneralFailure."""

    __slots__ = ("run",)

    def __init__(self, run: Callable[..., tuple[OutputShape, ...]]) -> None:
        self.run = run


def load_plugin_devices(plugins: Iterable[EntryPoint] | None = None) -> list[DeviceBase]:
    """Return the devices of plug-ins in the order of their entry points' names.

    `plugins` are entry points, of this and other groups; by default those of all that is installed. A plug-in that
    cannot be loaded is skipped with a log line.
    """
    found = (
        entry_points_of(DEVICES_GROUP)
        if plugins is None
        else [entry for entry in plugins if entry.group == DEVICES_GROUP]
    )
    devices: list[DeviceBase] = [PlugInDevice(LazyDevice(runtime)) for runtime in allowed_runtimes()]
    for entry in sorted(found, key=lambda entry: entry.name):
        devices += _created(f"{entry.name} ({entry.value})", entry.load)
    return devices


def _created(label: str, load: Callable[[], Any]) -> list[DeviceBase]:
    """Return the device of the class that `load` returns; none, with a log line, if there is an error."""
    try:
        return [_create(load())]
    except (Exception, SystemExit) as error:  # noqa: BLE001  code of a plug-in may raise anything
        _log.warning("device %s is left out: %s: %s", label, type(error).__name__, error)
        return []


def _create(device_class: Callable[[], object]) -> DeviceBase:
    """Create a plug-in's device and validate its description. Raises InvalidArgument, or anything that it raises."""
    instance = device_class()
    if not isinstance(instance, DeviceBase):
        raise InvalidArgument(
            f"a plug-in names a subclass of nnfmq.driver.devices.device.DeviceBase, not {device_class!r}"
        )
    device = PlugInDevice(instance)
    require_device_name(device.name)
    if not device.version_string:
        raise InvalidArgument("a version string must not be empty (DEV-4)")
    if not 1 <= device.feature_level <= FEATURE_LEVEL:
        raise InvalidArgument(f"feature level {device.feature_level}; this driver has 1 to {FEATURE_LEVEL}")
    if not isinstance(device.sandbox_needs, SandboxNeeds):
        raise InvalidArgument(f"sandbox_needs is {device.sandbox_needs!r:.80}, not a SandboxNeeds")
    for extension in device.extensions:
        validate_extension(extension.described)
    validate_capabilities(device.capabilities)
    validate_cache_counts(device.cache_files_needed.model, device.cache_files_needed.data)
    control_protocol.encode(messages.DeviceList(0, (device.info,)))  # everything fits the message's types and limits
    return device


# ----------------------------------------------------------------------------------------------------------------------
# Vendor extensions from plug-ins: entry points of the group `nnfmq.operations`.
#
# An entry point has the extension's name and refers to a `VendorExtension`. The driver loads the extensions that are
# installed in its own environment, before it serves a client; clients cannot load any. $NNFMQ_EXTENSIONS lists the
# names that may be loaded, separated by commas (unset: all; empty: none); others are not even imported.
#
# An extension that cannot be loaded, is not valid, or that two plug-ins define with different operand types, is skipped
# with a log line (EXT-2, EXT-7, DEV-10). A device offers an extension completely or not at all (DEV-5).


_extensions_log = logging.getLogger("nnfmq.extensions")


def load_extensions(plugins: Iterable[EntryPoint] | None = None) -> None:
    """Install all extensions that are installed as plug-ins and allowed, before the first client is served.

    `plugins` are entry points, of this and other groups; by default those of all that is installed.
    """
    allowed = settings.EXTENSIONS.value()
    if allowed is not None and not allowed:
        return
    found: dict[str, list[EntryPoint]] = {}
    plugins = (
        entry_points_of(OPERATIONS_GROUP)
        if plugins is None
        else [entry for entry in plugins if entry.group == OPERATIONS_GROUP]
    )
    for entry in plugins:
        if allowed is None or entry.name in allowed:
            found.setdefault(entry.name, []).append(entry)
    for name in sorted(found):
        _install(name, found[name])
    for name in sorted(set(allowed or ()) - found.keys()):
        _extensions_log.warning("extension %s is allowed, but no plug-in defines it", name)


def _install(name: str, entries: Sequence[EntryPoint]) -> None:
    """Install the extension of this name, from the first of the plug-ins that define it identically."""
    loaded = [extension for entry in entries if (extension := _load(entry)) is not None]
    if not loaded:
        return
    if any(extension.described != loaded[0].described for extension in loaded):
        _extensions_log.warning(
            "extension %s is disabled: %d plug-ins define different operand types", name, len(loaded)
        )
        return
    with _skip_on_error(name):
        install(_wrap(loaded[0]))
        if len(loaded) > 1:
            _extensions_log.warning("extension %s is defined by %d plug-ins; the first one is used", name, len(loaded))


def _load(entry: EntryPoint) -> VendorExtension | None:
    """Import a plug-in and validate its extension. If that fails, log it and return None."""
    origin = f"{entry.name} ({entry.value}, of {entry.dist.name if entry.dist else 'an unknown distribution'})"
    with _skip_on_error(origin):
        return _validated(entry.name, entry.load())
    return None


@contextmanager
def _skip_on_error(label: str) -> Iterator[None]:
    """Log any exception in the block: no plug-in may keep the driver from starting."""
    try:
        yield
    except (Exception, SystemExit) as error:  # noqa: BLE001
        _extensions_log.warning("extension %s is left out: %s: %s", label, type(error).__name__, error)


def _validated(name: str, extension: object) -> VendorExtension:
    if not isinstance(extension, VendorExtension):
        raise InvalidArgument(f"the entry point must refer to a VendorExtension, not a {type(extension).__name__}")
    if extension.name != name:
        raise InvalidArgument(f"the plug-in's extension is {extension.name!r}")
    validate_extension(extension.described)
    for declaration in extension.declarations:
        if not declaration.variants or any(variant.plan is None for variant in declaration.variants):
            raise InvalidArgument(f"{declaration.name} is declared for types without a kernel")
    return extension


def _wrap(extension: VendorExtension) -> VendorExtension:
    """Return `extension` with functions whose exceptions become GeneralFailure."""
    declarations: list[Declaration] = []
    for declaration in extension.declarations:
        name = f"{extension.name}.{declaration.name}"
        variants = tuple(
            variant if variant.plan is None else replace(variant, plan=_wrap_plan(name, variant.plan))
            for variant in declaration.variants
        )
        shape = wrap_plugin_call(name, declaration.shape)
        declarations.append(replace(declaration, shape=shape, variants=variants))
    return replace(extension, declarations=tuple(declarations))


def _wrap_plan(name: str, plan: Plan) -> Plan:
    prepare = wrap_plugin_call(name, plan)
    return lambda *tensors, **attributes: wrap_plugin_call(name, prepare(*tensors, **attributes))
