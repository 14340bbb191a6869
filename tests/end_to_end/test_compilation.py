"""On which devices a model is prepared that the application did not choose, and what happens if they fail (section 4).

Each test has a runtime directory of its own, with drivers that have devices of `support.device_zoo`.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.device_zoo import SharedDrivers
from support.drivers import LIMIT_S, Daemon, Process, until
from support.models import add_model, add_relu_model, invalid_model, relu_model, unsupported_model

import nnfmq
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.hal.types import ExtensionNameAndPrefix, Model, OperandType, TokenValuePair

pytestmark = pytest.mark.usefixtures("runtime_directory")
CPU = "nnapi-reference"
Start = Callable[..., Daemon]


@pytest.fixture
def start(zoo: SharedDrivers, runtime_directory: Path) -> Start:
    """Return a function that lets a driver with these devices listen in the runtime directory."""
    return partial(zoo.link, runtime_directory)


@pytest.fixture
def runtime(start: Start) -> Iterator[nnfmq.Runtime]:
    """Return a runtime that is closed before the drivers end."""
    with nnfmq.Runtime() as made:
        yield made


def computes(model: Any) -> bool:
    """Return whether a prepared `add_relu_model` has the right result."""
    return bool(model.execute([1, 2, -3, 4], [10, 20, -30, 40])[0].tolist() == [11, 22, 0, 44])


def places(model: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Return the device and the operations of each step."""
    return [(model.plan.devices[step.device], step.operations) for step in model.plan.execution_steps]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ------------------------------------------------------------------------------------------------ the choice


def test_PART_1_PART_3_a_model_is_divided_among_the_devices_of_several_drivers(
    start: Start, runtime: nnfmq.Runtime
) -> None:
    start("adds", driver="one")
    start("relus", driver="two")
    with runtime.prepare(add_relu_model()) as model:
        assert places(model) == [("test-adds", (0,)), ("test-relus", (1,))]
        assert not model.plan.is_simple
        assert computes(model)
        with model.burst() as burst:
            assert computes(burst)


def test_PART_1_what_no_device_supports_is_the_cpu_s(start: Start, runtime: nnfmq.Runtime) -> None:
    start("adds")
    with runtime.prepare(add_relu_model()) as model:
        assert places(model) == [("test-adds", (0,)), (CPU, (1,))]
        assert model.device == f"test-adds, {CPU}"
        assert computes(model)


def test_PART_1_a_tie_goes_to_the_cpu_and_low_power_compares_power(start: Start, runtime: nnfmq.Runtime) -> None:
    start("equal", "frugal")
    with runtime.prepare(relu_model()) as fast, runtime.prepare(relu_model(), preference="low_power") as frugal:
        assert (fast.device, frugal.device) == (CPU, "test-frugal")


def test_PART_3_one_device_for_all_is_a_simple_plan_with_a_fallback(start: Start, runtime: nnfmq.Runtime) -> None:
    start("everything", "relus", "adds")
    with runtime.prepare(add_relu_model()) as model:
        assert (model.device, places(model)) == ("test-everything", [("test-everything", (0, 1))])
        assert model.plan.is_simple and isinstance(model, PreparedModel)
        assert model.fallback is not None
        assert computes(model)


@pytest.mark.parametrize("device", ["unplugged", "mute"])
def test_PART_1_a_device_that_does_not_answer_supports_nothing(
    device: str, start: Start, runtime: nnfmq.Runtime
) -> None:
    start(device, "relus")
    with runtime.prepare(relu_model()) as model:
        assert model.device == "test-relus"


def test_PART_1_a_driver_that_stops_supports_nothing(start: Start) -> None:
    stopped = start("everything", driver="stopped")
    until(lambda: not stopped.process.children(), "the clients of the test before are gone")
    start("relus", driver="d")
    with nnfmq.Runtime(timeout=2.0) as runtime:
        with runtime.prepare(relu_model()) as model:  # now the performance of the devices is known
            assert model.device == "test-everything"
        with ExitStack() as stack:
            for pid in stopped.process.children():
                worker = stack.enter_context(Process(pid))
                worker.send(signal.SIGSTOP)
                stack.callback(worker.send, signal.SIGCONT)
            with runtime.prepare(relu_model()) as model:
                assert model.device == "test-relus"


def test_API_2_listed_devices_are_the_only_ones(start: Start, runtime: nnfmq.Runtime) -> None:
    start("everything", "relus", "adds")
    with (
        runtime.prepare(add_relu_model(), ["test-relus", "test-adds"]) as two,
        runtime.prepare(add_relu_model(), [runtime.device("test-everything"), "test-adds"]) as first,
        runtime.prepare(add_relu_model(), [CPU]) as cpu,
    ):
        assert places(two) == [("test-adds", (0,)), ("test-relus", (1,))]
        assert (first.device, cpu.device) == ("test-everything", CPU)
        assert [model.handle.fallback for model in (two, first, cpu)] == [None] * 3
        assert all(map(computes, (two, first, cpu)))


def test_API_2_what_no_listed_device_supports_is_an_invalid_argument(start: Start, runtime: nnfmq.Runtime) -> None:
    start("adds")
    with pytest.raises(nnfmq.InvalidArgument, match=r"operation 1 \(RELU of TENSOR_FLOAT32\).*Add nnapi-reference"):
        runtime.prepare(add_relu_model(), ["test-adds"])


def test_API_2_PART_2_an_old_device_is_asked_about_what_its_version_has(start: Start, runtime: nnfmq.Runtime) -> None:
    start("old")
    assert runtime.supported_operations(add_relu_model(), ["test-old"]) == [True, True]
    newer = replace_type(relu_model(), OperandType.TENSOR_FLOAT16)  # since HAL 1.2
    assert runtime.supported_operations(newer, ["test-old"]) == [False]
    assert runtime.supported_operations(newer, ["test-old", CPU]) == [True]
    with runtime.prepare(newer) as model:
        assert model.device == CPU
    with pytest.raises(nnfmq.InvalidArgument, match="input index 99 is not an operand"):
        runtime.supported_operations(invalid_model(), [CPU])


def replace_type(model: Model, type: OperandType) -> Model:
    """Return a model with operands of another type."""
    operands = tuple(replace(operand, type=type) for operand in model.main.operands)
    return replace(model, main=replace(model.main, operands=operands))


def test_a_listed_device_that_is_unavailable_is_an_error(start: Start, runtime: nnfmq.Runtime) -> None:
    start("unplugged")
    with pytest.raises(nnfmq.DeviceUnavailable, match="not plugged in"):
        runtime.prepare(relu_model(), ["test-unplugged"])


# ------------------------------------------------------------------------------------------------ fallback


@pytest.mark.parametrize("device", ["refuses", "exhausted", "dies"])
def test_PREP_12_PART_6_the_cpu_executes_a_model_whose_device_fails_to_prepare_it(
    device: str, start: Start, runtime: nnfmq.Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    start(device)
    with runtime.prepare(add_relu_model()) as model:
        assert (model.device, places(model)) == (CPU, [(CPU, (0, 1))])
        assert model.fallback is None
        assert computes(model)
    (warning,) = warnings_in(caplog)
    assert "nnapi-reference executes the model, because its devices failed" in warning


def test_PREP_12_PART_6_one_failed_step_makes_the_cpu_execute_the_whole_model(
    start: Start, runtime: nnfmq.Runtime
) -> None:
    adds, _ = start("adds", driver="one"), start("relufails", driver="two")
    with runtime.prepare(add_relu_model()) as model:
        assert model.device == CPU
        assert computes(model)
    with adds.connect() as client:
        until(lambda: not any(found.models for found in client.statistics().clients), "the other step is released")


ERRORS = {"refuses": nnfmq.GeneralFailure, "exhausted": nnfmq.ResourceExhaustedPersistent, "dies": nnfmq.DeadObject}


@pytest.mark.parametrize("device", ERRORS)
def test_PART_6_listed_devices_never_fall_back(device: str, start: Start, runtime: nnfmq.Runtime) -> None:
    start(device)
    with pytest.raises(ERRORS[device]):
        runtime.prepare(relu_model(), [f"test-{device}"])


@pytest.mark.parametrize("device", ERRORS)
def test_PART_7_mode_2_divides_models_and_never_falls_back(
    device: str, start: Start, runtime: nnfmq.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(device, driver="one")
    monkeypatch.setenv("NNFMQ_PARTITION", "2")
    with pytest.raises(ERRORS[device]):
        runtime.prepare(relu_model())
    start("adds", "relus", driver="two")
    with runtime.prepare(add_relu_model(), ["test-adds", "test-relus"]) as model:
        assert len(model.plan.execution_steps) == 2


def test_PART_7_a_model_of_mode_2_has_no_fallback(
    start: Start, runtime: nnfmq.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("relus")
    monkeypatch.setenv("NNFMQ_PARTITION", "2")
    with runtime.prepare(relu_model()) as simple, runtime.prepare(add_relu_model()) as compound:
        assert (simple.device, simple.handle.fallback) == ("test-relus", None)
        assert len(compound.plan.execution_steps) == 2 and compound.handle.fallback is None


@pytest.mark.parametrize(("variable", "value"), [("NNFMQ_PARTITION", "0"), ("NNFMQ_CPU_ONLY", "1")])
def test_PART_7_PART_8_mode_0_and_cpu_only_use_the_cpu_device_unless_devices_are_listed(
    variable: str, value: str, start: Start, runtime: nnfmq.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start("everything")
    monkeypatch.setenv(variable, value)
    with daemon.connect() as client, client.prepare(relu_model()) as of_client, runtime.prepare(relu_model()) as model:
        assert (of_client.device, model.device) == (CPU, CPU)
        assert model.plan.is_simple and places(model) == [(CPU, (0,))]
    with runtime.prepare(relu_model(), ["test-everything"]) as model:
        assert model.device == "test-everything"


def test_PART_8_only_enabled_devices_are_used_without_being_named(
    start: Start, runtime: nnfmq.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start("everything", "relus", "adds")
    monkeypatch.setenv("NNFMQ_ENABLED_DEVICES", "test-(relus|unplugged)")
    with (
        daemon.connect() as client,
        client.prepare(add_relu_model()) as of_client,
        runtime.prepare(add_relu_model()) as model,
        runtime.prepare(add_relu_model(), ["test-everything"]) as listed,
    ):
        assert places(of_client) == places(model) == [(CPU, (0,)), ("test-relus", (1,))]
        assert listed.device == "test-everything"


def test_PART_8_the_sample_devices_are_enabled_by_a_pattern_only(
    runtime: nnfmq.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nnfmq.Runtime(embedded=True) as shipped:
        with shipped.prepare(relu_model()) as model:
            assert model.device == "compiled"
        monkeypatch.setenv("NNFMQ_ENABLED_DEVICES", "sample-float_fast")
        with shipped.prepare(relu_model()) as model:
            assert model.device == "sample-float_fast"


def test_PART_8_strict_slicing_reaches_the_plan(
    start: Start, runtime: nnfmq.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("relus")
    asked = []
    from nnfmq.client.partitioned import compilation

    make_plan = compilation.make_plan
    monkeypatch.setattr(
        compilation, "make_plan", lambda *arguments: asked.append(arguments[2]) or make_plan(*arguments)
    )
    for value in ("0", "1"):
        monkeypatch.setenv("NNFMQ_STRICT_SLICING", value)
        runtime.prepare(relu_model()).close()
    assert [options.strict_slicing for options in asked] == [False, True]


@pytest.mark.parametrize(
    ("variable", "is_done"),
    [
        ("NNFMQ_SYNC_EXEC_RUNTIME", [True] * 4),
        ("NNFMQ_SYNC_EXEC_CPU", [False, False, True, False]),
        (None, [False] * 4),
    ],
)
def test_PART_8_asynchronous_executions_are_done_at_once_if_a_switch_says_so(
    variable: str | None, is_done: list[bool], start: Start, runtime: nnfmq.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start("adds", "relus")
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    with ExitStack() as stack:
        client = stack.enter_context(daemon.connect())
        models = [
            runtime.prepare(relu_model()),
            client.prepare(relu_model()),
            runtime.prepare(relu_model(), [CPU]),
            runtime.prepare(add_relu_model()),
        ]
        for model, done in zip(models, is_done, strict=True):
            stack.enter_context(model)
            assert model.is_synchronous is done
            inputs = [[1.0] * 4] * len(model.inputs)
            pending = model.execute_async(*inputs)
            assert pending.done() or not done
            assert pending.result(LIMIT_S)[0].tolist() == [float(len(inputs))] * 4


def test_EXT_5_PART_6_operations_of_vendors_never_fall_back(start: Start, runtime: nnfmq.Runtime) -> None:
    daemon = start("refuses")
    with daemon.connect() as client:
        for prepare in (runtime.prepare, client.prepare):
            with pytest.raises(nnfmq.GeneralFailure, match="as the test wants"):
                prepare(unsupported_model())
    with pytest.raises(nnfmq.InvalidArgument, match="Operations of extensions need a device of their vendor"):
        nnfmq.Runtime([]).prepare(unsupported_model())


@pytest.mark.parametrize("model", [invalid_model(), object()], ids=["model", "type"])
def test_PART_6_mistakes_of_the_application_are_reported_before_any_driver_is_asked(
    model: Model, start: Start, runtime: nnfmq.Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = start("refuses", "relus")
    with daemon.connect() as client:
        for prepare in (runtime.prepare, client.prepare):
            with pytest.raises(nnfmq.InvalidArgument):
                prepare(model)
    assert warnings_in(caplog) == []


def test_N_API_14_an_unknown_preference_or_priority_is_rejected(start: Start, runtime: nnfmq.Runtime) -> None:
    start("relus")
    for option in ({"preference": "lazy"}, {"priority": 40}):
        with pytest.raises(nnfmq.InvalidArgument):
            runtime.prepare(relu_model(), **option)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ options


HINTS = {
    "hints": [TokenValuePair(1 << 16 | 1, b"")],
    "extensions": [ExtensionNameAndPrefix("com.example.none", 1)],
}


@pytest.mark.parametrize("option", [{"model_cache": [0]}, HINTS], ids=["cache", "hints"])
def test_N_API_15_what_needs_one_device_is_rejected_for_several(
    option: dict[str, Any], start: Start, runtime: nnfmq.Runtime
) -> None:
    daemon = start("adds", "relus")
    message = r"needs? one device, .* divided among test-adds, test-relus"
    with pytest.raises(nnfmq.InvalidArgument, match=message):
        runtime.prepare(add_relu_model(), **option)
    # A client tries the first device alone before, which lacks the extension of the hint.
    with daemon.connect() as client, pytest.raises(nnfmq.InvalidArgument, match=f"{message}|EXT-6"):
        client.prepare(add_relu_model(), **option)


def test_TIM_1_QOS_5_limits_and_times_work_on_one_device(start: Start, runtime: nnfmq.Runtime) -> None:
    start("everything")
    with runtime.prepare(add_relu_model(), timeout=LIMIT_S) as model:
        model.execute([1] * 4, [2] * 4, measure=True, timeout=LIMIT_S)
        assert model.last_timing.time_in_driver_ns > 0


def test_QOS_1_QOS_4_a_timeout_is_that_of_planning_and_all_steps(start: Start, runtime: nnfmq.Runtime) -> None:
    daemon = start("adds", "relus")
    with daemon.connect() as client:
        for prepare in (runtime.prepare, client.prepare):
            with prepare(add_relu_model(), timeout=LIMIT_S) as model:
                assert len(places(model)) == 2
                assert computes(model)


def test_QOS_2_a_divided_model_whose_deadline_has_passed_is_not_prepared(
    start: Start, runtime: nnfmq.Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = start("adds", "relus")
    with daemon.connect() as client:
        for prepare in (runtime.prepare, client.prepare):
            with pytest.raises(nnfmq.MissedDeadline):
                prepare(add_relu_model(), timeout=0)
    with pytest.raises(nnfmq.MissedDeadline):
        runtime.prepare(add_relu_model(), ["test-adds", "test-relus"], timeout=0)
    assert warnings_in(caplog) == []


def test_QOS_3_a_step_gets_the_time_that_the_steps_before_it_have_left(
    start: Start, runtime: nnfmq.Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    start("adds", "relus")
    client = runtime.device("test-adds")._access.client()
    with Process(client.worker_pid) as worker:

        def stop(done: int, _total: int) -> None:
            assert done == 1
            worker.stop()

        with pytest.raises(nnfmq.MissedDeadlineTransient):
            runtime.prepare(add_relu_model(), timeout=0.3, progress=stop)
        worker.resume()
        with runtime.prepare(add_relu_model(), timeout=LIMIT_S) as model:
            assert computes(model)
    assert warnings_in(caplog) == []


def test_QOS_3_a_driver_that_does_not_reply_delays_planning_until_the_deadline(
    start: Start, runtime: nnfmq.Runtime
) -> None:
    start("adds", "relus")
    with Process(runtime.device("test-adds")._access.client().worker_pid) as worker, worker.stopped():
        with pytest.raises(nnfmq.MissedDeadline):
            runtime.prepare(add_relu_model(), timeout=0.1)
        with pytest.raises(nnfmq.MissedDeadline):
            runtime.prepare(add_relu_model(), ["test-adds", "test-relus"], timeout=0.1)


def test_PREP_12_QOS_1_a_driver_that_dies_within_the_timeout_has_the_fallback(
    start: Start, runtime: nnfmq.Runtime
) -> None:
    start("adds", driver="one")
    start("reludies", driver="two")
    with runtime.prepare(add_relu_model(), timeout=LIMIT_S) as model:
        assert model.device == CPU
        assert computes(model)
    with pytest.raises(nnfmq.DeadObject):
        runtime.prepare(add_relu_model(), ["test-adds", "test-reludies"], timeout=LIMIT_S)


def test_QOS_5_a_missed_deadline_is_the_result_and_no_reason_to_fall_back(
    start: Start, runtime: nnfmq.Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = start("everything")
    with daemon.connect() as client:
        for prepare in (runtime.prepare, client.prepare):
            with pytest.raises(nnfmq.MissedDeadline):
                prepare(add_relu_model(), timeout=0)
    assert warnings_in(caplog) == []


def test_API_5_each_step_has_cache_files_of_its_own(start: Start, runtime: nnfmq.Runtime, tmp_path: Path) -> None:
    start("adds", "relus")
    cache = tmp_path / "cache"
    cache.mkdir()
    seen: list[set[str]] = []
    for token in (None, None, bytes(32), bytes(32), b"\1" * 32):
        with runtime.prepare(add_relu_model(), ["test-adds", "test-relus"], cache_dir=cache, token=token) as model:
            assert computes(model)
        seen.append({path.name for path in cache.iterdir()})
    # `test-relus` saves nothing. The third and the last compilation have new tokens.
    assert [len(names) for names in seen] == [1, 1, 2, 2, 3]
    with runtime.prepare(add_model(), ["test-adds"], cache_dir=cache, token=bytes(32)) as whole:
        assert whole.execute([1] * 4, [2] * 4)[0].tolist() == [3] * 4
    assert len(list(cache.iterdir())) == 4  # the same application's token, another partition


def test_progress_counts_the_steps_on_the_caller_s_thread(start: Start, runtime: nnfmq.Runtime) -> None:
    start("adds", driver="one")
    start("relus", driver="two")
    calls = []

    def note(done: int, total: int) -> None:
        calls.append((done, total, threading.get_ident()))

    runtime.prepare(add_relu_model(), progress=note).close()
    assert calls == [(1, 2, threading.get_ident()), (2, 2, threading.get_ident())]


def test_an_exception_of_progress_ends_the_compilation_and_releases_the_steps(
    start: Start, runtime: nnfmq.Runtime
) -> None:
    daemons = start("adds", driver="one"), start("relus", driver="two")

    def stop(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runtime.prepare(add_relu_model(), progress=stop)
    for daemon in daemons:
        with daemon.connect() as client:
            until(lambda: not any(found.models for found in client.statistics().clients), "nothing is prepared")


# ------------------------------------------------------------------------------------------------ one driver's client


def test_a_client_s_model_is_divided_among_its_devices_without_the_cpu_device(start: Start) -> None:
    daemon = start("adds", "equal", listed=("reference", "compiled"))
    with daemon.connect() as client, client.prepare(add_relu_model()) as model:
        # `compiled` is as fast as the others here, and the CPU device is not needed.
        assert places(model) == [("test-adds", (0,)), ("compiled", (1,))]
        assert computes(model)


def test_a_client_s_cpu_device_executes_what_no_device_supports(start: Start) -> None:
    daemon = start("adds")
    with daemon.connect() as client, client.prepare(add_relu_model()) as model:
        assert places(model) == [("test-adds", (0,)), (CPU, (1,))]
        assert computes(model)


def test_a_client_prefers_the_device_that_no_other_one_beats(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    daemon = start("everything", "equal", "adds", listed=("reference", "compiled"))
    with daemon.connect() as client, client.prepare(add_relu_model()) as model:
        assert (model.device, model.plan.devices) == ("test-everything", ("test-everything",))
        assert model.fallback is not None
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("device", ["refuses", "exhausted", "dies"])
def test_PREP_12_PART_6_a_client_s_model_falls_back_to_the_cpu(device: str, start: Start) -> None:
    daemon = start(device)
    with daemon.connect() as client, client.prepare(add_relu_model()) as model:
        assert model.device == CPU
        assert computes(model)


@pytest.mark.parametrize("device", ERRORS)
def test_PART_7_a_client_s_model_does_not_fall_back_in_mode_2(
    device: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start(device)
    monkeypatch.setenv("NNFMQ_PARTITION", "2")
    with daemon.connect() as client, pytest.raises(ERRORS[device]):
        client.prepare(add_relu_model())


def test_without_available_devices_a_client_s_model_is_the_cpu_s(start: Start) -> None:
    daemon = start("unplugged")
    with daemon.connect() as client, client.prepare(add_relu_model()) as model:
        assert model.device == CPU


def test_the_cpu_device_s_process_ends_with_the_client(start: Start) -> None:
    daemon = start("refuses")
    with daemon.connect() as client:
        model = client.prepare(add_relu_model())
        assert computes(model)
    with pytest.raises(nnfmq.BadState, match="this client is closed"):
        model.execute([1] * 4, [2] * 4)
