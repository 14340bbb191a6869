"""Builds wheels from HEAD: the interpreters of this machine, the compiler, the source tree and the environment.

A candidate interpreter is executed to find its properties. It is skipped if it does not run (a pyenv shim, for
instance), is older than `requires-python`, is a pre-release, has no GIL, is not CPython, or has no C headers or `venv`.
Of several with the same minor version the newest release is used.

The compiler is zig's clang, which includes the symbol versions of old glibcs and the headers of each architecture. The
interpreter that builds is an x86-64 one even for AArch64: its headers are valid there too, since both are 64-bit,
little-endian and LP64. `check_headers` verifies that by compiling assertions of all sizes in `pyconfig.h`. A wheel
contains nothing that depends on time, path or user: SOURCE_DATE_EPOCH is the time of HEAD's commit, and there are no
debugging information and no library search paths.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# ---- interpreters and virtual environments


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


# ---- a wheel


GLIBC = (2, 17)
"""The oldest glibc that has all needed symbols; every pip since 20.3 supports its tag, `manylinux_2_17`."""
ARCHITECTURES = ("x86_64", "aarch64")
_SIZES = re.compile(r"^#define (SIZEOF|ALIGNOF)_(\w+) (\d+)$", re.MULTILINE)
_TYPES = {
    "VOID_P": "void *", "UINTPTR_T": "__UINTPTR_TYPE__", "SIZE_T": "__SIZE_TYPE__", "WCHAR_T": "__WCHAR_TYPE__",
    "MAX_ALIGN_T": "max_align_t", "OFF_T": "off_t", "PID_T": "pid_t", "TIME_T": "time_t", "FPOS_T": "fpos_t",
    "PTHREAD_T": "pthread_t", "PTHREAD_KEY_T": "pthread_key_t", "_BOOL": "_Bool",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """The interpreter and the architecture that a wheel is for; None: a wheel without compiled cores."""

    python: Python
    architecture: str | None

    @property
    def tag(self) -> str:
        """Return the compatibility tag, as in the wheel's file name."""
        if self.architecture is None:
            return "py3-none-any"
        return f"{self.python.tag}-{self.python.tag}-{platform_tag(self.architecture)}"

    @property
    def suffix(self) -> str:
        """Return the file name suffix of its extension modules."""
        return f".cpython-{self.python.tag[2:]}-{self.architecture}-linux-gnu.so"


def platform_tag(architecture: str) -> str:
    """Return the platform part of the tag."""
    return "manylinux_{}_{}_{}".format(*GLIBC, architecture)


@cache
def head() -> str:
    """Return the hash of the commit to build. Cached, so that a commit during the build does not change it."""
    return run(["git", "-C", ROOT, "rev-parse", "HEAD"]).strip()


def epoch() -> int:
    """Return $SOURCE_DATE_EPOCH if it is set, else the time of HEAD's commit, in seconds since 1970."""
    return int(os.environ.get("SOURCE_DATE_EPOCH") or run(["git", "-C", ROOT, "log", "-1", "--format=%ct", head()]))


def has_uncommitted_changes() -> bool:
    """Return True if the working tree differs from HEAD."""
    return bool(run(["git", "-C", ROOT, "status", "--porcelain"]).strip())


def package_files() -> list[str]:
    """Return the paths of the package's files at HEAD, relative to the repository."""
    return run(["git", "-C", ROOT, "ls-tree", "-r", "--name-only", head(), "nnfmq"]).splitlines()


def export(folder: Path) -> Path:
    """Extract the source tree at HEAD to `folder`, with file modes independent of the umask; return `folder`."""
    archive = folder.with_suffix(".tar")
    run(["git", "-C", ROOT, "-c", "tar.umask=0022", "archive", "--output", archive, head()])
    with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as tree:
        tree.extractall(folder, filter="data")
    archive.unlink()
    return folder


def create_build_venv(python: Python, folder: Path, *, compiled: bool) -> Path:
    """Create an environment with pyproject.toml's build requirements, Cython only if `compiled`.

    Returns the path of its interpreter.
    """
    requirements: list[str] = read_pyproject()["build-system"]["requires"]
    return create_venv(python, folder, [name for name in requirements if compiled or not name.startswith("Cython")])


def build(target: Target, venv_python: Path, tree: Path, cache: Path, output: Path) -> Path:
    """Build one wheel of the source tree `tree` into `output` with the interpreter of a build environment.

    Results of an earlier build in `tree` are removed, except the generated C, which is the same for every target.

    Raises:
        BuildError: If pip fails or builds no wheel with the target's tag.
    """
    shutil.rmtree(tree / "build", ignore_errors=True)
    variables = {"SOURCE_DATE_EPOCH": str(epoch()), "ZIG_GLOBAL_CACHE_DIR": str(cache), "PYTHONHASHSEED": "0"}
    args: list[str | Path] = ["wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", output]
    if target.architecture is not None:
        variables |= compiler_variables(target.architecture) | {"SETUPTOOLS_EXT_SUFFIX": target.suffix}
        args += [f"--config-settings=--build-option=--plat-name={platform_tag(target.architecture)}"]
    pip_output = pip(venv_python, *args, tree, environment=variables)
    return _find_wheel(output, target, pip_output)


def compiler_variables(architecture: str) -> dict[str, str]:
    """Return the environment variables that make setuptools compile and link for `architecture`."""
    cc = " ".join(zig_command(architecture))
    return {"CC": cc, "LDSHARED": f"{cc} -shared -s", "CFLAGS": "-g0", "CPPFLAGS": "", "LDFLAGS": "", "ARCHFLAGS": ""}


def zig_command(architecture: str) -> list[str]:
    """Return the command of the C compiler for `architecture` and the tag's glibc."""
    target = "{}-linux-gnu.{}.{}".format(architecture, *GLIBC)
    return [sys.executable, "-m", "ziglang", "cc", "-target", target]


def check_headers(venv_python: Path, architecture: str, folder: Path, cache: Path) -> list[str]:
    """Compile assertions of the sizes in the interpreter's `pyconfig.h` for `architecture`; return the problems."""
    script = "import sysconfig; print(sysconfig.get_config_h_filename())"
    header = Path(run([venv_python, "-I", "-c", script]).strip()).read_text(encoding="utf-8")
    source = folder / f"sizes_{architecture}.c"
    source.write_text(size_assertions(header), encoding="utf-8")
    try:
        object_file = source.with_suffix(".o")
        run(
            [*zig_command(architecture), "-c", source, "-o", object_file],
            environment={"ZIG_GLOBAL_CACHE_DIR": str(cache)},
        )
    except BuildError as failure:
        return [f"pyconfig.h is wrong for {architecture}: {failure}"]
    return []


def size_assertions(pyconfig: str) -> str:
    """Return a C program that compiles only if every SIZEOF_ and ALIGNOF_ macro in `pyconfig` is true."""
    lines = [f"#include <{name}.h>" for name in ("stddef", "stdio", "sys/types", "time", "pthread")]
    for kind, name, value in _SIZES.findall(pyconfig):
        operator = "sizeof" if kind == "SIZEOF" else "_Alignof"
        c_type = _TYPES.get(name, name.lower().replace("_", " "))
        lines.append(f'_Static_assert({operator}({c_type}) == {value}, "{kind}_{name}");')
    return "\n".join([*lines, ""])


def _find_wheel(folder: Path, target: Target, pip_output: str) -> Path:
    names = sorted(path.name for path in folder.glob("*.whl"))
    built = [name for name in names if name.endswith(f"-{target.tag}.whl")]
    if len(built) != 1:
        raise BuildError(f"no wheel with the tag {target.tag} was built, but {names or 'none'}\n{pip_output}".strip())
    return folder / built[0]
