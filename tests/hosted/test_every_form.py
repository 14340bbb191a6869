"""A model on ONNX Runtime in every form of execution and of arguments, over every interface version with extensions.

The model has inputs of float64, int64 (indices), float32 of rank 0, and bool, and an output of rank 0. The expected
results are those of ONNX Runtime in this process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import numpy as np
import pytest
from support.drivers import LIMIT_S, Daemon
from support.execution_modes import (
    fenced,
    in_a_task,
    of_a_pool,
    request_asynchronously,
    request_fenced,
    request_in_an_aidl_burst,
    request_reusable,
    request_reusable_and_fenced,
    reusable,
)
from support.onnx_files import file_of
from support.onnx_runtime import onnx, runtime

import nnfmq
from nnfmq.base.memory import Memory
from nnfmq.hal.types import DataLocation, Request, RequestArgument
from nnfmq.operations.declaration import Array

Arrays = Sequence[Array]
Fed = dict[str, Array]
FED: Fed = {
    "table": np.arange(12, dtype=np.float64).reshape(4, 3) / 7,
    "rows": np.array([3, 1], np.int64),
    "scale": np.array(0.5, np.float32),
    "mask": np.array([True, False, True]),
}
OTHER: Fed = {
    "table": FED["table"] - 1,
    "rows": np.array([0, 2], np.int64),
    "scale": np.array(-3, np.float32),
    "mask": ~FED["mask"],
}
"""A second set of inputs of the same shapes."""


def _content() -> bytes:
    node = onnx.helper.make_node
    nodes = [
        node("Gather", ["table", "rows"], ["found"], axis=0),
        node("Cast", ["scale"], ["factor"], to=onnx.TensorProto.DOUBLE),
        node("Mul", ["found", "factor"], ["scaled"]),
        node("Where", ["mask", "scaled", "found"], ["chosen"]),
        node("ReduceSum", ["rows"], ["sum"], keepdims=0),
        node("Not", ["mask"], ["others"]),
    ]
    outputs = {"chosen": np.zeros((2, 3)), "sum": np.array(0), "others": np.zeros(3, np.bool_)}  # types and shapes
    return file_of(nodes, FED, outputs)


CONTENT = _content()


def expected(fed: Fed) -> Arrays:
    session = runtime.InferenceSession(CONTENT, providers=["CPUExecutionProvider"])
    return [np.asarray(found) for found in session.run(None, fed)]


def assert_equal(found: Arrays, fed: Fed) -> None:
    wanted = expected(fed)
    assert [(array.dtype, array.shape) for array in found] == [(array.dtype, array.shape) for array in wanted]
    assert [array.tobytes() for array in found] == [array.tobytes() for array in wanted]


@pytest.fixture(scope="module", params=["AIDL v4", "HIDL 1.3"])
def device(shared_daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[nnfmq.Device]:
    """Return the device, over one of these interface versions."""
    with nnfmq.connect(shared_daemon.path, timeout=LIMIT_S, interface=request.param) as client:
        yield client.device("onnxruntime")


@pytest.fixture(scope="module")
def model(device: nnfmq.Device) -> Iterator[nnfmq.PreparedModel]:
    """Return the prepared model."""
    with device.prepare(CONTENT) as made:
        yield made


# ----------------------------------------------------------------------------------------------------------------------
# Interface versions.


@pytest.mark.parametrize("interface", ["HIDL 1.2", "HIDL 1.3", "AIDL v1", "AIDL v2", "AIDL v3", "AIDL v4"])
def test_every_interface_version_with_extensions_runs_it(shared_daemon: Daemon, interface: str) -> None:
    with (
        nnfmq.connect(shared_daemon.path, timeout=LIMIT_S, interface=interface) as client,
        client.device("onnxruntime").prepare(CONTENT) as made,
        made.burst() as burst,
    ):
        assert_equal(made.execute(FED), FED)
        assert_equal(burst.execute(OTHER), OTHER)


@pytest.mark.parametrize("interface", ["HIDL 1.0", "HIDL 1.1"])
def test_an_older_version_refuses_it_and_says_which_one_is_needed(shared_daemon: Daemon, interface: str) -> None:
    text = f"the model needs HIDL 1.2, the interface is {interface}"
    with (
        nnfmq.connect(shared_daemon.path, timeout=LIMIT_S, interface=interface) as client,
        pytest.raises(nnfmq.InvalidArgument, match=text),
    ):
        client.device("onnxruntime").prepare(CONTENT)


def test_a_closed_model_has_no_memory_with_its_file(device: nnfmq.Device) -> None:
    def memories() -> int:
        links = (os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
        return sum("nnfmq-constants" in link for link in links)

    before = memories()
    with device.prepare(CONTENT) as made:
        assert memories() > before
    assert memories() == before
    assert not made.handle.is_open


# ----------------------------------------------------------------------------------------------------------------------
# Arrays.


def into_own_arrays(model: nnfmq.PreparedModel, fed: Fed) -> Arrays:
    out = [np.empty(info.shape, info.dtype) for info in model.outputs]
    model.execute(fed, out=out)
    return out


def over_a_burst(model: nnfmq.PreparedModel, fed: Fed) -> Arrays:
    with model.burst() as burst:
        return burst.execute(fed)


FORMS: dict[str, Callable[[nnfmq.PreparedModel, Fed], Arrays]] = {
    "synchronous": lambda model, fed: model.execute(fed),
    "into own arrays": into_own_arrays,
    "asynchronous": lambda model, fed: model.execute_async(fed).result(LIMIT_S),
    "fenced": fenced,
    "reusable": reusable,
    "in a task": in_a_task,
    "burst": over_a_burst,
    "burst of a pool": of_a_pool,
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_arrays_in_every_form(model: nnfmq.PreparedModel, form: Callable[[nnfmq.PreparedModel, Fed], Arrays]) -> None:
    assert_equal(form(model, FED), FED)
    assert_equal(form(model, OTHER), OTHER)


def test_what_is_bound_once_computes_from_the_values_of_each_time(model: nnfmq.PreparedModel) -> None:
    with model.burst() as burst, model.create_reusable_execution() as execution:
        for fed in (FED, OTHER, FED):
            assert_equal(burst.execute(fed), fed)
            assert_equal(execution.compute(fed), fed)


# ----------------------------------------------------------------------------------------------------------------------
# The HAL's requests: over shared memory, and over buffers of the driver.


def in_a_burst(model: nnfmq.PreparedModel, request: Request) -> object:
    with model.request_burst() as burst:
        return burst.execute_request(request, timeout=LIMIT_S)


def in_an_aidl_burst(model: nnfmq.PreparedModel, request: Request) -> object:
    if not model.connection.is_aidl:
        with pytest.raises(nnfmq.GeneralFailure, match=r"HIDL 1\.3 does not have"):
            model.aidl_burst()
        return model.execute_request(request)
    return request_in_an_aidl_burst(model, request)


Mode = Callable[[nnfmq.PreparedModel, Request], object]
MODES: dict[str, Mode] = {
    "synchronous": lambda model, request: model.execute_request(request, timeout=LIMIT_S),
    "asynchronous": request_asynchronously,
    "fenced": request_fenced,
    "reusable": request_reusable,
    "reusable and fenced": request_reusable_and_fenced,
    "burst": in_a_burst,
    "AIDL burst": in_an_aidl_burst,
}
in_every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def _size_bytes(info: nnfmq.TensorInfo) -> int:
    return math.prod(info.shape) * np.dtype(info.dtype).itemsize


@in_every_mode
def test_requests_over_shared_memory_in_every_form(
    model: nnfmq.PreparedModel, resources: ExitStack, mode: Mode
) -> None:
    memory = resources.enter_context(Memory.create(4096))
    offsets = iter(range(0, 4096, 256))

    def argument(info: nnfmq.TensorInfo) -> RequestArgument:
        return RequestArgument(location=DataLocation(0, next(offsets), _size_bytes(info)))

    inputs, outputs = ([*map(argument, infos)] for infos in (model.inputs, model.outputs))
    for value, place in zip(FED.values(), inputs, strict=True):
        memory.view[place.location.offset :][: value.nbytes] = value.tobytes()
    mode(model, Request(tuple(inputs), tuple(outputs), (memory,)))
    found = [bytes(memory.view[place.location.offset :][: place.location.length]) for place in outputs]
    assert found == [array.tobytes() for array in expected(FED)]


@in_every_mode
def test_requests_over_buffers_of_the_driver_in_every_form(
    device: nnfmq.Device, model: nnfmq.PreparedModel, resources: ExitStack, mode: Mode
) -> None:
    given = [resources.enter_context(device.allocate(inputs=[(model, i)])) for i in range(4)]
    taken = [resources.enter_context(device.allocate(outputs=[(model, i)])) for i in range(3)]
    for buffer, value in zip(given, FED.values(), strict=True):
        buffer.copy_from(value)
    places = [RequestArgument(location=DataLocation(pool)) for pool in range(7)]
    pools = tuple(buffer.pool for buffer in (*given, *taken))
    mode(model, Request(tuple(places[:4]), tuple(places[4:]), pools))
    assert_equal([buffer.array() for buffer in taken], FED)
