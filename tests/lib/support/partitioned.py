"""Models on several drivers, from plans written by hand; devices whose executions fail; and all ways to execute.

Three drivers run: the steps of a plan are prepared on the first two, the third one has the CPU device of the fallback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import nnfmq
from nnfmq.client.connection.device import Device
from nnfmq.client.model.cpu_fallback import CpuFallback
from nnfmq.client.partitioned.model import PartitionedModel
from nnfmq.hal.errors import NnfmqError
from nnfmq.hal.tensor_info import operand_info
from nnfmq.hal.types import Model
from nnfmq.planning.plan import ExecutionPlan
from support.drivers import LIMIT_S, Daemon, running_daemon, short_folder
from support.plugins import add_plugin, path_with

FAILING = """
from nnfmq.engines.function import FunctionProgram
from nnfmq.hal import errors
from nnfmq.hal.types import OutputShape
from nnfmq.driver.devices.device import DeviceBase


def device(status):
    class Failing(DeviceBase):
        name = f"test-{status.lower()}"

        def supports(self, model, subgraph, operation):
            return True

        def compile(self, model):
            def run(inputs):
                raise errors.error_for_status(errors.ErrorStatus[status], "the device fails, as it is told")

            return FunctionProgram(model, run)

    return Failing


class Lying(DeviceBase):  # it reports shapes that its outputs cannot have, for executions that it has not made
    name = "test-lying"

    def supports(self, model, subgraph, operation):
        return True

    def compile(self, model):
        return LyingProgram(len(model.main.output_indexes))


class LyingProgram:
    def __init__(self, count):
        self.count = count

    def bind(self, inputs, outputs):
        return self

    def run(self, options):
        return (OutputShape((7, 7, 7)),) * self.count


"""
LYING = "test-lying"
STATUSES = (
    "GENERAL_FAILURE",
    "DEVICE_UNAVAILABLE",
    "INVALID_ARGUMENT",
    "MISSED_DEADLINE_TRANSIENT",
    "MISSED_DEADLINE_PERSISTENT",
    "RESOURCE_EXHAUSTED_TRANSIENT",
    "RESOURCE_EXHAUSTED_PERSISTENT",
)


def device_failing_with(status: str) -> str:
    """Return the name of the device whose executions fail with that status."""
    return f"test-{status.lower()}"


@contextmanager
def three_drivers(site: Path) -> Iterator[list[Daemon]]:
    """Run three drivers with devices that fail in each way; `site` is an empty folder."""
    source = FAILING + "\n".join(f'{status} = device("{status}")' for status in STATUSES)
    add_plugin(
        site,
        "failing_devices",
        source,
        {LYING: "failing_devices:Lying"}
        | {device_failing_with(status): f"failing_devices:{status}" for status in STATUSES},
        "nnfmq.devices",
    )
    with ExitStack() as stack:
        folder = stack.enter_context(short_folder())
        environment = path_with(site)
        paths = [folder / f"{name}.sock" for name in "abc"]
        yield [stack.enter_context(running_daemon(path, environment=environment)) for path in paths]


class Runtime:
    """Clients of the first two drivers, which prepare plans, and one of the third, which connects when it is needed."""

    def __init__(self, drivers: Sequence[Daemon], resources: ExitStack, *, recover: bool = False) -> None:
        self._drivers, self._resources, self._recover = drivers, resources, recover
        self.clients = [self._client(index) for index in range(2)]

    def _client(self, index: int) -> nnfmq.Client:
        path = self._drivers[index].path
        return self._resources.enter_context(nnfmq.connect(path, timeout=LIMIT_S, recover=self._recover))

    @cached_property
    def cpu_client(self) -> nnfmq.Client:
        """That of the third driver."""
        return self._client(2)

    def prepare(
        self,
        plan: ExecutionPlan,
        *,
        devices: Sequence[str] = ("reference", "reference"),
        cpu: Sequence[str] | None = ("reference",),
        states: Sequence[Any] = (),
    ) -> PartitionedModel:
        """Prepare a plan, whose device i is `devices[i]` of the first client if i is even, else of the second.

        `cpu` has the devices of the third driver that the fallback opens, one after the other, and then the last one
        again; None = no fallback.
        """
        models = [step.model for step in plan.execution_steps]
        steps = [
            self.clients[step.device % 2].device(devices[step.device]).prepare(step.model)
            for step in plan.execution_steps
        ]
        fallback = None if cpu is None else CpuFallback(self._opener(cpu), plan.model, models)
        inputs, outputs = infos_of(plan.model)
        count = len(states)
        model = PartitionedModel(
            plan, steps, fallback, inputs[: len(inputs) - count], outputs[: len(outputs) - count], tuple(states)
        )
        self._resources.callback(model.close)
        return model

    def _opener(self, names: Sequence[str]) -> Callable[[], Device]:
        waiting = list(names)

        def open_device() -> Device:
            name = waiting.pop(0) if len(waiting) > 1 else waiting[0]
            return self.cpu_client.device(name)

        return open_device


def infos_of(model: Model) -> tuple[Any, Any]:
    """Return descriptions of a model's inputs and outputs."""
    main = model.main
    inputs = tuple(operand_info(main.operands[index], f"input {i}") for i, index in enumerate(main.input_indexes))
    outputs = tuple(operand_info(main.operands[index], f"output {i}") for i, index in enumerate(main.output_indexes))
    return inputs, outputs


def _over_burst(model: nnfmq.CompiledModel, *inputs: Any) -> Any:
    with model.burst() as burst:
        return burst.execute(*inputs)


def _over_reusable(model: nnfmq.CompiledModel, *inputs: Any) -> Any:
    with model.create_reusable_execution() as execution:
        return execution.compute(*inputs)


def _once(model: nnfmq.CompiledModel, *inputs: Any) -> Any:
    with model.create_execution() as execution:
        return execution.compute(*inputs)


def _fenced(model: nnfmq.CompiledModel, *inputs: Any) -> Any:
    with model.execute_fenced(*inputs) as execution:
        return execution.result(LIMIT_S)


def _in_task(model: nnfmq.CompiledModel, *inputs: Any) -> Any:
    async def main() -> Any:
        return await model.execute_async(*inputs)

    return asyncio.run(main())


def _over_burst_in_task(model: nnfmq.CompiledModel, *inputs: Any) -> Any:
    async def main() -> Any:
        with model.burst() as burst:
            return await burst.execute_async(*inputs)

    return asyncio.run(main())


def _fenced_in_task(model: nnfmq.CompiledModel, *inputs: Any) -> Any:
    async def main() -> Any:
        with model.execute_fenced(*inputs) as execution:
            return await execution

    return asyncio.run(main())


MODES: dict[str, Callable[..., Any]] = {
    "synchronous": lambda model, *inputs: model.execute(*inputs),
    "asynchronous": lambda model, *inputs: model.execute_async(*inputs).result(LIMIT_S),
    "fenced": _fenced,
    "burst": _over_burst,
    "reusable": _over_reusable,
    "once": _once,
    "await": _in_task,
    "await burst": _over_burst_in_task,
    "await fenced": _fenced_in_task,
}
"""All ways to execute a model with arrays: model, inputs → outputs."""


def error_of(call: Callable[[], object]) -> NnfmqError:
    """Return the error that a call raises."""
    try:
        call()
    except NnfmqError as error:
        return error
    raise AssertionError("no error was raised")
