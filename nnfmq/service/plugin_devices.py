"""Devices from plug-ins: entry points of the group `nnfmq.devices`.

An entry point names a subclass of `DeviceBase`. Each worker creates its own instances, because hardware handles do not
survive a fork. A plug-in that cannot be loaded, or that describes its device with invalid values, is skipped with a log
line (DEV-10); an exception of a plug-in during a call fails that call only (LIFE-8).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import entry_points
from typing import Any

from nnfmq.engines.execution import DEFAULT_RUN_OPTIONS, BoundProgram, PreparedProgram, RunOptions
from nnfmq.hal.capabilities import Capabilities, NumberOfCacheFiles
from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.types import DeviceType, Model, Operation, OutputShape, Subgraph
from nnfmq.operations.extensions import VendorExtension
from nnfmq.serialize import control_protocol, messages
from nnfmq.service.caching.compilation_cache import CacheContents
from nnfmq.service.device import FEATURE_LEVEL, DeviceBase
from nnfmq.service.device_configuration import require_device_name
from nnfmq.service.error_translation import wrap_plugin_call
from nnfmq.validation.values import validate_cache_counts, validate_capabilities, validate_extension

__all__ = ["PlugInDevice", "load_plugin_devices"]

GROUP = "nnfmq.devices"
_log = logging.getLogger("nnfmq.devices")


class PlugInDevice(DeviceBase):
    """A plug-in's device: it is asked once what it is, and what it raises later fails one call (LIFE-8)."""

    def __init__(self, device: DeviceBase) -> None:
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


def load_plugin_devices() -> list[DeviceBase]:
    """Return the devices of all installed plug-ins, except those that cannot be loaded; these are logged."""
    devices = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            devices.append(_checked(_made(entry.load())))
        except (Exception, SystemExit) as error:  # noqa: BLE001  a vendor's code may raise anything
            _log.warning("device %s (%s) is left out: %s: %s", entry.name, entry.value, type(error).__name__, error)
    return devices


def _made(kind: Callable[[], object]) -> DeviceBase:
    device = kind()
    if not isinstance(device, DeviceBase):
        raise InvalidArgument(f"a plug-in names a subclass of nnfmq.service.device.DeviceBase, not {kind!r}")
    return PlugInDevice(device)


def _checked(device: DeviceBase) -> DeviceBase:
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
