"""Checks of an extension module's requirements: architecture, libraries, glibc version and Python symbols.

They are read from the ELF file, so neither the architecture nor the libraries are needed to check it. A module for
AArch64 that needs the same Python symbols as the one for x86-64, which the smoke test executes, was generated from the
same source with the same headers: `command` compares the two. auditwheel, which has its own list of what a tag allows,
is run too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from elftools.elf.elffile import ELFFile

from wheels.build import GLIBC, platform_tag
from wheels.interpreters import run

MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
LIBRARIES = frozenset(
    ["libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"]
)  # fmt: skip
"""The libraries that the compiled core may need; every manylinux system has them."""
_GLIBC = re.compile(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Binary:
    """The requirements of one shared object. `undefined` are the symbols without a library version."""

    machine: str
    libraries: frozenset[str]
    search_paths: tuple[str, ...]
    versions: frozenset[str]
    undefined: frozenset[str]

    @property
    def glibc(self) -> tuple[int, int]:
        """The oldest glibc that has all needed symbols; (0, 0) if none is needed."""
        found = [_GLIBC.fullmatch(version) for version in self.versions]
        return max(((int(match[1]), int(match[2])) for match in found if match), default=(0, 0))


def parse(data: bytes) -> Binary:
    """Return the requirements of a shared object.

    Raises:
        ELFError: If `data` is not an ELF file.
    """
    elf: Any = ELFFile(BytesIO(data))
    dynamic = list(elf.get_section_by_name(".dynamic").iter_tags())
    return Binary(
        machine=elf["e_machine"],
        libraries=frozenset(tag.needed for tag in dynamic if tag.entry.d_tag == "DT_NEEDED"),
        search_paths=tuple(
            str(getattr(tag, tag.entry.d_tag[3:].lower())) for tag in dynamic if tag.entry.d_tag in _SEARCH
        ),
        versions=frozenset(_versions(elf)),
        undefined=frozenset(_undefined(elf)),
    )


_SEARCH = ("DT_RPATH", "DT_RUNPATH")


def in_wheel(wheel: Path) -> dict[str, Binary]:
    """Return the requirements of each shared object in a wheel, by its path without the suffix."""
    with ZipFile(wheel) as opened:
        names = [name for name in opened.namelist() if name.endswith(".so")]
        return {name.split(".")[0]: parse(opened.read(name)) for name in names}


def problems(binary: Binary, architecture: str, glibc: tuple[int, int] = GLIBC) -> Iterator[str]:
    """Yield each reason why a shared object may not load on `architecture` with `glibc` or newer."""
    if binary.machine != MACHINES[architecture]:
        yield f"is for {binary.machine}, not {MACHINES[architecture]}"
    if binary.glibc > glibc:
        yield "needs glibc {}.{}, the tag promises {}.{}".format(*binary.glibc, *glibc)
    if other := sorted(version for version in binary.versions if not _GLIBC.fullmatch(version)):
        yield f"needs symbols of versions {other}, which are not glibc's"
    if not_allowed := sorted(binary.libraries - LIBRARIES):
        yield f"needs {not_allowed}, allowed are {sorted(LIBRARIES)}"
    if binary.search_paths:
        yield f"searches {list(binary.search_paths)} for libraries, which exist only on this machine"
    if unknown := sorted(name for name in binary.undefined if not name.startswith(("Py", "_Py"))):
        yield f"needs {unknown}, which neither glibc nor Python has"


def auditwheel_problems(wheel: Path, architecture: str) -> list[str]:
    """Return a problem unless auditwheel finds that the wheel needs at most the tag's glibc."""
    report = " ".join(run([sys.executable, "-m", "auditwheel", "show", wheel]).split())
    found = re.search(rf'platform tag: "manylinux_(\d+)_(\d+)_{architecture}"', report)
    if found and (int(found[1]), int(found[2])) <= GLIBC:
        return []
    return [f"according to auditwheel, the wheel does not satisfy {platform_tag(architecture)}: {report}"]


def _versions(elf: Any) -> Iterator[str]:
    section = elf.get_section_by_name(".gnu.version_r")
    for _, entries in section.iter_versions() if section else ():
        yield from (entry.name for entry in entries)


def _undefined(elf: Any) -> Iterator[str]:
    """Yield the undefined global symbols without a version, that is with version index 0 (local) or 1 (global)."""
    table, versions = elf.get_section_by_name(".dynsym"), elf.get_section_by_name(".gnu.version")
    for index, symbol in enumerate(table.iter_symbols()):
        is_undefined = symbol["st_shndx"] == "SHN_UNDEF" and symbol["st_info"]["bind"] == "STB_GLOBAL"
        if is_undefined and (versions is None or not isinstance(versions.get_symbol(index)["ndx"], int)):
            yield symbol.name
