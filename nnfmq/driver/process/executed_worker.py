"""A worker with an address layout of its own: an interpreter that is started for it, `python -P -m nnfmq --worker`.

A worker that is only forked has every library, and the heap, where the supervisor and all other workers have them
(docs/explanation/security-model.md). Here the forked child, which has closed its parent's descriptors and dropped its
uid and capabilities already, executes Python again (`execute`). That gets the arguments of `worker.main`, and what a
forked worker finds in the supervisor's memory, in a memfd (`worker_program`), and calls the same function (`serve`). It
maps the shared memory itself.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import select
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from msgspec import Struct, msgpack

from nnfmq.base import settings
from nnfmq.base.accounts import become
from nnfmq.base.channel import Channel
from nnfmq.base.memory import write_to_memfd
from nnfmq.base.processes import child_environment
from nnfmq.base.upgrades import loaded_stamp
from nnfmq.driver.cache.files import given_key, use_key
from nnfmq.driver.devices import installation
from nnfmq.driver.devices.configuration import DeviceEntry
from nnfmq.driver.devices.installation import DriverOptions, Installation
from nnfmq.driver.process import worker
from nnfmq.driver.process.children import read_from_child
from nnfmq.driver.process.pending_clients import reject
from nnfmq.driver.process.worker import WorkerFds, WorkerSetup
from nnfmq.hal.errors import ErrorStatus

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["START_S", "execute", "serve", "why_not_executable"]

START_S = 30.0
"""How long the interpreter may take until it serves, on a busy machine, beside what any worker may take."""
_log = logging.getLogger("nnfmq.worker")


class _Start(Struct, frozen=True):
    """The arguments of `worker.main`, and of the supervisor's memory what a worker would otherwise inherit.

    Attributes:
        plugins: Name, value and group of each entry point.
        installed: What is installed.
        key: The key of the cache, if the worker may not read its file.
    """

    hello: bytes
    fds: WorkerFds
    slot: int
    entries: tuple[DeviceEntry, ...]
    plugins: tuple[tuple[str, str, str], ...]
    options: DriverOptions
    installed: Installation
    key: bytes | None


def execute(hello: bytes, fds: WorkerFds, slot: int, setup: WorkerSetup) -> None:
    """Become an interpreter that calls `worker.main` with these arguments: a forked child of the supervisor.

    If the interpreter cannot be executed, for instance by a uid of workers, the client is told why.

    Raises:
        ResourceExhaustedTransient: If no memory or no fd is left.
    """
    plugins = tuple((entry.name, entry.value, entry.group) for entry in setup.plugins)
    start = _Start(
        hello, fds, slot, tuple(setup.entries), plugins, setup.options, installation.installation(), given_key()
    )
    data = msgpack.encode((settings.all_file_values(), msgpack.encode(start)))
    start_fd = write_to_memfd(data, "nnfmq-start")
    for fd in (start_fd, *fds):
        if fd >= 0:
            os.set_inheritable(fd, True)
    arguments = ["--worker", loaded_stamp(), str(start_fd)]
    try:
        os.execve(sys.executable, [sys.executable, "-P", "-m", "nnfmq", *arguments], child_environment())
    except OSError as error:
        text = f"no worker could be started: uid {os.getuid()} cannot execute {sys.executable}: {error.strerror}"
        _log.error("%s", text)
        reject(Channel.adopt(fds.control), ErrorStatus.GENERAL_FAILURE, text)
        os._exit(os.EX_SOFTWARE)


def why_not_executable(uid: int) -> str:
    """Return the part of Python that a worker with this uid may not execute or read; empty if there is none.

    A child process tries, under that uid. Blocks for some milliseconds.

    Raises:
        GeneralFailure: If this process has several threads.
        OSError: If the system lacks processes, memory or fds.
    """
    files = [each for module in list(sys.modules.values()) if (each := getattr(module, "__file__", None))]
    found, _ = read_from_child(partial(_write_first_closed, files), "nnfmq-access", uid=uid, enter=partial(become, uid))
    return os.fsdecode(found)


def _write_first_closed(files: Sequence[str], fd: int) -> None:
    closed = "" if os.access(sys.executable, os.X_OK) else sys.executable
    closed = closed or next(filter(_is_closed, files), "")
    os.write(fd, os.fsencode(closed)[: select.PIPE_BUF])


def _is_closed(file: str) -> bool:
    try:
        os.stat(file)
    except OSError as error:
        return error.errno == errno.EACCES  # otherwise it is in an archive, or was removed
    return not os.access(file, os.R_OK)


def serve(arguments: bytes) -> NoReturn:
    """Serve a client, as the process that has called `execute` was told."""
    start = msgpack.decode(arguments, type=_Start)
    for fd in start.fds:
        if fd >= 0:
            os.set_inheritable(fd, False)
    installation.use(start.installed)
    if start.key is not None:
        use_key(start.key)
    setup = WorkerSetup(start.entries, _entry_points(start.plugins), start.options)
    gc.freeze()  # as in a forked worker
    gc.enable()  # `nnfmq.__main__` has disabled it for the time of the imports
    memories = partial(worker.mapped_memories, start.fds, start.slot)
    worker.main(start.hello, start.fds, start.slot, setup, memories)


def _entry_points(plugins: Sequence[tuple[str, str, str]]) -> list[EntryPoint]:
    if not plugins:
        return []
    from importlib.metadata import EntryPoint  # takes milliseconds, also in the supervisor, and few drivers need it

    return [EntryPoint(*names) for names in plugins]
