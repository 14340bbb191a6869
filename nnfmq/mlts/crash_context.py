"""The context of a workload: the client of the driver, the task, its deadline, and the numbers of outcomes."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING

from nnfmq.mlts.crash_messages import ClientTask
from nnfmq.mlts.stress_models import COMPLETE
from nnfmq.runtime.client import Client
from nnfmq.runtime.client_device import Device
from nnfmq.runtime.connect import connect
from nnfmq.runtime.prepare_arguments import ModelArgument

if TYPE_CHECKING:
    from nnfmq.runtime.compiled_model import CompiledModel

_CONNECT_S = 60.0  # with 60 clients on one processor


class WorkloadContext:
    """A client of the driver, the task, its deadline and its count. Close it. Thread-safe."""

    def __init__(self, task: ClientTask, client: Client) -> None:
        self.task = task
        self.client = client
        self.deadline_ns = time.monotonic_ns() + round(task.seconds * 1e9)
        self.codes: dict[str, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, task: ClientTask) -> WorkloadContext:
        """Connect to the driver. Blocks."""
        return cls(task, connect(task.connect_to, embedded=False, timeout=_CONNECT_S, recover=False))

    def device(self) -> Device:
        """Return the device under test. Blocks."""
        return self.client.device(self.task.device, timeout=None)

    def prepare(self, device: Device | None, model: ModelArgument) -> CompiledModel:
        """Prepare a model, on any device if `device` is None. Blocks."""
        prepare = self.client.prepare if device is None else device.prepare
        return prepare(model, preference=COMPLETE if self.task.compiles_fully else "fast_single_answer")

    def count(self, code: str, number: int = 1) -> None:
        """Add to the number of successful steps, or of another outcome, of all threads."""
        with self._lock:
            self.codes[code] = self.codes.get(code, 0) + number

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic_ns() >= self.deadline_ns

    def pause(self) -> None:
        """Sleep for a random time within the task's limits, at most until the deadline."""
        left_s = (self.deadline_ns - time.monotonic_ns()) / 1e9
        time.sleep(max(0.0, min(random.uniform(*self.task.pause_s), left_s)))

    def close(self) -> None:
        """Close the client: calls in progress raise DeadObject. Idempotent."""
        self.client.close()
