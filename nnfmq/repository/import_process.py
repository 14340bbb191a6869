"""The child process that imports one version; see `version_import`.

The repository waits for its result with a deadline, kills it then, and learns by the exit status of a crash.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from nnfmq.base.channel import Channel
from nnfmq.base.deadlines import deadline_after
from nnfmq.base.file_memory import FileMemory
from nnfmq.base.memory import sealed_size
from nnfmq.base.processes import child_environment
from nnfmq.hal.errors import DeadObject, MissedDeadlineTransient, ProtocolError, error_for_status
from nnfmq.hal.types import Protection
from nnfmq.repository.version_import import ImportedModel, ImportFailed, decode_result

__all__ = ["ImportCrashed", "ImportedVersion", "import_in_process"]

TIMEOUT_S = 600.0
_EXIT_S = 5.0  # from the end of the connection to the exit


class ImportCrashed(Exception):
    """The child process ended, or was killed, without a result."""


class ImportedVersion(NamedTuple):
    """The model of a version, and its memories, which nobody can change. The receiver closes these."""

    model: ImportedModel
    memories: tuple[FileMemory, ...]

    def close(self) -> None:
        """Close the memories. Idempotent."""
        for memory in self.memories:
            memory.close()


def import_in_process(folder: Path) -> ImportedVersion:
    """Import the version in `folder` in a child process; blocks until that has ended. The caller closes the result.

    Raises:
        NnfmqError: Why the version cannot be imported.
        ImportCrashed: If the process ends without a result, or takes longer than TIMEOUT_S.
        OSError: If the process cannot be started.
    """
    with _child(folder) as (channel, process):
        try:
            result, memories = _receive(channel)
        except DeadObject:
            raise ImportCrashed(f"the import process {_ending(process)}") from None
        except MissedDeadlineTransient:
            raise ImportCrashed(f"the import took longer than {TIMEOUT_S:g} s") from None
        except ProtocolError as error:
            raise ImportCrashed(f"the import process sent no valid result: {error}") from error
    if isinstance(result, ImportFailed):
        raise error_for_status(result.status, result.message)
    return ImportedVersion(result, memories)


@contextmanager
def _child(folder: Path) -> Iterator[tuple[Channel, subprocess.Popen[bytes]]]:
    """Start the process; yield the connection to it. At the end it is killed, if it still runs, and reaped."""
    parent_end, child_end = Channel.pair()
    with parent_end:
        with child_end:
            fd = child_end.fileno()
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "nnfmq.repository", "--import", str(fd), str(folder)],
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=child_environment(),
            )
        try:
            yield parent_end, process
        finally:
            process.kill()
            process.wait()


def _receive(channel: Channel) -> tuple[ImportedModel | ImportFailed, tuple[FileMemory, ...]]:
    with channel.receive(deadline_after(TIMEOUT_S)) as frame, ExitStack() as undo:
        if frame.fds_truncated:
            raise ProtocolError("this process has no free descriptors (ulimit -n)")
        result = decode_result(frame.data, len(frame.fds))
        sizes = [pool.size_bytes for pool in result.pools] if isinstance(result, ImportedModel) else []
        memories: list[FileMemory] = []
        for size in sizes:  # the fds that are left after an error are closed with the frame
            if sealed_size(frame.fds[0]) != size:
                raise ProtocolError("a memory of the model is not sealed, or has another size than stated")
            memories.append(undo.enter_context(FileMemory.adopt(frame.fds.pop(0), size, 0, Protection.READ)))
        undo.pop_all()
    return result, tuple(memories)


def _ending(process: subprocess.Popen[bytes]) -> str:
    """Say how a process that has closed its connection ended."""
    try:
        status = process.wait(_EXIT_S)
    except subprocess.TimeoutExpired:
        return "closed its connection without a result"
    return f"was killed by signal {-status}" if status < 0 else f"exited with status {status} and sent no result"
