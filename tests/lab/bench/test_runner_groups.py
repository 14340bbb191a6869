"""Runner processes with a real driver: every mode and loop, and the death of either side in the middle of a trial."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import Process, until
from support.places import ROOT

import nnfmq
from nnfmq.client.partitioned.model import PartitionedModel
from nnfmq.hal.errors import InvalidArgument
from nnfmq.lab import child_processes
from nnfmq.lab.bench.loops import intended_starts
from nnfmq.lab.bench.measurement import LoadPlan, measure_plan
from nnfmq.lab.bench.peers import loadable
from nnfmq.lab.bench.runner import Load, OpenRunner, RunnerGroup, RunnerJob, Trial, run_trial, started_group
from nnfmq.lab.bench.steps import MODES, STAGES, Array, Step, opened_mode
from nnfmq.lab.child_processes import BenchmarkFailed, RunnerUnavailable

DIGITS = nnfmq.example_path("digits.tflite")
ONES = [np.ones((1, 8, 8, 1), np.float32)]


def job(runner: str = "burst", connect: str = "embedded", **changes: Any) -> RunnerJob:
    usual = {
        "model": DIGITS,
        "shapes": {},
        "signature": None,
        "inputs": [ONES],
        "device": "reference",
    }
    return RunnerJob(runner, connect=connect, **(usual | {"device": "reference", "threads": None} | changes))


@pytest.fixture
def group() -> Iterator[RunnerGroup]:
    with started_group("burst", [job()]) as started:
        yield started


def worker_of(group: RunnerGroup) -> int:
    """Return the pid of the embedded driver: of the two processes it is the child."""
    (pid,) = (pid for pid in group.pids if b"--embedded" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return pid


# ---- modes


def test_every_mode_returns_the_same_outputs() -> None:
    with nnfmq.connect(embedded=True) as client, client.device("reference").prepare(DIGITS) as prepared:
        expected = prepared.execute(*ONES)
        for mode in MODES:
            with opened_mode(mode, prepared) as (step, stages):
                for _ in range(2):
                    for found, correct in zip(step(ONES), expected, strict=True):
                        np.testing.assert_array_equal(found, correct)
                assert (stages is not None) is (mode == "burst")


@pytest.mark.parametrize("mode", MODES)
def test_a_model_on_several_devices_has_every_mode_but_the_AIDL_burst(mode: str) -> None:
    with (
        nnfmq.Runtime([], embedded=True) as runtime,
        runtime.prepare(DIGITS, ["sample-minimal", "reference"], timeout=60) as prepared,
    ):
        assert isinstance(prepared, PartitionedModel)
        if mode == "aidl-burst":
            with pytest.raises(InvalidArgument, match="request_burst"), opened_mode(mode, prepared):
                pass
            return
        (expected,) = prepared.execute(*ONES)
        with opened_mode(mode, prepared) as (step, _):
            assert step(ONES)[0].tolist() == expected.tolist()


def test_the_stages_of_a_burst_add_up_to_its_latency() -> None:
    with (
        nnfmq.connect(embedded=True) as client,
        client.device("reference").prepare(DIGITS) as prepared,
        opened_mode("burst", prepared) as (_, stages),
    ):
        assert stages is not None
        found = dict(zip(STAGES, stages(ONES), strict=True))
    assert found["latency"] == found["queue"] + found["driver"] + found["engine"]
    assert found["engine"] > 0


@pytest.mark.parametrize("mode", ["async", "fenced", "aidl-burst"])
def test_a_model_with_states_is_rejected_by_modes_that_cannot_carry_them_on(mode: str) -> None:
    class WithState:
        states = ("a state",)

    with pytest.raises(InvalidArgument, match="1 state;"), opened_mode(mode, WithState()):  # type: ignore[arg-type]
        pass


# ---- loads


def test_a_closed_loop_of_a_number_of_requests(group: RunnerGroup) -> None:
    found = group.run(Load(600.0, count=7), stages=2)
    assert found.latencies.size == 7
    np.testing.assert_array_equal(found.intended, found.started)
    assert (np.diff(found.intended) > 0).all()
    assert len(found.stages_ns) == len(STAGES)
    assert found.client_cpu_ns > 0 and found.wall_ns >= found.latencies.sum()


def test_an_open_loop_executes_each_intended_request(group: RunnerGroup) -> None:
    found = group.run(Load(0.2, rate=100.0, distribution="poisson", seed=3))
    np.testing.assert_array_equal(found.intended, intended_starts(100.0, 0.2, "poisson", seed=3))
    assert (found.started >= found.intended).all()
    assert found.stages_ns == []


def test_requests_that_become_due_while_the_driver_is_stopped_wait_and_are_counted(group: RunnerGroup) -> None:
    """All 5 requests are due within 40 ms; the driver is resumed by the first tick, which comes later."""
    with Process(worker_of(group)) as worker:
        worker.stop()
        found = group.run(Load(0.05, rate=100.0), tick=worker.resume)
    assert found.latencies.size == 5
    first_end = found.intended[0] + found.latencies[0]
    assert (found.intended < first_end).all()
    assert (found.started[1:] >= first_end).all()
    assert (found.latencies[1:] > found.started[1:] - found.intended[1:]).all()


def test_several_clients_share_the_load_and_one_driver(tmp_path: Path) -> None:
    from nnfmq.lab.listening_driver import started_daemon

    with (
        started_daemon(tmp_path) as driver,
        started_group("burst", [job(connect=driver.socket)] * 2) as group,
    ):
        assert len(group.pids) == 5 and driver.pid in group.pids
        assert group.run(Load(600.0, count=5)).latencies.size == 5
        found = group.run(Load(0.1, rate=100.0))
        np.testing.assert_array_equal(found.intended, intended_starts(100.0, 0.1, "constant"))
        assert group.pss_bytes() > 1 << 20
        group.wait_until_idle()


def test_the_threads_of_the_driver_are_limited_by_its_cpus() -> None:
    with started_group("burst", [job(threads=1)]) as group:
        assert group.details["threads"] == 1
        assert len(os.sched_getaffinity(worker_of(group))) == 1
        assert group.run(Load(600.0, count=3)).latencies.size == 3


# ---- failures


def test_the_death_of_the_driver_in_a_trial_is_reported(group: RunnerGroup) -> None:
    worker = worker_of(group)
    with pytest.raises(BenchmarkFailed, match=r"^burst: .* gone|^burst: the driver"):
        group.run(Load(600.0), tick=lambda: os.kill(worker, signal.SIGKILL))


def test_a_request_that_takes_too_long_is_reported(group: RunnerGroup) -> None:
    (client,) = (pid for pid in group.pids if pid != worker_of(group))
    with pytest.raises(BenchmarkFailed, match="ended with status -14 before a result: a request took more than 60 s"):
        group.run(Load(600.0), tick=lambda: os.kill(client, signal.SIGALRM))


def test_requests_that_are_not_sent_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nnfmq.lab.bench.runner.BACKLOG_S", 0.0)
    with nnfmq.connect(embedded=True) as client, client.device("reference").prepare(DIGITS) as prepared:
        runner = OpenRunner(lambda inputs: prepared.execute(*inputs), client.worker_pid, None, [])
        load = Load(0.001, rate=1e6)
        found = run_trial(runner, [ONES], Trial(time.monotonic_ns(), load))
    executed = len(found.latencies)
    assert executed + found.unsent == 1000
    assert executed < 1000


def test_the_death_of_a_client_in_a_trial_is_reported(group: RunnerGroup) -> None:
    (client,) = (pid for pid in group.pids if pid != worker_of(group))
    with pytest.raises(BenchmarkFailed, match="burst: its process ended with status -9 before a result"):
        group.run(Load(600.0), tick=lambda: os.kill(client, signal.SIGKILL))


def test_an_error_of_the_driver_is_that_of_the_benchmark() -> None:
    with (
        pytest.raises(BenchmarkFailed, match="burst: there is no device 'none'"),
        started_group("burst", [job(device="none")]),
    ):
        pass


@pytest.mark.parametrize(
    ("runner", "package", "name"),
    [
        ("LiteRT", "ai_edge_litert", "ai-edge-litert"),
        ("ONNX Runtime", "onnxruntime", "onnxruntime"),
        ("OpenVINO", "openvino", "openvino"),
    ],
)
def test_a_peer_that_is_not_installed_is_named_with_the_remedy(
    runner: str, package: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"raise ModuleNotFoundError('none', name={package!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    with (
        pytest.raises(RunnerUnavailable, match=rf"{name} is not installed: pip install 'nnfmq\[bench\]'"),
        started_group(runner, [job(runner)]),
    ):
        pass


def test_litert_reads_no_onnx_file(tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    pytest.importorskip("onnx")
    path = exported_digits(tmp_path)
    with (
        pytest.raises(RunnerUnavailable, match=r"LiteRT reads \.tflite files only"),
        started_group("LiteRT", [job("LiteRT", model=path)]),
    ):
        pass


def exported_digits(folder: Path) -> Path:
    from nnfmq.lab.bench.onnx_export import export_to_onnx

    path = folder / "digits.onnx"
    path.write_bytes(export_to_onnx(nnfmq.load(DIGITS).model).proto.SerializeToString())
    return path


@pytest.mark.parametrize(("runner", "package"), [("ONNX Runtime", "onnxruntime"), ("OpenVINO", "openvino")])
def test_peers_execute_onnx_files(runner: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    with started_group(runner, [job(runner, model=exported_digits(tmp_path), threads=1)]) as group:
        assert group.details["threads"] == 1
        assert group.run(Load(600.0, count=3)).latencies.size == 3


@pytest.mark.parametrize(
    ("runner", "package"), [("LiteRT", "ai_edge_litert"), ("ONNX Runtime", "onnxruntime"), ("OpenVINO", "openvino")]
)
def test_peers_execute_a_model_with_other_shapes(runner: str, package: str) -> None:
    if importlib.util.find_spec(package) is None or importlib.util.find_spec("onnx") is None:
        pytest.skip(f"{package} or onnx is not installed")
    inputs = [[np.ones((2, 8, 8, 1), np.float32)]]
    with started_group(runner, [job(runner, shapes={0: (2, 8, 8, 1)}, inputs=inputs)]) as group:
        assert group.run(Load(600.0, count=3)).latencies.size == 3


def test_onnx_runtime_gets_integers_of_its_type(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    helper, types = onnx.helper, onnx.TensorProto
    table = helper.make_tensor("table", types.FLOAT, [3, 2], range(6))
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "indices"], ["rows"])],
        "gather",
        [helper.make_tensor_value_info("indices", types.INT64, [4])],
        [helper.make_tensor_value_info("rows", types.FLOAT, [4, 2])],
        [table],
    )
    path = tmp_path / "gather.onnx"
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(made.SerializeToString())
    (info,) = nnfmq.load(path).inputs
    inputs = [[np.zeros(info.shape, info.dtype)]]
    for runner in ("burst", "ONNX Runtime"):
        with started_group(runner, [job(runner, model=path, inputs=inputs)]) as group:
            assert group.run(Load(600.0, count=2)).latencies.size == 2


def test_a_model_that_cannot_be_exported_is_reported_with_the_operation() -> None:
    for package in ("onnxruntime", "onnx"):
        pytest.importorskip(package)
    path = ROOT / "docs" / "examples" / "data" / "words.tflite"
    inputs = [[np.zeros(info.shape, info.dtype) for info in nnfmq.load(path).inputs]]
    with (
        pytest.raises(RunnerUnavailable, match="ONNX Runtime cannot load the model: GATHER cannot be exported"),
        started_group("ONNX Runtime", [job("ONNX Runtime", model=path, inputs=inputs)]),
    ):
        pass


def test_a_form_of_a_model_that_cannot_be_loaded_is_omitted() -> None:
    def fail() -> Step:
        raise InvalidArgument("no such operation")

    def step(_: object) -> list[Array]:
        return []

    assert loadable({"file": fail, "export": lambda: step}) == {"export": step}
    with pytest.raises(InvalidArgument, match="no such operation"):
        loadable({"file": fail, "export": fail})


def test_a_process_that_does_not_exit_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_processes, "END_S", 0.0)
    with started_group("burst", [job()]) as group:
        pids = group.pids
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "no process is left")


# ---- functions as runners


def test_a_closure_is_measured_in_a_process_of_its_own() -> None:
    factor = np.float32(3)

    def opened(model: Path) -> Step:
        assert model == DIGITS
        return lambda inputs: [array * factor for array in inputs]

    with started_group("mine", [job("mine", own=opened)] * 2) as group:
        assert len(group.pids) == 2 and os.getpid() not in group.pids
        found = group.run(Load(600.0, count=5))
    assert found.latencies.size == 5 and found.driver_cpu_ns == 0 and found.stages_ns == []
    assert group.details["prepared_ns"] >= 0


def test_a_plan_measures_a_closure_beside_a_mode_of_the_driver() -> None:
    def opened(model: Path) -> Step:
        return list

    plan = LoadPlan(
        DIGITS, [ONES], ("burst", "mine"), seconds=600.0, count=10, warm_up=1, device="reference",
        connect="embedded", own={"mine": opened},
    )  # fmt: skip
    found = measure_plan(plan)
    assert [(load.runner, sum(len(trial.latencies) for trial in load.trials)) for load in found.loads] == [
        ("burst", 10),
        ("mine", 10),
    ]
    assert found.loads[1].latency_ns("p50") < found.loads[0].latency_ns("p50")


def test_an_error_of_a_closure_is_that_of_the_benchmark() -> None:
    def opened(model: Path) -> Step:
        raise ValueError(f"cannot read {model.name}")

    with (
        pytest.raises(BenchmarkFailed, match=r"^mine: cannot read digits\.tflite$"),
        started_group("mine", [job("mine", own=opened)]),
    ):
        pass
