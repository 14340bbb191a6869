"""A worker: the process that owns everything of one client. The supervisor starts it, the client's end ends it.

It gets its sockets from the forkserver and from then on depends on nobody: it outlives a killed supervisor. SIGTERM
(the supervisor's clean end) and the client's death both end it at once, with everything it held. The devices' status is
in a page that all workers of a driver map; compiled programs they share by way of the supervisor (`service.caching`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from nnfmq.channel import Channel
from nnfmq.memory import Memory
from nnfmq.service import compile_jobs
from nnfmq.service.caching import shared_cache_client
from nnfmq.service.device_configuration import DeviceEntry
from nnfmq.service.device_registry import make_devices
from nnfmq.service.session import run_session


def take_fd(passed: Any) -> int:
    """Return the fd that `multiprocess` duplicated into this process."""
    return int(passed.detach())


def main(control_fd: int, status_fd: int, sharing_fd: int, configured: Sequence[DeviceEntry]) -> NoReturn:
    """Serve the client at the other end of `control_fd`, with the configured devices and those of plug-ins.

    `status_fd` is the page with the devices' status, `sharing_fd` the connection for what workers share.
    """
    if any(entry.engine == "compiled" for entry in configured):
        compile_jobs.start_compile_server()
    shared_cache_client.connect(sharing_fd)
    devices = make_devices(configured)
    devices.share_status(Memory.adopt(status_fd).view)
    run_session(Channel.adopt(control_fd), "nnfmq", devices)
