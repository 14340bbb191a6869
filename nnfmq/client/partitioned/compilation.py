"""compile_model: plan a model for a choice of devices, prepare each step, and use the CPU device if they fail.

The order of things is that of Android's NNAPI runtime: the devices, the plan, the preparations, and after a failure the
whole model on the CPU device. It is used neither after a mistake of the application, nor if the application has
listed the devices, nor for operations of vendors, nor if a setting says so (PREP-12, PART-6, PART-7, EXT-5).
ClientCompilation is the same for the devices of one client.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

from msgspec import Struct

from nnfmq.base import settings
from nnfmq.base.deadlines import deadline_after, has_passed
from nnfmq.base.verbose_log import vlog, vlog_is_on
from nnfmq.client.connection.client import Client
from nnfmq.client.connection.device import Device, DeviceInfo, hosts_runtime, model_signature
from nnfmq.client.connection.hosted_choice import GivenModel, Host, Hosting
from nnfmq.client.connection.prepare_arguments import (
    NamedModel,
    PrepareOptions,
    ProgressReport,
    compile_notice,
    has_vendor_operations,
    name_for_display,
    to_hal_model,
    to_preference,
    to_priority,
    with_time_left,
)
from nnfmq.client.model.compiled_model import CompiledModel
from nnfmq.client.model.cpu_fallback import CpuFallback
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.client.observation import Preparation, begin_preparation
from nnfmq.client.partitioned.devices import CPU_DEVICE_NAME, ClientAccess, CpuDevice, DriverAccess, RuntimeDevice
from nnfmq.client.partitioned.model import PartitionedModel
from nnfmq.hal.capabilities import UNKNOWN_PERFORMANCE, Capabilities
from nnfmq.hal.errors import GeneralFailure, InvalidArgument, MissedDeadline, MissedDeadlineTransient, NnfmqError
from nnfmq.hal.preparation import DeviceChoice
from nnfmq.hal.types import DEFAULT_PREFERENCE, DeviceStatus, ExecutionPreference, Model, Priority
from nnfmq.observe.trace_points import recorded
from nnfmq.operations.extensions import to_local_prefixes
from nnfmq.planning.device_assignment import Choose
from nnfmq.planning.partitioning import PlanOptions, make_plan, step_token
from nnfmq.planning.plan import ExecutionPlan, ExecutionStep, simple_plan
from nnfmq.planning.sub_models import MetaModel, NeededLevels
from nnfmq.validation import validate_model
from nnfmq.validation.values import validate_extensions

__all__ = [
    "ClientCompilation",
    "DeviceSelection",
    "PartitionMode",
    "StepCall",
    "Switches",
    "best_of_all",
    "compile_model",
    "plan_model",
    "prepare_steps",
    "supported_in_slice",
    "valid_model",
]


# ----------------------------------------------------------------------------------------------------------------------
# prepare_steps: prepare the steps of a plan on their devices; those of different drivers at the same time.


class StepCall(NamedTuple):
    """The preparation of one step. `driver` names its driver."""

    driver: str
    prepare: Callable[[], PreparedModel]


def prepare_steps(calls: Sequence[StepCall], progress: Callable[[int, int], None] | None = None) -> list[PreparedModel]:
    """Return the prepared models of the steps, in order; blocks. The caller closes them.

    Each driver prepares its steps one after the other. If one fails, the others' are closed as soon as they are
    prepared, and nobody waits for that.

    Args:
        calls: The steps.
        progress: Called on this thread with the numbers of prepared steps and of all. An exception ends this call.

    Raises:
        NnfmqError: The first error of a step.
    """
    groups: dict[str, list[int]] = {}
    for index, call in enumerate(calls):
        groups.setdefault(call.driver, []).append(index)
    work = _Preparations(calls)
    try:
        if len(groups) > 1:
            for group in groups.values():
                threading.Thread(target=work.run, args=[group], name="nnfmq-prepare", daemon=True).start()
        for index in range(len(calls)):
            if len(groups) == 1:
                work.run([index])
            work.wait_for_one()
            if progress is not None:
                progress(index + 1, len(calls))
    except BaseException:
        work.cancel()
        raise
    return work.results()


class _Preparations:
    """The steps that are prepared, or being prepared. Thread-safe."""

    def __init__(self, calls: Sequence[StepCall]) -> None:
        self._calls = calls
        self._lock = threading.Lock()
        self._prepared: dict[int, PreparedModel] = {}
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        self._is_cancelled = False

    def run(self, indexes: Sequence[int]) -> None:
        """Prepare steps one after the other, until one fails or all are cancelled."""
        for index in indexes:
            if self._is_cancelled:
                return
            try:
                model = self._calls[index].prepare()
            except (NnfmqError, OSError) as error:
                self._ended.put(error)
                return
            self._keep(index, model)
            self._ended.put(None)

    def _keep(self, index: int, model: PreparedModel) -> None:
        with self._lock:
            if not self._is_cancelled:
                self._prepared[index] = model
                return
        model.close()

    def wait_for_one(self) -> None:
        """Block until a step is prepared. Raises the error of one that fails."""
        error = self._ended.get()
        try:
            if error is not None:
                raise error
        finally:
            del error  # this frame, to which it refers, would keep it

    def cancel(self) -> None:
        """Close what is prepared now or later."""
        with self._lock:
            self._is_cancelled = True
            models, self._prepared = list(self._prepared.values()), {}
        for model in models:
            model.close()

    def results(self) -> list[PreparedModel]:
        """Return the models, when all are prepared."""
        return [self._prepared[index] for index in range(len(self._calls))]


# ----------------------------------------------------------------------------------------------------------------------
# Switches: the settings of NNAPI's runtime that change on which devices models run (PART-7, PART-8).


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


# ----------------------------------------------------------------------------------------------------------------------
# compile_model: plan a model for a choice of devices, prepare each step, and use the CPU device if they fail.


_ONE_DEVICE = "prepare the model on one device, with `devices=[name]` or `client.device(name).prepare`"
_log = logging.getLogger("nnfmq.runtime")


class DeviceSelection(Struct, frozen=True):
    """The devices that a compilation may use: preferred ones first, and the CPU device, which may be among them."""

    devices: Sequence[RuntimeDevice]
    cpu: RuntimeDevice
    is_explicit: bool = False
    """Whether the application listed `devices`."""
    is_cpu_last: bool = False
    """Whether the CPU device executes only operations that `devices` do not support; it is not among them then."""
    survives_driver: bool = True
    """Whether the CPU device executes after the driver of another device has died."""
    choose: Choose | None = None
    """Replaces the choice by performance figures, for tests of forced partitions."""


def compile_model(
    model: Model | NamedModel,
    selection: DeviceSelection,
    options: PrepareOptions,
    failure: NnfmqError | None = None,
) -> CompiledModel:
    """Return a model that is prepared on one or several devices; blocks. The caller closes it.

    Args:
        model: The model.
        selection: The devices.
        options: As for `Device.prepare`. Cache files and hints need a plan with one device. The timeout is that of the
            whole model: planning and each step get the time that is left.
        failure: The error of a device that was tried before: no device but the CPU device is tried then.

    Raises:
        InvalidArgument: If the model or an option is not valid, or no device supports an operation.
        MissedDeadline: If the timeout passes.
        NnfmqError: What a device raises, if the CPU device may not be used instead.
    """
    try:
        compilation = _Compilation(model, selection, options, Switches.read())
        with recorded("[NN_LR_PC]compilation"):
            return compilation.run() if failure is None else compilation.run_after(failure)
    finally:
        del failure  # it may be raised, and this frame, to which it refers then, would keep it


def plan_model(model: Model | NamedModel, selection: DeviceSelection, options: PrepareOptions) -> ExecutionPlan:
    """Return the plan that `compile_model` would make first; blocks. Nothing is prepared. Raises as `compile_model`."""
    return _Compilation(model, selection, options, Switches.read()).planned()[0]


def valid_model(model: Model | NamedModel) -> Model:
    """Return the HAL's model, with this process's extension prefixes. Raises InvalidArgument if it is not valid.

    IF and WHILE may have operands of unknown size: the runtime can interpret them.
    """
    hal_model = to_hal_model(model)
    validate_extensions(hal_model.extensions)
    local = to_local_prefixes(hal_model)
    validate_model(local, allow_unspecified_boundaries=True)
    return local


def supported_in_slice(model: Model, device: RuntimeDevice) -> Sequence[bool]:
    """Return for each operation of a valid model whether a device can execute it; blocks.

    The device is asked about the operations that its feature level has. Raises as `supported_operations`.
    """
    part = MetaModel(model, NeededLevels(model)).slice(device.feature_level)
    count = len(model.main.operations)
    if part is None:
        return [False] * count
    return part.supported_in_source(device.supported_operations(part.model), count)


class _Compilation:
    """One compilation."""

    def __init__(
        self, model: Model | NamedModel, selection: DeviceSelection, options: PrepareOptions, switches: Switches
    ) -> None:
        self._loaded, self._model = model, to_hal_model(model)
        self._selection, self._options, self._switches = selection, options, switches
        self._deadline_ns = deadline_after(options.get("timeout"))
        self._preference = to_preference(options.get("preference", DEFAULT_PREFERENCE))
        self._priority = to_priority(options.get("priority", Priority.MEDIUM))
        self._may_fall_back = (
            not selection.is_explicit
            and switches.partition is not PartitionMode.WITHOUT_FALLBACK
            and not has_vendor_operations(self._model)
        )
        self._notice: ProgressReport | None = None  # of all steps

    def run(self) -> CompiledModel:
        """Return the prepared model."""
        cpu = self._selection.cpu
        if self._switches.uses_only_cpu and not self._selection.is_explicit:
            return self._on_device(cpu, "best")
        try:
            return self._on_planned_devices()
        except InvalidArgument:
            raise
        except NnfmqError as error:
            return self.run_after(error)

    def run_after(self, failure: NnfmqError) -> PreparedModel:
        """Return the model prepared on the CPU device after a device has failed. Raises `failure` if it may not be."""
        cpu = self._selection.cpu
        try:
            if not self._may_fall_back or (isinstance(failure, MissedDeadline) and self._deadline_ns is not None):
                raise failure
            _log.warning("%s executes the model, because its devices failed: %s", cpu.name, str(failure))
        finally:
            del failure  # this frame, to which it refers, would keep it
        with recorded(f"[NN_LR_PC]fallback to {cpu.name}"):
            return self._on_device(cpu, "fallback")

    def _on_planned_devices(self) -> CompiledModel:
        with recorded("[NN_LR_PC]plan"):
            plan, devices = self.planned()
        _log_plan(plan)
        if plan.is_simple:
            return self._on_device(devices[plan.execution_steps[0].device], self._choice, plan)
        self._require_no_single_device_options(plan)
        return self._on_several(plan, devices)

    def planned(self) -> tuple[ExecutionPlan, list[RuntimeDevice]]:
        """Return the plan and the devices that it is for. Raises MissedDeadline if planning takes too long."""
        model = valid_model(self._loaded)
        self._require_time_for_planning()  # here, too: a warning would blame the devices that are asked
        try:
            found = self._plan(model, self._usable_devices())
        except NnfmqError:
            self._require_time_for_planning()
            raise
        self._require_time_for_planning()
        return found

    def _require_time_for_planning(self) -> None:
        # A device that has not replied in time counts as one that supports nothing: no plan is right then.
        if has_passed(self._deadline_ns):
            raise MissedDeadlineTransient("the deadline passed while the model was planned")

    @property
    def _choice(self) -> DeviceChoice:
        return "application" if self._selection.is_explicit else "best"

    def _plan(self, model: Model, devices: list[RuntimeDevice]) -> tuple[ExecutionPlan, list[RuntimeDevice]]:
        options = PlanOptions(
            self._preference, self._selection.is_explicit, self._switches.strict_slicing, self._selection.choose
        )
        if devices:
            try:
                return make_plan(model, devices, options), devices
            except InvalidArgument:
                if not self._selection.is_cpu_last:
                    raise
        with_cpu = [*devices, self._selection.cpu]
        return make_plan(model, with_cpu, options), with_cpu

    def _usable_devices(self) -> list[RuntimeDevice]:
        """Return the devices that tell their performance. Raises the error of the last one if none does."""
        selection, found = self._selection, []
        failure: NnfmqError | None = None
        for device in (known.until(self._deadline_ns) for known in selection.devices):
            if not (selection.is_explicit or device.is_cpu or self._switches.is_enabled(device.name)):
                continue
            try:
                _ = device.capabilities
            except NnfmqError as error:
                _log.info("device %s is not used: %s", device.name, str(error))
                failure = error
            else:
                found.append(device)
        try:
            if failure is not None and not found:
                raise failure
        finally:
            del failure  # this frame, to which it refers, would keep it
        return found

    def _require_no_single_device_options(self, plan: ExecutionPlan) -> None:
        options = [name for name in ("hints", "model_cache", "data_cache") if self._options.get(name)]
        if options:
            names = ", ".join(f"`{name}`" for name in options)
            on = ", ".join(dict.fromkeys(plan.devices[step.device] for step in plan.execution_steps))
            verb = "needs" if len(options) == 1 else "need"
            raise InvalidArgument(f"{names} {verb} one device, and this model is divided among {on}: {_ONE_DEVICE}")

    # -- one device ----------------------------------------------------------------------------------------------------

    def _on_device(
        self, device: RuntimeDevice, choice: DeviceChoice, plan: ExecutionPlan | None = None
    ) -> PreparedModel:
        prepared = device.prepare_as(choice, self._loaded, with_time_left(self._options, self._deadline_ns))
        prepared.plan = plan or simple_plan(self._model, device.name)
        prepared.is_synchronous = self._switches.is_synchronous_on(device.is_cpu)
        if self._may_fall_back and not device.is_cpu:
            prepared.fallback = self._fallback()
        return prepared

    def _fallback(self, step_models: Sequence[Model] = ()) -> CpuFallback:
        cpu, survives = self._selection.cpu, self._selection.survives_driver
        return CpuFallback(cpu.connected, self._loaded, step_models, survives_driver=survives)

    # -- several devices -----------------------------------------------------------------------------------------------

    def _on_several(self, plan: ExecutionPlan, devices: Sequence[RuntimeDevice]) -> PartitionedModel:
        calls = [
            StepCall(devices[step.device].driver, partial(self._prepare_step, index, step, devices[step.device]))
            for index, step in enumerate(plan.execution_steps)
        ]
        inputs, outputs = model_signature(self._loaded, [device.info for device in devices])
        observation = self._observation(plan, devices)
        progress = self._options.get("progress")
        try:
            with compile_notice(self._options.get("name") or "", progress) as notice:
                self._notice = notice if progress is None else None
                steps = prepare_steps(calls, progress)
        except BaseException as error:
            if observation is not None:
                observation.fail(error)
            raise
        fallback = None
        if self._may_fall_back:
            models = [step.model for step in plan.execution_steps]
            fallback = self._fallback(models)
        states = () if isinstance(self._loaded, Model) else tuple(getattr(self._loaded, "states", ()))
        prepared = PartitionedModel(plan, steps, fallback, inputs, outputs, states)
        prepared.metadata = getattr(self._loaded, "metadata", None)
        prepared.data_files = getattr(self._loaded, "data_files", ())
        prepared.is_synchronous = self._switches.is_synchronous
        if observation is not None:
            prepared.handle.observed = observation.finish(prepared.handle.inputs, prepared.handle.outputs)
        return prepared

    def _observation(self, plan: ExecutionPlan, devices: Sequence[RuntimeDevice]) -> Preparation | None:
        """Return what tells the observers of this process of the plan; None if there are none."""
        used = [devices[step.device] for step in plan.execution_steps]
        return begin_preparation(
            self._loaded,
            getattr(self._loaded, "inputs", ()),
            getattr(self._loaded, "outputs", ()),
            len(getattr(self._loaded, "states", ())),
            self._choice,
            (self._preference, self._priority),
            bool(self._options.get("token") or self._options.get("cache_dir")),
            plan_devices=[(device.name, device.version_string) for device in used],
        )

    def _prepare_step(self, index: int, step: ExecutionStep, device: RuntimeDevice) -> PreparedModel:
        options = with_time_left(self._options, self._deadline_ns)
        options["progress"] = self._notice
        options["name"] = name_for_display(step.model, f"{self._options.get('name') or ''}[{index}]")
        token = options.get("token")
        if token is not None:
            options["token"] = step_token(token, step, device, self._preference, self._priority)
        with recorded(f"[NN_LR_PC]step {index} on {device.name}"):
            return device.prepare_as("step", step.model, options)


def _log_plan(plan: ExecutionPlan) -> None:
    """Write the plan to the verbose log."""
    if vlog_is_on("compilation"):
        from nnfmq.planning.text import plan_text  # few processes write it

        for line in plan_text(plan).splitlines():
            vlog("compilation", "%s", line)


# ----------------------------------------------------------------------------------------------------------------------
# ClientCompilation: the choice among one driver's devices, for `Client.prepare`, and the CPU device behind them.
#
# The common case costs nothing beside the preparation: a driver whose devices are the packaged ones has `compiled`,
# which no other device beats, so no device is asked for its performance or for what it supports. Only if it declines,
# or the driver has other devices that are faster at something, is the model planned.


_COMPILED, _REFERENCE = "compiled", "reference"
_PACKAGED = {_COMPILED, _REFERENCE}
_UNKNOWN = UNKNOWN_PERFORMANCE.exec_time
_client_log = logging.getLogger("nnfmq.client")


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
        """Return those of the client's devices that host runtimes."""
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
                    _client_log.info("device %r does not tell its performance: %s", info.name, error)
                    return []
        return [self._capabilities[info.name] for info in infos]

    def _warn(self, infos: Sequence[DeviceInfo]) -> None:
        status = next((info.status for info in infos if info.name == _COMPILED), None)
        if self._warning.acquire(blocking=False):
            _client_log.warning(
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
