"""The Pythons of this machine that the project supports, and environments of them.

An interpreter is asked what it is, never judged by its path: a shim that does not run, a version below
`requires-python`, a build without a GIL, another implementation, or one without C headers or `venv` is passed over.
Of several with the same minor version the newest release counts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 600
_ASK = """
import ensurepip, json, os, platform, sys, sysconfig
print(json.dumps({
    "implementation": sys.implementation.name,
    "release": list(sys.version_info[:3]),
    "final": sys.version_info.releaselevel == "final",
    "gil": not sysconfig.get_config_var("Py_GIL_DISABLED"),
    "suffix": sysconfig.get_config_var("EXT_SUFFIX"),
    "headers": os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")),
    "base": sys.base_prefix == sys.prefix,
}))
"""


class Failed(Exception):
    """A command that this tool ran did not do its work; the message is what it said last."""


@dataclass(frozen=True, slots=True, order=True)
class Python:
    """An interpreter: its release, as (3, 12, 1), and where it is."""

    release: tuple[int, int, int]
    path: Path

    @property
    def minor(self) -> str:
        """Return "3.12"."""
        return "{}.{}".format(*self.release)

    @property
    def tag(self) -> str:
        """Return "cp312", the tag of interpreter and ABI alike."""
        return "cp{}{}".format(*self.release)

    def __str__(self) -> str:
        return "{}.{}.{}".format(*self.release)


def settings() -> dict[str, Any]:
    """Return pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def oldest() -> tuple[int, ...]:
    """Return the first supported version, as (3, 11)."""
    wanted: str = settings()["project"]["requires-python"]
    return tuple(int(part) for part in wanted.removeprefix(">=").split("."))


def find() -> list[Python]:
    """Return the newest release of each supported minor version found here, the oldest first."""
    return newest(python for path in _candidates() if (python := ask(path)) is not None)


def newest(pythons: Iterable[Python]) -> list[Python]:
    """Keep the newest release of each minor version; of equal ones the first given."""
    best: dict[str, Python] = {}
    for python in pythons:
        if python.minor not in best or python.release > best[python.minor].release:
            best[python.minor] = python
    return sorted(best.values())


def named(names: Sequence[str]) -> list[Python]:
    """Return the interpreters given by path or command name. Raises Failed for one that cannot be used."""
    return [_named(name) for name in names]


def ask(path: Path) -> Python | None:
    """Return what `path` is, or None where it is nothing that the project can be built for."""
    try:
        answer = json.loads(run([path, "-I", "-c", _ASK], limit_s=60))
    except (Failed, OSError, ValueError):
        return None
    release: tuple[int, int, int] = tuple(answer["release"])
    good = answer["implementation"] == "cpython" and answer["final"] and answer["gil"] and answer["headers"]
    return Python(release, path) if good and answer["base"] and release >= oldest() else None


def environment(python: Python, folder: Path, requirements: Sequence[str | Path], *options: str) -> Path:
    """Make a virtual environment in `folder` with `requirements`; return its interpreter. Raises Failed."""
    run([python.path, "-I", "-m", "venv", folder])
    inside = folder / "bin" / "python"
    if requirements:
        pip(inside, "install", *options, *requirements)
    return inside


def pip(python: Path, *words: str | Path, environment: Mapping[str, str] | None = None) -> str:
    """Run pip in an environment; return what it printed. Raises Failed."""
    return run([python, "-m", "pip", "--quiet", "--disable-pip-version-check", *words], environment=environment)


def run(
    command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None, folder: Path | None = None,
    limit_s: float = _LIMIT_S,
) -> str:  # fmt: skip
    """Run a command, with `environment` over ours, and return its stdout. Raises Failed with its last words."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
            env=_clean() | dict(environment or {}), cwd=folder, timeout=limit_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{' '.join(words[:4])} … did not end in {limit_s} s") from error
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-12:]
        raise Failed("\n".join([f"{' '.join(words[:4])} … ended with {done.returncode}:", *last]))
    return done.stdout


def _clean() -> dict[str, str]:
    """Return our environment without what would lead an interpreter astray or choose a core for it."""
    astray = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "NNFMQ_CORE", "NNFMQ_SOCKET")
    return {name: value for name, value in os.environ.items() if name not in astray}


def _candidates() -> Iterator[Path]:
    yield from sorted(Path.home().glob(".pyenv/versions/*/bin/python"))
    for folder in os.get_exec_path():
        yield from sorted(path for path in Path(folder).glob("python3.*") if path.suffix[1:].isdigit())


def _named(name: str) -> Python:
    found = shutil.which(name)
    python = ask(Path(found)) if found else None
    if python is None:
        wanted = f"CPython {'.'.join(map(str, oldest()))} or newer with C headers and venv, outside any environment"
        raise Failed(f"{name} is no {wanted}; leave --python out to search")
    return python
