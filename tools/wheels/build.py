"""Build of a wheel from HEAD: the source tree, the compiler and the environment, independent of the machine.

The compiler is zig's clang, which includes the symbol versions of old glibcs and the headers of each architecture. The
interpreter that builds is an x86-64 one even for AArch64: its headers are valid there too, since both are 64-bit,
little-endian and LP64. `check_headers` verifies that by compiling assertions of all sizes in `pyconfig.h`. A wheel
contains nothing that depends on time, path or user: SOURCE_DATE_EPOCH is the time of HEAD's commit, and there are no
debugging information and no library search paths.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import tarfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from wheels.interpreters import ROOT, BuildError, Python, create_venv, pip, read_pyproject, run

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
