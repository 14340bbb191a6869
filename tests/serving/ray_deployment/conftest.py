"""The programs of these tests use modules of the tools."""

from __future__ import annotations

import sys

from support.places import ROOT

sys.path.insert(0, str(ROOT / "tools"))
