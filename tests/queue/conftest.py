"""Queues for the tests: every test that asks for `core` runs on each core that this run is about."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nnfmq.base.memory import Memory
from nnfmq.queue import MessageQueue
from nnfmq.queue import core as cores

LIMIT_S = 20  # far more than anything here takes; only a hang reaches it

CORES = ["python"] if cores.core_name == "python" else list(cores.CORES.available())


@pytest.fixture(params=CORES)
def core(request: pytest.FixtureRequest) -> cores.Core:
    return cores.CORES.load(request.param)


@pytest.fixture(params=[(writer, reader) for writer in CORES for reader in CORES], ids="-".join)
def core_pair(request: pytest.FixtureRequest) -> tuple[cores.Core, cores.Core]:
    """The writer's core and the reader's."""
    writer, reader = request.param
    return cores.CORES.load(writer), cores.CORES.load(reader)


@pytest.fixture
def make_queue(core: cores.Core) -> Iterator[Callable[..., MessageQueue]]:
    """Create queues on the core under test; closes them."""
    made: list[MessageQueue] = []

    def make(quantum: int = 1, count: int = 2048, **options: Any) -> MessageQueue:
        made.append(MessageQueue.create(quantum, count, **{"core": core, **options}))
        return made[-1]

    yield make
    for queue in made:
        queue.close()


@pytest.fixture
def attach() -> Iterator[Callable[..., MessageQueue]]:
    """Attach to a queue through a second mapping of its memory, as another process would; closes what it made."""
    made: list[MessageQueue] = []

    def attach(queue: MessageQueue, core: cores.Core, **options: Any) -> MessageQueue:
        memory = Memory.adopt(os.dup(queue.memory.fileno()))
        made.append(MessageQueue.attach(queue.descriptor, memory, core=core, **options))
        return made[-1]

    yield attach
    for queue in made:
        queue.close()


def until(condition: Callable[[], object]) -> None:
    """Give way to others until `condition` holds."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        os.sched_yield()


@pytest.fixture(name="until")
def until_fixture() -> Callable[[Callable[[], object]], None]:
    return until


@pytest.fixture
def limit_ns() -> int:
    """A deadline that only a hang reaches."""
    return time.monotonic_ns() + LIMIT_S * 10**9
