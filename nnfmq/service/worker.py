"""A worker: the process that owns everything of one client. The supervisor starts it, the client's end ends it.

It gets its socket from the forkserver and from then on depends on nobody: it outlives a killed supervisor. SIGTERM
(the supervisor's clean end) and the client's death both end it at once, with everything it held.
"""

from __future__ import annotations

from typing import Any, NoReturn

from nnfmq.channel import Channel
from nnfmq.service.session import run_session


def take_fd(passed: Any) -> int:
    """Return the fd that `multiprocess` duplicated into this process."""
    return int(passed.detach())


def main(control_fd: int) -> NoReturn:
    """Serve the client at the other end of `control_fd`."""
    run_session(Channel.adopt(control_fd), driver_name="nnfmq")
