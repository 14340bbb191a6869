"""Start and end an embedded driver: a private process of this application, connected by a socketpair.

It is started with `subprocess`, because `multiprocessing` would import the application's `__main__` again and fail in a
script without a `__main__` guard. PR_SET_PDEATHSIG is not used: it fires when the *thread* that created the child exits
(prctl(2)). The child exits when this end of the socketpair is closed, also by the exit of this process.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from nnfmq.base import settings
from nnfmq.base.channel import Channel
from nnfmq.base.paths import perf_map_path
from nnfmq.base.processes import child_environment

END_SECONDS = 2.0


class _DriverProcess(subprocess.Popen[bytes]):
    """A process that ends with its connection. At the interpreter's exit only that connection's finalizer warns."""

    def __del__(self) -> None:
        if not sys.is_finalizing():
            super().__del__()  # type: ignore[misc]  # typeshed does not declare it


def start_embedded_driver(variables: Mapping[str, str]) -> tuple[Channel, subprocess.Popen[bytes]]:
    """Start the driver; return the client's end of the control channel and the process. The caller owns both.

    `variables` are added to its environment.
    """
    client_end, driver_end = Channel.pair()
    try:
        with driver_end:
            # -P: the child must not import modules from the application's working directory.
            process = _DriverProcess(
                [sys.executable, "-P", "-m", "nnfmq", "--embedded", str(driver_end.fileno())],
                pass_fds=[driver_end.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=child_environment(variables),
            )
    except BaseException:
        client_end.close()
        raise
    return client_end, process


def end_embedded_driver(process: subprocess.Popen[bytes], has_started: bool = True) -> None:
    """Wait for a driver whose connection is closed, up to 2 s; then kill it. At once if it has not started."""
    if not has_started or not _exits_in_time(process):
        process.kill()  # one that has not started does not read its connection yet
    process.wait()
    if settings.PERF_MAP.value():
        with suppress(OSError):  # it has none, or has removed it
            os.unlink(perf_map_path(process.pid))


def _exits_in_time(process: subprocess.Popen[bytes]) -> bool:
    """Wait for the exit. `Popen.wait` with a timeout would look for it at intervals of up to 50 ms."""
    if process.poll() is not None:
        return True
    pidfd = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(END_SECONDS * 1e3))
    finally:
        os.close(pidfd)
