"""Start and end an embedded driver: a private process of this application, connected by a socketpair.

It is started with `subprocess`, because `multiprocessing` would import the application's `__main__` again and fail in a
script without a `__main__` guard. PR_SET_PDEATHSIG is not used: it fires when the *thread* that created the child exits
(prctl(2)). The child exits when this end of the socketpair is closed, also by the exit of this process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from nnfmq.base import settings
from nnfmq.base.channel import Channel
from nnfmq.base.paths import perf_map_path
from nnfmq.base.processes import child_environment, exits_within, kill_and_reap

END_SECONDS = 2.0


class _DriverProcess(subprocess.Popen[bytes]):
    """A process that ends with its connection. At the interpreter's exit only that connection's finalizer warns."""

    def __del__(self) -> None:
        if not sys.is_finalizing():
            super().__del__()


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
    is_slow = not has_started or not exits_within(process, END_SECONDS)
    if is_slow and not kill_and_reap(process):  # one that has not started does not read its connection yet
        return
    process.wait()
    if settings.PERF_MAP.value():
        with suppress(OSError):  # it has none, or has removed it
            os.unlink(perf_map_path(process.pid))
