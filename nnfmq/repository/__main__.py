"""`python -P -m nnfmq.repository`: the model repository, or with `--import` the import of one version.

    --serve FD HEARTBEAT SOCKET DIRECTORY   FD: the listening socket of the repository; HEARTBEAT: the eventfd that
                                            shows the supervisor that it answers; SOCKET: that of the driver
    --import FD DIRECTORY SOCKET            FD: the connection to the repository; DIRECTORY: the version's; SOCKET:
                                            the driver's

Only a driver and its repository start it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nnfmq.base import logs
from nnfmq.base.processes import set_name
from nnfmq.base.scheduling import lower_priority


def _start(arguments: list[str]) -> None:
    set_name("nnfmq-import" if arguments[0] == "--import" else "nnfmq-models")
    logs.configure()
    if arguments[0] == "--import":
        from nnfmq.repository.version_import import import_in_child

        _, fd, directory, socket = arguments
        import_in_child(int(fd), Path(directory), Path(socket) if socket else None)
        return
    # A start takes a second of a CPU, and its messages wait for executions rather than these for them.
    lower_priority(is_background=False)
    from nnfmq.base.channel import Listener
    from nnfmq.repository.models import DriverModels, ModelDirectory
    from nnfmq.repository.repository import ModelRepository
    from nnfmq.repository.server import RepositoryServer

    _, fd, heartbeat_fd, socket, directory = arguments
    server = RepositoryServer(Listener.adopt(int(fd)), int(heartbeat_fd))
    ModelRepository(ModelDirectory(Path(directory)), DriverModels(Path(socket)), server).run()


if __name__ == "__main__":
    _start(sys.argv[1:])
