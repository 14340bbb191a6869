"""Managed buffers of a driver process as inputs and outputs in every execution mode: roles, states, known shapes."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest
from support.drivers import LIMIT_S, until
from support.execution_modes import (
    request_asynchronously,
    request_fenced,
    request_in_an_aidl_burst,
    request_reusable,
    request_reusable_and_fenced,
)
from support.models import add_model, gather_model, relu_model, relus_model

import nnfmq
from nnfmq.base.file_memory import FileMemory
from nnfmq.base.memory import Memory
from nnfmq.hal.errors import GeneralFailure, InvalidArgument, MissedDeadline, NnfmqError
from nnfmq.hal.types import DataLocation, FenceState, Request, RequestArgument

Mode = Callable[[nnfmq.PreparedModel, Request], object]
FOUR = np.array([1, 2, 3, 4], np.float32)
IN_BUFFER = {shape: RequestArgument(location=DataLocation(1), dimensions=shape) for shape in ((), (4,), (6,))}
IN_MEMORY = RequestArgument(location=DataLocation(0, 0, 16))


MODES: dict[str, Mode] = {
    "EXE-3 synchronous": lambda model, request: model.execute_request(request, timeout=LIMIT_S),
    "EXE-5 asynchronous": request_asynchronously,
    "FEN-1 fenced": request_fenced,
    "RUX-1 reusable": request_reusable,
    "RUX-1 reusable and fenced": request_reusable_and_fenced,
    "BUR-19 AIDL burst": request_in_an_aidl_burst,
}
in_every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())


class Setting:
    """A RELU of unspecified dimension, a memory, and buffers for both of its roles."""

    def __init__(self, client: nnfmq.Client, stack: ExitStack, shape: tuple[int, ...] = (4,)) -> None:
        self._stack = stack
        self.device = client.device("reference")
        self.model = stack.enter_context(self.device.prepare(relu_model(shape)))
        self.memory = stack.enter_context(Memory.create(16))
        self.memory.view[:] = (-FOUR).tobytes()

    def buffer(self, *dimensions: int) -> nnfmq.Buffer:
        """Return a buffer that may be input and output."""
        role = [(self.model, 0)]
        return self._stack.enter_context(self.device.allocate(inputs=role, outputs=role, dimensions=dimensions))

    def written(self, buffer: nnfmq.Buffer, shape: tuple[int, ...] = ()) -> Request:
        """Return the request that writes a buffer, from the memory."""
        place = RequestArgument(location=DataLocation(0, 0, 16), dimensions=(4,))
        return Request((place,), (IN_BUFFER[shape],), (self.memory, buffer.pool))

    def read(self, buffer: nnfmq.Buffer) -> Request:
        """Return the request that reads a buffer, into the memory."""
        return Request((IN_BUFFER[()],), (IN_MEMORY,), (self.memory, buffer.pool))


@pytest.fixture
def known(client: nnfmq.Client, resources: ExitStack) -> Setting:
    return Setting(client, resources)


@pytest.fixture
def opened(client: nnfmq.Client, resources: ExitStack) -> Setting:
    return Setting(client, resources, (0,))


def is_lost(buffer: nnfmq.Buffer) -> bool:
    """Return whether client and driver both report the buffer as uninitialized."""
    with Memory.create(16) as target:
        try:
            buffer.copy_to(target)
        except GeneralFailure as error:
            return "DOM-5" in str(error) and buffer.dimensions is None
    return False


@in_every_mode
def test_DOM_5_DOM_6_a_new_buffer_is_only_an_output_until_it_is_written(known: Setting, mode: Mode) -> None:
    buffer = known.buffer()
    with pytest.raises(GeneralFailure, match="DOM-5"):
        mode(known.model, known.read(buffer))
    assert is_lost(buffer)
    mode(known.model, known.written(buffer))
    assert buffer.array().tolist() == [0, 0, 0, 0]
    buffer.copy_from(FOUR)
    mode(known.model, known.read(buffer))
    assert np.frombuffer(known.memory.view, np.float32).tolist() == FOUR.tolist()


@in_every_mode
def test_DOM_11_the_client_knows_the_shape_that_was_written(opened: Setting, mode: Mode) -> None:
    buffer = opened.buffer()
    buffer.copy_from(np.ones(6, np.float32))
    assert buffer.dimensions == (6,)
    mode(opened.model, opened.written(buffer, (4,)))
    assert buffer.dimensions == (4,)
    assert buffer.array().tolist() == [0, 0, 0, 0]


@in_every_mode
def test_DOM_6_a_tensor_is_copied_from_buffer_to_buffer(opened: Setting, mode: Mode) -> None:
    buffers = [opened.buffer(4), opened.buffer(4)]
    buffers[0].copy_from(FOUR)
    inside = RequestArgument(location=DataLocation(0)), RequestArgument(location=DataLocation(1), dimensions=(4,))
    mode(opened.model, Request((inside[0],), (inside[1],), tuple(buffer.pool for buffer in buffers)))
    assert buffers[1].array().tolist() == FOUR.tolist()


@in_every_mode
def test_DOM_9_a_buffer_is_used_only_in_its_roles(
    known: Setting, client: nnfmq.Client, resources: ExitStack, mode: Mode
) -> None:
    other = resources.enter_context(known.device.prepare(relu_model()))
    buffer = known.buffer()
    buffer.copy_from(FOUR)
    for request in (known.read(buffer), known.written(buffer)):
        with pytest.raises(InvalidArgument, match="DOM-9"):
            mode(other, request)


class TwoOfEach:
    """Two RELUs of four floats in one model, each with an input and an output, and a memory for every one of them."""

    def __init__(self, client: nnfmq.Client, stack: ExitStack) -> None:
        self._stack = stack
        self.device = client.device("reference")
        self.model = stack.enter_context(self.device.prepare(relus_model(2, (4,))))
        self.memories = [stack.enter_context(Memory.create(16)) for _ in range(4)]
        for number, memory in enumerate(self.memories[:2], 1):
            memory.view[:] = (number * FOUR).tobytes()

    def buffer(self, inputs: list[int], outputs: list[int]) -> nnfmq.Buffer:
        """Return a buffer for these inputs and outputs, which holds 100 times the first input."""
        roles = [[(self.model, index) for index in indexes] for indexes in (inputs, outputs)]
        made = self._stack.enter_context(self.device.allocate(inputs=roles[0], outputs=roles[1]))
        made.copy_from(100 * FOUR)
        return made

    def request(self, buffer: nnfmq.Buffer, inputs: list[int], outputs: list[int]) -> Request:
        """Return a request that has the buffer at some inputs and outputs, and the memories at the others."""
        inside, pools = RequestArgument(location=DataLocation(4)), (*self.memories, buffer.pool)
        places = [RequestArgument(location=DataLocation(index, 0, 16)) for index in range(4)]
        return Request(
            tuple(inside if index in inputs else places[index] for index in range(2)),
            tuple(inside if index in outputs else places[2 + index] for index in range(2)),
            pools,
        )

    def results(self) -> list[list[float]]:
        """Return what the memories of the outputs hold."""
        return [np.frombuffer(memory.view, np.float32).tolist() for memory in self.memories[2:]]


@pytest.fixture
def pair(client: nnfmq.Client, resources: ExitStack) -> TwoOfEach:
    return TwoOfEach(client, resources)


@in_every_mode
def test_N_DEX_3_a_buffer_is_used_only_at_its_own_input_and_output(pair: TwoOfEach, mode: Mode) -> None:
    for own, other in ((0, 1), (1, 0)):
        for is_input in (True, False):
            buffer = pair.buffer([own] if is_input else [], [] if is_input else [own])
            used = [([own], []), ([other], [])] if is_input else [([], [own]), ([], [other])]
            mode(pair.model, pair.request(buffer, *used[0]))
            with pytest.raises(InvalidArgument, match="DOM-9"):
                mode(pair.model, pair.request(buffer, *used[1]))


@in_every_mode
def test_N_DEX_6_one_buffer_is_several_inputs_but_neither_two_outputs_nor_input_and_output(
    pair: TwoOfEach, mode: Mode
) -> None:
    for inputs, outputs in (([0], [0]), ([0], [1]), ([1], [0]), ([], [0, 1]), ([0, 1], [0, 1])):
        buffer = pair.buffer([0, 1], [0, 1])
        with pytest.raises(InvalidArgument, match="N-DEX-6"):
            mode(pair.model, pair.request(buffer, inputs, outputs))
    buffer = pair.buffer([0, 1], [0, 1])
    mode(pair.model, pair.request(buffer, [0, 1], []))
    assert pair.results() == [(100 * FOUR).tolist()] * 2


@in_every_mode
def test_DOM_7_N_DXX_1_a_failed_execution_invalidates_its_output_buffer(
    client: nnfmq.Client, resources: ExitStack, mode: Mode
) -> None:
    device = client.device("reference")
    model = resources.enter_context(device.prepare(gather_model()))
    buffer = resources.enter_context(device.allocate(outputs=[(model, 0)]))
    source = resources.enter_context(Memory.create(20))
    source.view[:] = FOUR.tobytes() + (99).to_bytes(4, "little")  # an index out of range
    places = [RequestArgument(location=DataLocation(0, *place)) for place in ((0, 16), (16, 4))]
    buffer.copy_from(np.ones(1, np.float32))
    with pytest.raises(GeneralFailure):
        mode(model, Request(tuple(places), (IN_BUFFER[()],), (source, buffer.pool)))
    assert is_lost(buffer)


@in_every_mode
def test_DOM_7_N_DXX_1_an_execution_without_a_valid_input_invalidates_its_output_buffer(
    known: Setting, mode: Mode
) -> None:
    """The driver looks at the content of the input before it begins to write the output."""
    source, target = known.buffer(), known.buffer()
    target.copy_from(FOUR)
    whole = [RequestArgument(location=DataLocation(pool)) for pool in range(2)]
    with pytest.raises(GeneralFailure, match=f"buffer {source.token} is uninitialized"):
        mode(known.model, Request((whole[0],), (whole[1],), (source.pool, target.pool)))
    assert is_lost(target)


def test_DOM_7_a_copy_from_a_memory_that_is_too_short_invalidates_the_buffer(known: Setting) -> None:
    buffer, fd = known.buffer(), os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
    buffer.copy_from(FOUR)
    os.ftruncate(fd, 16)
    with FileMemory.from_fd(fd, 16) as memory:
        os.ftruncate(fd, 15)
        os.close(fd)
        with pytest.raises(InvalidArgument):
            buffer.copy_from(memory)
    assert is_lost(buffer)


def test_DOM_13_N_DXX_2_a_reusable_execution_cannot_use_a_released_buffer(known: Setting, resources: ExitStack) -> None:
    source, target = known.buffer(), known.buffer()
    source.copy_from(FOUR)
    for request, buffer in ((known.read(source), source), (known.written(target), target)):
        execution = resources.enter_context(known.model.create_reusable_request(request))
        execution.compute(timeout=LIMIT_S)
        buffer.close()
        with pytest.raises(InvalidArgument, match="was released"):
            execution.compute(timeout=LIMIT_S)


@in_every_mode
def test_DOM_7_a_rejected_request_invalidates_its_output_buffer(known: Setting, mode: Mode) -> None:
    buffer = known.buffer()
    buffer.copy_from(FOUR)
    request = known.written(buffer)
    with pytest.raises(InvalidArgument, match="N-REQ-1"):
        mode(known.model, Request((), request.outputs, request.pools))
    assert is_lost(buffer)


# -- what does not even begin -----------------------------------------------------------------------------------------


@pytest.fixture
def own(resources: ExitStack) -> nnfmq.Fence:
    return resources.enter_context(nnfmq.Fence.create())


Launch = Callable[..., nnfmq.FencedExecution[object]]


def launched(known: Setting, resources: ExitStack, is_reusable: bool) -> tuple[nnfmq.Buffer, Launch]:
    """Return a buffer with a content, and the launch of an execution that writes it."""
    buffer = known.buffer()
    buffer.copy_from(FOUR)
    request = known.written(buffer)
    if is_reusable:
        return buffer, resources.enter_context(known.model.create_reusable_request(request)).compute_fenced
    return buffer, lambda **options: known.model.execute_request_fenced(request, **options)


of_both_kinds = pytest.mark.parametrize("is_reusable", [False, True], ids=["fenced", "reusable and fenced"])


@of_both_kinds
def test_DOM_7_FEN_5_a_failed_fence_invalidates_the_output_buffer(
    known: Setting, resources: ExitStack, own: nnfmq.Fence, is_reusable: bool
) -> None:
    buffer, launch = launched(known, resources, is_reusable)
    with launch(wait_for=[own]) as execution:
        own.fail()
        with pytest.raises(GeneralFailure, match="in error"):
            execution.result(LIMIT_S)
        assert is_lost(buffer)
    buffer.copy_from(FOUR)
    with pytest.raises(InvalidArgument, match="N-RQX-15"):
        launch(wait_for=[own])
    assert is_lost(buffer)


@of_both_kinds
def test_DOM_7_FEN_6_a_deadline_during_the_wait_for_fences_invalidates_the_output_buffer(
    known: Setting, resources: ExitStack, own: nnfmq.Fence, is_reusable: bool
) -> None:
    buffer, launch = launched(known, resources, is_reusable)
    with launch(wait_for=[own], timeout=0.01) as execution:
        assert execution.wait(LIMIT_S) is FenceState.ERROR
        with pytest.raises(MissedDeadline):
            execution.result()
    assert is_lost(buffer)


def late(known: Setting, request: Request, mode: str, resources: ExitStack) -> None:
    if mode == "EXE-5 asynchronous":
        known.model.execute_request_async(request, timeout=0).result(LIMIT_S)
    elif mode == "RUX-4 reusable":
        # Open until the end: if it were closed before the driver reads it, the execution could not fail.
        resources.enter_context(known.model.create_reusable_request(request)).compute(timeout=0)
    else:
        known.model.execute_request(request, timeout=0)


@pytest.mark.parametrize("mode", ["EXE-3 synchronous", "EXE-5 asynchronous", "RUX-4 reusable"])
def test_DOM_7_QOS_2_a_missed_deadline_invalidates_the_output_buffer(
    known: Setting, mode: str, resources: ExitStack
) -> None:
    buffer = known.buffer()
    buffer.copy_from(FOUR)
    with pytest.raises(NnfmqError) as caught:
        late(known, known.written(buffer), mode, resources)
    assert isinstance(caught.value, MissedDeadline)
    until(lambda: is_lost(buffer), "the driver has rejected the abandoned execution")


def test_reading_execution_info_too_early_does_not_fail_the_execution(
    opened: Setting, resources: ExitStack, own: nnfmq.Fence
) -> None:
    buffer = opened.buffer()
    with opened.model.execute_request_fenced(opened.written(buffer, (4,)), wait_for=[own]) as execution:
        with pytest.raises(GeneralFailure, match="FEN-9"):
            execution.info()
        own.signal()
        assert execution.wait(LIMIT_S) is FenceState.SIGNALED
        assert buffer.array().tolist() == [0, 0, 0, 0]


def test_a_chain_of_fenced_executions_passes_a_buffer_on(
    client: nnfmq.Client, known: Setting, resources: ExitStack, own: nnfmq.Fence
) -> None:
    """The application neither waits in between nor sees the tensor before the end."""
    adding = resources.enter_context(known.device.prepare(add_model()))
    roles = [(known.model, 0), (adding, 0), (adding, 1)]
    outputs = [(known.model, 0), (adding, 0)]
    first, second = (resources.enter_context(known.device.allocate(inputs=roles, outputs=outputs)) for _ in range(2))
    first.copy_from(FOUR)
    inside = [RequestArgument(location=DataLocation(index)) for index in range(2)]
    pools = (first.pool, second.pool)
    fence: nnfmq.Fence = own
    for source, target in ((0, 1), (1, 0), (0, 1)):
        request = Request((inside[source],) * 2, (inside[target],), pools)
        execution = resources.enter_context(adding.execute_request_fenced(request, wait_for=[fence]))
        fence = execution.fence
    own.signal()
    assert execution.wait(LIMIT_S) is FenceState.SIGNALED
    assert second.array().tolist() == (8 * FOUR).tolist()
