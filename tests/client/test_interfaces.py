"""The eight interface versions over a connection: rejections and replies of a real session in this process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from msgspec.structs import replace
from support import control_flow_models, models
from support.connections import open_connection
from support.executors import floats
from support.hints import with_extension

from nnfmq.base.channel import Channel
from nnfmq.base.memory import Memory
from nnfmq.client.connection.client import Client
from nnfmq.client.connection.connection import Connection
from nnfmq.driver.session.session import Session
from nnfmq.hal.capabilities import CPU_PERFORMANCE, UNKNOWN_PERFORMANCE
from nnfmq.hal.errors import ErrorStatus, GeneralFailure, InvalidArgument
from nnfmq.hal.feature_levels import FeatureLevel as L
from nnfmq.hal.feature_levels import interface_name, is_aidl, number_of_consumers
from nnfmq.hal.timing import NO_TIMING
from nnfmq.hal.types import (
    DataLocation,
    ExecutionConfig,
    ExecutionPreference,
    ExtensionNameAndPrefix,
    MeasureTiming,
    Model,
    OperandType,
    OutputShape,
    Priority,
    Request,
    RequestArgument,
    TokenValuePair,
)
from nnfmq.serialize import messages
from nnfmq.serialize.models import encode_model

Speaking = Callable[[str], tuple[Connection, Session]]
ADD = models.add_model()
SUM = [11.0, 22.0, 33.0, 44.0]
INVALID = ErrorStatus.INVALID_ARGUMENT
every_interface = pytest.mark.parametrize("level", L, ids=interface_name)
hidl = pytest.mark.parametrize("level", [level for level in L if not is_aidl(level)], ids=interface_name)


@pytest.fixture
def client_of(speaking: Speaking) -> Callable[[L], Client]:
    return lambda level: Client(speaking(interface_name(level))[0], None)


# ------------------------------------------------------------------------------------------------ handshake


@every_interface
def test_DEV_9_the_feature_level_follows_from_the_interface(level: L, client_of: Callable[[L], Client]) -> None:
    client = client_of(level)
    assert client.interface == interface_name(level)
    connection = client.connection
    assert (connection.level, connection.is_aidl, connection.has_deadlines) == (level, is_aidl(level), level >= L.V1_3)
    assert {info.feature_level for info in client.devices()} == {level}


@pytest.mark.parametrize("interface", ["", "HIDL 1.4", "AIDL v5", "aidl v4", "1.2"])
def test_an_unknown_interface_version_is_rejected_by_the_client(interface: str) -> None:
    ours, theirs = Channel.pair()
    with theirs, pytest.raises(InvalidArgument, match=r"there are HIDL 1\.0, .* AIDL v4"):
        open_connection(ours, None, interface=interface)


# ------------------------------------------------------------------------------------------------ models

MODELS: dict[str, tuple[Model, L]] = {
    "ADD": (ADD, L.V1_0),
    "WHILE": (control_flow_models.counting(), L.V1_3),
}


def prepare(client: Client, model: Model, **changes: Any) -> Any:
    return with_extension(client.device("reference"), "com.example.none").prepare(model, **changes)


@every_interface
@pytest.mark.parametrize(("model", "needed"), MODELS.values(), ids=MODELS.keys())
def test_N_VAL_21_a_model_of_a_newer_version_is_rejected(
    model: Model, needed: L, level: L, client_of: Callable[[L], Client]
) -> None:
    client = client_of(level)
    if level >= needed:
        assert client.device("reference").supported_operations(model) == [True] * len(model.main.operations)
        prepare(client, model).close()
        return
    for ask in (client.device("reference").supported_operations, lambda model: prepare(client, model)):
        with pytest.raises(InvalidArgument, match=rf"{interface_name(needed)}.*{interface_name(level)}.*\(N-VAL-21\)"):
            ask(model)


@pytest.mark.parametrize(("level", "is_allowed"), [(L.V1_2, True), (L.V1_3, True), (L.AIDL_V1, False)])
def test_N_VAL_12_sixteen_bit_prefixes_exist_in_hidl_only(
    level: L, is_allowed: bool, client_of: Callable[[L], Client]
) -> None:
    model = replace(ADD, extensions=(ExtensionNameAndPrefix("com.example.none", 0x8000),))
    client = client_of(level)
    if is_allowed:
        prepare(client, model).close()
    else:
        with pytest.raises(InvalidArgument, match="N-VAL-12"):
            prepare(client, model)


CALLS_WITH_A_MODEL = pytest.mark.parametrize("kind", [messages.GetSupportedOperations, messages.PrepareModel])


def with_consumers(connection: Connection, kind: Any, model: Model, consumers: Any) -> ErrorStatus:
    data, _ = encode_model(model)
    call = connection.next_call_id()
    if kind is messages.GetSupportedOperations:
        said = kind(call, "reference", data, (), consumers)
        return connection.exchange(said, messages.SupportedOperations).status
    said = kind(call, "reference", ExecutionPreference.SUSTAINED_SPEED, Priority.MEDIUM, -1, data, (), consumers)
    return connection.exchange(said, messages.PreparedModelReady).status


@hidl
@CALLS_WITH_A_MODEL
def test_N_MOD_8_wrong_numbers_of_consumers_are_rejected_in_hidl(kind: Any, level: L, speaking: Speaking) -> None:
    connection, _ = speaking(interface_name(level))
    right = tuple(number_of_consumers(ADD.main))
    assert with_consumers(connection, kind, ADD, (right,)) is ErrorStatus.NONE
    for index, count in enumerate(right):
        for wrong in {max(0, count - 1), count + 1} - {count}:
            changed = (*right[:index], wrong, *right[index + 1 :])
            assert with_consumers(connection, kind, ADD, (changed,)) is INVALID
    for number in ((), (right, right), (right[:-1],), ((*right, 0),)):
        assert with_consumers(connection, kind, ADD, number) is INVALID


def test_N_MOD_8_the_consumers_of_every_subgraph_are_checked(speaking: Speaking) -> None:
    connection, _ = speaking("HIDL 1.3")
    model = control_flow_models.counting()
    right = tuple(tuple(number_of_consumers(graph)) for graph in (model.main, *model.referenced))
    assert with_consumers(connection, messages.PrepareModel, model, right) is ErrorStatus.NONE
    wrong = (*right[:-1], (right[-1][0] + 1, *right[-1][1:]))
    assert with_consumers(connection, messages.PrepareModel, model, wrong) is INVALID


@CALLS_WITH_A_MODEL
def test_N_MOD_8_aidl_has_no_numbers_of_consumers(kind: Any, speaking: Speaking) -> None:
    connection, _ = speaking("AIDL v1")
    assert with_consumers(connection, kind, ADD, ()) is ErrorStatus.NONE
    assert with_consumers(connection, kind, ADD, (tuple(number_of_consumers(ADD.main)),)) is INVALID


@every_interface
def test_DEV_13_arguments_of_a_preparation_that_the_version_does_not_have_are_rejected(
    level: L, client_of: Callable[[L], Client]
) -> None:
    client = client_of(level)
    for since, changes in [
        (L.V1_1, {"preference": ExecutionPreference.LOW_POWER}),
        (L.V1_3, {"priority": Priority.HIGH}),
    ]:
        if level >= since:
            prepare(client, ADD, **changes).close()
        else:
            with pytest.raises(
                InvalidArgument, match=f"{interface_name(level)} does not have .*{interface_name(since)}"
            ):
                prepare(client, ADD, **changes)
    prepare(client, ADD, timeout=20).close()  # a deadline where there is one, else only a wait


# ------------------------------------------------------------------------------------------------ executions


@every_interface
def test_an_execution_has_the_arguments_of_the_version(
    level: L, client_of: Callable[[L], Client], pools: tuple[Memory, Memory]
) -> None:
    prepared = prepare(client_of(level), ADD)
    outcome = prepared.execute_request(models.request_for(ADD, pools), timeout=20)
    assert floats(pools[1]) == SUM
    assert outcome == ((OutputShape((4,)),) if level >= L.V1_2 else (), NO_TIMING)
    given = [1, 2, 3, 4], [10, 20, 30, 40]
    (result,) = prepared.execute(*given)
    assert result.tolist() == SUM
    pending = prepared.execute_async(*given, timeout=20)  # a deadline where there is one, else only a wait
    (result,) = pending.result(20)
    assert result.tolist() == SUM


@every_interface
def test_TIM_2_times_are_whole_microseconds_in_hidl_and_none_before_1_2(
    level: L, client_of: Callable[[L], Client], pools: tuple[Memory, Memory]
) -> None:
    prepared = prepare(client_of(level), ADD)
    request, config = models.request_for(ADD, pools), ExecutionConfig(MeasureTiming.YES)
    if level < L.V1_2:
        with pytest.raises(InvalidArgument, match="measured times"):
            prepared.execute_request(request, config)
        return
    times = [prepared.execute_request(request, config).timing for _ in range(5)]
    assert all(0 <= timing.time_on_device_ns <= timing.time_in_driver_ns for timing in times)
    parts = [ns % 1000 for timing in times for ns in (timing.time_on_device_ns, timing.time_in_driver_ns)]
    assert any(parts) == is_aidl(level)  # ten times whole microseconds by chance: 1 in 10^30


HINT = ExecutionConfig(
    hints=(TokenValuePair(1 << 16, b""),), extensions=(ExtensionNameAndPrefix("com.example.none", 1),)
)


@every_interface
@pytest.mark.parametrize(
    ("config", "since"),
    [(ExecutionConfig(loop_timeout_ns=10**9), L.V1_3), (HINT, L.AIDL_V4)],
    ids=["loop timeout", "EXE-14 hints"],
)
def test_EXE_15_arguments_of_an_execution_that_the_version_does_not_have_are_rejected(
    config: ExecutionConfig, since: L, level: L, client_of: Callable[[L], Client], pools: tuple[Memory, Memory]
) -> None:
    prepared, request = prepare(client_of(level), ADD), models.request_for(ADD, pools)
    if level >= since:
        prepared.execute_request(request, config)
        assert floats(pools[1]) == SUM
    else:
        with pytest.raises(InvalidArgument, match=f"{interface_name(level)} does not have .*{interface_name(since)}"):
            prepared.execute_request(request, config)
        assert floats(pools[1]) == [0.0] * 4


@pytest.mark.parametrize(("level", "is_allowed"), [(L.V1_3, False), (L.AIDL_V1, True)])
def test_EXE_11_padding_exists_in_aidl_only(
    level: L, is_allowed: bool, client_of: Callable[[L], Client], pools: tuple[Memory, Memory]
) -> None:
    prepared, request = prepare(client_of(level), ADD), models.request_for(ADD, pools)
    padded = replace(request.inputs[0], location=replace(request.inputs[0].location, padding=4))
    request = replace(request, inputs=(padded, request.inputs[1]))
    if is_allowed:
        prepared.execute_request(request)
    else:
        with pytest.raises(InvalidArgument, match="padding"):
            prepared.execute_request(request)


@every_interface
def test_N_RQX_8_outputs_must_be_fully_specified_before_1_2(
    level: L, client_of: Callable[[L], Client], resources: ExitStack
) -> None:
    model = models.unsized_relu_model()
    prepared = prepare(client_of(level), model)
    source, sink = (resources.enter_context(Memory.create(16)) for _ in range(2))
    given = RequestArgument(location=DataLocation(0, 0, 16), dimensions=(4,))
    request = Request((given,), (RequestArgument(location=DataLocation(1, 0, 16)),), (source, sink))
    if level >= L.V1_2:
        assert prepared.execute_request(request).shapes == (OutputShape((4,)),)
    else:
        with pytest.raises(InvalidArgument, match="N-RQX-8"):
            prepared.execute_request(request)
        known = replace(request.outputs[0], dimensions=(4,))
        assert prepared.execute_request(replace(request, outputs=(known,))).shapes == ()


@every_interface
def test_a_status_that_the_version_does_not_have_is_a_general_failure(
    level: L, speaking: Speaking, pools: tuple[Memory, Memory]
) -> None:
    connection, session = speaking(interface_name(level))
    prepared = prepare(Client(connection, None), ADD)
    session.quota.limit_bytes = session.quota.charged_bytes  # so that the request's memory is too much
    message = messages.Execute(
        connection.next_call_id(),
        prepared.model_id,
        messages.request_to_data(models.request_for(ADD, pools)),
        messages.config_to_data(ExecutionConfig()),
        -1,
    )
    reply = connection.exchange(message, messages.Executed, [pool.fileno() for pool in pools])
    exhausted = ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
    assert reply.status is (exhausted if level >= L.V1_3 else ErrorStatus.GENERAL_FAILURE)
    assert "the limit is" in reply.message


# ------------------------------------------------------------------------------------------------ bursts


@every_interface
def test_DEV_13_EXE_15_a_version_without_bursts_rejects_them(level: L, client_of: Callable[[L], Client]) -> None:
    prepared = prepare(client_of(level), ADD)
    for since, configure in ((L.V1_2, prepared.burst), (L.AIDL_V1, prepared.aidl_burst)):
        if level >= since:
            configure().close()
        else:
            with pytest.raises(
                GeneralFailure, match=f"{interface_name(level)} does not have .*{interface_name(since)}"
            ):
                configure()


def test_BUR_20_hints_on_an_aidl_burst_exist_since_v4(
    client_of: Callable[[L], Client], pools: tuple[Memory, Memory]
) -> None:
    request = models.request_for(ADD, pools)
    with prepare(client_of(L.AIDL_V3), ADD).aidl_burst() as burst:
        burst.execute_synchronously(request)
        with pytest.raises(InvalidArgument, match="AIDL v3 does not have hints"):
            burst.execute_synchronously(request, HINT)
    with prepare(client_of(L.AIDL_V4), ADD).aidl_burst() as burst:
        burst.execute_synchronously(request, HINT)


# ------------------------------------------------------------------------------------------------ capabilities


@every_interface
def test_CAP_2_capabilities_have_the_fields_of_the_version(level: L, client_of: Callable[[L], Client]) -> None:
    found = client_of(level).device("reference").capabilities()
    types = [entry.type for entry in found.operand_performance]
    first = [OperandType.TENSOR_FLOAT32, OperandType.TENSOR_QUANT8_ASYMM]
    assert types == first if level < L.V1_2 else set(first) < set(types)
    assert (OperandType.TENSOR_QUANT8_ASYMM_SIGNED in types) == (level >= L.V1_3)
    for figure, since in [
        (found.relaxed_float32_to_float16_tensor, L.V1_1),
        (found.relaxed_float32_to_float16_scalar, L.V1_2),
        (found.if_performance, L.V1_3),
        (found.while_performance, L.V1_3),
    ]:
        assert figure == (CPU_PERFORMANCE if level >= since else UNKNOWN_PERFORMANCE)
