"""Traces of real applications and drivers: what they contain, also after either side was killed. (OBS-7)"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support import trace_checks
from support.drivers import APPS, Daemon, Process, Program, app, one, until
from support.models import null_model

import nnfmq
from nnfmq.cli.trace_collection import trace_driver, traced_driver
from nnfmq.observe.slow_requests import models_of_bursts
from nnfmq.observe.trace_files import Slice, write_trace
from nnfmq.observe.trace_layout import worker_of
from nnfmq.serialize import messages

OPERATIONS = ["CONV_2D", "MAX_POOL_2D", "CONV_2D", "MAX_POOL_2D", "FULLY_CONNECTED", "SOFTMAX"]
COMPUTED = "[NN_LC_PCO]"
REQUESTS = 5


def tracing(output: Path, target: str | Path, device: str = "reference") -> Program:
    """Start `nnfmq trace` with the application `traced`."""
    command = ["-P", "-m", "nnfmq", "trace", "-o", output, "--", sys.executable, "-P", APPS / "traced.py"]
    return Program.start([*command, target, device])


def names_of(events: list[trace_checks.Event]) -> Counter[str]:
    return Counter(event["name"] for event in events if event["ph"] == "X")


@pytest.mark.parametrize("device", ["reference", "compiled"])
def test_OBS_7_UTL_5_a_command_is_traced_with_its_driver(daemon: Daemon, tmp_path: Path, device: str) -> None:
    output = tmp_path / "out.json"
    with tracing(output, daemon.path, device) as program:
        program.tell(str(REQUESTS))
        worker = int(program.line())
        program.end_input()
        assert program.wait() == 0
        assert "for ui.perfetto.dev" in program.errors()
    events = trace_checks.load(output)
    trace_checks.check(events)
    names = names_of(events)
    bursts = ["[NN_LR_PE]execute", "[NN_LR_PIO]write", "[NN_LI_PE]wait", "[NN_LR_PR]read", "[NN_LD_PE]request"]
    assert [names[name] for name in bursts] == [REQUESTS] * 5
    assert names["[NN_LC_PE]engine"] == REQUESTS + 1  # and the synchronous execution
    assert names["[NN_LR_PE]execution"] == names["[NN_LI_PE]Execute"] == names["[NN_LD_PE]Execute"] == 1
    assert names["[NN_LI_PC]PrepareModel"] == names["[NN_LD_PC]PrepareModel"] == 1
    assert names["[NN_LA_PO]application"] == 1
    assert {event["pid"] for event in trace_checks.named(events, "[NN_LD_PE]request")} == {worker}
    flows = Counter(event["ph"] for event in events if event["ph"] in "sf")
    assert flows == {"s": 2 * REQUESTS, "f": 2 * REQUESTS}
    labels = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert labels[worker].startswith("driver of pid ")


@pytest.mark.parametrize("device", ["reference", "compiled"])
def test_OBS_7_each_operation_is_a_slice_inside_the_engine(daemon: Daemon, tmp_path: Path, device: str) -> None:
    output = tmp_path / "out.json"
    with tracing(output, daemon.path, device) as program:
        program.tell(str(REQUESTS))
        program.line()
        program.end_input()
        assert program.wait() == 0
    events = trace_checks.load(output)
    for engine in trace_checks.named(events, "[NN_LC_PE]engine"):
        begin, end = engine["ts"], engine["ts"] + engine["dur"]
        inside = [
            event["name"]
            for event in events
            if event["ph"] == "X" and event["tid"] == engine["tid"] and begin <= event["ts"] <= end
        ]
        operations = [name.removeprefix(COMPUTED).split() for name in inside if name.startswith(COMPUTED)]
        found = list(dict.fromkeys((int(number), kind) for number, kind in operations))
        assert found, inside
        assert all(OPERATIONS[number] == kind for number, kind in found)
        if device == "reference":
            assert found == list(enumerate(OPERATIONS))


def test_OBS_7_the_trace_of_a_killed_application_is_valid(daemon: Daemon, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    with tracing(output, daemon.path) as program:
        program.tell(str(REQUESTS))
        program.line()
        with Process(program.pid) as parent:
            (application,) = [pid for pid in parent.children() if b"traced.py" in cmdline(pid)]
        with Process(application) as killed:
            killed.kill()
        assert program.wait() == 128 + 9
    events = trace_checks.load(output)
    trace_checks.check(events)
    names = names_of(events)
    assert names["[NN_LR_PE]execute"] == names["[NN_LD_PE]request"] == REQUESTS
    assert names["[NN_LA_PO]application"] == 0


def test_OBS_7_sigterm_ends_the_command_and_its_trace_is_written(daemon: Daemon, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    with tracing(output, daemon.path) as program:
        program.tell(str(REQUESTS))
        program.line()
        program.popen.terminate()
        assert program.wait() == 128 + 15
    events = trace_checks.load(output)
    trace_checks.check(events)
    assert names_of(events)["[NN_LD_PE]request"] == REQUESTS


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_OBS_7_the_slices_of_a_killed_worker_are_kept(daemon: Daemon, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    with tracing(output, daemon.path) as program:
        program.tell(str(REQUESTS))
        with Process(int(program.line())) as worker:
            worker.kill()
        program.tell("1")
        assert program.wait() == 1
        assert "DeadObject" in program.errors()
    events = trace_checks.load(output)
    trace_checks.check(events)
    assert names_of(events)["[NN_LD_PE]request"] == REQUESTS


def test_OBS_7_the_variable_makes_an_application_write_its_trace_at_exit(tmp_path: Path) -> None:
    with app("traced", "embedded", "reference", environment={"NNFMQ_TRACE": str(tmp_path / "%p.json")}) as program:
        program.tell("2")
        program.line()
        program.end_input()
        assert program.wait() == 0
    events = trace_checks.load(tmp_path / f"{program.pid}.json")
    trace_checks.check(events)
    assert names_of(events)["[NN_LD_PE]request"] == 2
    assert [path.name for path in tmp_path.iterdir()] == [f"{program.pid}.json"]


@pytest.mark.parametrize("target", ["/dev/null/out.json", "socket:/dev/null/s"])
def test_an_application_runs_although_its_trace_cannot_be_kept(daemon: Daemon, target: str) -> None:
    with app("traced", daemon.path, "reference", environment={"NNFMQ_TRACE": target}) as program:
        program.tell("1")
        program.line()
        program.end_input()
        assert program.wait() == 0
        assert "/dev/null/" in program.errors()


def test_OBS_7_a_running_driver_is_traced_for_all_clients(
    daemon: Daemon, client: nnfmq.Client, model: nnfmq.PreparedModel, tmp_path: Path
) -> None:
    with model.burst() as burst, daemon.connect() as tracer, traced_driver(tracer) as traces:
        burst.execute(one(1))  # the worker notices after this request that it is traced
        burst.execute(one(2))

        def requests() -> list[Slice]:
            traces.read()
            return [found for found in traces.trace().slices if found.name == "[NN_LD_PE]request"]

        until(lambda: len(requests()) == 2, "the worker has recorded both requests, which it does after each reply")
        assert {worker_of(request.request) for request in requests()} == {client.worker_pid}
        trace = traces.trace()
    write_trace(trace, tmp_path / "out.json")
    trace_checks.check(trace_checks.load(tmp_path / "out.json"))


def test_OBS_7_the_trace_of_a_running_driver_knows_the_models_of_bursts_that_began_before(
    daemon: Daemon, client: nnfmq.Client
) -> None:
    with client.device("reference").prepare(null_model(), name="faces") as model, model.burst() as burst:
        burst.execute(one(1))
        with daemon.connect() as tracer:
            assert set(models_of_bursts(trace_driver(tracer, 0.001)).values()) == {"faces"}


def test_OBS_7_a_second_tracer_is_rejected_until_the_first_has_gone(daemon: Daemon) -> None:
    with daemon.connect() as first, daemon.connect() as second:
        with (
            traced_driver(first),
            pytest.raises(nnfmq.GeneralFailure, match="another client traces this driver already"),
        ):
            trace_driver(second, 0.001)
        first.close()
        until(lambda: can_trace(daemon), "the supervisor has ended the first trace")


def can_trace(daemon: Daemon) -> bool:
    with daemon.connect() as client:
        try:
            trace_driver(client, 0.001)
        except nnfmq.GeneralFailure:
            return False
    return True


def is_traced(daemon: Daemon) -> bool:
    """Return whether the supervisor has memory for a trace. `can_trace` would be in the way of another tracer."""
    return any("nnfmq-trace" in target for target in daemon.process.descriptors())


def test_OBS_7_a_killed_tracer_ends_the_trace(daemon: Daemon, model: nnfmq.PreparedModel, tmp_path: Path) -> None:
    arguments = [
        "-P",
        "-m",
        "nnfmq",
        "trace",
        "-o",
        tmp_path / "out.json",
        "--connect",
        daemon.path,
        "--duration",
        "60",
    ]
    with model.burst() as burst:
        with Program.start(arguments) as program:
            until(lambda: is_traced(daemon), "the driver is traced")
            burst.execute(one(1))
            program.popen.kill()
            program.wait()
        until(lambda: can_trace(daemon), "the supervisor has ended the trace")
        burst.execute(one(2))


def test_an_embedded_driver_is_not_traced_from_outside() -> None:
    with (
        nnfmq.connect(embedded=True) as client,
        pytest.raises(nnfmq.GeneralFailure, match="an embedded driver has one client"),
    ):
        trace_driver(client, 0.001)


def test_a_worker_rejects_memory_that_is_no_ring(client: nnfmq.Client) -> None:
    connection = client.connection
    with nnfmq.Memory.create(100) as memory:
        call = messages.StartTrace(connection.next_call_id())
        with pytest.raises(nnfmq.InvalidArgument, match="a trace ring is writable and has at least 32800 bytes"):
            connection.call(call, messages.Reply, [memory.fileno()])


def test_OBS_7_why_explains_a_real_trace(daemon: Daemon, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    with tracing(output, daemon.path) as program:
        program.tell("20")
        program.line()
        program.end_input()
        assert program.wait() == 0
    with Program.start(["-P", "-m", "nnfmq", "why", output, "-n", "2", "--json"]) as program:
        assert program.wait() == 0
        report = json.loads(program._stdout.read())
    assert report["requests"] == 20
    for slow in report["slowest"]:
        assert slow["model"] == "digits.tflite"
        stages = {stage["name"]: stage["duration_ns"] for stage in slow["stages"]}
        assert 0 < sum(stages.values()) <= slow["total_ns"] * 1.01
        assert stages["engine"] > 0
        assert len(slow["operations"]) == 3
    first, second = report["slowest"]
    assert first["total_ns"] >= second["total_ns"]


def test_OBS_7_perfetto_reads_the_slices_and_the_flows(daemon: Daemon, tmp_path: Path) -> None:
    processor = shutil.which("trace_processor_shell") or shutil.which("trace_processor")
    if processor is None:
        pytest.skip("Perfetto's trace_processor is not on the PATH")
    output, query = tmp_path / "out.json", tmp_path / "query.sql"
    with tracing(output, daemon.path) as program:
        program.tell(str(REQUESTS))
        program.line()
        program.end_input()
        assert program.wait() == 0
    query.write_text(
        "select (select count(*) from slice where name = '[NN_LD_PE]request') as requests,"
        " (select count(*) from flow) as flows;"
    )
    done = subprocess.run([processor, "-q", query, output], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == f"{REQUESTS},{2 * REQUESTS}"
