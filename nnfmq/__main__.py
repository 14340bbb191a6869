"""`python -m nnfmq`: the commands (`nnfmq.cli`), or a process of a driver: `--embedded`, `--worker` or `--compile`.

`--embedded` is checked before any other import: each module that this process loads delays the application's first
result. So do collections of garbage: a tenth of the imports' time, and there is no garbage yet.
"""

from __future__ import annotations

import gc
import sys


def _start() -> int:
    if sys.argv[1:2] == ["--embedded"]:
        gc.disable()  # until the driver serves
        from nnfmq.driver.process.embedded import main as serve_embedded

        serve_embedded(int(sys.argv[2]))  # never returns
    if sys.argv[1:2] == ["--worker"]:
        gc.disable()  # until the worker serves
        from nnfmq.driver.process.worker_program import main as serve_client

        serve_client(*sys.argv[2:])  # never returns
    if sys.argv[1:2] == ["--compile"]:
        from nnfmq.driver.compilation.unfinished import main as compile_models

        return compile_models(sys.argv[2:])
    from nnfmq.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(_start())
