"""tools/mutated_models.py: mutations, the comparison, and processes that exit or take too long."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import mutated_models as tool
import pytest

import nnfmq


def test_a_mutation_changes_a_file_and_follows_from_the_seed() -> None:
    data = Path(nnfmq.example_path("digits.tflite")).read_bytes()
    made = [[tool.mutated(data, random.Random(seed)) for seed in range(40)] for _ in range(2)]
    assert made[0] == made[1]
    assert sum(changed != data for changed in made[0]) > 30
    assert {len(changed) == len(data) for changed in made[0]} == {True, False}


def test_a_process_that_exits_or_takes_too_long_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    side = tool.Side("reference")
    try:
        assert side.ask(b"no model")[0] == "rejected"
        side.process.kill()
        assert side.ask(b"no model")[0] == "exit"
        assert side.ask(b"no model")[0] == "rejected"
        monkeypatch.setattr(tool, "LIMIT_S", 0.1)
        os.kill(side.process.pid, signal.SIGSTOP)
        assert side.ask(b"no model")[0] == "limit"
    finally:
        side.close()


@pytest.mark.full
def test_mutated_models_are_rejected_or_run() -> None:
    pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")
    result = tool.mutate([path.read_bytes() for path in tool.MODELS], 60, 1, "reference", "litert")
    assert result["counts"].keys() <= {"rejected", "equal", "different", "peer fails"}
    assert result["counts"]["equal"] > 20
