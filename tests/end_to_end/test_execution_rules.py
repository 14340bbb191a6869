"""The rules of executions, output shapes, times, limits and control flow, in a driver process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support import control_flow_models
from support.drivers import LIMIT_S, Process, at_least_once, until
from support.hints import with_extension
from support.models import add_model, gather_model, pool_bytes, relu_model, request_for, slow_model, unsized_relu_model
from support.small_models import F32, one_operation, with_operand

import nnfmq
from nnfmq.base.memory import Memory
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.timing import NO_TIMING
from nnfmq.hal.types import (
    DataLocation,
    ExecutionConfig,
    ExecutionPreference,
    ExtensionNameAndPrefix,
    FenceState,
    MeasureTiming,
    Model,
    Operand,
    OperandType,
    OperationType,
    OutputShape,
    Request,
    RequestArgument,
    TokenValuePair,
)
from nnfmq.lab import hidl
from nnfmq.lab.conformance import testmodels
from nnfmq.lab.conformance.cases import PASSED, run_test
from nnfmq.lab.conformance.driver_targets import ALL_PATHS
from nnfmq.lab.conformance.runner import open_target

ADD = add_model()
SUM = [11.0, 22.0, 33.0, 44.0]
ONE, TEN = np.array([1, 2, 3, 4], np.float32), np.array([10, 20, 30, 40], np.float32)
MEASURED = ExecutionConfig(MeasureTiming.YES)
SHAPE = (1, 128, 128, 32)
NONE, INVALID = ErrorStatus.NONE, ErrorStatus.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def adding(shared_device: nnfmq.Device) -> Iterator[nnfmq.PreparedModel]:
    with shared_device.prepare(ADD) as made:
        yield made


@pytest.fixture(scope="module")
def slow(shared_device: nnfmq.Device) -> Iterator[nnfmq.PreparedModel]:
    """Return a model that computes for seconds."""
    with shared_device.prepare(slow_model()) as made:
        yield made


@pytest.fixture(scope="module")
def old_device() -> Iterator[hidl.IDevice]:
    with nnfmq.connect(embedded=True, interface="HIDL 1.3") as made:
        yield hidl.IDevice(made, "reference")


@pytest.fixture
def request_(resources: ExitStack) -> Request:
    """Return a request of the adding model over new memories, with its inputs."""
    pools = [resources.enter_context(Memory.create(256)) for _ in range(2)]
    pools[0].view[:16], pools[0].view[64:80] = ONE.tobytes(), TEN.tobytes()
    return request_for(ADD, pools)


def sums(request: Request) -> list[float]:
    return np.frombuffer(request.pools[1].view, np.float32, 4).tolist()  # type: ignore[union-attr,no-any-return]


def moved(argument: RequestArgument, **changes: int) -> RequestArgument:
    return replace(argument, location=replace(argument.location, **changes))


# ------------------------------------------------------------------------------------------------ requests


def test_EXE_1_API_6_dimensions_of_a_request_complete_the_model_s_and_never_contradict_them(
    shared_device: nnfmq.Device, resources: ExitStack
) -> None:
    model = one_operation(OperationType.RELU, [Operand(F32, (0, 2))], Operand(F32, (0, 2)))
    pools = [resources.enter_context(Memory.create(64)) for _ in range(2)]
    np.frombuffer(pools[0].view, np.float32, 4)[:] = [-1, 2, -3, 4]
    with shared_device.prepare(model) as prepared:
        for dimensions, fits in (((2, 2), True), ((1, 4), False), ((2, 2, 1), False)):
            argument = RequestArgument(location=DataLocation(0, 0, 16), dimensions=dimensions)
            sink = RequestArgument(location=DataLocation(1, 0, 16), dimensions=(2, 2))
            request = Request((argument,), (sink,), tuple(pools))
            if fits:
                assert prepared.execute_request(request).shapes == (OutputShape((2, 2)),)
                assert np.frombuffer(pools[1].view, np.float32, 4).tolist() == [0, 2, 0, 4]
                continue
            with pytest.raises(nnfmq.InvalidArgument):
                prepared.execute_request(request)


def test_EXE_2_no_byte_of_a_pool_changes_but_the_outputs(adding: nnfmq.PreparedModel, request_: Request) -> None:
    source, sink = request_.pools
    sink.view[:] = bytes([0xA5]) * 256  # type: ignore[union-attr]
    before = bytes(source.view)  # type: ignore[union-attr]
    adding.execute_request(request_)
    assert bytes(source.view) == before  # type: ignore[union-attr]
    assert bytes(sink.view[16:]) == bytes([0xA5]) * 240  # type: ignore[union-attr]


def test_EXE_3_EXE_4_API_7_a_synchronous_execution_returns_when_the_outputs_are_there(
    adding: nnfmq.PreparedModel, request_: Request
) -> None:
    result = adding.execute_request(request_, MEASURED)
    assert sums(request_) == SUM
    assert result.shapes == (OutputShape((4,)),)
    assert result.timing.time_in_driver_ns > 0


class Callback:
    """Keeps the arguments of its calls."""

    def __init__(self) -> None:
        self.calls: Queue[tuple[Any, ...]] = Queue()

    def __call__(self, *arguments: Any) -> None:
        self.calls.put(arguments)

    def only(self) -> tuple[Any, ...]:
        found = self.calls.get(timeout=LIMIT_S)
        assert self.calls.empty()
        return found


def prepared_on(device: hidl.IDevice, model: Model = ADD) -> hidl.IPreparedModel:
    callback = Callback()
    assert device.prepareModel_1_1(model, 1, callback) is NONE
    status, found = callback.only()
    assert status is NONE
    return found  # type: ignore[no-any-return]


def test_EXE_5_EXE_6_a_callback_runs_once_after_success_and_after_a_rejection(
    old_device: hidl.IDevice, request_: Request
) -> None:
    model = prepared_on(old_device)
    first, second, third = Callback(), Callback(), Callback()
    assert model.execute(request_, first) is NONE
    assert first.only() == (NONE,)  # HIDL 1.0: the status only
    assert model.execute_1_2(request_, MeasureTiming.YES, second) is NONE
    status, shapes, timing = second.only()
    assert (status, shapes) == (NONE, [OutputShape((4,))])
    assert timing.timeInDriver > 0
    assert model.execute(replace(request_, inputs=request_.inputs[:1]), third) is INVALID
    assert third.only() == (INVALID,)
    model.close()


def test_EXE_7_EXE_8_valid_requests_succeed_in_any_mix_at_the_same_time(
    adding: nnfmq.PreparedModel, resources: ExitStack
) -> None:
    def synchronous(number: int) -> Any:
        return adding.execute(ONE * number, TEN)[0].tolist()

    def asynchronous(number: int) -> Any:
        return adding.execute_async(ONE * number, TEN).result(LIMIT_S)[0].tolist()

    def fenced(number: int) -> Any:
        with adding.execute_fenced(ONE * number, TEN) as launched:
            return launched.result(LIMIT_S)[0].tolist()

    def burst(number: int) -> Any:
        with adding.burst() as made:
            return made.execute(ONE * number, TEN)[0].tolist()

    modes: list[Callable[[int], Any]] = [synchronous, asynchronous, fenced, burst]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda number: modes[number % 4](number), range(40)))
    assert found == [(ONE * number + TEN).tolist() for number in range(40)]


def test_EXE_9_SHP_3_every_failure_has_one_of_the_statuses_and_no_shapes(
    adding: nnfmq.PreparedModel, shared_device: nnfmq.Device, slow: nnfmq.PreparedModel
) -> None:
    with shared_device.prepare(gather_model()) as gathering, pytest.raises(nnfmq.GeneralFailure) as failed:
        gathering.execute(ONE, np.array([9], np.int32))
    with pytest.raises(nnfmq.MissedDeadline) as missed:
        adding.execute(ONE, TEN, timeout=0)
    with pytest.raises(nnfmq.InvalidArgument) as invalid:
        adding.execute_request(Request((), (), ()))
    for caught in (failed, missed, invalid):
        assert getattr(caught.value, "output_shapes", ()) == ()


@pytest.mark.parametrize(
    ("inputs", "output"),
    [((0, 16), (0, 8)), ((0, 16), (0, 16)), ((0, 60), (0, 64))],
    ids=["one input", "the other", "a few bytes"],
)
def test_EXE_10_an_output_that_overlaps_an_input_is_rejected(
    inputs: tuple[int, int], output: tuple[int, int], adding: nnfmq.PreparedModel, request_: Request
) -> None:
    places = [DataLocation(0, offset, 16) for offset in (inputs[0], inputs[1], output[1])]
    first, second, result = (RequestArgument(location=place) for place in places)
    with pytest.raises(nnfmq.InvalidArgument, match="overlap"):
        adding.execute_request(replace(request_, inputs=(first, second), outputs=(result,)))
    apart = RequestArgument(location=DataLocation(0, 128, 16))
    assert adding.execute_request(replace(request_, outputs=(apart,))).shapes == (OutputShape((4,)),)


def test_EXE_11_padding_must_be_inside_the_pool_and_is_not_written(
    adding: nnfmq.PreparedModel, request_: Request
) -> None:
    request_.pools[1].view[:] = bytes([0xA5]) * 256  # type: ignore[union-attr]
    padded = replace(request_, outputs=(moved(request_.outputs[0], padding=48),))
    adding.execute_request(padded)
    assert sums(request_) == SUM
    assert bytes(request_.pools[1].view[16:64]) == bytes([0xA5]) * 48  # type: ignore[union-attr]
    with pytest.raises(nnfmq.InvalidArgument):
        adding.execute_request(replace(request_, outputs=(moved(request_.outputs[0], padding=241),)))


def test_EXE_12_empty_outputs_are_permitted_on_every_path_but_the_fenced(data_dir: Path) -> None:
    lines = [line for _, line in testmodels.lines(data_dir / "vts" / "V1_2" / "roi_align.jsonl.gz")]
    test = testmodels.read(next(line for line in lines if "zero_sized" in line["name"]))
    assert 0 in [array.nbytes for array in test.expected]
    with closing(open_target(ALL_PATHS, "reference", "embedded")) as target:
        (outcome,) = run_test(test, target, with_variants=False).outcomes
    assert (outcome.status, outcome.reason) == (PASSED, "")  # which requires that fenced executions are rejected


def test_EXE_14_PREP_10_a_configuration_measures_and_unknown_hints_are_ignored(
    shared_device: nnfmq.Device, request_: Request
) -> None:
    extension = ExtensionNameAndPrefix("com.example.hints", 1)
    hint = TokenValuePair((1 << 16) | 5, b"unknown")
    knowing = with_extension(shared_device, extension.name)
    with knowing.prepare(ADD, hints=[hint], extensions=[extension]) as prepared:
        config = ExecutionConfig(MeasureTiming.YES, hints=(hint,), extensions=(extension,))
        assert prepared.execute_request(request_, config).timing.time_in_driver_ns > 0
        assert sums(request_) == SUM
    with pytest.raises(nnfmq.InvalidArgument):
        knowing.prepare(ADD, hints=[hint, hint], extensions=[extension])


# ------------------------------------------------------------------------------------------------ shapes


def test_SHP_1_SHP_2_SHP_5_API_8_outputs_of_unknown_size_are_returned_with_their_shapes(
    shared_device: nnfmq.Device, resources: ExitStack
) -> None:
    with shared_device.prepare(unsized_relu_model((4,))) as prepared:
        assert prepared.execute(-ONE)[0].tolist() == [0, 0, 0, 0]
        pools = [resources.enter_context(Memory.create(64)) for _ in range(2)]
        request = request_for(relu_model((4,)), pools)
        assert prepared.execute_request(request).shapes == (OutputShape((4,)),)


def test_SHP_4_a_short_output_is_reported_with_its_shape(shared_device: nnfmq.Device, resources: ExitStack) -> None:
    pools = [resources.enter_context(Memory.create(64)) for _ in range(2)]
    request = request_for(relu_model((4,)), pools)
    short = replace(request, outputs=(moved(request.outputs[0], length=8),))
    with shared_device.prepare(unsized_relu_model((4,))) as prepared:
        for execute in (prepared.execute_request, lambda one: prepared.execute_request_async(one).result(LIMIT_S)):
            with pytest.raises(nnfmq.OutputInsufficientSize) as caught:
                execute(short)
            assert caught.value.output_shapes == (OutputShape((4,), False),)


# ------------------------------------------------------------------------------------------------ times


def test_TIM_2_TIM_3_TIM_4_times_exist_if_they_were_requested_and_the_driver_s_includes_the_device_s(
    adding: nnfmq.PreparedModel, request_: Request
) -> None:
    for _ in range(20):
        timing = adding.execute_request(request_, MEASURED).timing
        assert 0 < timing.time_on_device_ns <= timing.time_in_driver_ns
    assert adding.execute_request(request_).timing == NO_TIMING


def test_TIM_5_TIM_6_the_driver_s_time_includes_the_wait_for_a_thread(
    adding: nnfmq.PreparedModel, slow: nnfmq.PreparedModel, request_: Request
) -> None:
    def includes_it() -> bool:
        busy = [slow.execute_async(np.ones(SHAPE, np.float32), timeout=0.5) for _ in range(32)]
        begun_ns = time.monotonic_ns()
        timing = adding.execute_request_async(request_, MEASURED).result(LIMIT_S).timing
        assert timing.time_in_driver_ns <= time.monotonic_ns() - begun_ns
        for pending in busy:
            with pytest.raises(nnfmq.MissedDeadline):
                pending.result(LIMIT_S)
        return timing.time_in_driver_ns > timing.time_on_device_ns + 50_000_000

    at_least_once(includes_it, "the execution waits for a thread, and its time says so")


def test_TIM_7_API_8_a_fenced_execution_has_times_from_the_launch_and_from_the_last_fence(
    adding: nnfmq.PreparedModel, request_: Request
) -> None:
    with (
        nnfmq.Fence.create() as fence,
        adding.execute_request_fenced(request_, MEASURED, wait_for=[fence]) as launched,
    ):
        held_ns = time.monotonic_ns()
        until(lambda: time.monotonic_ns() - held_ns > 20_000_000, "20 ms have passed")
        fence.signal()
        launched.result(LIMIT_S)
        times = launched.info()
    assert times.launched.time_in_driver_ns > times.fenced.time_in_driver_ns + 20_000_000
    assert times.fenced.time_in_driver_ns >= times.fenced.time_on_device_ns > 0


# ------------------------------------------------------------------------------------------------ limits


def test_QOS_3_a_deadline_ends_an_execution_between_two_operations(slow: nnfmq.PreparedModel) -> None:
    begun = time.monotonic()
    with pytest.raises(nnfmq.MissedDeadlineTransient):
        slow.execute_async(np.ones(SHAPE, np.float32), timeout=0.2).result(LIMIT_S)
    assert time.monotonic() - begun < LIMIT_S / 2


@pytest.mark.parametrize(("timeout", "duration"), [(0.1, LIMIT_S), (LIMIT_S, 0.1)], ids=["deadline", "duration"])
def test_FEN_6_the_earlier_of_deadline_and_duration_ends_an_execution(
    timeout: float, duration: float, slow: nnfmq.PreparedModel
) -> None:
    with slow.execute_fenced(np.ones(SHAPE, np.float32), timeout=timeout, duration=duration) as launched:
        assert launched.wait(LIMIT_S) is FenceState.ERROR
        with pytest.raises(nnfmq.MissedDeadline):
            launched.result(LIMIT_S)


@pytest.mark.parametrize("timeout", [60.0, 1e9, 1e30], ids=str)
def test_QOS_4_QOS_6_a_distant_deadline_has_no_effect(timeout: float, adding: nnfmq.PreparedModel) -> None:
    assert adding.execute(ONE, TEN, timeout=timeout)[0].tolist() == SUM
    with adding.execute_fenced(ONE, TEN, timeout=timeout, duration=timeout) as launched:
        assert launched.result(LIMIT_S)[0].tolist() == SUM


# ------------------------------------------------------------------------------------------------ reusable executions


def test_RUX_1_RUX_4_API_12_one_execution_runs_repeatedly_with_its_own_limits(
    adding: nnfmq.PreparedModel, request_: Request
) -> None:
    with adding.create_reusable_request(request_, MEASURED) as execution:
        for factor in (1, 2, 3):
            np.frombuffer(request_.pools[0].view, np.float32, 4)[:] = ONE * factor  # type: ignore[union-attr]
            assert execution.compute(timeout=LIMIT_S).timing.time_in_driver_ns > 0
            assert sums(request_) == (ONE * factor + TEN).tolist()
        with pytest.raises(nnfmq.MissedDeadline):
            execution.compute(timeout=0)
        with execution.compute_fenced(timeout=LIMIT_S) as launched:
            launched.result(LIMIT_S)
        assert sums(request_) == (ONE * 3 + TEN).tolist()


def test_RUX_2_an_invalid_request_is_rejected_when_the_execution_is_created(
    adding: nnfmq.PreparedModel, request_: Request
) -> None:
    for broken in (
        replace(request_, inputs=request_.inputs[:1]),
        replace(request_, outputs=(moved(request_.outputs[0], length=8),)),
        replace(request_, outputs=(moved(request_.outputs[0], pool_index=7),)),
    ):
        with pytest.raises(nnfmq.InvalidArgument):
            adding.create_reusable_request(broken)


def test_RUX_3_a_second_run_is_rejected_and_the_first_is_not_affected(
    adding: nnfmq.PreparedModel, request_: Request
) -> None:
    with adding.create_reusable_request(request_) as execution, nnfmq.Fence.create() as fence:
        with execution.compute_fenced(wait_for=[fence]) as launched:
            with pytest.raises(nnfmq.InvalidArgument):
                execution.compute(timeout=LIMIT_S)
            fence.signal()
            assert launched.wait(LIMIT_S) is FenceState.SIGNALED
        assert sums(request_) == SUM


# ------------------------------------------------------------------------------------------------ control flow


@pytest.mark.parametrize("name", ["reference", "compiled"])
def test_CF_1_the_condition_selects_the_branch(name: str, shared_client: nnfmq.Client) -> None:
    x, y = np.array([1, 2], np.float32), np.array([3, 4], np.float32)
    with shared_client.device(name).prepare(control_flow_models.branching()) as prepared:
        found = [prepared.execute(np.array([choice]), x, y)[0].tolist() for choice in (True, False)]
    assert found == [[4, 6], [3, 8]]


@pytest.mark.parametrize("name", ["reference", "compiled"])
def test_CF_2_CF_3_a_loop_passes_its_state_on_while_the_condition_holds(name: str, shared_client: nnfmq.Client) -> None:
    sums_, x = np.array([1, 1], np.float32), np.array([2, 3], np.float32)
    with shared_client.device(name).prepare(control_flow_models.counting()) as prepared:
        found = [prepared.execute(sums_, np.array([count], np.int32), x)[0].tolist() for count in (0, 1, 5)]
    assert found == [[1, 1], [3, 4], [11, 16]]


def test_CF_4_CF_5_API_12_a_loop_ends_by_its_timeout_which_has_a_maximum(
    shared_device: nnfmq.Device, resources: ExitStack
) -> None:
    model = control_flow_models.counting()
    endless, x = np.array([1 << 30], np.int32), np.zeros(2, np.float32)
    with shared_device.prepare(model) as prepared:
        begun = time.monotonic()
        with pytest.raises(nnfmq.MissedDeadline):
            prepared.execute(x, endless, x, loop_timeout=0.1)
        assert 0.1 <= time.monotonic() - begun < LIMIT_S
        pools = [resources.enter_context(Memory.create(size)) for size in pool_bytes(model)]
        with pytest.raises(nnfmq.InvalidArgument):
            prepared.execute_request(request_for(model, pools), ExecutionConfig(loop_timeout_ns=15_000_000_001))


QUANTIZED = {"type": OperandType.TENSOR_QUANT8_ASYMM, "scale": 1.0}


@pytest.mark.parametrize(
    "change",
    [{"dimensions": (3,)}, {"dimensions": (2, 1)}, {"scale": 2.0}, {"zero_point": 1}],
    ids=["extent", "rank", "scale", "zero point"],
)
def test_CF_7_operands_at_a_boundary_must_agree(change: dict[str, Any], shared_device: nnfmq.Device) -> None:
    """An input of both branches is quantized, outside and inside; then one branch takes it with one field changed."""
    model = with_operand(control_flow_models.branching(), 3, **QUANTIZED)
    model = in_branch(in_branch(model, 0, **QUANTIZED), 1, **QUANTIZED)
    assert shared_device.supported_operations(model) == [False]  # it is valid
    with pytest.raises(nnfmq.InvalidArgument, match="N-VAL-18"):
        shared_device.supported_operations(in_branch(model, 0, **change))


def in_branch(model: Model, number: int, **changes: Any) -> Model:
    """Change the first operand of a branch, whose operations become ones that take all types."""
    branches = list(model.referenced)
    first, *others = branches[number].operands
    operations = tuple(replace(o, type=OperationType.OEM_OPERATION) for o in branches[number].operations)
    branches[number] = replace(branches[number], operands=(replace(first, **changes), *others), operations=operations)
    return replace(model, referenced=tuple(branches))


# ------------------------------------------------------------------------------------------------ memory


def test_MEM_6_arguments_with_the_preferred_layout_are_accepted(
    adding: nnfmq.PreparedModel, resources: ExitStack
) -> None:
    preferences = [adding.memory_preference("input", index) for index in range(2)]
    assert {(one.alignment, one.padding) for one in preferences} == {(64, 64)}
    pools = [resources.enter_context(Memory.create(256)) for _ in range(2)]
    pools[0].view[64:80], pools[0].view[128:144] = ONE.tobytes(), TEN.tobytes()
    first, second = (RequestArgument(location=DataLocation(0, offset, 16, 48)) for offset in (64, 128))
    result = RequestArgument(location=DataLocation(1, 64, 16, 48))
    adding.execute_request(Request((first, second), (result,), tuple(pools)))
    assert np.frombuffer(pools[1].view, np.float32, 4, 64).tolist() == SUM


def test_MEM_8_API_10_pools_and_buffers_are_copied_into_each_other(
    shared_device: nnfmq.Device, adding: nnfmq.PreparedModel, resources: ExitStack
) -> None:
    first, second = (resources.enter_context(shared_device.allocate(inputs=[(adding, 0)])) for _ in range(2))
    source, sink = (resources.enter_context(Memory.create(16)) for _ in range(2))
    source.view[:] = ONE.tobytes()
    first.copy_from(source)
    nnfmq.copy(first, second)
    second.copy_to(sink)
    assert np.frombuffer(sink.view, np.float32).tolist() == ONE.tolist()


def test_EXE_13_an_idle_driver_gives_memory_back(shared_client: nnfmq.Client) -> None:
    """A model's arena is some 20 MiB of private memory; it is freed within the idle time after the last execution."""
    with (
        shared_client.device("compiled").prepare(
            slow_model(4, 256, 32), preference=ExecutionPreference.SUSTAINED_SPEED
        ) as prepared,
        Process(shared_client.worker_pid) as driver,
    ):
        prepared.execute(np.ones((1, 256, 256, 32), np.float32))

        def private_kb() -> int:
            lines = Path(f"/proc/{driver.pid}/smaps_rollup").read_text().splitlines()
            return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))

        busy = private_kb()
        until(lambda: private_kb() < busy - 8_000, f"the driver holds 8 MB less than {busy} kB")
