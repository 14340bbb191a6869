"""The file that lists a driver's devices: what may be in it. Docs: docs/how-to/devices.md.

Apart from `devices`, so that a supervisor, which never computes anything, can check the file before it serves.
"""

from __future__ import annotations

import os
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from nnfmq.hal.capabilities import (
    CPU_PERFORMANCE,
    LARGEST_FLOAT32,
    Capabilities,
    PerformanceInfo,
    is_device_name,
    uniform_capabilities,
    with_performance,
)
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import OperandType, OperationType

__all__ = ["DEVICES_MAX", "VARIABLE", "DeviceEntry", "read_configuration", "require_device_name"]

VARIABLE = "NNFMQ_DEVICES"
DEVICES_MAX = 256  # of one driver: its workers share a status byte for each
_BUILT_IN = Path(__file__).resolve().with_name("devices.toml")

_Figure: TypeAlias = Annotated[float, msgspec.Meta(gt=0, lt=LARGEST_FLOAT32)]
CodeT = TypeVar("CodeT", bound=IntEnum)


class _Performance(msgspec.Struct, forbid_unknown_fields=True):
    """One pair of figures, relative to the CPU."""

    exec_time: _Figure
    power_usage: _Figure

    def info(self) -> PerformanceInfo:
        return PerformanceInfo(self.exec_time, self.power_usage)


class _Figures(msgspec.Struct, forbid_unknown_fields=True):
    """What a device says of its speed: `all`, and what differs from it."""

    all: _Performance | None = None
    relaxed: _Performance | None = None
    control_flow: _Performance | None = None
    types: dict[str, _Performance] = {}


class DeviceEntry(msgspec.Struct, forbid_unknown_fields=True):
    """A device as configured: one of our engines, limited to some operations; None = without that limit."""

    name: str
    engine: Literal["reference", "compiled"] = "reference"
    first_operand: list[str] | None = None
    operations: list[str] | None = None
    except_operations: list[str] = []
    performance: _Figures = msgspec.field(default_factory=_Figures)

    def types(self) -> frozenset[int] | None:
        """Return the types that an operation's first operand may have."""
        return _codes(OperandType, self.first_operand, self.name)

    def operation_types(self) -> frozenset[int] | None:
        """Return the operations that the device has."""
        left_out = _codes(OperationType, self.except_operations, self.name) or frozenset()
        allowed = _codes(OperationType, self.operations, self.name)
        if allowed is None:
            return frozenset(OperationType) - left_out if left_out else None
        return allowed - left_out

    def capabilities(self) -> Capabilities:
        """Return what the device says of its speed."""
        figures = self.performance
        base = figures.all.info() if figures.all else CPU_PERFORMANCE
        _codes(OperandType, list(figures.types), self.name)
        capabilities = uniform_capabilities(base)
        for name, figure in figures.types.items():
            capabilities = with_performance(capabilities, [OperandType[name]], figure.info())
        relaxed = figures.relaxed.info() if figures.relaxed else base
        control_flow = figures.control_flow.info() if figures.control_flow else base
        return Capabilities(capabilities.operand_performance, relaxed, relaxed, control_flow, control_flow)

    def check(self) -> None:
        """Raise InvalidArgument for a name or a code that does not exist."""
        require_device_name(self.name)
        self.types(), self.operation_types(), self.capabilities()


class _Configuration(msgspec.Struct, forbid_unknown_fields=True):
    device: list[DeviceEntry]


def read_configuration(path: Path | None = None) -> list[DeviceEntry]:
    """Return the devices that a file lists, `$NNFMQ_DEVICES` by default, else the one that comes with the package.

    Raises InvalidArgument that says what is wrong with it, and OSError where it cannot be read.
    """
    path = path or Path(os.environ.get(VARIABLE) or _BUILT_IN)
    try:
        entries = msgspec.toml.decode(path.read_bytes(), type=_Configuration).device
        for entry in entries:
            entry.check()
        _require_unique([entry.name for entry in entries])
    except (msgspec.MsgspecError, UnicodeDecodeError, InvalidArgument) as error:
        raise InvalidArgument(f"the devices in {path} cannot be used: {error}") from error
    return entries


def require_device_name(name: str) -> None:
    """Raise InvalidArgument for a name that no interface lets a device have (DEV-8)."""
    if not is_device_name(name):
        raise InvalidArgument(f"a device is called 'vendor-name' or 'name', and is printable, not {name!r}")


def _require_unique(names: list[str]) -> None:
    again = [name for number, name in enumerate(names) if name in names[:number]]
    if again:
        raise InvalidArgument(f"device {again[0]!r} is listed twice")


def _codes(kind: type[CodeT], names: list[str] | None, device: str) -> frozenset[int] | None:
    if names is None:
        return None
    unknown = [name for name in names if name not in kind.__members__]
    if unknown:
        raise InvalidArgument(f"device {device!r}: {unknown[0]!r} is no {kind.__name__}")
    return frozenset(kind[name] for name in names)
