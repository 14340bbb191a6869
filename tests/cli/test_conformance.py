"""`nnfmq conformance` as a user sees it: status, what is printed, the JSON, the page, broken files, Ctrl-C."""

from __future__ import annotations

import json
import platform
import signal
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support import commands, model_lines

from nnfmq.cli import main
from nnfmq.lab.child_processes import FunctionProcess

WRONG = "operand 3 (c), index [2]: expected 34.0, actual 33.0 (1 of 3 elements are wrong)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files: one test that passes, and one that expects a wrong value."""
    below = tmp_path / "models" / "V1_0"
    below.mkdir(parents=True)
    model_lines.write(below / "good.jsonl", model_lines.add("add_good"))
    model_lines.write(below / "wrong.jsonl", model_lines.add("add_<wrong>", (11, 22, 34)))
    return tmp_path / "models"


def run(*words: object) -> int:
    return main(["conformance", *map(str, words)])


@pytest.mark.parametrize("path", ["interpreter", "sync", "burst", "memory-domain"])
def test_the_status_is_0_only_if_everything_passed(folder: Path, path: str) -> None:
    driver = [] if path == "interpreter" else ["--connect", "embedded"]
    assert run(folder / "V1_0" / "good.jsonl", "--path", path, *driver) == 0
    assert run(folder, "--path", path, *driver) == 1


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_failure_names_test_operand_index_expected_and_actual(
    folder: Path, jobs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run(folder, "--jobs", jobs)
    assert f"FAILED add_<wrong> (model): {WRONG}" in capsys.readouterr().out.splitlines()


def test_the_json_distinguishes_the_data_s_models_from_their_variants(folder: Path, tmp_path: Path) -> None:
    run(folder, "--json", tmp_path / "report.json")
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())

    assert (report["total"], report["passed"], report["skipped"]) == (2, 1, [])
    assert report["conditions"]["host"] == platform.node()
    difference = {"operand": "operand 3 (c)", "index": [2], "expected": "34.0", "actual": "33.0"}
    assert report["failed"] == [{"name": "add_<wrong>", "reason": WRONG, "differences": [difference]}]
    counted = {
        kind: (entry["total"], entry["passed"], len(entry["failed"])) for kind, entry in report["variants"].items()
    }
    assert counted == {
        "unknown_output_shapes": (2, 1, 1),
        "int8_coupling": (0, 0, 0),
        "insufficient_output": (2, 2, 0),
    }
    assert {entry["name"] for entry in report["slowest"]} == {"add_good", "add_<wrong>"}


def test_jobs_do_not_change_the_order_or_the_results(folder: Path, tmp_path: Path) -> None:
    for number in range(8):
        lines = [model_lines.add(f"add_{number}_{i}", (11, 22, 30 + i)) for i in range(1 + 3 * (number % 3))]
        model_lines.write(folder / f"{number}.jsonl", *lines)
    reports = []
    for jobs in (1, 3):
        run(folder, "--jobs", jobs, "--json", tmp_path / "report.json")
        report = json.loads((tmp_path / "report.json").read_text())
        reports.append({key: report[key] for key in ("total", "passed", "failed", "skipped", "variants")})
    assert reports[0] == reports[1]


class Page(HTMLParser):
    """Reads a page: which tags stay open, what it would load, and its text."""

    VOID = ("meta",)

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []
        self.feed(content)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [tag for name, _ in attrs if name in ("src", "href")]
        self.open += [tag] if tag not in self.VOID else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_self_contained_and_shows_the_failure_with_its_diff(folder: Path, tmp_path: Path) -> None:
    run(folder, "--html", tmp_path / "report.html")
    content = (tmp_path / "report.html").read_text()
    page = Page(content)

    assert (page.open, page.loads, "http" in content, "<script" in content) == ([], [], False, False)
    assert {"add_<wrong>", "− 34.0", "+ 33.0", "[2]", "ADD", "FLOAT32", "4 / 6"} <= set(page.text)  # 1 of 3, and 3 of 3


def test_a_filter_chooses_by_name(folder: Path, tmp_path: Path) -> None:
    assert run(folder, "--filter", "good$", "--json", tmp_path / "report.json") == 0
    assert json.loads((tmp_path / "report.json").read_text())["total"] == 1


def error(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("not json", "not JSON"),
        ("[]", "not a test model"),
        (json.dumps({"format": 2, "name": "x"}), "not a test model"),
        (json.dumps({"format": 1, "name": "x"}), "x: there is no 'main'"),
    ],
)
def test_a_line_that_is_not_a_test_model_is_reported_with_file_and_line_and_status_2(
    tmp_path: Path, second: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model_lines.write(tmp_path / "broken.jsonl", model_lines.add(), second)
    assert run(path) == 2
    assert f"{path}:2: {message}" in error(capsys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "TENSOR_FLOAT31"}, "there is no 'TENSOR_FLOAT31'"),
        ({"data": "*"}, "base64"),
        ({"data": model_lines.floats(1, 2)}, "8 bytes of data, its dimensions take 12"),
    ],
)
@pytest.mark.parametrize("jobs", [1, 2])
def test_an_impossible_operand_is_reported_with_file_and_line_and_status_2(
    tmp_path: Path, change: dict[str, Any], message: str, jobs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    line = model_lines.changed(lambda line: line["main"]["operands"][1].update(change))
    path = model_lines.write(tmp_path / "broken.jsonl", line)
    other = model_lines.write(tmp_path / "other.jsonl", model_lines.add())
    assert run(path, other, "--jobs", jobs) == 2
    said = error(capsys)
    assert f"{path}:1: add: " in said
    assert message in said.replace("Only b", "b").lower().replace("tensor_float31", "TENSOR_FLOAT31") or message in said


def test_a_truncated_file_is_not_in_the_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(bytes.fromhex("1f8b0800000000000003"))
    assert run(path) == 2
    assert f"{path}:1: cannot be read" in error(capsys)


def test_a_path_without_test_models_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path) == 2
    assert f"{tmp_path}: no test models below it" in error(capsys)


def test_a_filter_that_finds_nothing_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--filter", "sub_") == 2
    assert "'sub_'" in error(capsys)


@pytest.mark.parametrize("option", [["--device", "mine"], ["--connect", "embedded"]], ids=lambda option: option[0])
def test_a_driver_that_the_execution_path_does_not_use_is_an_error(
    option: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, *option) == 2
    assert "need a --path through a driver, such as burst" in error(capsys)


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("partition", ["", "2", "random"])
def test_plans_are_counted_on_the_paths_of_the_runtime(
    partition: str, jobs: int, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--path", "runtime", *(["--partition", partition] if partition else [])]
    assert (
        run(folder, *words, "--jobs", jobs, "--json", tmp_path / "report.json") == 1
    )  # one model expects wrong values
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    assert (report["total"], report["passed"], report.get("partition", "")) == (2, 1, partition)
    plans = report["plans"]
    assert plans["simple"] + plans["compound"] + plans["unprepared"] == 6  # two models with two variants each
    assert (plans["compound"], plans["steps"], plans["undivided"]) == (0, 0, 0)  # of one operation
    assert "Plans: 6, of which" in " ".join(capsys.readouterr().out.split())


def test_a_driver_has_no_plans(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(folder, "--path", "sync", "--connect", "embedded")
    assert "Plans" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--partition", "2"], "--partition needs a --path through the runtime, such as runtime"),
        (["--path", "runtime", "--partition", "4"], "invalid choice: '4'"),
        (["--path", "runtime", "--partition", "random", "--device", "reference"], "--partition random chooses"),
        (["--path", "runtime", "--partition", "random", "--connect", "embedded"], "--partition random chooses"),
    ],
)
def test_a_partition_that_the_path_does_not_have_is_an_error(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_device_that_does_not_exist_is_an_error_and_no_failed_test(
    folder: Path, jobs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--path", "sync", "--connect", "embedded", "--device", "tpu", "--jobs", jobs) == 1
    assert "there is no device 'tpu'" in error(capsys)


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_ends_with_status_130_and_leaves_no_process(tmp_path: Path, jobs: str) -> None:
    files = [model_lines.write(tmp_path / f"{n}.jsonl", *[model_lines.add()] * 3000) for n in range(2)]
    words = ["conformance", *map(str, files), "--path", "burst", "--connect", "embedded", "--jobs", jobs]
    marker = tmp_path / "running"
    with commands.started(*words, "--json", str(marker), start_new_session=True) as process:
        wait_for_children(process.pid)
        process.send_signal(signal.SIGINT)
        # The pipe of stderr ends when the last of jobs and drivers has: they all have it.
        out, err = process.communicate(timeout=commands.LIMIT_S)
    assert (process.returncode, out, err, marker.exists()) == (130, b"", b"", False)


def wait_for_children(pid: int) -> None:
    """Wait until the command has started a child process for its tests."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    deadline_ns = time.monotonic_ns() + commands.LIMIT_S * 1_000_000_000
    while not children.read_text():
        assert time.monotonic_ns() < deadline_ns


def test_a_job_that_dies_ends_the_run_and_its_file_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FunctionProcess, "send", lambda process, _source: process.kill())
    assert run(folder, "--jobs", 2) == 1
    assert f"a job died in {folder}" in error(capsys)
