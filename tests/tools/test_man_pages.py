"""The man pages: one for each command, generated from the parsers, without complaints of the formatters."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import man_pages as tool
import pytest

from nnfmq import cli
from nnfmq.base import settings
from nnfmq.cli import command_tree

PAGES = tool.pages("1.2.3")
NODES = list(command_tree.nodes(command_tree.command_tree()))
each_page = pytest.mark.parametrize("name", PAGES)


def formatted(command: list[str], name: str, folder: Path) -> str:
    """Write the page to a file and return what `command` prints for it; fail if it complains."""
    path = folder / name
    path.write_text(PAGES[name], encoding="utf-8")
    environment = {**os.environ, "MANWIDTH": "78", "LC_ALL": "C.UTF-8", "MAN_KEEP_FORMATTING": ""}
    done = subprocess.run(
        [*command, str(path)], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_there_is_a_page_for_nnfmq_and_one_for_each_command() -> None:
    assert list(PAGES) == ["nnfmq.1", *(f"nnfmq-{name}.1" for name in cli.COMMANDS)]


@pytest.mark.skipif(shutil.which("man") is None, reason="man is not installed")
@each_page
def test_man_shows_a_page_with_every_option_and_example(name: str, tmp_path: Path) -> None:
    text = formatted(["man", "--warnings", "-l"], name, tmp_path)
    words = " ".join(text.split())
    own = name.removesuffix(".1").split("-")
    for node in NODES:
        if list(node.words[: len(own)]) == own and (len(own) > 1 or len(node.words) == 1):
            assert all(flag in words for option in node.options for flag in option.flags)
            assert all(" ".join(line.split()) in words for line in node.examples.splitlines() if line.startswith(" "))
    assert "EXIT STATUS" in text


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="mandoc is not installed")
@each_page
def test_mandoc_finds_no_error(name: str, tmp_path: Path) -> None:
    formatted(["mandoc", "-T", "lint", "-W", "error"], name, tmp_path)


def test_the_first_page_lists_commands_settings_and_exit_statuses() -> None:
    page = PAGES["nnfmq.1"].replace("\\-", "-")
    assert all(f"\\fBnnfmq-{name}\\fR(1)\n{summary}" in page for name, summary in cli.COMMANDS.items())
    assert all(f"\\fB{setting.variable}\\fR\n" in page for setting in settings.table().values())
    assert all(f"\\fB{status}\\fR\n{meaning}" in page for status, meaning in cli.EXIT_STATUSES.items())


def test_characters_with_a_meaning_in_roff_are_escaped() -> None:
    assert tool._roff(".x\\y-z") == "\\&.x\\ey\\-z"
    assert tool._roff("'x'") == "\\&'x'"


def test_the_pages_are_written_to_a_new_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "man"
    assert tool.main([str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == sorted(PAGES)
    assert capsys.readouterr().out.splitlines() == [str(folder / name) for name in PAGES]
