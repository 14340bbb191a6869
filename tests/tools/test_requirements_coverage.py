"""`tools/requirements_coverage.py` finds what tests hold each row, and what the requirements page says falsely."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.places import ROOT

DOCUMENT = """
| id | what must hold | held by |
|---|---|---|
| DEV-1 | one | end_to_end/test_a |
| DEV-12 | twelve | planned: later |
| VAL-1 | one \\| or two | service/test_b, test_c; the client's |
| N-VAL-1 | one | not applicable: never |
| N-VAL-12 | twelve | TODO |
"""
TESTS = [
    ("end_to_end/test_a", "test_DEV_1_a"),
    ("service/test_b", "test_VAL_1_a"),
    ("test_c", "test_VAL_1_a[N-VAL-12]"),
]
RESULTS = """<?xml version="1.0" encoding="utf-8"?>
<testsuites name="pytest tests"><testsuite name="pytest" errors="1" failures="1" skipped="2" tests="5">
<testcase classname="tests.end_to_end.test_a" name="test_CAP_1_a" time="0.1" />
<testcase classname="tests.end_to_end.test_a" name="test_CAP_2_a" time="0.1"><skipped message="no device" /></testcase>
<testcase classname="tests.service.test_b" name="test_CAP_3_a[1]" time="0.1"><failure message="1" /></testcase>
<testcase classname="tests.service.test_b" name="test_CAP_4_a" time="0.1"><error message="1" /></testcase>
<testcase classname="tests.test_c" name="test_CAP_5_a" time="0.1"><system-out>text</system-out></testcase>
</testsuite></testsuites>
"""


@pytest.fixture
def tool() -> Any:
    import requirements_coverage

    return requirements_coverage


def complaints(tool: Any, document: str, tests: list[tuple[str, str]]) -> dict[str, str]:
    groups = tool.check(tool.find_rows(document), tool.count_tests(tests))
    return {row: complaint for group in groups for row, complaint in group.complaints.items()}


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("test_DEV_1_a_thing", {"DEV-1"}),
        ("test_DEV_3_DEV_14_two_things", {"DEV-3", "DEV-14"}),
        ("test_N_VAL_12_a_thing", {"N-VAL-12"}),
        ("test_rejected[N-OPF-12 scalar-None]", {"N-OPF-12"}),
        ("test_a_thing[DEV-2-N-RQX-4]", {"DEV-2", "N-RQX-4"}),
        ("test_XDEV_1", {"XDEV-1"}),
        ("test_INT_8_and_DEV", {"INT-8"}),
    ],
)
def test_whole_ids_are_found_in_names(name: str, ids: set[str], tool: Any) -> None:
    assert tool.ids_in(name) == ids


def test_tests_are_counted_by_row_and_file_and_the_program_s_own_tests_are_not(tool: Any) -> None:
    own = ("tools/test_requirements_coverage", "test_whole_ids_are_found_in_names[test_DEV_1_a_thing-ids0]")
    counted = tool.count_tests([*TESTS, TESTS[0], own])
    assert counted["DEV-1"] == Counter({"end_to_end/test_a": 2})
    assert counted["VAL-1"] == Counter({"service/test_b": 1, "test_c": 1})
    assert set(counted) == {"DEV-1", "VAL-1", "N-VAL-12"}
    assert Path(__file__) == ROOT / "tests" / f"{tool.OWN_TESTS}.py"


def test_a_row_has_files_and_a_remark(tool: Any) -> None:
    rows = {row.id: (row.files, row.remark, row.exempt) for row in tool.find_rows(DOCUMENT)}
    assert rows == {
        "DEV-1": (["end_to_end/test_a"], "", ""),
        "DEV-12": ([], "planned: later", "planned"),
        "VAL-1": (["service/test_b", "test_c"], "the client's", ""),
        "N-VAL-1": ([], "not applicable: never", "not applicable"),
        "N-VAL-12": ([], "TODO", ""),
    }


def test_rows_without_a_test_or_with_a_false_column_are_reported(tool: Any) -> None:
    assert complaints(tool, DOCUMENT, TESTS) == {"N-VAL-12": "names no file with a test"}
    assert complaints(tool, DOCUMENT, TESTS[1:])["DEV-1"] == "has no test"
    assert complaints(tool, DOCUMENT, [*TESTS[:1], *TESTS[2:]])["VAL-1"] == "has no test in service/test_b"
    surprising = [*TESTS, ("test_c", "test_DEV_12_a"), ("test_c", "test_N_VAL_1_a")]
    assert complaints(tool, DOCUMENT, surprising)["DEV-12"] == "is said to be planned, but test_c has a test"
    assert complaints(tool, DOCUMENT, surprising)["N-VAL-1"] == "is said to be not applicable, but test_c has a test"


def test_files_are_written_where_the_column_is_false_and_driver_processes_precede(tool: Any) -> None:
    more = [(f"service/test_{letter}", "test_N_VAL_12_a") for letter in "xyz"]
    found = tool.fill_in(DOCUMENT, tool.count_tests([*TESTS, *more, ("end_to_end/test_d", "test_VAL_1_a")]))
    changed = set(found.splitlines()) - set(DOCUMENT.splitlines())
    assert changed == {
        "| VAL-1 | one \\| or two | end_to_end/test_d, service/test_b, test_c; the client's |",
        "| N-VAL-12 | twelve | service/test_x, service/test_y, service/test_z |",
    }


def test_a_row_of_the_driver_needs_a_driver_process_or_a_reason(tool: Any) -> None:
    rows = "| OBS-1 | one | test_c |\n| CAP-1 | one | test_c |\n| CAP-2 | two | test_c; the client's |\n"
    found = complaints(tool, rows, [("test_c", "test_OBS_1_CAP_1_CAP_2_a")])
    assert found == {"CAP-1": "has no test that starts a driver process, and gives no reason"}


# ------------------------------------------------------------------------------------------------ the page


def test_the_document_has_every_row_once_and_each_says_something(tool: Any) -> None:
    rows = tool.find_rows(tool.DOCUMENT.read_text())
    assert len({row.id for row in rows}) == len(rows) == 456
    assert len([row for row in rows if row.id.startswith("N-")]) == 203
    assert [row.id for row in rows if not row.files and not row.exempt] == []
    assert {"API", "PART", "OBS", "UTL", "TST"} <= {row.group for row in rows}


def test_the_files_of_the_document_exist(tool: Any) -> None:
    named = {file for row in tool.find_rows(tool.DOCUMENT.read_text()) for file in row.files}
    assert [file for file in sorted(named) if not (ROOT / "tests" / f"{file}.py").is_file()] == []


def test_the_last_column_is_true_of_the_tests_of_a_full_run(tool: Any, request: pytest.FixtureRequest) -> None:
    config = request.config
    is_chosen = config.args_source is not pytest.Config.ArgsSource.TESTPATHS or config.getoption("ignore")
    if is_chosen or config.getoption("--tier") != "full" or config.option.keyword or config.option.markexpr:
        pytest.skip("only some of the tests are collected")
    names = (item.nodeid.partition(".py::")[::2] for item in request.session.items)
    assert (
        complaints(tool, tool.DOCUMENT.read_text(), [(path.removeprefix("tests/"), name) for path, name in names]) == {}
    )


# ------------------------------------------------------------------------------------------------ the command


def test_only_tests_that_passed_count(tool: Any, tmp_path: Path) -> None:
    results = tmp_path / "tests.xml"
    results.write_text(RESULTS)
    assert tool.passed_names(results) == [("end_to_end/test_a", "test_CAP_1_a"), ("test_c", "test_CAP_5_a")]


def test_the_status_is_1_if_a_row_lost_its_last_test(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, results = tmp_path / "requirements.md", tmp_path / "tests.xml"
    page.write_text("| CAP-1 | one | end_to_end/test_a |\n| CAP-5 | five | test_c; the client's |\n")
    results.write_text(RESULTS)
    monkeypatch.setattr(tool, "DOCUMENT", page)
    assert tool.main(["--results", str(results)]) == 0
    assert "2 rows, 0 with a false last column" in capsys.readouterr().out
    results.write_text(RESULTS.replace("test_CAP_5_a", "test_five_a"))
    assert tool.main(["--results", str(results), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["CAP"]["false"] == {"CAP-5": "has no test"}


def test_files_are_written_to_the_page(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, results = tmp_path / "requirements.md", tmp_path / "tests.xml"
    page.write_text("# Page\n\n| CAP-1 | one | test_b |\n")
    results.write_text(RESULTS)
    monkeypatch.setattr(tool, "DOCUMENT", page)
    assert tool.main(["--results", str(results), "--write", "CAP"]) == 0
    assert page.read_text() == "# Page\n\n| CAP-1 | one | end_to_end/test_a |\n"


def test_an_unknown_group_is_wrong_usage(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "collect_names", lambda: TESTS)
    with pytest.raises(SystemExit) as ended:
        tool.main(["NONE"])
    assert ended.value.code == 2
