"""What an extension module asks of the system: its processor, libraries, glibc and Python.

Read from the ELF file itself, so that it needs neither the processor nor the libraries. A module for AArch64 that
asks Python for the same symbols as the one for x86-64, which was loaded and used, was translated from the same source
under the same headers: `command` compares the two. auditwheel has a list of its own of what a tag allows; it is asked
too.
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
"""Of the libraries that every manylinux system has, those that the core may use."""
_GLIBC = re.compile(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Binary:
    """One shared object: what it needs of others. `undefined` are the symbols that no library version is named for."""

    machine: str
    libraries: frozenset[str]
    search_paths: tuple[str, ...]
    versions: frozenset[str]
    undefined: frozenset[str]

    @property
    def glibc(self) -> tuple[int, int]:
        """Return the oldest glibc that has everything it asks for; (0, 0) where it asks for nothing."""
        found = [_GLIBC.fullmatch(version) for version in self.versions]
        return max(((int(match[1]), int(match[2])) for match in found if match), default=(0, 0))


def parse(data: bytes) -> Binary:
    """Read a shared object. Raises ELFError where it is none."""
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
    """Read every shared object of a wheel, by its path without the ending."""
    with ZipFile(wheel) as opened:
        names = [name for name in opened.namelist() if name.endswith(".so")]
        return {name.split(".")[0]: parse(opened.read(name)) for name in names}


def faults(binary: Binary, architecture: str, glibc: tuple[int, int] = GLIBC) -> Iterator[str]:
    """Yield what keeps a shared object from loading on every `architecture` with `glibc` or newer."""
    if binary.machine != MACHINES[architecture]:
        yield f"is for {binary.machine}, not {MACHINES[architecture]}"
    if binary.glibc > glibc:
        yield "needs glibc {}.{}, the tag promises {}.{}".format(*binary.glibc, *glibc)
    if other := sorted(version for version in binary.versions if not _GLIBC.fullmatch(version)):
        yield f"needs symbols of versions {other}, which are not glibc's"
    if foreign := sorted(binary.libraries - LIBRARIES):
        yield f"needs {foreign}, allowed are {sorted(LIBRARIES)}"
    if binary.search_paths:
        yield f"searches {list(binary.search_paths)} for libraries, which are paths of this machine"
    if unknown := sorted(name for name in binary.undefined if not name.startswith(("Py", "_Py"))):
        yield f"asks for {unknown}, which neither glibc nor Python has"


def auditwheel_faults(wheel: Path, architecture: str) -> list[str]:
    """Return how auditwheel's verdict differs from the tag: it must find the tag's glibc, or an older one, enough."""
    said = " ".join(run([sys.executable, "-m", "auditwheel", "show", wheel]).split())
    verdict = re.search(rf'platform tag: "manylinux_(\d+)_(\d+)_{architecture}"', said)
    if verdict and (int(verdict[1]), int(verdict[2])) <= GLIBC:
        return []
    return [f"auditwheel does not find {platform_tag(architecture)} met: {said}"]


def _versions(elf: Any) -> Iterator[str]:
    section = elf.get_section_by_name(".gnu.version_r")
    for _, entries in section.iter_versions() if section else ():
        yield from (entry.name for entry in entries)


def _undefined(elf: Any) -> Iterator[str]:
    """Yield the undefined global symbols whose version index (0 local, 1 global) names no version."""
    table, versions = elf.get_section_by_name(".dynsym"), elf.get_section_by_name(".gnu.version")
    for index, symbol in enumerate(table.iter_symbols()):
        wanted = symbol["st_shndx"] == "SHN_UNDEF" and symbol["st_info"]["bind"] == "STB_GLOBAL"
        if wanted and (versions is None or not isinstance(versions.get_symbol(index)["ndx"], int)):
            yield symbol.name
