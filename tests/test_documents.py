"""Every code block of every page runs: Python blocks of a page one after the other, shell blocks line by line.

A block that cannot run in a test has the comment `<!-- not run: reason -->` before it. What a line would install with
pip is in the environment already, or is an example, which is put on the path; lines that make a virtual environment do
not run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.places import ROOT
from support.plugins import add_example
from support.ray_cluster import output_of_ray, ray_folder, require_ray

import nnfmq
from nnfmq.hal import errors

PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md"])
_BLOCK = re.compile(
    r"(?P<skip><!-- (?:not run|ci): [^\n]+-->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)
GUIDES = [page for page in PAGES if page.parent.name in ("tutorial", "how-to")]
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"])
_NOT_CODE = ("text", "toml", "ini", "json", "yaml", "c", "console", "diff")


def blocks(page: Path, language: str) -> list[str]:
    found = _BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [match["code"] for match in found if match["language"] == language and not match["skip"]]


def environment(folder: Path) -> dict[str, str]:
    """Return an environment of its own: no running driver, an empty home, this environment's commands, and `site`."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder / "site"), os.environ.get("PYTHONPATH")])),
        "HOME": str(folder),
        "NNFMQ_SOCKET": str(folder / "no-driver.sock"),
        "NO_COLOR": "1",
    }


def installed(code: str, site: Path) -> str:
    """Return the commands without those that install; puts the examples that they install into the folder `site`."""
    commands = []
    for line in code.splitlines():
        if "pip install" in line:
            for word in shlex.split(line, comments=True):
                install(word, site)
        elif "-m venv" not in line and ".venv/bin/activate" not in line:
            commands.append(line)
    return "\n".join(commands)


def install(word: str, site: Path) -> None:
    """Install a word of pip's command line, if it is an example; fail if it names an extra that does not exist."""
    if word.startswith("docs/examples/"):
        site.mkdir(exist_ok=True)
        add_example(site, ROOT / word)
    if match := re.fullmatch(r"(?:nnfmq|\.)\[([\w,]+)\]", word):
        assert set(match[1].split(",")) <= EXTRAS, word


def run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def uses_ray(code: str) -> bool:
    return "import ray\n" in code


def having(language: str) -> list[Path]:
    return [page for page in PAGES if blocks(page, language)]


@pytest.mark.parametrize("page", having("python"), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    code = "\n".join(blocks(page, "python"))
    script.write_text(code, encoding="utf-8")
    for block in blocks(page, "sh"):
        installed(block, tmp_path / "site")
    if uses_ray(code):
        run_with_ray(script)
        return
    run([sys.executable, "-W", "error", str(script)], tmp_path)


def run_with_ray(script: Path) -> None:
    """Run a script that starts Ray, which warns of its own code, and leaves processes for a while."""
    require_ray()
    with ray_folder() as folder:
        (folder / "ray").mkdir()
        output_of_ray([sys.executable, str(script)], folder, limit_s=200)


@pytest.mark.parametrize("page", having("sh"), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "sh"):
        if code := installed(block, tmp_path / "site"):
            run(["bash", "-euo", "pipefail", "-c", code], tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_names_a_language_that_is_run_or_is_not_code(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    languages = set(re.findall(r"^```([\w-]+)$", text, re.MULTILINE))
    assert languages <= {"python", "sh", *_NOT_CODE}


@pytest.mark.parametrize("page", sorted(GUIDES), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_of_tutorials_and_guides_are_in_blocks(page: Path) -> None:
    """Commands that are only indented would not run; one has its output below it, which a test compares."""
    indented = re.findall(r"\n\n    (?:\$ )?((?:nnfmq|pip|python) .*)", page.read_text(encoding="utf-8"))
    assert set(indented) <= {"python ask_fibonacci.py 10"}


def test_extras_can_be_added_where_nnfmq_is_installed() -> None:
    """`pip install 'nnfmq[compiled]'` takes the extra from the installed package: no index has nnfmq."""
    pytest.importorskip("pip", reason="this environment has no pip")
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-input", "nnfmq[compiled]"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Requirement already satisfied: llvmlite" in done.stdout


def test_the_texts_of_the_code_name_extras_that_exist() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "nnfmq").rglob("*.py")]
    named = {
        extra
        for text in sources
        for words in re.findall(r"pip install 'nnfmq\[([\w,]+)\]'", text)
        for extra in words.split(",")
    }
    assert named and named <= EXTRAS


def test_the_page_of_the_api_has_every_public_name_that_is_no_error() -> None:
    page = (ROOT / "docs/reference/api/nnfmq.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\.\. auto\w+:: nnfmq\.(\w+)$", page, re.MULTILINE)
    assert sorted(documented) == sorted(set(nnfmq.__all__) - set(errors.__all__))
