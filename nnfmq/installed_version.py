"""The installed version of a Python package, nnfmq included."""

from __future__ import annotations

__all__ = ["installed_version"]


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed, as nnfmq in a bare source tree."""
    from importlib import metadata  # it takes 10 ms

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
