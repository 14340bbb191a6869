"""HIDL's methods, called as a driver test would call them, against a real session in this process."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from msgspec.structs import replace
from support import control_flow_models, models, places
from support.bursts import packet_for
from support.caching import Paths
from support.executors import LIMIT_S, floats, until

from nnfmq.base.memory import Memory
from nnfmq.client.connection.client import Client
from nnfmq.client.connection.connection import Connection
from nnfmq.driver.cache import files
from nnfmq.driver.session.session import Session
from nnfmq.hal.capabilities import CPU_PERFORMANCE
from nnfmq.hal.errors import DeadObject, ErrorStatus, InvalidArgument
from nnfmq.hal.feature_levels import FeatureLevel as L
from nnfmq.hal.feature_levels import interface_name, is_aidl, number_of_consumers
from nnfmq.hal.hosted import is_runtime_name
from nnfmq.hal.types import (
    DeviceStatus,
    ExecutionPreference,
    ExtensionNameAndPrefix,
    FenceState,
    MeasureTiming,
    Model,
    OperandType,
    OutputShape,
    Priority,
    Request,
)
from nnfmq.lab import hidl
from nnfmq.queue import MessageQueue
from nnfmq.serialize import messages
from nnfmq.serialize.codec import decode_result
from nnfmq.serialize.packets import DATUM_BYTES
from nnfmq.validation.values import validate_capabilities, validate_device_type, validate_extension

ADD = models.add_model()
LOOP = control_flow_models.counting()
SUM = [11.0, 22.0, 33.0, 44.0]
NONE, INVALID, FAILED = ErrorStatus.NONE, ErrorStatus.INVALID_ARGUMENT, ErrorStatus.GENERAL_FAILURE
FAST, MEDIUM, TOKEN = ExecutionPreference.FAST_SINGLE_ANSWER, Priority.MEDIUM, bytes(32)
YES, NO = MeasureTiming.YES, MeasureTiming.NO
PASSED = 1  # a deadline that has passed
HIDL = [level for level in L if not is_aidl(level)]
every_interface = pytest.mark.parametrize("level", HIDL, ids=interface_name)

# The arguments between the model and the callback, in each version of prepareModel.
PREPARE: dict[str, tuple[Any, ...]] = {
    "prepareModel": (),
    "prepareModel_1_1": (FAST,),
    "prepareModel_1_2": (FAST, [], [], TOKEN),
    "prepareModel_1_3": (FAST, MEDIUM, None, [], [], TOKEN),
}
FROM_CACHE: dict[str, tuple[Any, ...]] = {
    "prepareModelFromCache": ([], [], TOKEN),
    "prepareModelFromCache_1_3": (None, [], [], TOKEN),
}
# The methods that each interface version adds, from the HAL's .hal files.
METHODS = {
    L.V1_0: "getCapabilities getSupportedOperations prepareModel getStatus",
    L.V1_1: "getCapabilities_1_1 getSupportedOperations_1_1 prepareModel_1_1",
    L.V1_2: "getVersionString getType getCapabilities_1_2 getSupportedExtensions getSupportedOperations_1_2"
    " getNumberOfCacheFilesNeeded prepareModel_1_2 prepareModelFromCache",
    L.V1_3: "getCapabilities_1_3 getSupportedOperations_1_3 prepareModel_1_3 prepareModelFromCache_1_3 allocate",
}
EXECUTIONS = {
    L.V1_0: "execute",
    L.V1_2: "execute_1_2 executeSynchronously configureExecutionBurst",
    L.V1_3: "execute_1_3 executeSynchronously_1_3 executeFenced",
}

Speaking = Callable[[str], tuple[Connection, Session]]


class Callback:
    """Records its arguments and its thread."""

    def __init__(self) -> None:
        self.calls: Queue[tuple[Any, ...]] = Queue()
        self.threads: list[threading.Thread] = []

    def __call__(self, *arguments: Any) -> None:
        self.threads.append(threading.current_thread())
        self.calls.put(arguments)

    def only(self) -> tuple[Any, ...]:
        """Return the arguments of its only call."""
        found = self.calls.get(timeout=LIMIT_S)
        until(lambda: not any(thread.name == "nnfmq-callback" for thread in threading.enumerate()))
        assert self.calls.empty()
        return found


@pytest.fixture
def device_of(speaking: Speaking) -> Callable[[L], hidl.IDevice]:
    return lambda level: hidl.IDevice(Client(speaking(interface_name(level))[0], None), "reference")


def newest_form(level: L) -> str:
    return list(PREPARE)[level - 1]


def prepared(device: hidl.IDevice, level: L, model: Model = ADD) -> hidl.IPreparedModel:
    form, callback = newest_form(level), Callback()
    assert getattr(device, form)(model, *PREPARE[form], callback) is NONE
    status, found = callback.only()
    assert status is NONE
    assert isinstance(found, hidl.IPreparedModel)
    return found


# ------------------------------------------------------------------------------------------------ available methods


@every_interface
def test_DEV_13_a_device_has_the_methods_of_its_version_and_of_earlier_ones(
    level: L, device_of: Callable[[L], hidl.IDevice]
) -> None:
    device = device_of(level)
    wanted = {name for since, names in METHODS.items() if since <= level for name in names.split()}
    assert {name for name in dir(device) if name in hidl.DEVICE} == wanted
    for name in hidl.DEVICE:
        assert hasattr(device, name) == (name in wanted)


@every_interface
def test_EXE_15_a_prepared_model_has_the_methods_of_its_version_and_of_earlier_ones(
    level: L, device_of: Callable[[L], hidl.IDevice]
) -> None:
    model = prepared(device_of(level), level)
    wanted = {name for since, names in EXECUTIONS.items() if since <= level for name in names.split()}
    assert {name for name in dir(model) if name in hidl.PREPARED_MODEL} == wanted
    for name in hidl.PREPARED_MODEL:
        assert hasattr(model, name) == (name in wanted)


def test_the_error_names_a_method_of_a_later_version(
    device_of: Callable[[L], hidl.IDevice],
) -> None:
    device = device_of(L.V1_1)
    with pytest.raises(AttributeError, match=r"IDevice of HIDL 1\.1 has no getType"):
        device.getType()


def test_the_document_lists_the_first_version_of_every_method() -> None:
    text = (places.ROOT / "docs" / "reference" / "hal-versions.md").read_text()
    listed = {
        (owner, name): since
        for owner, since, names in re.findall(r"^\| `(I\w+)` \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }
    tables = {"IDevice": hidl.DEVICE, "IPreparedModel": hidl.PREPARED_MODEL, "IBuffer": hidl.BUFFER}
    there = {(owner, name): form.level for owner, forms in tables.items() for name, form in forms.items()}
    assert listed == {key: interface_name(level) for key, level in there.items()}


def test_an_aidl_client_has_no_hidl_methods(speaking: Speaking) -> None:
    client = Client(speaking("AIDL v1")[0], None)
    with pytest.raises(InvalidArgument, match=r"AIDL v1; connect with interface='HIDL 1\.3'"):
        hidl.IDevice(client, "reference")


# ------------------------------------------------------------------------------------------------ queries


@every_interface
def test_N_BAS_1_DEV_13_a_fresh_driver_is_available(level: L, device_of: Callable[[L], hidl.IDevice]) -> None:
    assert device_of(level).getStatus() is DeviceStatus.AVAILABLE


FIGURES = {
    "getCapabilities": "float32Performance quantized8Performance",
    "getCapabilities_1_1": "float32Performance quantized8Performance relaxedFloat32toFloat16Performance",
    "getCapabilities_1_2": "relaxedFloat32toFloat16PerformanceScalar relaxedFloat32toFloat16PerformanceTensor"
    " operandPerformance",
    "getCapabilities_1_3": "relaxedFloat32toFloat16PerformanceScalar relaxedFloat32toFloat16PerformanceTensor"
    " operandPerformance ifPerformance whilePerformance",
}


@every_interface
def test_N_BAS_2_CAP_2_capabilities_have_the_fields_of_each_version(
    level: L, device_of: Callable[[L], hidl.IDevice]
) -> None:
    device = device_of(level)
    for form in list(FIGURES)[:level]:
        status, found = getattr(device, form)()
        assert status is NONE
        assert set(vars(found)) == set(FIGURES[form].split())
        listed = getattr(found, "operandPerformance", [])
        single = [value for name, value in vars(found).items() if name != "operandPerformance"]
        assert single == [CPU_PERFORMANCE] * len(single)
        types = [entry.type for entry in listed]
        assert types == sorted(set(types))
        assert OperandType.SUBGRAPH not in types
        assert all(min(entry.info.exec_time, entry.info.power_usage) > 0 for entry in listed)


def test_N_BAS_2_the_capabilities_of_every_device_are_valid(speaking: Speaking) -> None:
    client = Client(speaking("AIDL v4")[0], None)
    for info in client.devices():
        validate_capabilities(client.device(info.name).capabilities())


def test_N_BAS_3_the_description_of_every_device_is_valid(speaking: Speaking) -> None:
    client = Client(speaking("HIDL 1.2")[0], None)
    for info in client.devices():
        device = hidl.IDevice(client, info.name)
        status, version = device.getVersionString()
        assert status is NONE and version
        status, kind = device.getType()
        assert status is NONE
        validate_device_type(kind)
        status, extensions = device.getSupportedExtensions()
        assert status is NONE
        for extension in extensions:
            validate_extension(extension)
        status, model_files, data_files = device.getNumberOfCacheFilesNeeded()
        assert status is NONE and max(model_files, data_files) <= 32
        vendor, *own = info.name.split("-")
        assert vendor and info.name.isprintable()
        has_no_vendor = info.name in ("reference", "compiled") or is_runtime_name(info.name)
        assert (len(own) == 1 and own[0]) or has_no_vendor
    names = [info.name for info in client.devices()]
    assert len(set(names)) == len(names) > 1


@every_interface
def test_N_BAS_5_DEV_14_DEV_13_an_unavailable_device_reports_its_status(
    level: L, speaking: Speaking, request_: Request
) -> None:
    client = Client(speaking(interface_name(level))[0], None)
    device = hidl.IDevice(client, "reference")
    model = prepared(device, level)
    unavailable = ErrorStatus.DEVICE_UNAVAILABLE
    client.set_device_status("reference", DeviceStatus.OFFLINE)
    try:
        assert device.getStatus() is DeviceStatus.OFFLINE
        assert device.getCapabilities() == (unavailable, None)
        assert device.getSupportedOperations(ADD) == (unavailable, [])
        callback = Callback()
        assert device.prepareModel(ADD, callback) is unavailable
        assert callback.only() == (unavailable, None)
        if level >= L.V1_2:
            assert model.executeSynchronously(request_, NO) == (unavailable, [], hidl.NO_HIDL_TIMING)
            assert device.getVersionString() == (unavailable, "")
            assert device.getType()[0] is device.getSupportedExtensions()[0] is unavailable
            assert device.getNumberOfCacheFilesNeeded() == (unavailable, 0, 0)
            assert device.prepareModelFromCache([], [], TOKEN, callback) is unavailable
            assert callback.only() == (unavailable, None)
    finally:
        client.set_device_status("reference", DeviceStatus.AVAILABLE)
    assert device.getStatus() is DeviceStatus.AVAILABLE


# ------------------------------------------------------------------------------------------------ models


@every_interface
def test_DEV_13_every_version_of_getSupportedOperations_covers_each_operation(
    level: L, device_of: Callable[[L], hidl.IDevice]
) -> None:
    device = device_of(level)
    for form in [name for name in hidl.DEVICE if name.startswith("getSupportedOperations")][:level]:
        assert getattr(device, form)(ADD) == (NONE, [True])
        wrong = [[count + 1 for count in number_of_consumers(ADD.main)]]
        assert getattr(device, form)(ADD, consumers=wrong) == (INVALID, [])
        newer = (NONE, [True] * len(LOOP.main.operations)) if form.endswith("_1_3") else (INVALID, [])
        assert getattr(device, form)(LOOP) == newer


@every_interface
@pytest.mark.parametrize("form", PREPARE)
def test_DEV_13_every_version_of_prepareModel_calls_back_once(
    form: str, level: L, device_of: Callable[[L], hidl.IDevice]
) -> None:
    device = device_of(level)
    if form not in dir(device):
        with pytest.raises(AttributeError):
            getattr(device, form)
        return
    callback = Callback()
    assert getattr(device, form)(ADD, *PREPARE[form], callback) is NONE
    status, model = callback.only()
    assert status is NONE
    assert callback.threads[0] is not threading.current_thread()
    model.close()
    with pytest.raises(ValueError, match="argument"):
        getattr(device, form)(ADD, *PREPARE[form])  # the callback is missing


@every_interface
@pytest.mark.parametrize("form", PREPARE)
def test_DEV_13_N_VAL_21_a_rejected_model_calls_back_before_the_same_status_is_returned(
    form: str, level: L, device_of: Callable[[L], hidl.IDevice]
) -> None:
    device = device_of(level)
    if form not in dir(device) or form == "prepareModel_1_3":
        return
    callback = Callback()
    assert getattr(device, form)(LOOP, *PREPARE[form], callback) is INVALID
    assert callback.only() == (INVALID, None)
    assert callback.threads == [threading.current_thread()]


RELAXED = replace(ADD, relax_computation_float32_to_float16=True)
NAMING = replace(ADD, extensions=(ExtensionNameAndPrefix("com.example.fibonacci", 1),))


@every_interface
@pytest.mark.parametrize(
    ("model", "since"), [(RELAXED, L.V1_1), (NAMING, L.V1_2)], ids=["relaxed", "with names of extensions"]
)
def test_MOD_13_N_VAL_21_a_method_accepts_the_models_of_its_version_in_every_interface(
    model: Model, since: L, level: L, device_of: Callable[[L], hidl.IDevice]
) -> None:
    device = device_of(level)
    for number, form in enumerate(list(PREPARE)[:level]):
        status = NONE if L(number + 1) >= since else INVALID
        callback = Callback()
        assert getattr(device, form)(model, *PREPARE[form], callback) is status
        assert callback.only()[0] is status
        supported = getattr(device, form.replace("prepareModel", "getSupportedOperations"))
        assert supported(model) == ((NONE, [True]) if status is NONE else (INVALID, []))


@every_interface
def test_N_MOD_8_a_wrong_number_of_consumers_is_rejected(level: L, device_of: Callable[[L], hidl.IDevice]) -> None:
    device, form = device_of(level), newest_form(level)
    right = number_of_consumers(ADD.main)
    for index in range(len(right)):
        callback = Callback()
        wrong = [*right[:index], right[index] + 1, *right[index + 1 :]]
        assert getattr(device, form)(ADD, *PREPARE[form], callback, consumers=[wrong]) is INVALID
        assert callback.only() == (INVALID, None)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ((99, MEDIUM, None, [], [], TOKEN), INVALID),
        ((FAST, 99, None, [], [], TOKEN), INVALID),
        ((1 << 40, MEDIUM, None, [], [], TOKEN), INVALID),
        ((FAST, MEDIUM, PASSED, [], [], TOKEN), ErrorStatus.MISSED_DEADLINE_PERSISTENT),
    ],
    ids=["preference", "priority", "no 32 bits", "deadline"],
)
def test_prepareModel_1_3_validates_its_arguments(
    arguments: tuple[Any, ...], status: ErrorStatus, device_of: Callable[[L], hidl.IDevice]
) -> None:
    callback = Callback()
    assert device_of(L.V1_3).prepareModel_1_3(ADD, *arguments, callback) is status
    assert callback.only() == (status, None)


@pytest.mark.parametrize("form", PREPARE)
def test_N_VAL_24_a_preparation_without_a_callback_is_rejected(
    form: str, device_of: Callable[[L], hidl.IDevice]
) -> None:
    assert getattr(device_of(L.V1_3), form)(ADD, *PREPARE[form], None) is INVALID


@pytest.mark.parametrize("form", FROM_CACHE)
def test_N_VAL_24_a_preparation_from_a_cache_without_a_callback_is_rejected(
    form: str, device_of: Callable[[L], hidl.IDevice]
) -> None:
    assert getattr(device_of(L.V1_3), form)(*FROM_CACHE[form], None) is INVALID


EXHAUSTED = ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT


@pytest.mark.parametrize(
    ("level", "form", "status"),
    [
        (L.V1_2, "prepareModel_1_2", FAILED),
        (L.V1_3, "prepareModel_1_2", FAILED),
        (L.V1_3, "prepareModel_1_3", ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT),  # more than the whole quota
    ],
)
def test_DEV_13_PREP_11_a_rejected_preparation_returns_a_status_of_its_version(
    level: L, form: str, status: ErrorStatus, speaking: Speaking
) -> None:
    connection, session = speaking(interface_name(level))
    session.quota.limit_bytes = session.quota.charged_bytes
    callback = Callback()
    device = hidl.IDevice(Client(connection, None), "reference")
    assert getattr(device, form)(ADD, *PREPARE[form], callback) is status
    assert callback.only() == (status, None)


@pytest.mark.parametrize(
    ("level", "form", "status"),
    [
        (L.V1_2, "prepareModelFromCache", FAILED),
        (L.V1_3, "prepareModelFromCache", FAILED),
        (L.V1_3, "prepareModelFromCache_1_3", EXHAUSTED),
    ],
)
def test_DEV_13_CACHE_8_a_callback_gets_a_status_of_its_version(
    level: L, form: str, status: ErrorStatus, speaking: Speaking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    device = hidl.IDevice(Client(speaking(interface_name(level))[0], None), "reference")
    callback = Callback()
    with ExitStack() as stack:
        caches = [[[fd] for fd in fds] for fds in Paths.new(tmp_path).open(stack)]
        assert device.prepareModel_1_2(ADD, FAST, *caches, TOKEN, callback) is NONE
        assert callback.only()[0] is NONE
        monkeypatch.setattr(files, "decode_program", no_memory)
        assert getattr(device, form)(*FROM_CACHE[form][:-3], *caches, TOKEN, callback) is NONE
        assert callback.only() == (status, None)


# ------------------------------------------------------------------------------------------------ executions

SYNCHRONOUS = pytest.mark.parametrize(
    ("level", "form", "more"),
    [
        (L.V1_2, "executeSynchronously", ()),
        (L.V1_3, "executeSynchronously", ()),
        (L.V1_3, "executeSynchronously_1_3", (None, None)),
    ],
)


@SYNCHRONOUS
def test_EXE_15_a_synchronous_execution_generates_status_shapes_and_timing(
    level: L,
    form: str,
    more: tuple[Any, ...],
    device_of: Callable[[L], hidl.IDevice],
    request_: Request,
    pools: tuple[Memory, Memory],
) -> None:
    execute = getattr(prepared(device_of(level), level), form)
    assert execute(request_, NO, *more) == (NONE, [OutputShape((4,))], hidl.NO_HIDL_TIMING)
    assert floats(pools[1]) == SUM
    assert hidl.NO_HIDL_TIMING == (2**64 - 1, 2**64 - 1)
    missing = Request(request_.inputs[1:], request_.outputs, request_.pools)
    assert execute(missing, YES, *more) == (INVALID, [], hidl.NO_HIDL_TIMING)


ASYNCHRONOUS: dict[str, tuple[Any, ...]] = {"execute": (), "execute_1_2": (NO,), "execute_1_3": (NO, None, None)}


@every_interface
@pytest.mark.parametrize("form", ASYNCHRONOUS)
def test_EXE_15_EXE_6_every_version_of_execute_calls_back_once(
    form: str, level: L, device_of: Callable[[L], hidl.IDevice], request_: Request, pools: tuple[Memory, Memory]
) -> None:
    model = prepared(device_of(level), level)
    if form not in dir(model):
        return
    callback, more = Callback(), ASYNCHRONOUS[form]
    assert getattr(model, form)(request_, *more, None) is INVALID  # N-VAL-24
    assert getattr(model, form)(request_, *more, callback) is NONE
    assert callback.only() == ((NONE,) if form == "execute" else (NONE, [OutputShape((4,))], hidl.NO_HIDL_TIMING))
    assert floats(pools[1]) == SUM
    missing = Request(request_.inputs[1:], request_.outputs, request_.pools)
    assert getattr(model, form)(missing, *more, callback) is INVALID
    assert callback.threads[-1] is threading.current_thread()
    assert callback.only() == ((INVALID,) if form == "execute" else (INVALID, [], hidl.NO_HIDL_TIMING))


def test_EXE_15_a_fenced_execution_has_a_fence_and_two_timings(
    device_of: Callable[[L], hidl.IDevice], request_: Request, pools: tuple[Memory, Memory]
) -> None:
    model = prepared(device_of(L.V1_3), L.V1_3)
    status, fence, callback = model.executeFenced(request_, [], YES, None, None, None)
    assert status is NONE
    assert fence.wait(LIMIT_S) is FenceState.SIGNALED
    assert floats(pools[1]) == SUM
    status, launched, fenced = callback.getExecutionInfo()
    assert status is NONE
    assert fenced.timeInDriver <= launched.timeInDriver < 10**7
    callback.close()


def test_N_REQ_3_a_fence_without_an_fd_is_rejected(
    device_of: Callable[[L], hidl.IDevice], request_: Request, pools: tuple[Memory, Memory]
) -> None:
    model = prepared(device_of(L.V1_3), L.V1_3)
    for wait_for in ([None], [pools[0]]):
        assert model.executeFenced(request_, wait_for, NO, None, None, None) == (INVALID, None, None)


def test_TIM_2_EXE_15_times_are_microseconds(device_of: Callable[[L], hidl.IDevice], request_: Request) -> None:
    _, _, timing = prepared(device_of(L.V1_3), L.V1_3).executeSynchronously_1_3(request_, YES, None, None)
    assert 0 <= timing.timeOnDevice <= timing.timeInDriver < 10**7


@pytest.mark.parametrize(
    ("deadline", "loop_timeout", "status"),
    [
        (PASSED, None, ErrorStatus.MISSED_DEADLINE_PERSISTENT),
        (None, 15_000_000_001, INVALID),
        (None, 10**9, NONE),
    ],
)
def test_EXE_15_the_limits_of_the_newest_version_are_enforced(
    deadline: int | None,
    loop_timeout: int | None,
    status: ErrorStatus,
    device_of: Callable[[L], hidl.IDevice],
    request_: Request,
) -> None:
    model = prepared(device_of(L.V1_3), L.V1_3)
    reply = model.executeSynchronously_1_3(request_, NO, deadline, loop_timeout)[0]
    late = (ErrorStatus.MISSED_DEADLINE_PERSISTENT, ErrorStatus.MISSED_DEADLINE_TRANSIENT)
    assert reply in (late if status in late else (status,))


def test_EXE_15_an_older_version_returns_no_newer_status(speaking: Speaking, request_: Request) -> None:
    connection, session = speaking("HIDL 1.3")
    model = prepared(hidl.IDevice(Client(connection, None), "reference"), L.V1_3)
    session.quota.limit_bytes = session.quota.charged_bytes  # so that the request's memory exceeds it
    assert model.executeSynchronously_1_3(request_, NO, None, None)[0] is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
    assert model.executeSynchronously(request_, NO)[0] is FAILED


# ------------------------------------------------------------------------------------------------ bursts


class Memories:
    """IBurstCallback over some memories."""

    def __init__(self, *memories: Memory) -> None:
        self.memories = memories
        self.requested: list[list[int]] = []
        self.status = NONE

    def getMemories(self, slots: list[int]) -> tuple[ErrorStatus, list[Memory]]:
        self.requested.append(slots)
        return self.status, [self.memories[slot] for slot in slots]


@pytest.fixture
def queues(resources: ExitStack) -> tuple[MessageQueue, MessageQueue]:
    requests, results = (MessageQueue.create(DATUM_BYTES, 1024) for _ in range(2))
    resources.callback(requests.close)
    resources.callback(results.close)
    return requests, results


def exchange(queues: tuple[MessageQueue, MessageQueue]) -> Any:
    assert queues[0].send(packet_for(ADD))
    packet = queues[1].receive(None, 0)
    assert packet is not None
    return decode_result(packet)


def test_BUR_2_N_REQ_4_a_burst_over_the_caller_s_queues_with_its_callback(
    device_of: Callable[[L], hidl.IDevice], pools: tuple[Memory, Memory], queues: tuple[MessageQueue, MessageQueue]
) -> None:
    callback = Memories(*pools)
    status, context = prepared(device_of(L.V1_2), L.V1_2).configureExecutionBurst(callback, *queues)
    assert status is NONE
    assert exchange(queues).status is NONE
    assert floats(pools[1]) == SUM
    for slot in (1, 1, 7, -1):  # used, freed already, and two unknown slots
        context.freeMemory(slot)
    context._connection.exchange(messages.ListDevices(context._connection.next_call_id()), messages.DeviceList)
    assert exchange(queues).status is NONE
    assert callback.requested == [[0, 1], [1]]
    context.close()


def test_BUR_2_the_result_has_the_callback_s_status(
    device_of: Callable[[L], hidl.IDevice], pools: tuple[Memory, Memory], queues: tuple[MessageQueue, MessageQueue]
) -> None:
    callback = Memories(*pools)
    callback.status = INVALID
    _, context = prepared(device_of(L.V1_3), L.V1_3).configureExecutionBurst(callback, *queues)
    assert exchange(queues).status is INVALID
    context.close()


def test_BUR_2_a_burst_that_is_rejected_has_no_context(
    device_of: Callable[[L], hidl.IDevice], pools: tuple[Memory, Memory], resources: ExitStack
) -> None:
    model = prepared(device_of(L.V1_2), L.V1_2)
    wrong = [MessageQueue.create(8, 16) for _ in range(2)]
    for queue in wrong:
        resources.callback(queue.close)
    assert model.configureExecutionBurst(Memories(*pools), *wrong) == (FAILED, None)
    model.close()
    good = [MessageQueue.create(DATUM_BYTES, 16) for _ in range(2)]
    for queue in good:
        resources.callback(queue.close)
    assert model.configureExecutionBurst(Memories(*pools), *good) == (INVALID, None)


def test_BUR_15_a_wait_for_a_result_ends_with_the_driver(
    speaking: Speaking, pools: tuple[Memory, Memory], queues: tuple[MessageQueue, MessageQueue]
) -> None:
    connection, session = speaking("HIDL 1.2")
    model = prepared(hidl.IDevice(Client(connection, None), "reference"), L.V1_2)
    _, context = model.configureExecutionBurst(Memories(*pools), *queues)
    session.stop()
    with pytest.raises(DeadObject):
        queues[1].receive(None, 0)
    context.close()
