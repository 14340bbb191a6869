"""Count the arithmetic and memory traffic of a model, and generate models of one operation. Used by model_bench.py.

Multiply-accumulates are counted as `nnfmq profile` counts them. Bytes are those of every operation's inputs, constants
and outputs, as if no cache kept them between two operations. The quotient is the arithmetic intensity of the roofline
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from model_bench_jobs import GeneratedModel

from nnfmq.engines.interpreter import prepare
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import (
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    PaddingScheme,
    Subgraph,
    operand_bytes,
)
from nnfmq.importers.graph_builder import GraphBuilder
from nnfmq.operations import REGISTRY
from nnfmq.operations.op_cost import compute_op_cost
from nnfmq.operations.signature import Shape, match

OPERATIONS_PER_MULTIPLY_ADD = 2
_CONSTANT_BYTES = 1 << 26
_SCALE = 0.02


@dataclass(frozen=True, slots=True)
class ModelCost:
    """The cost of executing a model once; `is_quantized`: its products are of quantized values."""

    multiply_adds: int
    bytes: int
    is_quantized: bool

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return OPERATIONS_PER_MULTIPLY_ADD * self.multiply_adds

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.operations / self.bytes


def count_model_cost(model: Model) -> ModelCost:
    """Return the cost of a model. Bytes of operands whose shape is unknown before the execution are not counted."""
    main = model.main
    shapes = prepare(model).shapes
    multiply_adds = sum(_multiply_adds(main, operation, shapes) for operation in main.operations)
    indexes = (index for o in main.operations for index in (*o.inputs, *o.outputs))
    moved = sum(operand_bytes(main.operands[index]) for index in indexes)
    quantized = main.operands[main.input_indexes[0]].type != OperandType.TENSOR_FLOAT32
    return ModelCost(multiply_adds, moved, quantized)


def _multiply_adds(graph: Subgraph, operation: Operation, shapes: Sequence[Shape | None]) -> int:
    inputs, outputs = (
        [graph.operands[index] for index in indexes] for indexes in (operation.inputs, operation.outputs)
    )
    given = [None if graph.operands[i].lifetime == LifeTime.NO_VALUE else shapes[i] for i in operation.inputs]
    made = [shape for i in operation.outputs if (shape := shapes[i]) is not None]
    found = match(REGISTRY[operation.type], inputs, outputs)
    return compute_op_cost(found, given, made).multiply_adds or 0 if made else 0


# ---- generated models

KINDS = {"convolution 3×3": OperationType.CONV_2D, "depthwise 3×3": OperationType.DEPTHWISE_CONV_2D}
TYPES = {"float32": OperandType.TENSOR_FLOAT32, "uint8": OperandType.TENSOR_QUANT8_ASYMM}


def generate_model(kind: str, dtype: str, size: int, channels: int) -> GeneratedModel:
    """Return a model of one operation on `size` × `size` pixels with `channels` input and output channels."""
    builder, tensor = GraphBuilder(_CONSTANT_BYTES), TYPES[dtype]
    shape, code = (1, size, size, channels), KINDS[kind]
    depth = 1 if code == OperationType.DEPTHWISE_CONV_2D else channels
    source = builder.operand(_value(tensor, shape, LifeTime.SUBGRAPH_INPUT))
    filters = _weights(builder, tensor, (depth, 3, 3, channels))
    bias = builder.zeros(
        OperandType.TENSOR_FLOAT32 if dtype == "float32" else OperandType.TENSOR_INT32,
        0.0 if dtype == "float32" else _SCALE * _SCALE,
        channels,
    )
    controls = [PaddingScheme.SAME, 1, 1, *([1] if depth == 1 else []), 0]
    output = builder.operand(_value(tensor, shape, LifeTime.SUBGRAPH_OUTPUT))
    builder.operation(code, [source, filters, bias, *map(builder.int32, controls)], output)
    model = builder.build([source], [output])
    infos = [TensorInfo(name, shape, dtype, _SCALE, 0) for name in ("input", "output")]
    return GeneratedModel(model, (infos[0],), (infos[1],))


def _value(tensor: OperandType, shape: tuple[int, ...], lifetime: LifeTime) -> Operand:
    scale = 0.0 if tensor == OperandType.TENSOR_FLOAT32 else _SCALE
    return Operand(tensor, shape, scale, 0, lifetime)


def _weights(builder: GraphBuilder, tensor: OperandType, shape: tuple[int, ...]) -> int:
    random = np.random.default_rng(5)
    is_float = tensor == OperandType.TENSOR_FLOAT32
    array = random.normal(size=shape).astype(np.float32) if is_float else random.integers(0, 256, shape, np.uint8)
    location = builder.constant(array.tobytes())
    scale, zero_point = (0.0, 0) if is_float else (_SCALE, 128)
    return builder.operand(Operand(tensor, shape, scale, zero_point, LifeTime.CONSTANT_COPY, location))
