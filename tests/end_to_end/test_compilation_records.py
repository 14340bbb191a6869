"""What telemetry, the trace and the verbose log are told of compilations on several devices, and of fallbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
from support.device_zoo import SharedDrivers
from support.drivers import Daemon, until
from support.failing_device import DEVICE, FAIL, failing_driver, four
from support.kept_records import Records
from support.models import add_model, add_relu_model, invalid_model

import nnfmq
from nnfmq import telemetry
from nnfmq.base import verbose_log
from nnfmq.client.model.cpu_fallback import CpuFallback
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.models import model_architecture_hash
from nnfmq.observe.trace_files import RingReader
from nnfmq.observe.trace_layout import ring_bytes
from nnfmq.observe.trace_points import TRACING, TraceRecorder
from nnfmq.planning.text import plan_text
from nnfmq.telemetry import TelemetryMode

pytestmark = pytest.mark.usefixtures("runtime_directory")
Start = Callable[..., Daemon]
INPUTS = [1.0, 2.0, -3.0, 4.0], [10.0, 20.0, -30.0, 40.0]


@pytest.fixture
def start(zoo: SharedDrivers, runtime_directory: Path) -> Start:
    """Return a function that lets a driver with these devices listen in the runtime directory."""
    return partial(zoo.link, runtime_directory)


@pytest.fixture
def runtime(start: Start) -> Iterator[nnfmq.Runtime]:
    """Return a runtime that is closed before the drivers end."""
    with nnfmq.Runtime() as made:
        yield made


def ids(runtime: nnfmq.Runtime, *names: str) -> str:
    """Return what telemetry names these devices."""
    return ",".join(f"{name}={runtime.device(name).version_string}" for name in names)


# ------------------------------------------------------------------------------------------------ telemetry


@pytest.mark.parametrize("is_explicit", [False, True])
def test_OBS_1_a_plan_is_one_compilation_with_the_ids_of_all_its_devices(
    start: Start, runtime: nnfmq.Runtime, is_explicit: bool
) -> None:
    start("relus", driver="one")
    start("adds", driver="two")
    devices, records = (["test-relus", "test-adds"] if is_explicit else None), Records()
    with telemetry.register(records), runtime.prepare(add_relu_model(), devices) as model:
        model.execute(*INPUTS)
        model.execute_async(*INPUTS).result()
    (record,) = records.compilations
    assert record.device_id == ids(runtime, "test-adds", "test-relus")
    assert (record.step_count, record.error_code) == (2, 0)
    assert (record.introspection_used, record.fallback_to_cpu) == (is_explicit, False)
    assert record.model_arch_hash == model_architecture_hash(add_relu_model())
    assert record.compilation_time_ns > 0
    assert [one.mode for one in records.executions] == [TelemetryMode.SYNC, TelemetryMode.ASYNC]
    assert {one.device_id for one in records.executions} == {record.device_id}
    assert all(one.duration_runtime_ns > 0 for one in records.executions)


def test_OBS_1_a_compilation_that_falls_back_says_so(start: Start, runtime: nnfmq.Runtime) -> None:
    start("refuses")
    records = Records()
    with telemetry.register(records), runtime.prepare(add_relu_model()):
        pass
    failed, fallback = records.compilations
    assert (failed.error_code, failed.fallback_to_cpu) == (ErrorStatus.GENERAL_FAILURE, False)
    assert (fallback.error_code, fallback.fallback_to_cpu, fallback.introspection_used) == (0, True, False)


def test_OBS_1_a_plan_whose_step_fails_is_a_failed_compilation_and_one_that_falls_back(
    start: Start, runtime: nnfmq.Runtime
) -> None:
    start("adds", driver="one")
    start("relufails", driver="two")
    records = Records()
    with telemetry.register(records), runtime.prepare(add_relu_model()):
        pass
    plan, fallback = records.compilations
    assert plan.device_id == ids(runtime, "test-adds", "test-relufails")
    assert (plan.error_code, plan.compilation_time_ns) == (ErrorStatus.GENERAL_FAILURE, -1)
    assert (fallback.fallback_to_cpu, fallback.step_count) == (True, 1)


def test_OBS_1_a_device_that_was_available_is_no_fallback(
    client: nnfmq.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = client.device("reference").info
    monkeypatch.setattr(type(client), "devices", lambda self, **_: [reference])
    records = Records()
    with telemetry.register(records), client.prepare(add_model()) as model:
        assert model.device == "reference"
    (record,) = records.compilations
    assert (record.introspection_used, record.fallback_to_cpu) == (False, False)


def test_OBS_2_an_execution_that_falls_back_is_the_error_of_its_device_and_a_success_of_the_cpu(
    tmp_path: Path,
) -> None:
    records = Records()
    with ExitStack() as stack:
        client = stack.enter_context(stack.enter_context(failing_driver(tmp_path)).connect())
        cpu = stack.enter_context(nnfmq.connect(embedded=True))
        stack.enter_context(telemetry.register(records))
        model = stack.enter_context(client.device(DEVICE).prepare(add_model()))
        model.fallback = CpuFallback(partial(cpu.device, "reference"), add_model())
        assert model.execute(four(FAIL), four(1))[0].tolist() == [FAIL + 1] * 4
    assert [record.error_code for record in records.executions] == [ErrorStatus.GENERAL_FAILURE, 0]
    own, fallback = records.compilations
    assert (own.fallback_to_cpu, fallback.fallback_to_cpu, fallback.introspection_used) == (False, True, False)


# ------------------------------------------------------------------------------------------------ trace and log


@contextmanager
def recorded_names() -> Iterator[list[str]]:
    """Record this process; after the block the list has the names of its slices of the layer LR, as they began."""
    memory, found = bytearray(ring_bytes(512)), []
    TRACING.start(TraceRecorder(memoryview(memory), "test"))
    reader = RingReader(memoryview(memory))
    try:
        yield found
        reader.poll()
        found += [one.name for one in reader.trace().slices if one.name.startswith("[NN_LR_")]
    finally:
        TRACING.stop()
        reader.release()


def test_OBS_7_a_compilation_has_slices_of_the_plan_and_of_each_step(start: Start, runtime: nnfmq.Runtime) -> None:
    start("adds", driver="one")
    start("relus", driver="two")
    with recorded_names() as names, runtime.prepare(add_relu_model()):
        pass
    assert names[:2] == ["[NN_LR_PC]compilation", "[NN_LR_PC]plan"]
    assert set(names[2:]) == {"[NN_LR_PC]step 0 on test-adds", "[NN_LR_PC]step 1 on test-relus"}


def test_OBS_7_a_fallback_of_a_compilation_has_a_slice(start: Start, runtime: nnfmq.Runtime) -> None:
    start("refuses")
    with recorded_names() as names, runtime.prepare(add_relu_model()):
        pass
    assert names[-1] == "[NN_LR_PC]fallback to nnapi-reference"


def test_OBS_7_the_compilation_of_an_ordinary_model_has_a_slice(client: nnfmq.Client) -> None:
    with recorded_names() as names, client.prepare(add_model()):
        pass
    assert names == ["[NN_LR_PC]compilation"]


@pytest.fixture
def verbose(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """Return a function that returns the lines of a tag so far; `model` and `compilation` are on."""
    monkeypatch.setattr(verbose_log._Mask, "tags", frozenset({"model", "compilation"}))
    caplog.set_level("INFO", "nnfmq.vlog")

    def lines(tag: str) -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == f"nnfmq.vlog.{tag}"]

    return lines


def test_OBS_5_the_plan_and_the_preparation_of_each_step_are_logged(
    start: Start, runtime: nnfmq.Runtime, verbose: Callable[[str], list[str]]
) -> None:
    start("adds", driver="one")
    start("relus", driver="two")
    with runtime.prepare(add_relu_model()) as model:
        plan = plan_text(model.plan).splitlines()
    lines = verbose("compilation")
    assert lines[: len(plan)] == plan
    assert [line.split(" prepares")[0] for line in sorted(lines) if " prepares " in line] == [
        "device test-adds", "device test-relus",
    ]  # fmt: skip


def test_OBS_5_UTL_6_a_finished_model_is_logged_as_a_graph(verbose: Callable[[str], list[str]]) -> None:
    with nnfmq.ModelBuilder() as builder:
        x = builder.add_operand("TENSOR_FLOAT32", (4,))
        y = builder.add_operand("TENSOR_FLOAT32", (4,))
        builder.add_operation("RELU", [x], [y])
        builder.identify_inputs_and_outputs([x], [y])
        builder.finish()
    lines = verbose("model")
    assert lines[:2] == ["// ModelBuilder.finish", "digraph {"]
    assert '    n0 [shape=box label="0: RELU"]' in lines


def test_OBS_5_a_failed_preparation_is_logged(client: nnfmq.Client, verbose: Callable[[str], list[str]]) -> None:
    with pytest.raises(nnfmq.InvalidArgument):
        client.device("reference").prepare(invalid_model())
    assert verbose("compilation")[-1].startswith("device reference does not prepare model '': ")


@pytest.mark.parametrize("devices", [None, ["test-relus", "test-adds"], ["nnapi-reference"]])
def test_the_plan_of_a_model_is_the_one_with_which_it_is_prepared(
    start: Start, runtime: nnfmq.Runtime, devices: list[str] | None
) -> None:
    driver = start("adds", "relus")
    until(lambda: not driver.process.children(), "the clients of the test before are gone")
    plan = runtime.plan(add_relu_model(), devices)
    with driver.connect() as client:
        assert not any(found.models for found in client.statistics().clients)
    with runtime.prepare(add_relu_model(), devices) as model:
        assert plan_text(plan) == plan_text(model.plan)
        assert plan.devices == model.plan.devices or model.plan.is_simple
