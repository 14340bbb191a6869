"""The tools are scripts beside the package: their folder goes on the path, as when they are run."""

from __future__ import annotations

import sys

from support.places import ROOT

sys.path.insert(0, str(ROOT / "tools"))
