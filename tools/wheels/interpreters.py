"""Supported Python interpreters on this machine, and virtual environments made with them.

A candidate is executed to find its properties. It is skipped if it does not run (a pyenv shim, for instance), is older
than `requires-python`, is a pre-release, has no GIL, is not CPython, or has no C headers or `venv`. Of several with the
same minor version the newest release is used.
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
_TIMEOUT_S = 600
_PROBE_SCRIPT = """
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


class BuildError(Exception):
    """A command failed, or a wheel cannot be built. The message of a failed command has the end of its output."""


@dataclass(frozen=True, slots=True, order=True)
class Python:
    """An interpreter: its release, such as (3, 12, 1), and its path."""

    release: tuple[int, int, int]
    path: Path

    @property
    def minor(self) -> str:
        """The minor version, such as "3.12"."""
        return "{}.{}".format(*self.release)

    @property
    def tag(self) -> str:
        """The tag of the interpreter and of its ABI, such as "cp312"."""
        return "cp{}{}".format(*self.release)

    def __str__(self) -> str:
        return "{}.{}.{}".format(*self.release)


def read_pyproject() -> dict[str, Any]:
    """Return the content of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def min_version() -> tuple[int, ...]:
    """Return the oldest supported Python version, such as (3, 11)."""
    requirement: str = read_pyproject()["project"]["requires-python"]
    return tuple(int(part) for part in requirement.removeprefix(">=").split("."))


def find_all() -> list[Python]:
    """Return the newest release of each supported minor version on this machine, in ascending order."""
    return newest_releases(python for path in _candidates() if (python := probe(path)) is not None)


def newest_releases(pythons: Iterable[Python]) -> list[Python]:
    """Keep the newest release of each minor version; of equal ones the first given."""
    best: dict[str, Python] = {}
    for python in pythons:
        if python.minor not in best or python.release > best[python.minor].release:
            best[python.minor] = python
    return sorted(best.values())


def find_named(names: Sequence[str]) -> list[Python]:
    """Return the interpreters with the given paths or command names.

    Raises:
        BuildError: If one is not supported.
    """
    return [_find_named(name) for name in names]


def probe(path: Path) -> Python | None:
    """Execute `path`; return its description, or None if it is not a supported interpreter."""
    try:
        properties = json.loads(run([path, "-I", "-c", _PROBE_SCRIPT], timeout_s=60))
    except (BuildError, OSError, ValueError):
        return None
    release: tuple[int, int, int] = tuple(properties["release"])
    is_supported = (
        properties["implementation"] == "cpython"
        and properties["final"]
        and properties["gil"]
        and properties["headers"]
    )
    return Python(release, path) if is_supported and properties["base"] and release >= min_version() else None


def create_venv(python: Python, folder: Path, requirements: Sequence[str | Path], *options: str) -> Path:
    """Create a virtual environment in `folder` with `requirements`; return the path of its interpreter."""
    run([python.path, "-I", "-m", "venv", folder])
    venv_python = folder / "bin" / "python"
    if requirements:
        pip(venv_python, "install", *options, *requirements)
    return venv_python


def pip(python: Path, *args: str | Path, environment: Mapping[str, str] | None = None) -> str:
    """Run pip with the interpreter `python`; return its output. Raises BuildError."""
    return run([python, "-m", "pip", "--quiet", "--disable-pip-version-check", *args], environment=environment)


def run(
    command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None, folder: Path | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> str:  # fmt: skip
    """Run a command with `environment` added to this process's; return its stdout.

    Raises:
        BuildError: If it exits with another status than 0, or does not end within `timeout_s` seconds.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
            env=_clean_environment() | dict(environment or {}), cwd=folder, timeout=timeout_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{' '.join(words[:4])} … did not end within {timeout_s} s") from error
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-12:]
        raise BuildError("\n".join([f"{' '.join(words[:4])} … failed with exit status {done.returncode}:", *last]))
    return done.stdout


def _clean_environment() -> dict[str, str]:
    """Return this process's environment without variables that change an interpreter's path or nnfmq's core."""
    removed = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "NNFMQ_CORE", "NNFMQ_SOCKET")
    return {name: value for name, value in os.environ.items() if name not in removed}


def _candidates() -> Iterator[Path]:
    yield from sorted(Path.home().glob(".pyenv/versions/*/bin/python"))
    for folder in os.get_exec_path():
        yield from sorted(path for path in Path(folder).glob("python3.*") if path.suffix[1:].isdigit())


def _find_named(name: str) -> Python:
    found = shutil.which(name)
    python = probe(Path(found)) if found else None
    if python is None:
        supported = (
            f"CPython {'.'.join(map(str, min_version()))} or newer with C headers and venv, outside any environment"
        )
        raise BuildError(f"{name} is not {supported}; omit --python to search for interpreters")
    return python
