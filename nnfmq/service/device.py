"""The devices that this driver offers, and what each can do (IDevice).

A device validates what it is given, although the client library has done so: applications are not trusted. Numbers of
extensions are the model's own, so they are translated first; all messages after that name them. Today there is one
device, `reference`: the numpy interpreter. It computes on the CPU and says so. (REQUIREMENTS DEV, SUP, PREP, EXT)
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import IntEnum
from importlib.metadata import PackageNotFoundError, version

from nnfmq.engines import interpreter
from nnfmq.hal.errors import InvalidArgument, MissedDeadlinePersistent
from nnfmq.hal.types import DeviceStatus, DeviceType, ExecutionPreference, Model, Priority
from nnfmq.operations.extensions import INSTALLED, VendorExtension, translated
from nnfmq.serialize import messages
from nnfmq.service.faults import faults_as_errors
from nnfmq.service.prepared_model import PreparedModel
from nnfmq.validation import validate_model
from nnfmq.validation.values import validate_extensions

FEATURE_LEVEL = 8  # AIDL v4


def _release() -> str:
    try:
        return version("nnfmq")
    except PackageNotFoundError:
        return "source"  # run from a tree that nobody installed


@dataclass(frozen=True, slots=True)
class Device:
    """One device: its name, what it is, and how it prepares models."""

    name: str
    type: DeviceType = DeviceType.CPU
    feature_level: int = FEATURE_LEVEL
    status: DeviceStatus = DeviceStatus.AVAILABLE

    @property
    def version_string(self) -> str:
        """A string that differs between releases of this driver (DEV-4)."""
        return f"nnfmq-{_release()}"

    @property
    def info(self) -> messages.DeviceInfo:
        """What clients are told of it."""
        extensions = tuple(_extension_data(INSTALLED[name]) for name in sorted(INSTALLED))
        return messages.DeviceInfo(
            self.name, self.type, self.version_string, self.feature_level, self.status, extensions
        )

    def supported_operations(self, model: Model) -> list[bool]:
        """Return one boolean per operation of the main subgraph. Raises InvalidArgument for an invalid model."""
        with faults_as_errors("looking at the model"):
            return interpreter.supported(_checked(model))

    def check_preparation(self, model: Model, preference: int, priority: int, deadline_ns: int | None) -> None:
        """Judge the arguments of prepareModel. Raises InvalidArgument, MissedDeadlinePersistent."""
        _check_code(ExecutionPreference, preference)
        _check_code(Priority, priority)
        with faults_as_errors("looking at the model"):
            _checked(model)
        if deadline_ns is not None and time.monotonic_ns() >= deadline_ns:
            raise MissedDeadlinePersistent("the deadline had passed before the preparation began")

    def prepare_model(self, model: Model) -> PreparedModel:
        """Compile a model that was checked. Blocks.

        Raises GeneralFailure for what is not supported, ResourceExhaustedTransient where memory runs out.
        """
        with faults_as_errors("preparing the model"):
            model = translated(model)
            return PreparedModel(model, interpreter.prepare(model))


def _checked(model: Model) -> Model:
    """Return `model`, which is valid, with this process's numbers of extensions. Raises InvalidArgument."""
    validate_extensions(model.extensions)
    model = translated(model)
    validate_model(model)
    return model


def _extension_data(extension: VendorExtension) -> messages.ExtensionData:
    types = ((element, element.information) for element in extension.types)
    return messages.ExtensionData(
        extension.name,
        tuple(messages.OperandTypeData(i.type, i.is_tensor, i.byte_size, element.dtype) for element, i in types),
    )


def _check_code(kind: type[IntEnum], code: int) -> None:
    allowed = [member.value for member in kind]
    if code not in allowed:
        raise InvalidArgument(f"{kind.__name__} {code} is unknown; allowed are {allowed[0]} to {allowed[-1]}")


DEVICES: dict[str, Device] = {device.name: device for device in (Device("reference"),)}


def find_device(name: str) -> Device:
    """Return the device called `name`. Raises InvalidArgument that lists the known ones."""
    try:
        return DEVICES[name]
    except KeyError:
        known = ", ".join(sorted(DEVICES))
        raise InvalidArgument(f"there is no device {name!r}; this driver has: {known}") from None
