"""Upgrades of nnfmq under a running driver: they are noticed, and no process of the driver has code of two versions.

An upgrade replaces the files of the package. A driver goes on with what it has loaded. Each of its processes calls
`watch_package` when it begins; from then on it loads no more modules of nnfmq once the files are others, and starts no
interpreter that would. An interpreter that is being started meanwhile gets the stamp of its parent's files.

The files are compared by those of `nnfmq/__init__.py`, which every installer replaces. So a change of other files in a
source tree is not noticed.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from nnfmq.base.packages import installed_version
from nnfmq.hal.errors import DeviceUnavailable

__all__ = ["loaded_stamp", "require_unchanged", "upgrade_text", "was_upgraded", "watch_package"]

_FILE: Final = os.path.join(os.path.dirname(os.path.dirname(__file__)), "__init__.py")
_PREFIX: Final = "nnfmq."


class _Package:
    stamp = ""
    """Of the files that this process has loaded; empty: nobody watches them."""


class _Guard:
    """A finder of sys.meta_path that finds nothing, and refuses modules of another version."""

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        if name.startswith(_PREFIX):
            require_unchanged()


def watch_package(stamp: str = "") -> None:
    """Load no module of nnfmq from now on if its files were replaced. Idempotent.

    `stamp` is that of the process that has started this one.

    Raises:
        DeviceUnavailable: If they were replaced since that has begun.
    """
    if not _Package.stamp:
        sys.meta_path.insert(0, _Guard())
    _Package.stamp = stamp or _stamp()
    require_unchanged()


def loaded_stamp() -> str:
    """Return the stamp for a process that this one starts."""
    return _Package.stamp or _stamp()


def _stamp() -> str:
    """Return a text that changes when the files of the package are replaced."""
    try:
        found = os.stat(_FILE)
    except OSError:
        return "removed"
    return f"{found.st_dev:x}-{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"


def was_upgraded() -> bool:
    """Return whether the files were replaced since this process began; False if nobody watches them."""
    return bool(_Package.stamp) and _stamp() != _Package.stamp


def require_unchanged() -> None:
    """Raise DeviceUnavailable if the files were replaced since this process began, and would be loaded now."""
    if was_upgraded():
        raise DeviceUnavailable(f"{upgrade_text()}; this needs code that it has not loaded")


def upgrade_text() -> str:
    """Return the state of the package on disk, and what to do, as a sentence without its end."""
    version = installed_version("nnfmq")
    what = f"nnfmq {version} was installed" if version else "nnfmq was replaced or removed"
    kept = "which goes on with the code that it has loaded"
    return f"{what} while this driver ran, {kept}: restart it (`nnfmq serve --restart`)"
