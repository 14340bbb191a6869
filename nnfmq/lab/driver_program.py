"""The program of a listening driver: `python -m nnfmq.lab.driver_program SOCKET` becomes `nnfmq serve --socket SOCKET`.

The driver gets SIGTERM when its stdin, a pipe from its parent, is closed: the kernel sends it to the owner of a file
with O_ASYNC. A thread that reads stdin is impossible, because a supervisor has one thread. Core files are disabled.
It is a module of its own, because it imports nothing that a driver would wait for.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import sys

_LOG = {"NNFMQ_LOG_LEVEL": "warning", "NNFMQ_LOG_FORMAT": "text"}
"""The driver is a part of the command whose stderr it has."""
_F_SETSIG = 10  # of Linux; the module fcntl has no name for it


def main(socket: str) -> None:
    """Replace this process by the driver. Does not return, unless the parent has exited already."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for variable, value in _LOG.items():
        os.environ.setdefault(variable, value)
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, _F_SETSIG, signal.SIGTERM)
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    if not poll.poll(0):  # otherwise the parent has exited before the signal was requested
        os.execv(sys.executable, [sys.executable, "-P", "-m", "nnfmq", "serve", "--socket", socket])


if __name__ == "__main__":
    main(sys.argv[1])
