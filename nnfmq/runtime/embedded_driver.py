"""Start an embedded driver: a private process of this application's own, over a socketpair.

`subprocess` and not `multiprocess`, which would import the application's `__main__` again and fail in an unguarded
script. No PR_SET_PDEATHSIG either: it fires when the *thread* that created the child ends. The child ends by itself
when our end of the socketpair is closed, or when this process ends.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
from pathlib import Path

from nnfmq.channel import Channel

_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
END_SECONDS = 2.0


def _environment() -> dict[str, str]:
    """Return the child's environment: BLAS with one thread (its idle threads spin), and this very nnfmq importable."""
    environment = {**os.environ, **dict.fromkeys(_ONE_THREAD, "1")}
    root = str(Path(__file__).parents[2])
    if root not in (*site.getsitepackages(), site.getusersitepackages()):
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = root if not inherited else f"{root}{os.pathsep}{inherited}"
    return environment


def start_embedded_driver() -> tuple[Channel, subprocess.Popen[bytes]]:
    """Start the driver and return our end of its control channel, and the process; the caller owns both."""
    ours, theirs = Channel.pair()
    try:
        with theirs:
            # -P: the child must not import from whatever directory the application happens to run in.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "nnfmq", "--embedded", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=_environment(),
            )
    except BaseException:
        ours.close()
        raise
    return ours, process


def end_embedded_driver(process: subprocess.Popen[bytes]) -> None:
    """Reap a driver whose connection is closed; one that does not end in time is killed."""
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
