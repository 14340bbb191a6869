"""Random devices for random partitions: each model gets two to four devices of limited ability, and the CPU device.

Two drivers have twelve devices each, which their configuration limits to random operations, with random performance
figures. The model alone decides which of them it gets, in which order, what is preferred, and whether one of its
devices becomes busy before the executions, so that its steps fail: whoever runs the same model gets the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from nnfmq import settings
from nnfmq.conformance.random_source import GraphLimits, RandomSource
from nnfmq.hal.architecture_hash import model_architecture_hash
from nnfmq.hal.types import DeviceStatus, ExecutionPreference, Model
from nnfmq.operations import HAL_DECLARATIONS
from nnfmq.runtime.compilation.compile_model import DeviceSelection, compile_model
from nnfmq.runtime.connect import connect
from nnfmq.runtime.devices.driver_access import DriverAccess
from nnfmq.runtime.devices.runtime_device import CpuDevice, RuntimeDevice
from nnfmq.runtime.prepare_options import PrepareOptions

if TYPE_CHECKING:
    from nnfmq.runtime.client import Client
    from nnfmq.runtime.compiled_model import CompiledModel

_DRIVERS = 2
_DEVICES = 12  # of each driver
_FEWEST, _MOST = 2, 4  # devices of a model
_SHARES = (0.2, 0.4, 0.6, 0.8)  # of all operations that a device supports
_FIGURES = (0.2, 1.5)  # of performance: below 1.0 a device is preferred to the CPU
_BUSY_PROBABILITY = 0.25
_SEED = 20
_NO_LIMITS = GraphLimits(1)
_INTERPRETER = '[[device]]\nname = "reference"\n'


def configuration(driver: int) -> str:
    """Return the configuration file of one of the drivers."""
    return "".join(_device(number) for number in range(driver * _DEVICES, (driver + 1) * _DEVICES))


def _device(number: int) -> str:
    rng = RandomSource([_SEED, number], _NO_LIMITS)
    share = rng.choice(_SHARES)
    operations = [code.name for code in HAL_DECLARATIONS if rng.chance(share)] or ["ADD"]
    figures = f"{{ exec_time = {rng.real(*_FIGURES):.3f}, power_usage = {rng.real(*_FIGURES):.3f} }}"
    return f'[[device]]\nname = "random-{number}"\noperations = {operations}\nperformance.all = {figures}\n\n'


class RandomDevices:
    """The drivers with the random devices, and a CPU device that interprets. After `close` they start again."""

    def __init__(self) -> None:
        self._accesses: list[DriverAccess] = []
        self._devices: list[RuntimeDevice] = []

    def connect(self) -> CpuDevice:
        """Start the drivers, if that has not happened yet; return the CPU device."""
        if not self._accesses:
            drivers = [*map(configuration, range(_DRIVERS)), _INTERPRETER]
            self._accesses = [DriverAccess(f"random.{i}", partial(_start, text)) for i, text in enumerate(drivers)]
            self._devices = [
                RuntimeDevice(info.name, access, info)
                for access in self._accesses[:_DRIVERS]
                for info in access.known_devices()
            ]
            self._accesses[_DRIVERS].known_devices()
        return CpuDevice(self._accesses[_DRIVERS])

    @contextmanager
    def prepared(self, model: Model) -> Iterator[CompiledModel]:
        """See `DeviceArrangement`."""
        cpu = self.connect()
        rng = RandomSource([int(model_architecture_hash(model)[:8], 16)], _NO_LIMITS)
        count = rng.integer(_FEWEST, _MOST)
        devices = [self._devices[number] for number in rng.permutation(len(self._devices))[:count]]
        preference = rng.choice((ExecutionPreference.SUSTAINED_SPEED, ExecutionPreference.LOW_POWER))
        options: PrepareOptions = {"preference": preference}
        selection = DeviceSelection([*devices, cpu], cpu)
        busy = self._busy(rng.choice(devices)) if rng.chance(_BUSY_PROBABILITY) else nullcontext()
        with settings.ENABLED_DEVICES.exported(".*"), compile_model(model, selection, options) as compiled, busy:
            yield compiled

    @contextmanager
    def _busy(self, device: RuntimeDevice) -> Iterator[None]:
        access = next(access for access in self._accesses if access.label == device.driver)
        access.client().set_device_status(device.name, DeviceStatus.BUSY)
        try:
            yield
        finally:
            access.client().set_device_status(device.name, DeviceStatus.AVAILABLE)

    def close(self) -> None:
        """End the drivers."""
        accesses, self._accesses = self._accesses, []
        for access in accesses:
            access.close()


def _start(configuration: str, _deadline_ns: int | None) -> Client:
    """Start an embedded driver with a configuration, which it has read when this returns."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(configuration)
        file.flush()
        with settings.DEVICES.exported(file.name):
            return connect(embedded=True, wait_ready=True, recover=False)
