"""A worker: the driver process that serves one client and owns all its objects.

The supervisor starts it through the forkserver. From then on it depends on the client alone, and outlives a killed
supervisor. SIGTERM (from the supervisor) and the client's exit both end it immediately, with everything that it owns.
The workers of a driver share one page with the devices' status, and compiled programs (`service.caching`).
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
from nnfmq.service.driver_options import DriverOptions
from nnfmq.service.session import run_session


def detach_fd(passed: Any) -> int:
    """Return the fd that `multiprocess` duplicated into this process, which the caller owns."""
    return int(passed.detach())


def main(
    control_fd: int, status_fd: int, shared_cache_fd: int, entries: Sequence[DeviceEntry], options: DriverOptions
) -> NoReturn:
    """Serve one client with the configured devices and those of plug-ins. Takes ownership of the fds. Never returns.

    Args:
        control_fd: The connection to the client.
        status_fd: The memory of the devices' status, STATUS_PAGE_BYTES.
        shared_cache_fd: The connection to the supervisor's shared program cache.
        entries: The devices of the configuration.
        options: What the session needs to know of the driver.
    """
    if any(entry.engine == "compiled" for entry in entries):
        compile_jobs.start_compile_server()  # first: it forks, so this process must have one thread
    shared_cache_client.connect(shared_cache_fd)
    devices = make_devices(entries)
    devices.share_status(Memory.adopt(status_fd).view)
    run_session(Channel.adopt(control_fd), "nnfmq", devices, options)
