"""`python tools/wheels`. The folder on `sys.path` is replaced by its parent, so that `wheels` can be imported."""

from __future__ import annotations

import sys
from pathlib import Path


def _main() -> int:
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from wheels.command import main

    return main()


if __name__ == "__main__":
    sys.exit(_main())
