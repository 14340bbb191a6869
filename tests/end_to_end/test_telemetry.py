"""Telemetry of real compilations and executions: callbacks, files, sockets, and what must not harm an execution."""

from __future__ import annotations

import gc
import json
import os
import socket
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from support.drivers import Daemon, Process, app, one, until
from support.forking import fork
from support.kept_records import Records
from support.models import add_model, gather_model, invalid_model, null_model

import nnfmq
from nnfmq import telemetry
from nnfmq.hal.errors import ErrorStatus
from nnfmq.observe.executions import observers
from nnfmq.telemetry import DataClass, TelemetryMode
from nnfmq.telemetry.records import model_architecture_hash
from nnfmq.telemetry.sinks import open_sink

ONE, TEN = [1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]


def test_OBS_1_a_compilation_is_reported(client: nnfmq.Client) -> None:
    records = Records()
    device = client.device("reference")
    with telemetry.register(records), device.prepare(add_model()):
        pass
    (record,) = records.all
    version = device.info.version
    assert (record.model_arch_hash, record.device_id) == (model_architecture_hash(add_model()), f"reference={version}")
    assert (record.error_code, record.input_data_class, record.output_data_class) == (0, DataClass.FLOAT32, 2)
    assert record.compilation_time_ns > 0
    assert (record.introspection_used, record.fallback_to_cpu, record.cache_used) == (True, False, False)


def test_OBS_1_a_failed_compilation_is_reported(client: nnfmq.Client) -> None:
    records = Records()
    with telemetry.register(records), pytest.raises(nnfmq.InvalidArgument):
        client.device("reference").prepare(invalid_model())
    assert [record.error_code for record in records.compilations] == [ErrorStatus.INVALID_ARGUMENT]
    assert records.compilations[0].compilation_time_ns == -1


def test_OBS_1_a_cache_is_reported(client: nnfmq.Client, tmp_path: Path) -> None:
    records = Records()
    with telemetry.register(records):
        for _ in range(2):
            client.device("reference").prepare(add_model(), cache_dir=tmp_path).close()
    assert [record.cache_used for record in records.compilations] == [True, True]
    assert [record.error_code for record in records.compilations] == [0, 0]


def test_a_reported_model_is_freed_when_the_caller_drops_it(client: nnfmq.Client) -> None:
    """Not only when the garbage collector runs: a preparation has the whole model, and its place in the driver."""
    with telemetry.register(Records()):
        prepared = client.device("reference").prepare(add_model())
        handle = weakref.ref(prepared.handle)
        gc.disable()
        try:
            del prepared
            until(lambda: handle() is None, "the thread for dropped objects has released it")
        finally:
            gc.enable()


def execute_fenced(model: nnfmq.PreparedModel) -> None:
    with model.execute_fenced(ONE, TEN, measure=True) as launched:
        launched.result()


def execute_burst(model: nnfmq.PreparedModel) -> None:
    with model.burst() as burst:
        burst.execute(ONE, TEN, measure=True)


CALLS: dict[TelemetryMode, Callable[[nnfmq.PreparedModel], object]] = {
    TelemetryMode.SYNC: lambda model: model.execute(ONE, TEN, measure=True),
    TelemetryMode.ASYNC: lambda model: model.execute_async(ONE, TEN, measure=True).result(),
    TelemetryMode.ASYNC_WITH_DEPS: execute_fenced,
    TelemetryMode.BURST: execute_burst,
}


@pytest.mark.parametrize("mode", CALLS)
def test_OBS_2_an_execution_is_reported_in_its_mode(client: nnfmq.Client, mode: TelemetryMode) -> None:
    records = Records()
    with telemetry.register(records), client.device("reference").prepare(add_model()) as model:
        CALLS[mode](model)
    (record,) = records.executions
    assert (record.mode, record.error_code, record.input_data_class) == (mode, 0, DataClass.FLOAT32)
    assert record.model_arch_hash == records.compilations[0].model_arch_hash
    assert 0 <= record.duration_hardware_ns <= record.duration_driver_ns <= record.duration_runtime_ns


def test_OBS_2_a_failed_execution_is_reported(client: nnfmq.Client) -> None:
    records = Records()
    with (
        telemetry.register(records),
        client.device("reference").prepare(gather_model()) as model,
        model.burst() as burst,
        pytest.raises(nnfmq.NnfmqError) as raised,
    ):
        burst.execute(ONE, [9])
    assert [(record.error_code, record.duration_runtime_ns) for record in records.executions] == [
        (raised.value.status, -1)
    ]


def test_the_death_of_the_driver_is_reported(daemon: Daemon) -> None:
    records = Records()
    with (
        telemetry.register(records),
        daemon.connect() as client,
        client.device("reference").prepare(add_model()) as model,
        Process(client.worker_pid) as worker,
    ):
        worker.stop()
        pending = model.execute_async(ONE, TEN)
        worker.kill()
        with pytest.raises(nnfmq.DeadObject):
            pending.result(30)
    assert [record.error_code for record in records.executions] == [ErrorStatus.DEAD_OBJECT]


def test_callbacks_are_independent_and_see_later_models_only(client: nnfmq.Client, model: nnfmq.PreparedModel) -> None:
    first, second = Records(), Records()
    with telemetry.register(first):
        model.execute(one(1))  # prepared before
        with telemetry.register(second), client.device("reference").prepare(null_model()) as later:
            later.execute(one(1))
        with client.device("reference").prepare(null_model()) as last:
            last.execute(one(1))
    assert (len(first.compilations), len(first.executions)) == (2, 2)
    assert (len(second.compilations), len(second.executions)) == (1, 1)
    assert observers() == ()


def test_a_callback_that_raises_harms_no_execution(client: nnfmq.Client, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_record: object) -> None:
        raise ZeroDivisionError("of the application")

    with telemetry.register(fail) as registration, client.device("reference").prepare(null_model()) as model:
        for number in range(5):
            assert model.execute(one(number)) == (one(number),)
    assert (registration.failures, registration.dropped) == (6, 0)
    assert caplog.text.count("a telemetry callback raised") == 1
    assert "ZeroDivisionError: of the application" in caplog.text


def test_a_callback_that_blocks_delays_no_execution_and_loses_records_alone(
    client: nnfmq.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nnfmq.telemetry.callbacks.QUEUE_RECORDS_MAX", 10)
    monkeypatch.setattr("nnfmq.telemetry.callbacks._CLOSE_TIMEOUT_S", 0.01)
    released = threading.Event()
    registration = telemetry.register(lambda _record: released.wait(60))
    with client.device("reference").prepare(null_model()) as model, model.burst() as burst:
        for number in range(100):
            assert burst.execute(one(number)) == (one(number),)
        registration.close()
        assert 101 - 12 <= registration.dropped <= 101 - 10  # one is in the callback, ten wait
        burst.execute(one(1))  # after the registration was closed
    assert "a telemetry callback has not returned" in caplog.text
    released.set()
    registration._thread.join(60)


# ---------------------------------------------------------------------------------------------------- sinks


def test_OBS_4_the_environment_names_a_file(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    variables = {"NNFMQ_TELEMETRY": str(path), "NNFMQ_TELEMETRY_INTERVAL_S": "3600"}
    for _ in range(2):  # the second process appends
        run_recorded(daemon, variables)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["kind"], line["count"]) for line in lines] == [("compilation", 1), ("execution", 40)] * 2
    durations = lines[1]["duration_runtime_us"]
    assert durations["count"] == 40
    assert 0 < durations["minimum"] <= durations["sum"] // 40 <= durations["maximum"]
    assert durations["sum_squared"] >= durations["sum"] ** 2 // 40  # Cauchy and Schwarz


def run_recorded(daemon: Daemon, variables: dict[str, str]) -> None:
    with app("recorded", daemon.path, environment=variables) as program:
        program.line()
        program.tell("40")
        assert program.line() == "done"
        program.end_input()
        assert program.wait() == 0
        assert program.errors() == ""


def test_OBS_4_the_environment_names_a_socket(daemon: Daemon, folder: Path) -> None:
    path = folder / "c.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        run_recorded(daemon, {"NNFMQ_TELEMETRY": f"unix:{path}", "NNFMQ_TELEMETRY_INTERVAL_S": "0"})
        listener.settimeout(30)
        connection, _ = listener.accept()
        with connection, connection.makefile() as received:
            lines = [json.loads(line) for line in received]
    counts = {
        kind: sum(line["count"] for line in lines if line["kind"] == kind) for kind in ("compilation", "execution")
    }
    assert counts == {"compilation": 1, "execution": 40}


def test_OBS_4_a_collector_that_is_missing_or_goes_loses_lines_alone(folder: Path) -> None:
    path = folder / "c.sock"
    sink = open_sink(f"unix:{path}")
    with pytest.raises(FileNotFoundError):
        sink.write("lost")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        sink.write("first")
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(100) == b"first\n"
        with pytest.raises(BrokenPipeError):
            sink.write("lost")
        sink.write("second")
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(100) == b"second\n"
    sink.close()
    sink.close()
    with pytest.raises(ConnectionRefusedError):
        sink.write("lost")


def test_OBS_4_a_file_is_appended_to_and_closed_once(tmp_path: Path) -> None:
    for line in ("first", "second"):
        sink = open_sink(str(tmp_path / "t.jsonl"))
        sink.write(line)
        sink.close()
        sink.close()
    assert (tmp_path / "t.jsonl").read_text() == "first\nsecond\n"
    assert (tmp_path / "t.jsonl").stat().st_mode & 0o777 == 0o600


def test_an_error_of_the_application_during_a_preparation_is_no_compilation(
    client: nnfmq.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    records = Records()
    device = client.device("reference")
    monkeypatch.setattr(client.connection, "call", call)
    with telemetry.register(records), pytest.raises(KeyboardInterrupt):
        device.prepare(null_model())
    assert records.all == []


def test_a_forked_child_has_no_observers() -> None:
    with telemetry.register(Records()):
        assert len(observers()) == 1
        child = fork()
        if not child:
            os._exit(len(observers()))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0


def test_in_another_process_closing_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = telemetry.TelemetryLogger(open_sink(str(tmp_path / "t.jsonl")))
    with logger, telemetry.register(logger) as registration:
        with monkeypatch.context() as patch:
            patch.setattr("nnfmq.telemetry.callbacks.os.getpid", lambda: 1)
            registration.close(), logger.close()
        assert registration._thread.is_alive() and logger._thread.is_alive()


def test_OBS_4_a_socket_without_a_path_is_rejected() -> None:
    with pytest.raises(nnfmq.InvalidArgument, match="'unix:': give the path of a file, or unix:PATH"):
        open_sink("unix:")


BAD_VARIABLES = {
    "interval": ({"NNFMQ_TELEMETRY_INTERVAL_S": "soon"}, "NNFMQ_TELEMETRY_INTERVAL_S is 'soon'; allowed: 0 to 86400"),
    "negative": ({"NNFMQ_TELEMETRY_INTERVAL_S": "-1"}, "NNFMQ_TELEMETRY_INTERVAL_S is '-1'; allowed: 0 to 86400"),
    "folder": ({"NNFMQ_TELEMETRY": "/nowhere/t.jsonl"}, "No such file or directory: '/nowhere/t.jsonl'"),
}


@pytest.mark.parametrize(("variables", "text"), BAD_VARIABLES.values(), ids=BAD_VARIABLES.keys())
def test_a_variable_without_a_valid_value_is_an_error(
    daemon: Daemon, tmp_path: Path, variables: dict[str, str], text: str
) -> None:
    environment = {"NNFMQ_TELEMETRY": str(tmp_path / "t.jsonl"), **variables}
    with app("recorded", daemon.path, environment=environment) as program:
        assert program.wait() == 1
        assert text in program.errors()
