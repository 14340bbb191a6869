"""The JSON of commands: the reference pages name every key, and all of it says what was found of what, when and where.

`conditions` and the digest of a model are described on the page of all commands.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import Daemon
from support.places import ROOT

import nnfmq
from nnfmq.cli import main
from nnfmq.cli.command_tree import command_tree, nodes

DIGITS = str(nnfmq.example_path("digits.tflite"))
DIGEST = hashlib.sha256(Path(DIGITS).read_bytes()).hexdigest()
PAGES = ROOT / "docs" / "reference" / "cli"
BY_NAME = {"capabilities", "causes_ns", "counts", "devices", "packages"}
"""Objects whose keys are data, such as names of operations."""
UNITS = ("_ns", "_bytes", "_per_s", "_percent", "_share")
AS_GIVEN = {"duration_s", "slow_ms", "window_s", "window_us"}
"""Keys of what an option has set, in its unit."""
COMMANDS = {
    "config explain": ("config", "explain"),
    "config show": ("config", "show"),
    "demo": ("demo", "--quantized"),
    "bench": ("bench", DIGITS, "--count", "30", "--warm-up", "5"),
    "devices": ("devices", "--connect", "embedded", "--capabilities"),
    "doctor": ("doctor",),
    "model show": ("model", "show", DIGITS, "--plan", "--device", "reference", "--connect", "embedded"),
    "model validate": ("model", "validate", DIGITS),
    "profile": ("profile", DIGITS, "--runs", "2"),
    "queue bench": ("queue", "bench", "--round-trips", "100", "--messages", "100"),
    "queue list": ("queue", "list"),
    "replay": ("replay", "calls.nnrec", "--speed", "max"),
    "run": ("run", DIGITS, "--input", "image.npy", "--repeat", "2", "--connect", "embedded"),
    "stress": ("stress", DIGITS, "--load", "none", "--duration", "0.1"),
    "trace": ("trace", "--table", "trace.json"),
    "why": ("why", "trace.json"),
}
OF_A_DRIVER = {
    "client list": ("client", "list"),
    "client set": ("client", "set", str(os.getpid()), "--class", "normal"),
    "status": ("status",),
    "top": ("top", "--once", "--interval", "0.1"),
}
ELSEWHERE = {"mlts bench", "mlts crash", "queue create", "queue info"}
"""Commands whose JSON other tests look at: `test_mlts`, `test_queue`."""
LINES = {"queue watch"}
"""Commands that print an object for each reading."""
CONDITIONS = {"date", "host", "cpu", "cpus_allowed", "kernel", "python", "packages", "core"}
OF_A_MODEL = {"bench", "demo", "model show", "model validate", "profile", "run", "stress"}


def keys(value: Any) -> Iterator[str]:
    """Yield the keys of all objects, without those that are data."""
    if isinstance(value, list):
        for item in value:
            yield from keys(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from keys(list(item.values()) if key in BY_NAME and isinstance(item, dict) else item)


def wrong_keys(value: Any, has_unit: bool = False) -> Iterator[str]:
    """Yield the keys that break the rules for names: of statistics and rates without a unit, and of times not in ns."""
    if isinstance(value, list):
        for item in value:
            yield from wrong_keys(item, has_unit)
    elif isinstance(value, dict):
        for key, item in value.items():
            tells = has_unit or key.endswith(UNITS) or "unit" in value
            is_number = isinstance(item, (int, float)) and not isinstance(item, bool)
            is_statistic = re.match(r"(p\d+|mean|std)(_|$)", key) or key in {"latency", "one_thread", "all_threads"}
            is_other_time = re.search(r"(?<!per)(^|_)(s|ms|us|seconds)$", key)
            if (is_number and is_statistic and not tells) or (is_other_time and key not in AS_GIVEN):
                yield key
            if key not in BY_NAME:
                if not re.fullmatch("[a-z][a-z0-9_]*", key):
                    yield key
                yield from wrong_keys(item, tells)


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        ({"latency_ns": {"p50": 1, "p99_9": 2}, "warm_up": [{"p50_ns": 3}], "per_s": 4, "window_s": 0.5}, []),
        ({"memory": {"one_thread": 1.5, "unit": "GB/s"}, "packages": {"ai-edge-litert": "2.3"}}, []),
        ({"latency_ns": {"p99.9": 2}}, ["p99.9"]),
        ({"blocks": [{"p50": 1}]}, ["p50"]),
        ({"wall_s": 1.5, "timeline": [{"s": 0.5}], "seconds": 2}, ["wall_s", "s", "seconds"]),
    ],
)
def test_the_rules_for_names_of_keys(found: Any, wrong: list[str]) -> None:
    assert list(wrong_keys(found)) == wrong


def named_on(page: str) -> set[str]:
    """Return the words that are code on a page, that of all commands, and those to which its part about JSON refers."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    others = re.findall(r"\]\((\w+)\.md(?:#json)?\)", text.partition("## JSON")[2])
    others.append("index")
    texts = [text, *((PAGES / f"{name}.md").read_text(encoding="utf-8") for name in others)]
    return {word for part in texts for code in re.findall(r"`([^`\n]+)`", part) for word in re.findall(r"[\w.]+", code)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands read: an input, a recording and a trace."""
    folder = tmp_path_factory.mktemp("json")
    np.save(folder / "image.npy", np.zeros((1, 8, 8, 1), np.float32))
    for command, name in (("record", "calls.nnrec"), ("trace", "trace.json")):
        words = [sys.executable, "-m", "nnfmq"]
        subprocess.run(
            [*words, command, "-o", name, "--", *words, "demo"],
            cwd=folder,
            check=True,
            capture_output=True,
            timeout=120,
        )
    return folder


def require_documented(words: tuple[str, ...], found: dict[str, Any]) -> None:
    """Require that the command's page has all keys, that these follow the rules, and that the conditions are there."""
    assert sorted(set(keys(found)) - named_on(words[0])) == []
    assert list(wrong_keys(found)) == []
    assert found["conditions"].keys() >= CONDITIONS


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_has_the_keys_of_the_json(
    name: str, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(files)
    assert main([*COMMANDS[name], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    require_documented(COMMANDS[name], found)
    assert ("model_sha256" in found) == (name in OF_A_MODEL)
    assert found.get("model_sha256", DIGEST) == DIGEST


@pytest.mark.parametrize("name", OF_A_DRIVER)
def test_a_page_has_the_keys_of_the_json_about_a_driver(
    name: str, shared_daemon: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    words = OF_A_DRIVER[name]
    with shared_daemon.connect() as client, client.prepare(DIGITS) as model, model.burst() as burst:
        burst.execute(np.zeros((1, 8, 8, 1), np.float32))
        assert main([*words, "--json", "--connect", str(shared_daemon.path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "executions" in set(keys(found))
    require_documented(words, found)


def test_every_command_that_prints_json_is_looked_at() -> None:
    printing = {
        " ".join(node.words[1:])
        for node in nodes(command_tree())
        if any("--json" in option.flags and not option.metavar for option in node.options)
    }
    assert printing == {*COMMANDS, *OF_A_DRIVER, *ELSEWHERE, *LINES}


def test_the_conditions_of_a_trace_are_those_of_its_recording(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = json.loads((files / "trace.json").read_text(encoding="utf-8"))
    recorded["otherData"]["conditions"]["host"] = "elsewhere"
    (tmp_path / "other.json").write_text(json.dumps(recorded), encoding="utf-8")
    for command in (["why", str(tmp_path / "other.json")], ["trace", "--table", str(tmp_path / "other.json")]):
        assert main([*command, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["conditions"]["host"] == "elsewhere"
