"""What owns a descriptor, memory or a connection can be neither copied nor pickled, and an attempt closes nothing."""

from __future__ import annotations

import copy
import copyreg
import io
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.drivers import one

import nnfmq
from nnfmq.base.channel import Channel
from nnfmq.queue import EventFlag, MessageQueue


class ViewPickler(pickle.Pickler):
    """Pickles a memoryview as a copy of its bytes, as cloudpickle does."""

    dispatch_table = copyreg.dispatch_table | {memoryview: lambda view: (memoryview, (bytes(view),))}


def pickled(value: Any) -> Any:
    buffer = io.BytesIO()
    ViewPickler(buffer).dump(value)
    return pickle.loads(buffer.getvalue())


@pytest.fixture
def owners(client: nnfmq.Client, model: nnfmq.PreparedModel, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Return one object of each class that owns something."""
    with ExitStack() as stack:
        keep = stack.enter_context
        (tmp_path / "data").write_bytes(bytes(64))
        fd = os.open(tmp_path / "data", os.O_RDWR)
        stack.callback(os.close, fd)
        near, far = Channel.pair()
        keep(near), keep(far)
        burst = keep(model.burst())
        queue = keep(MessageQueue.create(4, 4))
        yield {
            "client": client,
            "connection": client.connection,
            "model": model,
            "burst": burst,
            "its queue": burst.channel.results,
            "execution": keep(model.create_execution()),
            "buffer": keep(nnfmq.allocate(inputs=[(model, 0)])),
            "memory": keep(nnfmq.Memory.create(64)),
            "file memory": keep(nnfmq.FileMemory.from_fd(fd, 64)),
            "fence": keep(nnfmq.Fence.create()),
            "channel": near,
            "queue": queue,
            "event flag": EventFlag.from_buffer(memoryview(bytearray(64))),
        }


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickled])
def test_an_object_that_owns_a_descriptor_is_neither_copied_nor_pickled(
    owners: dict[str, Any], duplicate: Callable[[Any], Any]
) -> None:
    for owner in owners.values():
        with pytest.raises(TypeError, match=f"a {type(owner).__name__} cannot be copied or pickled"):
            duplicate(owner)
    assert owners["burst"].execute(one(3)) == (one(3),)
    assert owners["model"].execute(one(4)) == (one(4),)
    assert bytes(owners["memory"].view) == bytes(64)
    os.fstat(owners["memory"].fileno()), os.fstat(owners["file memory"].fileno()), os.fstat(owners["fence"].fileno())
