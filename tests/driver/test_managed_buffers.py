"""Buffers that the driver manages, through a session in this process: roles, copies, executions, and their end.

The rows N-DOM, N-DCP and N-DEX are those of the HAL's own tests, with an activation where they have a convolution: the
driver looks at operands alone.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.connections import open_connection
from support.executors import LIMIT_S, Held, until
from support.small_models import F32, Q8, Q8S, graph, one_operation

from nnfmq.base.channel import Channel
from nnfmq.base.file_memory import FileMemory
from nnfmq.base.memory import Memory
from nnfmq.client.connection.client import Client
from nnfmq.client.connection.device import Device
from nnfmq.client.model.buffers import Buffer as ClientBuffer
from nnfmq.client.model.buffers import copy as copy_memory
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.driver.execution import prepared_model
from nnfmq.driver.memory.buffers import MAX_TOKEN
from nnfmq.driver.session.calls import HANDLERS
from nnfmq.driver.session.session import Session
from nnfmq.hal.capabilities import BufferDesc, BufferRole
from nnfmq.hal.errors import (
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadlineTransient,
    NnfmqError,
    ResourceExhaustedPersistent,
    ResourceExhaustedTransient,
)
from nnfmq.hal.types import (
    BufferToken,
    DataLocation,
    ExecutionConfig,
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    OutputShape,
    Protection,
    Request,
    RequestArgument,
    operand_bytes,
)
from nnfmq.serialize import messages

SHAPE = (1, 2, 2, 2)
F16 = OperandType.TENSOR_FLOAT16
TENSORS = {
    "float32": Operand(F32, SHAPE),
    "float16": Operand(F16, SHAPE),
    "quant8": Operand(Q8, SHAPE, 0.5, 0),
    "quant8 signed": Operand(Q8S, SHAPE, 0.5, 0),
}
each_type = pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
of_quantized_types = pytest.mark.parametrize("tensor", [TENSORS["quant8"], TENSORS["quant8 signed"]], ids=["u8", "i8"])
OTHER_TYPE = {F32: F16, F16: F32, Q8: Q8S, Q8S: Q8}


def relus(tensor: Operand, count: int = 1) -> Model:
    """Return a model whose output i is RELU(input i)."""
    inputs = [replace(tensor, lifetime=LifeTime.SUBGRAPH_INPUT)] * count
    outputs = [replace(tensor, lifetime=LifeTime.SUBGRAPH_OUTPUT)] * count
    operations = [Operation(OperationType.RELU, (i,), (count + i,)) for i in range(count)]
    return graph([*inputs, *outputs], operations)


def with_extent(tensor: Operand, extent: int) -> Operand:
    return replace(tensor, dimensions=(extent, *SHAPE[1:]))


class Driver:
    """A session in a thread of this process, and an application's connection to it."""

    def __init__(self, stack: ExitStack) -> None:
        theirs, ours = Channel.pair()
        self._stack = stack
        self.session = Session(theirs, "under test", HANDLERS)
        self._thread = threading.Thread(target=self.session.run, name="session under test")
        self._thread.start()
        stack.callback(self._end)
        self.connection = open_connection(ours, time.monotonic_ns() + LIMIT_S * 10**9)
        stack.callback(self.connection.close)
        self.device: Device = Client(self.connection, None).device("reference")

    def _end(self) -> None:
        self.session.stop()
        self._thread.join(LIMIT_S)
        for burst in self.session.bursts.values():
            burst.close()
        self.session._pool.shutdown()

    def prepare(self, model: Model) -> PreparedModel:
        return self._stack.enter_context(self.device.prepare(model))

    def memory(self, size: int) -> Memory:
        return self._stack.enter_context(Memory.create(size))

    def buffer(self, model: PreparedModel, inputs: Sequence[int], outputs: Sequence[int], *dimensions: int) -> Any:
        """Return the application's buffer for roles of one model."""
        roles = [(model, i) for i in inputs], [(model, i) for i in outputs]
        made = self.device.allocate(inputs=roles[0], outputs=roles[1], dimensions=dimensions)
        return self._stack.enter_context(made)

    def allocate(
        self,
        models: Sequence[int],
        inputs: Sequence[tuple[int, int]] = (),
        outputs: Sequence[tuple[int, int]] = (),
        dimensions: tuple[int, ...] = (),
        probability: float = 1.0,
    ) -> messages.Allocated:
        """Allocate a buffer without the checks of the client library."""
        roles = [tuple(messages.RoleData(m, i, probability) for m, i in part) for part in (inputs, outputs)]
        message = messages.Allocate(self.connection.next_call_id(), "reference", dimensions, tuple(models), *roles)
        return self.connection.exchange(message, messages.Allocated)

    def assert_rejects(self, rule: str, *given: Any, **more: Any) -> None:
        """Check that no buffer is allocated, and that the reply names the rule."""
        reply = self.allocate(*given, **more)
        assert (reply.status, reply.buffer_id, reply.token) == (ErrorStatus.INVALID_ARGUMENT, 0, 0)
        assert rule in reply.message
        assert self.session.buffers._by_token == {}


@pytest.fixture
def driver(resources: ExitStack) -> Driver:
    return Driver(resources)


def in_pool(index: int, size: int, dimensions: tuple[int, ...] = ()) -> RequestArgument:
    return RequestArgument(location=DataLocation(index, 0, size), dimensions=dimensions)


def in_buffer(index: int, dimensions: tuple[int, ...] = ()) -> RequestArgument:
    return RequestArgument(location=DataLocation(index), dimensions=dimensions)


def fails(error: type[NnfmqError], model: PreparedModel, request: Request, match: str | None = None) -> None:
    with pytest.raises(error, match=match):
        model.execute_request(request)


# ------------------------------------------------------------------------------------------------ allocating


@each_type
def test_DOM_1_a_buffer_has_a_unique_id_and_a_unique_positive_token(driver: Driver, tensor: Operand) -> None:
    model = driver.prepare(relus(tensor))
    replies = [driver.allocate([model.model_id], [(0, 0)], [(0, 0)]) for _ in range(3)]
    assert all(reply.status is ErrorStatus.NONE and reply.buffer_id > 0 for reply in replies)
    tokens = {reply.token for reply in replies}
    assert len(tokens) == 3
    assert min(tokens) > 0


def test_DOM_1_the_token_of_a_live_buffer_is_not_reused(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    model = driver.prepare(relus(TENSORS["float32"]))
    buffers = driver.session.buffers
    buffers._tokens = iter([1, 2, 1, 2, 1, 3])  # type: ignore[assignment]
    replies = [driver.allocate([model.model_id], [(0, 0)]) for _ in range(2)]
    buffers.release(replies[0].buffer_id)
    assert [reply.token for reply in replies] == [1, 2]
    assert driver.allocate([model.model_id], [(0, 0)]).token == 1
    assert driver.allocate([model.model_id], [(0, 0)]).token == 3


def test_N_DOM_1_a_buffer_without_a_role_is_rejected(driver: Driver) -> None:
    model = driver.prepare(relus(TENSORS["float32"]))
    driver.assert_rejects("DOM-3", [])
    driver.assert_rejects("DOM-3", [model.model_id])


@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_N_DOM_2_a_role_of_an_unknown_model_is_rejected(driver: Driver, kind: str) -> None:
    driver.assert_rejects("there is no model 0", [0], **{kind: [(0, 0)]})


@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_N_DOM_3_a_role_of_another_device_s_model_is_rejected(driver: Driver, kind: str) -> None:
    found = {info.name: info for info in Client(driver.connection, None).devices()}
    with Device(found["sample-float_fast"], driver.connection).prepare(relus(TENSORS["float32"])) as model:
        driver.assert_rejects("N-DOM-3", [model.model_id], **{kind: [(0, 0)]})


@each_type
@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_N_DOM_4_a_model_index_out_of_range_is_rejected(driver: Driver, tensor: Operand, kind: str) -> None:
    driver.assert_rejects("N-DOM-4", [driver.prepare(relus(tensor)).model_id], **{kind: [(1, 0)]})


@each_type
@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_N_DOM_5_an_index_out_of_range_is_rejected(driver: Driver, tensor: Operand, kind: str) -> None:
    driver.assert_rejects("N-DOM-5", [driver.prepare(relus(tensor)).model_id], **{kind: [(0, 1)]})


@pytest.mark.parametrize("kind", ["inputs", "outputs"])
@pytest.mark.parametrize("probability", [10.0, 0.0, -0.5, float("nan")])
def test_N_DOM_6_a_probability_out_of_range_is_rejected(driver: Driver, kind: str, probability: float) -> None:
    model = driver.prepare(relus(TENSORS["float32"]))
    driver.assert_rejects("N-DOM-6", [model.model_id], probability=probability, **{kind: [(0, 0)]})


@each_type
@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_N_DOM_7_a_role_given_twice_is_rejected(driver: Driver, tensor: Operand, kind: str) -> None:
    number = driver.prepare(relus(tensor)).model_id
    driver.assert_rejects("N-DOM-7", [number], **{kind: [(0, 0), (0, 0)]})
    driver.assert_rejects("N-DOM-7", [number, number], **{kind: [(0, 0), (1, 0)]})


BETWEEN = [([(0, 0), (1, 0)], []), ([(0, 0)], [(1, 0)]), ([], [(0, 0), (1, 0)])]
between_roles = pytest.mark.parametrize(("inputs", "outputs"), BETWEEN, ids=["two inputs", "both", "two outputs"])


def conflict(driver: Driver, rule: str, tensor: Operand, other: Operand, inputs: Any, outputs: Any) -> None:
    numbers = [driver.prepare(relus(each)).model_id for each in (tensor, other)]
    driver.assert_rejects(rule, numbers, inputs, outputs)


@each_type
@between_roles
def test_N_DOM_8_roles_of_different_types_are_rejected(
    driver: Driver, tensor: Operand, inputs: Any, outputs: Any
) -> None:
    conflict(driver, "N-DOM-8", tensor, replace(tensor, type=OTHER_TYPE[tensor.type]), inputs, outputs)


@of_quantized_types
@between_roles
def test_N_DOM_9_roles_of_different_scales_are_rejected(
    driver: Driver, tensor: Operand, inputs: Any, outputs: Any
) -> None:
    conflict(driver, "N-DOM-9", tensor, replace(tensor, scale=1.0), inputs, outputs)


@of_quantized_types
@between_roles
def test_N_DOM_10_roles_of_different_zero_points_are_rejected(
    driver: Driver, tensor: Operand, inputs: Any, outputs: Any
) -> None:
    conflict(driver, "N-DOM-10", tensor, replace(tensor, zero_point=10), inputs, outputs)


@each_type
@between_roles
def test_N_DOM_11_roles_of_different_ranks_are_rejected(
    driver: Driver, tensor: Operand, inputs: Any, outputs: Any
) -> None:
    conflict(driver, "N-DOM-11", tensor, replace(tensor, dimensions=SHAPE[:-1]), inputs, outputs)


@each_type
@between_roles
def test_N_DOM_12_roles_of_different_dimensions_are_rejected(
    driver: Driver, tensor: Operand, inputs: Any, outputs: Any
) -> None:
    conflict(driver, "N-DOM-12", tensor, with_extent(tensor, 4), inputs, outputs)


@pytest.mark.parametrize("kind", ["inputs", "outputs"])
@pytest.mark.parametrize(("dimensions", "rule"), [(SHAPE[:-1], "N-DOM-13"), ((4, *SHAPE[1:]), "N-DOM-14")])
def test_N_DOM_13_14_dimensions_that_contradict_a_role_are_rejected(
    driver: Driver, kind: str, dimensions: tuple[int, ...], rule: str
) -> None:
    model = driver.prepare(relus(TENSORS["float32"]))
    driver.assert_rejects(rule, [model.model_id], dimensions=dimensions, **{kind: [(0, 0)]})


def scalar_model() -> Model:
    tensor = TENSORS["float32"]
    return one_operation(OperationType.ADD, [tensor, tensor, Operand(OperandType.INT32)], tensor)


def test_N_DOM_15_dimensions_of_a_scalar_are_rejected(driver: Driver) -> None:
    driver.assert_rejects("N-DOM-15", [driver.prepare(scalar_model()).model_id], [(0, 2)], dimensions=(1,))


def test_a_scalar_can_be_in_a_buffer(driver: Driver) -> None:
    model = driver.prepare(scalar_model())
    buffer = driver.buffer(model, [2], [])
    buffer.copy_from(np.int32(1))  # RELU
    ones = np.ones(SHAPE, np.float32)
    assert np.array_equal(model.execute(ones, -3 * ones, buffer)[0], np.zeros(SHAPE))
    assert buffer.array() == 1


def test_DOM_4_a_type_without_arrays_has_no_buffers(driver: Driver) -> None:
    oem = Operand(OperandType.TENSOR_OEM_BYTE, (4,), lifetime=LifeTime.SUBGRAPH_INPUT)
    prepared = PreparedModelStandIn(graph([oem, replace(oem, lifetime=LifeTime.SUBGRAPH_OUTPUT)], []))
    with pytest.raises(GeneralFailure, match="DOM-4"):
        driver.session.buffers.allocate(BufferDesc(), [prepared], [BufferRole(0, 0)], [])  # type: ignore[list-item]


class PreparedModelStandIn:
    """The part of a prepared model that an allocation uses."""

    def __init__(self, model: Model) -> None:
        self.model, self.key = model, object()


def test_DOM_4_a_buffer_beyond_the_client_s_limit_is_rejected_and_not_charged(driver: Driver) -> None:
    model, quota = driver.prepare(relus(TENSORS["float32"])), driver.session.quota
    quota.limit_bytes = quota.charged_bytes + 31
    assert driver.allocate([model.model_id], [(0, 0)]).status is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
    assert driver.session.buffers._by_token == {}
    quota.limit_bytes += 1
    assert driver.allocate([model.model_id], [(0, 0)]).status is ErrorStatus.NONE


def test_a_buffer_is_charged_until_it_is_released(driver: Driver) -> None:
    model, quota = driver.prepare(relus(TENSORS["float32"])), driver.session.quota
    held = quota.charged_bytes
    with driver.device.allocate(inputs=[(model, 0)]):
        assert quota.charged_bytes == held + 32
    assert quota.charged_bytes == held


# ------------------------------------------------------------------------------------------------ copying


@pytest.fixture(params=TENSORS.values(), ids=TENSORS.keys())
def tensor(request: pytest.FixtureRequest) -> Operand:
    return request.param  # type: ignore[no-any-return]


class Copying:
    """A buffer, and memories of its size and of others."""

    def __init__(self, driver: Driver, tensor: Operand, extent: int = 1) -> None:
        self.model = driver.prepare(relus(with_extent(tensor, extent)))
        self.buffer: ClientBuffer = driver.buffer(self.model, [0], [0])
        self.size = operand_bytes(tensor)
        self.good = driver.memory(self.size)
        self.bad = [driver.memory(self.size // 2), driver.memory(self.size * 2)]

    def assert_rejects(self, memory: Memory, *dimensions: int) -> None:
        with pytest.raises(InvalidArgument):
            self.buffer.copy_from(memory, dimensions)


@pytest.fixture
def static(driver: Driver, tensor: Operand) -> Copying:
    return Copying(driver, tensor)


@pytest.fixture
def dynamic(driver: Driver, tensor: Operand) -> Copying:
    return Copying(driver, tensor, 0)


def test_N_DCP_1_a_source_of_another_size_is_rejected(static: Copying) -> None:
    for memory in static.bad:
        static.assert_rejects(memory)


def test_N_DCP_2_a_source_of_another_size_than_its_dimensions_is_rejected(dynamic: Copying) -> None:
    for memory in dynamic.bad:
        dynamic.assert_rejects(memory, *SHAPE)
    dynamic.buffer.copy_from(dynamic.good, SHAPE)
    dynamic.assert_rejects(dynamic.good, 2, *SHAPE[1:])


@pytest.mark.parametrize("dimensions", [SHAPE[:-1], (2, *SHAPE[1:]), (0, *SHAPE[1:])])
def test_N_DCP_3_dimensions_that_a_buffer_cannot_have_are_rejected(
    static: Copying, dimensions: tuple[int, ...]
) -> None:
    static.assert_rejects(static.good, *dimensions)
    static.buffer.copy_from(static.good)
    static.buffer.copy_from(static.good, SHAPE)


@pytest.mark.parametrize("dimensions", [SHAPE[:-1], (2, *SHAPE[1:-1], 4), (*SHAPE[:-1], 0), ()])
def test_N_DCP_4_dimensions_that_an_open_buffer_cannot_have_are_rejected(
    dynamic: Copying, dimensions: tuple[int, ...]
) -> None:
    dynamic.assert_rejects(dynamic.good, *dimensions)
    dynamic.buffer.copy_from(dynamic.good, SHAPE)


def test_N_DCP_5_an_uninitialized_buffer_cannot_be_copied(static: Copying, dynamic: Copying) -> None:
    for each in (static, dynamic):
        with pytest.raises(GeneralFailure, match="DOM-5"):
            each.buffer.copy_to(each.good)


def test_N_DCP_6_a_target_of_another_size_is_rejected(static: Copying) -> None:
    _copies_only_to_its_size(static)


def test_N_DCP_7_a_target_of_another_size_than_the_content_is_rejected(dynamic: Copying) -> None:
    _copies_only_to_its_size(dynamic)


def _copies_only_to_its_size(copying: Copying) -> None:
    content = bytes(range(1, copying.size + 1))
    copying.good.view[:] = content
    copying.buffer.copy_from(copying.good, SHAPE)
    for memory in copying.bad:
        with pytest.raises(InvalidArgument, match="DOM-12"):
            copying.buffer.copy_to(memory)
    copying.good.view[:] = bytes(copying.size)
    copying.buffer.copy_to(copying.good)
    assert bytes(copying.good.view) == content


def copy_of_wrong_size(copying: Copying) -> None:
    copying.assert_rejects(copying.bad[0], *SHAPE)


def copy_of_wrong_dimensions(copying: Copying) -> None:
    copying.assert_rejects(copying.good, 3, *SHAPE[1:])


def copy_from_a_pipe(copying: Copying) -> None:
    reader, writer = os.pipe()
    message = messages.CopyFrom(1000, copying.buffer._buffer_id, messages.MemoryData(copying.size), ())
    reply = copying.buffer._connection.exchange(message, messages.Reply, [reader])
    os.close(reader)
    os.close(writer)
    assert reply.status is ErrorStatus.INVALID_ARGUMENT


def copy_from_write_only_memory(copying: Copying) -> None:
    memory = FileMemory.from_fd(copying.good.fileno(), copying.size, protection=Protection.WRITE)
    with memory, pytest.raises(InvalidArgument, match="N-RQX-12"):
        copying.buffer.copy_from(memory, SHAPE)


@pytest.mark.parametrize(
    "failing_copy", [copy_of_wrong_size, copy_of_wrong_dimensions, copy_from_a_pipe, copy_from_write_only_memory]
)
def test_N_DCX_1_a_failed_copy_leaves_the_buffer_uninitialized(static: Copying, failing_copy: Any) -> None:
    static.buffer.copy_from(static.good)
    static.buffer.copy_to(static.good)
    failing_copy(static)
    with pytest.raises(GeneralFailure, match="DOM-5"):
        static.buffer.copy_to(static.good)


def test_a_read_only_target_is_rejected(static: Copying) -> None:
    static.buffer.copy_from(static.good)
    memory = FileMemory.from_fd(static.good.fileno(), static.size, protection=Protection.READ)
    with memory, pytest.raises(InvalidArgument, match="N-RQX-12"):
        static.buffer.copy_to(memory)


def test_MEM_8_all_kinds_of_memory_are_copied_into_each_other(driver: Driver, static: Copying) -> None:
    content = bytes(range(1, static.size + 1))
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC)
    os.ftruncate(fd, static.size + 8)
    other = driver.buffer(static.model, [0], [0])
    last = driver.memory(static.size)
    static.good.view[:] = content
    with FileMemory.from_fd(fd, static.size, offset=8) as file:
        os.close(fd)
        chain = [static.good, static.buffer, file, other, static.buffer, other, last]
        for source, target in itertools.pairwise(chain):
            copy_memory(source, target)  # type: ignore[arg-type]
        assert bytes(file.view) == bytes(last.view) == content
        copy_memory(file, static.good)
        copy_memory(static.good, file)
        with pytest.raises(InvalidArgument, match="cannot be copied into"):
            copy_memory(file, static.bad[0])


# ------------------------------------------------------------------------------------------------ executing


class Executing:
    """A prepared model of some RELUs, a memory of one tensor, and requests over both."""

    def __init__(self, driver: Driver, tensor: Operand, count: int = 1) -> None:
        self.driver, self.tensor = driver, tensor
        self.size = operand_bytes(replace(tensor, dimensions=SHAPE))
        self.model = driver.prepare(relus(tensor, count))
        self.memories = [driver.memory(self.size) for _ in range(3)]
        self.content = np.arange(1, 9).astype(self.model.inputs[0].dtype).reshape(SHAPE)
        for memory in self.memories[:2]:
            memory.view[:] = self.content.tobytes()

    def buffer(self, inputs: Sequence[int], outputs: Sequence[int], *dimensions: int) -> ClientBuffer:
        return self.driver.buffer(self.model, inputs, outputs, *dimensions)  # type: ignore[no-any-return]

    def filled(self, inputs: Sequence[int], outputs: Sequence[int]) -> ClientBuffer:
        made = self.buffer(inputs, outputs)
        made.copy_from(self.memories[0], SHAPE)
        return made

    def request(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Request:
        """Return a request; a token stands for a buffer, None for the next of the memories."""
        pools: list[Any] = list(self.memories)
        free = iter(range(len(self.memories)))

        def argument(given: Any) -> RequestArgument:
            if given is None:
                return in_pool(next(free), self.size)
            pools.append(BufferToken(given))
            return in_buffer(len(pools) - 1)

        return Request(tuple(map(argument, inputs)), tuple(map(argument, outputs)), tuple(pools))


@pytest.fixture
def one(driver: Driver, tensor: Operand) -> Executing:
    return Executing(driver, tensor)


@pytest.fixture
def two(driver: Driver, tensor: Operand) -> Executing:
    made = Executing(driver, tensor, 2)
    made.memories.append(driver.memory(made.size))
    return made


def test_DOM_6_an_execution_from_buffer_to_buffer_needs_no_memory_of_the_client(one: Executing) -> None:
    source, target = one.filled([0], [0]), one.buffer([0], [0])
    request = Request((in_buffer(0),), (in_buffer(1),), (source.pool, target.pool))
    assert one.model.execute_request(request).shapes == (OutputShape(SHAPE),)
    assert np.array_equal(target.array(), one.content)
    assert target.dimensions == SHAPE


@pytest.mark.parametrize("token", [0, -1, 100])
def test_N_DEX_1_N_RQX_9_an_unknown_token_is_rejected(one: Executing, token: int) -> None:
    fails(InvalidArgument, one.model, one.request([token], [None]), "N-RQX-9")
    fails(InvalidArgument, one.model, one.request([None], [token]), "N-RQX-9")


@pytest.mark.parametrize("place", [DataLocation(3, 1), DataLocation(3, 0, 8), DataLocation(3, 0, 0, 1)])
def test_N_RQX_10_an_argument_in_a_part_of_a_buffer_is_rejected(one: Executing, place: DataLocation) -> None:
    buffer = one.filled([0], [0])
    request = one.request([buffer.token], [None])
    fails(InvalidArgument, one.model, replace(request, inputs=(RequestArgument(location=place),)), "N-RQX-10")


def test_N_DEX_2_a_buffer_of_another_model_is_rejected(one: Executing) -> None:
    buffer, other = one.filled([0], [0]), one.driver.prepare(relus(one.tensor))
    fails(InvalidArgument, other, one.request([buffer.token], [None]), "DOM-9")
    fails(InvalidArgument, other, one.request([None], [buffer.token]), "DOM-9")


def test_N_DEX_3_a_buffer_for_another_input_or_output_is_rejected(two: Executing) -> None:
    buffer = two.filled([0], [])
    fails(InvalidArgument, two.model, two.request([None, buffer.token], [None, None]), "DOM-9")
    fails(InvalidArgument, two.model, two.request([None, None], [None, buffer.token]), "DOM-9")


def test_N_DEX_4_a_buffer_for_an_input_is_rejected_as_output_and_the_reverse(one: Executing) -> None:
    source, target = one.filled([0], []), one.filled([], [0])
    fails(InvalidArgument, one.model, one.request([None], [source.token]), "DOM-9")
    fails(InvalidArgument, one.model, one.request([target.token], [None]), "DOM-9")


def test_N_DEX_5_an_uninitialized_buffer_is_rejected_as_input_until_it_is_written(one: Executing) -> None:
    buffer = one.buffer([0], [0])
    fails(GeneralFailure, one.model, one.request([buffer.token], [None]), "DOM-5")
    one.model.execute_request(one.request([None], [buffer.token]))
    one.memories[0].view[:] = bytes(one.size)
    one.model.execute_request(one.request([buffer.token], [None]))
    assert bytes(one.memories[0].view) == one.content.tobytes()


def test_N_DEX_6_DOM_10_a_buffer_can_be_one_output_or_several_inputs(two: Executing) -> None:
    token = (buffer := two.filled([0, 1], [0, 1])).token
    fails(InvalidArgument, two.model, two.request([token, None], [token, None]), "N-DEX-6")
    fails(InvalidArgument, two.model, two.request([None, None], [token, token]), "N-DEX-6")
    buffer.copy_from(two.memories[0], SHAPE)
    two.model.execute_request(two.request([token, token], [None, None]))


LARGER = (2, *SHAPE[1:])


def test_N_DEX_7_dimensions_that_contradict_the_buffer_are_rejected(driver: Driver, tensor: Operand) -> None:
    given = Executing(driver, with_extent(tensor, 0))
    buffer = given.buffer([0], [0], *SHAPE)
    buffer.copy_from(given.memories[0])
    pools = (driver.memory(2 * given.size), buffer.pool)
    outside = in_pool(0, 2 * given.size, LARGER)
    fails(InvalidArgument, given.model, Request((in_buffer(1, LARGER),), (outside,), pools), "N-DEX-7")
    fails(InvalidArgument, given.model, Request((outside,), (in_buffer(1, LARGER),), pools), "N-DEX-7")
    fails(GeneralFailure, given.model, Request((outside,), (in_buffer(1),), pools), "DOM-14")


def test_DOM_8_an_input_of_another_shape_than_the_content_is_rejected(driver: Driver, tensor: Operand) -> None:
    given = Executing(driver, with_extent(tensor, 0))
    buffer = given.filled([0], [0])
    request = Request(
        (in_buffer(1, LARGER),), (in_pool(0, 2 * given.size),), (driver.memory(2 * given.size), buffer.pool)
    )
    fails(InvalidArgument, given.model, request, "DOM-8")
    given.model.execute_request(replace(request, inputs=(in_buffer(1),), outputs=(in_pool(0, given.size),)))


def test_DOM_11_a_buffer_stores_results_of_different_shapes_in_turn(driver: Driver, tensor: Operand) -> None:
    given = Executing(driver, with_extent(tensor, 0))
    source, target = given.buffer([0], [0]), given.buffer([0], [0])
    held = driver.session.quota.charged_bytes
    for extent in (1, 3, 3, 2):
        content = np.repeat(given.content, extent, axis=0)
        source.copy_from(content)
        assert given.model.execute(source, out=[target]) == (target,)
        assert target.dimensions == content.shape
        assert np.array_equal(target.array(), content)
        assert driver.session.quota.charged_bytes == held + 2 * content.nbytes


def test_DOM_11_a_buffer_of_unknown_rank_accepts_any_shape(driver: Driver) -> None:
    model = driver.prepare(relus(Operand(F32, ())))
    buffer = driver.buffer(model, [0], [0])
    for shape in ((2, 3), (6,)):
        values = np.arange(6, dtype=np.float32).reshape(shape)
        with_shape = Request((in_pool(0, 24, shape),), (in_buffer(1),), (memory := driver.memory(24), buffer.pool))
        memory.view[:] = values.tobytes()
        assert model.execute_request(with_shape).shapes == (OutputShape(shape),)
        assert np.array_equal(buffer.array(), values)


def test_LIFE_8_more_dimensions_than_arrays_support_fail_and_the_session_continues(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    model = driver.prepare(relus(Operand(F32, ())))
    buffer, memory = driver.buffer(model, [0], [0]), driver.memory(4)
    with pytest.raises(GeneralFailure, match="allocating a buffer"):
        buffer.copy_from(memory, (1,) * 65)
    many = in_pool(0, 4, (1,) * 65)
    fails(GeneralFailure, model, Request((many,), (in_buffer(1),), (memory, buffer.pool)), "R5")
    outside = Request((many,), (in_pool(1, 4),), (memory, driver.memory(4)))
    fails(GeneralFailure, model, outside, "R5")
    with pytest.raises(InvalidArgument, match="DOM-12"):
        buffer.copy_from(memory, (2**32 - 1,) * 1000)
    buffer.copy_from(memory, (1,))
    caplog.clear()  # the log records keep the frames alive


def test_a_result_is_computed_in_the_buffer_itself(one: Executing) -> None:
    target = one.buffer([0], [0])
    storage = one.driver.session.buffers.lookup_token(target.pool)._storage
    for _ in range(2):
        one.model.execute_request(one.request([None], [target.token]))
        assert one.driver.session.buffers.lookup_token(target.pool)._content is storage


@pytest.mark.parametrize("inside", ["before it began", "when it was bound", "in the middle"])
def test_N_DXX_1_DOM_7_a_failed_execution_leaves_its_output_uninitialized(
    one: Executing, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = one.filled([0], [0])
    good = one.request([None], [buffer.token])
    one.model.execute_request(good)
    assert buffer.dimensions == SHAPE
    if inside == "before it began":
        config = ExecutionConfig(loop_timeout_ns=1 << 60)
        with pytest.raises(InvalidArgument):
            one.model.execute_request(good, config)
    elif inside == "when it was bound":
        fails(InvalidArgument, one.model, replace(good, inputs=()), "N-REQ-1")
    else:
        past(monkeypatch)
        with pytest.raises(MissedDeadlineTransient):
            one.model.execute_request(good)
    assert buffer.dimensions is None
    with pytest.raises(GeneralFailure, match="DOM-5"):
        buffer.copy_to(one.memories[0])
    fails(GeneralFailure, one.model, one.request([buffer.token], [None]), "DOM-5")


def past(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the deadline pass between two operations of the driver."""
    monkeypatch.setattr(prepared_model, "run_options", lambda *_, **__: prepared_model.RunOptions(1))


def test_a_failed_execution_does_not_change_its_inputs(two: Executing) -> None:
    source, target = two.filled([0], []), two.buffer([1], [])
    fails(GeneralFailure, two.model, two.request([source.token, target.token], [None, None]), "DOM-5")
    assert np.array_equal(source.array(), two.content)


# ------------------------------------------------------------------------------------------------ closing


def test_N_DXX_2_DOM_13_the_token_of_a_freed_buffer_is_rejected(one: Executing) -> None:
    buffer = one.filled([0], [0])
    requests = one.request([buffer.token], [None]), one.request([None], [buffer.token])
    buffer.close()
    buffer.close()
    for request in requests:
        fails(InvalidArgument, one.model, request, "N-RQX-9")
    with pytest.raises(InvalidArgument, match="this buffer is closed"):
        buffer.copy_to(one.memories[0])


def test_a_buffer_is_released_once(driver: Driver) -> None:
    model = driver.prepare(relus(TENSORS["float32"]))
    number = driver.allocate([model.model_id], [(0, 0)]).buffer_id
    statuses = []
    for _ in range(2):
        message = messages.ReleaseBuffer(driver.connection.next_call_id(), number)
        statuses.append(driver.connection.exchange(message, messages.Reply).status)
    assert statuses == [ErrorStatus.NONE, ErrorStatus.INVALID_ARGUMENT]


def test_DOM_13_LIFE_2_a_buffer_freed_during_an_execution_lives_until_that_is_done(driver: Driver, start: Any) -> None:
    given = Executing(driver, TENSORS["float32"])
    source, target = given.filled([0], [0]), given.buffer([0], [0])
    held = Held(relus(given.tensor))
    number = given.model.model_id
    models = driver.session.models
    models.insert(replace(models.lookup(number), program=held), number)  # type: ignore[type-var]
    quota = driver.session.quota
    request = Request((in_buffer(0),), (in_buffer(1),), (source.pool, target.pool))
    before = quota.charged_bytes
    running = start(given.model.execute_request, request)
    assert held.begun.wait(LIMIT_S)
    source.close()
    target.close()
    assert quota.charged_bytes == before
    held.go.set()
    assert running.result(LIMIT_S).shapes == (OutputShape(SHAPE),)
    until(lambda: quota.charged_bytes == before - 2 * given.size)


def test_a_buffer_outlives_the_model_that_it_was_made_for(driver: Driver) -> None:
    given = Executing(driver, TENSORS["float32"])
    buffer = given.filled([0], [0])
    given.model.close()
    assert np.array_equal(buffer.array(), given.content)


def test_BUR_18_a_request_with_a_buffer_is_executed_synchronously(driver: Driver) -> None:
    given = Executing(driver, TENSORS["float32"])
    buffer = given.buffer([0], [0])
    with given.model.request_burst() as burst:
        sent = burst.channel.requests.counters()
        burst.execute_request(given.request([None], [buffer.token]))
        assert burst.channel.requests.counters() == sent
    assert np.array_equal(buffer.array(), given.content)


def test_a_late_reply_to_an_allocation_is_released(driver: Driver) -> None:
    model = driver.prepare(relus(TENSORS["float32"]))
    with driver.session._send_lock, pytest.raises(MissedDeadlineTransient):  # so that no reply is sent before
        driver.device.allocate(inputs=[(model, 0)], timeout=0)
    driver.device.supported_operations(relus(TENSORS["float32"]))  # replies are sent in order
    until(lambda: driver.session.buffers._by_token == {})


# ------------------------------------------------------------------------------------------------ overlaps and padding


def constant_model() -> Model:
    """Return ADD(input, a constant in pool 0 at 64)."""
    tensor = Operand(F32, (4,))
    constant = replace(tensor, lifetime=LifeTime.CONSTANT_REFERENCE, location=DataLocation(0, 64, 16))
    model = one_operation(OperationType.ADD, [tensor, tensor, 0], tensor)
    operands = list(model.main.operands)
    operands[1] = constant
    return replace(model, main=replace(model.main, operands=tuple(operands), input_indexes=(0,)))


@pytest.mark.parametrize("protection", [Protection.WRITE, Protection.READ_WRITE])
def test_N_RQX_13_constants_are_recognized_in_another_mapping_of_their_bytes(
    driver: Driver, protection: Protection
) -> None:
    shared = driver.memory(8192)
    with FileMemory.from_fd(shared.fileno(), 4096, offset=4096) as constants:
        model = driver.prepare(replace(constant_model(), pools=(constants,)))
    with FileMemory.from_fd(shared.fileno(), 200, offset=4100, protection=protection) as part:
        request = Request((in_pool(0, 16),), (in_pool(1, 16),), (driver.memory(16), part))
        model.execute_request(request)
        over = RequestArgument(location=DataLocation(1, 60, 16))
        fails(InvalidArgument, model, replace(request, outputs=(over,)), "N-RQX-13")


@pytest.mark.parametrize(("offset", "is_over"), [(48, False), (49, True), (64, True), (79, True), (80, False)])
def test_N_RQX_13_EXE_10_an_output_that_overlaps_a_constant_is_rejected(
    driver: Driver, offset: int, is_over: bool
) -> None:
    shared = driver.memory(128)
    model = driver.prepare(replace(constant_model(), pools=(shared,)))
    output = RequestArgument(location=DataLocation(1, offset, 16))
    request = Request((in_pool(0, 16),), (output,), (driver.memory(16), shared))
    if is_over:
        fails(InvalidArgument, model, request, "N-RQX-13")
    else:
        model.execute_request(request)


def test_N_RQX_2_an_unused_pool_is_valid_and_an_index_out_of_range_is_not(driver: Driver) -> None:
    given = Executing(driver, TENSORS["float32"])
    request = given.request([None], [None])
    given.model.execute_request(replace(request, pools=(*request.pools, driver.memory(1))))
    for index in (len(request.pools), 2**31):
        bad = replace(request, inputs=(in_pool(index, given.size),))
        fails(InvalidArgument, given.model, bad, "N-RQX-2")


@pytest.mark.parametrize("place", [(1, 32, 0), (0, 32, 1), (2**32 - 1, 32, 2**32 - 1)])
def test_N_RQX_3_an_argument_beyond_its_pool_is_rejected(driver: Driver, place: tuple[int, int, int]) -> None:
    given = Executing(driver, TENSORS["float32"])
    request = given.request([None], [None])
    bad = replace(request, outputs=(RequestArgument(location=DataLocation(1, *place)),))
    fails(InvalidArgument, given.model, bad, "N-RQX-3")


def test_EXE_11_N_FEN_3_N_FEN_4_padding_does_not_hold_results(driver: Driver) -> None:
    given = Executing(driver, with_extent(TENSORS["float32"], 0))
    request = given.request([None], [None])
    sink = driver.memory(64)
    sink.view[:] = b"\xa5" * 64
    source = in_pool(0, given.size, SHAPE)
    for padding, wanted in ((0, 31), (1, 31), (33, 31)):
        output = RequestArgument(location=DataLocation(1, 0, wanted, padding))
        with pytest.raises(NnfmqError) as caught:
            given.model.execute_request(Request((source,), (output,), (request.pools[0], sink)))
        assert caught.value.status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
        assert caught.value.output_shapes == (OutputShape(SHAPE, False),)  # type: ignore[attr-defined]
    assert bytes(sink.view) == b"\xa5" * 64
    output = RequestArgument(location=DataLocation(1, 0, 32, 32))
    given.model.execute_request(Request((source,), (output,), (request.pools[0], sink)))
    assert bytes(sink.view[32:]) == b"\xa5" * 32


def test_MEM_6_arguments_with_the_preferred_layout_and_padding_are_accepted(driver: Driver) -> None:
    given = Executing(driver, TENSORS["float32"])
    places = []
    for kind in ("input", "output"):
        wanted = given.model.memory_preference(kind, 0)  # type: ignore[arg-type]
        assert (wanted.alignment, wanted.padding) == (64, 64)
        places.append(DataLocation(0, len(places) * wanted.alignment, given.size, -given.size % wanted.padding))
    memory = driver.memory(128)
    memory.view[:32] = given.content.tobytes()
    arguments = [(RequestArgument(location=place),) for place in places]
    given.model.execute_request(Request(*arguments, (memory,)))
    assert bytes(memory.view) == given.content.tobytes() + bytes(32) + given.content.tobytes() + bytes(32)
    with pytest.raises(InvalidArgument, match="there is no output 1"):
        given.model.memory_preference("output", 1)


# ------------------------------------------------------------------------------------------------ files


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC)
    os.ftruncate(fd, 4096)
    yield fd
    os.close(fd)


def test_MEM_1_only_the_part_of_a_file_that_a_request_uses_is_charged(driver: Driver, file: int) -> None:
    given, quota = Executing(driver, TENSORS["float32"]), driver.session.quota
    os.ftruncate(file, 1 << 50)
    os.pwrite(file, given.content.tobytes(), 1 << 40)
    with FileMemory.from_fd(file, 1 << 30, offset=1 << 40) as memory:
        request = replace(given.request([None], [None]), pools=(memory, *given.memories[1:]))
        quota.limit_bytes = quota.charged_bytes + 2 * given.size + 31
        fails(ResourceExhaustedTransient, given.model, request)
        quota.limit_bytes += 1
        held = quota.charged_bytes
        given.model.execute_request(request)
        until(lambda: quota.charged_bytes == held)
    assert bytes(given.memories[1].view) == given.content.tobytes()


def test_MEM_1_constants_in_a_file_are_read_when_the_model_is_prepared(driver: Driver, file: int) -> None:
    os.pwrite(file, np.array([1, 2, 3, 4], np.float32).tobytes(), 100 + 64)
    with FileMemory.from_fd(file, 128, offset=100, protection=Protection.READ) as memory:
        model = driver.prepare(replace(constant_model(), pools=(memory,)))
    os.ftruncate(file, 0)
    assert model.execute(np.zeros(4, np.float32))[0].tolist() == [1, 2, 3, 4]


def test_MEM_4_constants_in_write_only_memory_are_rejected(driver: Driver, file: int) -> None:
    memory = FileMemory.from_fd(file, 128, protection=Protection.WRITE)
    with memory, pytest.raises(InvalidArgument, match="MEM-4"):
        driver.prepare(replace(constant_model(), pools=(memory,)))


def test_a_sparse_file_of_a_model_cannot_exceed_the_quota(driver: Driver, file: int) -> None:
    os.ftruncate(file, 1 << 50)
    with FileMemory.from_fd(file, 1 << 50) as memory, pytest.raises(ResourceExhaustedPersistent):
        driver.prepare(replace(constant_model(), pools=(memory,)))
    until(lambda: driver.session.quota.charged_bytes == 0)


def test_a_result_that_does_not_fit_on_the_disk_is_a_failure(driver: Driver, file: int) -> None:
    given = Executing(driver, TENSORS["float32"])
    with FileMemory.from_fd(file, 64) as memory:
        sealed = os.memfd_create("sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(sealed, 64)
        fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        request = given.request([None], [None])
        with FileMemory.from_fd(sealed, 64) as read_only:
            os.close(sealed)
            bad = replace(request, outputs=(in_pool(3, given.size),), pools=(*request.pools, read_only))
            fails(GeneralFailure, given.model, bad, "cannot be written")
        good = replace(request, outputs=(in_pool(3, given.size),), pools=(*request.pools, memory))
        given.model.execute_request(good)
        assert bytes(memory.view[: given.size]) == given.content.tobytes()


def test_the_tokens_have_the_hal_s_values() -> None:
    assert MAX_TOKEN == 2**31 - 1
