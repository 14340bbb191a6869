"""Recordings for tests: written without a driver, and read back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import HalExecutionMode, Model
from nnfmq.observe.executions import CapturedTensor, ObservedExecution, ObservedPreparation
from nnfmq.recording.reader import RecordingFile
from nnfmq.recording.writer import RecordingWriter
from support.models import add_model

INFOS = (TensorInfo("input 0", (4,), "float32"), TensorInfo("input 1", (4,), "float32"))
OUTPUT = TensorInfo("output 0", (4,), "float32")


def preparation(model: Model | None = None, device: str = "reference") -> ObservedPreparation:
    """Return the preparation of a model with two inputs and an output of 4 floats; by default their sum."""
    given = add_model() if model is None else model
    return ObservedPreparation(
        given, INFOS, (OUTPUT,), 0, device, "1.0", 1, 1, "application", False, 0, 1_000_000, 2_000_000
    )


def tensors(*rows: Sequence[float]) -> tuple[CapturedTensor, ...]:
    """Return captured float32 tensors."""
    arrays = [np.array(row, np.float32) for row in rows]
    return tuple(CapturedTensor(array.shape, array.tobytes()) for array in arrays)


def execution(begin_ns: int = 3_000_000, **changes: Any) -> ObservedExecution:
    """Return a synchronous execution of 100 µs that adds 1 to 10 and so on; `changes` are other fields."""
    made = ObservedExecution(
        HalExecutionMode.SYNCHRONOUS, 0, begin_ns - 1000, begin_ns, begin_ns + 99_000, None, -1, -1,
        tensors([1, 2, 3, 4], [10, 20, 30, 40]), tensors([11, 22, 33, 44]),
    )  # fmt: skip
    return replace(made, **changes)


def write_recording(
    path: Path, executions: Sequence[ObservedExecution], model: ObservedPreparation | None = None, **options: Any
) -> Path:
    """Write a recording with one model, and return its path."""
    with RecordingWriter(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), **options) as writer:
        number = writer.add_model(preparation() if model is None else model)
        for one in executions:
            if number is not None:
                writer.add_execution(number, one)
    return path


def arrays(recording: RecordingFile, index: int, side: str) -> list[list[float]]:
    """Return the `inputs` or `outputs` of an execution as lists."""
    row = recording.executions[index].row
    formats, contents = getattr(recording.models[row.model], side), getattr(row, side)
    found = zip(formats, contents, strict=True)
    return [np.frombuffer(recording.read(c.data), f.dtype).reshape(c.shape).tolist() for f, c in found]
