"""The reference pages of commands name every key of the commands' JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import Daemon
from support.places import ROOT

import nnfmq
from nnfmq.cli import main

DIGITS = str(nnfmq.example_path("digits.tflite"))
PAGES = ROOT / "docs" / "reference" / "cli"
BY_NAME = {"capabilities", "causes_ns", "counts", "devices", "packages"}
"""Objects whose keys are data, such as names of operations."""
UNITS = ("_ns", "_bytes", "_per_s", "_percent", "_share")
AS_GIVEN = {"duration_s", "slow_ms", "window_s", "window_us"}
"""Keys of what an option has set, in its unit."""
COMMANDS = {
    "config show": ("config", "show"),
    "demo": ("demo", "--quantized"),
    "bench": ("bench", DIGITS, "--count", "30", "--warm-up", "5"),
    "devices": ("devices", "--connect", "embedded", "--capabilities"),
    "doctor": ("doctor",),
    "model show": ("model", "show", DIGITS, "--plan", "--device", "reference", "--connect", "embedded"),
    "model validate": ("model", "validate", DIGITS),
    "profile": ("profile", DIGITS, "--runs", "2"),
    "queue": ("queue", "bench"),
    "run": ("run", DIGITS, "--input", "image.npy", "--repeat", "2", "--connect", "embedded"),
}


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
    """Return the words that are code on a page, and on those of commands to which its part about JSON refers."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    others = re.findall(r"\]\((\w+)\.md(?:#json)?\)", text.partition("## JSON")[2])
    texts = [text, *((PAGES / f"{name}.md").read_text(encoding="utf-8") for name in others)]
    return {word for part in texts for code in re.findall(r"`([^`\n]+)`", part) for word in re.findall(r"[\w.]+", code)}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_has_the_keys_of_the_json(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("image.npy", np.zeros((1, 8, 8, 1), np.float32))
    assert main([*COMMANDS[name], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(set(keys(found)) - named_on(COMMANDS[name][0])) == []
    assert list(wrong_keys(found)) == []


@pytest.mark.parametrize("words", [("status",), ("top", "--once", "--interval", "0.1"), ("client", "list")])
def test_a_page_has_the_keys_of_the_json_about_a_driver(
    words: tuple[str, ...], shared_daemon: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    with shared_daemon.connect() as client, client.prepare(DIGITS) as model, model.burst() as burst:
        burst.execute(np.zeros((1, 8, 8, 1), np.float32))
        assert main([*words, "--json", "--connect", str(shared_daemon.path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "executions" in set(keys(found))
    assert sorted(set(keys(found)) - named_on(words[0])) == []
    assert list(wrong_keys(found)) == []
