"""Switches: the settings of NNAPI's runtime that change on which devices models run (PART-7, PART-8)."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import NamedTuple

from nnfmq.base import settings

__all__ = ["PartitionMode", "Switches"]


class PartitionMode(IntEnum):
    """The values of $NNFMQ_PARTITION."""

    NONE = 0
    WITH_FALLBACK = 1
    WITHOUT_FALLBACK = 2


class Switches(NamedTuple):  # a dataclass takes longer to import
    """The switches as they were when a compilation began.

    Attributes:
        partition: Whether models are divided among devices, and whether the CPU device executes what fails.
        is_cpu_only: The CPU device executes all models whose devices the application does not choose.
        enabled_devices: A regular expression for the names of devices that the application does not choose.
        strict_slicing: Devices are asked about valid models only.
        is_synchronous: Asynchronous executions are done when the call returns: on every device.
        is_synchronous_on_cpu: The same, on the CPU device.
    """

    partition: PartitionMode = PartitionMode.WITH_FALLBACK
    is_cpu_only: bool = False
    enabled_devices: str = settings.ENABLED_DEVICES.default
    strict_slicing: bool = False
    is_synchronous: bool = False
    is_synchronous_on_cpu: bool = False

    @classmethod
    def read(cls) -> Switches:
        """Return the switches of the settings. Raises InvalidArgument if one is not valid."""
        return cls(
            PartitionMode(settings.PARTITION.value()),
            settings.CPU_ONLY.value(),
            settings.ENABLED_DEVICES.value(),
            settings.STRICT_SLICING.value(),
            settings.SYNC_EXEC_RUNTIME.value(),
            settings.SYNC_EXEC_CPU.value(),
        )

    def is_enabled(self, device: str) -> bool:
        """Return whether the device of that name may be used by an application that does not name it.

        By default the sample devices are not: their figures are those of hardware that does not exist.
        """
        return re.fullmatch(self.enabled_devices, device) is not None

    @property
    def uses_only_cpu(self) -> bool:
        """Whether models are not divided at all, but executed by the CPU device."""
        return self.is_cpu_only or self.partition is PartitionMode.NONE

    def is_synchronous_on(self, is_cpu: bool) -> bool:
        """Return whether asynchronous executions are done when the call returns, on the CPU device or another one."""
        return self.is_synchronous or (is_cpu and self.is_synchronous_on_cpu)
