"""Run FIBONACCI in a driver that has the extension: `python ask_fibonacci.py 10`."""

from __future__ import annotations

import struct
import sys

import numpy as np

import nnfmq
from nnfmq.hal.extensions import ExtensionCodes
from nnfmq.hal.types import LifeTime, Model, Operand, Operation, Subgraph

NAME = "com.example.fibonacci"


def fibonacci_model(scale: float, zero_point: int) -> Model:
    """Return a model of one operation: the input is n, an INT64 scalar; the output is QUANT64_ASYMM, of shape [n]."""
    extension_codes = ExtensionCodes()
    n = Operand(extension_codes.operand_type(NAME, 0), lifetime=LifeTime.SUBGRAPH_INPUT)
    output = Operand(
        extension_codes.operand_type(NAME, 1),
        dimensions=(0,),
        lifetime=LifeTime.SUBGRAPH_OUTPUT,
        extension_data=struct.pack("<dq", scale, zero_point),
    )
    operation = Operation(extension_codes.operation_type(NAME, 0), inputs=(0,), outputs=(1,))
    return Model(Subgraph((n, output), (operation,), (0,), (1,)), extensions=extension_codes.extensions)


if __name__ == "__main__":
    with (
        nnfmq.connect() as client,
        client.device("reference").prepare(fibonacci_model(scale=0.5, zero_point=10)) as model,
    ):
        (result,) = model.execute(np.int64(sys.argv[1]))
        print(*result)
