"""HEAD → wheels: the tree, the compiler and the environment, the same whatever this machine has.

The compiler is zig's clang, which brings glibc's symbols by version and the headers of each processor. The interpreter
runs here whatever it builds for: its headers serve AArch64 as well, since both are 64-bit, little-endian and LP64;
`headers_fit` has the other compiler check each size in `pyconfig.h`. Nothing of the build's time, path or user gets
into a wheel: SOURCE_DATE_EPOCH is HEAD's, no debugging information, no path to search for libraries.
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

from wheels.interpreters import ROOT, Failed, Python, environment, pip, run, settings

GLIBC = (2, 17)
"""What the code needs; the `manylinux_2_17` that every pip since 20.3 knows."""
ARCHITECTURES = ("x86_64", "aarch64")
_SIZES = re.compile(r"^#define (SIZEOF|ALIGNOF)_(\w+) (\d+)$", re.MULTILINE)
_TYPES = {
    "VOID_P": "void *", "UINTPTR_T": "__UINTPTR_TYPE__", "SIZE_T": "__SIZE_TYPE__", "WCHAR_T": "__WCHAR_TYPE__",
    "MAX_ALIGN_T": "max_align_t", "OFF_T": "off_t", "PID_T": "pid_t", "TIME_T": "time_t", "FPOS_T": "fpos_t",
    "PTHREAD_T": "pthread_t", "PTHREAD_KEY_T": "pthread_key_t", "_BOOL": "_Bool",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """What a wheel is for: an interpreter, and a processor or None for the one in plain Python."""

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
        """Return the ending of its extension modules."""
        return f".cpython-{self.python.tag[2:]}-{self.architecture}-linux-gnu.so"


def platform_tag(architecture: str) -> str:
    """Return the platform part of the tag."""
    return "manylinux_{}_{}_{}".format(*GLIBC, architecture)


@cache
def head() -> str:
    """Return the commit that is built. Asked once: a commit made meanwhile must not get into half of the wheels."""
    return run(["git", "-C", ROOT, "rev-parse", "HEAD"]).strip()


def epoch() -> int:
    """Return $SOURCE_DATE_EPOCH, or the time of HEAD's commit, in seconds."""
    return int(os.environ.get("SOURCE_DATE_EPOCH") or run(["git", "-C", ROOT, "log", "-1", "--format=%ct", head()]))


def uncommitted() -> bool:
    """Say whether the working tree has changes that a wheel would not have."""
    return bool(run(["git", "-C", ROOT, "status", "--porcelain"]).strip())


def files() -> list[str]:
    """Return the files of the package at HEAD, as paths from the root."""
    return run(["git", "-C", ROOT, "ls-tree", "-r", "--name-only", head(), "nnfmq"]).splitlines()


def export(folder: Path) -> Path:
    """Write the tree at HEAD into `folder`, with modes that do not depend on the umask; return it."""
    archive = folder.with_suffix(".tar")
    run(["git", "-C", ROOT, "-c", "tar.umask=0022", "archive", "--output", archive, head()])
    with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as tree:
        tree.extractall(folder, filter="data")
    archive.unlink()
    return folder


def workshop(python: Python, folder: Path, *, compiled: bool) -> Path:
    """Make the environment that builds: what pyproject.toml requires, without Cython where nothing is compiled."""
    wanted: list[str] = settings()["build-system"]["requires"]
    return environment(python, folder, [name for name in wanted if compiled or not name.startswith("Cython")])


def build(target: Target, inside: Path, tree: Path, cache: Path, output: Path) -> Path:
    """Build one wheel of `tree` with the interpreter `inside` a workshop into `output`. Raises Failed.

    What an earlier build left in `tree` is removed, except the translated C, which is the same for every target.
    """
    shutil.rmtree(tree / "build", ignore_errors=True)
    variables = {"SOURCE_DATE_EPOCH": str(epoch()), "ZIG_GLOBAL_CACHE_DIR": str(cache), "PYTHONHASHSEED": "0"}
    words: list[str | Path] = ["wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", output]
    if target.architecture is not None:
        variables |= compiler(target.architecture) | {"SETUPTOOLS_EXT_SUFFIX": target.suffix}
        words += [f"--config-settings=--build-option=--plat-name={platform_tag(target.architecture)}"]
    said = pip(inside, *words, tree, environment=variables)
    return _the_one(output, target, said)


def compiler(architecture: str) -> dict[str, str]:
    """Return the variables by which setuptools compiles and links for `architecture`, whatever runs here."""
    cc = " ".join(zig(architecture))
    return {"CC": cc, "LDSHARED": f"{cc} -shared -s", "CFLAGS": "-g0", "CPPFLAGS": "", "LDFLAGS": "", "ARCHFLAGS": ""}


def zig(architecture: str) -> list[str]:
    """Return the command of the C compiler for `architecture` and the glibc of the tag."""
    target = "{}-linux-gnu.{}.{}".format(architecture, *GLIBC)
    return [sys.executable, "-m", "ziglang", "cc", "-target", target]


def headers_fit(inside: Path, architecture: str, folder: Path, cache: Path) -> list[str]:
    """Have the compiler for `architecture` check the sizes in the `pyconfig.h` of `inside`; return what is wrong."""
    ask = "import sysconfig; print(sysconfig.get_config_h_filename())"
    header = Path(run([inside, "-I", "-c", ask]).strip()).read_text(encoding="utf-8")
    source = folder / f"sizes_{architecture}.c"
    source.write_text(assertions(header), encoding="utf-8")
    try:
        object_file = source.with_suffix(".o")
        run([*zig(architecture), "-c", source, "-o", object_file], environment={"ZIG_GLOBAL_CACHE_DIR": str(cache)})
    except Failed as failure:
        return [f"pyconfig.h does not fit {architecture}: {failure}"]
    return []


def assertions(pyconfig: str) -> str:
    """Return a C program that compiles only where every SIZEOF_ and ALIGNOF_ of `pyconfig` is true."""
    lines = [f"#include <{name}.h>" for name in ("stddef", "stdio", "sys/types", "time", "pthread")]
    for kind, name, value in _SIZES.findall(pyconfig):
        operator = "sizeof" if kind == "SIZEOF" else "_Alignof"
        c_type = _TYPES.get(name, name.lower().replace("_", " "))
        lines.append(f'_Static_assert({operator}({c_type}) == {value}, "{kind}_{name}");')
    return "\n".join([*lines, ""])


def _the_one(folder: Path, target: Target, said: str) -> Path:
    names = sorted(path.name for path in folder.glob("*.whl"))
    built = [name for name in names if name.endswith(f"-{target.tag}.whl")]
    if len(built) != 1:
        raise Failed(f"no wheel tagged {target.tag} was built, but {names or 'none'}\n{said}".strip())
    return folder / built[0]
