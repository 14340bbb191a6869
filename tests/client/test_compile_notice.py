"""The lines on stderr while a model is compiled."""

from __future__ import annotations

import io
import sys
import threading
from contextlib import suppress

import pytest

from nnfmq.client.connection import prepare_arguments

LINE = "nnfmq: compiling digits.tflite for this machine, once"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Written(io.StringIO):
    """A file that tells when something is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_written = threading.Event()

    def flush(self) -> None:
        self.is_written.set()


@pytest.fixture(autouse=True)
def _notices_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NNFMQ_COMPILE_NOTICE")


@pytest.mark.parametrize("file", [io.StringIO(), Terminal()])
def test_a_compilation_that_is_soon_ready_writes_nothing(monkeypatch: pytest.MonkeyPatch, file: io.StringIO) -> None:
    monkeypatch.setattr(sys, "stderr", file)
    with prepare_arguments.compile_notice("digits.tflite") as show:
        assert show is not None
        show(0, 8, True)
        show(8, 8, True)
    assert file.getvalue() == ""


@pytest.mark.parametrize(("is_kept", "end"), [(True, "; later starts read it from the cache\n"), (False, "\n")])
def test_a_longer_one_writes_one_line_although_it_reports_nothing_more(
    monkeypatch: pytest.MonkeyPatch, is_kept: bool, end: str
) -> None:
    monkeypatch.setattr(prepare_arguments, "DELAY_S", 0.02)
    monkeypatch.setattr(sys, "stderr", file := Written())
    with prepare_arguments.compile_notice("digits.tflite") as show:
        assert show is not None
        show(0, 8, is_kept)
        assert file.is_written.wait(10)
        show(8, 8, is_kept)
    assert file.getvalue() == LINE + end


def test_the_steps_of_a_plan_write_one_line_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_arguments, "DELAY_S", 0.0)
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    with prepare_arguments.compile_notice("") as of_plan:
        assert of_plan is not None
        for name in ("[0]", "[1]"):
            with prepare_arguments.compile_notice(name, of_plan, "step") as of_step:
                assert of_step is not None
                of_step(0, 2)
    assert file.getvalue() == "nnfmq: compiling a model for this machine, once\n"


def test_on_a_terminal_another_line_shows_the_progress_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_arguments, "DELAY_S", 0.0)
    monkeypatch.setattr(prepare_arguments, "_DRAW_DELAY_S", 0.0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with suppress(KeyboardInterrupt), prepare_arguments.compile_notice("digits.tflite") as show:
        assert show is not None
        show(3, 8)
        raise KeyboardInterrupt
    line, progress, end = terminal.getvalue().split("\r")
    assert line == LINE + "\n"
    assert progress == "nnfmq: compiling digits.tflite: 3 of 8 kernels"
    assert end.startswith("nnfmq: compiling digits.tflite: 0.0 s")
    assert end.endswith("\n")


def test_a_callback_of_the_application_is_called_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_arguments, "DELAY_S", 0.0)
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    calls: list[tuple[int, int]] = []
    with prepare_arguments.compile_notice("digits.tflite", lambda *numbers: calls.append(numbers)) as show:
        assert show is not None
        show(3, 8, True)
    assert (calls, file.getvalue()) == ([(3, 8)], "")


def test_nothing_is_written_if_the_setting_says_so_or_there_is_no_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("NNFMQ_COMPILE_NOTICE", "0")
        with prepare_arguments.compile_notice("digits.tflite") as show:
            assert show is None
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)  # as under pythonw
        with prepare_arguments.compile_notice("digits.tflite") as show:
            assert show is None


def test_a_closed_stderr_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_arguments, "DELAY_S", 0.0)
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    file.close()
    with prepare_arguments.compile_notice("digits.tflite") as show:
        assert show is not None
        show(0, 8)
