"""`python -P -m nnfmq --worker`: a worker that is a program of its own begins (`executed_worker`).

This module imports little: the driver's settings must be in effect before the modules are imported that read some.
"""

from __future__ import annotations

import logging
import os
from typing import Any, NoReturn

from msgspec import msgpack

from nnfmq.base import logs, settings
from nnfmq.base.processes import set_name
from nnfmq.base.upgrades import watch_package


def main(stamp: str, log: str, start: str) -> NoReturn:
    """Serve a client, as the memfd `start` says, with the log at the fd `log`. Never returns.

    `stamp` is that of the supervisor's package.
    """
    set_name("nnfmq-worker")
    watch_package(stamp)
    with open(int(start), "rb") as file:  # closed: a worker keeps nothing that it does not need
        file_values, arguments = msgpack.decode(file.read(), type=tuple[dict[str, tuple[Any, str]], bytes])
    settings.use_file_values(file_values)
    os.set_inheritable(int(log), False)
    logs.configure(int(log))
    try:
        from nnfmq.driver.process.executed_worker import serve

        serve(arguments)
    except BaseException:
        logging.getLogger("nnfmq.worker").critical("an internal error ends this process", exc_info=True)
    os._exit(os.EX_SOFTWARE)  # no exit handlers, as a forked worker has none
