"""The embedded driver: a private driver process of one application, without supervisor and forkserver.

    python -P -m nnfmq --embedded FD

It exits when the application exits or closes the connection. It imports little, because its start is part of the time
to the application's first result.

The compile server is forked when this process has imported NumPy and the operations, which that needs too, and before
it imports the rest (`embedded_session`): from then on each page that this process writes to is copied.
"""

from __future__ import annotations

import os
from typing import NoReturn

import nnfmq.engines.interpreter  # noqa: F401  for both processes
from nnfmq.base import logs
from nnfmq.base.channel import Channel
from nnfmq.base.processes import set_name
from nnfmq.base.upgrades import watch_package
from nnfmq.driver.compilation import jobs
from nnfmq.hal.errors import InvalidArgument


def main(control_fd: int) -> NoReturn:
    """Serve the client at the other end of `control_fd` until it exits. Takes ownership of the fd. Never returns."""
    set_name("nnfmq-driver")
    watch_package()
    try:
        logs.configure(is_embedded=True)
    except InvalidArgument:
        pass  # the session checks all settings, and tells the client
    channel = Channel.adopt(control_fd)
    client_pidfd = channel.open_peer_pidfd()
    jobs.start_compile_server(client_pidfd)  # it is forked, so this process must have one thread
    if client_pidfd is not None:
        os.close(client_pidfd)
    from nnfmq.driver.process.embedded_session import serve

    serve(channel)
