"""The hash of a model's architecture: what changes it, and what does not."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.models import add_model, gather_model, unsized_relu_model, weighty_model

from nnfmq.hal.models import model_architecture_hash
from nnfmq.hal.types import ChannelQuant, LifeTime, Model, Operand, OperandType, OperationType, Subgraph

FIXED = Operand(OperandType.TENSOR_FLOAT32, (1, 2))
FIXED_GRAPH = Subgraph((FIXED,), (), (0,), ())


def test_API_4_OBS_1_the_hash_is_that_of_the_architecture_alone() -> None:
    assert model_architecture_hash(weighty_model(1.0)) == model_architecture_hash(weighty_model(2.0))
    different = [
        add_model(),
        add_model((5,)),
        gather_model(),
        unsized_relu_model(),
        weighty_model(),
        Model(FIXED_GRAPH),
    ]
    assert len({model_architecture_hash(model) for model in different}) == len(different)
    assert len(model_architecture_hash(add_model())) == 64


@pytest.mark.parametrize(
    "changed",
    [
        replace(FIXED, type=OperandType.TENSOR_INT32),
        replace(FIXED, dimensions=(2, 1)),
        replace(FIXED, dimensions=(1, 2, 1)),
        replace(FIXED, scale=0.5),
        replace(FIXED, zero_point=1),
        replace(FIXED, lifetime=LifeTime.CONSTANT_COPY),
        replace(FIXED, channel_quant=ChannelQuant((0.5,), 0)),
        replace(FIXED, channel_quant=ChannelQuant((0.5, 0.5), 0)),
        replace(FIXED, channel_quant=ChannelQuant((0.5,), 1)),
    ],
)
def test_API_4_OBS_1_each_property_of_an_operand_is_part_of_the_hash(changed: Operand) -> None:
    before = model_architecture_hash(Model(FIXED_GRAPH))
    assert model_architecture_hash(Model(replace(FIXED_GRAPH, operands=(changed,)))) != before


def test_API_4_OBS_1_operations_and_boundaries_are_part_of_the_hash() -> None:
    main = add_model().main
    (operation,) = main.operations
    changed = [
        replace(main, operations=(replace(operation, type=OperationType.MUL),)),
        replace(main, operations=(replace(operation, inputs=operation.inputs[::-1]),)),
        replace(main, input_indexes=main.input_indexes[::-1]),
        replace(main, output_indexes=()),
    ]
    models = [Model(main), Model(main, (main,)), *map(Model, changed)]
    assert len({model_architecture_hash(model) for model in models}) == len(models)
