"""The layout of `--help` on terminals of different widths."""

from __future__ import annotations

import argparse

import pytest

from nnfmq.cli import COMMANDS, command_parser
from nnfmq.cli.parser import HelpFormatter

LISTING = "demo     classify the digits of a data set\nprofile  time each operation"
EXAMPLE = "  nnfmq run mobilenet.tflite --input photo.jpg --labels labels.txt"
EPILOG = f"examples:\n{EXAMPLE}\n\nThe photo is cut to a square."


def help_lines(columns: int, monkeypatch: pytest.MonkeyPatch, usage: str | None = None) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    parser = argparse.ArgumentParser(
        "nnfmq", usage=usage, description="Run a model.", epilog=EPILOG, formatter_class=HelpFormatter
    )
    parser.add_argument_group("commands", LISTING)
    parser.add_argument("--record-bytes", metavar="N")
    parser.add_argument("--replace-existing", action="store_true")
    return parser.format_help().splitlines()


def test_a_wide_terminal_shows_lines_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = help_lines(80, monkeypatch)
    assert lines[0] == "usage: nnfmq [-h] [--record-bytes N] [--replace-existing]"
    assert "  demo     classify the digits of a data set" in lines
    assert "The photo is cut to a square." in lines


def test_a_listing_wraps_below_its_second_column(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = help_lines(34, monkeypatch)
    index = lines.index("  demo     classify the digits")
    assert lines[index : index + 3] == [
        "  demo     classify the digits", "           of a data set", "  profile  time each operation"
    ]  # fmt: skip


def test_a_line_of_exactly_the_width_does_not_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "  demo     classify the digits of a data set"
    assert line in help_lines(len(line) + 2, monkeypatch)  # argparse leaves two columns free
    assert line not in help_lines(len(line) + 1, monkeypatch)


def test_an_example_is_never_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = help_lines(30, monkeypatch)
    assert EXAMPLE in lines
    assert lines[-2:] == ["The photo is cut to a", "square."]


def test_lines_of_prose_are_filled_as_one_paragraph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of its own for what a line is too long for would leave short lines in the middle."""
    monkeypatch.setenv("COLUMNS", "42")
    epilog = "It needs a driver with `serve --allow-it`.\nThen it lists all.\n\nAnother paragraph."
    text = argparse.ArgumentParser("nnfmq", epilog=epilog, formatter_class=HelpFormatter).format_help()
    assert text.endswith("It needs a driver with `serve\n--allow-it`. Then it lists all.\n\nAnother paragraph.\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_comment_that_does_not_fit_beside_its_example_comes_before_it(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = command_parser(command).format_help().splitlines()
    assert max(map(len, lines)) <= 80, [line for line in lines if len(line) > 80]


@pytest.mark.parametrize("usage", [None, "nnfmq [-h] [--record-bytes N] [--replace-existing]"])
def test_a_long_usage_wraps_with_a_small_indentation(usage: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = help_lines(34, monkeypatch, usage)
    assert lines[:3] == ["usage: nnfmq [-h]", "    [--record-bytes N]", "    [--replace-existing]"]
    assert lines[3] == ""
