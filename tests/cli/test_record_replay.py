"""`nnfmq record` and `nnfmq replay`: as a user calls them, with an application in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import commands
from support.drivers import APPS, Daemon, Process, running_daemon, short_folder, until
from support.recordings import execution, tensors, write_recording

from nnfmq.cli import main
from nnfmq.cli.record import report_recordings
from nnfmq.hal.errors import InvalidArgument
from nnfmq.recording.reader import RecordingFile
from nnfmq.recording.writer import RecordingWriter

Capture = pytest.CaptureFixture[str]
APP = """
import sys
import numpy as np
import nnfmq

with nnfmq.connect(embedded=True) as client:
    with client.device("reference").prepare(nnfmq.example_path("digits.tflite")) as model, model.burst() as burst:
        for number in range(int(sys.argv[1])):
            burst.execute(np.full((1, 8, 8, 1), number, np.float32))
print("output of the application")
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.nnrec"


def record(path: Path, *words: str, options: tuple[str, ...] = (), status: int = 0) -> int:
    return main(["record", "-o", str(path), *options, "--", sys.executable, "-P", "-c", APP, *words, str(status)])


def test_an_application_is_recorded_and_replayed(path: Path, capfd: Capture) -> None:
    write_recording(path, [])  # an earlier one
    assert record(path, "5") == 0
    recorded = capfd.readouterr()
    assert recorded.out == "output of the application\n"
    size = path.stat().st_size
    assert recorded.err == f"nnfmq: recorded 5 executions of 1 model in {path} ({size:,} bytes)\n"
    assert main(["replay", str(path), "--connect", "embedded", "--speed", "max", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    counts = {"recorded": 5, "not_replayable": 0, "replayed": 5, "equal": 5, "different": 0, "not_compared": 0}
    assert report["executions"] == counts | {"failed": {}}
    assert report["is_equal"] and report["is_complete"]
    latencies = report["latency_ns"]
    assert set(latencies) == {"recorded", "replayed", "late"}
    assert 0 < latencies["replayed"]["p50"] <= latencies["replayed"]["max"]


def test_the_exit_status_is_that_of_the_command(path: Path, capfd: Capture) -> None:
    assert record(path, "1", status=7) == 7
    assert "recorded 1 execution of 1 model" in capfd.readouterr().err


def test_dropped_executions_are_reported(path: Path, capfd: Capture) -> None:
    writer = RecordingWriter(os.open(path, os.O_WRONLY | os.O_CREAT))
    writer.close(dropped=3)
    report_recordings([path])
    assert "3 executions were dropped: they came faster than the disk" in capfd.readouterr().err


def test_a_command_that_prepares_no_model_leaves_no_file(path: Path, capfd: Capture) -> None:
    assert main(["record", "-o", str(path), "true"]) == 0
    assert "nothing was recorded: the command prepared no model" in capfd.readouterr().err
    assert not path.exists()


def test_a_file_that_is_no_recording_is_not_replaced(path: Path, capfd: Capture) -> None:
    path.write_text("import nnfmq")
    assert record(path, "1") == 1
    assert record(Path(os.devnull), "1") == 1
    assert path.read_text() == "import nnfmq"
    assert Path(os.devnull).is_char_device()
    errors = capfd.readouterr().err
    assert errors.count("exists, and is no recording: give another FILE, or remove it first") == 2


def test_a_command_that_cannot_be_run_has_the_status_of_shells(path: Path, capfd: Capture) -> None:
    assert main(["record", "-o", str(path), "--", "/nowhere/app"]) == 127
    assert main(["record", "-o", str(path), "--", "/"]) == 126
    assert [line.partition(": ")[2] for line in capfd.readouterr().err.splitlines()] == [
        "error: /nowhere/app cannot be run: No such file or directory", "error: / cannot be run: Permission denied",
    ]  # fmt: skip


def test_a_command_that_a_signal_ends_has_the_status_of_shells(path: Path) -> None:
    assert main(["record", "-o", str(path), "--", "sh", "-c", "kill -KILL $$"]) == 128 + signal.SIGKILL


def test_without_a_command_there_is_an_error(path: Path, capfd: Capture) -> None:
    assert main(["record", "-o", str(path)]) == 2
    assert "there is no COMMAND: nnfmq record -o FILE -- COMMAND ..." in capfd.readouterr().err


@pytest.mark.parametrize("limit", ["4095", "-1", "1G"])
def test_a_limit_that_is_too_small_is_wrong_usage(path: Path, limit: str, capfd: Capture) -> None:
    assert record(path, "1", options=("--limit-bytes", limit)) == 2
    assert "is no number of bytes of at least 4096" in capfd.readouterr().err


def test_a_limit_is_kept_and_reported(path: Path, capfd: Capture) -> None:
    assert record(path, "200", options=("--limit-bytes", "30000")) == 0
    assert path.stat().st_size <= 30_000
    assert "executions are not recorded: the file was full" in capfd.readouterr().err


def test_without_tensors_the_replay_has_zeros_and_compares_nothing(path: Path, capfd: Capture) -> None:
    assert record(path, "3", options=("--no-tensors",)) == 0
    assert main(["replay", str(path), "--connect", "embedded", "--rate", "1000", "--no-color"]) == 0
    assert "3 of 3 executions replayed: 0 equal, 3 not compared" in capfd.readouterr().out


def test_each_process_of_the_command_has_a_file(path: Path, capfd: Capture) -> None:
    one = f"{sys.executable} -P -c '{APP}' 1 0"
    assert main(["record", "-o", str(path), "--", "sh", "-c", f"{one}; {one}"]) == 0
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(" in ")[0] for line in lines] == ["nnfmq: recorded 1 execution of 1 model"] * 2
    assert len(list(path.parent.iterdir())) == 2


def test_a_difference_is_shown_and_decides_the_exit_status(path: Path, capfd: Capture) -> None:
    executions = [execution(outputs=tensors([11, 22, 33, value])) for value in (44, 45, 44.0001)]
    write_recording(path, executions)
    assert main(["replay", str(path), "--connect", "embedded", "--no-color"]) == 1
    out = capfd.readouterr().out
    assert "3 of 3 executions replayed: 2 equal, 1 different" in out
    assert "Largest difference of floats: 0.022 relative, 262,144 ULP" in out  # 1/45; 2^23 / 32 values from 44 to 45
    assert "record 8, output 0: 1 of 4 elements differ by more than 1e-05 of the largest" in out
    assert re.findall(r"^ *(p50|p99|max) ", out, re.MULTILINE) == ["p50", "p99", "max"]
    assert main(["replay", str(path), "--connect", "embedded", "--tolerance", "0.03"]) == 0
    assert main(["replay", str(path), "--connect", "embedded", "--tolerance", "300000ulp"]) == 0
    capfd.readouterr()
    assert main(["replay", str(path), "--connect", "embedded", "--tolerance", "exact", "--json"]) == 1
    assert json.loads(capfd.readouterr().out)["executions"]["different"] == 2


def test_a_replay_that_cannot_keep_the_pace_says_so(path: Path, capfd: Capture) -> None:
    write_recording(path, [execution(3_000_000 + 100_000 * number) for number in range(50)])
    words = ["replay", str(path), "--connect", "embedded", "--no-color", "--device", "reference"]
    assert main([*words, "--rate", "1000000"]) == 0
    assert "Most calls came late" in capfd.readouterr().out
    assert main([*words, "--speed", "max"]) == 0
    assert "Most calls came late" not in capfd.readouterr().out


def test_a_terminal_shows_the_progress(path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    write_recording(path, [execution(), execution(4_000_000)])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("nnfmq.cli.console._PROGRESS_DELAY_S", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["replay", str(path), "--connect", "embedded"]) == 0
    assert re.search(r"replaying .*2/2", capfd.readouterr().err)


def test_failures_are_counted_by_their_status(path: Path, capfd: Capture) -> None:
    failed = execution(status=2, outputs=None)
    write_recording(path, [execution(deadline_ns=2_999_000), execution(), failed])
    assert main(["replay", str(path), "--connect", "embedded", "--no-color"]) == 1
    out = capfd.readouterr().out
    assert re.search(r"2 of 3 executions replayed: 1 equal, 1 MISSED_DEADLINE_(TRANSIENT|PERSISTENT)\n", out)
    assert "Not replayed: 1, which had failed, or lack inputs" in out
    assert "record 6: MISSED_DEADLINE_" in out
    assert main(["replay", str(path), "--connect", "embedded", "--ignore-deadlines"]) == 0


def test_a_recording_without_successful_executions_is_an_error(path: Path, capfd: Capture) -> None:
    write_recording(path, [execution(status=2, outputs=None)])
    assert main(["replay", str(path)]) == 1
    assert f"{path}: none of its 1 executions can be replayed" in capfd.readouterr().err


def test_a_file_that_is_no_recording_is_an_error(path: Path, capfd: Capture) -> None:
    path.write_text("hello")
    assert main(["replay", str(path)]) == 1
    assert capfd.readouterr().err.startswith(f"nnfmq: error: {path}: it is no recording")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--speed", "fast"], "speed 'fast': give `original`, `max`, or a factor"),
        (["--rate", "0"], "'0' is no number of executions per second"),
        (["--rate", "x"], "'x' is no number of executions per second"),
        (["--tolerance", "2"], "tolerance '2': give a relative one"),
        (["--rate", "1", "--speed", "max"], "not allowed with argument"),
    ],
)
def test_wrong_usage_says_what_is_allowed(path: Path, words: list[str], text: str, capfd: Capture) -> None:
    assert main(["replay", str(path), *words]) == 2
    assert text in capfd.readouterr().err


# ---------------------------------------------------------------------------------------------------- death, signals


@contextmanager
def recording(daemon: Daemon, path: Path) -> Iterator[tuple[int, Callable[[str], None], Callable[[], tuple[int, str]]]]:
    """Record tests/end_to_end/apps/recorded.py; yield the pid, what tells it a line, and what ends it."""
    script = [sys.executable, "-P", str(APPS / "recorded.py"), str(daemon.path)]
    environment = os.environ | {"PYTHONPATH": str(APPS.parents[1] / "lib")}
    with commands.started("record", "-o", str(path), "--", *script, env=environment, start_new_session=True) as command:
        assert command.stdin and command.stdout and command.stderr
        stdin, stdout, stderr = command.stdin, command.stdout, command.stderr
        assert int(stdout.readline())

        def tell(line: str) -> None:
            stdin.write(line.encode() + b"\n")
            stdin.flush()

        def end() -> tuple[int, str]:
            stdin.close()
            stdout.read()
            return command.wait(commands.LIMIT_S), stderr.read().decode()

        yield command.pid, tell, end


def test_a_killed_application_leaves_a_recording_that_is_replayed(
    shared_daemon: Daemon, path: Path, capfd: Capture
) -> None:
    with recording(shared_daemon, path) as (pid, tell, end):
        tell("50")
        until(lambda: count_of(path) >= 50, "the executions are written")
        with Process(pid) as process:
            (child,) = process.children()
        os.kill(child, signal.SIGKILL)
        status, errors = end()
    assert status == 128 + signal.SIGKILL
    assert "the application did not end orderly; its last executions may be missing" in errors
    assert main(["replay", str(path), "--connect", str(shared_daemon.path), "--speed", "max"]) == 0
    out = capfd.readouterr().out
    assert "The recording is not complete" in out
    assert "50 of 50 executions replayed: 50 equal" in out


def count_of(path: Path) -> int:
    try:
        with RecordingFile(path) as found:
            return len(found.executions)
    except (FileNotFoundError, InvalidArgument):  # it has no whole record yet
        return 0


def test_SIGTERM_is_passed_on(shared_daemon: Daemon, path: Path) -> None:
    with recording(shared_daemon, path) as (pid, tell, end):
        tell("1")
        until(lambda: count_of(path) == 1, "the execution is written")
        os.kill(pid, signal.SIGTERM)
        status, _ = end()
    assert status == 128 + signal.SIGTERM


def test_Ctrl_C_ends_the_command_and_the_recording_is_complete(shared_daemon: Daemon, path: Path) -> None:
    with recording(shared_daemon, path) as (pid, tell, end):
        tell("1")
        until(lambda: count_of(path) == 1, "the execution is written")
        os.killpg(pid, signal.SIGINT)  # as a terminal does
        status, errors = end()
    assert status == 128 + signal.SIGINT
    assert "nnfmq: recorded 1 execution of 1 model" in errors
    assert "did not end orderly" not in errors


def test_the_death_of_the_driver_during_a_replay_is_an_error(path: Path) -> None:
    write_recording(path, [execution(3_000_000 + 5_000_000 * number) for number in range(10_000)])
    with short_folder() as folder, running_daemon(folder / "d.sock") as daemon:
        words = ["replay", str(path), "--connect", str(daemon.path), "--json"]
        with commands.started(*words) as command:
            until(lambda: bool(daemon.process.descendants()), "the client has a worker")
            worker_pid = daemon.process.descendants()[0]
            with Process(worker_pid) as worker:
                until(lambda: len(worker.states()) > 1, "the worker has the thread of a burst or call")
                worker.kill()
            assert command.stdout and command.stderr
            out, errors = command.stdout.read(), command.stderr.read().decode()
    assert command.returncode == 1
    assert errors.startswith("nnfmq: error: ") and "gone" in errors
    if out:  # it had begun to execute
        report = json.loads(out)
        assert not report["is_equal"]
        assert report["executions"]["replayed"] < 10_000
