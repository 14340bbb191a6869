"""`nnfmq conformance --random-graphs` as a user sees it: runs, dumps of failed graphs, and rejected arguments."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import model_lines

from nnfmq.cli import main
from nnfmq.lab.conformance import driver_targets, targets
from nnfmq.lab.conformance.targets import ExecutionOutput, ExecutionRequest

CHOSEN = ("--random-graphs", "--classes", "later", "--filter", "reverse.*seed_[0-3]$")


def run(*words: object) -> int:
    return main(["conformance", *map(str, words)])


def report_of(path: Path, *words: object) -> dict[str, Any]:
    run(*words, "--json", path)
    report: dict[str, Any] = json.loads(path.read_text())
    return report


@pytest.fixture
def off_by_a_lot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter's outputs wrong."""
    right = targets.InProcess.execute

    def wrong(self: Any, execution: ExecutionRequest) -> ExecutionOutput:
        executed = right(self, execution)
        pairs = zip(execution.expected, executed.outputs, strict=True)
        outputs = tuple((np.frombuffer(raw, e.dtype, e.size) + e.dtype.type(7)).tobytes() for e, raw in pairs)
        return ExecutionOutput(executed.shapes, outputs)

    monkeypatch.setattr(targets.InProcess, "execute", wrong)


def test_TST_7_TST_8_a_graph_that_fails_on_random_devices_is_dumped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = driver_targets.RequestExecutor.execute

    def wrong(self: Any, execution: ExecutionRequest) -> ExecutionOutput:
        executed = right(self, execution)
        return ExecutionOutput(executed.shapes, tuple(bytes(len(raw)) for raw in executed.outputs))

    chosen = ("--random-graphs", "--classes", "divided", "--filter", "int32_rank2_seed_[01]$")
    on_random_devices = ("--path", "runtime", "--partition", "random")
    monkeypatch.setattr(driver_targets.RequestExecutor, "execute", wrong)
    first = report_of(tmp_path / "first.json", *chosen, *on_random_devices, "--dump", tmp_path)
    assert first["dumped"] == [str(tmp_path / f"random_divided_int32_rank2_seed_{seed}.jsonl") for seed in (0, 1)]

    again = report_of(tmp_path / "again.json", *first["dumped"], *on_random_devices)
    assert (again["failed"], again["plans"]) == (first["failed"], first["plans"])
    monkeypatch.undo()
    assert run(*first["dumped"], *on_random_devices) == 0


@pytest.mark.parametrize("path", ["interpreter", "sync", "burst"])
def test_random_graphs_run_on_every_path(path: str, tmp_path: Path) -> None:
    driver = [] if path == "interpreter" else ["--connect", "embedded"]
    report = report_of(tmp_path / "report.json", *CHOSEN, "--path", path, *driver)
    assert (report["total"], report["passed"], report["failed"], report["dumped"]) == (4, 4, [], [])


def test_files_and_random_graphs_run_together(tmp_path: Path) -> None:
    file = model_lines.write(tmp_path / "one.jsonl", model_lines.add("a_reverse_of_seed_0"))
    report = report_of(tmp_path / "report.json", file, *CHOSEN)
    assert report["total"] == 5


def test_jobs_do_not_change_the_order_or_the_results(tmp_path: Path) -> None:
    chosen = ("--random-graphs", "--classes", "later,small", "--filter", "bool|pack", "--seeds", "5-7")
    reports = [report_of(tmp_path / "report.json", *chosen, "--jobs", jobs) for jobs in (1, 3)]
    counted = [{key: report[key] for key in ("total", "passed", "failed", "variants")} for report in reports]
    assert counted[0] == counted[1]
    assert counted[0]["total"] == counted[0]["passed"] == 5 * 3


@pytest.mark.usefixtures("off_by_a_lot")
def test_TST_7_a_graph_that_fails_is_dumped_as_a_file_that_fails_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = report_of(tmp_path / "first.json", *CHOSEN, "--dump", tmp_path / "failing" / "here")
    assert len(first["failed"]) == 4
    assert first["dumped"] == [
        str(tmp_path / "failing" / "here" / f"random_later_reverse_aidl_v3_seed_{seed}.jsonl") for seed in range(4)
    ]

    again = report_of(tmp_path / "again.json", *first["dumped"])
    for key in ("total", "passed", "failed", "skipped", "variants"):
        assert again[key] == first[key]
    monkeypatch.undo()
    assert run(*first["dumped"]) == 0


@pytest.mark.usefixtures("off_by_a_lot")
def test_TST_7_the_output_names_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run(*CHOSEN) == 1
    said = re.search(r"^Random graphs that failed: 4, in (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert said is not None
    assert len(list(Path(said[1]).iterdir())) == 4
    assert Path(said[1]).parent == tmp_path


def test_TST_7_no_files_are_left_if_no_graph_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run(*CHOSEN) == 0
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_run_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 2
    message = "nnfmq: error: nothing to run: give a PATH of test models or --random-graphs; --extract CHECKOUT PATH"
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--classes", "single,huge"),
            "unknown class 'huge'; the classes are single, small, large, quantized, later, divided",
        ),
        (("--seeds", "5-2"), "'5-2' is neither a seed nor a range A-B of seeds"),
        (("--seeds", "first"), "'first' is neither a seed nor a range A-B of seeds"),
        (("--seeds", "4294967296"), "at most 4294967295"),
    ],
)
def test_classes_and_seeds_that_do_not_exist_are_rejected(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--random-graphs", *words) == 2
    assert message in capsys.readouterr().err


def test_the_command_accepts_all_classes() -> None:
    from nnfmq.cli.conformance import _CLASSES, _USUAL_CLASSES
    from nnfmq.lab.conformance.random_graphs import FAMILIES, SEEDS, USUAL_FAMILIES

    assert (_CLASSES, _USUAL_CLASSES, SEEDS) == (FAMILIES, USUAL_FAMILIES, (0, 49))
