"""The embedded driver: one private process for one application, over a socketpair, without supervisor or forkserver.

    python -P -m nnfmq --embedded FD

It ends with its client: on the end of its socketpair, or when the client's process ends. Imports are kept few: its
start is part of the time to the first result.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import NoReturn

from nnfmq.channel import NO_WAIT, Channel
from nnfmq.hal.errors import ErrorStatus, InvalidArgument, NnfmqError
from nnfmq.serialize import control_protocol, messages
from nnfmq.service import compile_jobs
from nnfmq.service.device_registry import load_devices
from nnfmq.service.extension_plugins import load_extensions
from nnfmq.service.session import run_session


def main(control_fd: int) -> NoReturn:
    """Serve the client at the other end of `control_fd` until it is gone; refuse it where devices cannot be read."""
    compile_jobs.start_compile_server()
    load_extensions()
    channel = Channel.adopt(control_fd)
    try:
        devices = load_devices()
    except (InvalidArgument, OSError) as error:
        with suppress(NnfmqError):  # it may be gone already
            channel.send(
                control_protocol.encode(messages.Refused(ErrorStatus.GENERAL_FAILURE, str(error))), (), NO_WAIT
            )
        sys.exit(1)
    run_session(channel, "embedded", devices)
