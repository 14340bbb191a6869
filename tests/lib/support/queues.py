"""Queues as libfmq's own tests set them up: each descriptor form, ring in one fd or in a second, each core.

A `Setup` makes queues and their other ends and closes them all. The other end is attached from what a peer
receives: the descriptor in HIDL's binary form or in AIDL's, and duplicates of the fds.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from nnfmq.base.memory import Memory
from nnfmq.queue import SYNCHRONIZED, UNSYNCHRONIZED, MessageQueue, MQDescriptor, descriptor_formats
from nnfmq.queue import core as cores

CORES = ["python"] if cores.core_name == "python" else list(cores.CORES.available())
FORMS = ["aidl", "hidl"]
PLACES = ["one_fd", "two_fds"]

COUNT = 2048
CUSTOM_NOT_EMPTY, CUSTOM_NOT_FULL = 1, 2  # libfmq's tests number their bits the other way round than the defaults


def travelled(descriptor: MQDescriptor, form: str) -> MQDescriptor:
    """Return the descriptor as it is read from one of its forms."""
    if form == "hidl":
        return descriptor_formats.from_hidl(descriptor_formats.to_hidl(descriptor))
    return descriptor_formats.from_aidl(descriptor_formats.to_aidl(descriptor))


def pattern(count: int, quantum: int = 1) -> bytes:
    """Return `count` records with the values 0, 1, 2... (modulo 256 where they have one byte)."""
    return b"".join((i % 256 ** min(quantum, 4)).to_bytes(quantum, "little") for i in range(count))


@dataclass
class Setup:
    """How the queues of one test are made; closes them at the end."""

    core_name: str
    form: str = "aidl"
    place: str = "one_fd"
    stack: ExitStack = field(default_factory=ExitStack)

    @property
    def core(self) -> cores.Core:
        """Return the core under test."""
        return cores.CORES.load(self.core_name)

    def create(self, quantum: int = 1, count: int = COUNT, **options: Any) -> MessageQueue:
        """Create a queue with its ring where `place` says."""
        if self.place == "two_fds" and "ring_memory" not in options:
            one_writer = options.get("one_writer", False)
            options["ring_memory"] = Memory.create(quantum * min(count, COUNT), one_writer=one_writer)
        return self.stack.enter_context(MessageQueue.create(quantum, count, **{"core": self.core, **options}))

    def attach(self, queue: MessageQueue, **options: Any) -> MessageQueue:
        """Attach to a queue as another process would."""
        memories = [Memory.adopt(os.dup(fd)) for fd in queue.fds()]
        defaults: dict[str, Any] = {"core": self.core, "flavor": queue.flavor}
        descriptor = travelled(queue.descriptor, self.form)
        return self.stack.enter_context(MessageQueue.attach(descriptor, *memories, **{**defaults, **options}))

    def sync(self, quantum: int = 1, count: int = COUNT, **options: Any) -> tuple[MessageQueue, MessageQueue]:
        """Return the writer and the reader of a synchronized queue."""
        writer = self.create(quantum, count, flavor=SYNCHRONIZED, **options)
        return writer, self.attach(writer)

    def unsync(self, quantum: int = 1, count: int = COUNT, **options: Any) -> tuple[MessageQueue, MessageQueue]:
        """Return the writer and a reader, which maps for reading only, of an unsynchronized queue."""
        writer = self.create(quantum, count, flavor=UNSYNCHRONIZED, one_writer=True)
        return writer, self.attach(writer, reset_pointers=False, **options)
