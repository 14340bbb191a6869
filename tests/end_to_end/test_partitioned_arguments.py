"""The arguments of executions on several devices: arrays to fill, buffers, states, and what is rejected."""

from __future__ import annotations

import numpy as np
import pytest
from support.partitioned import MODES, Runtime, device_failing_with
from support.plans import linear_plan
from support.small_models import two_adds

import nnfmq
from nnfmq.hal.tensor_info import StateInfo, operand_info
from nnfmq.hal.types import BufferToken, DataLocation, Request, RequestArgument

A = np.array([[1, 2], [3, 4]], np.float32)
B = np.array([[10, 20], [30, 40]], np.float32)
EXPECTED = (A + 2 * B).tolist()
PLAN = linear_plan(two_adds(), [0], [1])


def test_outputs_are_stored_in_the_arrays_of_the_application(runtime: Runtime) -> None:
    model, out = runtime.prepare(PLAN), [np.zeros((2, 2), np.float32)]
    with model.burst() as burst, model.create_reusable_execution() as execution:
        for execute in (model.execute, burst.execute, execution.compute):
            out[0][:] = 0
            (result,) = execute(A, B, out=out)
            assert result is out[0]
            assert out[0].tolist() == EXPECTED
        assert burst.execute(A, B, out=burst.outputs) is burst.outputs
        with pytest.raises(nnfmq.InvalidArgument, match="`out` has"):
            burst.execute(A, B, out=[np.zeros(3, np.float32)])


@pytest.mark.parametrize("devices", [("reference", "reference"), (device_failing_with("GENERAL_FAILURE"), "reference")])
def test_DOM_15_shared_buffers_are_arguments_of_all_drivers(runtime: Runtime, devices: tuple[str, str]) -> None:
    model = runtime.prepare(PLAN, devices=devices)
    whole = runtime.cpu_client.device("reference").prepare(two_adds())
    roles = {"inputs": [(model, 0), (whole, 0)], "outputs": [(model, 0)]}
    with nnfmq.allocate(inputs=[(model, 0)]) as buffer:
        assert buffer.is_shared
    with whole, nnfmq.allocate(**roles) as buffer:
        assert buffer.is_shared
        with pytest.raises(nnfmq.GeneralFailure, match="uninitialized"):
            model.execute(buffer, B)
        buffer.copy_from(A)
        assert model.execute(buffer, B)[0].tolist() == EXPECTED
        assert model.execute(A + 1, B, out=[buffer]) == (buffer,)
        assert buffer.array().tolist() == (A + 1 + 2 * B).tolist()
        with pytest.raises(nnfmq.InvalidArgument, match="not allocated for input 1"):
            model.execute(A, buffer)


def test_buffers_in_the_memory_of_one_driver_are_rejected(runtime: Runtime) -> None:
    model, device = runtime.prepare(PLAN), runtime.clients[0].device("reference")
    with device.prepare(two_adds()) as whole, device.allocate(inputs=[(whole, 0)]) as buffer:
        with pytest.raises(nnfmq.InvalidArgument, match="has no buffers of one device"):
            device.allocate(inputs=[(model, 0)])
        with pytest.raises(nnfmq.InvalidArgument, match="memory of one driver"):
            model.execute(buffer, B)
        places = [RequestArgument(location=DataLocation(0)), RequestArgument(location=DataLocation(1, 0, 16))]
        with nnfmq.Memory.create(32) as memory:
            output = RequestArgument(location=DataLocation(1, 16, 16))
            request = Request(tuple(places), (output,), (BufferToken(buffer.token), memory))
            with pytest.raises(nnfmq.InvalidArgument, match="memory of a driver"):
                model.execute_request(request)


@pytest.mark.parametrize("mode", MODES)
def test_arrays_that_do_not_fit_are_rejected_before_anything_is_executed(runtime: Runtime, mode: str) -> None:
    model = runtime.prepare(PLAN, devices=(device_failing_with("GENERAL_FAILURE"), "reference"))
    for wrong in [(A,), (A, B, B), (A, B[0]), (A, B.astype(complex))]:
        with pytest.raises(nnfmq.InvalidArgument):
            MODES[mode](model, *wrong)


def test_bursts_and_executions_without_inputs_are_rejected(runtime: Runtime) -> None:
    model = runtime.prepare(PLAN)
    with model.burst() as burst, model.create_reusable_execution() as execution:
        for call in (burst.execute, execution.compute):
            with pytest.raises(nnfmq.InvalidArgument, match="without arguments uses the arrays"):
                call()
        burst.inputs[0][:], burst.inputs[1][:] = A, B
        assert burst.execute()[0].tolist() == EXPECTED
        burst.discard_inputs()
        with pytest.raises(nnfmq.InvalidArgument, match="without arguments"):
            burst.execute()
    with model.burst() as burst, pytest.raises(nnfmq.GeneralFailure, match="nothing was executed"):
        _ = burst.last


def test_states_are_carried_from_one_execution_to_the_next(runtime: Runtime) -> None:
    """x + 2 s becomes the state s; each object that executes has a state of its own, which begins as 1."""
    main = two_adds().main
    state = StateInfo(operand_info(main.operands[1], "s"), np.ones((2, 2), np.float32).tobytes())
    model = runtime.prepare(PLAN, states=[state])
    assert (model.inputs, model.outputs) == (model.inputs[:1], ())
    x, zero = np.ones((2, 2), np.float32), np.zeros((2, 2), np.float32)
    with model.burst() as burst, model.create_reusable_execution() as execution:
        for execute, owner in ((model.execute, model), (burst.execute, burst), (execution.compute, execution)):
            assert [execute(x), execute(x), execute(zero)] == [(), (), ()]
            assert owner.state[0].tolist() == [[14, 14], [14, 14]]  # 1 + 2 = 3; 1 + 6 = 7; 14
            owner.reset_state()
            assert owner.state[0].tolist() == [[1, 1], [1, 1]]
    for call in (model.execute_async, model.execute_fenced):
        with pytest.raises(nnfmq.InvalidArgument, match="1 state;"):
            call(x)


def test_a_model_on_several_devices_describes_itself(runtime: Runtime) -> None:
    model = runtime.prepare(PLAN)
    assert repr(model).startswith("<PartitionedModel on 'first, second': 'input 0' (float32 2x2)")
    assert "PartitionedModel on" in model._repr_html_()
    assert model.memory_preference("input", 1).alignment == 64
    with pytest.raises(nnfmq.InvalidArgument, match="there is no output 1"):
        model.memory_preference("output", 1)
    with model.burst() as burst, model.create_execution() as execution:
        assert repr(burst).startswith("<CompoundBurst on 'first, second': ")
        assert repr(execution).startswith("<Execution, computable once: ")
