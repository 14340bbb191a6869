"""A checksum of the sources of a compiled module, in a file beside it that the build of a source tree writes.

setup.py loads this file by its path, so it imports nothing of the package.
"""

from __future__ import annotations

import zlib
from pathlib import Path

__all__ = ["changed_since_build", "write_stamp"]

_PACKAGE = Path(__file__).resolve().parents[1]


def _sources(module: Path) -> list[Path]:
    """Return the sources of the compiled module with this path."""
    source = module.with_name(module.name.partition(".")[0] + ".pyx")
    return [source, *sorted(module.parent.glob("*.h")), *sorted(_PACKAGE.glob("*.h"))]


def _checksum(module: Path) -> str:
    return f"{zlib.crc32(b''.join(path.read_bytes() for path in _sources(module))):08x}"  # no OpenSSL is loaded


def _stamp(module: Path) -> Path:
    return module.with_suffix(".stamp")


def write_stamp(module: Path) -> None:
    """Write the checksum of the sources of a module that has been built from them. Raises OSError."""
    _stamp(module).write_text(_checksum(module))


def changed_since_build(module: Path) -> bool:
    """Return whether the sources differ from those that a module was built from; False if there are none.

    The checksums are compared only if a source is newer, as after a change of the branch.
    """
    try:
        built_ns = module.stat().st_mtime_ns
        if all(path.stat().st_mtime_ns <= built_ns for path in _sources(module)):
            return False
        return _stamp(module).read_text() != _checksum(module)
    except FileNotFoundError:  # of the stamp: a build that wrote none; of a source: no source tree
        return all(path.is_file() for path in _sources(module))
