"""Inputs and outputs by name, in every execution mode; tasks that are made of executions."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from support.drivers import Process
from support.models import add_model, relus_model
from support.stateful_models import stream

import nnfmq
from nnfmq.client.connection.prepare_arguments import FinishedModel
from nnfmq.hal.tensor_info import operand_info
from nnfmq.hal.types import Model

ONE, TEN, SUM = (np.array(values, np.float32) for values in ([1, 2, 3, 4], [10, 20, 30, 40], [11, 22, 33, 44]))
BY_NAME = {"right": TEN, "left": ONE}
Mode = Callable[..., tuple[Any, ...]]


def named(model: Model, inputs: list[str], outputs: list[str]) -> FinishedModel:
    operands = model.main.operands
    infos = [
        tuple(operand_info(operands[index], name) for index, name in zip(indexes, names, strict=True))
        for indexes, names in ((model.main.input_indexes, inputs), (model.main.output_indexes, outputs))
    ]
    return FinishedModel(model, *infos)


@pytest.fixture(scope="module")
def adding(shared_client: nnfmq.Client) -> Iterator[nnfmq.PreparedModel]:
    with shared_client.device("reference").prepare(named(add_model(), ["left", "right"], ["sum"])) as made:
        yield made


def execute_fenced(model: nnfmq.CompiledModel, *inputs: Any) -> Any:
    with model.execute_fenced(*inputs) as launched:
        return launched.result(timeout=10)


def compute(model: nnfmq.CompiledModel, *inputs: Any) -> Any:
    with model.create_reusable_execution() as execution:
        return execution.compute(*inputs)


def compute_fenced(model: nnfmq.CompiledModel, *inputs: Any) -> Any:
    with model.create_reusable_execution() as execution, execution.compute_fenced(*inputs) as launched:
        return launched.result(timeout=10)


def over_a_burst(model: nnfmq.CompiledModel, *inputs: Any) -> Any:
    with model.burst() as burst:
        return burst.execute(*inputs)


def over_a_pool(model: nnfmq.CompiledModel, *inputs: Any) -> Any:
    with model.burst_pool(1) as pool:
        return pool.execute(*inputs)


def in_a_task(model: nnfmq.CompiledModel, *inputs: Any) -> Any:
    with model.burst() as burst:
        return asyncio.run(burst.execute_async(*inputs))


MODES: dict[str, Callable[..., Any]] = {
    "call": lambda model, *inputs: model(*inputs),
    "execute": lambda model, *inputs: model.execute(*inputs),
    "execute_async": lambda model, *inputs: model.execute_async(*inputs).result(10),
    "execute_fenced": execute_fenced,
    "compute": compute,
    "compute_fenced": compute_fenced,
    "burst": over_a_burst,
    "burst_pool": over_a_pool,
    "burst in a task": in_a_task,
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_inputs_and_outputs_have_names_in_every_mode(adding: nnfmq.PreparedModel, mode: Mode) -> None:
    for inputs in ((ONE, TEN), (BY_NAME,), (MappingProxyType(BY_NAME),)):
        result: Any = mode(adding, *inputs)
        (first,) = result
        assert isinstance(result, tuple)
        assert len(result) == 1
        assert first is result[0] is result[-1] is result["sum"]
        np.testing.assert_array_equal(first, SUM)
        assert (result.names, list(result.as_dict())) == (("sum",), ["sum"])


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"left": ONE, "rigth": TEN}, "no input is called 'rigth'; the model has 2 inputs: 'left', 'right'; did you "),
        ({"left": ONE}, "of the model's 2 inputs 'right' is missing; given: 'left'"),
        ({}, "of the model's 2 inputs 'left', 'right' are missing; given: none"),
        ({**BY_NAME, "extra": ONE}, "no input is called 'extra'; the model has 2 inputs: 'left', 'right'$"),
        ({0: ONE, 1: TEN}, "no input is called 0; the model has 2 inputs"),
        ({"left": ONE, "right": TEN[:3]}, "input 'right' has shape 4; the given array has 3"),
    ],
)
def test_a_wrong_a_missing_or_an_extra_name_is_rejected_with_the_names(
    adding: nnfmq.PreparedModel, mode: Mode, inputs: Any, said: str
) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match=said):
        mode(adding, inputs)


def test_names_and_arrays_in_order_are_not_mixed(adding: nnfmq.PreparedModel) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match="input 'right' is given as a dict: give all inputs in one mapping"):
        adding(ONE, {"right": TEN})


def test_the_nearest_name_of_an_output_is_suggested(adding: nnfmq.PreparedModel) -> None:
    result = adding(BY_NAME)
    with pytest.raises(nnfmq.InvalidArgument, match=r"no output is called 'Sun'; .*: 'sum'; did you mean 'sum'"):
        _ = result["Sun"]
    with pytest.raises(IndexError):
        _ = result[1]


def test_names_that_several_arrays_have_are_rejected_and_positions_work(shared_client: nnfmq.Client) -> None:
    model = named(relus_model(3, (4,)), ["x", "x", "y"], ["z", "a", "z"])
    with shared_client.device("reference").prepare(model) as prepared:
        result = prepared(ONE, TEN, SUM)
        np.testing.assert_array_equal(result["a"], TEN)
        np.testing.assert_array_equal(result[2], SUM)
        with pytest.raises(nnfmq.InvalidArgument, match=r"2 outputs are called 'z': use their positions; .*3 outputs"):
            _ = result["z"]
        with pytest.raises(nnfmq.InvalidArgument, match="2 inputs are called 'x': use their positions"):
            prepared({"x": ONE, "y": SUM})


def test_results_are_compared_copied_and_pickled_as_tuples_with_names(adding: nnfmq.PreparedModel) -> None:
    result = adding(ONE, TEN)
    for again in (pickle.loads(pickle.dumps(result)), copy.copy(result), copy.deepcopy(result)):
        assert type(again) is type(result)
        np.testing.assert_array_equal(again["sum"], SUM)
    assert type(result[:1]) is tuple
    assert not hasattr(result, "__dict__")


def test_outputs_that_are_filled_have_their_names_as_well(adding: nnfmq.PreparedModel) -> None:
    target = np.empty(4, np.float32)
    assert adding.execute(BY_NAME, out=[target])["sum"] is target  # type: ignore[call-overload]
    with adding.burst() as burst, adding.create_reusable_execution() as execution:
        assert burst.execute(BY_NAME, out=[target])["sum"] is target
        assert burst.execute(BY_NAME, out=burst.outputs)["sum"] is burst.outputs["sum"]
        assert execution.compute(BY_NAME, out=execution.outputs)["sum"] is execution.outputs[0]


def test_a_model_with_states_has_names(shared_client: nnfmq.Client) -> None:
    with shared_client.device("reference").prepare(stream()) as model:
        name, info = model.outputs[0].name, model.inputs[0]
        given = np.ones(info.shape, info.dtype)
        first, second = model({info.name: given})[name], model(given)[name]
        with model.burst() as burst:
            np.testing.assert_array_equal(burst.execute({info.name: given})[name], first)
            np.testing.assert_array_equal(burst.execute({info.name: given})[name], second)


def test_managed_buffers_are_given_by_name(shared_client: nnfmq.Client, adding: nnfmq.PreparedModel) -> None:
    with nnfmq.allocate(inputs=[(adding, 0)]) as buffer:
        buffer.copy_from(ONE)
        np.testing.assert_array_equal(adding({"right": TEN, "left": buffer})["sum"], SUM)


def test_a_model_on_several_devices_has_names(shared_client: nnfmq.Client) -> None:
    model = named(add_model(), ["left", "right"], ["sum"])
    with nnfmq.Runtime([], embedded=True) as runtime, runtime.prepare(model, ["sample-minimal", "reference"]) as both:
        for mode in MODES.values():
            np.testing.assert_array_equal(mode(both, BY_NAME)["sum"], SUM)


def test_executions_are_made_tasks(adding: nnfmq.PreparedModel) -> None:
    async def main() -> list[Any]:
        pending = adding.execute_async(BY_NAME)
        with adding.burst() as burst:
            tasks = [asyncio.create_task(pending), asyncio.create_task(pending), asyncio.create_task(
                burst.execute_async(ONE, TEN)
            )]  # fmt: skip
            results = await asyncio.gather(*tasks, pending, adding.execute_async(ONE, TEN))
            async with asyncio.TaskGroup() as group:
                last = group.create_task(adding.execute_async(BY_NAME))
        return [*results, last.result(), await pending]

    for result in asyncio.run(main()):
        np.testing.assert_array_equal(result["sum"], SUM)


def test_a_task_of_an_execution_is_cancelled_and_others_get_the_result(
    shared_client: nnfmq.Client, adding: nnfmq.PreparedModel
) -> None:
    async def main(worker: Process) -> Any:
        with worker.stopped():  # or the result may be there before the task begins to wait
            pending = adding.execute_async(BY_NAME)
            task = asyncio.create_task(pending)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return await asyncio.create_task(pending)

    with Process(shared_client.worker_pid) as worker:
        np.testing.assert_array_equal(asyncio.run(main(worker))["sum"], SUM)


def test_a_task_of_an_execution_raises_its_error(adding: nnfmq.PreparedModel) -> None:
    async def main() -> None:
        await asyncio.create_task(adding.execute_async(BY_NAME, timeout=0))

    with pytest.raises(nnfmq.MissedDeadline):
        asyncio.run(main())


def test_async_with_connects_and_closes_while_other_tasks_run() -> None:
    async def main() -> nnfmq.Client:
        turns, is_done = 0, False

        async def count() -> None:
            nonlocal turns
            while not is_done:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        async with nnfmq.connect(embedded=True) as client:
            is_done = True
            await counting
            assert client.connection.has_started
        assert turns > 10  # the driver takes many turns of the loop to start
        return client

    client = asyncio.run(main())
    with pytest.raises(nnfmq.BadState, match="this client is closed"):
        client.devices()


def test_async_with_raises_what_the_driver_s_start_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "devices.toml").write_text("no devices")
    monkeypatch.setenv("NNFMQ_DEVICES", str(tmp_path / "devices.toml"))

    async def main() -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(nnfmq.connect(embedded=True))

    with pytest.raises(nnfmq.GeneralFailure, match=r"devices\.toml"):
        asyncio.run(main())


def test_a_loop_that_runs_may_connect_without_async_with(daemon: Any) -> None:
    async def main() -> int:
        with daemon.connect() as client:
            return len(client.devices())

    assert asyncio.run(main()) > 0
