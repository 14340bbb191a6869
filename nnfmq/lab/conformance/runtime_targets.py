"""The runtime as an execution target: models on several devices, with plans, interpreted IF and WHILE, and fallback.

Which devices a model may use is an arrangement: the runtime chooses among the devices of one driver; or two or three
drivers, each a process with the same device, get the operations in turn; or random devices.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from nnfmq.base import settings
from nnfmq.base.fence import Fence
from nnfmq.client.connection.connect import connect
from nnfmq.client.connection.device import DeviceInfo, hosts_runtime
from nnfmq.client.connection.prepare_arguments import PrepareOptions
from nnfmq.client.partitioned.compilation import DeviceSelection, compile_model
from nnfmq.client.partitioned.devices import CPU_DEVICE_NAME, CpuDevice, DriverAccess, RuntimeDevice
from nnfmq.client.partitioned.runtime import Runtime
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.models import model_architecture_hash
from nnfmq.hal.types import DeviceStatus, ExecutionConfig, ExecutionPreference, Model, OutputShape, Request
from nnfmq.lab.conformance.driver_targets import TIMEOUT_S, RequestExecutor, in_shared_memory
from nnfmq.lab.conformance.random_source import GraphLimits, RandomSource
from nnfmq.lab.conformance.targets import INTERPRETER_LEVEL, NO_PLANS, DeviceArrangement, PlanCounts, Prepared
from nnfmq.operations import HAL_DECLARATIONS

if TYPE_CHECKING:
    from nnfmq.client.connection.client import Client
    from nnfmq.client.model.compiled_model import CompiledModel

__all__ = [
    "ChosenDevices",
    "DriversInTurn",
    "RandomDevices",
    "RuntimeTarget",
    "arrangement",
    "configuration",
    "in_turn",
    "prepare_options",
]


# ----------------------------------------------------------------------------------------------------------------------
# Random devices for random partitions: each model gets two to four devices of limited ability, and the CPU device.
#
# Two drivers have twelve devices each, which their configuration limits to random operations, with random performance
# figures. The model alone decides which of them it gets, in which order, what is preferred, and whether one of its
# devices becomes busy before the executions, so that its steps fail: whoever runs the same model gets the same.


_DRIVERS = 2
_DEVICES = 12  # of each driver
_FEWEST, _MOST = 2, 4  # devices of a model
_SHARES = (0.2, 0.4, 0.6, 0.8)  # of all operations that a device supports
_PERFORMANCE = (0.2, 1.5)  # of performance: below 1.0 a device is preferred to the CPU
_BUSY_PROBABILITY = 0.25
_SEED = 20
_SIZE_LIMITS = GraphLimits(1)
_INTERPRETER = '[[device]]\nname = "reference"\n'


def configuration(driver: int) -> str:
    """Return the configuration file of one of the drivers."""
    return "".join(_device(number) for number in range(driver * _DEVICES, (driver + 1) * _DEVICES))


def _device(number: int) -> str:
    rng = RandomSource([_SEED, number], _SIZE_LIMITS)
    share = rng.choice(_SHARES)
    operations = [code.name for code in HAL_DECLARATIONS if rng.chance(share)] or ["ADD"]
    performance = f"{{ exec_time = {rng.real(*_PERFORMANCE):.3f}, power_usage = {rng.real(*_PERFORMANCE):.3f} }}"
    return f'[[device]]\nname = "random-{number}"\noperations = {operations}\nperformance.all = {performance}\n\n'


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
                if not hosts_runtime(info)  # both drivers have those
            ]
            self._accesses[_DRIVERS].known_devices()
        return CpuDevice(self._accesses[_DRIVERS])

    @contextmanager
    def prepared(self, model: Model) -> Iterator[CompiledModel]:
        """See `DeviceArrangement`."""
        cpu = self.connect()
        rng = RandomSource([int(model_architecture_hash(model)[:8], 16)], _SIZE_LIMITS)
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


# ----------------------------------------------------------------------------------------------------------------------
# The runtime as an execution target: models on several devices, with plans, interpreted IF and WHILE, and fallback.


RUNTIME = "runtime"
RUNTIME_PATHS = (RUNTIME, f"{RUNTIME}-async", f"{RUNTIME}-fenced", f"{RUNTIME}-burst")
RANDOM = "random"
PARTITIONS = ("2", "3", RANDOM)
_ANY_DEVICE = ".*"


class RuntimeTarget:
    """Models that the runtime plans for an arrangement of devices. After `close` the next use starts new drivers.

    `path` is one of RUNTIME_PATHS.
    """

    rejects_unspecified_boundaries = False
    allows_short_buffers = True
    compared_steps = 0

    def __init__(self, path: str, arrangement: DeviceArrangement) -> None:
        self._mode = path.removeprefix(RUNTIME).lstrip("-")
        self._arrangement = arrangement
        self.plans = NO_PLANS

    @property
    def rejects_unspecified_outputs(self) -> bool:
        """Whether executions are fenced."""
        return self._mode == "fenced"

    @property
    def feature_level(self) -> int:
        """The feature level of the runtime; connects if necessary, so that a wrong device is an error now."""
        self._arrangement.connect()
        return INTERPRETER_LEVEL

    def supports(self, _model: Model) -> bool:
        """Return True: the CPU device supports all operations."""
        return True

    @contextmanager
    def prepared(self, model: Model) -> Iterator[Prepared]:
        """Plan the model and prepare its steps; count what the plan has and whether the CPU device had to help."""
        with (
            _counted_not_logged(),
            in_shared_memory(model) as sent,
            self._arrangement.prepared(sent) as compiled,
        ):
            self.plans += _counts(compiled, len(model.main.operations))
            try:
                yield RequestExecutor(compiled, _EXECUTE[self._mode])
            finally:
                fallback = compiled.handle.fallback
                self.plans += PlanCounts(fell_back=int(fallback is not None and fallback.is_used))

    def close(self) -> None:
        """Close the connections; embedded drivers exit."""
        self._arrangement.close()


def arrangement(partition: str, devices: str, connect_to: str | None) -> DeviceArrangement:
    """Return the arrangement of one of PARTITIONS, or if that is empty, of the runtime's choice.

    Args:
        partition: How operations are divided.
        devices: An expression that the names of the usable devices match; a name if drivers get the operations in turn.
        connect_to: The socket of the driver; None or "embedded" = embedded drivers.
    """
    if partition == RANDOM:
        return RandomDevices()
    socket = None if connect_to == "embedded" else connect_to
    return DriversInTurn(int(partition), devices, socket) if partition else ChosenDevices(devices, socket)


class ChosenDevices:
    """The runtime's choice among the devices of one driver whose names match an expression, and the CPU device."""

    def __init__(self, expression: str, socket: str | None) -> None:
        self._expression, self._socket = expression, socket
        self._runtime: Runtime | None = None

    def connect(self) -> Runtime:
        """Connect to the driver and that of the CPU device, if that has not happened yet."""
        if self._runtime is None:
            self._runtime = Runtime([] if self._socket is None else [self._socket], embedded=self._socket is None)
            self._runtime.devices()
            self._runtime.cpu.connected()
        return self._runtime

    @contextmanager
    def prepared(self, model: Model) -> Iterator[CompiledModel]:
        """See `DeviceArrangement`."""
        with (
            settings.ENABLED_DEVICES.exported(self._expression),
            self.connect().prepare(model, **prepare_options()) as compiled,
        ):
            yield compiled

    def close(self) -> None:
        """Hang up."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.close()


class DriversInTurn:
    """The same device of several drivers, which get the operations in turn."""

    def __init__(self, count: int, device: str, socket: str | None) -> None:
        self._count, self._device, self._socket = count, device, socket
        self._runtime: Runtime | None = None  # has the CPU device
        self._accesses: list[DriverAccess] = []

    def connect(self) -> list[RuntimeDevice]:
        """Connect to the drivers, if that has not happened yet; return their devices, under names of their own."""
        if self._runtime is None:
            self._runtime = Runtime([])
            names = [f"{self._device}.{number}" for number in range(1, self._count + 1)]
            self._accesses = [DriverAccess(name, partial(_open, self._socket)) for name in names]
            self._runtime.cpu.connected()
        return [RuntimeDevice(access.label, access, self._info(access)) for access in self._accesses]

    def _info(self, access: DriverAccess) -> DeviceInfo:
        infos = {info.name: info for info in access.known_devices()}
        if self._device not in infos:
            raise InvalidArgument(f"there is no device {self._device!r}; this driver has: {', '.join(sorted(infos))}")
        return infos[self._device]

    @contextmanager
    def prepared(self, model: Model) -> Iterator[CompiledModel]:
        """See `DeviceArrangement`."""
        devices = self.connect()
        assert self._runtime is not None
        selection = DeviceSelection(devices, self._runtime.cpu, is_cpu_last=True, choose=in_turn)
        with (
            settings.ENABLED_DEVICES.exported(_ANY_DEVICE),
            compile_model(model, selection, prepare_options()) as compiled,
        ):
            yield compiled

    def close(self) -> None:
        """Hang up."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            for access in self._accesses:
                access.close()
            runtime.close()


def _open(socket: str | None, _deadline_ns: int | None) -> Client:
    return connect(embedded=True) if socket is None else connect(socket)


def prepare_options() -> PrepareOptions:
    """Return the options of a preparation: no baseline program runs before the compiled one."""
    return {"preference": ExecutionPreference.SUSTAINED_SPEED}


def in_turn(subgraph: int, operation: int, candidates: Sequence[int]) -> int:
    """Return the device of an operation: one after the other."""
    return candidates[(subgraph + operation) % len(candidates)]


@contextmanager
def _counted_not_logged() -> Iterator[None]:
    """Leave out the warnings about devices that failed."""
    logs = [logging.getLogger(name) for name in ("nnfmq.client", "nnfmq.client")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def _counts(compiled: CompiledModel, operations: int) -> PlanCounts:
    plan = compiled.plan
    assert plan is not None, "compile_model sets it"
    if plan.devices == (CPU_DEVICE_NAME,):
        return PlanCounts(unprepared=1)
    if plan.is_simple:
        return PlanCounts(simple=1, undivided=int(operations > 1))
    return PlanCounts(compound=1, steps=len(plan.steps))


def _execute_sync(model: CompiledModel, request: Request, config: ExecutionConfig) -> tuple[OutputShape, ...]:
    return model.execute_request(request, config).shapes


def _execute_async(model: CompiledModel, request: Request, config: ExecutionConfig) -> tuple[OutputShape, ...]:
    return model.execute_request_async(request, config).result(TIMEOUT_S).shapes


def _execute_fenced(model: CompiledModel, request: Request, config: ExecutionConfig) -> tuple[OutputShape, ...]:
    """Execute with a fence that is signaled after the launch. Returns no shapes, because all are specified."""
    with Fence.create() as begin, model.execute_request_fenced(request, config, wait_for=[begin]) as launched:
        begin.signal()
        launched.result(TIMEOUT_S)
    return ()


def _execute_burst(model: CompiledModel, request: Request, config: ExecutionConfig) -> tuple[OutputShape, ...]:
    with model.request_burst() as burst:
        return burst.execute_request(request, config).shapes


_EXECUTE = {"": _execute_sync, "async": _execute_async, "fenced": _execute_fenced, "burst": _execute_burst}
