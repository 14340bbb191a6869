"""The choice of the core. Each case runs in a new Python process, because the choice is made at import."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import nnfmq
from nnfmq.base import cores
from nnfmq.queue import core
from nnfmq.serialize import codec

SOURCE = Path(nnfmq.__file__).parent
QUEUE = "from nnfmq.queue import core as c; print(c.core_name, '|', c.core_path, '|', c.core_reason)"
CODEC = "from nnfmq.serialize import codec as c; print(c.codec_name, '|', c.codec_path, '|', c.codec_reason)"
WHERE = {QUEUE: ("queue/_core", "queue/_pycore"), CODEC: ("serialize/_codec", "serialize/_pycodec")}

needs_compiled = pytest.mark.skipif(
    "compiled" not in core.CORES.available(), reason="the compiled core is not built here"
)
each_part = pytest.mark.parametrize("report", WHERE, ids=["queue", "codec"])


def copy_package(target: Path, *, compiled: bool) -> Path:
    """Copy the package into `target`, with or without its compiled core; return `target`."""
    unwanted = shutil.ignore_patterns("__pycache__", "*.c", "data", *([] if compiled else ["*.so"]))
    shutil.copytree(SOURCE, target / "nnfmq", ignore=unwanted)
    return target


def run(*path: Path, core: str | None, cwd: Path | None = None, code: str = QUEUE) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new Python with `path` before everything else in sys.path."""
    environment = {name: value for name, value in os.environ.items() if name not in ("NNFMQ_CORE", "PYTHONSAFEPATH")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    if core is not None:
        environment["NNFMQ_CORE"] = core
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=cwd or path[0], capture_output=True, text=True, check=False
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree in which nothing was compiled."""
    return copy_package(tmp_path / "tree", compiled=False)


@each_part
def test_a_compiled_core_that_is_not_built_is_an_import_error_with_the_remedy(tree: Path, report: str) -> None:
    done = run(tree, core="compiled", code=report)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: the compiled core is not built in") and str(tree) in last
    assert "pip install ." in last and "NNFMQ_CORE=python" in last


@each_part
def test_an_unknown_name_is_an_error_that_lists_the_choices(tree: Path, report: str) -> None:
    rejected = run(tree, core="fast", code=report).stderr
    assert "InvalidArgument: $NNFMQ_CORE is 'fast'; allowed: compiled, python; " in rejected


@each_part
def test_the_python_core_on_request_reports_it(tree: Path, report: str) -> None:
    done = run(tree, core="python", code=report)
    assert done.stdout == f"python | {tree}/nnfmq/{WHERE[report][1]}.py | $NNFMQ_CORE asks for it\n"
    assert done.stderr == ""


@needs_compiled
@each_part
def test_by_default_the_compiled_core_is_used_if_it_is_built(tmp_path: Path, report: str) -> None:
    done = run(copy_package(tmp_path, compiled=True), core=None, code=report)
    assert done.stdout.startswith(f"compiled | {tmp_path}/nnfmq/{WHERE[report][0]}.")
    assert "it is built" in done.stdout


@needs_compiled
@each_part
def test_the_python_core_on_request_wins_over_a_built_core(tmp_path: Path, report: str) -> None:
    assert run(copy_package(tmp_path, compiled=True), core="python", code=report).stdout.startswith("python |")


@needs_compiled
def test_by_default_a_part_that_is_not_built_runs_on_its_python_core_and_reports_it(tmp_path: Path) -> None:
    tree = copy_package(tmp_path, compiled=True)
    next((tree / "nnfmq" / "serialize").glob("_codec*.so")).unlink()
    done = run(tree, core=None, code=CODEC)
    assert done.stdout.startswith("python |") and f"is not built in {tree}/nnfmq" in done.stdout


@needs_compiled
def test_a_source_tree_that_shadows_an_installed_nnfmq_causes_a_warning(tree: Path, tmp_path: Path) -> None:
    installed = copy_package(tmp_path / "site", compiled=True)
    done = run(installed, core=None, cwd=tree)  # `python -c` looks into the current directory first
    assert f"RuntimeWarning: nnfmq is imported from the source tree {tree}/nnfmq" in done.stderr
    assert f"hides the nnfmq installed in {installed}/nnfmq" in done.stderr
    assert done.stdout.startswith("python |")


def test_a_source_tree_that_hides_another_one_without_a_compiled_core_causes_no_warning(
    tree: Path, tmp_path: Path
) -> None:
    hidden = copy_package(tmp_path / "site", compiled=False)
    done = run(hidden, core=None, cwd=tree)
    assert f"{hidden}/nnfmq" not in done.stderr  # a third one, which these tests run on, may be hidden as well
    assert done.stdout.startswith("python |")


@pytest.mark.parametrize(("compiler", "warns"), [(sys.executable, True), ("/no/such/cc", False)])
def test_a_source_tree_causes_a_warning_if_its_core_could_be_built(
    tree: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, warns: bool
) -> None:
    (tree / "setup.py").touch()
    monkeypatch.setenv("CC", compiler)
    nothing_hidden = "from nnfmq.base import cores; cores.hidden_installations = lambda: iter(())"
    done = run(tree, core=None, code=f"{nothing_hidden}\n{QUEUE}")
    assert done.stderr.count("in which the compiled core is not built, and runs on the slow one") == warns
    assert done.stdout.startswith("python |")


@needs_compiled
@pytest.mark.parametrize("changed", ["queue/_core.pyx", "_pause.h", ""])
def test_a_compiled_core_whose_source_has_changed_causes_a_warning_and_one_that_was_only_touched_none(
    tmp_path: Path, changed: str
) -> None:
    tree = copy_package(tmp_path, compiled=True)
    (tree / "setup.py").touch()
    stamp = runpy.run_path(str(tree / "nnfmq" / "base" / "build_stamp.py"))
    for module in tree.rglob("*.so"):
        stamp["write_stamp"](module)
    later = time.time_ns() + 10**9
    for source in (*tree.rglob("*.pyx"), *tree.rglob("*.h")):
        if str(source.relative_to(tree / "nnfmq")) == changed:
            source.write_text(source.read_text() + "\n")
        os.utime(source, ns=(later, later))
    done = run(tree, core=None)
    assert done.stdout.startswith("compiled |")
    assert done.stderr.count("have changed since it was built: run `pip install .`") == (1 if changed else 0)
    assert bool(done.stderr) == bool(changed)


def test_a_python_core_on_request_causes_no_warning(tree: Path, tmp_path: Path) -> None:
    installed = copy_package(tmp_path / "site", compiled=True)
    done = run(installed, core="python", cwd=tree)
    assert (done.stderr, done.stdout[:8]) == ("", "python |")


def test_the_same_package_twice_on_the_path_causes_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "link"
    link.symlink_to(SOURCE.parent)
    monkeypatch.setattr(sys, "path", [str(link), str(SOURCE.parent)])
    assert list(cores.hidden_installations()) == []


def test_the_active_core_is_the_one_under_test() -> None:
    wanted = os.environ.get("NNFMQ_CORE")
    assert core.core_name == (wanted or core.CORES.available()[0])
    assert Path(core.core_path).is_file() and core.core_reason


def test_the_active_codec_is_the_one_under_test() -> None:
    assert codec.codec_name == core.core_name
    assert Path(codec.codec_path).is_file() and codec.codec_reason


@needs_compiled
def test_a_shadowed_installation_causes_one_warning_for_all_parts(tree: Path, tmp_path: Path) -> None:
    installed = copy_package(tmp_path / "site", compiled=True)
    done = run(installed, core=None, cwd=tree, code=f"{QUEUE}\n{CODEC}")
    assert done.stderr.count("RuntimeWarning") == 1
