"""Preparing models, with and without caches, and fenced executions: the rules of the calls, in a driver process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.caching import TOKEN, Paths, chain
from support.drivers import LIMIT_S, running_daemon
from support.models import (
    add_model,
    gather_model,
    invalid_model,
    null_model,
    pool_bytes,
    relu_model,
    request_for,
    slow_model,
    unsized_relu_model,
    unsupported_model,
    weighty_model,
)
from support.small_models import F32, one_operation

import nnfmq
from nnfmq.base.memory import Memory
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.types import (
    BufferToken,
    DataLocation,
    ExecutionConfig,
    ExecutionPreference,
    FenceState,
    MeasureTiming,
    Model,
    Operand,
    OperationType,
    Priority,
    Request,
    RequestArgument,
)
from nnfmq.lab import hidl

NONE, INVALID, FAILED = ErrorStatus.NONE, ErrorStatus.INVALID_ARGUMENT, ErrorStatus.GENERAL_FAILURE
ADD = add_model()
SUM = [11.0, 22.0, 33.0, 44.0]
ONE, TEN = np.array([1, 2, 3, 4], np.float32), np.array([10, 20, 30, 40], np.float32)
SHAPE = (1, 128, 128, 32)


@pytest.fixture(scope="module")
def adding(shared_device: nnfmq.Device) -> Iterator[nnfmq.PreparedModel]:
    with shared_device.prepare(ADD) as made:
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


# ------------------------------------------------------------------------------------------------ preparing


def test_PREP_1_PREP_3_TST_1_an_invalid_model_calls_back_once_and_returns_the_same_status(
    old_device: hidl.IDevice,
) -> None:
    callback = Callback()
    # The method of the connection's own version: the driver rejects the model, and not the client library.
    assert old_device.prepareModel_1_3(invalid_model(), 1, 1, None, [], [], TOKEN, callback) is INVALID
    assert callback.only() == (INVALID, None)
    assert old_device.prepareModel_1_1(ADD, 1, callback) is NONE  # the client goes on
    status, model = callback.only()
    assert status is NONE
    model.close()


def test_PREP_2_PREP_3_TST_1_a_valid_model_is_accepted_at_once_and_its_failure_comes_by_the_callback(
    old_device: hidl.IDevice,
) -> None:
    callback = Callback()
    assert old_device.prepareModel_1_1(unsupported_model(), 1, callback) is NONE
    assert callback.only() == (FAILED, None)
    assert old_device.prepareModel_1_1(ADD, 1, callback) is NONE
    status, model = callback.only()
    assert status is NONE
    model.close()


def test_PREP_7_one_prepared_model_executes_different_shapes_concurrently(shared_device: nnfmq.Device) -> None:
    model = one_operation(OperationType.RELU, [Operand(F32, (0, 0))], Operand(F32, (0, 0)))
    with shared_device.prepare(model) as prepared, ThreadPoolExecutor(4) as threads:
        shapes = [(1 + number % 5, 1 + number % 7) for number in range(40)]
        found = list(threads.map(lambda shape: prepared.execute(np.full(shape, 2, np.float32))[0], shapes))
    assert [array.shape for array in found] == shapes
    assert all((array == 2).all() for array in found)


def test_PREP_8_several_models_are_used_in_turn_and_released_in_any_order(shared_device: nnfmq.Device) -> None:
    inputs = np.ones((1, 16), np.float32)
    models = [shared_device.prepare(weighty_model(float(value), 16)) for value in (1, 2, 3)]
    for _ in range(2):
        assert [model.execute(inputs)[0][0, 0] for model in models] == [16, 32, 48]
    models[1].close()
    assert [models[index].execute(inputs)[0][0, 0] for index in (2, 0)] == [48, 16]
    models[0].close()
    assert models[2].execute(inputs)[0][0, 0] == 48
    with pytest.raises(nnfmq.InvalidArgument):
        models[1].execute(inputs)
    models[2].close()


def test_PREP_11_a_driver_without_memory_for_a_model_says_so_and_prepares_the_next(folder: Path) -> None:
    big = weighty_model(1.0, 1536)  # 9 MiB of weights
    environment = {"NNFMQ_CLIENT_MEMORY_MIB": "4"}
    with running_daemon(folder / "d.sock", environment=environment) as daemon, daemon.connect() as client:
        reference = client.device("reference")
        with pytest.raises(nnfmq.ResourceExhausted):
            reference.prepare(big)
        with reference.prepare(null_model()) as prepared:
            assert prepared.execute(np.array([3], np.float32))[0] == 3


# ------------------------------------------------------------------------------------------------ caches


def save(device: nnfmq.Device, model: Model, files: Paths, token: bytes = TOKEN) -> None:
    with ExitStack() as stack:
        model_cache, data_cache = files.open(stack)
        device.prepare(model, token=token, model_cache=model_cache, data_cache=data_cache).close()


def load(device: nnfmq.Device, model: Model, files: Paths, token: bytes = TOKEN) -> float:
    """Return the result of the restored model for the input 1."""
    with ExitStack() as stack:
        restored = device.prepare_from_cache(token, *files.open(stack), model=model)
        with restored:
            return float(restored.execute(np.ones(1, np.float32))[0][0])


@pytest.fixture
def files(tmp_path: Path) -> Paths:
    return Paths.new(tmp_path)


ADDS, MULS = chain(OperationType.ADD), chain(OperationType.MUL)


def test_CACHE_1_CACHE_7_both_kinds_of_files_are_needed_and_the_token(
    shared_device: nnfmq.Device, files: Paths, tmp_path: Path
) -> None:
    save(shared_device, ADDS, files)
    assert all(files.contents())
    assert load(shared_device, ADDS, files) == 101
    with pytest.raises(nnfmq.GeneralFailure):
        load(shared_device, ADDS, files, TOKEN[::-1])
    for token in (b"", TOKEN[1:]):
        with pytest.raises(nnfmq.InvalidArgument):
            load(shared_device, ADDS, files, token)
    with shared_device.prepare(ADDS, token=b"ignored without files") as prepared:
        assert prepared.execute(np.ones(1, np.float32))[0][0] == 101


@pytest.mark.parametrize("kind", ["model", "data"])
def test_CACHE_2_CACHE_3_a_changed_file_is_detected_and_crashes_nothing(
    kind: str, shared_device: nnfmq.Device, files: Paths, tmp_path: Path
) -> None:
    other = Paths.new(tmp_path, "other")
    save(shared_device, ADDS, files)
    save(shared_device, MULS, other)
    (path,), (swapped,) = getattr(files, kind), getattr(other, kind)
    right = path.read_bytes()
    for content in (right[:-1], right + b"x", bytes([right[0] ^ 1]) + right[1:], swapped.read_bytes(), b""):
        path.write_bytes(content)
        if content == right:  # two models may have the same data
            continue
        with pytest.raises(nnfmq.GeneralFailure):
            load(shared_device, ADDS, files)
    path.write_bytes(right)
    assert load(shared_device, ADDS, files) == 101


def test_CACHE_5_files_of_any_size_at_any_offset_are_truncated_and_may_be_closed_at_once(
    shared_device: nnfmq.Device, files: Paths
) -> None:
    for path in files.all:
        path.write_bytes(b"x" * 1_000_000)
    with ExitStack() as stack:
        model_cache, data_cache = files.open(stack)
        for fd in (*model_cache, *data_cache):
            os.lseek(fd, 4711, os.SEEK_SET)
        shared_device.prepare(ADDS, token=TOKEN, model_cache=model_cache, data_cache=data_cache).close()
    assert all(len(content) < 1_000_000 and content[:8] != b"x" * 8 for content in files.contents())
    assert load(shared_device, ADDS, files) == 101


def test_CACHE_9_a_device_that_saves_nothing_prepares_the_model(shared_client: nnfmq.Client, files: Paths) -> None:
    minimal = shared_client.device("sample-minimal")
    wrong = len(minimal.info.extensions) + minimal.info.model_cache_files + 1  # one file too many
    with ExitStack() as stack:
        fds = [os.open(files.model[0], os.O_RDWR) for _ in range(wrong)]
        for fd in fds:
            stack.callback(os.close, fd)
        with minimal.prepare(ADD, token=TOKEN, model_cache=fds) as prepared:
            assert prepared.execute(ONE, TEN)[0].tolist() == SUM
    assert files.contents() == [b"", b""]


def test_CACHE_10_API_5_models_and_options_have_their_own_files_in_a_folder(
    shared_device: nnfmq.Device, tmp_path: Path
) -> None:
    names: list[set[str]] = []
    for model, options in (
        (ADDS, {}),
        (ADDS, {}),
        (MULS, {}),
        (ADDS, {"priority": Priority.HIGH}),
        (ADDS, {"preference": ExecutionPreference.LOW_POWER}),
    ):
        shared_device.prepare(model, cache_dir=tmp_path, **options).close()  # type: ignore[arg-type]
        names.append({path.name for path in tmp_path.iterdir()})
    counts = [len(found) for found in names]
    assert counts[0] == counts[1] > 0
    assert counts == [counts[0] * factor for factor in (1, 1, 2, 3, 4)]


# ------------------------------------------------------------------------------------------------ fences


def test_FEN_1_FEN_4_FEN_8_an_execution_returns_a_fence_that_signals_when_the_outputs_are_there(
    adding: nnfmq.PreparedModel, request_: Request
) -> None:
    with adding.execute_request_fenced(request_, ExecutionConfig(MeasureTiming.YES)) as launched:
        assert launched.wait(LIMIT_S) is FenceState.SIGNALED
        assert sums(request_) == SUM
        request_.pools[1].view[:] = bytes(256)  # type: ignore[union-attr]  nobody writes there any more
        assert launched.info().launched.time_in_driver_ns > 0
        assert bytes(request_.pools[1].view) == bytes(256)  # type: ignore[union-attr]


def test_FEN_8_a_fence_is_active_until_a_long_execution_has_written_its_outputs(
    shared_device: nnfmq.Device, resources: ExitStack
) -> None:
    model = slow_model(12)
    request = request_for(model, [resources.enter_context(Memory.create(size)) for size in pool_bytes(model)])
    given, result = (np.frombuffer(pool.view, np.float32) for pool in request.pools)  # type: ignore[union-attr]
    given[:] = 1
    with shared_device.prepare(model) as prepared:
        prepared.execute_request(request)
        expected, result[:] = result.copy(), 0
        with prepared.execute_request_fenced(request) as launched:
            assert launched.wait(LIMIT_S) is FenceState.SIGNALED
            found = result.copy()
            assert (found == expected).all() and expected.all()


def test_FEN_2_a_wrong_argument_has_no_fence_and_no_callback(old_device: hidl.IDevice, request_: Request) -> None:
    callback = Callback()
    assert old_device.prepareModel_1_1(ADD, 1, callback) is NONE
    _, model = callback.only()
    broken = replace(request_, inputs=request_.inputs[:1])
    arguments = ([], MeasureTiming.NO, None, None, None)
    assert model.executeFenced(broken, *arguments) == (INVALID, None, None)
    status, fence, info = model.executeFenced(request_, *arguments)
    assert status is NONE
    if fence is not None:
        assert fence.wait(LIMIT_S) is FenceState.SIGNALED
    info.close()
    model.close()


def test_FEN_3_FEN_9_work_begins_when_every_fence_is_signaled_and_has_no_info_before(
    adding: nnfmq.PreparedModel, request_: Request
) -> None:
    request_.pools[1].view[:] = bytes(256)  # type: ignore[union-attr]
    with (
        nnfmq.Fence.create() as first,
        nnfmq.Fence.create() as second,
        adding.execute_request_fenced(request_, wait_for=[first, second]) as launched,
    ):
        first.signal()
        adding.execute(ONE, TEN)  # the driver has had time to begin
        assert not launched.done()
        with pytest.raises(nnfmq.GeneralFailure):
            launched.info()
        assert bytes(request_.pools[1].view[:16]) == bytes(16)  # type: ignore[union-attr]
        second.signal()
        launched.result(LIMIT_S)
        assert sums(request_) == SUM


def test_FEN_7_VAL_3_outputs_of_unknown_size_are_rejected(shared_device: nnfmq.Device, resources: ExitStack) -> None:
    pools = [resources.enter_context(Memory.create(64)) for _ in range(2)]
    request = request_for(relu_model((4,)), pools)
    with shared_device.prepare(unsized_relu_model((4,))) as prepared:
        with pytest.raises(nnfmq.InvalidArgument):
            prepared.execute_request_fenced(request)
        assert prepared.execute_request(request).shapes[0].dimensions == (4,)


def test_FEN_10_an_operation_that_fails_puts_the_fence_in_error(shared_device: nnfmq.Device) -> None:
    with shared_device.prepare(gather_model()) as prepared:
        with prepared.execute_fenced(ONE, np.array([9], np.int32)) as launched:
            assert launched.wait(LIMIT_S) is FenceState.ERROR
            with pytest.raises(nnfmq.GeneralFailure):
                launched.result(LIMIT_S)
        with prepared.execute_fenced(ONE, np.array([2], np.int32)) as launched:
            assert launched.result(LIMIT_S)[0].tolist() == [3]


def test_FEN_11_API_9_the_driver_s_fence_can_be_polled_duplicated_and_outlives_its_first_descriptor(
    adding: nnfmq.PreparedModel,
) -> None:
    with nnfmq.Fence.create() as begin, adding.execute_fenced(ONE, TEN, wait_for=[begin]) as launched:
        copy = os.dup(launched.fence.fileno())
        with nnfmq.Fence.adopt(copy) as fence:
            assert fence.state is FenceState.ACTIVE
            begin.signal()
            assert fence.wait(LIMIT_S) is FenceState.SIGNALED
            assert launched.result(LIMIT_S)[0].tolist() == SUM


# ------------------------------------------------------------------------------------------------ arguments


def test_VAL_3_UTL_4_the_driver_checks_every_field_of_a_request(adding: nnfmq.PreparedModel, request_: Request) -> None:
    first, second = request_.inputs
    (output,) = request_.outputs
    broken = {
        "inputs": replace(request_, inputs=(first,)),
        "outputs": replace(request_, outputs=(output, output)),
        "length": replace(request_, inputs=(replace(first, location=DataLocation(0, 0, 12)), second)),
        "end": replace(request_, inputs=(replace(first, location=DataLocation(0, 248, 16)), second)),
        "pool": replace(request_, inputs=(replace(first, location=DataLocation(2, 0, 16)), second)),
        "dimensions": replace(request_, inputs=(replace(first, dimensions=(5,)), second)),
        "no value": replace(request_, inputs=(RequestArgument(True), second)),
        "token": replace(request_, pools=(request_.pools[0], BufferToken(4711))),
    }
    for request in broken.values():
        with pytest.raises(nnfmq.InvalidArgument):
            adding.execute_request(request)
    adding.execute_request(request_)
    assert sums(request_) == SUM


@pytest.mark.parametrize(
    "roles",
    [
        {},
        {"inputs": [0, 0]},
        {"inputs": [2]},
        {"outputs": [-1]},
        {"inputs": [0], "dimensions": (5,)},
    ],
    ids=["none", "twice", "no such input", "no such output", "dimensions"],
)
def test_VAL_4_UTL_4_DOM_3_roles_that_contradict_the_model_allocate_nothing(
    roles: dict[str, Any], shared_device: nnfmq.Device, adding: nnfmq.PreparedModel
) -> None:
    wanted = {name: [(adding, index) for index in roles[name]] for name in ("inputs", "outputs") if name in roles}
    with pytest.raises(nnfmq.InvalidArgument):
        shared_device.allocate(**wanted, dimensions=roles.get("dimensions", ()))
    with shared_device.allocate(inputs=[(adding, 0), (adding, 1)], outputs=[(adding, 0)]) as buffer:
        assert buffer.pool is not None
