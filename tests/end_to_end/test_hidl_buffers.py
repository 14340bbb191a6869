"""HIDL 1.3's buffers through a driver process: `allocate`, `IBuffer` and its token, as a test of a driver calls them.

The models are an ADD or a RELU of four floats, or of any number where a buffer's shape may change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.drivers import LIMIT_S, Daemon, Process
from support.models import add_model, relu_model

import nnfmq
from nnfmq.base.file_memory import FileMemory
from nnfmq.base.memory import Memory
from nnfmq.hal.capabilities import BufferDesc, BufferRole
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.types import (
    BufferToken,
    DataLocation,
    DeviceStatus,
    ExecutionPreference,
    LifeTime,
    MeasureTiming,
    Model,
    OperandType,
    OutputShape,
    Priority,
    Request,
    RequestArgument,
)
from nnfmq.lab import hidl

NONE, INVALID, FAILED = ErrorStatus.NONE, ErrorStatus.INVALID_ARGUMENT, ErrorStatus.GENERAL_FAILURE
ADD, RELU, OPEN = add_model(), relu_model(), relu_model((0,))
FIRST = BufferRole(0, 0)
NOTHING = (INVALID, None, 0)
OF_ONE = 4  # bytes
NO = MeasureTiming.NO


class Driver:
    """A device of a driver process in HIDL's forms. What is made here lives until the end of the test."""

    def __init__(self, client: nnfmq.Client, stack: ExitStack) -> None:
        self.client = client
        self.device = hidl.IDevice(client, "reference")
        self._stack = stack

    def prepare(self, model: Model, device: hidl.IDevice | None = None) -> hidl.IPreparedModel:
        calls: Queue[tuple[ErrorStatus, Any]] = Queue()
        before = ExecutionPreference.FAST_SINGLE_ANSWER, Priority.MEDIUM, None, [], [], bytes(32)
        status = (device or self.device).prepareModel_1_3(model, *before, lambda *given: calls.put(given))
        assert status is NONE
        status, prepared = calls.get(timeout=LIMIT_S)
        assert status is NONE
        return prepared  # type: ignore[no-any-return]

    def allocate(
        self,
        models: Sequence[hidl.IPreparedModel | None],
        inputs: Sequence[BufferRole] = (),
        outputs: Sequence[BufferRole] = (),
        *dimensions: int,
    ) -> tuple[ErrorStatus, Any, int]:
        """Allocate a buffer that is freed at the end of the test."""
        status, buffer, token = self.device.allocate(BufferDesc(dimensions), models, inputs, outputs)
        if buffer is not None:
            self._stack.callback(buffer.close)
        return status, buffer, token

    def buffer(self, model: hidl.IPreparedModel, *dimensions: int) -> tuple[Any, int]:
        """Return a buffer, and its token, that is input 0 and output 0 of a model."""
        status, buffer, token = self.allocate([model], [FIRST], [FIRST], *dimensions)
        assert status is NONE and isinstance(buffer, hidl.IBuffer)
        return buffer, token

    def memory(self, *values: float) -> Memory:
        memory: Memory = self._stack.enter_context(Memory.create(OF_ONE * len(values)))
        np.frombuffer(memory.view, np.float32)[:] = values
        return memory


def floats(memory: Memory) -> list[float]:
    found: list[float] = np.frombuffer(memory.view, np.float32).tolist()
    return found


def in_memory(index: int, memory: Memory, *dimensions: int) -> RequestArgument:
    return RequestArgument(location=DataLocation(index, 0, memory.size_bytes), dimensions=dimensions)


def in_buffer(index: int, *dimensions: int) -> RequestArgument:
    return RequestArgument(location=DataLocation(index), dimensions=dimensions)


@pytest.fixture
def driver(daemon: Daemon, resources: ExitStack) -> Driver:
    client = resources.enter_context(nnfmq.connect(daemon.path, timeout=LIMIT_S, interface="HIDL 1.3"))
    return Driver(client, resources)


# ------------------------------------------------------------------------------------------------ allocating


@pytest.mark.parametrize("interface", ["HIDL 1.0", "HIDL 1.1", "HIDL 1.2"])
def test_DEV_13_interfaces_before_1_3_have_no_buffers(interface: str, daemon: Daemon) -> None:
    with nnfmq.connect(daemon.path, timeout=LIMIT_S, interface=interface) as client:
        device = hidl.IDevice(client, "reference")
        with pytest.raises(AttributeError, match=f"IDevice of {interface} has no allocate"):
            device.allocate(BufferDesc(), [], [], [])


def test_DOM_1_a_buffer_has_a_unique_positive_token(driver: Driver) -> None:
    model = driver.prepare(ADD)
    tokens = [driver.buffer(model)[1] for _ in range(3)]
    assert len(set(tokens)) == 3 and min(tokens) > 0


def test_N_DOM_1_a_buffer_without_a_role_is_rejected(driver: Driver) -> None:
    assert driver.allocate([]) == NOTHING
    assert driver.allocate([driver.prepare(ADD)]) == NOTHING


@pytest.mark.parametrize("kind", [0, 1], ids=["input", "output"])
def test_N_DOM_2_N_DOM_3_a_role_of_a_model_of_another_device_is_rejected(
    kind: int, driver: Driver, daemon: Daemon, resources: ExitStack
) -> None:
    roles: list[list[BufferRole]] = [[], []]
    roles[kind] = [FIRST]
    assert driver.allocate([None], *roles) == NOTHING
    other_device = hidl.IDevice(driver.client, "sample-float_fast")
    assert driver.allocate([driver.prepare(ADD, other_device)], *roles) == NOTHING
    client = resources.enter_context(nnfmq.connect(daemon.path, timeout=LIMIT_S, interface="HIDL 1.3"))
    foreign, own = Driver(client, resources).prepare(ADD), driver.prepare(ADD)
    foreign.model_id = own.model_id  # numbers are each connection's own
    assert driver.allocate([foreign], *roles) == NOTHING
    assert driver.allocate([own], *roles)[0] is NONE


WRONG_ROLES = {
    "N-DOM-4": [BufferRole(1, 0)],
    "N-DOM-5": [BufferRole(0, 2)],
    "N-DOM-6 10": [BufferRole(0, 0, 10.0)],
    "N-DOM-6 0": [BufferRole(0, 0, 0.0)],
    "N-DOM-6 -0.5": [BufferRole(0, 0, -0.5)],
    "N-DOM-7": [FIRST, FIRST],
    "no number of the interface's": [BufferRole(0, -1)],
}


@pytest.mark.parametrize("kind", [0, 1], ids=["input", "output"])
@pytest.mark.parametrize("wrong", WRONG_ROLES.values(), ids=WRONG_ROLES)
def test_a_wrong_role_is_rejected(wrong: list[BufferRole], kind: int, driver: Driver) -> None:
    roles: list[list[BufferRole]] = [[], []]
    roles[kind] = wrong
    assert driver.allocate([driver.prepare(ADD)], *roles) == NOTHING


def test_N_DOM_7_a_model_that_is_listed_twice_counts_once(driver: Driver) -> None:
    model = driver.prepare(ADD)
    assert driver.allocate([model, model], [FIRST, BufferRole(1, 0)]) == NOTHING


def quantized(scale: float = 0.5, zero_point: int = 0) -> Model:
    operands = tuple(
        replace(each, type=OperandType.TENSOR_QUANT8_ASYMM, scale=scale, zero_point=zero_point)
        for each in RELU.main.operands
    )
    return replace(RELU, main=replace(RELU.main, operands=operands))


CONFLICTS = {
    "N-DOM-8": (RELU, quantized()),
    "N-DOM-9": (quantized(), quantized(scale=1.0)),
    "N-DOM-10": (quantized(), quantized(zero_point=10)),
    "N-DOM-11": (RELU, relu_model((2, 2))),
    "N-DOM-12": (RELU, relu_model((5,))),
}


@pytest.mark.parametrize("places", [([0, 1], []), ([0], [1]), ([], [0, 1])], ids=["two inputs", "both", "two outputs"])
@pytest.mark.parametrize("models", CONFLICTS.values(), ids=CONFLICTS)
def test_roles_that_disagree_are_rejected(
    models: tuple[Model, Model], places: tuple[list[int], list[int]], driver: Driver
) -> None:
    prepared = [driver.prepare(model) for model in models]
    roles = ([BufferRole(model, 0) for model in kind] for kind in places)
    assert driver.allocate(prepared, *roles) == NOTHING


def test_N_DOM_13_N_DOM_14_N_DOM_15_dimensions_that_contradict_a_role_are_rejected(driver: Driver) -> None:
    relu = driver.prepare(RELU)
    for dimensions in ((2, 2), (5,), (-1,)):
        assert driver.allocate([relu], [FIRST], [], *dimensions) == NOTHING
        assert driver.allocate([relu], [], [FIRST], *dimensions) == NOTHING
    last = len(ADD.main.operands) - 1
    operands = (*ADD.main.operands[:last], replace(ADD.main.operands[last], lifetime=LifeTime.SUBGRAPH_INPUT))
    operands = (*operands[:last], replace(operands[last], location=DataLocation()))
    main = replace(ADD.main, operands=operands, input_indexes=(*ADD.main.input_indexes, last))
    activation = driver.prepare(replace(ADD, main=main, operand_values=b""))  # ADD with its scalar as input 2
    assert driver.allocate([activation], [BufferRole(0, 2)], [], 1) == NOTHING
    assert driver.allocate([activation], [BufferRole(0, 2)])[0] is NONE


# ------------------------------------------------------------------------------------------------ copying


def test_DOM_6_DOM_12_copied_data_is_read_back(driver: Driver) -> None:
    buffer, _ = driver.buffer(driver.prepare(RELU))
    source, target = driver.memory(1, 2, 3, 4), driver.memory(0, 0, 0, 0)
    for dimensions in ([], [4]):
        assert buffer.copyFrom(source, dimensions) is NONE
        assert buffer.copyTo(target) is NONE
        assert floats(target) == [1, 2, 3, 4]


@pytest.fixture(params=["shared memory", "a file"])
def sized(request: pytest.FixtureRequest, driver: Driver, resources: ExitStack, tmp_path: Path) -> Callable[[int], Any]:
    """Return what makes a memory of a number of bytes, each 7, which lives as long as what `driver` makes."""

    def shared(size: int) -> Memory:
        memory: Memory = resources.enter_context(Memory.create(size))
        memory.view[:] = bytes([7]) * size
        return memory

    def in_file(size: int) -> FileMemory:
        path = tmp_path / str(size)
        path.write_bytes(bytes([7]) * size)
        file = resources.enter_context(path.open("r+b"))
        return resources.enter_context(FileMemory.from_fd(file.fileno(), size))

    return shared if request.param == "shared memory" else in_file


@pytest.mark.parametrize(("model", "dimensions"), [(RELU, []), (RELU, [4]), (OPEN, [4])], ids=["fixed", "same", "open"])
def test_DOM_12_a_memory_of_another_size_is_neither_read_nor_written(
    model: Model, dimensions: list[int], sized: Callable[[int], Any], driver: Driver
) -> None:
    buffer, _ = driver.buffer(driver.prepare(model))
    source, target = driver.memory(1, 2, 3, 4), driver.memory(0, 0, 0, 0)
    for size in (1, 15, 17, 32, 4096):
        other = sized(size)
        assert buffer.copyFrom(source, dimensions) is NONE
        assert buffer.copyTo(other) is INVALID
        assert bytes(other.view) == bytes([7]) * size
        assert buffer.copyTo(target) is NONE and floats(target) == [1, 2, 3, 4]
        assert buffer.copyFrom(other, dimensions) is INVALID
        assert buffer.copyTo(target) is FAILED  # there is nothing in it
    same = sized(16)
    assert buffer.copyFrom(same, dimensions) is buffer.copyTo(target) is NONE
    assert bytes(target.view) == bytes([7]) * 16


def test_N_DCP_1_N_DCP_3_N_DCP_5_N_DCX_1_a_failed_copy_leaves_a_buffer_uninitialized(driver: Driver) -> None:
    buffer, _ = driver.buffer(driver.prepare(RELU))
    source, target = driver.memory(1, 2, 3, 4), driver.memory(0, 0, 0, 0)
    assert buffer.copyTo(target) is FAILED  # nothing was written yet
    wrong: list[tuple[Any, list[int]]] = [
        *((driver.memory(*[1.0] * count), []) for count in (2, 8)),
        *((source, dimensions) for dimensions in ([2, 2], [5], [0])),
    ]
    for memory, dimensions in wrong:
        assert buffer.copyFrom(source, []) is NONE
        assert buffer.copyFrom(memory, dimensions) is INVALID
        assert buffer.copyTo(target) is FAILED  # DOM-7
    assert floats(target) == [0] * 4
    assert buffer.copyFrom(None, []) is buffer.copyTo(None) is INVALID


def test_DOM_12_N_DCP_2_N_DCP_4_N_DCP_7_a_copy_to_a_buffer_of_dynamic_shape_needs_dimensions(driver: Driver) -> None:
    buffer, _ = driver.buffer(driver.prepare(OPEN))
    source, target = driver.memory(1, 2, 3, 4), driver.memory(0, 0, 0, 0)
    for dimensions in ([], [2, 2], [0], [2], [8]):
        assert buffer.copyFrom(source, dimensions) is INVALID
        assert buffer.copyTo(target) is FAILED
    assert buffer.copyFrom(source, [4]) is NONE
    for count in (2, 8):
        assert buffer.copyTo(driver.memory(*[0.0] * count)) is INVALID
    assert buffer.copyTo(target) is NONE and floats(target) == [1, 2, 3, 4]


def test_DOM_12_N_DCP_4_a_buffer_of_unknown_rank_is_no_scalar_where_the_copy_has_no_dimensions(driver: Driver) -> None:
    buffer, _ = driver.buffer(driver.prepare(relu_model(())))
    source, target = driver.memory(1), driver.memory(0)
    assert buffer.copyFrom(source, []) is INVALID
    assert buffer.copyTo(target) is FAILED
    assert buffer.copyFrom(source, [1]) is buffer.copyTo(target) is NONE
    assert floats(target) == [1]


def test_N_DCP_6_a_target_of_another_size_is_rejected(driver: Driver) -> None:
    buffer, _ = driver.buffer(driver.prepare(RELU))
    assert buffer.copyFrom(driver.memory(1, 2, 3, 4), []) is NONE
    for count in (2, 8):
        assert buffer.copyTo(driver.memory(*[0.0] * count)) is INVALID


# ------------------------------------------------------------------------------------------------ executing


class Adding:
    """ADD over a memory each, and a buffer that may be input 0 or output 0."""

    def __init__(self, driver: Driver) -> None:
        self.model = driver.prepare(ADD)
        self.buffer, self.token = driver.buffer(self.model)
        self.memories = [driver.memory(1, 2, 3, 4), driver.memory(10, 20, 30, 40), driver.memory(0, 0, 0, 0)]

    def request(self, *tokens: int | None) -> Request:
        """Return a request whose inputs 0 and 1 and whose output are in their memories, or in the buffers of tokens."""
        pools = [memory if t is None else BufferToken(t) for memory, t in zip(self.memories, tokens, strict=True)]
        places = [in_memory(i, self.memories[i]) if t is None else in_buffer(i) for i, t in enumerate(tokens)]
        return Request(tuple(places[:2]), tuple(places[2:]), tuple(pools))

    def executed(self, *tokens: int | None) -> ErrorStatus:
        status: ErrorStatus = self.model.executeSynchronously_1_3(self.request(*tokens), NO, None, None)[0]
        return status


@pytest.fixture
def adding(driver: Driver) -> Adding:
    return Adding(driver)


def test_DOM_6_DOM_9_N_DEX_5_a_chain_of_executions_stays_in_the_driver(adding: Adding, driver: Driver) -> None:
    assert adding.executed(adding.token, None, None) is FAILED  # nothing is in it
    assert adding.executed(None, None, adding.token) is NONE
    assert adding.executed(adding.token, None, None) is NONE
    assert floats(adding.memories[2]) == [21, 42, 63, 84]
    target = driver.memory(0, 0, 0, 0)
    assert adding.buffer.copyTo(target) is NONE and floats(target) == [11, 22, 33, 44]


def test_EXE_15_every_call_of_1_3_accepts_a_token_and_no_earlier_call_does(adding: Adding) -> None:
    assert adding.buffer.copyFrom(adding.memories[0], []) is NONE
    request, model = adding.request(adding.token, None, None), adding.model
    shapes = [OutputShape((4,))]
    assert model.executeSynchronously_1_3(request, NO, None, None) == (NONE, shapes, hidl.NO_HIDL_TIMING)
    calls: Queue[tuple[Any, ...]] = Queue()
    assert model.execute_1_3(request, NO, None, None, lambda *given: calls.put(given)) is NONE
    assert calls.get(timeout=LIMIT_S) == (NONE, shapes, hidl.NO_HIDL_TIMING)
    status, fence, callback = model.executeFenced(request, [], NO, None, None, None)
    assert status is NONE and fence.wait(LIMIT_S) is nnfmq.FenceState.SIGNALED
    callback.close()
    assert floats(adding.memories[2]) == [11, 22, 33, 44]
    assert model.executeSynchronously(request, NO) == (INVALID, [], hidl.NO_HIDL_TIMING)
    assert model.execute_1_2(request, NO, lambda *given: calls.put(given)) is INVALID
    assert calls.get(timeout=LIMIT_S) == (INVALID, [], hidl.NO_HIDL_TIMING)
    assert model.execute(request, lambda *given: calls.put(given)) is INVALID
    assert calls.get(timeout=LIMIT_S) == (INVALID,)


@pytest.mark.parametrize("token", [0, 100, -1])
def test_N_DEX_1_an_unknown_token_is_rejected(token: int, adding: Adding) -> None:
    assert adding.executed(token, None, None) is adding.executed(None, None, token) is INVALID


def test_N_DEX_2_N_DEX_3_N_DEX_4_a_buffer_is_used_only_in_its_roles(adding: Adding, driver: Driver) -> None:
    assert adding.buffer.copyFrom(adding.memories[0], []) is NONE
    other = Adding(driver)
    assert other.executed(adding.token, None, None) is other.executed(None, None, adding.token) is INVALID
    assert adding.buffer.copyFrom(adding.memories[0], []) is NONE
    assert adding.executed(None, adding.token, None) is INVALID
    (_, source, given), (_, _, made) = (
        driver.allocate([adding.model], [FIRST]),
        driver.allocate([adding.model], [], [FIRST]),
    )
    assert source.copyFrom(adding.memories[0], []) is NONE
    assert adding.executed(None, None, given) is adding.executed(made, None, None) is INVALID


def test_N_DEX_6_DOM_10_a_buffer_is_one_output_or_several_inputs(adding: Adding, driver: Driver) -> None:
    status, both, token = driver.allocate([adding.model], [FIRST, BufferRole(0, 1)], [FIRST])
    assert status is NONE
    assert both.copyFrom(adding.memories[0], []) is NONE
    assert adding.executed(token, token, None) is NONE
    assert floats(adding.memories[2]) == [2, 4, 6, 8]
    assert adding.executed(token, None, token) is INVALID


def test_N_DEX_7_DOM_8_DOM_11_a_shape_other_than_the_buffer_s_is_rejected(driver: Driver) -> None:
    model = driver.prepare(OPEN)
    _, token = driver.buffer(model)
    four, two = driver.memory(-1, 2, -3, 4), driver.memory(5, 6)

    def executed(source: RequestArgument, target: RequestArgument, *pools: Any) -> ErrorStatus:
        request = Request((source,), (target,), (*pools, BufferToken(token)))
        status: ErrorStatus = model.executeSynchronously_1_3(request, NO, None, None)[0]
        return status

    for memory, extent in ((four, 4), (two, 2)):  # one buffer, results of different shapes
        assert executed(in_memory(0, memory, extent), in_buffer(1), memory) is NONE
        target = driver.memory(*[0.0] * extent)
        assert executed(in_buffer(1, extent), in_memory(0, target), target) is NONE
        assert floats(target) == [max(value, 0) for value in floats(memory)]
    assert executed(in_buffer(1, 4), in_memory(0, four), four) is INVALID


def test_DOM_14_a_result_of_another_shape_than_the_buffer_s_fails(driver: Driver) -> None:
    model = driver.prepare(OPEN)
    buffer, token = driver.buffer(model, 2)
    four = driver.memory(1, 2, 3, 4)
    request = Request((in_memory(0, four, 4),), (in_buffer(1),), (four, BufferToken(token)))
    assert model.executeSynchronously_1_3(request, NO, None, None)[0] is FAILED
    assert buffer.copyTo(driver.memory(0, 0)) is FAILED


def test_N_DXX_1_DOM_7_a_failed_execution_leaves_its_output_uninitialized(adding: Adding) -> None:
    assert adding.executed(None, None, adding.token) is NONE
    request = adding.request(None, None, adding.token)
    assert adding.model.executeSynchronously_1_3(replace(request, inputs=()), NO, None, None)[0] is INVALID
    assert adding.executed(adding.token, None, None) is FAILED


def test_N_DXX_2_DOM_13_a_freed_buffer_cannot_be_used(adding: Adding) -> None:
    assert adding.buffer.copyFrom(adding.memories[0], []) is NONE
    adding.buffer.close()
    assert adding.executed(adding.token, None, None) is adding.executed(None, None, adding.token) is INVALID
    assert adding.buffer.copyTo(adding.memories[2]) is adding.buffer.copyFrom(adding.memories[0], []) is INVALID


def test_N_BAS_5_DEV_14_a_busy_device_allocates_no_buffers(adding: Adding, driver: Driver) -> None:
    unavailable = ErrorStatus.DEVICE_UNAVAILABLE
    memory = adding.memories[0]
    driver.client.set_device_status("reference", DeviceStatus.BUSY)
    try:
        assert driver.allocate([adding.model], [FIRST]) == (unavailable, None, 0)
        assert adding.buffer.copyFrom(memory, []) is adding.buffer.copyTo(memory) is unavailable
    finally:
        driver.client.set_device_status("reference", DeviceStatus.AVAILABLE)
    assert adding.buffer.copyFrom(memory, []) is NONE


def test_LIFE_4_buffers_are_freed_when_the_driver_is_killed(adding: Adding, driver: Driver) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: adding.buffer.copyFrom(adding.memories[0], []),
        lambda: adding.buffer.copyTo(adding.memories[0]),
        lambda: driver.allocate([adding.model], [FIRST]),
    ]
    with Process(driver.client.worker_pid) as worker:
        worker.kill()
        worker.wait_for_end()
    for call in calls:
        with pytest.raises(nnfmq.DeadObject):
            call()
    adding.buffer.close()  # harmless
