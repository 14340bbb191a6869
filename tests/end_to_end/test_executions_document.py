"""The examples of docs/how-to/choose-execution-mode.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.drivers import Program
from support.places import ROOT

EXAMPLES = re.findall(
    r"```python\n(.*?)```",
    (ROOT / "docs" / "how-to" / "choose-execution-mode.md").read_text(encoding="utf-8"),
    re.DOTALL,
)


def test_the_document_contains_examples() -> None:
    assert len(EXAMPLES) == 5


@pytest.mark.parametrize("example", EXAMPLES, ids=["modes", "names", "open shapes", "fences", "pool"])
def test_an_example_runs(example: str, folder: Path) -> None:
    with Program.start(["-P", "-c", example], {"NNFMQ_SOCKET": str(folder / "none")}) as program:
        assert (program.wait(), program.errors()) == (0, "")
