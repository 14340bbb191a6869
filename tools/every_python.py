"""The fast tests on every Python that the project supports and this machine has: `tools/every_python.py [--json]`.

Each gets a fresh clone of HEAD and an environment of its own, with the compiled core, and runs every test but those of
SLOW and TIMED. What SLOW asks depends least on the interpreter, and takes most of the time: it starts many drivers,
walks schedules, goes through the whole conformance suite, or runs KERNELS, whose code is LLVM's, not Python's; of those
tests/engines/compiled/test_matmul.py stays, which has code generated and runs it. Ends with 1 where a test failed or
nothing was tested.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from wheels import pythons
from wheels.pythons import ROOT, Failed, Python, environment, run

KERNELS = tuple(
    f"tests/engines/compiled/test_{name}.py"
    for name in ("elementwise", "moving", "photos", "pooling", "products", "quads", "recurrent", "requantize", "resize",
                 "octets", "octet_lists", "shared_code", "softmax", "targets", "vts")
)  # fmt: skip
SLOW = (
    *KERNELS,
    "tests/end_to_end", "tests/queue_model_checking",
    "tests/conformance", "tests/cli", "tests/tools", "tests/queue/parity",
    "tests/engines/test_vts.py", "tests/engines/test_mutated_models.py", "tests/engines/test_photos.py",
    "tests/validation/test_model_mutations.py", "tests/importers/test_tflite_corrupt.py",
    "tests/operations/test_shared_with_tflite.py", "tests/operations/test_against_onnxruntime.py",
    "tests/service/test_managed_buffers.py", "tests/service/test_compilation_cache.py",
)  # fmt: skip
TIMED = ("tests/test_public_api.py::test_importing_it_costs_little_beyond_numpy",)
"""Budgets of processor time, which differ by interpreter; the full run keeps them."""
_LIMIT_S = 1200


@dataclass(frozen=True, slots=True)
class Row:
    """One interpreter: pytest's closing line, or what went wrong instead."""

    python: str
    passed: bool
    said: str
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser("tools/every_python.py", description="Run the fast tests on every Python here.")
    parser.add_argument("--python", action="append", default=[], metavar="PATH", help="only these interpreters")
    parser.add_argument("--but", action="append", default=[], metavar="3.N", help="all but this version")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        rows = [_row(python) for python in _chosen(options.python, options.but)]
    except Failed as failure:
        print(f"tools/every_python.py: {failure}", file=sys.stderr)
        return 1
    print(json.dumps([asdict(row) for row in rows], indent=2) if options.json else "\n".join(lines(rows)))
    return 0 if all(row.passed for row in rows) else 1


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the report as text."""
    if not rows:
        yield "no other Python here"
    yield from (f"{row.python:8} {'ok' if row.passed else 'FAILED':6} {row.seconds:4.0f} s  {row.said}" for row in rows)


def command(inside: Path) -> list[str | Path]:
    """Return how the fast tests are run in an environment."""
    return [
        inside.with_name("pytest"),
        "--quiet",
        *(f"--ignore={path}" for path in SLOW),
        *(f"--deselect={test}" for test in TIMED),
    ]


def closing_line(output: str) -> str:
    """Return what pytest said last, without its frame."""
    found = [line.strip("= ") for line in output.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    return found[-1] if found else "pytest said nothing"


def _chosen(names: Sequence[str], but: Sequence[str]) -> list[Python]:
    found = pythons.named(names) or pythons.find()
    if not found:
        raise Failed("no Python here is new enough and has C headers and venv; name one with --python")
    return [python for python in found if python.minor not in but]


def _row(python: Python) -> Row:
    print(f"Python {python}: {python.path}", file=sys.stderr, flush=True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nnfmq-python-") as work:
        passed, said = _tested(python, Path(work) / "clone")
    return Row(str(python), passed, said, time.monotonic() - begin)


def _tested(python: Python, clone: Path) -> tuple[bool, str]:
    """Clone, install, test; return whether all passed, and pytest's last line or the failure."""
    data = Path(os.environ.get("NNFMQ_DATA") or ROOT.parent / "shared").absolute()
    variables = {"NNFMQ_CORE": "compiled", "NNFMQ_DATA": str(data)}
    try:
        run(["git", "clone", "--quiet", ROOT, clone])
        inside = environment(python, clone / ".venv", [f"{clone}[test]"])
        said = run(command(inside), environment=variables, folder=clone, limit_s=_LIMIT_S)
    except Failed as failure:
        print(failure, file=sys.stderr)
        return False, closing_line(str(failure))
    return True, closing_line(said)


if __name__ == "__main__":
    sys.exit(main())
