"""What the forkserver imports before it forks the first worker; imported for its effects, there and nowhere else.

It loads all that a session needs, plug-ins with extensions and the compiling engine too, so that a worker is ready in
milliseconds, and asserts before each fork that the forkserver has one thread: a fork copies locks held by others, and
nobody to release them.
BLAS would start threads when numpy is imported; the supervisor sets OPENBLAS_NUM_THREADS=1 in the environment that
this process inherits.
"""

from __future__ import annotations

import os
from contextlib import suppress

import nnfmq.service.session
import nnfmq.service.worker
from nnfmq.service.caching.compilation_cache import build_identity
from nnfmq.service.extension_plugins import load_extensions


def _assert_one_thread() -> None:
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:
        # An exception would be printed and the fork go on: end here, the supervisor starts a new forkserver.
        os.write(2, f"nnfmq: the forkserver must have one thread when it forks, it has {len(threads)}\n".encode())
        os._exit(70)


load_extensions()
with suppress(ImportError, OSError):  # what compiles need not be installed, or not for this machine
    import nnfmq.engines.compiled.partition  # noqa: F401
    from nnfmq.engines.compiled.warm_up import warm_up

    warm_up()
build_identity()
os.register_at_fork(before=_assert_one_thread)
