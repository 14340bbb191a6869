"""The devices of the runtimes that this build hosts: what a driver tells of each without importing its adapter.

Most clients open no file of another runtime, so the adapter and what it imports wait until one does: they would take
20 ms of each worker's start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module

from nnfmq.base import settings
from nnfmq.base.packages import InstalledPackages
from nnfmq.driver.cache.files import CacheContents
from nnfmq.driver.devices.device import DeviceBase, SandboxNeeds
from nnfmq.driver.devices.installation import installation, version_of
from nnfmq.driver.memory.private import ConstantPool
from nnfmq.engines.execution import PreparedProgram
from nnfmq.hal.capabilities import NumberOfCacheFiles
from nnfmq.hal.hosted import NAME, RUNTIMES, HostedCall, HostedDescription, HostedRuntime, is_hosted
from nnfmq.hal.types import Model, Operation, Subgraph
from nnfmq.operations.extensions import VendorExtension

__all__ = ["HOSTED", "DescribedDevice", "LazyDevice", "allowed_runtimes", "preload"]

HOSTED = VendorExtension(NAME, (), ())
"""The extension as a device reports it: it has no types of its own, and its operation has no declaration."""


_NEEDS: Mapping[str, SandboxNeeds] = {
    "openvino": SandboxNeeds(generates_code=True, has_private_folder=True),  # oneDNN's kernels; .tflite files
    "torch": SandboxNeeds(generates_code=True, has_private_folder=True),  # oneDNN's kernels; files of archives
    "jax": SandboxNeeds(generates_code=True),  # XLA compiles when a file is opened
}
"""What a runtime does that others may not, by the name of its device."""


class DescribedDevice(DeviceBase):
    """A device that hosts a runtime, with the description that the driver gives of each.

    `package` is the package whose version becomes part of the device's version; empty for none.
    """

    package: str = ""
    uses_cores = True
    extensions = (HOSTED,)
    cache_files_needed = NumberOfCacheFiles(1, 1)
    """One model file, and one data file with the files of the model."""

    @property
    def version_string(self) -> str:
        """The releases of nnfmq and of the runtime."""
        if not self.package:
            return super().version_string
        version = installation().runtimes.get(self.package) or version_of(self.package, InstalledPackages())
        return f"{super().version_string} {self.package}-{version}"


class LazyDevice(DescribedDevice):
    """The device of a runtime, which imports the adapter when a client asks about a hosted model."""

    def __init__(self, runtime: HostedRuntime) -> None:
        super().__init__()
        self.name, self.package = runtime.name, runtime.package
        self.sandbox_needs = _NEEDS.get(runtime.name, SandboxNeeds())
        self._runtime = runtime

    @cached_property
    def _adapter(self) -> DeviceBase:
        module = import_module(f"nnfmq.hosted.{self._runtime.name}")
        adapter: DeviceBase = getattr(module, self._runtime.device_class)()
        return adapter

    def supports(self, model: Model, subgraph: Subgraph, operation: Operation) -> bool:
        """See `HostedDevice.supports`."""
        return is_hosted(model) and self._adapter.supports(model, subgraph, operation)

    def describe_file(self, call: HostedCall, pools: Sequence[ConstantPool]) -> HostedDescription:
        """See `HostedDevice.describe_file`."""
        return self._adapter.describe_file(call, pools)

    def compile(self, model: Model) -> PreparedProgram:
        """See `HostedDevice.compile`."""
        return self._adapter.compile(model)

    def save(self, model: Model, program: PreparedProgram) -> CacheContents | None:
        """See `HostedDevice.save`."""
        return self._adapter.save(model, program)

    def restore(self, contents: CacheContents) -> tuple[Model, PreparedProgram]:
        """See `HostedDevice.restore`."""
        return self._adapter.restore(contents)


def preload() -> None:
    """Import, in the supervisor, what its workers import for the allowed runtimes before they serve a client."""
    if any(_NEEDS[runtime.name].has_private_folder for runtime in allowed_runtimes() if runtime.name in _NEEDS):
        import tempfile  # noqa: F401  for `create_private_folder`: it takes milliseconds and 1 MiB of each worker


def allowed_runtimes() -> list[HostedRuntime]:
    """Return the runtimes of this build that are installed and allowed."""
    allowed, installed = settings.RUNTIMES.value(), installation().runtimes
    return [each for each in RUNTIMES if (allowed is None or each.name in allowed) and each.package in installed]
