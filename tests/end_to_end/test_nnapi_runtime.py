"""NNAPI's objects over nnfmq.Runtime: models of ModelBuilder, devices of the runtime, models on several devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from support.drivers import LIMIT_S, Daemon, Process, running_daemon, short_folder, until
from support.models import add_model
from support.nnapi_objects import MODES, ONE, SUM, TEN, Floats, Mode, adding, burst_compute, floats, memory_for
from support.small_models import F32, one_operation

import nnfmq
from nnfmq.base.memory import Memory
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.client.partitioned.model import PartitionedModel
from nnfmq.hal.types import Operand, OperationType
from nnfmq.nnapi import BurstBuilder, CompilationBuilder, DeviceMemory, ExecutionBuilder, MemoryBuilder, copy_memory

MINIMAL, REFERENCE = "sample-minimal", "reference"


@pytest.fixture
def runtime(shared_daemon: Daemon) -> Iterator[nnfmq.Runtime]:
    with nnfmq.Runtime([shared_daemon.path]) as made:
        yield made


def built(stack: ExitStack) -> nnfmq.ModelBuilder:
    """Return a finished builder of RELU(ADD(a, b)); `sample-minimal` has only the ADD."""
    builder = stack.enter_context(nnfmq.ModelBuilder())
    first, second, between, result = (builder.add_operand("TENSOR_FLOAT32", (4,)) for _ in range(4))
    activation = builder.add_operand("INT32")
    builder.set_operand_value(activation, 0)
    builder.add_operation("ADD", [first, second, activation], [between])
    builder.add_operation("RELU", [between], [result])
    builder.identify_inputs_and_outputs([first, second], [result])
    builder.finish()
    return builder


def compiled(
    stack: ExitStack, runtime: nnfmq.Runtime, *names: str, model: nnfmq.ModelBuilder | None = None
) -> CompilationBuilder:
    """Return a finished compilation for these devices, or for those that the runtime chooses if there are none."""
    devices = [runtime.device(name) for name in names] or None
    compilation = stack.enter_context(CompilationBuilder(model or built(stack), devices, runtime=runtime))
    compilation.finish()
    return compilation


@pytest.fixture
def split(resources: ExitStack, runtime: nnfmq.Runtime) -> CompilationBuilder:
    """Return a compilation whose ADD is on one device, and whose RELU is on another."""
    return compiled(resources, runtime, MINIMAL, REFERENCE)


def model_of(compilation: CompilationBuilder) -> PreparedModel | PartitionedModel:
    return compilation.require_compiled("a test").model


def test_API_3_API_5_a_built_model_is_compiled_on_devices_that_the_runtime_chooses(
    resources: ExitStack, runtime: nnfmq.Runtime
) -> None:
    compilation = compiled(resources, runtime)
    execution, found = adding(resources, compilation)
    execution.compute()
    assert found.tolist() == SUM


def test_N_API_12_an_unfinished_model_is_not_compiled(resources: ExitStack, runtime: nnfmq.Runtime) -> None:
    unfinished = resources.enter_context(nnfmq.ModelBuilder())
    with pytest.raises(nnfmq.BadState, match="not finished"):
        CompilationBuilder(unfinished, runtime=runtime)
    with pytest.raises(nnfmq.InvalidArgument, match="is not a model"):
        CompilationBuilder("model", runtime=runtime)  # type: ignore[arg-type]


def test_API_16_a_model_is_closed_before_its_compilation_is_finished(
    resources: ExitStack, runtime: nnfmq.Runtime
) -> None:
    builder = built(resources)
    compilation = resources.enter_context(CompilationBuilder(builder, runtime=runtime))
    builder.close()
    compilation.finish()
    execution, found = adding(resources, compilation)
    execution.compute()
    assert found.tolist() == SUM


def test_N_API_13_the_runtime_s_devices_are_listed_once(
    resources: ExitStack, shared_daemon: Daemon, runtime: nnfmq.Runtime
) -> None:
    device = runtime.device(REFERENCE)
    for devices, text in (([], "empty"), ([device, device], "twice"), ([device, None], "None")):
        with pytest.raises(nnfmq.InvalidArgument, match=text):
            CompilationBuilder(add_model(), devices, runtime=runtime)  # type: ignore[arg-type]
    client = resources.enter_context(shared_daemon.connect())
    with pytest.raises(nnfmq.InvalidArgument, match="device of a Client"):
        CompilationBuilder(add_model(), [client.device(REFERENCE)], runtime=runtime)
    with pytest.raises(nnfmq.InvalidArgument, match="`runtime` is None"):
        CompilationBuilder(add_model(), [device, runtime.device(MINIMAL)])
    with pytest.raises(nnfmq.InvalidArgument, match="`runtime` is None"):
        CompilationBuilder(add_model())


@pytest.mark.parametrize("with_runtime", [False, True])
def test_API_5_one_device_of_the_runtime_has_times_and_limits(
    resources: ExitStack, runtime: nnfmq.Runtime, with_runtime: bool
) -> None:
    device = runtime.device(REFERENCE)
    made = CompilationBuilder(add_model(), [device], runtime=runtime if with_runtime else None)
    compilation = resources.enter_context(made)
    compilation.set_timeout(LIMIT_S)
    compilation.finish()
    execution, found = adding(resources, compilation)
    execution.set_measure_timing(True)
    execution.set_timeout(LIMIT_S)
    execution.compute()
    assert found.tolist() == SUM
    assert execution.get_duration(1) >= execution.get_duration(0) >= 0  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [(), (MINIMAL, REFERENCE)], ids=["chosen by the runtime", "two devices"])
def test_EXT_6_N_API_15_N_API_25_QOS_5_TIM_1_attributes_times_and_limits_need_exactly_one_device(
    resources: ExitStack, runtime: nnfmq.Runtime, names: tuple[str, ...]
) -> None:
    devices = [runtime.device(name) for name in names] or None
    compilation = resources.enter_context(CompilationBuilder(built(resources), devices, runtime=runtime))
    for call in (lambda: compilation.set_timeout(1), lambda: compilation.add_extension_attribute("a.b", 1, b"")):
        with pytest.raises(nnfmq.InvalidArgument, match="exactly one device"):
            call()
    compilation.finish()
    execution, found = adding(resources, compilation)
    for call in (
        lambda: execution.set_timeout(1),
        lambda: execution.set_measure_timing(True),
        lambda: execution.add_extension_attribute("a.b", 1, b""),
    ):
        with pytest.raises(nnfmq.InvalidArgument, match="exactly one device"):
            call()
    with pytest.raises(nnfmq.InvalidArgument, match="exactly one device"):
        execution.start_compute_with_dependencies([], 1.0)
    execution.compute()
    assert found.tolist() == SUM


# ---------------------------------------------------------------------------------------------------- several devices


@pytest.mark.parametrize("reusable", [False, True], ids=["once", "reusable"])
@pytest.mark.parametrize("mode", MODES)
def test_API_7_a_model_on_two_devices_is_computed_in_each_mode(
    resources: ExitStack, split: CompilationBuilder, mode: Mode, reusable: bool
) -> None:
    assert isinstance(model_of(split), PartitionedModel)
    execution, found = adding(resources, split)
    execution.set_reusable(reusable)
    for _ in range(1 + reusable):
        found[:] = 0
        mode(execution, split)
        assert found.tolist() == SUM
    assert execution.get_output_operand_dimensions(0) == (4,)


@pytest.mark.parametrize("mode", MODES)
def test_API_6_a_model_on_two_devices_computes_in_the_application_s_memory(
    resources: ExitStack, split: CompilationBuilder, mode: Mode
) -> None:
    memory = resources.enter_context(Memory.create(4096))
    memory.view[:32] = floats([*ONE, *TEN]).tobytes()
    execution = resources.enter_context(ExecutionBuilder(split))
    execution.enable_input_and_output_padding(True)
    execution.set_input_from_memory(0, memory, 0, 16)
    execution.set_input_from_memory(1, memory, 16, 64)
    execution.set_output_from_memory(0, memory, 1024, 64)
    mode(execution, split)
    assert np.frombuffer(memory.view, np.float32, 4, 1024).tolist() == SUM


def test_N_API_17_a_model_on_two_devices_has_memory_preferences(split: CompilationBuilder) -> None:
    assert split.get_preferred_memory_alignment_for_input(0) == 64
    assert split.get_preferred_memory_padding_for_output(0) >= 1


def test_API_11_the_burst_of_a_model_on_two_devices_is_closed_like_any_other(
    resources: ExitStack, split: CompilationBuilder
) -> None:
    burst = BurstBuilder(split)
    for _ in range(2):
        execution, found = adding(resources, split)
        execution.burst_compute(burst)
        assert found.tolist() == SUM
    for _ in range(2):
        burst.close()
    with pytest.raises(nnfmq.InvalidArgument, match="burst is closed"):
        adding(resources, split)[0].burst_compute(burst)


# ---------------------------------------------------------------------------------------------------- device memory


@pytest.fixture
def automatic(resources: ExitStack, runtime: nnfmq.Runtime, monkeypatch: pytest.MonkeyPatch) -> CompilationBuilder:
    """Return a compilation whose ADD and RELU the runtime has put on different devices by itself."""
    monkeypatch.setenv("NNFMQ_ENABLED_DEVICES", "sample-minimal|sample-float_fast")
    compilation = compiled(resources, runtime)
    assert isinstance(model_of(compilation), PartitionedModel)
    return compilation


def described(stack: ExitStack, compilation: CompilationBuilder) -> DeviceMemory:
    """Return a memory for an output and an input of a compilation."""
    memory = memory_for(stack, [(compilation, 0)], [(compilation, 0)])
    assert memory.is_shared
    return memory


def execution_in(
    stack: ExitStack, compilation: CompilationBuilder, source: DeviceMemory | None, target: DeviceMemory | None
) -> tuple[ExecutionBuilder, Floats]:
    """Return an execution that adds TEN to `source` (None = ONE), and stores the sum in `target` or in the array."""
    execution, found = stack.enter_context(ExecutionBuilder(compilation)), floats([0] * 4)
    if source is None:
        execution.set_input(0, floats(ONE))
    else:
        execution.set_input_from_memory(0, source)
    execution.set_input(1, floats(TEN))
    if target is None:
        execution.set_output(0, found)
    else:
        execution.set_output_from_memory(0, target)
    return execution, found


@pytest.mark.parametrize("mode", MODES)
def test_DOM_15_a_model_on_several_devices_has_its_memory_in_shared_memory(
    resources: ExitStack, automatic: CompilationBuilder, mode: Mode
) -> None:
    shared = described(resources, automatic)
    assert shared.dimensions is None
    mode(execution_in(resources, automatic, None, shared)[0], automatic)
    assert shared.dimensions == (4,)
    execution, found = execution_in(resources, automatic, shared, None)
    mode(execution, automatic)
    assert found.tolist() == [21, 42, 63, 84]


@pytest.mark.parametrize("mode", MODES)
def test_N_API_24_an_uninitialized_shared_memory_fails_the_computation(
    resources: ExitStack, automatic: CompilationBuilder, mode: Mode
) -> None:
    shared = described(resources, automatic)
    execution, _ = execution_in(resources, automatic, shared, None)
    with pytest.raises(nnfmq.GeneralFailure, match="uninitialized"):
        mode(execution, automatic)
    with pytest.raises(nnfmq.BadState, match="has failed"):
        execution.get_output_operand_rank(0)


def test_DOM_7_a_shared_memory_is_uninitialized_after_a_failed_computation(
    resources: ExitStack, shared_daemon: Daemon, automatic: CompilationBuilder
) -> None:
    shared = described(resources, automatic)
    execution_in(resources, automatic, None, shared)[0].compute()
    uninitialized = described(resources, automatic)
    execution, _ = execution_in(resources, automatic, uninitialized, shared)
    with pytest.raises(nnfmq.GeneralFailure, match="uninitialized"):
        execution.compute()
    assert shared.dimensions == (4,)  # nothing was computed
    with nnfmq.Runtime([shared_daemon.path]) as other:
        dead = compiled(resources, other, REFERENCE)
        memory = memory_for(resources, outputs=[(dead, 0)])
        execution_in(resources, dead, None, memory)[0].compute()
        assert memory.dimensions == (4,)
        execution, _ = execution_in(resources, dead, None, memory)
    with pytest.raises(nnfmq.NnfmqError):
        execution.compute()
    assert memory.dimensions is None


def test_N_API_36_copies_of_shared_memory(resources: ExitStack, automatic: CompilationBuilder) -> None:
    shared, other = described(resources, automatic), described(resources, automatic)
    with pytest.raises(nnfmq.InvalidArgument, match="uninitialized"):
        copy_memory(shared, other)
    source = resources.enter_context(Memory.create(16))
    source.view[:] = floats(ONE).tobytes()
    copy_memory(source, shared)
    copy_memory(shared, other)
    execution, found = execution_in(resources, automatic, other, None)
    execution.compute()
    assert found.tolist() == SUM


def test_DOM_15_shared_memory_needs_a_known_shape(
    resources: ExitStack, runtime: nnfmq.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNFMQ_ENABLED_DEVICES", "sample-float_fast|sample-quant")
    unsized = one_operation(OperationType.RELU, [Operand(F32, (0, 2))], Operand(F32, (0, 2)))
    compilation = resources.enter_context(CompilationBuilder(unsized, runtime=runtime))
    compilation.finish()
    monkeypatch.setenv("NNFMQ_ENABLED_DEVICES", "reference")
    other = resources.enter_context(CompilationBuilder(unsized, runtime=runtime))
    other.finish()
    for dimensions in ((), (3, 2)):
        builder = MemoryBuilder()
        builder.add_input_role(compilation, 0)
        builder.add_input_role(other, 0)
        builder.set_dimensions(dimensions)
        builder.finish()
        if dimensions:
            memory = resources.enter_context(builder.create_memory())
            source = resources.enter_context(Memory.create(24))
            copy_memory(source, memory)
            with ExecutionBuilder(compilation) as execution:
                execution.set_input_from_memory(0, memory)
                execution.set_output(0, floats([1] * 6))
                execution.compute()
                assert execution.get_output_operand_dimensions(0) == (3, 2)
        else:
            with pytest.raises(nnfmq.GeneralFailure, match="no single device"):
                builder.create_memory()


def test_N_API_33_a_model_on_two_chosen_devices_has_no_device_memory(split: CompilationBuilder) -> None:
    builder = MemoryBuilder()
    with pytest.raises(nnfmq.InvalidArgument, match="none has all roles"):
        builder.add_input_role(split, 0)


# ---------------------------------------------------------------------------------------------------- fallback


@pytest.mark.parametrize("reusable", [False, True], ids=["once", "reusable"])
@pytest.mark.parametrize("mode", MODES)
def test_PART_6_the_cpu_computes_what_a_dead_driver_cannot(
    resources: ExitStack, monkeypatch: pytest.MonkeyPatch, mode: Mode, reusable: bool
) -> None:
    monkeypatch.setenv("NNFMQ_ENABLED_DEVICES", "sample-float_fast")
    folder = resources.enter_context(short_folder())
    daemon = resources.enter_context(running_daemon(folder / "d.sock"))
    runtime = resources.enter_context(nnfmq.Runtime([daemon.path]))
    compilation = compiled(resources, runtime)
    model = model_of(compilation)
    assert isinstance(model, PreparedModel) and model.device == "sample-float_fast"
    execution, found = adding(resources, compilation)
    execution.set_reusable(reusable)
    if reusable:
        mode(execution, compilation)
        found[:] = 0
    burst = resources.enter_context(BurstBuilder(compilation))
    for pid in daemon.process.children():
        with Process(pid) as worker:
            worker.kill()
    until(lambda: not model.connection.is_open, "the driver's death is noticed")
    if mode is burst_compute and reusable:
        execution.burst_compute(burst)  # configured before; otherwise `mode` makes a new one
    else:
        mode(execution, compilation)
    assert found.tolist() == SUM
