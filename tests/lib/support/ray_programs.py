"""What the programs that run Ray have in common. They are child processes of tests, with the tools on their path."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_support import adopt_orphans, end_descendants, interrupt_on_sigterm


def report_of(run: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Return what `run` returns, given a folder for its files. All processes end, and the folder is removed."""
    adopt_orphans()
    interrupt_on_sigterm()
    try:
        with tempfile.TemporaryDirectory(prefix="nq-", ignore_cleanup_errors=True) as folder:
            return run(Path(folder))
    finally:
        end_descendants()
