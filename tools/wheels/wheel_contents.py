"""What lies in a wheel: the files of the package, its extension modules, true records, and nothing else.

`faults` returns sentences; an empty list is a good wheel. The files are compared with those that git has at HEAD: a
missing `py.typed` and a translated `.c` are found by the same comparison. What the binaries ask for is `binary`'s.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from collections.abc import Iterable, Iterator
from email import message_from_string
from pathlib import Path, PurePosixPath
from zipfile import BadZipFile, ZipFile

from wheels.build import Target

METADATA = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt")


def faults(wheel: Path, target: Target, tracked: Iterable[str]) -> list[str]:
    """Return what is wrong with a wheel for `target`, whose package should have the files `tracked`."""
    try:
        with ZipFile(wheel) as opened:
            return [*_unlike(opened, target, set(tracked)), *_mistagged(opened, target), *record_faults(opened)]
    except (BadZipFile, KeyError, UnicodeDecodeError, csv.Error) as error:
        return [f"cannot be read: {error!r}"]


def record_faults(wheel: ZipFile) -> Iterator[str]:
    """Compare RECORD with what is there: every file, its SHA-256 and its size, and no other."""
    record = info(wheel, "RECORD")
    rows = {row[0]: tuple(row[1:]) for row in csv.reader(io.StringIO(wheel.read(record).decode()))}
    names = wheel.namelist()
    yield from (f"{name} is in the wheel twice" for name in sorted({name for name in names if names.count(name) > 1}))
    yield from (f"{name} is not in RECORD" for name in sorted(set(names) - set(rows)))
    yield from (f"{name} is in RECORD and not in the wheel" for name in sorted(set(rows) - set(names)))
    for name in sorted(set(names) & set(rows)):
        expected = ("", "") if name == record else _digest(wheel.read(name))
        if rows[name] != expected:
            yield f"RECORD has {rows[name]} for {name}, which is {expected}"


def info(wheel: ZipFile, name: str) -> str:
    """Return the path of a file of the wheel's metadata. Raises KeyError where there is none."""
    found = [path for path in wheel.namelist() if path.endswith(f".dist-info/{name}")]
    if len(found) != 1:
        raise KeyError(f"one .dist-info/{name} is needed, there are {len(found)}")
    return found[0]


def binaries(tracked: Iterable[str], target: Target) -> set[str]:
    """Return the paths of the extension modules that a wheel for `target` must have."""
    if target.architecture is None:
        return set()
    sources = [PurePosixPath(name) for name in tracked if name.endswith(".pyx")]
    return {str(source.with_suffix("")) + target.suffix for source in sources}


def _unlike(wheel: ZipFile, target: Target, tracked: set[str]) -> Iterator[str]:
    expected = tracked | binaries(tracked, target)
    there = {name for name in wheel.namelist() if ".dist-info/" not in name}
    yield from (f"{name} is missing" for name in sorted(expected - there))
    yield from (f"{name} does not belong in it" for name in sorted(there - expected))
    for name in METADATA:
        info(wheel, name)


def _mistagged(wheel: ZipFile, target: Target) -> Iterator[str]:
    header = message_from_string(wheel.read(info(wheel, "WHEEL")).decode())
    tags, pure = header.get_all("Tag"), header["Root-Is-Purelib"]
    if tags != [target.tag]:
        yield f"WHEEL has the tags {tags}, not {target.tag}"
    if pure != ("true" if target.architecture is None else "false"):
        yield f"WHEEL has Root-Is-Purelib: {pure}"


def _digest(data: bytes) -> tuple[str, str]:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"sha256={digest}", str(len(data))
