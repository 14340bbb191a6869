"""Figures and the console."""

from __future__ import annotations

import argparse
import io
import os
import pty
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nnfmq.cli import main
from nnfmq.cli.console import at_least_one, compiling, console, microseconds, shape_text


@pytest.mark.parametrize(("given", "expected"), [(1234567, "1,234.6"), (0, "0.0"), (-1, "-")])
def test_times_are_printed_in_microseconds(given: int, expected: str) -> None:
    assert microseconds(given) == expected


@pytest.mark.parametrize(("shape", "expected"), [((1, 2), "1x2"), ((), "scalar")])
def test_shapes_are_printed_with_x(shape: tuple[int, ...], expected: str) -> None:
    assert shape_text(shape) == expected


def test_a_character_that_stdout_lacks_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    console(no_color=True).print("µs")
    sys.stdout.flush()
    assert raw.getvalue() == b"?s\n"


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> str:
    """Return what is written to stderr, a terminal, meanwhile."""
    controller, terminal_fd = pty.openpty()
    try:
        with open(terminal_fd, "w", closefd=False) as terminal:
            monkeypatch.setattr(sys, "stderr", terminal)
            act()
            terminal.write(".")
        written = b""
        while not written.endswith(b"."):  # a terminal passes on what it was given in pieces, a little later
            written += os.read(controller, 1 << 16)
        return written.decode()
    finally:
        os.close(controller)
        os.close(terminal_fd)


def compile_all() -> None:
    with compiling(no_color=True, model="net.tflite") as progress:
        assert progress is not None
        for done in (0, 3, 7):
            progress(done, 7)


def test_a_long_compilation_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nnfmq.cli.console._PROGRESS_DELAY_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    screen = on_a_terminal(monkeypatch, compile_all)
    assert "compiling" in screen and "0/7" in screen and "7/7" in screen


def test_a_short_compilation_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nnfmq.cli.console._PROGRESS_DELAY_S", 60.0)
    assert on_a_terminal(monkeypatch, compile_all) == "."


@pytest.mark.parametrize(
    "command", [["profile", "model.tflite", "--html"], ["conformance", "--html"], ["conformance", "--json"]]
)
@pytest.mark.parametrize(("place", "said"), [("gone/report", "create it first"), (".", "give the name of a file")])
def test_a_file_that_cannot_be_written_later_is_rejected_before_anything_is_measured(
    command: list[str], place: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, str(tmp_path / place)]) == 2
    assert f"argument {command[-1]}: " in (complaint := capsys.readouterr().err)
    assert said in complaint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "'x' is not an integer"),
        ("1.5", "'1.5' is not an integer"),
        ("0", "0 is not between 1 and 2147483647"),
        ("-7", "-7 is not between 1 and 2147483647"),
        ("9" * 5000, "is not between 1 and 2147483647"),
    ],
)
def test_an_option_that_is_no_integer_or_out_of_range_is_rejected_with_the_range(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        at_least_one(text)
