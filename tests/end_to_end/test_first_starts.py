"""What stderr says when a program is not in the driver's cache yet, and when it is; by real drivers."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from support.drivers import Program

import nnfmq
from nnfmq.cli import main
from nnfmq.client.connection import prepare_arguments

pytestmark = pytest.mark.skipif(find_spec("llvmlite") is None, reason="nothing is compiled without llvmlite")

SCRIPT = """
import sys
import numpy as np
import nnfmq
import nnfmq.compat.litert
from nnfmq.client.connection import prepare_arguments
from support.models import logistics_model

prepare_arguments.DELAY_S = 0.0
digits, quantized = (str(nnfmq.example_path(name)) for name in ("digits.tflite", "digits_quant.tflite"))
nnfmq.compat.litert.Interpreter(digits).allocate_tensors()
nnfmq.run(quantized, np.zeros((1, 8, 8, 1), np.int8))
with nnfmq.connect(embedded=True) as client:
    client.prepare(logistics_model(2), progress=lambda done, total: None).close()
    client.prepare(logistics_model(3), preference="fast_single_answer").close()
    client.prepare(logistics_model(4), name="built").close()
"""
KEPT = "; later starts read it from the cache"


def said(cache: Path, **environment: str) -> list[str]:
    """Run the script with this cache and no daemon; return the lines on stderr."""
    places = {"XDG_CACHE_HOME": str(cache), "NNFMQ_SOCKET": str(cache / "none.sock")}
    with Program.start(["-P", "-c", SCRIPT], {**places, "NNFMQ_COMPILE_NOTICE": "1", **environment}) as program:
        assert program.wait() == 0, program.errors()
        return program.errors().splitlines()


def line(name: str, end: str = "") -> str:
    return f"nnfmq: compiling {name} for this machine, once{end}"


def test_the_first_start_says_once_that_it_compiles_each_model_and_the_second_nothing(tmp_path: Path) -> None:
    assert said(tmp_path) == [line(name, KEPT) for name in ("digits.tflite", "digits_quant.tflite", "built")]
    assert said(tmp_path) == []


def test_without_a_cache_nothing_is_said_of_later_starts(tmp_path: Path) -> None:
    names = ("digits.tflite", "digits_quant.tflite", "built")
    assert said(tmp_path, NNFMQ_CACHE_MIB="0") == [line(name) for name in names]


def test_nnfmq_run_says_it_if_stderr_is_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prepare_arguments, "DELAY_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))
    monkeypatch.delenv("NNFMQ_COMPILE_NOTICE")
    np.save(tmp_path / "image.npy", np.zeros((1, 8, 8, 1), np.float32))
    command = ["run", str(nnfmq.example_path("digits.tflite")), "--input", str(tmp_path / "image.npy")]
    for expected in (line("digits.tflite", KEPT) + "\n", ""):
        assert main([*command, "--connect", "embedded"]) == 0
        assert capsys.readouterr().err == expected
