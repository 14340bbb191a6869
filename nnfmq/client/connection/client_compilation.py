"""ClientCompilation: the choice among one driver's devices, for `Client.prepare`, and the CPU device behind them.

The common case costs nothing beside the preparation: a driver whose devices are the packaged ones has `compiled`,
which no other device beats, so no device is asked for its performance or for what it supports. Only if it declines,
or the driver has other devices that are faster at something, is the model planned; what plans and executes models on
several devices is imported then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from nnfmq.base.deadlines import deadline_after
from nnfmq.client.connection.client import Client
from nnfmq.client.connection.device import Device, DeviceInfo, hosts_runtime
from nnfmq.client.connection.hosted_choice import GivenModel, Host, Hosting
from nnfmq.client.connection.prepare_arguments import (
    NamedModel,
    PrepareOptions,
    has_vendor_operations,
    to_hal_model,
    to_preference,
    with_time_left,
)
from nnfmq.client.connection.switches import PartitionMode, Switches
from nnfmq.client.model.compiled_model import CompiledModel
from nnfmq.client.model.cpu_fallback import CpuFallback
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.hal.capabilities import UNKNOWN_PERFORMANCE, Capabilities
from nnfmq.hal.errors import GeneralFailure, InvalidArgument, NnfmqError
from nnfmq.hal.types import DEFAULT_PREFERENCE, DeviceStatus, ExecutionPreference, Model
from nnfmq.observe.trace_points import recorded

if TYPE_CHECKING:
    from nnfmq.client.partitioned.devices import CpuDevice

__all__ = ["ClientCompilation", "best_of_all"]

_COMPILED, _REFERENCE = "compiled", "reference"
_PACKAGED = {_COMPILED, _REFERENCE}
_UNKNOWN = UNKNOWN_PERFORMANCE.exec_time
_log = logging.getLogger("nnfmq.client")


class ClientCompilation:
    """Prepares the models of one client. Close it: the driver of the CPU device ends with it. Thread-safe.

    Args:
        connect_cpu: Starts the driver of the CPU device when it is first needed. Takes a deadline.
    """

    def __init__(self, connect_cpu: Callable[[int | None], Client]) -> None:
        self._connect_cpu = connect_cpu
        self._lock = threading.Lock()
        self._cpu: CpuDevice | None = None
        self._warning = threading.Lock()  # acquired once, by the thread that logs the warning
        self._capabilities: dict[str, Capabilities] = {}

    def prepare(
        self, client: Client, infos: Sequence[DeviceInfo], given: GivenModel, options: PrepareOptions
    ) -> CompiledModel:
        """Return the model, prepared on the best of the client's devices, or on several, or on the CPU device; blocks.

        What these do not support is prepared on a device that hosts a runtime.

        Args:
            client: The client.
            infos: Its devices, as they are now.
            given: The model. The caller closes the result.
            options: As for `Device.prepare`.

        Raises:
            NnfmqError: As `Hosting.prepare`.
        """
        switches = Switches.read()
        own = [info for info in infos if switches.is_enabled(info.name) and not hosts_runtime(info)]
        prepare_own = partial(self._prepare_own, client, own, switches)
        return self.hosting(client, infos).prepare(given, options, prepare_own)

    def hosting(self, client: Client, infos: Sequence[DeviceInfo]) -> Hosting:
        """Return the client's devices that host runtimes, of those that are switched on."""
        switches = Switches.read()
        hosts = [info for info in infos if hosts_runtime(info) and switches.is_enabled(info.name)]
        return Hosting(
            [Host.of(client.device_of(info, "best")) for info in hosts if not switches.uses_only_cpu],
            client.why_absent,
            switches.is_synchronous,
        )

    def _prepare_own(
        self,
        client: Client,
        infos: Sequence[DeviceInfo],
        switches: Switches,
        model: Model | NamedModel,
        options: PrepareOptions,
    ) -> CompiledModel:
        deadline_ns = deadline_after(options.get("timeout"))
        enabled = sorted(infos, key=lambda info: info.name != _COMPILED)
        best = None if switches.uses_only_cpu else self._best(client, enabled, options)
        if best is None:
            return self._compile(client, enabled, model, options)
        try:
            with recorded("[NN_LR_PC]compilation"):
                prepared = client.device_of(best, "best").prepare(model, **options)
        except InvalidArgument:
            raise
        except NnfmqError as error:
            # A device that has declined the model may still be one of several that execute it.
            left, may_be_planned = with_time_left(options, deadline_ns), isinstance(error, GeneralFailure)
            return self._compile(client, enabled, model, left, None if may_be_planned else error)
        return self._with_fallback(prepared, model, switches, client.recovers)

    # -- the common case -----------------------------------------------------------------------------------------------

    def _best(self, client: Client, infos: Sequence[DeviceInfo], options: PrepareOptions) -> DeviceInfo | None:
        """Return the device that no other one beats at anything; None if there is none such."""
        available = [info for info in infos if info.status is DeviceStatus.AVAILABLE]
        if {info.name for info in infos} <= _PACKAGED:
            # `reference` is the CPU, which all figures are relative to, and `compiled` its operations in machine code.
            best = available[0] if available else None
        else:
            is_low_power = to_preference(options.get("preference", DEFAULT_PREFERENCE)) == ExecutionPreference.LOW_POWER
            best = best_of_all(available, self._performance(client, available), is_low_power)
        if best is not None and best.name == _REFERENCE:
            self._warn(infos)
        return best

    def _performance(self, client: Client, infos: Sequence[DeviceInfo]) -> list[Capabilities]:
        """Return the capabilities of the devices, each asked for once; none at all if one fails."""
        for info in infos:
            if info.name not in self._capabilities:
                try:
                    self._capabilities[info.name] = client.device_of(info).capabilities()
                except NnfmqError as error:
                    _log.info("device %r does not tell its performance: %s", info.name, error)
                    return []
        return [self._capabilities[info.name] for info in infos]

    def _warn(self, infos: Sequence[DeviceInfo]) -> None:
        status = next((info.status for info in infos if info.name == _COMPILED), None)
        if self._warning.acquire(blocking=False):
            _log.warning(
                "device 'compiled' is %s: models are prepared on the slower device 'reference'. "
                "'compiled' needs llvmlite where the driver runs: pip install 'nnfmq[compiled]'",
                "missing" if status is None else status.name,
            )

    def _with_fallback(
        self, prepared: PreparedModel, model: Model | NamedModel, switches: Switches, recovers: bool
    ) -> PreparedModel:
        prepared.planned_model = hal_model = to_hal_model(model)
        prepared.is_synchronous = switches.is_synchronous
        if switches.partition is PartitionMode.WITH_FALLBACK and not has_vendor_operations(hal_model):
            prepared.fallback = CpuFallback(self._open_cpu, model, survives_driver=recovers)
        return prepared

    def _open_cpu(self) -> Device:
        return self._cpu_device().connected()

    # -- all other cases -----------------------------------------------------------------------------------------------

    def _compile(
        self,
        client: Client,
        infos: Sequence[DeviceInfo],
        model: Model | NamedModel,
        options: PrepareOptions,
        failure: NnfmqError | None = None,
    ) -> CompiledModel:
        from nnfmq.client.partitioned.compilation import DeviceSelection, compile_model  # few models need it
        from nnfmq.client.partitioned.devices import ClientAccess, RuntimeDevice  # as above

        access = ClientAccess(client, infos)
        devices = [RuntimeDevice(info.name, access, info) for info in infos]
        selection = DeviceSelection(devices, self._cpu_device(), is_cpu_last=True, survives_driver=client.recovers)
        try:
            return compile_model(model, selection, options, failure)
        finally:
            del failure  # as in `compile_model`

    def _cpu_device(self) -> CpuDevice:
        with self._lock:
            if self._cpu is None:
                from nnfmq.client.partitioned.devices import CPU_DEVICE_NAME, CpuDevice, DriverAccess  # few need it

                self._cpu = CpuDevice(DriverAccess(CPU_DEVICE_NAME, self._connect_cpu))
            return self._cpu

    def close(self) -> None:
        """End the driver of the CPU device. Idempotent."""
        cpu = self._cpu
        if cpu is not None:
            cpu.close()


def best_of_all(
    infos: Sequence[DeviceInfo], performance: Sequence[Capabilities], is_low_power: bool
) -> DeviceInfo | None:
    """Return the first device whose every performance figure is at least as good as that of all others, if any."""
    tables = [_table(capabilities, is_low_power) for capabilities in performance]
    types = {type for table in tables for type in table}
    for info, table in zip(infos, tables, strict=False):
        if all(table.get(type, _UNKNOWN) <= other.get(type, _UNKNOWN) for other in tables for type in types):
            return info
    return None


def _table(capabilities: Capabilities, is_low_power: bool) -> dict[object, float]:
    """Return the figures by operand type, and by name for those of relaxed models and of control flow."""
    infos = {entry.type: entry.info for entry in capabilities.operand_performance} | {
        "relaxed scalar": capabilities.relaxed_float32_to_float16_scalar,
        "relaxed tensor": capabilities.relaxed_float32_to_float16_tensor,
        "if": capabilities.if_performance,
        "while": capabilities.while_performance,
    }
    return {key: info.power_usage if is_low_power else info.exec_time for key, info in infos.items()}
