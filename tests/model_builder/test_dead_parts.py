"""Operands, subgraphs and pools without a use are removed; everything else refers to the same things as before."""

from __future__ import annotations

from msgspec.structs import replace
from support.control_flow_models import branching, counting, named
from support.models import add_model, relu_model
from support.small_models import F32

from nnfmq.hal.models import without_unused_operands
from nnfmq.hal.types import DataLocation, LifeTime, Model, Operand, Subgraph
from nnfmq.lab.conformance.testmodels import BytesPool
from nnfmq.model_builder.simplification import prepare_for_compilation, without_dead_parts

FIRST, SECOND, THIRD = (BytesPool(bytes([value]) * 16) for value in (1, 2, 3))


def in_pool(index: int, size: int = 4) -> Operand:
    location = DataLocation(index, 0, 4 * size)
    return Operand(F32, (size,), lifetime=LifeTime.CONSTANT_REFERENCE, location=location)


def with_first_operands(graph: Subgraph, *operands: Operand) -> Subgraph:
    """Return the subgraph with unused operands before the others."""
    by = len(operands)

    def moved(indexes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(index + by for index in indexes)

    operations = tuple(replace(o, inputs=moved(o.inputs), outputs=moved(o.outputs)) for o in graph.operations)
    return Subgraph((*operands, *graph.operands), operations, moved(graph.input_indexes), moved(graph.output_indexes))


def test_API_4_a_model_without_dead_parts_is_returned_itself() -> None:
    for model in (add_model(), branching(), counting()):
        assert without_dead_parts(model) is model
        assert prepare_for_compilation(model) is model


def test_API_4_unused_operands_are_removed() -> None:
    main = add_model().main
    dead = with_first_operands(main, Operand(F32, (3,), lifetime=LifeTime.NO_VALUE), named(0))
    assert without_unused_operands(dead) == main
    assert without_unused_operands(main) is main


def test_API_4_unused_inputs_remain_because_executions_have_arguments_for_them() -> None:
    main = relu_model().main
    graph = replace(
        main, operands=(*main.operands, main.operands[0]), input_indexes=(*main.input_indexes, len(main.operands))
    )
    assert without_unused_operands(graph) is graph


def test_API_4_unused_operands_of_referenced_subgraphs_are_removed() -> None:
    model = branching()
    dead = with_first_operands(model.referenced[0], Operand(F32, (3,), lifetime=LifeTime.NO_VALUE))
    assert without_dead_parts(replace(model, referenced=(dead, model.referenced[1]))) == model


def test_API_4_subgraphs_that_nothing_calls_are_removed_and_the_others_renumbered() -> None:
    model = branching()
    shifted = tuple(
        replace(operand, location=replace(operand.location, offset=operand.location.offset + 1))
        if operand.lifetime == LifeTime.SUBGRAPH
        else operand
        for operand in model.main.operands
    )
    padded = replace(
        model, main=replace(model.main, operands=shifted), referenced=(relu_model().main, *model.referenced)
    )
    assert without_dead_parts(padded) == model


def test_API_4_a_subgraph_whose_only_caller_is_dead_is_removed_with_it() -> None:
    model = add_model()
    caller = with_first_operands(relu_model().main, named(0))
    dead = with_first_operands(model.main, named(1))
    result = without_dead_parts(replace(model, main=dead, referenced=(relu_model().main, caller)))
    assert result == model


def test_API_4_subgraphs_that_are_called_indirectly_remain() -> None:
    inner, outer = relu_model().main, branching()
    middle = replace(inner, operands=(*inner.operands, named(2)))
    calls = replace(middle, operations=(replace(middle.operations[0], inputs=(0, len(inner.operands))),))
    model = replace(outer, referenced=(calls, outer.referenced[1], inner))
    assert without_dead_parts(model) is model


def test_API_4_pools_without_constants_are_removed_and_the_others_renumbered() -> None:
    main = add_model().main
    used = replace(main, operands=(main.operands[0], in_pool(2), *main.operands[2:]), input_indexes=(0,))
    model = Model(used, (), add_model().operand_values, (FIRST, SECOND, THIRD))
    result = without_dead_parts(model)
    assert result.pools == (THIRD,)
    assert result.main.operands[1] == in_pool(0)
    assert result.operand_values is model.operand_values
