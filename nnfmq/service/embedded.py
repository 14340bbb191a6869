"""The embedded driver: one private process for one application, over a socketpair, without supervisor or forkserver.

    python -P -m nnfmq --embedded FD

It ends with its client: on the end of its socketpair, or when the client's process ends. Imports are kept few: its
start is part of the time to the first result.
"""

from __future__ import annotations

from typing import NoReturn

from nnfmq.channel import Channel
from nnfmq.service.extensions import load_extensions
from nnfmq.service.session import run_session


def main(control_fd: int) -> NoReturn:
    """Serve the client at the other end of `control_fd` until it is gone."""
    load_extensions()
    run_session(Channel.adopt(control_fd), driver_name="embedded")
