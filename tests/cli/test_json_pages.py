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
BY_NAME = {"capabilities", "counts", "devices"}
"""Objects whose keys are data, such as names of operations."""
COMMANDS = {
    "config show": ("config", "show"),
    "demo": ("demo", "--quantized"),
    "devices": ("devices", "--connect", "embedded", "--capabilities"),
    "doctor": ("doctor",),
    "model show": ("model", "show", DIGITS, "--plan", "--device", "reference", "--connect", "embedded"),
    "model validate": ("model", "validate", DIGITS),
    "profile": ("profile", DIGITS, "--runs", "2"),
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
    found = set(keys(json.loads(capsys.readouterr().out)))
    assert sorted(found - named_on(COMMANDS[name][0])) == []


@pytest.mark.parametrize("words", [("status",), ("top", "--once", "--interval", "0.1"), ("client", "list")])
def test_a_page_has_the_keys_of_the_json_about_a_driver(
    words: tuple[str, ...], shared_daemon: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    with shared_daemon.connect() as client, client.prepare(DIGITS) as model, model.burst() as burst:
        burst.execute(np.zeros((1, 8, 8, 1), np.float32))
        assert main([*words, "--json", "--connect", str(shared_daemon.path)]) == 0
    found = set(keys(json.loads(capsys.readouterr().out)))
    assert "executions" in found
    assert sorted(found - named_on(words[0])) == []
