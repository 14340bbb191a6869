"""What recordings lack, and that the application does not notice: slow and full disks, and death on either side."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.drivers import Daemon, InThread, Process, app, one, until, wait_until_waiting
from support.models import add_model, invalid_model, null_model
from support.recordings import arrays

import nnfmq
from nnfmq.hal.errors import ErrorStatus
from nnfmq.observe.executions import observers
from nnfmq.recording import writer
from nnfmq.recording.reader import RecordingFile
from nnfmq.recording.writer import ExecutionRecorder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.nnrec"


@pytest.fixture
def recorder(path: Path) -> Iterator[ExecutionRecorder]:
    with ExecutionRecorder.start(path) as started:
        yield started


def blocked_writer(recorder: ExecutionRecorder, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Make the writer wait before each execution until the event is set."""
    write, released = recorder._writer.add_execution, threading.Event()

    def add_execution(*arguments: Any) -> None:
        assert released.wait(60)
        write(*arguments)

    monkeypatch.setattr(recorder._writer, "add_execution", add_execution)
    return released


def test_executions_that_come_too_fast_are_dropped_and_counted(
    recorder: ExecutionRecorder, client: nnfmq.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nnfmq.recording.writer.QUEUE_BYTES_MAX", 10_000)
    released = blocked_writer(recorder, monkeypatch)
    with client.device("reference").prepare(null_model()) as model, model.burst() as burst:
        for number in range(50):
            assert burst.execute(one(number)) == (one(number),)
    released.set()
    recorder.close()
    with RecordingFile(recorder.path) as recording:
        assert recording.end is not None
        assert 0 < recording.end.executions == len(recording.executions) < 50
        assert recording.end.executions + recording.end.dropped == 50
    assert "executions that came faster than they could be written" in caplog.text


def test_an_execution_that_is_larger_than_the_queue_is_recorded(
    recorder: ExecutionRecorder, client: nnfmq.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nnfmq.recording.writer.QUEUE_BYTES_MAX", 10)
    with client.device("reference").prepare(null_model()) as model:
        model.execute(one(1))
    recorder.close()
    assert (recorder.dropped, recorder._writer.executions) == (0, 1)


def test_a_full_disk_ends_the_recording_and_not_the_application(
    recorder: ExecutionRecorder, client: nnfmq.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with client.device("reference").prepare(null_model()) as model, model.burst() as burst:
        burst.execute(one(1))
        until(lambda: recorder._writer.executions == 1, "the first execution is written")
        monkeypatch.setattr(writer.os, "writev", no_space)
        for number in range(5):
            assert burst.execute(one(number)) == (one(number),)
        assert client.device("reference").prepare(add_model()).handle.observed is None
        recorder.close()
        monkeypatch.undo()
    assert recorder.dropped == 5 - 1  # the one that could not be written is in no count
    assert "cannot be written: No space left on device" in caplog.text
    with RecordingFile(recorder.path) as recording:
        assert (len(recording.executions), recording.end) == (1, None)


def no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_executions_that_wait_when_the_disk_is_full_are_dropped(
    recorder: ExecutionRecorder, client: nnfmq.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = blocked_writer(recorder, monkeypatch)
    with client.device("reference").prepare(null_model()) as model:
        for number in range(3):
            model.execute(one(number))
        monkeypatch.setattr(writer.os, "writev", no_space)
        released.set()
        recorder.close()
        monkeypatch.undo()
    assert recorder.dropped == 2  # the first one met the error


def test_a_disk_that_does_not_return_does_not_keep_the_process(
    recorder: ExecutionRecorder, client: nnfmq.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nnfmq.recording.writer._CLOSE_TIMEOUT_S", 0.01)
    released = blocked_writer(recorder, monkeypatch)
    with client.device("reference").prepare(null_model()) as model:
        model.execute(one(1))
    recorder.close()
    assert "is not complete: its disk took more than 0.01 s" in caplog.text
    released.set()
    recorder._thread.join(60)
    recorder._writer.abandon()


def test_a_file_that_is_full_at_the_end_has_no_end_record(
    recorder: ExecutionRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(writer.os, "writev", no_space)
        recorder.close()
    assert "has no END record: No space left on device" in caplog.text
    with RecordingFile(recorder.path) as recording:
        assert recording.end is None


def test_a_failed_preparation_is_not_recorded(recorder: ExecutionRecorder, client: nnfmq.Client) -> None:
    with pytest.raises(nnfmq.InvalidArgument):
        client.device("reference").prepare(invalid_model())
    recorder.close()
    with RecordingFile(recorder.path) as recording:
        assert recording.models == ()


def test_a_model_that_cannot_be_read_is_prepared_and_not_recorded(
    recorder: ExecutionRecorder, client: nnfmq.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def add_model(_prepared: object) -> int:
        raise nnfmq.InvalidArgument("this memory is closed")

    monkeypatch.setattr(recorder._writer, "add_model", add_model)
    with client.device("reference").prepare(null_model()) as model:
        assert model.handle.observed is None
        assert model.execute(one(1)) == (one(1),)
    assert "a model cannot be read: this memory is closed" in caplog.text


def test_in_another_process_closing_does_nothing(recorder: ExecutionRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        recorder.close()
    assert recorder._thread.is_alive()


def test_a_closed_recorder_records_nothing_more(recorder: ExecutionRecorder, model: nnfmq.PreparedModel) -> None:
    recorder.close()
    recorder.close()
    assert observers() == ()


def test_a_recording_that_is_full_is_logged(path: Path, client: nnfmq.Client, caplog: pytest.LogCaptureFixture) -> None:
    with ExecutionRecorder.start(path, limit_bytes=8192), client.device("reference").prepare(null_model()) as model:
        for number in range(120):  # the command line of this process is in the file, too
            model.execute(one(number))
    with RecordingFile(path) as recording:
        assert recording.end is not None and recording.end.beyond_limit
        assert f"lacks {recording.end.beyond_limit} executions beyond its limit" in caplog.text


def test_a_limit_below_4096_bytes_is_rejected(path: Path) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match="4096 bytes or more, not 100"):
        ExecutionRecorder.start(path, limit_bytes=100)
    assert not path.exists()


# ---------------------------------------------------------------------------------------------------- other processes


def test_a_killed_application_leaves_what_it_has_written(daemon: Daemon, path: Path) -> None:
    with app("recorded", daemon.path, environment={"NNFMQ_RECORD": str(path)}) as program:
        program.line()
        program.tell("30")
        assert program.line() == "done"
        until(lambda: count_of(path) >= 30, "the executions are written")
        program.tell("100000")
        until(lambda: count_of(path) >= 200, "it executes")
        with Process(program.pid) as process:
            process.kill()
            process.wait_for_end()
    with RecordingFile(path) as recording:
        assert recording.end is None
        values = [arrays(recording, index, "outputs")[0][0] for index in range(len(recording.executions))]
        assert values == [float(number) for number in range(1, len(values) + 1)]


def count_of(path: Path) -> int:
    try:
        with RecordingFile(path) as recording:
            return len(recording.executions)
    except (FileNotFoundError, nnfmq.InvalidArgument):
        return 0


def test_the_death_of_the_driver_is_recorded(recorder: ExecutionRecorder, daemon: Daemon) -> None:
    with (
        daemon.connect() as client,
        Process(client.worker_pid) as worker,
        client.device("reference").prepare(null_model()) as model,
        model.burst() as burst,
    ):
        burst.execute(one(1))
        worker.stop()
        call = InThread.start(lambda: burst.execute(one(2)))
        wait_until_waiting(burst)
        worker.kill()
        assert isinstance(call.wait().error, nnfmq.DeadObject)
    recorder.close()
    with RecordingFile(recorder.path) as recording:
        assert [execution.row.status for execution in recording.executions] == [
            ErrorStatus.NONE,
            ErrorStatus.DEAD_OBJECT,
        ]
        assert arrays(recording, 1, "inputs") == [[2.0]]


def test_a_forked_child_has_a_file_of_its_own(daemon: Daemon, path: Path) -> None:
    with app("recorded", daemon.path, environment={"NNFMQ_RECORD": str(path)}) as program:
        program.line()
        for command in ("2", "fork", "1"):
            program.tell(command)
            assert program.line() == "done"
        program.end_input()
        assert program.wait() == 0
        assert "Error" not in program.errors()
    (other,) = (file for file in path.parent.iterdir() if file != path)
    with RecordingFile(path) as recording, RecordingFile(other) as of_child:
        assert recording.session.pid == program.pid
        assert other.name == f"a.nnrec.{of_child.session.pid}"
        assert [arrays(recording, i, "inputs") for i in range(3)] == [[[1.0]], [[2.0]], [[3.0]]]
        assert arrays(of_child, 0, "inputs") == [[-1.0]]
        assert recording.end is not None and of_child.end is not None


BAD_VARIABLES = {
    "tensors": ({"NNFMQ_RECORD_TENSORS": "yes"}, "NNFMQ_RECORD_TENSORS is 'yes'; allowed: 0, 1"),
    "limit": ({"NNFMQ_RECORD_LIMIT_BYTES": "1G"}, "NNFMQ_RECORD_LIMIT_BYTES is '1G'; allowed: 4096 to"),
    "small limit": ({"NNFMQ_RECORD_LIMIT_BYTES": "9"}, "NNFMQ_RECORD_LIMIT_BYTES is '9'; allowed: 4096 to"),
}


@pytest.mark.parametrize(("variables", "text"), BAD_VARIABLES.values(), ids=BAD_VARIABLES.keys())
def test_a_variable_without_a_valid_value_is_an_error(
    daemon: Daemon, path: Path, variables: dict[str, str], text: str
) -> None:
    with app("recorded", daemon.path, environment={"NNFMQ_RECORD": str(path), **variables}) as program:
        assert program.wait() == 1
        assert text in program.errors()
