"""The corpus of a fuzz target: a file of inputs in hexadecimal, one a line, which together reach the most code."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_FOLDER = Path(__file__).parent


def read(target: str) -> list[bytes]:
    """Return the inputs of a target's corpus; none if it has no file yet."""
    path = _path(target)
    return [bytes.fromhex(line) for line in path.read_text().splitlines()] if path.exists() else []


def write(target: str, inputs: Iterable[bytes]) -> None:
    """Write the corpus of a target, short inputs first."""
    lines = sorted({data.hex() for data in inputs if data}, key=lambda line: (len(line), line))
    _path(target).write_text("".join(f"{line}\n" for line in lines))


def _path(target: str) -> Path:
    return _FOLDER / f"{target}_corpus.txt"
