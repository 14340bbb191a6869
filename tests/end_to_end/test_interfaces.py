"""Older interfaces, HIDL's call forms and AIDL's bursts, through a driver process."""

from __future__ import annotations

import re
from contextlib import ExitStack, closing
from queue import Queue
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.drivers import LIMIT_S, Daemon, InThread, Process, one, until
from support.models import add_model, null_model, pool_bytes, request_for, slow_model, unsized_relu_model
from support.places import ROOT

import nnfmq
from nnfmq.base.memory import Memory
from nnfmq.hal.feature_levels import FeatureLevel, interface_name
from nnfmq.hal.types import (
    DataLocation,
    LifeTime,
    MeasureTiming,
    Operand,
    OperandType,
    OutputShape,
    Request,
    RequestArgument,
)
from nnfmq.lab import hidl
from nnfmq.validation.interface_versions import convert_to

ADD = add_model()


def create_pools(resources: ExitStack, model: Any = ADD) -> tuple[Memory, ...]:
    return tuple(resources.enter_context(Memory.create(size)) for size in pool_bytes(model))


EXAMPLES = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs" / "reference" / "hal-versions.md").read_text(), re.MULTILINE | re.DOTALL
)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_examples_of_the_document_run(number: int, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNFMQ_SOCKET", str(daemon.path))
    exec(compile(EXAMPLES[number], "docs/reference/hal-versions.md", "exec"), {})


@pytest.mark.parametrize("level", FeatureLevel, ids=interface_name)
def test_DEV_9_a_model_runs_over_every_interface(level: FeatureLevel, daemon: Daemon) -> None:
    with nnfmq.connect(daemon.path, timeout=LIMIT_S, interface=interface_name(level)) as client:
        assert client.device("reference").info.feature_level == level
        with client.device("reference").prepare(ADD) as model:
            assert model.execute([1] * 4, [2] * 4)[0].tolist() == [3.0] * 4


@pytest.mark.parametrize("level", FeatureLevel, ids=interface_name)
def test_MOD_13_N_VAL_21_a_relaxed_model_needs_1_1(level: FeatureLevel, daemon: Daemon) -> None:
    relaxed = replace(ADD, relax_computation_float32_to_float16=True)
    with nnfmq.connect(daemon.path, timeout=LIMIT_S, interface=interface_name(level)) as client:
        device = client.device("reference")
        if level is FeatureLevel.V1_0:
            for call in (device.prepare, device.supported_operations):
                with pytest.raises(nnfmq.InvalidArgument, match=r"the model needs HIDL 1\.1, .*\(N-VAL-21\)$"):
                    call(relaxed)
            relaxed = convert_to(relaxed, level).value  # strict, which is permitted
        with device.prepare(relaxed) as model:
            assert model.execute([1] * 4, [2] * 4)[0].tolist() == [3.0] * 4


def test_an_unknown_interface_starts_no_driver() -> None:
    with pytest.raises(nnfmq.InvalidArgument, match="there is no interface 'HIDL 2'"):
        nnfmq.connect(embedded=True, interface="HIDL 2")


def test_DEV_13_EXE_15_hidl_calls_prepare_and_execute(daemon: Daemon, resources: ExitStack) -> None:
    calls: Queue[tuple[Any, Any]] = Queue()
    with nnfmq.connect(daemon.path, timeout=LIMIT_S, interface="HIDL 1.2") as client:
        device = hidl.IDevice(client, "reference")
        assert device.prepareModel_1_1(ADD, 1, lambda *given: calls.put(given)) == 0
        status, model = calls.get(timeout=LIMIT_S)
        assert status == 0
        pools = create_pools(resources)
        status, shapes, timing = model.executeSynchronously(request_for(ADD, pools), MeasureTiming.YES)
        assert (status, shapes) == (0, [OutputShape((4,))])
        assert timing.timeOnDevice <= timing.timeInDriver < 10**7
        model.close()


def test_DEV_13_a_callback_is_called_once_when_the_driver_dies(daemon: Daemon) -> None:
    calls: Queue[tuple[Any, Any]] = Queue()
    with nnfmq.connect(daemon.path, timeout=LIMIT_S, interface="HIDL 1.3") as client:
        with Process(client.worker_pid) as worker:
            device = hidl.IDevice(client, "reference")
            worker.stop()
            call = InThread.start(lambda: device.prepareModel(ADD, lambda *given: calls.put(given)))
            until(lambda: len(client.connection._pending_calls) == 2, "the launch waits for its reply")
            worker.kill()
            assert isinstance(call.wait().error, nnfmq.DeadObject)  # not launched, as far as anybody knows
        assert calls.empty()


def test_BUR_19_an_aidl_burst_keeps_its_memory_in_the_driver(client: nnfmq.Client, resources: ExitStack) -> None:
    source, sink = create_pools(resources)
    with Process(client.worker_pid) as worker, client.device("reference").prepare(ADD) as model:
        before = len(worker.shared_mappings())
        with model.aidl_burst() as burst:
            for pool in (source, sink):
                burst.cache_memory(pool)
            for value in range(3):
                np.frombuffer(source.view, np.float32, 4)[:] = value
                burst.execute_synchronously(request_for(ADD, (source, sink)), timeout=LIMIT_S)
                assert np.frombuffer(sink.view, np.float32, 4).tolist() == [value] * 4
                assert len(worker.shared_mappings()) == before + 2
        until(lambda: len(worker.shared_mappings()) == before, "the driver has unmapped what the burst kept")


def test_BUR_15_BUR_19_SIGKILL_of_the_worker_ends_an_execution_on_an_aidl_burst(
    client: nnfmq.Client, resources: ExitStack
) -> None:
    slow = slow_model()
    pools = create_pools(resources, slow)
    with Process(client.worker_pid) as worker, closing(client.device("reference").prepare(slow).aidl_burst()) as burst:
        call = InThread.start(lambda: burst.execute_synchronously(request_for(slow, pools)))
        until(lambda: bool(client.connection._pending_calls), "the call waits for its reply")
        worker.kill()
        assert isinstance(call.wait().error, nnfmq.DeadObject)
        with pytest.raises(nnfmq.DeadObject):
            burst.execute_synchronously(request_for(slow, pools))


@pytest.mark.parametrize("level", FeatureLevel, ids=interface_name)
def test_MEM_6_the_preferred_padding_is_what_the_interface_can_carry(level: FeatureLevel, daemon: Daemon) -> None:
    """What the model prefers is accepted as a request's layout; HIDL, whose preference is 1, rejects any padding."""
    with ExitStack() as stack:
        client = stack.enter_context(nnfmq.connect(daemon.path, timeout=LIMIT_S, interface=interface_name(level)))
        model = stack.enter_context(client.device("reference").prepare(null_model()))
        preferred = [model.memory_preference(kind, 0) for kind in ("input", "output")]  # type: ignore[arg-type]
        assert preferred == [(64, 64 if level >= FeatureLevel.AIDL_V1 else 1)] * 2
        memory = stack.enter_context(Memory.create(128))
        memory.view[:4] = one(7).tobytes()
        (source, sink), (alignment, padding) = (0, 64), preferred[0]
        places = [DataLocation(0, at // alignment * alignment, 4, -4 % padding) for at in (source, sink)]
        model.execute_request(Request(*((RequestArgument(location=place),) for place in places), (memory,)))
        assert memory.view[64:68] == memory.view[:4]
        if level < FeatureLevel.AIDL_V1:
            padded = RequestArgument(location=DataLocation(0, 0, 4, 60))
            with pytest.raises(nnfmq.InvalidArgument, match="does not have padding"):
                model.execute_request(Request((padded,), (RequestArgument(location=places[1]),), (memory,)))


@pytest.mark.parametrize("level", FeatureLevel, ids=interface_name)
def test_MOD_5_VAL_3_an_unknown_rank_needs_1_2_and_before_it_a_request_specifies_unknown_extents(
    level: FeatureLevel, daemon: Daemon
) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(nnfmq.connect(daemon.path, timeout=LIMIT_S, interface=interface_name(level)))
        device = client.device("reference")
        inputs = (*ADD.main.input_indexes, len(ADD.main.operands))
        unranked = Operand(OperandType.TENSOR_FLOAT32, (), lifetime=LifeTime.SUBGRAPH_INPUT)  # no operation reads it
        main = replace(ADD.main, operands=(*ADD.main.operands, unranked), input_indexes=inputs)
        for call in (device.prepare, device.supported_operations):
            if level < FeatureLevel.V1_2:
                with pytest.raises(nnfmq.InvalidArgument, match=r"the model needs HIDL 1\.2, .*\(N-VAL-21\)$"):
                    call(replace(ADD, main=main))
            elif call == device.prepare:
                stack.enter_context(device.prepare(replace(ADD, main=main)))
        model = stack.enter_context(device.prepare(unsized_relu_model()))
        source, sink = (stack.enter_context(Memory.create(16)) for _ in range(2))
        given, open_output = (RequestArgument(location=DataLocation(pool, 0, 16)) for pool in (0, 1))
        model.execute_request(Request((given,), (replace(open_output, dimensions=(4,)),), (source, sink)))
        if level < FeatureLevel.V1_2:
            with pytest.raises(nnfmq.InvalidArgument, match="N-RQX-8"):
                model.execute_request(Request((given,), (open_output,), (source, sink)))
