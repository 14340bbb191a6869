"""The project around the package: README's session runs, every dependency has its reason, nothing points outside.

What `.ci/run` runs are the code blocks that a comment marks, so the comments are checked here as well.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.places import ROOT

MARKED = {"README.md": ("install", "test", "session"), "CONTRIBUTING.md": ("check",)}
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
OUTSIDE = [
    rf"(?<![\w.])/{'work'}/",
    rf"(?<![\w.])/{'root'}/",
    rf"{'pypi'}\.org",
    rf"python{'hosted'}",
    rf"/tmp/{'contract'}",
    r"(?i)\bissues? #?\d",
]
SESSION_LINES = 12


def block(document: str, name: str) -> str:
    """Return the code block of `document` that the comment `<!-- ci: name -->` stands before."""
    found = re.findall(rf"^<!-- ci: {name} -->\n```\w*\n(.*?)^```$", read(ROOT / document), re.DOTALL | re.MULTILINE)
    assert len(found) == 1, f"{document} must have one block marked {name}, has {len(found)}"
    return str(found[0])


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def project_files() -> list[Path]:
    """List what is, or would be, in the repository; where git cannot say, the folders that an sdist has."""
    git = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(git, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip("not a git repository: which files belong to the project is not known")
    return [path for name in done.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]


def settings() -> dict[str, Any]:
    return tomllib.loads(read(ROOT / "pyproject.toml"))


def extras() -> set[str]:
    return set(settings()["project"]["optional-dependencies"])


def requirements() -> set[str]:
    """Name every distribution that installing, building or testing asks for."""
    project = settings()["project"]
    lists = [
        settings()["build-system"]["requires"],
        project["dependencies"],
        *project["optional-dependencies"].values(),
    ]
    names = {re.split(r"[\[<>=!~ ;]", requirement)[0] for wanted in lists for requirement in wanted}
    return names - {project["name"]}


@pytest.mark.parametrize(("document", "name"), [(document, name) for document in MARKED for name in MARKED[document]])
def test_the_checks_that_ci_runs_are_marked(document: str, name: str) -> None:
    assert block(document, name).strip()


def test_readme_session_is_short() -> None:
    assert len(block("README.md", "session").strip().splitlines()) <= SESSION_LINES


def test_readme_session_runs_as_printed(tmp_path: Path) -> None:
    script = tmp_path / "session.py"
    script.write_text(block("README.md", "session"), encoding="utf-8")
    nobody_serves = {**os.environ, "NNFMQ_SOCKET": str(tmp_path / "nobody.sock")}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=nobody_serves,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert re.fullmatch(r"(?:(\d): classified as \1 in \d+ µs\n){3}", done.stdout.decode()), done.stdout.decode()


def test_readme_names_every_command() -> None:
    from nnfmq.cli import COMMANDS

    named = set(re.findall(r"`nnfmq (\w+)", read(ROOT / "README.md")))
    assert named == set(COMMANDS) - {"demo"}
    assert "nnfmq demo" in block("README.md", "install")


@pytest.mark.parametrize("pattern", OUTSIDE)
def test_no_file_refers_to_paths_outside_the_project(pattern: str) -> None:
    binary = (".npz", ".npy", ".tflite", ".png", ".jpg", ".so", ".wav")
    files = [path for path in project_files() if path.suffix not in binary]
    assert [str(path.relative_to(ROOT)) for path in files if re.search(pattern, read(path))] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_in_documents_refer_to_existing_files(path: Path) -> None:
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)]+)\)", read(path)) if "://" not in target]
    broken = [target for target in targets if target and not (path.parent / target).resolve().exists()]
    outside = [target for target in targets if ROOT not in (path.parent / target).resolve().parents]
    assert (broken, [target for target in outside if target]) == ([], [])


def test_the_site_s_contents_have_every_page() -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in ROOT.glob("docs/**/*.md")}
    entries = set[str]()
    for path in ROOT.glob("docs/**/*.md"):
        for block in re.findall(r"^```\{toctree\}\n(.*?)^```$", read(path), re.DOTALL | re.MULTILINE):
            names = [line for line in block.splitlines() if line and not line.startswith(":")]
            entries |= {(path.parent / name).relative_to(ROOT / "docs").as_posix() for name in names}
    assert entries == pages - {"index"}


def test_a_document_that_the_code_names_exists() -> None:
    sources = [path for folder in ("nnfmq", "tools", "tests") for path in (ROOT / folder).rglob("*.py")]
    named = {(path.name, name) for path in sources for name in re.findall(r"\bdocs/[\w/]+\.md\b", read(path))}
    assert [(source, name) for source, name in sorted(named) if not (ROOT / name).is_file()] == []


PARTS = "|".join({path.parent.name for path in ROOT.glob("nnfmq/*/__init__.py")} - {"client", "queue"})
"""The packages of nnfmq, but for those whose name is also that of an object in examples."""


def is_found(name: str) -> bool:
    """Return whether a dotted name is a module or a package of nnfmq, or something that a module has."""
    path = ROOT / "nnfmq" / name.replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    module = path.parent.with_suffix(".py")
    return module.is_file() and re.search(rf"\b{path.name}\b", read(module)) is not None


def test_a_module_that_the_code_or_a_document_names_exists() -> None:
    pattern = rf"`((?:{PARTS})(?:\.[a-z]\w*)+(?:\.[A-Za-z]\w*)?)[`(]"
    texts = [*ROOT.glob("nnfmq/**/*.py"), *DOCUMENTS]
    named = {(path.name, name) for path in texts for name in re.findall(pattern, read(path))}
    assert [(source, name) for source, name in sorted(named) if not is_found(name)] == []


def test_the_floor_plan_names_modules_that_exist() -> None:
    table = read(ROOT / "docs" / "explanation" / "architecture.md").partition("| package | modules |")[2]
    rows = [row.split("|")[1:3] for row in table.partition("\n\n")[0].splitlines() if row.startswith("| `")]
    missing = set[str]()
    for packages, modules in rows:
        first, *others = re.findall(r"`([\w/]+)`", packages)
        folders = [ROOT / "nnfmq" / first, *((ROOT / "nnfmq" / first).parent / other for other in others)]
        names = re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", modules))
        missing |= {n for n in names if not any((f / n).is_dir() or (f / f"{n}.py").is_file() for f in folders)}
    assert (len(rows) > 5, missing) == (True, set())


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_do_not_mention_the_data_by_path(path: Path) -> None:
    assert "../shared" not in read(path)


def test_every_dependency_has_its_reason() -> None:
    explained = set(re.findall(r"\| `([\w-]+)` (?=\|)", read(ROOT / "docs" / "contributing" / "dependencies.md")))
    assert explained - (extras() - requirements()) == requirements()  # the extra `onnx` has the name of its package


def test_tests_have_no_packages_that_could_hide_a_module() -> None:
    hiding = [path for path in (ROOT / "tests").rglob("__init__.py") if ROOT / "tests" / "lib" not in path.parents]
    assert hiding == []


def test_each_test_file_is_in_one_part_of_ci(tmp_path: Path) -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    begin, end = script.index('first="tests/'), '>"$work/parts"'
    lists = script[begin : script.index(end) + len(end)]
    subprocess.run(["bash", "-euc", lists], cwd=tmp_path, env={**os.environ, "work": str(tmp_path)}, check=True)
    found: list[Path] = []
    for part in (tmp_path / "parts").read_text(encoding="utf-8").splitlines():
        places = [path for word in part.split() if not word.startswith("--") for path in ROOT.glob(word)]
        left_out = [ROOT / word.removeprefix("--ignore=") for word in part.split() if word.startswith("--")]
        assert all(path.exists() for path in left_out)
        files = [file for path in places for file in (path.rglob("test_*.py") if path.is_dir() else [path])]
        found += [file for file in files if not any(file.is_relative_to(path) for path in left_out)]
    assert sorted(found) == sorted((ROOT / "tests").rglob("test_*.py"))


def test_ci_can_be_run() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


_BUILD_SOURCES = """
import os, runpy, sys
from pathlib import Path
import Cython, setuptools

setuptools.setup = lambda **_: None
source_of = runpy.run_path(sys.argv[1])["source_of"]
source, made = Path("_core.pyx"), Path("_core.c")
source.touch()
assert source_of(source) == source
made.write_text("/* Generated by Cython 0.1 */\\n")
os.utime(source, (1, 1))
assert source_of(source) == source
made.write_text(f"/* Generated by Cython {Cython.__version__} */\\n")
assert source_of(source) == made
os.utime(source)
os.utime(made, (1, 1))
assert source_of(source) == source
"""


def test_a_build_takes_the_c_file_that_this_cython_has_made(tmp_path: Path) -> None:
    """In another process: setuptools replaces distutils when it is imported."""
    for name in ("Cython", "setuptools"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    command = [sys.executable, "-c", _BUILD_SOURCES, str(ROOT / "setup.py")]
    subprocess.run(command, cwd=tmp_path, check=True)  # where there is nothing to build
