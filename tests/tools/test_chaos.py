"""`tools/chaos.py`: its steps are those of the protocols, its events come to all of them, and it finds what is wrong.

The tool changes functions of nnfmq in its own processes, so a test that runs it starts it as a program.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import chaos as tool
import pytest
from chaos_events import Action, allowed_statuses, draw
from chaos_place import Traces
from chaos_steps import FUNCTIONS, NEVER_SENT, Page, Role, find, protocols, steps
from support.drivers import until
from support.other_users import needs_root
from support.places import ROOT

LIMIT_S = 280
LEAK = """
from nnfmq.driver.process.workers import WorkerProcesses

kept = []


def keep_open(self, worker):
    self._loop.remove_reader(worker.compile_link.channel.fileno())
    kept.append(worker.compile_link)


WorkerProcesses._close_compile_link = keep_open
"""
LEAKING = """
import sys
from contextlib import ExitStack
from pathlib import Path

from nnfmq.base.processes import use_one_blas_thread

use_one_blas_thread()
sys.path.append(sys.argv[2])
import chaos_place
from chaos_events import record
from chaos_steps import Page, Role, install

chaos_place.SETTLE_S = 3.0
page = Page(Path(sys.argv[1]) / "page")
install(page, Role.CLIENT)
with ExitStack() as stack:
    place = chaos_place.Place(Path(sys.argv[1]) / "place", page, stack)
    wanted = place.baseline()
    record(place, "surplus")
    print(place.settle(wanted))
"""


def chaos(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [sys.executable, str(ROOT / "tools" / "chaos.py"), *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env={**inherited, **environment}
    )


# ---- the steps


def test_every_message_of_the_protocol_s_document_is_a_step_at_both_ends() -> None:
    text = (ROOT / "docs" / "reference" / "protocol.md").read_text()
    documented = set(re.findall(r"^\| `(\w+)` \| (?:client|driver) \|", text, re.MULTILINE))
    assert len(documented) > 50
    documented -= set(NEVER_SENT)
    names = {step.name for step in steps()}
    assert {name for name in documented if f"{name} is sent" not in names} == set()
    assert {name for name in documented if f"{name} has been received" not in names} == set()


def test_every_message_between_other_processes_is_a_step_at_both_ends() -> None:
    names = {step.name for step in steps()}
    kinds = {kind.__name__ for protocol in protocols() for known in protocol.senders.values() for kind in known}
    assert {"Publish", "VersionChanged", "ImportFailed"} <= kinds
    assert {name for name in kinds if f"{name} is sent" not in names} == set(NEVER_SENT)
    assert {name for name in kinds if f"{name} has been received" not in names} == set(NEVER_SENT)


@pytest.mark.parametrize("target", sorted({step.target for step in FUNCTIONS}))
def test_every_function_of_the_table_exists(target: str) -> None:
    _, _, function = find(target)
    assert callable(getattr(function, "__func__", function))


def test_nnfmq_has_no_code_for_the_hooks() -> None:
    sources = [*(ROOT / "nnfmq").rglob("*.py"), *(ROOT / "nnfmq").rglob("*.pyx")]
    assert len(sources) > 200
    assert [path for path in sources if re.search(r"\bchaos", path.read_text(), re.IGNORECASE)] == []


# ---- the page


def test_a_process_waits_at_the_chosen_step_until_it_is_released(tmp_path: Path) -> None:
    page = Page(tmp_path / "page")
    number = next(number for number, step in enumerate(steps()) if step.name == "Execute is sent")
    page.report_role(Role.CLIENT)
    page.report_step(number)
    assert page.waiting() is None
    page.arm(number)
    page.spare([os.getpid()])
    page.report_step(number)  # neither waits nor counts
    page.spare([])
    page.report_step(number + 1)  # another step
    assert page.waiting() is None
    waits = threading.Thread(target=page.report_step, args=(number,))
    waits.start()
    until(lambda: page.waiting() is not None, "the thread waits")
    found = page.waiting()
    assert found is not None and found[0] == os.getpid()
    assert waits.is_alive()
    page.release()
    waits.join()
    page.report_step(number)  # nobody waits any more
    assert page.counts()[number] == 3


def test_a_step_counts_only_in_the_process_whose_it_is(tmp_path: Path) -> None:
    page = Page(tmp_path / "page")
    number = next(number for number, step in enumerate(steps()) if step.role is Role.WORKER)
    page.report_role(Role.SUPERVISOR)
    page.report_step(number)
    assert page.counts()[number] == 0
    page.report_role(Role.WORKER)
    page.report_step(number)
    assert page.counts()[number] == 1


# ---- events


def test_the_events_of_a_series_come_to_every_step_with_every_action() -> None:
    scripts = {number: ["bursts"] for number in range(len(steps()))}
    events = [draw(1, number, scripts, {"bursts": 0.5}) for number in range(2000)]
    assert {event.step for event in events} == {-1, *scripts}
    assert {event.action for event in events} == set(Action)
    assert {event.victim for event in events if event.action is Action.KILL} >= set(Role) - {Role.UNFINISHED}
    assert events[700] == draw(1, 700, scripts, {"bursts": 0.5})
    assert events[700] != draw(2, 700, scripts, {"bursts": 0.5})


def test_a_status_is_allowed_only_if_the_event_explains_it() -> None:
    killed = draw(1, 0, {0: ["bursts"]}, {"bursts": 0.5})._replace(action=Action.KILL)
    assert allowed_statuses(killed, Role.CLIENT) == {"NONE"}
    assert "DEAD_OBJECT" in allowed_statuses(killed, Role.WORKER)
    assert "RESOURCE_EXHAUSTED_TRANSIENT" not in allowed_statuses(killed, Role.WORKER)
    assert allowed_statuses(killed._replace(action=Action.STOP), Role.WORKER) == {"NONE"}
    assert "RESOURCE_EXHAUSTED_TRANSIENT" in allowed_statuses(killed._replace(action=Action.MEMORY), Role.WORKER)


def test_what_is_left_behind_is_named() -> None:
    before = Traces({"worker": 1}, {"supervisor": Counter({"socket": 3, "pipe": 1})})
    assert before.differences(before) == []
    after = Traces({"worker": 2, "import": 1}, {"supervisor": Counter({"socket": 5})})
    assert after.differences(before) == [
        "2 worker processes instead of 1",
        "1 import processes instead of 0",
        "the supervisor has more: {'socket': 2}, fewer: {'pipe': 1}",
    ]


# ---- the command


def part(**changed: Any) -> dict[str, Any]:
    # These buckets begin at 125 ns, 2 us and 4 us; the next ones at 250 ns, 2.25 us and 4.5 us. A file has texts.
    neighbour = {"alone": {"client": {1: 99, 16: 1}}, "control": {"client": {"16": 10}},
        "events": {"client": {16: 98, 24: 2}, "queue": {"8": 1}}}  # fmt: skip
    return {
        "first": 0, "events": 100, "places": 1, "load": 1.0, "reached": 90, "steps": [-1, 3, 4],
        "actions": {"kill": 90}, "victims": {"worker": 90}, "statuses": {"execute: NONE": 5},
        "seen_ms": {"client": [1.0, 2.0], "worker": [], "supervisor": [5.0]}, "neighbour": neighbour, "findings": [],
    } | changed  # fmt: skip


def test_runs_are_summed() -> None:
    finding = {"number": 3, "event": "3: kill", "finding": "hang: it waits"}
    sums = tool.summed([part(), part(steps=[4, 5], findings=[finding], actions={"kill": 1, "delay": 2})])
    assert (sums["runs"], sums["events"], sums["reached"], sums["steps_disturbed"]) == (2, 200, 180, 3)
    assert sums["actions"] == {"kill": 91, "delay": 2}
    assert sums["seen_ms"]["client"] == {"count": 4, "p50": 1.0, "p99": 2.0, "max": 2.0}
    assert sums["seen_ms"]["worker"] == {"count": 0}
    assert (sums["found"]["hang"], sums["found"]["status"]) == (1, 0)
    neighbour = sums["neighbour"]
    assert neighbour["alone"]["client"] == {"count": 200, "p50": 0.187, "p99": 0.187}
    assert neighbour["control"]["client"] == {"count": 20, "p50": 2.125, "p99": 2.125}
    assert neighbour["events"]["client"] == {"count": 200, "p50": 2.125, "p99": 4.25}
    assert (neighbour["events"]["queue"]["count"], neighbour["events"]["engine"]) == (2, {"count": 0})
    assert neighbour["ratios"] == {"p50": {"alone": 11.36, "control": 1.0}, "p99": {"alone": 22.73, "control": 2.0}}


def test_runs_without_controls_are_summed_beside_those_that_have_them() -> None:
    older = {"alone_us": {"p50": 10.0, "p99": 20.0}, "during_us": {"p50": 11.0, "p99": 30.0}, "executions": 7}
    neighbour = tool.summed([part(), part(neighbour=older), part(neighbour=older)])["neighbour"]
    assert (neighbour["older_executions"], neighbour["older_p99_ratios"]) == (14, [1.5, 1.5])
    assert neighbour["events"]["client"]["count"] == 100
    assert tool.summed([part(neighbour=older)])["neighbour"]["ratios"] == {"p50": {}, "p99": {}}


def test_the_sums_of_a_file_are_printed_and_decide_the_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "series.json"
    file.write_text(json.dumps({"seed": 1, "parts": [part(), part()]}))
    assert tool.main(["--events", "0", "--resume", str(file), "--no-color"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "200 events in 2 runs, 180 brought about" in printed
    bad = part(findings=[{"number": 9, "event": "9: kill", "finding": "left behind: a process"}])
    file.write_text(json.dumps({"seed": 1, "parts": [part(), bad]}))
    assert tool.main(["--events", "0", "--resume", str(file), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["found"]["left behind"] == 1


def test_several_runs_add_to_one_file_and_get_events_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "series.json"
    first, second = (tool.SeriesFile(path, 1) for _ in range(2))
    assert (first.take(100), second.take(50), first.take(1)) == (range(100), range(100, 150), range(150, 151))
    for file, at, events in ((first, 0, 10), (second, 100, 20), (first, 0, 30)):
        file.save(part(first=at, events=events))
    assert [(each["first"], each["events"]) for each in tool.SeriesFile(path, 1).parts] == [(100, 20), (0, 30)]


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--events", "1001"], "a run has at most 1000"), (["--seed", "2"], "its events have the seed 1, not 2")],
)
def test_a_wrong_argument_of_chaos_is_status_2(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "series.json"
    file.write_text(json.dumps({"seed": 1, "parts": [part()]}))
    with pytest.raises(SystemExit) as ended:
        tool.main([*words, "--resume", str(file)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize(("users", "events"), [("one", 12), pytest.param("several", 6, marks=needs_root())])
def test_LIFE_7_events_at_steps_hang_nothing_and_leave_nothing(tmp_path: Path, users: str, events: int) -> None:
    done = chaos("--users", users, "--events", str(events), "--json", "--resume", str(tmp_path / "series.json"))
    assert done.stdout, done.stderr
    sums = json.loads(done.stdout)
    assert (done.returncode, sums["findings"]) == (0, [])  # also: the scripts pass every step
    assert sums["events"] == events
    assert sums["reached"] > events // 2
    neighbour = sums["neighbour"]
    for beside in ("alone", "control", "events"):
        counts = {name: times["count"] for name, times in neighbour[beside].items()}
        assert min(counts.values()) > 100, (beside, counts)
    assert set(neighbour["ratios"]["p99"]) == {"alone", "control"}


@pytest.mark.full
@pytest.mark.timeout(LIMIT_S + 20)
def test_a_descriptor_that_a_driver_leaves_open_is_found(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LEAK)
    (tmp_path / "place").mkdir()
    words = [sys.executable, "-c", LEAKING, str(tmp_path), str(ROOT / "tools")]
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=True, env=variables)
    assert done.stdout == "[\"the supervisor has more: {'socket': 3}, fewer: {}\"]\n", done.stderr
