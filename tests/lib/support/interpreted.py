"""Execution of model files with one input in the reference interpreter, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import nnfmq
from nnfmq.engines import interpreter
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.validation.models import validate_model

Array = npt.NDArray[Any]


def interpreted(content: bytes) -> Callable[[Array], list[Array]]:
    """Validate the .tflite file `content`, which has one input; return a function that executes it."""
    loaded = nnfmq.load(content)
    validate_model(loaded.model)
    program = interpreter.prepare(loaded.model)

    def run(values: Array) -> list[Array]:
        results = [np.empty(info.shape, info.dtype) for info in loaded.outputs]
        program.execute([values], results)
        return results

    return run


def quantize(values: Array, info: TensorInfo) -> Array:
    """Return `values` quantized for an input; independent of the quantizer and of nnfmq."""
    limits = np.iinfo(info.dtype)
    nearest = np.rint(np.asarray(values, np.float64) / info.scale) + info.zero_point
    return np.asarray(np.minimum(np.maximum(nearest, limits.min), limits.max), info.dtype)


def dequantize(quantized: Array, info: TensorInfo) -> Array:
    """Return the real numbers that an output's quantized values represent, as float64."""
    return (np.asarray(quantized, np.float64) - info.zero_point) * info.scale
