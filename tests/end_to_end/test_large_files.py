"""A large input in a file: the driver copies it until the deadline, and not further."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.small_models import F32, OUTPUT, one_operation, vector

import nnfmq
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.types import DataLocation, ExecutionConfig, Operand, OperationType, Request, RequestArgument
from nnfmq.serialize import messages

SIZE = 256 << 20
SOON_NS = 10_000_000  # far less than the copy takes


@pytest.fixture
def file(tmp_path: Path) -> Iterator[nnfmq.FileMemory]:
    """Return a file of 256 MiB of zeros, without blocks on the disk."""
    fd = os.open(tmp_path / "input", os.O_RDWR | os.O_CREAT)
    try:
        os.truncate(fd, SIZE)
        with nnfmq.FileMemory.from_fd(fd, SIZE) as memory:
            yield memory
    finally:
        os.close(fd)


@pytest.fixture
def largest(client: nnfmq.Client) -> Iterator[nnfmq.PreparedModel]:
    """Return a model whose output is the largest element of its input."""
    parts = [Operand(F32, (SIZE // 4,)), vector([0]), True]
    with client.device("reference").prepare(
        one_operation(OperationType.REDUCE_MAX, parts, Operand(F32, (1,), lifetime=OUTPUT))
    ) as model:
        yield model


def execute(
    client: nnfmq.Client, model: nnfmq.PreparedModel, file: nnfmq.FileMemory, deadline_ns: int
) -> messages.Executed:
    """Return the driver's reply; the client does not give up at the deadline."""
    with nnfmq.Memory.create(64) as result:
        whole = RequestArgument(location=DataLocation(0, 0, SIZE))
        request = Request((whole,), (RequestArgument(location=DataLocation(1, 0, 4)),), (file, result))
        call = messages.Execute(
            client.connection.next_call_id(),
            model.model_id,
            messages.request_to_data(request),
            messages.config_to_data(ExecutionConfig()),
            deadline_ns,
        )
        return client.connection.exchange(call, messages.Executed, [file.fileno(), result.fileno()])


def peak_bytes(client: nnfmq.Client) -> int:
    status = Path(f"/proc/{client.worker_pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))


def test_QOS_3_a_deadline_ends_the_copy_of_an_input(
    client: nnfmq.Client, largest: nnfmq.PreparedModel, file: nnfmq.FileMemory
) -> None:
    before = peak_bytes(client)
    missed = execute(client, largest, file, time.monotonic_ns() + SOON_NS)
    # PERSISTENT on a busy machine, where the deadline passes before the execution begins
    assert missed.status in {ErrorStatus.MISSED_DEADLINE_TRANSIENT, ErrorStatus.MISSED_DEADLINE_PERSISTENT}
    assert peak_bytes(client) - before < SIZE * 3 // 4
    assert execute(client, largest, file, -1).status is ErrorStatus.NONE
    assert peak_bytes(client) - before >= SIZE * 3 // 4
