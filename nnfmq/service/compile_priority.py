"""The CPU priority of compile processes: below that of the workers, whose executions they would delay otherwise.

A process lowers its priority before it compiles, and keeps it: raising it again needs CAP_SYS_NICE. The kernel weighs
processes by their nice value within one scheduling group. With autogroups (CONFIG_SCHED_AUTOGROUP) each session is a
group of its own, and the groups are weighed by values of their own; so the compile server lowers that of its session,
too. See docs/explanation/scheduling.md for the values.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

__all__ = ["BACKGROUND_NICE", "FOREGROUND_NICE", "lower_priority", "lower_session_priority"]

FOREGROUND_NICE: Final = 5
"""How much a process is nicer than the driver while a caller waits for the compilation: a third of the weight."""
BACKGROUND_NICE: Final = 10
"""The same if the model executes meanwhile on its baseline program: a ninth of the weight."""
_AUTOGROUP = Path("/proc/self/autogroup")


def lower_priority(is_background: bool) -> None:
    """Lower the priority of the calling thread, and of the threads that it starts. Call it once, before these."""
    os.nice(BACKGROUND_NICE if is_background else FOREGROUND_NICE)


def lower_session_priority() -> bool:
    """Lower the priority of this process's session; return False if a later call may succeed.

    For users without CAP_SYS_ADMIN the kernel changes one session in 0.1 s.
    """
    try:
        _AUTOGROUP.write_text(str(FOREGROUND_NICE))
    except OSError as error:  # a kernel without autogroups, or a sandbox
        return error.errno != errno.EAGAIN
    return True
