"""Arguments that operations must reject (N-OPF): for each example its row, the violated rule, and the operation.

Shapes and scalars may be in the model, or be given with the request: engines and driver processes reject both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from nnfmq.hal.types import Operand, OperandType, OperationType

Array = npt.NDArray[Any]
Argument = tuple[Operand, Array]
Op = OperationType
F32, I32 = Operand(OperandType.TENSOR_FLOAT32), Operand(OperandType.TENSOR_INT32)
Q8 = Operand(OperandType.TENSOR_QUANT8_ASYMM, (), 1.0, 0)
HALF = Operand(OperandType.TENSOR_QUANT8_ASYMM, (), 0.5, 0)
TINY = Operand(OperandType.TENSOR_QUANT8_ASYMM, (), 2.0**-20, 0)


def f(*shape: int, value: float = 1.0) -> Argument:
    return F32, np.full(shape, value, np.float32)


def reals(values: Any) -> Argument:
    return F32, np.array(values, np.float32)


def ints(*values: Any) -> Argument:
    return I32, np.array(values, np.int32).reshape(np.shape(values))


def q(*shape: int) -> Argument:
    return Q8, np.ones(shape, np.uint8)


def scalars(*values: float | bool) -> list[Argument]:
    kinds = {bool: (OperandType.BOOL, "u1"), int: (OperandType.INT32, "i4"), float: (OperandType.FLOAT32, "f4")}
    return [(Operand(kinds[type(v)][0]), np.array(v, kinds[type(v)][1])) for v in values]


def conv(*rest: int, filter: Argument | None = None) -> list[Argument]:
    return [f(1, 4, 4, 2), filter or f(3, 3, 3, 2), f(3), *scalars(*rest)]


def grouped(groups: int) -> list[Argument]:
    return [f(1, 4, 4, 4), f(4, 1, 1, 2), f(4), *scalars(2, 1, 1, groups, 0, False)]


def depthwise(multiplier: int) -> list[Argument]:
    return [f(1, 4, 4, 2), f(1, 3, 3, 2), f(2), *scalars(2, 1, 1, multiplier, 0)]


def rnn(activation: int) -> list[Argument]:
    return [f(2, 3), f(4, 3), f(4, 4), f(4), f(2, 4), *scalars(activation)]


def svdf(activation: int) -> list[Argument]:
    return [f(2, 3), f(4, 3), f(4, 5), f(4), f(2, 20), *scalars(1, activation)]


def roi(
    regions: Any, batches: tuple[int, ...], extents: tuple[int, int] = (2, 2), stride: float = 1.0
) -> list[Argument]:
    sizes = scalars(*extents, stride, stride, 0, 0, False)
    return [f(2, 4, 4, 1), reals(regions), ints(*batches), *sizes]


def nms(*rest: float, batches: tuple[int, ...] = (0, 0)) -> list[Argument]:
    return [f(2, 2), f(2, 8), ints(*batches), *scalars(*rest)]


TWO = replace(F32, dimensions=(2,))
REGION = [0, 0, 3, 3]
TWO_F, NMS_OUTPUTS = [F32, F32], [F32, F32, I32, I32]

CASES: list[tuple[str, str, OperationType, list[Argument], list[Operand]]] = [
    ("N-OPF-1 GATHER above", "C1", Op.GATHER, [f(3, 2), *scalars(0), ints(3)], [F32]),
    ("N-OPF-1 GATHER below", "C1", Op.GATHER, [f(3, 2), *scalars(0), ints(-1)], [F32]),
    ("N-OPF-1 EMBEDDING_LOOKUP above", "C1", Op.EMBEDDING_LOOKUP, [ints(3), f(3, 2)], [F32]),
    ("N-OPF-1 EMBEDDING_LOOKUP below", "C1", Op.EMBEDDING_LOOKUP, [ints(-1), f(3, 2)], [F32]),
    ("N-OPF-1 axis above", "A1", Op.GATHER, [f(3, 2), *scalars(2), ints(0)], [F32]),
    ("N-OPF-1 axis below", "A1", Op.ARGMAX, [f(2, 2), *scalars(-3)], [I32]),
    ("N-OPF-1 axis of SPLIT", "A1", Op.SPLIT, [f(4), *scalars(1, 2)], TWO_F),
    ("N-OPF-2 RESHAPE count", "C1", Op.RESHAPE, [f(2, 3), ints(4, 2)], [F32]),
    ("N-OPF-2 RESHAPE two unknown", "C2", Op.RESHAPE, [f(2, 3), ints(-1, -1)], [F32]),
    ("N-OPF-2 SQUEEZE", "C3", Op.SQUEEZE, [f(2, 1), ints(0)], [F32]),
    ("N-OPF-2 SPLIT", "C6", Op.SPLIT, [f(3), *scalars(0, 2)], TWO_F),
    ("N-OPF-2 SPLIT into none", "C5", Op.SPLIT, [f(3), *scalars(0, 0)], TWO_F),
    ("N-OPF-2 SLICE begins below 0", "C2", Op.SLICE, [f(3), ints(-1), ints(2)], [F32]),
    ("N-OPF-2 SLICE beyond the end", "C2", Op.SLICE, [f(3), ints(1), ints(3)], [F32]),
    ("N-OPF-2 STRIDED_SLICE stride 0", "C3", Op.STRIDED_SLICE,
     [f(3), ints(0), ints(3), ints(0), *scalars(0, 0, 0)], [F32]),
    ("N-OPF-3 stride", "W2", Op.CONV_2D, conv(2, 0, 1, 0), [F32]),
    ("N-OPF-3 dilation", "W2", Op.CONV_2D, [*conv(2, 1, 1, 0), *scalars(False, 0, 1)], [F32]),
    ("N-OPF-3 padding below 0", "W3", Op.CONV_2D, conv(-1, 0, 0, 0, 1, 1, 0), [F32]),
    ("N-OPF-3 padding as large as the filter", "W4", Op.CONV_2D, conv(3, 0, 0, 0, 1, 1, 0), [F32]),
    ("N-OPF-3 channels", "C2", Op.CONV_2D, conv(2, 1, 1, 0, filter=f(3, 3, 3, 1)), [F32]),
    ("N-OPF-3 multiplier", "C4", Op.DEPTHWISE_CONV_2D, depthwise(0), [F32]),
    ("N-OPF-3 groups of 0", "C4", Op.GROUPED_CONV_2D, grouped(0), [F32]),
    ("N-OPF-3 groups that do not divide", "C4", Op.GROUPED_CONV_2D, grouped(3), [F32]),
    ("N-OPF-3 filter without channels", "C1", Op.DEPTHWISE_CONV_2D,
     [f(1, 4, 4, 2), f(3, 3, 2), f(2), *scalars(2, 1, 1, 1, 0)], [F32]),
    ("N-OPF-4 ADD", "Q5", Op.ADD, [f(2), f(2), *scalars(4)], [F32]),
    ("N-OPF-4 CONV_2D", "Q5", Op.CONV_2D, conv(2, 1, 1, -1), [F32]),
    ("N-OPF-4 FULLY_CONNECTED", "Q5", Op.FULLY_CONNECTED, [f(1, 4), f(2, 4), f(2), *scalars(7)], [F32]),
    ("N-OPF-4 RNN", "C4", Op.RNN, rnn(99), TWO_F),
    ("N-OPF-4 SVDF", "C4", Op.SVDF, svdf(99), TWO_F),
    ("N-OPF-5 LOGISTIC", "Q6", Op.LOGISTIC, [q(2)], [HALF]),
    ("N-OPF-5 TANH", "Q6", Op.TANH, [q(2)], [HALF]),
    ("N-OPF-5 SOFTMAX", "Q6", Op.SOFTMAX, [q(1, 2), *scalars(1.0)], [HALF]),
    ("N-OPF-5 L2_NORMALIZATION", "Q6", Op.L2_NORMALIZATION, [q(1, 2)], [HALF]),
    ("N-OPF-5 MUL", "Q2", Op.MUL, [q(2), q(2), *scalars(0)], [TINY]),
    ("N-OPF-5 ADD's multiplier", "Q2", Op.ADD, [q(2), q(2), *scalars(0)], [TINY]),
    ("N-OPF-6 quantization that passes through", "Q7", Op.RELU, [q(2)], [HALF]),
    ("N-OPF-7 batch below 0", "X3", Op.ROI_ALIGN, roi([REGION], (-1,)), [F32]),
    ("N-OPF-7 batch out of range", "X3", Op.ROI_POOLING, [*roi([REGION], (2,))[:7], *scalars(False)], [F32]),
    ("N-OPF-7 x2 under x1", "X2", Op.ROI_ALIGN, roi([[3, 0, 0, 3]], (0,)), [F32]),
    ("N-OPF-7 output of no extent", "C3", Op.ROI_ALIGN, roi([REGION], (0,), (0, 2)), [F32]),
    ("N-OPF-7 stride of 0", "C3", Op.ROI_ALIGN, roi([REGION], (0,), stride=0.0), [F32]),
    ("N-OPF-7 NMS kernel", "C1", Op.BOX_WITH_NMS_LIMIT, nms(0.1, -1, 3, 0.5, 0.5, 0.1), NMS_OUTPUTS),
    ("N-OPF-7 NMS batches out of order", "C2", Op.BOX_WITH_NMS_LIMIT,
     nms(0.1, -1, 0, 0.5, 0.5, 0.1, batches=(1, 0)), NMS_OUTPUTS),
    ("N-OPF-8 TOPK of none", "C4", Op.TOPK_V2, [f(3), *scalars(0)], [F32, I32]),
    ("N-OPF-8 TOPK below", "C4", Op.TOPK_V2, [f(3), *scalars(-1)], [F32, I32]),
    ("N-OPF-8 TOPK of too many", "C4", Op.TOPK_V2, [f(3), *scalars(4)], [F32, I32]),
    ("N-OPF-8 TOPK of no rank", "R1", Op.TOPK_V2, [(F32, np.array(1, np.float32)), *scalars(1)], [F32, I32]),
    ("N-OPF-8 TILE", "C3", Op.TILE, [f(2), ints(-1)], [F32]),
    ("N-OPF-8 FILL", "C1", Op.FILL, [ints(-2), *scalars(1.0)], [F32]),
    ("N-OPF-8 PAD", "C1", Op.PAD, [f(2), ints([-1, 0])], [F32]),
    ("N-OPF-10 EXPAND_DIMS of nothing", "R3", Op.EXPAND_DIMS, [f(0, 2), *scalars(0)], [F32]),
    ("N-OPF-10 LSH_PROJECTION of no rank", "R1", Op.LSH_PROJECTION,
     [f(2, 2), (I32, np.array(1, np.int32)), f(1), *scalars(2)], [I32]),
    ("N-OPF-11 TILE", "R2", Op.TILE, [f(1 << 10), ints(1 << 22)], [F32]),
    ("N-OPF-11 PAD", "R2", Op.PAD, [f(2), ints([0, (1 << 31) - 1])], [F32]),
    ("N-OPF-11 FILL", "R2", Op.FILL, [ints(1 << 20, 1 << 12), *scalars(1.0)], [F32]),
]  # fmt: skip
