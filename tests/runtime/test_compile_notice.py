"""The line on a terminal while a model is compiled."""

from __future__ import annotations

import io
import sys
from contextlib import suppress

import pytest

from nnfmq.runtime import compile_notice


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_compilation_of_less_than_a_second_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with compile_notice.compile_notice("digits.tflite") as show:
        assert show is not None
        show(0, 8)
        show(8, 8)
    assert terminal.getvalue() == ""


def test_a_longer_one_shows_the_model_and_its_progress_and_ends_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_notice, "DELAY_S", 0.0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with suppress(KeyboardInterrupt), compile_notice.compile_notice("digits.tflite") as show:
        assert show is not None
        show(3, 8)
        raise KeyboardInterrupt
    progress, end = terminal.getvalue().split("\r")[1:]
    assert progress == "nnfmq: compiling digits.tflite for this machine, once: 3 of 8 kernels"
    assert end.startswith("nnfmq: compiling digits.tflite for this machine, once: 0.0 s")
    assert end.endswith("\n")


def test_nothing_is_written_to_what_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with compile_notice.compile_notice("digits.tflite") as show:
        assert show is None
    monkeypatch.setattr(sys, "stderr", None)  # as under pythonw
    with compile_notice.compile_notice("digits.tflite") as show:
        assert show is None
