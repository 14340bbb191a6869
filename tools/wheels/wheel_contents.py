"""Checks of a wheel's files: the package's files, its extension modules, man pages, a correct RECORD, nothing else.

`problems` returns one sentence for each problem. The files are compared with git's at HEAD, which finds both a missing
`py.typed` and a generated `.c`. `elf_checks` checks the extension modules themselves.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
from collections.abc import Iterable, Iterator
from email import message_from_string
from pathlib import Path, PurePosixPath
from zipfile import BadZipFile, ZipFile

from man_pages import page_names

from wheels.build import Target

MAN_FOLDER = "share/man/man1"
METADATA = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt")


def problems(wheel: Path, target: Target, tracked: Iterable[str]) -> list[str]:
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
