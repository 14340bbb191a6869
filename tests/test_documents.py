"""Every code block of every page runs: Python blocks of a page one after the other, shell blocks line by line.

A block that cannot run in a test has the comment `<!-- not run: reason -->` before it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.places import ROOT
from support.ray_cluster import output_of_ray, ray_folder, require_ray

import nnfmq
from nnfmq.hal import errors

PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md"])
_BLOCK = re.compile(
    r"(?P<skip><!-- (?:not run|ci): [^\n]+-->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)
_NOT_CODE = ("text", "toml", "ini", "json", "yaml", "c", "console", "diff")


def blocks(page: Path, language: str) -> list[str]:
    found = _BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [match["code"] for match in found if match["language"] == language and not match["skip"]]


def environment(folder: Path) -> dict[str, str]:
    """Return an environment without a running driver, with this environment's commands first on the PATH."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "NNFMQ_SOCKET": str(folder / "no-driver.sock"), "NO_COLOR": "1"}


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
    for code in blocks(page, "sh"):
        if "pip install" not in code:
            run(["bash", "-euo", "pipefail", "-c", code], tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_names_a_language_that_is_run_or_is_not_code(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    languages = set(re.findall(r"^```([\w-]+)$", text, re.MULTILINE))
    assert languages <= {"python", "sh", *_NOT_CODE}


def test_the_page_of_the_api_has_every_public_name_that_is_no_error() -> None:
    page = (ROOT / "docs/reference/api/nnfmq.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\.\. auto\w+:: nnfmq\.(\w+)$", page, re.MULTILINE)
    assert sorted(documented) == sorted(set(nnfmq.__all__) - set(errors.__all__))
