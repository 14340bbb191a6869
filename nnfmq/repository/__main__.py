"""`python -P -m nnfmq.repository`: the model repository, or with `--import` the import of one version.

    --serve STAMP FD HEARTBEAT SOCKET DIRECTORY
    --import STAMP FD DIRECTORY SOCKET

STAMP is that of the driver's package (`base.upgrades`), SOCKET that of the driver. FD is the listening socket of the
repository, or the connection to it; HEARTBEAT the pipe that shows the supervisor that the repository answers; DIRECTORY
that of the models, or of the version. It logs to its stderr, as records. Only a driver and its repository start it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nnfmq.base.log_records import configure_child
from nnfmq.base.processes import set_name
from nnfmq.base.scheduling import lower_priority
from nnfmq.base.upgrades import watch_package


def _start(option: str, stamp: str, *arguments: str) -> None:
    set_name("nnfmq-import" if option == "--import" else "nnfmq-models")
    watch_package(stamp)
    configure_child()
    if option == "--import":
        fd, directory, socket = arguments
        from nnfmq.repository.version_import import import_in_child

        import_in_child(int(fd), Path(directory), Path(socket) if socket else None)
        return
    fd, heartbeat_fd, socket, directory = arguments
    # A start takes a second of a CPU, and its messages wait for executions rather than these for them.
    lower_priority(is_background=False)
    from nnfmq.base.channel import Listener
    from nnfmq.repository.models import DriverModels, ModelDirectory
    from nnfmq.repository.repository import ModelRepository
    from nnfmq.repository.server import RepositoryServer

    server = RepositoryServer(Listener.adopt(int(fd)), int(heartbeat_fd))
    ModelRepository(ModelDirectory(Path(directory)), DriverModels(Path(socket)), server).run()


if __name__ == "__main__":
    _start(*sys.argv[1:])
