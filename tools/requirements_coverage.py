"""Count the tests of each row of docs/contributing/requirements.md: `python tools/requirements_coverage.py [GROUP...]`.

A test covers a row if its name or a parameter's id contains the row's whole id, written with - or _. pytest collects
the names, so tests that it does not collect do not count; skipped ones do. With --through-driver only the tests of
tests/end_to_end count, which start driver processes, and the default groups are the negative ones. The exit status is 0
only if every row of the chosen groups (default: all except TST) is covered or not applicable.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "contributing" / "requirements.md"
THROUGH_DRIVER = "tests/end_to_end"
UNCOUNTED = ("TST",)  # requirements of the test suite itself

_ROW = re.compile(r"^\| ((?:N-)?[A-Z]+-\d+) \|", re.MULTILINE)
_ID = re.compile(r"(?<![A-Z0-9])(?<!N-)((?:N-)?[A-Z]{2,5}-\d+)(?!\d)")


@dataclass
class Group:
    """The rows of one group with their numbers of tests, and the rows that are not applicable."""

    name: str
    tests: dict[str, int] = field(default_factory=dict)
    not_applicable: list[str] = field(default_factory=list)

    @property
    def missing(self) -> list[str]:
        """The applicable rows without a test."""
        return [row for row, count in self.tests.items() if not count and row not in self.not_applicable]


def find_rows(document: str) -> tuple[list[str], list[str]]:
    """Return the ids of all rows in document order, and of those that are not applicable."""
    text, _, not_applicable = document.partition("## Not applicable")
    return _ROW.findall(text), _ROW.findall(not_applicable)


def ids_in(name: str) -> set[str]:
    """Return the ids in a test's name."""
    return set(_ID.findall(name.replace("_", "-")))


def group_of(row: str) -> str:
    """Return the group of a row, for instance N-VAL for N-VAL-3."""
    return row.rpartition("-")[0]


def count_tests(document: str, names: Iterable[str]) -> list[Group]:
    """Return the groups of the document with the number of tests that have each row's id in their names."""
    rows, not_applicable = find_rows(document)
    groups: dict[str, Group] = {}
    for row in rows:
        groups.setdefault(group_of(row), Group(group_of(row))).tests[row] = 0
    for row in not_applicable:
        groups[group_of(row)].not_applicable.append(row)
    for name in names:
        for row in ids_in(name):
            tests = groups[group_of(row)].tests if group_of(row) in groups else {}
            if row in tests:
                tests[row] += 1
    return list(groups.values())


def collect_names(*paths: str) -> list[str]:
    """Return the names of all tests, or of those in `paths`. Blocks while pytest imports them."""
    command = [
        sys.executable,
        "-c",
        "import sys, pytest; sys.exit(pytest.console_main())",
        "--collect-only",
        "-q",
        "--tier",
        "full",
    ]
    done = subprocess.run([*command, *paths], cwd=ROOT, capture_output=True, text=True, check=False)
    names = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    if done.returncode or not names:
        raise SystemExit(f"the tests cannot be collected:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return names


def print_table(groups: Sequence[Group]) -> None:
    """Print the number of covered rows of each group, and the missing rows."""
    table = Table("rows", box=None)
    for heading in ("all", "covered", "not applicable"):
        table.add_column(heading, justify="right")
    table.add_column("missing")
    for group in groups:
        covered = len(group.tests) - len(group.missing) - len(group.not_applicable)
        numbers = (len(group.tests), covered, len(group.not_applicable))
        table.add_row(group.name, *map(str, numbers), " ".join(group.missing))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    missing = sum(len(group.missing) for group in groups)
    console.print(f"{sum(len(group.tests) for group in groups)} rows, {missing} without a test")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("groups", metavar="GROUP", nargs="*", help="e.g. DEV N-VAL (default: all but TST)")
    parser.add_argument("--json", action="store_true", help="print JSON: tests by row, for each group")
    parser.add_argument("--through-driver", action="store_true", help=f"count only the tests of {THROUGH_DRIVER}")
    options = parser.parse_args(arguments)
    through = options.through_driver
    groups = count_tests(DOCUMENT.read_text(), collect_names(THROUGH_DRIVER) if through else collect_names())
    default = [g.name for g in groups if (g.name.startswith("N-") if through else g.name not in UNCOUNTED)]
    chosen = options.groups or default
    unknown = set(chosen) - {group.name for group in groups}
    if unknown:
        parser.error(f"no group {', '.join(sorted(unknown))}: there are {', '.join(group.name for group in groups)}")
    groups = [group for group in groups if group.name in chosen]
    if options.json:
        print(json.dumps({group.name: {"tests": group.tests, "missing": group.missing} for group in groups}, indent=1))
    else:
        print_table(groups)
    return 1 if any(group.missing for group in groups) else 0


if __name__ == "__main__":
    sys.exit(main())
