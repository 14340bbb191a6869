"""Checks that the tests exercise the intended nnfmq. In case of doubt the run ends.

Two mistakes are easy: a source tree in the current directory hides the installed package (`python -m pytest` in a
clone), and the compiled core is missing where it was to be tested. Editable installs and .pth files are fine: their
distribution does not own a second `nnfmq/__init__.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path

import nnfmq

IMPORTED = Path(nnfmq.__file__ or "").resolve()


def complaint() -> str | None:
    """Return an error message about the package under test, or None."""
    return shadowing(IMPORTED, installed()) or wrong_core(os.environ.get("NNFMQ_CORE"), core_name())


def installed() -> Iterator[Path]:
    """Yield every `nnfmq/__init__.py` that an installed distribution owns."""
    for distribution in distributions(name="nnfmq"):
        for file in distribution.files or ():
            if file.as_posix() == "nnfmq/__init__.py":
                yield Path(os.fspath(file.locate())).resolve()


def shadowing(imported: Path, owned: Iterator[Path] | list[Path]) -> str | None:
    """Return an error message if another nnfmq than the imported one is installed, else None."""
    elsewhere = [str(path.parent) for path in owned if path != imported]
    if not elsewhere:
        return None
    return (
        f"nnfmq was imported from {imported.parent}, which hides the installed {' and '.join(elsewhere)}. "
        "Run `pytest`, not `python -m pytest`, or install this tree."
    )


def core_name() -> str:
    """Return the name of the active queue core, or the reason why there is none."""
    try:
        core = import_module("nnfmq.queue.core")
    except ImportError as error:
        return f"none ({error})"
    return str(core.core_name)


def wrong_core(wanted: str | None, active: str) -> str | None:
    """Return an error message if $NNFMQ_CORE names another core than the active one, else None."""
    if not wanted or wanted == active:
        return None
    return f"$NNFMQ_CORE is {wanted!r}, but the active core is {active!r}"
