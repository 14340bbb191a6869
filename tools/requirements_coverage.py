"""Show which tests hold each row of docs/contributing/requirements.md, and whether the page says so.

A test holds a row if its name or a parameter's id contains the row's whole id, written with - or _. With --results, the
JUnit XML of a run of pytest, only tests that passed count; without, all that pytest collects. This program's own tests
do not count. The exit status is 0 only if the last column of every row is true:

    the files that it names (at most three, those that start driver processes first) have a test of the row
    rows that are `planned: ...` or `not applicable: ...`, without a file, have no test
    a row of the driver for which no test starts a driver process has a reason, after a semicolon
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "contributing" / "requirements.md"
OWN_TESTS = "tools/test_requirements_coverage"
THROUGH_DRIVER = "end_to_end/"
NOT_OF_THE_DRIVER = ("API", "PART", "OBS", "UTL", "TST")
NAMED_FILES = 3
UNSAID = "TODO"  # in the last column of a new row

_ROW = re.compile(r"^\| (?P<id>(?:N-)?[A-Z]+-\d+) \| (?P<what>.*) \| (?P<held>.*) \|$", re.MULTILINE)
_FILES = re.compile(r"(\w+/)*test_\w+(, (\w+/)*test_\w+)*")
_ID = re.compile(r"(?<![A-Z0-9])(?<!N-)((?:N-)?[A-Z]{2,5}-\d+)(?!\d)")

Tests = Mapping[str, Counter[str]]
"""For each row's id, the numbers of its tests by file, for instance `driver/test_session`."""


@dataclass
class Row:
    """A row of the document: the files that are said to hold it, and what else its last column says."""

    id: str
    files: list[str]
    remark: str = ""

    @property
    def group(self) -> str:
        """The group of the row, for instance N-VAL for N-VAL-3."""
        return self.id.rpartition("-")[0]

    @property
    def exempt(self) -> str:
        """`planned` or `not applicable` of a row that names no file, else the empty string."""
        words = () if self.files else ("planned", "not applicable")
        return next((word for word in words if self.remark.startswith(f"{word}: ")), "")

    @property
    def is_through_driver(self) -> bool:
        """Whether one of the files starts driver processes."""
        return any(map(_starts_a_driver, self.files))

    @property
    def column(self) -> str:
        """The last column: the files, the remark, or both with a semicolon between."""
        return "; ".join(filter(None, (", ".join(self.files), self.remark)))


@dataclass
class Group:
    """The rows of one group, and what is false in the last column of each."""

    name: str
    rows: list[Row] = field(default_factory=list)
    complaints: dict[str, str] = field(default_factory=dict)


def find_rows(document: str) -> list[Row]:
    """Return all rows in document order."""
    return [_row(match["id"], match["held"]) for match in _ROW.finditer(document)]


def _row(row: str, held: str) -> Row:
    files, _, remark = held.partition("; ")
    if not _FILES.fullmatch(files):
        files, remark = "", held
    return Row(row, files.split(", ") if files else [], remark)


def ids_in(name: str) -> set[str]:
    """Return the ids in a test's name."""
    return set(_ID.findall(name.replace("_", "-")))


def count_tests(names: Iterable[tuple[str, str]]) -> Tests:
    """Return the numbers of tests of each row by file, from pairs of a file and a test's name."""
    tests: dict[str, Counter[str]] = {}
    for file, name in names:
        if file != OWN_TESTS:
            for row in ids_in(name):
                tests.setdefault(row, Counter())[file] += 1
    return tests


def complaint_about(row: Row, tests: Tests) -> str:
    """Return what is false in the last column of a row, or the empty string."""
    held_by = tests.get(row.id, Counter())
    if row.exempt:
        return f"is said to be {row.exempt}, but {', '.join(held_by)} has a test" if held_by else ""
    if not held_by:
        return "has no test"
    if not row.files:
        return "names no file with a test"
    if lost := [file for file in row.files if file not in held_by]:
        return f"has no test in {', '.join(lost)}"
    if not row.is_through_driver and not row.remark and row.group not in NOT_OF_THE_DRIVER:
        return "has no test that starts a driver process, and gives no reason"
    return ""


def check(rows: Sequence[Row], tests: Tests) -> list[Group]:
    """Return the groups in document order, with what is false about their rows."""
    groups: dict[str, Group] = {}
    for row in rows:
        group = groups.setdefault(row.group, Group(row.group))
        group.rows.append(row)
        if complaint := complaint_about(row, tests):
            group.complaints[row.id] = complaint
    return list(groups.values())


def fill_in(document: str, tests: Tests) -> str:
    """Return the document with files named in each row that has tests.

    A column that is true stays as it is, unless a test that starts driver processes can take the place of others.
    """

    def filled(match: re.Match[str]) -> str:
        row = _row(match["id"], match["held"])
        is_true = not complaint_about(row, tests)
        found = _most_relevant_files(tests.get(row.id, Counter()))
        if row.exempt or (is_true and row.is_through_driver == any(map(_starts_a_driver, found))):
            return match[0]
        row.files = found
        row.remark = "" if row.remark == UNSAID else row.remark
        return f"| {row.id} | {match['what']} | {row.column} |"

    return _ROW.sub(filled, document)


def _starts_a_driver(file: str) -> bool:
    return file.startswith(THROUGH_DRIVER)


def _most_relevant_files(held_by: Counter[str]) -> list[str]:
    by_relevance = sorted(held_by, key=lambda file: (not _starts_a_driver(file), -held_by[file], file))
    return by_relevance[:NAMED_FILES]


def collect_names() -> list[tuple[str, str]]:
    """Return file and name of every test of the full tier. Blocks for a minute, while pytest imports them."""
    run_pytest = "import sys, pytest; sys.exit(pytest.console_main())"  # `-m pytest` would import the source tree
    command = [sys.executable, "-c", run_pytest, "--collect-only", "-q", "--tier", "full"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line.partition(".py::") for line in done.stdout.splitlines() if ".py::" in line]
    if done.returncode or not lines:
        raise SystemExit(f"the tests cannot be collected:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [(path.removeprefix("tests/"), name) for path, _, name in lines]


def passed_names(results: Path) -> list[tuple[str, str]]:
    """Return file and name of every test that passed, from JUnit XML; skipped and failed ones are left out."""
    cases = ElementTree.parse(results).getroot().iter("testcase")
    return [
        (case.attrib["classname"].removeprefix("tests.").replace(".", "/"), case.attrib["name"])
        for case in cases
        if not any(child.tag in ("skipped", "failure", "error") for child in case)
    ]


def print_table(groups: Sequence[Group]) -> None:
    """Print for each group how many rows are held, and then every complaint."""
    table = Table("rows", box=None)
    for heading in ("all", "held", "through a driver process", "planned", "not applicable", "false"):
        table.add_column(heading, justify="right")
    for group in groups:
        held = [row for row in group.rows if row.files and row.id not in group.complaints]
        through = [row for row in held if row.is_through_driver]
        exempt = Counter(row.exempt for row in group.rows)
        numbers = (len(group.rows), len(held), len(through), exempt["planned"], exempt["not applicable"])
        table.add_row(group.name, *map(str, (*numbers, len(group.complaints))))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for group in groups:
        for row, complaint in group.complaints.items():
            console.print(f"{row} {complaint}")
    complaints = sum(len(group.complaints) for group in groups)
    console.print(f"{sum(len(group.rows) for group in groups)} rows, {complaints} with a false last column")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    assert __doc__ is not None
    summary, _, details = __doc__.partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", metavar="GROUP", nargs="*", help="e.g. DEV N-VAL (default: all)")
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        action="append",
        help="JUnit XML of a run: count what passed; may be repeated",
    )
    parser.add_argument("--write", action="store_true", help="name files in the rows whose last column is false")
    parser.add_argument("--json", action="store_true", help="print JSON: tests by row and file, and what is false")
    options = parser.parse_args(arguments)
    tests = count_tests(list(chain(*map(passed_names, options.results))) if options.results else collect_names())
    if options.write:
        DOCUMENT.write_text(fill_in(DOCUMENT.read_text(), tests))
    groups = check(find_rows(DOCUMENT.read_text()), tests)
    if unknown := set(options.groups) - {group.name for group in groups}:
        parser.error(f"no group {', '.join(sorted(unknown))}: there are {', '.join(group.name for group in groups)}")
    groups = [group for group in groups if not options.groups or group.name in options.groups]
    if options.json:
        report = {g.name: {"tests": {r.id: tests.get(r.id, {}) for r in g.rows}, "false": g.complaints} for g in groups}
        print(json.dumps(report, indent=1))
    else:
        print_table(groups)
    return 1 if any(group.complaints for group in groups) else 0


if __name__ == "__main__":
    sys.exit(main())
