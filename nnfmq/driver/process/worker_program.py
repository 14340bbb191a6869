"""`python -P -m nnfmq --worker`: a worker that is a program of its own begins (`executed_worker`).

This module imports little: the driver's settings must be in effect before the modules are imported that read some.
"""

from __future__ import annotations

import logging
import os
from typing import Any, NoReturn

from msgspec import msgpack

from nnfmq.base import settings
from nnfmq.base.log_records import configure_child
from nnfmq.base.processes import set_name
from nnfmq.base.upgrades import watch_package


def main(stamp: str, start: str) -> NoReturn:
    """Serve a client, as the memfd `start` says. Never returns.

    `stamp` is that of the supervisor's package.
    """
    set_name("nnfmq-worker")
    watch_package(stamp)
    with open(int(start), "rb") as file:  # closed: a worker keeps nothing that it does not need
        file_values, arguments = msgpack.decode(file.read(), type=tuple[dict[str, tuple[Any, str]], bytes])
    settings.use_file_values(file_values)
    configure_child()
    try:
        from nnfmq.driver.process.executed_worker import serve

        serve(arguments)
    except BaseException:
        logging.getLogger("nnfmq.worker").critical("an internal error ends this process", exc_info=True)
    os._exit(os.EX_SOFTWARE)  # no exit handlers, as a forked worker has none
