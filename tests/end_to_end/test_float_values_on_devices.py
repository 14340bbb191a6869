"""ONNX functions of floats through a driver: on both devices the values are right over the whole range of a type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.float_values import FUNCTIONS, NEWER, UNDEFINED, assert_right, numbers
from support.onnx_files import file_of
from support.onnx_runtime import onnx

import nnfmq
from nnfmq.hal.types import ExecutionPreference

MACHINE_CODE = ExecutionPreference.SUSTAINED_SPEED  # the device `compiled` answers with nothing else


@pytest.mark.parametrize("device", ["reference", "compiled"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=lambda dtype: dtype.__name__)
def test_a_model_of_all_functions_returns_the_values_of_real_numbers(
    client: nnfmq.Client, dtype: Any, device: str
) -> None:
    x = numbers(dtype)
    names = [name for name in FUNCTIONS if (name, dtype) not in UNDEFINED and name not in ("IsInf", "IsNaN")]
    nodes = [onnx.helper.make_node(name, ["x"], [name]) for name in names]
    content = file_of(nodes, {"x": x}, names, opset=max(NEWER.values()))
    with client.device(device).prepare(nnfmq.load(content), preference=MACHINE_CODE) as prepared:
        found = prepared.execute(x)
    for name, values in zip(names, found, strict=True):
        with np.errstate(all="ignore"):
            assert_right(x, values, FUNCTIONS[name](x.astype(np.float64)))
