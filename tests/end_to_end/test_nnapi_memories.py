"""NNAPI's memories through a driver process: descriptions, device memory, memory of files, copies."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from support.drivers import Process, running_daemon
from support.models import add_model, invalid_model, relu_model
from support.nnapi_objects import MODES, ONE, SUM, TEN, UNFENCED, Mode, adding, finished, floats, memory_for
from support.small_models import F32, I32, Q8, one_operation

import nnfmq
from nnfmq.base.file_memory import FileMemory
from nnfmq.base.memory import Memory
from nnfmq.client.connection.device import Device
from nnfmq.hal.types import Model, Operand, OperandType, OperationType, Protection
from nnfmq.nnapi import (
    CompilationBuilder,
    DeviceMemory,
    Event,
    ExecutionBuilder,
    MemoryBuilder,
    copy_memory,
    create_memory_from_fd,
)

BYTES = 16
AddRole = Callable[..., None]
ROLES: list[AddRole] = [MemoryBuilder.add_input_role, MemoryBuilder.add_output_role]


@pytest.fixture
def unsized(resources: ExitStack, device: Device) -> CompilationBuilder:
    """Return a compilation of RELU for any number of rows."""
    model = one_operation(OperationType.RELU, [Operand(F32, (0, 2))], Operand(F32, (0, 2)))
    return finished(resources, model, device)


def shared_memory(stack: ExitStack, values: list[int]) -> Memory:
    """Return shared memory of exactly these floats."""
    memory = stack.enter_context(Memory.create(4 * len(values)))
    memory.view[:] = floats(values).tobytes()
    return memory


def values_of(stack: ExitStack, memory: DeviceMemory, count: int = 4) -> list[float]:
    target = shared_memory(stack, [0] * count)
    copy_memory(memory, target)
    found: list[float] = np.frombuffer(target.view, np.float32).tolist()
    return found


def execution_of(stack: ExitStack, compilation: CompilationBuilder) -> ExecutionBuilder:
    return stack.enter_context(ExecutionBuilder(compilation))


# ---------------------------------------------------------------------------------------------------- device memory


@pytest.mark.parametrize("mode", MODES)
def test_API_10_a_tensor_stays_in_the_device_between_computations(
    resources: ExitStack, compilation: CompilationBuilder, mode: Mode
) -> None:
    between = memory_for(resources, [(compilation, 0)], [(compilation, 0)])
    assert not between.is_shared
    first, second = execution_of(resources, compilation), execution_of(resources, compilation)
    first.set_input(0, floats(ONE))
    first.set_input(1, floats(TEN))
    first.set_output_from_memory(0, between)
    mode(first, compilation)
    second.set_input_from_memory(0, between)
    second.set_input(1, floats(TEN))
    second.set_output(0, found := floats([0] * 4))
    mode(second, compilation)
    assert found.tolist() == [21, 42, 63, 84]


def test_API_10_a_device_memory_is_closed_while_a_computation_uses_it(
    resources: ExitStack, compilation: CompilationBuilder
) -> None:
    memory = memory_for(resources, [(compilation, 0)])
    copy_memory(shared_memory(resources, ONE), memory)
    execution = execution_of(resources, compilation)
    execution.set_input_from_memory(0, memory)
    execution.set_input(1, floats(TEN))
    execution.set_output(0, found := floats([0] * 4))
    with nnfmq.Fence.create() as own:
        start = resources.enter_context(Event.create_from_sync_fence_fd(own.fileno()))
        event = resources.enter_context(execution.start_compute_with_dependencies([start]))
        memory.close()
        own.signal()
        event.wait()
    assert found.tolist() == SUM


@pytest.mark.parametrize("mode", UNFENCED)
def test_DOM_11_a_device_memory_takes_the_dimensions_that_an_execution_gives_it(
    resources: ExitStack, unsized: CompilationBuilder, mode: Mode
) -> None:
    memory = memory_for(resources, outputs=[(unsized, 0)])
    assert memory.info.shape == (0, 2)
    for rows in (1, 3):
        execution = execution_of(resources, unsized)
        execution.set_input(0, floats(range(2 * rows)), (rows, 2))
        execution.set_output_from_memory(0, memory)
        mode(execution, unsized)
        assert memory.dimensions == (rows, 2)
        assert values_of(resources, memory, 2 * rows) == list(range(2 * rows))


def test_N_API_23_a_device_memory_is_used_whole_and_in_its_roles(
    resources: ExitStack, device: Device, compilation: CompilationBuilder
) -> None:
    memory = memory_for(resources, [(compilation, 0)])
    execution = execution_of(resources, compilation)
    for span in ((1, 0), (0, BYTES), (0, 1)):
        with pytest.raises(nnfmq.InvalidArgument, match="a whole device memory"):
            execution.set_input_from_memory(0, memory, *span)
    with pytest.raises(nnfmq.InvalidArgument, match="not described for input 1"):
        execution.set_input_from_memory(1, memory)
    with pytest.raises(nnfmq.InvalidArgument, match="not described for output 0"):
        execution.set_output_from_memory(0, memory)
    with pytest.raises(nnfmq.InvalidArgument, match="not described for input 0"):
        execution_of(resources, finished(resources, add_model(), device)).set_input_from_memory(0, memory)
    execution.set_input_from_memory(0, memory)


def test_N_API_23_the_dimensions_agree_with_the_memory(resources: ExitStack, unsized: CompilationBuilder) -> None:
    memory = memory_for(resources, [(unsized, 0)], dimensions=(3, 2))
    execution = execution_of(resources, unsized)
    with pytest.raises(nnfmq.InvalidArgument, match="dimensions 2x2; the device memory has 3x2"):
        execution.set_input_from_memory(0, memory, dimensions=(2, 2))
    with pytest.raises(nnfmq.InvalidArgument, match="the model has"):
        execution.set_input_from_memory(0, memory, dimensions=(3, 3))
    execution.set_input_from_memory(0, memory, dimensions=(3, 2))


@pytest.mark.parametrize("mode", MODES)
def test_N_API_24_an_uninitialized_input_fails_the_computation(
    resources: ExitStack, compilation: CompilationBuilder, mode: Mode
) -> None:
    memory = memory_for(resources, [(compilation, 0)])
    for is_written in (False, True):
        execution = execution_of(resources, compilation)
        execution.set_input_from_memory(0, memory)
        execution.set_input(1, floats(TEN))
        execution.set_output(0, found := floats([0] * 4))
        if is_written:
            copy_memory(shared_memory(resources, ONE), memory)
            mode(execution, compilation)
            assert found.tolist() == SUM
            return
        with pytest.raises(nnfmq.GeneralFailure):
            mode(execution, compilation)


# ---------------------------------------------------------------------------------------------------- descriptions


@pytest.mark.parametrize("add", ROLES)
def test_N_API_33_invalid_roles_are_rejected_and_change_nothing(
    resources: ExitStack, device: Device, compilation: CompilationBuilder, add: AddRole
) -> None:
    builder = MemoryBuilder()
    for index in (999, -1):
        with pytest.raises(nnfmq.InvalidArgument, match="there is no"):
            add(builder, compilation, index)
    for frequency in (10.0, 0.0, -1.0, float("nan")):
        with pytest.raises(nnfmq.InvalidArgument, match="more than 0 and at most 1"):
            add(builder, compilation, 0, frequency)
    with pytest.raises(nnfmq.InvalidArgument, match="None"):
        add(builder, None, 0)
    failed = resources.enter_context(CompilationBuilder(invalid_model(), [device]))
    for _ in range(2):
        with pytest.raises(nnfmq.InvalidArgument, match="has succeeded") as raised:
            add(builder, failed, 0)
        assert not isinstance(raised.value, nnfmq.BadState)
        if not failed._is_finished:
            with pytest.raises(nnfmq.InvalidArgument):
                failed.finish()
    add(builder, compilation, 0, 0.5)
    with pytest.raises(nnfmq.InvalidArgument, match="added before"):
        add(builder, compilation, 0)
    builder.finish()
    resources.enter_context(builder.create_memory())


OTHERS: dict[str, Model] = {
    "type": one_operation(OperationType.ABS, [Operand(I32, (4,))], Operand(I32, (4,))),
    "extent": add_model((5,)),
    "rank": add_model((2, 2)),
    "scale": one_operation(OperationType.RELU, [Operand(Q8, (4,), 0.5, 1)], Operand(Q8, (4,), 0.5, 1)),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_N_API_33_all_roles_have_one_type_and_dimensions_that_agree(
    resources: ExitStack, device: Device, compilation: CompilationBuilder, other: Model
) -> None:
    builder = MemoryBuilder()
    builder.add_input_role(compilation, 0)
    different = finished(resources, other, device)
    for add in ROLES:
        with pytest.raises(nnfmq.InvalidArgument, match=r"the roles have different types|roles disagree"):
            add(builder, different, 0)


@pytest.mark.parametrize(("scale", "zero_point"), [(0.25, 1), (0.5, 2)])
def test_N_API_33_scale_and_zero_point_are_equal(
    resources: ExitStack, device: Device, scale: float, zero_point: int
) -> None:
    builder = MemoryBuilder()
    builder.add_input_role(finished(resources, OTHERS["scale"], device), 0)
    tensor = Operand(Q8, (4,), scale, zero_point)
    different = finished(resources, one_operation(OperationType.RELU, [tensor], tensor), device)
    with pytest.raises(nnfmq.InvalidArgument, match="different types"):
        builder.add_input_role(different, 0)


def test_N_API_33_compilations_for_chosen_devices_have_one_in_common(
    resources: ExitStack, client: nnfmq.Client, compilation: CompilationBuilder
) -> None:
    builder = MemoryBuilder()
    builder.add_input_role(compilation, 0)
    with pytest.raises(nnfmq.InvalidArgument, match="none has all roles"):
        builder.add_output_role(finished(resources, relu_model(), client.device("compiled")), 0)
    builder.add_output_role(compilation, 0)


def test_N_API_34_dimensions_agree_with_the_roles(
    resources: ExitStack, device: Device, compilation: CompilationBuilder
) -> None:
    builder = MemoryBuilder()
    builder.add_input_role(compilation, 0)
    for dimensions in ((5,), (4, 1), (-1,), (1 << 32,), None):
        with pytest.raises(nnfmq.InvalidArgument):
            builder.set_dimensions(dimensions)  # type: ignore[arg-type]
    builder.set_dimensions((4,))
    builder.set_dimensions(())
    early = MemoryBuilder()
    early.set_dimensions((0, 2))
    with pytest.raises(nnfmq.InvalidArgument, match="contradict"):
        early.set_dimensions((1, 3))
    with pytest.raises(nnfmq.InvalidArgument, match="roles disagree"):
        early.add_input_role(compilation, 0)


def test_N_API_34_a_scalar_has_no_dimensions(resources: ExitStack, device: Device) -> None:
    tensor = Operand(F32, (4,))
    model = one_operation(OperationType.ADD, [tensor, tensor, Operand(OperandType.INT32)], tensor)
    compilation = finished(resources, model, device)
    for is_before in (False, True):
        builder = MemoryBuilder()
        calls: list[Callable[[], None]] = [
            lambda made=builder: made.add_input_role(compilation, 2),  # type: ignore[misc]
            lambda made=builder: made.set_dimensions((1,)),  # type: ignore[misc]
        ]
        first, second = reversed(calls) if is_before else calls
        first()
        with pytest.raises(nnfmq.InvalidArgument, match="disagree"):
            second()


def test_N_API_35_a_description_is_finished_once_and_has_roles(compilation: CompilationBuilder) -> None:
    builder = MemoryBuilder()
    with pytest.raises(nnfmq.BadState, match="not finished"):
        builder.create_memory()
    with pytest.raises(nnfmq.InvalidArgument, match="needs a role") as raised:
        builder.finish()
    assert not isinstance(raised.value, nnfmq.BadState)
    builder.add_input_role(compilation, 0)
    with pytest.raises(nnfmq.BadState, match="not finished"):
        builder.create_memory()
    builder.finish()
    for call in (
        builder.finish,
        lambda: builder.set_dimensions((4,)),
        lambda: builder.add_input_role(compilation, 1),
        lambda: builder.add_output_role(compilation, 0),
    ):
        with pytest.raises(nnfmq.BadState, match="is finished"):
            call()


def test_API_10_a_description_makes_any_number_of_memories(
    resources: ExitStack, compilation: CompilationBuilder
) -> None:
    builder = MemoryBuilder()
    builder.add_input_role(compilation, 0)
    builder.finish()
    memories = [resources.enter_context(builder.create_memory()) for _ in range(2)]
    copy_memory(shared_memory(resources, ONE), memories[0])
    copy_memory(shared_memory(resources, TEN), memories[1])
    assert [values_of(resources, memory) for memory in memories] == [ONE, TEN]


# ---------------------------------------------------------------------------------------------------- copies


def test_API_10_copies_between_all_kinds_of_memory(resources: ExitStack, compilation: CompilationBuilder) -> None:
    device_memory, other = (memory_for(resources, [(compilation, 0)]) for _ in range(2))
    source, target = shared_memory(resources, ONE), shared_memory(resources, [0] * 4)
    copy_memory(source, device_memory)
    copy_memory(device_memory, other)
    copy_memory(other, target)
    assert np.frombuffer(target.view, np.float32).tolist() == ONE
    copy_memory(shared_memory(resources, TEN), target)
    assert np.frombuffer(target.view, np.float32).tolist() == TEN


def test_N_API_36_copies_need_equal_sizes_and_content(
    resources: ExitStack, device: Device, compilation: CompilationBuilder, unsized: CompilationBuilder
) -> None:
    memory, fixed = memory_for(resources, [(compilation, 0)]), shared_memory(resources, ONE)
    with pytest.raises(nnfmq.InvalidArgument, match="uninitialized"):
        copy_memory(memory, fixed)
    for short in (shared_memory(resources, ONE[:3]), shared_memory(resources, [*ONE, 5])):
        for source, target in ((short, memory), (short, fixed)):
            with pytest.raises(nnfmq.InvalidArgument):
                copy_memory(source, target)
    copy_memory(fixed, memory)
    with pytest.raises(nnfmq.InvalidArgument):
        copy_memory(memory, shared_memory(resources, ONE[:3]))
    for source, target in ((None, memory), (memory, None)):
        with pytest.raises(nnfmq.InvalidArgument, match="None"):
            copy_memory(source, target)  # type: ignore[arg-type]
    square = memory_for(resources, [(finished(resources, relu_model((2, 2)), device), 0)])
    with pytest.raises(nnfmq.InvalidArgument):
        copy_memory(memory, square)
    of_any_shape = memory_for(resources, [(unsized, 0)])
    with pytest.raises(nnfmq.InvalidArgument):
        copy_memory(fixed, of_any_shape)  # nothing says how many rows it has


# ---------------------------------------------------------------------------------------------------- files


def test_API_10_a_sealed_memfd_is_mapped_and_a_file_is_not(
    resources: ExitStack, compilation: CompilationBuilder, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4) + floats(ONE).tobytes())
    fd = os.open(path, os.O_RDWR)
    in_file = resources.enter_context(create_memory_from_fd(BYTES, Protection.READ, fd, 4))
    os.close(fd)
    assert isinstance(in_file, FileMemory)
    with Memory.create(2 * BYTES) as origin:
        mapped = resources.enter_context(create_memory_from_fd(BYTES, Protection.READ_WRITE, origin.fileno(), BYTES))
        assert isinstance(mapped, Memory)
        execution = execution_of(resources, compilation)
        execution.set_input_from_memory(0, in_file, 0, BYTES)
        execution.set_input(1, floats(TEN))
        execution.set_output_from_memory(0, mapped, 0, BYTES)
        execution.compute()
        assert np.frombuffer(origin.view, np.float32, 4, BYTES).tolist() == SUM


def test_API_10_the_protection_of_a_memory_is_kept(resources: ExitStack, compilation: CompilationBuilder) -> None:
    with Memory.create(BYTES) as origin:
        read_only = resources.enter_context(create_memory_from_fd(BYTES, Protection.READ, origin.fileno()))
        execution = execution_of(resources, compilation)
        execution.set_input(0, floats(ONE))
        execution.set_input(1, floats(TEN))
        execution.set_output_from_memory(0, read_only, 0, BYTES)
        with pytest.raises(nnfmq.InvalidArgument):
            execution.compute()
        assert bytes(origin.view) == bytes(BYTES)


@pytest.mark.parametrize("given", [(0, 0), (BYTES, 1), (BYTES + 1, 0), (BYTES, -1)])
@pytest.mark.parametrize("sealed", [True, False])
def test_N_API_22_a_file_is_as_long_as_its_memory(tmp_path: Path, given: tuple[int, int], sealed: bool) -> None:
    size_bytes, offset = given
    with Memory.create(BYTES) as origin, (tmp_path / "file").open("w+b") as file:
        file.write(bytes(BYTES))
        file.flush()
        fd = origin.fileno() if sealed else file.fileno()
        with pytest.raises(nnfmq.InvalidArgument):
            create_memory_from_fd(size_bytes, Protection.READ, fd, offset)


@pytest.mark.parametrize(("fd", "protection"), [(-1, 1), (1 << 40, 1), (None, 1), (0, "read")])
def test_N_API_22_what_is_no_file_makes_no_memory(fd: int, protection: Protection) -> None:
    with pytest.raises(nnfmq.InvalidArgument):
        create_memory_from_fd(BYTES, protection, fd)


def test_LIFE_4_a_device_memory_can_be_closed_after_its_driver_has_died(folder: Path) -> None:
    with running_daemon(folder / "d.sock") as daemon, daemon.connect() as client, ExitStack() as stack:
        compilation = finished(stack, add_model(), client.device("reference"))
        memory = memory_for(stack, [(compilation, 0)])
        with Process(client.worker_pid) as worker:
            worker.kill()
            worker.wait_for_end()
        with pytest.raises(nnfmq.DeadObject):
            copy_memory(shared_memory(stack, ONE), memory)
        execution, _ = adding(stack, compilation)
        with pytest.raises(nnfmq.DeadObject):
            execution.compute()
