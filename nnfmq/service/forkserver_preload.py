"""Imports of the forkserver, executed once before it forks the first worker. Imported only there, for its effects.

Importing this module loads everything that a session needs, including plug-ins with extensions and the compiling
engine, so that a worker starts in milliseconds. It also registers a check that the forkserver has one thread before
each fork: a forked child inherits locks that other threads hold, but not the threads that would release them. BLAS
would start threads when numpy is imported; the supervisor sets OPENBLAS_NUM_THREADS=1 in this process's environment.
"""

from __future__ import annotations

import os
from contextlib import suppress

import nnfmq.service.session
import nnfmq.service.worker
from nnfmq.service.caching.compilation_cache import build_identity
from nnfmq.service.extension_plugins import load_extensions


def _require_one_thread() -> None:
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:
        # An exception in a fork handler is printed and ignored. Exit instead: the supervisor starts a new forkserver.
        os.write(2, f"nnfmq: the forkserver must have one thread when it forks, it has {len(threads)}\n".encode())
        os._exit(70)


load_extensions()
with suppress(ImportError, OSError):  # llvmlite need not be installed, or not support this machine
    import nnfmq.engines.compiled.partition  # noqa: F401
    from nnfmq.engines.compiled.kernel_serialization import warm_up

    warm_up()
build_identity()
os.register_at_fork(before=_require_one_thread)
