"""The file that lists a driver's devices (docs/how-to/devices.md), and the page of their status.

This module imports no engine, so that a supervisor, which computes nothing, can validate the file before it serves.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from nnfmq.base import settings
from nnfmq.hal.capabilities import (
    CPU_PERFORMANCE,
    LARGEST_FLOAT32,
    Capabilities,
    PerformanceInfo,
    is_device_name,
    uniform_capabilities,
    with_performance,
)
from nnfmq.hal.errors import DeviceUnavailable, InvalidArgument
from nnfmq.hal.types import DeviceStatus, OperandType, OperationType

__all__ = [
    "DEVICES_MAX",
    "PACKAGED_DEVICES",
    "STATUS_PAGE_BYTES",
    "DeviceEntry",
    "end_changes",
    "keep_status",
    "read_configuration",
    "require_available",
    "require_device_name",
    "set_temporary_status",
    "status_of",
]


# ----------------------------------------------------------------------------------------------------------------------
# Device status (DEV-14): a page with a word of 8 bytes for each device, which all workers of a driver map.
#
# Each word has, in this order, the status in effect (one byte, 0 = AVAILABLE), the status that is kept when a temporary
# change ends (one byte), two bytes of padding, and the pid of the worker whose client made the temporary change (0:
# there is none). A word is written by one store of 8 bytes. A change ends with the client that made it: its worker ends
# it when the session ends, and the supervisor when the worker has exited. Workers can map the page for reading only,
# unless the driver lets clients set the status.
#
# Every prepared model and buffer keeps a view of the first byte of its device's word, so that each execution can check
# it at almost no cost.


UNAVAILABLE_MESSAGE = "the device is busy or offline"
ALWAYS_AVAILABLE = memoryview(bytes(1))
"""The status byte of prepared models and buffers that belong to no device, as in tests."""
WORD_BYTES = 8
_WORD = struct.Struct("=BBxxI")
_UINT64 = struct.Struct("=Q")


def require_available(status_byte: memoryview) -> None:
    """Check the device's status.

    Raises:
        DeviceUnavailable: If the device is BUSY or OFFLINE.
    """
    if status_byte[0]:
        raise DeviceUnavailable(UNAVAILABLE_MESSAGE)


def status_of(word: memoryview) -> DeviceStatus:
    """Return a device's status; UNKNOWN for a byte that is none: other workers may have written it."""
    status = word[0]
    return DeviceStatus(status) if status < DeviceStatus.UNKNOWN else DeviceStatus.UNKNOWN


def keep_status(word: memoryview, status: DeviceStatus) -> None:
    """Set a device's status until the next change."""
    _write(word, status, status, 0)


def set_temporary_status(word: memoryview, status: DeviceStatus, worker_pid: int) -> None:
    """Set a device's status until `end_changes` is called for `worker_pid`, or until the next change."""
    _write(word, status, word[1], worker_pid)


def end_changes(page: memoryview, worker_pid: int) -> None:
    """Restore the kept status of all devices whose status `worker_pid` has changed temporarily."""
    for begin in range(0, len(page), WORD_BYTES):
        word = page[begin : begin + WORD_BYTES]
        _, kept, changed_by = _WORD.unpack(word)
        if changed_by == worker_pid:
            _write(word, kept, kept, 0)


def _write(word: memoryview, status: int, kept: int, worker_pid: int) -> None:
    word.cast("Q")[0] = _UINT64.unpack(_WORD.pack(status, kept, worker_pid))[0]


# ----------------------------------------------------------------------------------------------------------------------
# The configuration file that lists a driver's devices (docs/how-to/devices.md).


DEVICES_MAX = 256  # of one driver
STATUS_PAGE_BYTES = DEVICES_MAX * WORD_BYTES  # of the page with the devices' status, which its workers share
PACKAGED_DEVICES = Path(__file__).resolve().with_name("devices.toml")

_PositiveFloat: TypeAlias = Annotated[float, msgspec.Meta(gt=0, lt=LARGEST_FLOAT32)]
CodeT = TypeVar("CodeT", bound=IntEnum)


class _Performance(msgspec.Struct, forbid_unknown_fields=True):
    """Execution time and power relative to the CPU; lower is better."""

    exec_time: _PositiveFloat
    power_usage: _PositiveFloat

    def info(self) -> PerformanceInfo:
        return PerformanceInfo(self.exec_time, self.power_usage)


class _PerformanceTable(msgspec.Struct, forbid_unknown_fields=True):
    """The performance of a device: `all`, and the exceptions from it."""

    all: _Performance | None = None
    relaxed: _Performance | None = None
    control_flow: _Performance | None = None
    types: dict[str, _Performance] = {}


class DeviceEntry(msgspec.Struct, dict=True, forbid_unknown_fields=True):
    """A `[[device]]` of the file: an engine, limited to some operations and types of the first operand (None: all)."""

    name: str
    engine: Literal["reference", "compiled"] = "reference"
    first_operand: list[str] | None = None
    operations: list[str] | None = None
    except_operations: list[str] = []
    performance: _PerformanceTable = msgspec.field(default_factory=_PerformanceTable)

    @cached_property
    def types(self) -> frozenset[int] | None:
        """The allowed types of an operation's first operand; None: all."""
        return _codes(OperandType, self.first_operand, self.name)

    @cached_property
    def operation_types(self) -> frozenset[int] | None:
        """The allowed operation types; None: all."""
        excluded = _codes(OperationType, self.except_operations, self.name) or frozenset()
        allowed = _codes(OperationType, self.operations, self.name)
        if allowed is None:
            return frozenset(OperationType) - excluded if excluded else None
        return allowed - excluded

    @cached_property
    def capabilities(self) -> Capabilities:
        """The device's performance info."""
        table = self.performance
        base = table.all.info() if table.all else CPU_PERFORMANCE
        _codes(OperandType, list(table.types), self.name)
        capabilities = uniform_capabilities(base)
        for name, performance in table.types.items():
            capabilities = with_performance(capabilities, [OperandType[name]], performance.info())
        relaxed = table.relaxed.info() if table.relaxed else base
        control_flow = table.control_flow.info() if table.control_flow else base
        return Capabilities(capabilities.operand_performance, relaxed, relaxed, control_flow, control_flow)

    def check(self) -> None:
        """Raise InvalidArgument if the name is not valid, or a type or operation does not exist."""
        require_device_name(self.name)
        self.types, self.operation_types, self.capabilities  # noqa: B018  the supervisor computes them for all workers


class _Configuration(msgspec.Struct, forbid_unknown_fields=True):
    device: list[DeviceEntry]


def read_configuration(path: Path | None = None) -> list[DeviceEntry]:
    """Return the devices that a file lists; by default `$NNFMQ_DEVICES`, or the file of the package. Blocks.

    Raises:
        InvalidArgument: If the file is not valid; the message gives the reason.
        OSError: If the file cannot be read.
    """
    named = settings.DEVICES.effective()
    path = path or Path(named.value or PACKAGED_DEVICES)
    try:
        entries = msgspec.toml.decode(path.read_bytes(), type=_Configuration).device
        for entry in entries:
            entry.check()
        names = [entry.name for entry in entries]
        repeated = [name for index, name in enumerate(names) if name in names[:index]]
        if repeated:
            raise InvalidArgument(f"device {repeated[0]!r} is listed twice")
    except OSError as error:
        origin = f"; {named.origin} names it" if named.value == str(path) else ""
        raise OSError(error.errno, f"{error.strerror}{origin}", str(path)) from error
    except RecursionError:
        raise InvalidArgument(f"the devices in {path} cannot be used: its values are nested too deep") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, InvalidArgument) as error:
        raise InvalidArgument(f"the devices in {path} cannot be used: {error}") from error
    return entries


def require_device_name(name: str) -> None:
    """Raise InvalidArgument unless the HAL allows `name` for a device (DEV-8)."""
    if not is_device_name(name):
        raise InvalidArgument(
            f"a device's name must be printable and of the form 'vendor-name' or 'name', not {name!r} (DEV-8)"
        )


def _codes(kind: type[CodeT], names: list[str] | None, device: str) -> frozenset[int] | None:
    if names is None:
        return None
    unknown = [name for name in names if name not in kind.__members__]
    if unknown:
        raise InvalidArgument(f"device {device!r}: {unknown[0]!r} is not an {kind.__name__}")
    return frozenset(kind[name] for name in names)
