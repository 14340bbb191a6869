"""The process that compiles models whose client has left (`unfinished_compilation`).

    python -P -m nnfmq --compile LIMIT_S LOCK_FD REQUESTS_FD POOL_FD...

It has no connection to anybody, and its standard streams are /dev/null. SIGALRM ends it after LIMIT_S seconds. A
program that is in the cache meanwhile, because another worker has compiled it, is not compiled again.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence

import msgspec

from nnfmq.hal.errors import NnfmqError
from nnfmq.serialize.model_codec import decode_model
from nnfmq.service.builtin_devices import CompiledDevice
from nnfmq.service.compile_jobs import PrepareContext, prepare_context
from nnfmq.service.compile_priority import lower_priority, lower_session_priority
from nnfmq.service.device_configuration import DeviceEntry
from nnfmq.service.memory_quota import adopt_files
from nnfmq.service.private_memory import copy_constant_pools
from nnfmq.service.unfinished_compilation import CompileRequest

__all__ = ["main"]

_log = logging.getLogger("nnfmq.background_compile")


def main(words: Sequence[str]) -> int:
    """Compile what the arguments say, and return the exit status. The lock is held until the process exits."""
    limit_s, (_lock_fd, requests_fd, *pool_fds) = float(words[0]), list(map(int, words[1:]))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    os.chdir("/")  # keep no file system in use
    lower_priority(is_background=True)
    lower_session_priority()
    deadline_ns = time.monotonic_ns() + int(limit_s * 1e9)
    with prepare_context(PrepareContext(deadline_ns, is_background=True)):
        for request, fds in _received(requests_fd, pool_fds):
            try:
                _compile(request, fds)
            except NnfmqError as error:
                _log.warning("a model whose client has left is not compiled: %s", error)
    return 0


def _received(requests_fd: int, pool_fds: list[int]) -> Iterator[tuple[CompileRequest, list[int]]]:
    data = os.pread(requests_fd, os.fstat(requests_fd).st_size, 0)
    for request in msgspec.msgpack.decode(data, type=list[CompileRequest]):
        yield request, [pool_fds.pop(0) for _ in request.pools]


def _compile(request: CompileRequest, fds: list[int]) -> None:
    """Compile a model into the cache. Raises NnfmqError. The client is not trusted: everything is checked again."""
    device = CompiledDevice(DeviceEntry(request.device, engine="compiled"))
    pools = copy_constant_pools(adopt_files(fds, request.pools), _no_check)
    model = decode_model(request.model, pools, _no_check)
    device.prepare_model(device.check_prepare_arguments(model, *_ANY))


_ANY = (0, 0, None)  # preference and priority do not change the program; no deadline


def _no_check() -> None:
    """Go on: nobody waits for the model."""
