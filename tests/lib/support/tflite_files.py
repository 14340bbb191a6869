"""TFLite files for tests: the training tool's writer, `tools/tflite_writer.py`, and small models made with it.

The writer is no part of the package and its folder is not on the path, so it is loaded by its file name.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np


def _load(name: str) -> ModuleType:
    path = Path(__file__).parents[3] / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


writer: Any = _load("tflite_writer")
Tensor = writer.Tensor
Operator = writer.Operator
CONV = {"Padding": 0, "StrideW": 1, "StrideH": 1}
POOL = {"Padding": 1, "StrideW": 2, "StrideH": 2, "FilterWidth": 2, "FilterHeight": 2}


def floats(*shape: int) -> bytes:
    """Return 0, 1, 2 ... as float32 of that shape."""
    return np.arange(np.prod(shape), dtype=np.float32).tobytes()


def ints(*values: int) -> bytes:
    """Return int32 values."""
    return np.array(values, np.int32).tobytes()


def single(
    name: str, tensors: Sequence[Any], table: str = "", options: Mapping[str, Any] | None = None, **extra: Any
) -> bytes:
    """Return a model of one operator: tensor 0 is the model's input, the last its output, all others are inputs too."""
    last = len(tensors) - 1
    operator = Operator(name, range(last), (last,), table, options or {})
    data: bytes = writer.write(tensors, [operator], (0,), (last,), **extra)
    return data


def everything() -> bytes:
    """Return a small float model that uses most operators and every kind of option."""
    shape = (1, 4, 4, 2)
    tensors = [
        Tensor("x", shape), Tensor("w", (2, 3, 3, 2), data=floats(2, 3, 3, 2)), Tensor("b", (2,), data=floats(2)),
        Tensor("conv", shape), Tensor("dw", (1, 3, 3, 2), data=floats(1, 3, 3, 2)), Tensor("depthwise", shape),
        Tensor("sum", shape), Tensor("cat", (1, 4, 4, 4)), Tensor("pool", (1, 2, 2, 4)),
        Tensor("axes", (2,), "INT32", ints(1, 2)), Tensor("mean", (1, 1, 1, 4)), Tensor("squeezed", (1, 4)),
        Tensor("fw", (3, 4), data=floats(3, 4)), Tensor("full", (1, 3)), Tensor("soft", (1, 3)),
        Tensor("shape", (1,), "INT32", ints(3)), Tensor("out", (3,)),
    ]  # fmt: skip
    operators = [
        Operator("CONV_2D", (0, 1, 2), (3,), "Conv2DOptions", CONV | {"DilationWFactor": 2, "DilationHFactor": 2}),
        Operator("DEPTHWISE_CONV_2D", (3, 4, -1), (5,), "DepthwiseConv2DOptions", CONV | {"DepthMultiplier": 1}),
        Operator("ADD", (3, 5), (6,), "AddOptions", {"FusedActivationFunction": 3}),
        Operator("CONCATENATION", (6, 3), (7,), "ConcatenationOptions", {"Axis": -1}),
        Operator("MAX_POOL_2D", (7,), (8,), "Pool2DOptions", POOL),
        Operator("MEAN", (8, 9), (10,), "ReducerOptions", {"KeepDims": True}),
        Operator("SQUEEZE", (10,), (11,), "SqueezeOptions", {"SqueezeDims": [1, 2]}),
        Operator("FULLY_CONNECTED", (11, 12), (13,), "FullyConnectedOptions", {"FusedActivationFunction": 1}),
        Operator("SOFTMAX", (13,), (14,), "SoftmaxOptions", {"Beta": 1.0}),
        Operator("RESHAPE", (14, 15), (16,), "ReshapeOptions", {"NewShape": [3]}),
    ]
    data: bytes = writer.write(tensors, operators, (0,), (16,))
    return data


def quantized() -> bytes:
    """Return a small model with a quantized convolution, with scales per tensor and per channel."""
    tensors = [
        Tensor("x", (1, 4, 4, 2), "INT8", scales=[0.5], zero_points=[3]),
        Tensor("w", (2, 1, 1, 2), "INT8", bytes(4), scales=[0.25, 0.5], zero_points=[0, 0]),
        Tensor("b", (2,), "INT32", ints(1, 2), scales=[0.125, 0.25], zero_points=[0, 0]),
        Tensor("y", (1, 4, 4, 2), "INT8", scales=[0.75], zero_points=[-1]),
    ]
    return single("CONV_2D", tensors, "Conv2DOptions", CONV)
