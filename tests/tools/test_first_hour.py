"""The page of first_hour.py: its tables from a record."""

from __future__ import annotations

import json
from pathlib import Path

import first_hour
import pytest

PARTS = {"Python and NumPy": 0.1, "import": 0.01, "load": 0.02}


def run(kind: str, whole_s: float) -> dict[str, object]:
    return {"model": "net", "script": "LiteRT", "import": kind, "whole_s": whole_s, "parts_s": PARTS,
            "first_result_s": 0.1, "execution_s": 0.001, "difference": 0.0}  # fmt: skip


RECORD = {
    "steps": [{"step": "README, install", "seconds": 35.52, "output": "ends\n"}],
    "scripts": [run("LiteRT", 0.15), run("LiteRT", 0.25), run("nnfmq", 1.2), run("nnfmq", 0.5)],
}


def test_a_page_gets_the_tables_of_a_record_between_its_markers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, page = tmp_path / "record.json", tmp_path / "page.md"
    record.write_text(json.dumps(RECORD))
    page.write_text(f"before\n{first_hour.BEGIN}\nold\n<!-- end of results -->\nafter\n")
    for _ in range(2):
        assert first_hour.main(["--json", str(record), "--page", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| README, install | 35.5 |" in text
    assert "| net | LiteRT | 200 | 1,200 | 500 | **2.50** |" in text
    assert "| net | LiteRT | LiteRT | 100 | 10 | 20 | 120 |" in text
    assert "| net | LiteRT | nnfmq | 100 | 10 | 20 | 370 |" in text
    capsys.readouterr()


def test_without_a_model_there_must_be_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        first_hour.main([])
    assert "give a model, or --json" in capsys.readouterr().err
