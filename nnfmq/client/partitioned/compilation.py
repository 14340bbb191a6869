"""compile_model: plan a model for a choice of devices, prepare each step, and use the CPU device if they fail.

The order of things is that of Android's NNAPI runtime: the devices, the plan, the preparations, and after a failure the
whole model on the CPU device. It is used neither after a mistake of the application, nor if the application has
listed the devices, nor for operations of vendors, nor if a setting says so (PREP-12, PART-6, PART-7, EXT-5).
`connection.client_compilation` does the same for the devices of one client.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

from msgspec import Struct

from nnfmq.base.deadlines import deadline_after, has_passed
from nnfmq.base.threads import Thread
from nnfmq.base.verbose_log import vlog, vlog_is_on
from nnfmq.client.connection.device import model_signature
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
from nnfmq.client.connection.switches import PartitionMode, Switches
from nnfmq.client.model.compiled_model import CompiledModel
from nnfmq.client.model.cpu_fallback import CpuFallback
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.client.observation import Preparation, begin_preparation
from nnfmq.client.partitioned.devices import RuntimeDevice
from nnfmq.client.partitioned.model import PartitionedModel
from nnfmq.hal.errors import InvalidArgument, MissedDeadline, MissedDeadlineTransient, NnfmqError
from nnfmq.hal.preparation import DeviceChoice
from nnfmq.hal.types import DEFAULT_PREFERENCE, Model, Priority
from nnfmq.observe.trace_points import recorded
from nnfmq.operations.extensions import to_local_prefixes
from nnfmq.planning.device_assignment import Choose
from nnfmq.planning.partitioning import PlanOptions, make_plan, step_token
from nnfmq.planning.plan import ExecutionPlan, ExecutionStep, simple_plan
from nnfmq.planning.sub_models import MetaModel, NeededLevels
from nnfmq.validation import validate_model
from nnfmq.validation.values import validate_extensions

__all__ = [
    "DeviceSelection",
    "StepCall",
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
                Thread(target=work.run, args=[group], name="nnfmq-prepare", daemon=True).start()
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
            and not options.get("deterministic")  # which the CPU device cannot promise
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
        options = [name for name in ("hints", "deterministic", "model_cache", "data_cache") if self._options.get(name)]
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
        """Return a report of the plan to the observers of this process; None if there are none."""
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
