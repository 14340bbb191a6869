"""The tiers take the tests that their markers say, and the summary reports how many were left out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import tiers
from support.places import ROOT

TESTS = """
import pytest

@pytest.mark.parametrize("number", range(20))
def test_family(number): ...

@pytest.mark.full
def test_slow(): ...

@pytest.mark.deep
def test_exhaustive(): ...

def test_depth():
    from support import tiers
    print(" deep " if tiers.IS_DEEP else " shallow ")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with this conftest and the tests above."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(TESTS)
    (tmp_path / "tests" / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    markers = "markers = ['full: slow', 'deep: exhaustive']"
    paths = f"testpaths = ['tests']\npythonpath = ['{ROOT / 'tests' / 'lib'}']"
    (tmp_path / "pyproject.toml").write_text(f"[tool.pytest.ini_options]\n{paths}\n{markers}\n")
    return tmp_path


def test_every_slow_path_exists() -> None:
    assert [path for path in tiers.SLOW if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("path", "slow"),
    [
        ("tests/end_to_end/test_supervisor.py", True),
        ("tests/end_to_end/test_golden.py", False),
        ("tests/queue_model_checking/test_interleavings.py", True),
        ("tests/queue/test_layout.py", False),
    ],
)
def test_slow_files_are_identified_by_their_paths(path: str, slow: bool) -> None:
    assert (ROOT / path).exists()
    assert tiers.is_slow(path) is slow


def run(project: Path, *arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("pytest")), "-s", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command, cwd=project, capture_output=True, text=True, timeout=120, check=False, env={**os.environ}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("arguments", "passed", "left"),
    [
        ([], 3, "Tier quick: 20 tests were left out; pytest --tier full runs them."),
        (["--tier", "full"], 22, "Tier full: 1 tests were left out; pytest --tier deep runs them."),
        (["tests/test_it.py"], 22, "Tier full: 1 tests were left out"),
        (["--tier", "deep"], 23, ""),
    ],
)
def test_a_tier_takes_its_tests(project: Path, arguments: list[str], passed: int, left: str) -> None:
    output = run(project, *arguments)
    assert f"{passed} passed" in output
    assert left in output


@pytest.mark.parametrize(("tier", "depth"), [("full", "shallow"), ("deep", "deep")])
def test_only_the_deep_tier_deepens_searches(project: Path, tier: str, depth: str) -> None:
    assert depth in run(project, "--tier", tier).split()
