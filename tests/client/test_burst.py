"""A burst as the application uses it, against a real session over a socketpair in the same process."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support import models
from support.executors import LIMIT_S, Held, until

from nnfmq.base.memory import Memory
from nnfmq.client.burst.burst import Burst
from nnfmq.client.burst.channel import SlotAllocator
from nnfmq.client.connection.client import Client
from nnfmq.client.connection.connection import Connection
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.driver.execution.prepared_model import DriverPreparedModel
from nnfmq.driver.session.session import Session
from nnfmq.hal.errors import (
    BadState,
    DeadObject,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    OutputInsufficientSize,
    ProtocolError,
    error_for_status,
)
from nnfmq.hal.timing import NO_TIMING
from nnfmq.hal.types import (
    DataLocation,
    ExecutionConfig,
    LoopTimeoutDurationNs,
    MeasureTiming,
    OutputShape,
    Request,
    RequestArgument,
)
from nnfmq.serialize.codec import encode_request
from nnfmq.serialize.execution_stats import REQUEST_RECEIVED, RESULT_SENT

Start = Callable[..., Future[Any]]
ONE, TEN = np.array([1, 2, 3, 4], np.float32), np.array([10, 20, 30, 40], np.float32)
SUM = [11, 22, 33, 44]


@pytest.fixture
def burst(adding: PreparedModel) -> Iterator[Burst]:
    with adding.burst() as burst:
        yield burst


@pytest.fixture
def held(adding: PreparedModel, real: tuple[Connection, Session]) -> Iterator[Held]:
    """Makes the driver's executions wait. A test requests this fixture before `burst`."""
    model = models.add_model()
    held = Held(model)
    real[1].models.insert(DriverPreparedModel(model, held), adding.model_id)  # type: ignore[arg-type]
    yield held
    held.go.set()


# ------------------------------------------------------------------------------------------------ slots


@pytest.fixture
def memories(resources: ExitStack) -> list[Memory]:
    return [resources.enter_context(Memory.create(1)) for _ in range(4)]


def test_slots_are_numbered_from_zero(memories: list[Memory]) -> None:
    table = SlotAllocator()
    assert [table.add(memory) for memory in memories] == [0, 1, 2, 3]
    assert table.get_memories([2, 0, 2]) == [memories[2], memories[0], memories[2]]


def test_freed_slots_are_reused_last_in_first_out(memories: list[Memory]) -> None:
    table = SlotAllocator()
    for memory in memories[:3]:
        table.add(memory)
    for slot in (0, 2):
        table.free(slot)
    assert [table.add(memories[3]) for _ in range(3)] == [2, 0, 3]


def test_freeing_an_unknown_slot_or_one_twice_frees_no_number(memories: list[Memory]) -> None:
    table = SlotAllocator()
    table.add(memories[0])
    for slot in (0, 0, 7, -1):
        table.free(slot)
    assert [table.add(memory) for memory in memories[:2]] == [0, 1]


@pytest.mark.parametrize("slots", [[1], [-1], [0, 2**31 - 1]])
def test_a_slot_that_is_out_of_range_or_freed_names_no_memory(slots: list[int], memories: list[Memory]) -> None:
    table = SlotAllocator()
    table.add(memories[0])
    table.free(table.add(memories[1]))
    with pytest.raises(InvalidArgument, match=f"slot {slots[-1]} has no memory in this burst"):
        table.get_memories(slots)


# ------------------------------------------------------------------------------------------------ executing


@pytest.mark.parametrize("window_us", [0, 50, 1000])
def test_a_burst_returns_new_arrays_each_time(window_us: int, adding: PreparedModel) -> None:
    with adding.burst(polling_window_us=window_us) as burst:
        results = [burst.execute(ONE * number, TEN)[0] for number in range(20)]
    for number, result in enumerate(results):
        assert result.tolist() == (ONE * number + TEN).tolist()


def test_a_burst_whose_arrays_are_used_in_place_copies_nothing(burst: Burst) -> None:
    burst.inputs[0][:] = ONE
    burst.inputs[1][:] = TEN
    outputs = burst.execute(out=burst.outputs)
    assert outputs is burst.outputs
    assert outputs[0].tolist() == SUM


def test_a_burst_without_inputs_says_how_to_give_them(burst: Burst) -> None:
    with pytest.raises(InvalidArgument, match=r"never written: write them, or pass 2 arrays \('input 0', 'input 1'\)"):
        burst.execute()
    with pytest.raises(InvalidArgument, match="the model has 2 inputs"):
        burst.execute(ONE)
    with pytest.raises(InvalidArgument, match="never written"):
        burst.execute(out=burst.outputs)
    burst.execute(ONE, TEN)
    assert burst.execute()[0].tolist() == SUM


def test_a_burst_takes_no_inputs_of_its_previous_user(burst: Burst) -> None:
    burst.execute(ONE, TEN)
    burst.discard_inputs()
    with pytest.raises(InvalidArgument, match="never written"):
        burst.execute()
    assert burst.inputs[0].tolist() == ONE.tolist()
    assert burst.execute()[0].tolist() == SUM


def test_a_burst_fills_the_arrays_that_it_is_given(burst: Burst) -> None:
    out = np.zeros(4, np.float32)
    assert burst.execute(ONE, TEN, out=[out])[0] is out
    assert out.tolist() == SUM


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((ONE,), r"2 inputs \('input 0', 'input 1'\); 1 was given"),
        ((ONE, TEN[:3]), "input 'input 1' has shape 4; the given array has 3"),
        ((ONE, np.zeros(4, np.complex64)), "input 'input 1' holds float32; the given array is complex64"),
    ],
)
def test_arrays_that_do_not_fit_are_rejected_and_the_burst_stays_usable(
    given: tuple[Any, ...], said: str, burst: Burst
) -> None:
    with pytest.raises(InvalidArgument, match=said):
        burst.execute(*given)
    assert burst.execute(ONE, TEN)[0].tolist() == SUM


def test_BUR_3_the_queues_have_1024_records_each_in_shared_memory(burst: Burst) -> None:
    for queue in (burst.channel.requests, burst.channel.results):
        assert (queue.count, queue.quantum) == (1024, 24)
        assert queue.descriptor.quantum == 24
        assert fcntl.fcntl(queue.memory.fileno(), fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    assert burst.channel.requests.memory is not burst.channel.results.memory


@pytest.mark.parametrize("window_us", [0, 50, 10_000])
def test_BUR_4_a_burst_works_with_any_polling_window(window_us: float, adding: PreparedModel) -> None:
    with adding.burst(polling_window_us=window_us) as burst:
        assert [burst.execute(ONE, TEN)[0].tolist() for _ in range(3)] == [SUM] * 3


def test_several_bursts_of_one_model_are_independent(adding: PreparedModel) -> None:
    with adding.burst() as first, adding.burst() as second:
        first.inputs[0][:] = 5
        assert second.execute(ONE, TEN)[0].tolist() == SUM
        assert (first.inputs[0] == 5).all()


def test_API_11_BUR_16_a_second_thread_is_rejected_while_one_executes(
    held: Held, adding: PreparedModel, start: Start
) -> None:
    with adding.burst() as burst:
        waiting = start(burst.execute, ONE, TEN)
        assert held.begun.wait(LIMIT_S)
        with pytest.raises(BadState, match="another thread"):
            burst.execute(TEN, TEN)
        held.go.set()
        assert waiting.result(LIMIT_S)[0].tolist() == SUM


@pytest.mark.parametrize("timeout", [0, 0.03])
def test_an_execution_after_a_timeout_gets_its_own_result(timeout: float, held: Held, adding: PreparedModel) -> None:
    with adding.burst() as burst:
        with pytest.raises(MissedDeadline, match="passed before"):
            burst.execute(ONE, TEN, timeout=timeout)
        held.go.set()  # whether the driver has begun it, or has seen that its deadline had passed
        assert burst.execute(TEN, TEN)[0].tolist() == [20, 40, 60, 80]
        assert burst.execute(ONE, ONE)[0].tolist() == [2, 4, 6, 8]


def test_the_inputs_of_an_execution_that_timed_out_are_not_written_until_it_is_done(
    held: Held, adding: PreparedModel
) -> None:
    with adding.burst() as burst:
        for given in (ONE, TEN):
            with pytest.raises(MissedDeadline):
                burst.execute(given, TEN, timeout=0.02)
        assert burst.inputs[0].tolist() == ONE.tolist()
        held.go.set()
        assert burst.execute(TEN, TEN)[0].tolist() == [20, 40, 60, 80]


# ------------------------------------------------------------------------------------------------ failures


class Failing:
    """A program whose executions fail with a given error."""

    def __init__(self, make: Callable[[], Exception]) -> None:
        self._make = make

    def bind(self, _inputs: Sequence[Any], _outputs: Sequence[Any]) -> Any:
        return self

    def run(self, _limits: Any) -> Any:
        raise self._make()


@pytest.mark.parametrize("status", [s for s in ErrorStatus if s not in (ErrorStatus.NONE, ErrorStatus.DEAD_OBJECT)])
def test_a_failed_execution_raises_the_exact_status_and_text_that_the_packet_could_not_carry(
    status: ErrorStatus, adding: PreparedModel, real: tuple[Connection, Session]
) -> None:
    def make() -> Exception:
        error = error_for_status(status, "what went wrong")
        if isinstance(error, OutputInsufficientSize):
            error.output_shapes = (OutputShape((4,), False),)
        return error

    failing = Failing(make)
    real[1].models.insert(DriverPreparedModel(models.add_model(), failing), adding.model_id)  # type: ignore[arg-type]
    expected = type(error_for_status(status, ""))
    with adding.burst() as burst, pytest.raises(expected, match="what went wrong"):
        burst.execute(ONE, TEN)


class Lying(Failing):
    """A program whose executions report `shapes`, whatever was computed."""

    def __init__(self, *shapes: OutputShape) -> None:
        self._shapes = shapes

    def run(self, _limits: Any) -> Any:
        return self._shapes


TRUE = OutputShape((4,))


@pytest.mark.parametrize("shapes", [(OutputShape((3,)),), (TRUE, TRUE), (OutputShape((4,), False),)])
def test_VAL_7_a_burst_rejects_impossible_shapes(
    shapes: tuple[OutputShape, ...], adding: PreparedModel, real: tuple[Connection, Session]
) -> None:
    program: Any = Lying(*shapes)
    real[1].models.insert(DriverPreparedModel(models.add_model(), program), adding.model_id)
    with adding.burst() as burst, pytest.raises(ProtocolError):
        burst.execute(ONE, TEN)


@pytest.mark.parametrize("shapes", [(), (TRUE,)])
def test_VAL_7_a_burst_accepts_a_result_without_shapes_if_all_are_known(
    shapes: tuple[OutputShape, ...], adding: PreparedModel, real: tuple[Connection, Session]
) -> None:
    program: Any = Lying(*shapes)
    real[1].models.insert(DriverPreparedModel(models.add_model(), program), adding.model_id)
    with adding.burst() as burst:
        assert [burst.execute(ONE, TEN)[0].shape for _ in range(3)] == [(4,)] * 3


def test_an_unexpected_exception_of_a_kernel_fails_one_execution(
    adding: PreparedModel, real: tuple[Connection, Session], caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(lambda: ValueError("numpy's"))
    real[1].models.insert(DriverPreparedModel(models.add_model(), failing), adding.model_id)  # type: ignore[arg-type]
    with adding.burst() as burst:
        for _ in range(2):
            with pytest.raises(GeneralFailure, match="a kernel failed: ValueError"):
                burst.execute(ONE, TEN)
    assert "a kernel failed" in caplog.text
    caplog.clear()  # the log records keep the frames alive, and these the memory


def test_BUR_17_a_packet_that_cannot_be_sent_is_executed_synchronously(burst: Burst) -> None:
    burst.channel.requests.send = lambda _packet: False
    assert burst.execute(ONE, TEN)[0].tolist() == SUM
    assert burst.execute(TEN, TEN, measure=True)[0].tolist() == [20, 40, 60, 80]
    assert burst.last.timing.time_on_device_ns > 0


def test_the_exit_of_the_driver_raises_dead_object_during_an_execution_and_after(
    held: Held, adding: PreparedModel, real: tuple[Connection, Session], start: Start
) -> None:
    with adding.burst(polling_window_us=0) as burst:
        waiting = start(burst.execute, ONE, TEN)
        assert held.begun.wait(LIMIT_S)
        until(lambda: burst.channel.results.waiters)
        begin = time.monotonic()
        real[1].stop()
        assert isinstance(waiting.exception(LIMIT_S), DeadObject)
        assert time.monotonic() - begin < 5
        with pytest.raises(DeadObject):
            burst.execute(ONE, TEN)
        held.go.set()


# ------------------------------------------------------------------------------------------------ durations


def test_times_before_the_first_execution_are_an_error(burst: Burst) -> None:
    with pytest.raises(GeneralFailure, match="nothing was executed"):
        _ = burst.last


def test_the_durations_of_the_stages_add_up_to_the_latency(burst: Burst) -> None:
    begin = time.monotonic_ns()
    burst.execute(ONE, TEN)
    last = burst.last
    assert last.latency_ns == last.queue_ns + last.driver_ns + last.engine_ns
    assert min(last.queue_ns, last.driver_ns, last.engine_ns) > 0
    assert last.latency_ns < time.monotonic_ns() - begin
    assert last.timing == NO_TIMING


@pytest.mark.parametrize(("word", "difference_ns"), [(REQUEST_RECEIVED, -(10**9)), (RESULT_SENT, 10**9)])
def test_statistics_of_another_execution_are_not_reported(word: int, difference_ns: int, burst: Burst) -> None:
    burst.execute(ONE, TEN)
    burst.channel.stats.words[word] += difference_ns  # an execution that began earlier, or ended later
    last = burst.last
    assert (last.driver_ns, last.engine_ns) == (0, 0)
    assert last.queue_ns == last.latency_ns > 0


@pytest.fixture
def memory() -> Iterator[Memory]:
    with Memory.create(48) as memory:
        yield memory


def three_parts(memory: Memory, *, pools: int = 1) -> Request:
    """Return a request of `add_model` over one memory, which is given as several pools to make the packet longer."""
    places = [RequestArgument(location=DataLocation(index % pools, 16 * index, 16)) for index in range(3)]
    return Request(tuple(places[:2]), (places[2],), (memory,) * pools)


def assert_complete(burst: Burst) -> None:
    last = burst.last
    assert min(last.driver_ns, last.engine_ns, last.queue_ns) > 0
    assert last.latency_ns == last.queue_ns + last.driver_ns + last.engine_ns


def test_the_durations_are_complete_whatever_packets_the_burst_sends_in_between(burst: Burst, memory: Memory) -> None:
    invalid = replace(three_parts(memory), inputs=three_parts(memory).inputs[:1])  # a packet of another length
    for turn in range(3):
        burst.execute(ONE, TEN)
        assert_complete(burst)
        burst.execute_request(three_parts(memory))
        assert_complete(burst)
        with pytest.raises(InvalidArgument):
            burst.execute_request(invalid)
        burst.execute(ONE, TEN, measure=bool(turn), timeout=LIMIT_S)
        assert_complete(burst)


def test_the_durations_of_a_result_that_is_an_error_are_its_own(burst: Burst, memory: Memory) -> None:
    burst.execute(ONE, TEN)
    before = burst.last
    with pytest.raises(InvalidArgument):
        burst.execute_request(replace(three_parts(memory), inputs=()))
    assert burst.last != before
    assert burst.last.driver_ns > 0


def test_the_durations_of_an_execution_are_kept_while_a_request_waits(
    held: Held, adding: PreparedModel, start: Start, memory: Memory
) -> None:
    held.go.set()
    with adding.burst() as burst:
        burst.execute(ONE, TEN)
        held.go.clear()
        held.begun.clear()
        waiting = start(burst.execute_request, three_parts(memory))
        assert held.begun.wait(LIMIT_S)
        assert_complete(burst)
        held.go.set()
        waiting.result(LIMIT_S)


class Interrupted(Exception):
    """As a signal handler raises it."""


@pytest.mark.parametrize("is_received", [False, True])
def test_the_durations_are_complete_after_a_request_that_a_signal_has_interrupted(
    is_received: bool, burst: Burst, memory: Memory
) -> None:
    receive = burst.channel.results.receive

    def interrupted(deadline_ns: int | None, window_ns: int) -> None:
        if is_received:
            receive(deadline_ns, window_ns)
        raise Interrupted

    burst.channel.results.receive = interrupted
    with pytest.raises(Interrupted):
        burst.execute_request(three_parts(memory, pools=3))
    burst.channel.results.receive = receive
    burst.execute(ONE, TEN)
    assert_complete(burst)


def test_the_durations_are_complete_after_a_request_whose_wait_ended_early(
    held: Held, adding: PreparedModel, memory: Memory
) -> None:
    with adding.burst() as burst:
        with pytest.raises(MissedDeadline):
            burst.execute_request(three_parts(memory), timeout=0.01)
        held.go.set()
        burst.execute(ONE, TEN)
        assert_complete(burst)


def test_a_burst_without_memory_has_the_durations_of_its_requests(adding: PreparedModel, memory: Memory) -> None:
    with adding.request_burst() as burst:
        for _ in range(2):
            burst.execute_request(three_parts(memory))
            assert_complete(burst)
            burst.execute_request(three_parts(memory, pools=3), ExecutionConfig(measure=MeasureTiming.YES))
            assert_complete(burst)
            assert burst.last.timing.time_in_driver_ns > 0


def test_the_durations_of_a_request_that_no_packet_can_carry_are_those_of_the_channel(
    burst: Burst, memory: Memory
) -> None:
    burst.execute(ONE, TEN)
    burst.execute_request(three_parts(memory), ExecutionConfig(loop_timeout_ns=1_000_000_000))
    assert burst.last.latency_ns == burst.last.queue_ns
    burst.execute(ONE, TEN)
    assert_complete(burst)


def test_TIM_2_a_measured_execution_has_its_times_in_nanoseconds(burst: Burst) -> None:
    burst.execute(ONE, TEN, measure=True)
    timing = burst.last.timing
    assert 0 < timing.time_on_device_ns <= timing.time_in_driver_ns <= burst.last.latency_ns
    burst.execute(ONE, TEN)
    assert burst.last.timing == NO_TIMING


def test_the_durations_can_be_read_after_the_burst_is_closed(adding: PreparedModel) -> None:
    with adding.burst() as burst:
        burst.execute(ONE, TEN)
    assert burst.last.latency_ns > burst.last.engine_ns > 0


# ------------------------------------------------------------------------------------------------ closing


def test_BUR_14_closing_ends_the_burst_in_the_driver_too(
    adding: PreparedModel, real: tuple[Connection, Session]
) -> None:
    of_the_model = real[1].quota.charged_bytes
    burst = adding.burst()
    burst.execute(ONE, TEN)
    assert len(real[1].bursts.values()) == 1
    assert real[1].quota.charged_bytes > of_the_model
    burst.close()
    burst.close()
    assert real[1].bursts.values() == []
    assert real[1].quota.charged_bytes == of_the_model
    assert real[0]._peers == []


def test_executing_a_closed_burst_is_an_error_that_names_the_reason(adding: PreparedModel) -> None:
    burst = adding.burst()
    burst.close()
    for given in [(ONE, TEN), ()]:
        with pytest.raises(InvalidArgument, match="closed"):
            burst.execute(*given)


def test_an_array_over_a_closed_burst_s_memory_can_still_be_read(adding: PreparedModel) -> None:
    with adding.burst() as burst:
        (output,) = burst.execute(ONE, TEN, out=burst.outputs)
    assert output.tolist() == SUM


def test_a_burst_outlives_its_model(adding: PreparedModel) -> None:
    with adding.burst() as burst:
        adding.close()
        assert burst.execute(ONE, TEN)[0].tolist() == SUM


def test_a_burst_of_a_closed_client_rejects_calls_and_can_be_closed(adding: PreparedModel, client: Client) -> None:
    with adding.burst() as burst:
        client.close()
        with pytest.raises(BadState, match="this client is closed"):
            burst.execute(ONE, TEN)


def test_a_burst_that_the_driver_rejects_leaves_nothing_open(
    adding: PreparedModel, real: tuple[Connection, Session]
) -> None:
    real[1].models.pop(adding.model_id)
    with pytest.raises(InvalidArgument, match="no model"):
        adding.burst()
    assert real[0]._peers == []
    assert real[1].quota.charged_bytes == 0


def a_request(arrays: Sequence[Any], output_bytes: int, pools: tuple[Memory, Memory]) -> Request:
    """Return a request for arrays at multiples of 64 bytes in the first pool, and one output in the second."""
    inputs = [RequestArgument(False, DataLocation(0, 64 * n, array.nbytes)) for n, array in enumerate(arrays)]
    return Request(tuple(inputs), (RequestArgument(False, DataLocation(1, 0, output_bytes)),), pools)


@pytest.fixture
def pools(resources: ExitStack) -> tuple[Memory, Memory]:
    """The memory of a request: 1, 2, 3, 4 and 10, 20, 30, 40, and space for their sum."""
    source, sink = (resources.enter_context(Memory.create(128)) for _ in range(2))
    source.view[:16], source.view[64:80] = ONE.tobytes(), TEN.tobytes()
    return source, sink


@pytest.mark.parametrize("with_memory", [True, False])
def test_a_burst_executes_hal_requests(adding: PreparedModel, pools: tuple[Memory, Memory], with_memory: bool) -> None:
    request = a_request([ONE, TEN], 16, pools)
    with adding.burst() if with_memory else adding.request_burst() as burst:
        shapes = [burst.execute_request(request, timeout=LIMIT_S).shapes for _ in range(2)]
    assert np.frombuffer(bytes(pools[1].view[:16]), np.float32).tolist() == SUM
    assert shapes == [(OutputShape((4,)),)] * 2


def test_a_synchronous_request_returns_shapes_and_rejects_short_outputs(
    adding: PreparedModel, pools: tuple[Memory, Memory]
) -> None:
    request = a_request([ONE, TEN], 16, pools)
    assert adding.execute_request(request, timeout=LIMIT_S).shapes == (OutputShape((4,)),)
    with pytest.raises(InvalidArgument):
        adding.execute_request(replace(request, inputs=request.inputs[:1]), timeout=LIMIT_S)


def test_a_rejected_request_leaves_the_burst_usable(adding: PreparedModel, pools: tuple[Memory, Memory]) -> None:
    request = a_request([ONE, TEN], 16, pools)
    with adding.request_burst() as burst:
        with pytest.raises(InvalidArgument):
            burst.execute_request(replace(request, inputs=request.inputs[:1]), timeout=LIMIT_S)
        assert burst.execute_request(request, timeout=LIMIT_S).shapes == (OutputShape((4,)),)


def test_BUR_18_a_request_that_a_packet_cannot_express_is_executed_synchronously(
    adding: PreparedModel, pools: tuple[Memory, Memory]
) -> None:
    request = a_request([ONE, TEN], 16, pools)
    too_long = LoopTimeoutDurationNs.MAXIMUM + 1
    with adding.request_burst() as burst:
        for path in (burst, adding):
            assert path.execute_request(request, ExecutionConfig(loop_timeout_ns=5)).shapes == (OutputShape((4,)),)
            with pytest.raises(InvalidArgument, match=str(too_long)):  # so the driver got the limit
                path.execute_request(request, ExecutionConfig(loop_timeout_ns=too_long))
        assert burst._slots.expired() == []
        assert burst.channel.requests.counters()[0] == 0


@pytest.mark.parametrize("way", ["closed", "dropped", "freed"])
def test_N_REQ_4_BUR_12_a_collected_memory_is_freed_in_the_driver_and_its_slot_reused(
    way: str, adding: PreparedModel, pools: tuple[Memory, Memory], real: tuple[Connection, Session]
) -> None:
    with adding.request_burst() as burst:
        burst.execute_request(a_request([ONE, TEN], 16, pools), timeout=LIMIT_S)
        charged_bytes = real[1].quota.charged_bytes
        for _ in range(3):
            passing = Memory.create(16)
            burst.execute_request(a_request([ONE, TEN], 16, (pools[0], passing)), timeout=LIMIT_S)
            assert np.frombuffer(bytes(passing.view), np.float32).tolist() == SUM
            assert burst._slots.find_or_add(passing) == 2
            assert real[1].quota.charged_bytes == charged_bytes + 16
            if way == "freed":
                for _ in range(2):
                    burst.free_memory(passing)
                assert real[1].quota.charged_bytes == charged_bytes
            passing.close()
            if way == "dropped":
                del passing
        burst.execute_request(a_request([ONE, TEN], 16, pools), timeout=LIMIT_S)
        assert real[1].quota.charged_bytes == charged_bytes


def test_requests_over_two_memories_in_turn_are_encoded_once(
    adding: PreparedModel, pools: tuple[Memory, Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []

    def encode(inputs: Any, outputs: Any, slots: list[int], measure: MeasureTiming) -> bytes:
        encoded.append(slots[1])
        return encode_request(inputs, outputs, slots, measure)

    monkeypatch.setattr("nnfmq.client.burst.requests.encode_request", encode)
    with adding.request_burst() as burst, Memory.create(16) as other:
        for number in range(3):
            for output in (pools[1], other):
                output.view[:16] = bytes(16)
                measure = MeasureTiming(number % 2)
                config = ExecutionConfig(measure=measure)
                result = burst.execute_request(a_request([ONE, TEN], 16, (pools[0], output)), config, timeout=LIMIT_S)
                assert result.shapes == (OutputShape((4,)),)
                assert (result.timing != NO_TIMING) is bool(measure)
                assert np.frombuffer(bytes(output.view[:16]), np.float32).tolist() == SUM
    assert encoded == [1, 1, 2, 2]  # each with and without times


def test_a_burst_without_memory_rejects_arrays(adding: PreparedModel) -> None:
    with adding.request_burst() as burst, pytest.raises(InvalidArgument, match="only has execute_request"):
        burst.execute()


def test_a_closed_burst_rejects_requests(adding: PreparedModel) -> None:
    burst = adding.request_burst()
    burst.close()
    with pytest.raises(InvalidArgument, match="closed"):
        burst.execute_request(Request((), ()))


def test_a_burst_of_a_model_that_is_not_served_has_version_0(burst: Burst) -> None:
    burst.execute(ONE, TEN)
    assert burst.version == 0


def test_the_state_of_a_burst_and_its_channel_is_in_slots(burst: Burst) -> None:
    burst.execute([1] * 4, [2] * 4)
    for one in (burst, burst.channel):
        assert not hasattr(one, "__dict__")
