"""`tools/requirements_coverage.py` counts the tests that have a row's whole id in their names."""

from __future__ import annotations

import json
from typing import Any

import pytest

DOCUMENT = """
| DEV-1 | one |
| DEV-12 | twelve |
| VAL-1 | one |
| N-VAL-1 | one |
| N-VAL-12 | twelve |

## Not applicable here

| DEV-12 | why |
"""


@pytest.fixture
def tool() -> Any:
    import requirements_coverage

    return requirements_coverage


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


def test_tests_are_counted_by_group_and_missing_rows_are_listed(tool: Any) -> None:
    names = ["test_VAL_1_a", "test_N_VAL_12_b", "test_DEV_1_c", "test_DEV_1_d", "test_INT_8_e"]
    dev, val, n_val = tool.count_tests(DOCUMENT, names)
    assert (dev.name, dev.tests, dev.missing) == ("DEV", {"DEV-1": 2, "DEV-12": 0}, [])
    assert (val.name, val.tests, val.missing) == ("VAL", {"VAL-1": 1}, [])
    assert (n_val.name, n_val.tests, n_val.missing) == ("N-VAL", {"N-VAL-1": 0, "N-VAL-12": 1}, ["N-VAL-1"])


def test_the_document_has_every_row_once(tool: Any) -> None:
    rows, not_applicable = tool.find_rows(tool.DOCUMENT.read_text())
    assert len(rows) == len(set(rows))
    negative = [row for row in rows if row.startswith("N-")]
    assert len(negative) == 163
    assert set(not_applicable) <= set(rows)


def test_the_exit_status_is_1_if_a_row_is_missing(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "collect_names", lambda: ["test_CAP_1_a"])
    assert tool.main(["CAP", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["CAP"]["missing"] == [f"CAP-{number}" for number in range(2, 8)]
    monkeypatch.setattr(tool, "collect_names", lambda: [f"test_CAP_{number}_a" for number in range(1, 8)])
    assert tool.main(["CAP"]) == 0
    assert "7 rows, 0 without a test" in capsys.readouterr().out


def test_tests_through_a_driver_process_are_counted_separately(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    collected_paths = []
    monkeypatch.setattr(tool, "collect_names", lambda *paths: collected_paths.append(paths) or ["test_N_DCX_1_a"])
    assert tool.main(["--through-driver", "N-DCX"]) == 0
    assert tool.main(["--through-driver", "--json"]) == 1
    assert collected_paths == [("tests/end_to_end",)] * 2
    report = json.loads(capsys.readouterr().out.partition("test\n")[2])
    assert report["N-DCX"]["missing"] == [] and report["N-BAS"]["missing"] and "DEV" not in report
