"""`python -m nnfmq`: the command line, and the way in for an embedded driver (`--embedded FD`).

`--embedded` is looked at before anything else is imported: an application that waits for its first result pays for
every module that this process loads. The command line itself lives in `nnfmq.cli`.
"""

from __future__ import annotations

import sys


def _start() -> int:
    if sys.argv[1:2] == ["--embedded"]:
        from nnfmq.service.embedded_main import main as serve_embedded

        serve_embedded(int(sys.argv[2]))  # never returns
    from nnfmq.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(_start())
