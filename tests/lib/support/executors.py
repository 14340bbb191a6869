"""Executors for tests of the driver: prepared models, programs that block until released, and burst executors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from nnfmq.base.memory import Memory
from nnfmq.driver.execution.burst import CachingBurstExecutor
from nnfmq.driver.execution.prepared_model import DriverPreparedModel
from nnfmq.engines import interpreter
from nnfmq.engines.execution import RunOptions
from nnfmq.hal.errors import ErrorStatus, OutputInsufficientSize, error_for_status
from nnfmq.hal.types import ExecutionConfig, MeasureTiming, Model, OutputShape, Request
from nnfmq.serialize.packets import RequestPacket

LIMIT_S = 20


def prepared(model: Model) -> DriverPreparedModel:
    return DriverPreparedModel(model, interpreter.prepare(model))


class Held:
    """A program whose executions block until the test releases them."""

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


class UncachedExecutor(CachingBurstExecutor):
    """A burst executor that validates and binds each request again, by `execute_synchronously`: the oracle."""

    def bind(self, request: RequestPacket) -> tuple[int, Any]:
        version, memories = self.memories(request.slots)
        return version, _Synchronous(self._prepared, Request(request.inputs, request.outputs, memories))


class _Synchronous:
    def __init__(self, model: DriverPreparedModel, request: Request) -> None:
        self._model = model
        self._request = request
        self.engine_begin_ns = self.engine_end_ns = 0

    def run(self) -> tuple[OutputShape, ...]:
        begin_ns = time.monotonic_ns()
        result = self._model.execute_synchronously(self._request, ExecutionConfig(MeasureTiming.YES), None, begin_ns)
        if result.status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
            raise OutputInsufficientSize(result.message, result.output_shapes)
        if result.status is not ErrorStatus.NONE:
            raise error_for_status(result.status, result.message)
        self.engine_begin_ns, self.engine_end_ns = begin_ns, begin_ns + result.timing.time_on_device_ns
        return result.output_shapes


class Summing:
    """A burst executor without a model: it writes the sum of the floats in its first pool into its second."""

    def __init__(self) -> None:
        self.cache: dict[int, Memory] = {}
        self.version = 0

    def unknown_slots(self, slots: Sequence[int]) -> list[int]:
        return sorted({slot for slot in slots if slot not in self.cache})

    def add_cache_entry(self, memory: Memory, slot: int) -> None:
        self.cache[slot] = memory
        self.version += 1

    def remove_cache_entry(self, slot: int) -> None:
        memory = self.cache.pop(slot, None)
        self.version += 1
        if memory is not None:
            memory.close()

    def bind(self, request: RequestPacket) -> tuple[int, Any]:
        bound = SimpleNamespace(run=lambda: self.run(request), engine_begin_ns=0, engine_end_ns=0)
        return self.version, bound

    def run(self, request: RequestPacket) -> tuple[OutputShape, ...]:
        source, sink = (self.cache[slot] for slot in request.slots)
        np.frombuffer(sink.view, np.float32)[0] = np.frombuffer(source.view, np.float32).sum()
        return (OutputShape((1,)),)

    def close(self) -> None:
        for slot in list(self.cache):
            self.remove_cache_entry(slot)


def floats(memory: Memory, count: int = 4) -> list[float]:
    return [float(value) for value in np.frombuffer(memory.view, np.float32, count)]


def until(condition: Callable[[], object]) -> None:
    begin = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - begin
        assert waited_s < LIMIT_S, "what was waited for did not happen"
        time.sleep(min(waited_s / 20, 0.001))  # not for nothing: the thread that is waited for needs a CPU, too
