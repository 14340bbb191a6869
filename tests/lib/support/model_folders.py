"""Directories of models for `nnfmq serve --models`, and a client of the repository's protocol.

`adder` is a small model whose output says which version computed it.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import nnfmq
from nnfmq.base.channel import Channel
from nnfmq.base.memory import Memory
from nnfmq.base.paths import models_socket
from nnfmq.client.connection.prepare_arguments import FinishedModel
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.types import ExecutionPreference
from nnfmq.serialize import repository_protocol
from nnfmq.serialize.models import decode_model
from nnfmq.serialize.repository_protocol import (
    ListModels,
    ModelEntry,
    ModelList,
    ModelOpened,
    OpenModel,
    RepositoryMessage,
    RepositoryRole,
)
from support.drivers import LIMIT_S, Daemon, Process, opened, until
from support.tflite_files import Operator, Tensor, writer

LIMIT_NS = int(LIMIT_S * 1e9)
MessageT = TypeVar("MessageT", bound=RepositoryMessage)


def adder(value: float, *, shape: tuple[int, ...] = (1, 4), constants: int = 0) -> bytes:
    """Return a .tflite file of a model that adds `value` to each element of its input `x`; the output is `y`.

    `constants`: the bytes of a constant of zeros, a multiple of four times the last dimension, which it adds as well.
    """
    columns = shape[-1]
    tensors = [
        Tensor("x", shape), Tensor("v", (1,), data=struct.pack("<f", value)), Tensor("y", shape)
    ]  # fmt: skip
    operators = [Operator("ADD", (0, 1), (2,), "AddOptions", {})]
    if constants:
        rows = constants // (4 * columns)
        tensors += [
            Tensor("w", (rows, columns), data=bytes(4 * rows * columns)), Tensor("product", (shape[0], rows)),
            Tensor("axes", (1,), "INT32", struct.pack("<i", 1)), Tensor("sum", (shape[0], 1)), Tensor("z", shape),
        ]  # fmt: skip
        operators += [
            Operator("FULLY_CONNECTED", (2, 3, -1), (4,), "FullyConnectedOptions", {}),
            Operator("SUM", (4, 5), (6,), "ReducerOptions", {"KeepDims": True}),
            Operator("ADD", (2, 6), (7,), "AddOptions", {}),
        ]
    data: bytes = writer.write(tensors, operators, (0,), (len(tensors) - 1,))
    return data


def add_version(
    directory: Path,
    name: str,
    version: int,
    content: bytes,
    *,
    options: str = "",
    file: str = "model.tflite",
    others: Mapping[str, bytes] | None = None,
) -> Path:
    """Add a version as the documentation says: write it elsewhere, then rename its directory. Return that."""
    folder = directory / name / str(version)
    written = directory / f".{name}-{version}"
    written.mkdir(parents=True)
    for own_name, data in {file: content, **(others or {})}.items():
        (written / own_name).write_bytes(data)
    if options:
        (written / "model.toml").write_text(options)
    folder.parent.mkdir(exist_ok=True)
    os.rename(written, folder)
    return folder


def age(folder: Path) -> None:
    """Wait until a driver that starts now need not look twice at a version's files."""
    until(lambda: time.time() - max(path.stat().st_ctime for path in (folder, *folder.iterdir())) > 2.1, "they are old")


def repository_of(daemon: Daemon) -> Process | None:
    """Return the model repository's process, which the caller closes; None if there is none now."""
    for process in opened(daemon.process.children()):
        if b"nnfmq.repository" in command_line(process.pid):
            return process
        process.close()
    return None


def command_line(pid: int) -> bytes:
    """Return the words of a process's command, empty if it has exited."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@contextmanager
def running_repository(daemon: Daemon) -> Iterator[Process]:
    """Wait until the model repository of a driver runs; yield its process."""
    found: list[Process] = []

    def runs() -> bool:
        process = repository_of(daemon)
        found.extend([] if process is None else [process])
        return process is not None

    until(runs, "the model repository runs")
    with found[0]:
        yield found[0]


class RepositoryPeer:
    """A client of the repository of the driver with the socket `path`. Close it, or use `with`."""

    def __init__(self, path: Path) -> None:
        self.channel = Channel.connect(models_socket(path), time.monotonic_ns() + LIMIT_NS)
        self._calls = 0

    def send(self, message: RepositoryMessage) -> None:
        """Send a message."""
        self.channel.send(repository_protocol.encode(message), (), time.monotonic_ns() + LIMIT_NS)

    def receive(self, kind: type[MessageT]) -> MessageT:
        """Return the next message, which must be a `kind`; close the fds that come with it."""
        with self.channel.receive(time.monotonic_ns() + LIMIT_NS) as frame:
            message = repository_protocol.decode(frame.data, sender=RepositoryRole.REPOSITORY, fds=len(frame.fds))
        assert isinstance(message, kind), message
        return message

    def entries(self) -> dict[str, ModelEntry]:
        """Return the repository's models by name."""
        self._calls += 1
        self.send(ListModels(self._calls))
        return {entry.name: entry for entry in self.receive(ModelList).models}

    @contextmanager
    def prepared(self, client: nnfmq.Client, name: str) -> Iterator[nnfmq.PreparedModel]:
        """Yield a model, prepared by `client` as the repository has described it."""
        self._calls += 1
        self.send(OpenModel(self._calls, name))
        with self.channel.receive(time.monotonic_ns() + LIMIT_NS) as frame, ExitStack() as stack:
            reply = repository_protocol.decode(frame.data, sender=RepositoryRole.REPOSITORY, fds=len(frame.fds))
            assert isinstance(reply, ModelOpened) and reply.description is not None, reply
            sent = reply.description
            pools = [stack.enter_context(Memory.adopt_constant(fd)) for fd in frame.detach_fds()]
            model = FinishedModel(decode_model(sent.model, pools), sent.inputs, sent.outputs, sent.states)
            prepared = client.device(sent.device).prepare(model, preference=ExecutionPreference(sent.preference))
        with prepared:
            yield prepared

    def open(self, name: str, version: int = 0) -> ModelOpened:
        """Return the reply to a request for a model."""
        self._calls += 1
        self.send(OpenModel(self._calls, name, version))
        reply = self.receive(ModelOpened)
        assert reply.call == self._calls
        assert (reply.description is None) == (reply.status is not ErrorStatus.NONE)
        return reply

    def wait_for(self, name: str, **expected: Any) -> ModelEntry:
        """Wait until the entry of a model has these values; return it."""
        found: dict[str, ModelEntry] = {}

        def is_so() -> bool:
            found.update(self.entries())
            entry = found.get(name)
            return entry is not None and all(getattr(entry, key) == value for key, value in expected.items())

        until(is_so, f"{name} has {expected}")
        return found[name]

    def close(self) -> None:
        """Hang up."""
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
