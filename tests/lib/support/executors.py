"""What executes in tests of the driver: prepared models, programs that stop where a test wants, strange executors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from nnfmq.engines import interpreter
from nnfmq.engines.execution import RunOptions
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.types import Model, OutputShape
from nnfmq.memory import Memory
from nnfmq.serialize.packets import RequestPacket
from nnfmq.service.driver_prepared_model import DriverPreparedModel, ExecutionReply

LIMIT_S = 20


def prepared(model: Model) -> DriverPreparedModel:
    return DriverPreparedModel(model, interpreter.prepare(model))


class Held:
    """A program whose executions wait in their middle until they are let go."""

    def __init__(self, model: Model) -> None:
        self._program = interpreter.prepare(model)
        self.begun = threading.Event()
        self.go = threading.Event()

    def bind(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        execution = self._program.bind(inputs, outputs)

        def run(limits: RunOptions) -> Sequence[OutputShape]:
            self.begun.set()
            assert self.go.wait(LIMIT_S)
            return execution.run(limits)

        return SimpleNamespace(run=run)


class Summing:
    """An executor of somebody else's making: it adds up the floats of its first pool into its second."""

    def __init__(self) -> None:
        self.cache: dict[int, Memory] = {}

    def unknown_slots(self, slots: Sequence[int]) -> list[int]:
        return sorted({slot for slot in slots if slot not in self.cache})

    def add_cache_entry(self, memory: Memory, slot: int) -> None:
        self.cache[slot] = memory

    def remove_cache_entry(self, slot: int) -> None:
        memory = self.cache.pop(slot, None)
        if memory is not None:
            memory.close()

    def execute(self, packet: RequestPacket, begin_ns: int) -> ExecutionReply:
        source, sink = (self.cache[slot] for slot in packet.slots)
        np.frombuffer(sink.view, np.float32)[0] = np.frombuffer(source.view, np.float32).sum()
        return ExecutionReply(ErrorStatus.NONE, (OutputShape((1,)),))

    def close(self) -> None:
        for slot in list(self.cache):
            self.remove_cache_entry(slot)


def floats(memory: Memory, count: int = 4) -> list[float]:
    return [float(value) for value in np.frombuffer(memory.view, np.float32, count)]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0)
