"""Existing models, built once more through ModelBuilder, as an application would with NNAPI's functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import nnfmq
from nnfmq.hal.types import LifeTime, Model, Operand, Subgraph

_CONSTANTS = (LifeTime.CONSTANT_COPY, LifeTime.CONSTANT_REFERENCE)


def rebuilt(model: Model, order: Sequence[int] | None = None) -> nnfmq.ModelBuilder:
    """Return a finished builder of the same model, which has no extensions. The caller closes it.

    The operations of the main subgraph are added in `order`, by default in that of `model`.
    """
    with ExitStack() as stack:
        built: dict[int, nnfmq.ModelBuilder] = {}

        def called(index: int) -> nnfmq.ModelBuilder:
            if index not in built:
                built[index] = stack.enter_context(_built(model, model.referenced[index], called))
            return built[index]

        return _built(model, model.main, called, order)


def _built(
    model: Model,
    graph: Subgraph,
    called: Callable[[int], nnfmq.ModelBuilder],
    order: Sequence[int] | None = None,
) -> nnfmq.ModelBuilder:
    builder = nnfmq.ModelBuilder()
    for index, operand in enumerate(graph.operands):
        assert builder.add_operand(operand.type, operand.dimensions, operand.scale, operand.zero_point) == index
        if operand.channel_quant is not None:
            builder.set_per_channel_quant_params(index, operand.channel_quant.scales, operand.channel_quant.channel_dim)
        if operand.lifetime == LifeTime.SUBGRAPH:
            builder.set_operand_value_from_model(index, called(operand.location.offset))
        elif operand.lifetime == LifeTime.NO_VALUE:
            builder.set_operand_value(index, None)
        elif operand.lifetime in _CONSTANTS:
            builder.set_operand_value(index, content(model, operand))
    for position in range(len(graph.operations)) if order is None else order:
        operation = graph.operations[position]
        builder.add_operation(operation.type, operation.inputs, operation.outputs)
    builder.identify_inputs_and_outputs(graph.input_indexes, graph.output_indexes)
    builder.relax_computation(model.relax_computation_float32_to_float16)
    builder.finish()
    return builder


def content(model: Model, operand: Operand) -> bytes:
    """Return the bytes of a constant operand."""
    is_copy = operand.lifetime == LifeTime.CONSTANT_COPY
    source = model.operand_values if is_copy else model.pools[operand.location.pool_index].view
    return bytes(source[operand.location.offset : operand.location.offset + operand.location.length])
