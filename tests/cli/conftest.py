"""A fake driver: `fake` replaces `nnfmq.connect` and `nnfmq.load`, and records the calls. A folder for sockets."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest

import nnfmq
from nnfmq.hal.capabilities import (
    CPU_PERFORMANCE,
    Capabilities,
    PerformanceInfo,
    uniform_capabilities,
    with_performance,
)
from nnfmq.hal.errors import DeviceUnavailable
from nnfmq.hal.preparation import ProgramKind
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.types import DeviceStatus, OperandType


@dataclass
class Last:
    latency_ns: int
    queue_ns: int
    driver_ns: int
    engine_ns: int


@dataclass
class OperandTypeData:
    type: int = 0
    is_tensor: bool = False
    byte_size: int = 8
    dtype: str = "int64"


@dataclass
class ExtensionData:
    name: str
    operand_types: tuple[OperandTypeData, ...] = (OperandTypeData(),)


@dataclass
class DeviceInfo:
    name: str = "reference"
    type: int = 2
    version: str = "0.1.0"
    feature_level: int = 8
    status: int = 0
    extensions: tuple[ExtensionData, ...] = ()
    model_cache_files: int = 1
    data_cache_files: int = 2


class Managed:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@dataclass
class FakePreparedModel(Managed):
    """A model that the fake has prepared on `device`."""

    fake: Fake
    device: str
    program: ProgramKind = ProgramKind.CACHED
    compiled_operations: int = 3

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        return self.fake.inputs

    def burst(self) -> Fake:
        return self.fake


@dataclass
class Fake(Managed):
    """Driver, client, device, model and burst in one: each asks the same object on."""

    inputs: tuple[TensorInfo, ...] = (TensorInfo("image", (1, 2, 2, 3), "float32"),)
    outputs: tuple[TensorInfo, ...] = (TensorInfo("scores", (1, 4), "float32"),)
    results: tuple[np.ndarray[Any, Any], ...] = (np.float32([[0.1, 0.5, 0.1, 0.3]]),)
    known: list[DeviceInfo] = field(default_factory=lambda: [DeviceInfo()])
    latencies_ns: list[int] = field(default_factory=lambda: [9000])
    executed: list[tuple[np.ndarray[Any, Any], ...]] = field(default_factory=list)
    connected: list[tuple[Any, Any]] = field(default_factory=list)
    last: Last | None = None
    made: list[tuple[str, DeviceStatus, bool]] = field(default_factory=list)
    requested: DeviceInfo | None = None
    unavailable: str = "busy"
    driver_core: str = "compiled"
    metadata: None = None
    states: tuple[StateInfo, ...] = ()
    lacks_capabilities: bool = False
    was_upgraded: bool = False

    def connect(
        self,
        path: object = None,
        *,
        embedded: bool | None = None,
        timeout: float = 10.0,
        recover: bool = True,
        monitor: bool = False,
    ) -> Self:
        self.connected.append((path, embedded))
        return self

    def statistics(self, *, timeout: float) -> SimpleNamespace:
        return SimpleNamespace(
            lacks_capabilities=self.lacks_capabilities, was_upgraded=self.was_upgraded, version="1.2.3"
        )

    def load(self, path: object, *, shapes: object = None, signature: str | None = None) -> Self:
        return self

    def extension(self, name: str) -> ExtensionData:
        return ExtensionData(name)

    def devices(self) -> list[DeviceInfo]:
        return self.known

    def device(self, name: str) -> Self:
        self.requested = next(info for info in self.known if info.name == name)
        return self

    def set_device_status(self, name: str, status: DeviceStatus, *, keep: bool) -> None:
        self.made.append((name, status, keep))
        for info in self.known:
            info.status = status if info.name == name else info.status

    def capabilities(self) -> Capabilities:
        assert self.requested is not None
        if self.requested.status:
            raise DeviceUnavailable(self.unavailable)
        return with_performance(
            uniform_capabilities(CPU_PERFORMANCE), [OperandType.TENSOR_FLOAT32], PerformanceInfo(0.25, 2.0)
        )

    def prepare(self, model: object, **_: object) -> FakePreparedModel:
        return FakePreparedModel(self, "compiled" if self.requested is None else self.requested.name)

    def burst(self) -> Self:
        return self

    def execute(self, *arrays: np.ndarray[Any, Any], timeout: float) -> tuple[np.ndarray[Any, Any], ...]:
        latency_ns = self.latencies_ns[len(self.executed) % len(self.latencies_ns)]
        self.executed.append(arrays)
        self.last = Last(latency_ns, 1000, 2000, latency_ns - 3000)
        return self.results


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    monkeypatch.setattr(nnfmq, "connect", made.connect, raising=False)
    monkeypatch.setattr(nnfmq, "load", made.load, raising=False)
    return made
