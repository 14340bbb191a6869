"""Drivers in whose environment a package is not installed, although it is in this one."""

from __future__ import annotations

WITHOUT_LLVMLITE = """
from nnfmq.base.packages import InstalledPackages
version = InstalledPackages.version
InstalledPackages.version = lambda self, package: None if package == "llvmlite" else version(self, package)
"""
"""The text of a `sitecustomize` module, for a folder on the driver's $PYTHONPATH."""
