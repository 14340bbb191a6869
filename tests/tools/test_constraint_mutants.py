"""`tools/constraint_mutants.py`: a check that is switched off is missed by the tests, and only then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.places import ROOT

TOOL = ROOT / "tools" / "constraint_mutants.py"
LIMIT_S = 120


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def a_check() -> str:
    lines = (ROOT / "nnfmq" / "validation" / "model.py").read_text().splitlines()
    (line,) = (number for number, text in enumerate(lines, 1) if "extension data on a" in text)
    return f"model.py:{line}"


@pytest.fixture
def tool() -> object:
    import constraint_mutants

    return constraint_mutants


def test_checks_are_found_and_helpers_left_alone(tool: object, tmp_path: Path) -> None:
    path = tmp_path / "part.py"
    path.write_text(
        "def _require(condition):\n"
        "    if not condition:\n"
        "        raise InvalidArgument('helper')\n"
        "def check(x):\n"
        "    _require(x > 0)\n"
        "    if x > 5:\n"
        "        raise InvalidArgument('large')\n"
        "    if x > 9:\n"
        "        raise ValueError('not ours')\n"
        "    print(x)\n"
    )
    found = list(tool.checks_in(path))  # type: ignore[attr-defined]
    assert [(check.line, check.text) for check in found] == [(5, "_require(x > 0)"), (6, "if x > 5:")]


def test_the_tests_miss_a_check_that_is_switched_off() -> None:
    done = run("--only", a_check(), "--tests", "tests/validation/test_representation.py")
    assert done.returncode == 0, done.stdout[-2000:]
    assert "1 checks of validation switched off, 0 not missed" in done.stdout
    assert "FAILED tests/validation" in done.stdout


def test_what_is_no_check_is_refused() -> None:
    done = run("--only", "model.py:1")
    assert done.returncode == 2
    assert "no model.py:1" in done.stderr
