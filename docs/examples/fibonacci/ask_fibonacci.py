"""An application that runs FIBONACCI in a driver which has the extension: `python ask_fibonacci.py 10`."""

from __future__ import annotations

import struct
import sys

import numpy as np

import nnfmq
from nnfmq.hal.extension_codes import ExtensionCodes
from nnfmq.hal.types import LifeTime, Model, Operand, Operation, Subgraph

NAME = "com.example.fibonacci"


def fibonacci_model(scale: float, zero_point: int) -> Model:
    """Return a model of one operation: an INT64 scalar in, QUANT64_ASYMM codes out, as many as it says."""
    numbers = ExtensionCodes()
    n = Operand(numbers.operand_type(NAME, 0), lifetime=LifeTime.SUBGRAPH_INPUT)
    codes = Operand(
        numbers.operand_type(NAME, 1),
        dimensions=(0,),
        lifetime=LifeTime.SUBGRAPH_OUTPUT,
        extension_data=struct.pack("<dq", scale, zero_point),
    )
    operation = Operation(numbers.operation_type(NAME, 0), inputs=(0,), outputs=(1,))
    return Model(Subgraph((n, codes), (operation,), (0,), (1,)), extensions=numbers.extensions)


if __name__ == "__main__":
    with (
        nnfmq.connect() as client,
        client.device("reference").prepare(fibonacci_model(scale=0.5, zero_point=10)) as model,
    ):
        (codes,) = model.execute(np.int64(sys.argv[1]))
        print(*codes)
