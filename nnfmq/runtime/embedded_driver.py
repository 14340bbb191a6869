"""Start and end an embedded driver: a private process of this application, connected by a socketpair.

It is started with `subprocess`, because `multiprocessing` would import the application's `__main__` again and fail in a
script without a `__main__` guard. PR_SET_PDEATHSIG is not used: it fires when the *thread* that created the child exits
(prctl(2)). The child exits when this end of the socketpair is closed, also by the exit of this process.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from nnfmq.channel import Channel

_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
END_SECONDS = 2.0


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the child's environment: one BLAS thread (idle ones spin), and this copy of nnfmq importable."""
    environment = {**os.environ, **dict.fromkeys(_ONE_THREAD, "1"), **variables}
    root = str(Path(__file__).parents[2])
    if root not in (*site.getsitepackages(), site.getusersitepackages()):
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = root if not inherited else f"{root}{os.pathsep}{inherited}"
    return environment


def start_embedded_driver(variables: Mapping[str, str]) -> tuple[Channel, subprocess.Popen[bytes]]:
    """Start the driver; return the client's end of the control channel and the process. The caller owns both.

    `variables` are added to its environment.
    """
    client_end, driver_end = Channel.pair()
    try:
        with driver_end:
            # -P: the child must not import modules from the application's working directory.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "nnfmq", "--embedded", str(driver_end.fileno())],
                pass_fds=[driver_end.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=_environment(variables),
            )
    except BaseException:
        client_end.close()
        raise
    return client_end, process


def end_embedded_driver(process: subprocess.Popen[bytes]) -> None:
    """Wait for a driver whose connection is closed, up to 2 s; then kill it."""
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
