"""Versions and plug-ins of the installed packages, without importlib.metadata where that is possible.

To import importlib.metadata and to ask it once takes an embedded driver 20 ms or more, which an application waits for.
In a usual environment the packages' metadata are files in the folders of `sys.path`, which are read here. If there may
be packages elsewhere (an archive on `sys.path`, another finder), importlib.metadata is used.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["InstalledPackages", "entry_points_of", "installed_version"]

_ENDINGS = (".dist-info", ".egg-info")
_METADATA_FILES = ("METADATA", "PKG-INFO", "")  # the last is the metadata itself, if that is a file


class InstalledPackages:
    """The packages that are installed when this object is made. Making it blocks."""

    def __init__(self) -> None:
        self._metadata = tuple(_metadata_paths())
        self._is_complete = all(map(_is_folder_or_missing, sys.path)) and not any(map(_finds_packages, sys.meta_path))

    def version(self, package: str) -> str | None:
        """Return the version of a package, None if it is not installed. Blocks."""
        if not self._is_complete:
            return _version_by_importlib(package)
        paths = (path for path in self._metadata if _package_name(path) == _normalized(package))
        return next(filter(None, map(_written_version, paths)), None)

    def have_entry_points(self, groups: Sequence[str]) -> bool:
        """Return whether a package has an entry point of one of these groups. Blocks."""
        if not self._is_complete:
            return any(map(entry_points_of, groups))
        headers = [f"[{group}]" for group in groups]
        texts = (_read(path, "entry_points.txt") for path in self._metadata)
        return any(header in text for text in texts for header in headers)


def entry_points_of(group: str) -> list[EntryPoint]:
    """Return the installed entry points of a group, by importlib.metadata. Blocks."""
    from importlib.metadata import entry_points

    return list(entry_points(group=group))


def _version_by_importlib(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _is_folder_or_missing(path: str) -> bool:
    return os.path.isdir(path or ".") or not os.path.exists(path)


def _finds_packages(finder: object) -> bool:
    """Return whether this finder of sys.meta_path, which is not Python's own, may find packages in other places."""
    return finder is not PathFinder and hasattr(finder, "find_distributions")


def _metadata_paths() -> Iterator[str]:
    """Yield the path of each package's metadata, a folder or a file, in the order in which importlib searches."""
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        is_egg = folder.lower().endswith(".egg")
        for name in names:
            if name.lower().endswith(_ENDINGS) or (is_egg and name.lower() == "egg-info"):
                yield os.path.join(folder, name)


def _package_name(path: str) -> str:
    """Return the normalized name of the package whose metadata are at `path`: `NAME-VERSION.dist-info`, for example."""
    name = os.path.basename(path).lower()
    if name == "egg-info":
        name = os.path.basename(os.path.dirname(path)).lower()
    return _normalized(name.rpartition(".")[0].partition("-")[0])


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def _written_version(path: str) -> str | None:
    """Return the version that a package's metadata state, or None."""
    for file in _METADATA_FILES:
        for line in _read(path, file).splitlines():
            if not line:
                break  # the description follows
            if line.startswith("Version:"):
                return line.partition(":")[2].strip()
    return None


def _read(folder: str, name: str) -> str:
    """Return the text of a file; an empty one if it cannot be read."""
    try:
        with open(os.path.join(folder, name) if name else folder, "rb", buffering=0) as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


# ----------------------------------------------------------------------------------------------------------------------
# The installed version of a Python package, nnfmq included.


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, None if it is not installed: nnfmq in a source tree. Blocks."""
    return InstalledPackages().version(package)
