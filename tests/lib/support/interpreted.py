"""Model files run by the package's own interpreter, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import nnfmq
from nnfmq.engines import interpreter
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.validation.model import validate_model

Array = npt.NDArray[Any]


def interpreted(content: bytes) -> Callable[[Array], list[Array]]:
    """Return what executes the .tflite file `content`, of one input, after it was found valid."""
    loaded = nnfmq.load(content)
    validate_model(loaded.model)
    program = interpreter.prepare(loaded.model)

    def run(values: Array) -> list[Array]:
        results = [np.empty(info.shape, info.dtype) for info in loaded.outputs]
        program.execute([values], results)
        return results

    return run


def codes_of(values: Array, info: TensorInfo) -> Array:
    """Return the codes of `values` for an input: quotient, rounded, plus zero point; all written out here once more."""
    limits = np.iinfo(info.dtype)
    steps = np.rint(np.asarray(values, np.float64) / info.scale) + info.zero_point
    return np.asarray(np.minimum(np.maximum(steps, limits.min), limits.max), info.dtype)


def reals_of(codes: Array, info: TensorInfo) -> Array:
    """Return what the codes of an output stand for, as float64."""
    return (np.asarray(codes, np.float64) - info.zero_point) * info.scale
