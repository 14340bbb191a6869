"""tools/fuzz.py: its corpus, a short campaign, a mistake that only coverage leads to, and inputs that fail.

A failing input is made by a target in a module of the test's own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import fuzz as tool
import pytest
from support import tiers
from support.fuzzing import corpus
from support.fuzzing.decoders import DECODERS, mutated
from support.fuzzing.driver_level import run_driver
from support.places import ROOT

from nnfmq.driver.devices.device import DeviceBase
from nnfmq.driver.execution.prepared_model import MappedExecution
from nnfmq.hal.errors import ErrorStatus

LIMIT_S = 240
needs_atheris = pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
TARGET = """
def decode(data):
    return data

def run(data):
    if data[:1] == b"k":
        if data[1:2] == b"e":
            if data[2:3] == b"y":
                raise ZeroDivisionError("found it")
    return len(data)
"""
FAILS = b"key".hex()


def fuzz(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [sys.executable, str(ROOT / "tools" / "fuzz.py"), *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env={**inherited, **environment}
    )


MODELS = ("api", "driver")


@pytest.mark.parametrize("target", MODELS)
def test_TST_9_no_input_of_the_corpus_fails(target: str, data_dir: Path) -> None:
    run = tool.load(target)
    inputs = corpus.read(target)
    assert len(inputs) > 100
    outcomes = {run(data) for data in inputs}
    assert len(outcomes) > 2


def test_TST_9_the_tool_has_every_decoder() -> None:
    assert tuple(DECODERS) == tool.DECODERS


@pytest.mark.parametrize("target", tool.DECODERS)
def test_TST_9_a_decoder_accepts_its_seeds(target: str) -> None:
    run, seeds = DECODERS[target]
    outcomes = [run(data) for data in seeds()]
    assert outcomes and outcomes.count("decoded") == len(outcomes)


@pytest.mark.parametrize("target", tool.DECODERS)
def test_TST_9_a_decoder_decodes_changed_seeds_or_says_why_not(target: str) -> None:
    run, seeds = DECODERS[target]
    count = 50_000 if tiers.IS_DEEP else 1000
    outcomes = {run(data) for data in [*corpus.read(target), *mutated(list(seeds()), count, 1)]}
    assert "decoded" in outcomes
    assert len(outcomes) > 1


def test_TST_9_a_live_driver_replies_to_random_calls_or_closes_the_connection() -> None:
    code = (
        "import random, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from support.fuzzing.live_driver import run_live\n"
        "chance = random.Random(1)\n"
        "print(sorted({run_live(chance.randbytes(size)) for size in range(2, 62, 3)}))\n"
    )
    words = [sys.executable, "-c", code, str(ROOT / "tests" / "lib")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.stdout == "['closed', 'replied']\n", done.stderr


def test_TST_9_an_exception_that_a_decoder_does_not_document_fails_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(data: bytes) -> object:
        raise ValueError("a mistake")

    monkeypatch.setattr("nnfmq.importers.onnx.file.parse", broken)
    (first, *_) = DECODERS["onnx"][1]()
    with pytest.raises(ValueError, match="a mistake"):
        DECODERS["onnx"][0](first)


@needs_atheris
def test_TST_9_inputs_that_reach_new_code_remain_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "one_target.py").write_text(TARGET)
    (tmp_path / "inputs").mkdir()
    words = ["--runs", "200000", "--seed", "1", "--json", "--corpus", str(tmp_path / "inputs")]
    totals = tmp_path / "totals.json"
    done = fuzz("one_target:run", *words, "--resume", str(totals), PYTHONPATH=str(tmp_path))
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["edges"] > found["edges_of_corpus"] > 0
    assert 0 < len(list((tmp_path / "inputs").iterdir())) <= found["new_inputs"]
    assert json.loads(totals.read_text())["one_target:run"] == {
        "runs": 1, "cpu_s": found["cpu_s"], "inputs": found["inputs"], "edges": found["edges"],
        "failing": [found["failing_input"]],
    }  # fmt: skip
    assert found["cpu_s"] > 0


def test_what_runs_have_done_adds_up_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    totals = tmp_path / "totals.json"
    for edges, failing in ((80, ""), (90, "00ff"), (70, "")):
        tool.add_to(totals, tool.Campaign("onnx", 600.0, 30_000, 10, edges, 1, failing))
    assert tool.main(["decoders", "--seconds", "0", "--resume", str(totals)]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "onnx" in line)
    assert row.split() == ["onnx", "3", "1,800", "90,000", "50", "90", "1"]


@needs_atheris
@pytest.mark.parametrize("target", MODELS)
def test_TST_9_a_short_campaign_begins_with_the_corpus_and_finds_no_mistake(target: str, data_dir: Path) -> None:
    done = fuzz(target, "--runs", "600", "--seed", "1", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["inputs"] >= 600
    assert found["edges"] > 500
    assert (found["failing_input"], found["error"]) == ("", "")


@needs_atheris
def test_TST_9_coverage_leads_to_a_mistake_that_chance_would_not_find(tmp_path: Path) -> None:
    (tmp_path / "one_target.py").write_text(TARGET)
    variables = {"PYTHONPATH": str(tmp_path)}
    done = fuzz("one_target:run", "--runs", "200000", "--seed", "1", **variables)  # 256³ inputs begin differently
    assert done.returncode == 1, done.stdout + done.stderr
    found = re.fullmatch(
        r".*\nFAILED: ZeroDivisionError: found it\n  python tools/fuzz.py one_target:run --input ([0-9a-f]+)\n",
        done.stdout,
        re.DOTALL,
    )
    assert found is not None, done.stdout
    assert found[1].startswith(FAILS)
    repeated = fuzz("one_target:run", "--input", found[1], **variables)
    assert repeated.returncode == 1
    assert "ZeroDivisionError: found it" in repeated.stderr


def test_an_input_is_described_and_run(tmp_path: Path) -> None:
    (tmp_path / "one_target.py").write_text(TARGET)
    done = fuzz("one_target:run", "--input", "00ff", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "one_target:run 00ff: b'\\x00\\xff'\nresult: 2\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pilot"], "'pilot' is no target"),
        (["a:b", "--keep"], "no corpus"),
        (["onnx", "--corpus", __file__], "cannot be a folder: File exists"),
        (["onnx", "--corpus", f"{__file__}/inputs"], "cannot be a folder: Not a directory"),
        (["onnx", "--resume", "/missing/totals.json"], "cannot be a file: give one in a folder that exists"),
    ],
)
def test_a_wrong_argument_is_status_2(words: list[str], message: str) -> None:
    done = fuzz(*words)
    assert (done.returncode, message in done.stderr) == (2, True)


def test_without_atheris_the_command_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "atheris.py").write_text("raise ModuleNotFoundError('atheris')")
    done = fuzz("driver", "--runs", "1", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "pip install atheris" in done.stderr


def test_TST_9_the_driver_s_own_mistakes_fail_the_target(monkeypatch: pytest.MonkeyPatch, data_dir: Path) -> None:
    computes = next(data for data in corpus.read("driver") if run_driver(data) is ErrorStatus.NONE)

    def broken(self: object, *given: object) -> None:
        raise TypeError("a kernel's mistake")

    monkeypatch.setattr(MappedExecution, "run", broken)
    with pytest.raises(TypeError, match="a kernel's mistake"):
        run_driver(computes)


def test_TST_9_an_error_that_the_driver_logs_fails_the_target(monkeypatch: pytest.MonkeyPatch, data_dir: Path) -> None:
    computes = next(data for data in corpus.read("driver") if run_driver(data) is ErrorStatus.NONE)

    def broken(self: object, *given: object) -> None:
        raise TypeError("the compiler's mistake")

    monkeypatch.setattr(DeviceBase, "_program", broken)
    with pytest.raises(AssertionError, match="an internal error: preparing the model failed"):
        run_driver(computes)
