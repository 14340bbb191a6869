"""`tools/constraint_mutants.py`: tests kill the mutants of the checks that they cover, and no others.

The full tier tries a sample of the checks, the deep tier all.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import constraint_mutants
import pytest
from constraint_mutants import Switches
from support.places import ROOT

from nnfmq.hal.errors import InvalidArgument

TOOL = ROOT / "tools" / "constraint_mutants.py"
LIMIT_S = 120
DEEP_LIMIT_S = 3600
MODULE = """
def _require(condition, said):
    if not condition:
        raise InvalidArgument(said)

def small(x):
    _require(0 <= x < 10, "range")

def known(xs):
    fits = all(x is not None and x > 0 for x in xs)
    _require(fits and xs != (7,), "positive")

def other(x):
    if x > 5:
        raise InvalidArgument("large")
    if x > 3:
        raise ValueError("not ours")
    try:
        small(x)
    except InvalidArgument as error:
        raise InvalidArgument("in other words") from error
"""
FOUND = [
    (7, False, "_require(0 <= x < 10, 'range')"),
    (7, True, "0 <= x"),
    (7, True, "x < 10"),
    (10, True, "x is not None"),
    (10, True, "x > 0"),
    (11, False, "_require(fits and xs != (7,), 'positive')"),
    (11, True, "fits"),
    (11, True, "xs != (7,)"),
    (15, False, "raise InvalidArgument('large')"),
]
SMALL, FROM_0, BELOW_10, KNOWN, POSITIVE, WHOLE, FITS, OTHER, LARGE = range(len(FOUND))
REFUSED: list[tuple[str, object, set[int]]] = [
    ("small", -1, {SMALL, FROM_0}),
    ("small", 10, {SMALL, BELOW_10}),
    ("known", (1, 0), {WHOLE, FITS, POSITIVE}),
    ("known", (None,), {WHOLE, FITS, KNOWN}),
    ("known", (7,), {WHOLE, OTHER}),
    ("other", 6, {LARGE}),
    ("other", -1, {SMALL, FROM_0}),
]


def run(*arguments: str, limit_s: int = LIMIT_S) -> subprocess.CompletedProcess[str]:
    """Run the tool over the ordinary tests."""
    command = [sys.executable, str(TOOL), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "part.py"
    path.write_text(MODULE)
    return path


@pytest.fixture
def names(module: Path) -> dict[str, Any]:
    """The module's functions, with `switches` to switch its checks off by."""
    tree, _ = constraint_mutants.insert_switches(module)
    switches = Switches()
    names = {"InvalidArgument": InvalidArgument, "__switches__": switches, "switches": switches}
    exec(compile(tree, module, "exec"), names)
    return names


def test_checks_and_their_parts_are_found_and_helpers_left_alone(module: Path) -> None:
    _, checks = constraint_mutants.insert_switches(module)
    assert [(check.line, check.is_part, check.text) for check in checks] == FOUND


@pytest.mark.parametrize(("function", "value", "refusing"), REFUSED)
def test_what_refuses_is_noted(names: dict[str, Any], function: str, value: object, refusing: set[int]) -> None:
    with pytest.raises(InvalidArgument):
        names[function](value)
    assert names["switches"].rejected == refusing


@pytest.mark.parametrize(
    ("function", "value", "disabled"),
    [
        (function, value, disabled)
        for function, value, refusing in REFUSED
        for disabled in set(range(len(FOUND))) - refusing
    ],
)
def test_the_other_checks_reject_while_one_is_disabled(
    names: dict[str, Any], function: str, value: object, disabled: int
) -> None:
    names["switches"].disabled = disabled
    with pytest.raises(InvalidArgument):
        names[function](value)


@pytest.mark.parametrize(
    ("function", "value", "disabled"),
    [
        ("small", -1, SMALL),
        ("small", -1, FROM_0),
        ("small", 10, BELOW_10),
        ("known", (1, 0), WHOLE),
        ("known", (1, 0), FITS),
        ("known", (7,), OTHER),
    ],
)
def test_a_disabled_check_rejects_nothing(names: dict[str, Any], function: str, value: object, disabled: int) -> None:
    names["switches"].disabled = disabled
    names[function](value)


def test_a_sample_of_mutants_is_killed_by_their_tests_and_by_no_others() -> None:
    only = "^validation/(models|requests)"
    done = run("--only", only, "--every", "6", "--json", "--tests", "tests/validation/test_request.py")
    killed = {result["location"]: result["killed_by"] for result in json.loads(done.stdout)}
    other = {location: test for location, test in killed.items() if "models" in location}

    assert done.returncode == 1
    assert other
    assert not any(other.values())
    assert all(test for location, test in killed.items() if location not in other)
    assert all(f"survived {location}: " in done.stderr for location in other)


def test_a_pattern_that_matches_no_check_is_rejected() -> None:
    with pytest.raises(SystemExit, match=r"^no check matches model.py:1:$"):
        constraint_mutants.main(["--only", "model.py:1:"])


@pytest.mark.deep
def test_the_tests_miss_every_check() -> None:
    done = run(limit_s=DEEP_LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
