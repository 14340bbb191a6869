"""`nnfmq stress --suite` for users: options, exit statuses, files, interrupts, and a suite that is killed."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.conditions import CONDITIONS
from support.drivers import opened, short_folder, until

import nnfmq
from nnfmq.base.processes import allowed_cpus, descendants
from nnfmq.cli import command_parser, main, stress_suite
from nnfmq.cli.console import console
from nnfmq.cli.stress_suite import exit_status, print_suite, read_client
from nnfmq.hal.errors import InvalidArgument
from nnfmq.lab.suite.scenarios import SCENARIOS

DIGITS = str(nnfmq.example_path("digits.tflite"))
LIMIT_S = 60
QUICK = ("--suite", "--device", "reference", "--scenarios", "idle", "--minutes", "0.01")
OWN = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Offset:
    value: int

def client(client, path):
    burst, offset = client.device("reference").prepare(path).burst(), Offset(2)
    return lambda inputs: [burst.execute(*inputs)[0] + offset.value]

nothing = 3
"""


def error(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()[-1]


def limits(folder: Path, text: str) -> str:
    path = folder / "thresholds.toml"
    path.write_text(f"[load]\nrate = 100\n[every]\n{text}\n", encoding="utf-8")
    return str(path)


# ---- options


def test_the_scenarios_in_the_help_are_those_of_the_suite() -> None:
    assert tuple(SCENARIOS) == stress_suite.SCENARIOS


SHARED = {
    "model", "shape", "signature", "mode", "device", "rate", "runtime_option", "seed", "html", "connect", "json",
    "no_color", "suite", "print_thresholds",
}  # fmt: skip
"""Options of `nnfmq stress` that have an effect with and without --suite."""


def test_each_option_is_shared_or_of_one_kind() -> None:
    options = set(vars(command_parser("stress").parse_args([DIGITS])))
    assert options == {*SHARED, *stress_suite.OPTIONS, *stress_suite.OTHER_OPTIONS}
    assert len(options) == len(SHARED) + len(stress_suite.OPTIONS) + len(stress_suite.OTHER_OPTIONS)


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("--minutes", "1"), 1, "--minutes has no effect without --suite"),
        (("--class", "batch"), 1, "--class has no effect without --suite"),
        (("--suite", "--duration", "3"), 1, "--duration has no effect with --suite"),
        (("--suite", "--self-test"), 1, "--self-test has no effect with --suite"),
        (("--suite", "--mode", "burst,sync"), 1, "--mode burst,sync: the suite measures one"),
        (("--suite", "--scenarios", "idlex"), 2, "there is no idlex; allowed are idle, busy-cores"),
        (("--suite", "--minutes", "0"), 2, "0 is not a positive number"),
        (("--suite", "--client", "my.py:f"), 1, "there is no file 'my.py'; give FILE.py:NAME"),
        (("--suite", "--client", "f"), 1, "there is no file ''; give FILE.py:NAME"),
        (("--suite", "--thresholds", "none.toml"), 1, "none.toml: No such file or directory"),
        (("--suite", "--connect", "embedded"), 1, "give the socket of `nnfmq serve`"),
    ],
)
def test_a_wrong_option_is_reported(
    words: tuple[str, ...], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stress", DIGITS, *words]) == status
    assert message in error(capsys)


def test_the_printed_thresholds_can_be_given_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from nnfmq.lab.suite.thresholds import read_thresholds

    assert main(["stress", "--print-thresholds"]) == 0
    path = tmp_path / "mine.toml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert read_thresholds(path) == read_thresholds()


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        (OWN, "absent", "has no function 'absent'"),
        (OWN, "nothing", "has no function 'nothing'"),
        ("import nothing_like_this", "f", "ModuleNotFoundError: No module named 'nothing_like_this'"),
        ("def f(:", "f", "SyntaxError: "),
    ],
)
def test_a_client_function_that_cannot_be_read_is_reported(tmp_path: Path, code: str, name: str, message: str) -> None:
    path = tmp_path / "my_client.py"
    path.write_text(code, encoding="utf-8")
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        read_client(f"{path}:{name}")
    with pytest.raises(InvalidArgument, match="is no Python file"):
        read_client(f"{path.rename(tmp_path / 'my_client.txt')}:{name}")


# ---- runs


def test_a_function_of_a_file_is_measured_and_its_files_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.py").write_text(OWN, encoding="utf-8")
    files = ["--junit", str(tmp_path / "suite.xml"), "--html", str(tmp_path / "page.html"), "--json"]
    words = [
        "--rate",
        "50",
        "--client",
        f"{tmp_path / 'my.py'}:client",
        "--thresholds",
        limits(tmp_path, "max_ms = 1e6\nwrong_outputs = 0"),
    ]
    assert main(["stress", DIGITS, *QUICK, *words, *files]) == 0
    report = json.loads(capsys.readouterr().out)
    (idle,) = report["scenarios"]
    assert (report["client"], report["outcome"], idle["wrong_outputs"]) == ("client", "passed", 0)
    assert report["load"]["rate"] == 50 and 10 <= idle["requests"] <= 55
    root = ElementTree.fromstring((tmp_path / "suite.xml").read_text(encoding="utf-8"))
    assert (root.get("tests"), root.get("failures")) == ("2", "0")
    assert "Passed: digits.tflite" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_threshold_that_is_not_kept_is_printed_and_the_status_is_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stress", DIGITS, *QUICK, "--thresholds", limits(tmp_path, "max_ms = 1e-6")]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^idle: failed: max [\d.]+ ms, at most 1e-06 ms is allowed$", printed, re.MULTILINE)
    assert printed.endswith("The machine: failed.\n")


def test_a_baseline_of_another_load_is_rejected_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nnfmq.lab.conditions import model_identity

    load = {"rate": 50.0, "arrivals": "poisson", "deadline_ms": 50, "clients": 8}
    baseline = {**model_identity(DIGITS), "client": "burst", "load": load, "scenarios": [], "stability": {}}
    (tmp_path / "before.json").write_text(json.dumps(baseline), encoding="utf-8")
    monkeypatch.setattr("nnfmq.lab.suite.run.run_suite", lambda *_: pytest.fail("measured"))
    assert main(["stress", DIGITS, "--suite", "--baseline", str(tmp_path / "before.json")]) == 1
    assert "the baseline has another load: rate 50.0, arrivals poisson" in error(capsys)
    (tmp_path / "before.json").write_text("{", encoding="utf-8")
    assert main(["stress", DIGITS, "--suite", "--baseline", str(tmp_path / "before.json")]) == 1
    assert "is no report of nnfmq stress --suite --json" in error(capsys)


@pytest.mark.parametrize(
    ("of_scenarios", "of_rows", "is_interrupted", "status"),
    [
        (("passed", "skipped"), None, False, 0),
        (("passed", "failed"), None, False, 1),
        (("error", "cannot tell"), None, False, 1),
        (("passed", "cannot tell"), None, False, 3),
        (("passed",), ("no change", "improvement"), False, 0),
        (("passed",), ("no change", "cannot tell"), False, 3),
        (("passed",), (), False, 3),
        (("passed",), ("regression", "cannot tell"), False, 1),
        (("failed", "not run"), None, True, 130),
    ],
)
def test_the_exit_status(
    of_scenarios: tuple[str, ...], of_rows: tuple[str, ...] | None, is_interrupted: bool, status: int
) -> None:
    report: dict[str, Any] = {
        "scenarios": [{"outcome": outcome} for outcome in of_scenarios],
        "is_interrupted": is_interrupted,
    }
    if of_rows is not None:
        report["baseline"] = {"rows": [{"outcome": outcome} for outcome in of_rows]}
    assert exit_status(report) == status


# ---- ends


class RunningSuite:
    """A suite whose stderr is a terminal, with its files in a folder of its own."""

    def __init__(self, process: subprocess.Popen[str], terminal: int, folder: Path) -> None:
        self.process = process
        self.folder = folder
        self._terminal = terminal
        self._shown = ""

    def rest(self) -> str:
        """Return the last of what stderr has got."""
        while select.select([self._terminal], [], [], 0)[0]:
            self._shown += os.read(self._terminal, 65536).decode(errors="replace")
        return self._shown[-2000:]

    def wait_for(self, text: str) -> None:
        """Wait until the progress shows a text."""

        def is_shown() -> bool:
            if select.select([self._terminal], [], [], 1.0)[0]:
                self._shown += os.read(self._terminal, 65536).decode(errors="replace")
            return text in self._shown

        until(is_shown, f"the progress shows {text!r}")


@contextmanager
def running_suite(*words: str) -> Iterator[RunningSuite]:
    command = [sys.executable, "-P", "-m", "nnfmq", "stress", DIGITS, "--suite", "--device", "reference", *words]
    controller, terminal = pty.openpty()
    with short_folder() as folder, os.fdopen(controller), os.fdopen(terminal, closefd=True) as stderr:
        environment = os.environ | {"TMPDIR": str(folder), "COLUMNS": "80", "TERM": "xterm"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment) as process:
            try:
                yield RunningSuite(process, controller, folder)
            finally:
                process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_suite_prints_what_there_is_and_leaves_nothing(number: signal.Signals) -> None:
    with running_suite("--scenarios", "idle,soak", "--minutes", "5") as suite:
        suite.wait_for("idle, 1 of 60 s")
        pids = descendants(suite.process.pid)
        suite.process.send_signal(number)
        printed, _ = suite.process.communicate(timeout=LIMIT_S)
        assert suite.process.returncode == 130, suite.rest()
        assert re.search(r"^ idle +(passed|failed|cannot tell) +\d+ ", printed, re.MULTILINE)
        assert re.search(r"^ soak +not run +- ", printed, re.MULTILINE)
        assert re.search(r"^idle: interrupted after \d+ of 60 s$", printed, re.MULTILINE)
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
        assert list(suite.folder.iterdir()) == []


def test_a_suite_that_is_killed_leaves_no_process_and_no_file() -> None:
    with running_suite("--scenarios", "busy-cores", "--minutes", "5") as suite:
        suite.wait_for("busy-cores, 0 of 300 s")
        started = list(opened(descendants(suite.process.pid)))
        assert len(started) >= 4 + allowed_cpus()  # the client, the driver, its worker, who keeps it, the load
        suite.process.kill()
        for each in started:
            with each:
                each.wait_for_end()
        until(lambda: not any(suite.folder.iterdir()), "the folder of the driver is removed")


# ---- tables


TIMES = {"p50": 1_234_567, "p99": 1_234_567_890, "p99_9": 12_345_678_900, "max": 12_345_678_900}
MEASURED: dict[str, Any] = {
    "scenario": "many-clients", "outcome": "cannot tell", "reason": "", "requests": 123_456, "latency_ns": TIMES,
    "missed": 1234, "wrong_outputs": 0, "unsent": 12, "is_interrupted": False,
    "deaths_ns": {"client": [3_000_000], "worker": []},
    "checks": [{"text": "p99.9", "unit": "ms", "limit": 50, "value": 12345.6, "outcome": "failed"}],
}  # fmt: skip
REPORT: dict[str, Any] = {
    "scenarios": [
        MEASURED,
        {"scenario": "busy-cores", "outcome": "error", "reason": "a measured client: its driver has died",
         "requests": 0, "is_interrupted": False, "deaths_ns": None, "checks": []},
    ],
    "load": {"rate": 100, "arrivals": "poisson", "deadline_ms": 50}, "conditions": CONDITIONS,
    "stability": {"is_stable": False, "reasons": ["other programs used 31 % of a CPU during the scenario idle"]},
    "baseline": {
        "date": "2026-01-01T00:00:00+00:00", "host": "here",
        "differences": [
            "it has another host: there, not here", "this run was not stable: other programs used 31 % of a CPU",
        ],
        "rows": [{"scenario": "many-clients", "metric": "p99", "ratio": 1.5, "low": 1.4, "high": 1.6,
                  "outcome": "cannot tell"}],
    },
    "outcome": "failed",
}  # fmt: skip


@pytest.mark.parametrize("columns", [120, 80, 40])
def test_the_tables_fit_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    print_suite(console(no_color=True), REPORT)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    flowed = " ".join(text.split())
    assert ("12,346" in text) and ("p99.9 " in text.split("failed")[0]) is (columns >= 80)
    assert "many-clients: failed: p99.9 12,346 ms, at most 50 ms is allowed" in flowed
    assert "busy-cores: error: a measured client: its driver has died" in flowed
    assert "many-clients: 1 client killed, seen within 3.00 ms" in flowed
    assert "baseline: this run was not stable: other programs used 31 % of a CPU" in flowed
    assert flowed.count("31 %") == 1
    assert "baseline: cannot tell: measure both on the same machine" in flowed
    assert "The machine: failed." in flowed
