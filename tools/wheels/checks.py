"""Checks of a wheel: its files, the requirements of its extension modules, and a smoke test. Each returns the problems.

*Files*: the package's, compared with git's at HEAD, which finds both a missing `py.typed` and a generated `.c`; its
extension modules, man pages, a correct RECORD, nothing else.

*Extension modules*: architecture, libraries, glibc version and Python symbols are read from the ELF file, so neither
the architecture nor the libraries are needed. A module for AArch64 that needs the same Python symbols as the one for
x86-64, which the smoke test executes, was generated from the same source with the same headers. auditwheel, which has
its own list of what a tag allows, is run too.

*Smoke test*: install the wheel as a user would, without a working compiler, and use it. Dependencies are wheels from
the package index. A wheel for AArch64 is tested if the caller has a command that runs an interpreter for it, for
instance `qemu-aarch64 -L ROOT ROOT/usr/bin/python3.11`: pip of this machine then unpacks it and its dependencies.
An emulator shows that the modules load and work, but does not reorder memory accesses as Arm processors do.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email import message_from_string
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import BadZipFile, ZipFile

from elftools.elf.elffile import ELFFile
from man_pages import page_names

from wheels.build import GLIBC, Target, create_venv, pip, platform_tag, run

# ---- files


MAN_FOLDER = "share/man/man1"
METADATA = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt")


def content_problems(wheel: Path, target: Target, tracked: Iterable[str]) -> list[str]:
    """Return the problems of a wheel for `target`, whose package must consist of the files `tracked`."""
    try:
        with ZipFile(wheel) as opened:
            return [
                *_file_problems(opened, target, set(tracked)),
                *_tag_problems(opened, target),
                *record_problems(opened),
            ]
    except (BadZipFile, KeyError, UnicodeDecodeError, csv.Error) as error:
        return [f"cannot be read: {error!r}"]


def record_problems(wheel: ZipFile) -> Iterator[str]:
    """Yield the differences between RECORD and the wheel: files, SHA-256 digests and sizes."""
    record = metadata_path(wheel, "RECORD")
    rows = {row[0]: tuple(row[1:]) for row in csv.reader(io.StringIO(wheel.read(record).decode()))}
    names = wheel.namelist()
    yield from (f"{name} is in the wheel twice" for name in sorted({name for name in names if names.count(name) > 1}))
    yield from (f"{name} is not in RECORD" for name in sorted(set(names) - set(rows)))
    yield from (f"{name} is in RECORD but not in the wheel" for name in sorted(set(rows) - set(names)))
    for name in sorted(set(names) & set(rows)):
        expected = ("", "") if name == record else _digest(wheel.read(name))
        if rows[name] != expected:
            yield f"RECORD has {rows[name]} for {name}, not {expected}"


def metadata_path(wheel: ZipFile, name: str) -> str:
    """Return the path of a metadata file in the wheel. Raises KeyError if there is not exactly one."""
    found = [path for path in wheel.namelist() if path.endswith(f".dist-info/{name}")]
    if len(found) != 1:
        raise KeyError(f"there must be one .dist-info/{name}, but there are {len(found)}")
    return found[0]


def extension_modules(tracked: Iterable[str], target: Target) -> set[str]:
    """Return the paths of the extension modules that a wheel for `target` must have."""
    if target.architecture is None:
        return set()
    sources = [PurePosixPath(name) for name in tracked if name.endswith(".pyx")]
    return {str(source.with_suffix("")) + target.suffix for source in sources}


def _file_problems(wheel: ZipFile, target: Target, tracked: set[str]) -> Iterator[str]:
    expected = tracked | extension_modules(tracked, target) | {f"{MAN_FOLDER}/{name}" for name in page_names()}
    actual = {re.sub(r"^[^/]+\.data/data/", "", name) for name in wheel.namelist() if ".dist-info/" not in name}
    yield from (f"{name} is missing" for name in sorted(expected - actual))
    yield from (f"{name} does not belong in the wheel" for name in sorted(actual - expected))
    for name in METADATA:
        metadata_path(wheel, name)


def _tag_problems(wheel: ZipFile, target: Target) -> Iterator[str]:
    header = message_from_string(wheel.read(metadata_path(wheel, "WHEEL")).decode())
    tags, pure = header.get_all("Tag"), header["Root-Is-Purelib"]
    if tags != [target.tag]:
        yield f"WHEEL has the tags {tags}, not {target.tag}"
    if pure != ("true" if target.architecture is None else "false"):
        yield f"WHEEL has Root-Is-Purelib: {pure}"


def _digest(data: bytes) -> tuple[str, str]:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"sha256={digest}", str(len(data))


# ---- extension modules


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


def binary_problems(binary: Binary, architecture: str, glibc: tuple[int, int] = GLIBC) -> Iterator[str]:
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


# ---- smoke test


SCRIPT = Path(__file__).with_name("smoke_test_script.py")
RECORDS = 2000
_NO_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}
_EMULATED_TIMEOUT_S = 300


def smoke_test_problems(wheel: Path, target: Target, folder: Path) -> list[str]:
    """Install `wheel` in a new environment in `folder` and use it; return the problems."""
    core = "python" if target.architecture is None else "compiled"
    venv_python = create_venv(target.python, folder, [])
    pip(venv_python, "install", "--only-binary=:all:", wheel, environment=_NO_COMPILER)
    report = json.loads(run([venv_python, "-I", SCRIPT, str(RECORDS)], folder=folder))
    return [*_report_problems(report, core, "x86_64", folder), *_doctor_problems(folder, core)]


def emulated_problems(wheel: Path, target: Target, python: str, folder: Path) -> list[str]:
    """Unpack `wheel` and its dependencies in `folder`, use it with the command `python`; return the problems."""
    pip(
        target.python.path, "install", "--only-binary=:all:", "--target", folder, "--implementation", "cp",
        "--python-version", target.python.minor, *_platforms(str(target.architecture)), wheel,
    )  # fmt: skip
    runner = (
        f"import runpy, sys; sys.path.insert(0, {str(folder)!r}); runpy.run_path({str(SCRIPT)!r}, None, '__main__')"
    )
    report = json.loads(
        run([*python.split(), "-I", "-c", runner, str(RECORDS)], folder=folder, timeout_s=_EMULATED_TIMEOUT_S)
    )
    return _report_problems(report, "compiled", str(target.architecture), folder)


def minor_version(python: str) -> str:
    """Return the minor version, such as "3.11", of the interpreter that the command `python` runs."""
    return run([*python.split(), "-I", "-c", "import sys; print('{}.{}'.format(*sys.version_info))"]).strip()


def _platforms(architecture: str) -> list[str]:
    """Return pip's options for the platform tags that dependencies may have, newest glibc first."""
    accepted = [f"manylinux_2_{minimum}_{architecture}" for minimum in (28, 27)]
    return [f"--platform={name}" for name in (*accepted, platform_tag(architecture), f"manylinux2014_{architecture}")]


def _report_problems(report: dict[str, object], core: str, machine: str, folder: Path) -> list[str]:
    expected = {"core": core, "codec": core, "records": RECORDS, "machine": machine}
    smoke_test_problems = [
        f"{name} is {report[name]}, not {value}" for name, value in expected.items() if report[name] != value
    ]
    outside = not Path(str(report["path"])).is_relative_to(folder.resolve())
    return smoke_test_problems + [f"the core is {report['path']}, which is not in {folder}"] * outside


def _doctor_problems(folder: Path, core: str) -> list[str]:
    """Return the differences between `core` and the cores that `nnfmq doctor` reports.

    Raises:
        BuildError: If `nnfmq doctor` fails, because nnfmq is not usable.
    """
    report = json.loads(run([folder / "bin" / "nnfmq", "doctor", "--json"], folder=folder))
    found = {finding["name"]: finding["value"] for finding in report["findings"]}
    names = ("queue core", "packet codec")
    return [f"nnfmq doctor reports {name} {found[name]}, not {core}" for name in names if found[name] != core]
