"""Sub-models: the operands of some operations, with the constants, pools, subgraphs and extensions that they use."""

from __future__ import annotations

import struct

import pytest
from msgspec.structs import replace
from support.control_flow_models import REAL, TRUTH, Parts, branching, counting, inputs, named, output
from support.sketches import VECTOR, Sketch
from support.small_models import scalar

from nnfmq.engines.interpreter import load_constant
from nnfmq.hal.types import (
    DataLocation,
    ExtensionNameAndPrefix,
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
)
from nnfmq.lab.conformance.testmodels import BytesPool
from nnfmq.planning.sub_models import extract_model, has_unknown_size, subgraph_as_model
from nnfmq.validation import validate_model

ADD, RELU, IF, WHILE = OperationType.ADD, OperationType.RELU, OperationType.IF, OperationType.WHILE


def constants(model: Model, graph: Subgraph) -> list[object]:
    arrays = [load_constant(model, operand) for operand in graph.operands]
    return [array.tolist() for array in arrays if array is not None]


def test_PART_5_a_step_gets_copies_of_the_small_constants_that_it_uses_and_of_no_others() -> None:
    sketch = Sketch()
    x, between, last, none = sketch.input(), sketch.temporary(), sketch.output(), sketch.constant(0)
    ones = sketch.constant((VECTOR, struct.pack("<4f", 1, 1, 1, 1)))
    twos = sketch.constant((VECTOR, struct.pack("<4f", 2, 2, 2, 2)))
    sketch.operation(ADD, [x, ones, none], between)
    sketch.operation(ADD, [between, twos, none], last)
    model = sketch.model()

    part = extract_model(model, 0, [1], [between], [last])

    assert validate_model(part) == 1
    assert sorted(map(str, constants(part, part.main))) == ["0", "[2.0, 2.0, 2.0, 2.0]"]
    assert len(part.operand_values) < len(model.operand_values)
    assert part.main.operations == (Operation(ADD, (0, 3, 2), (1,)),)  # operands in the order of the source
    assert [o.lifetime for o in part.main.operands[:2]] == [LifeTime.SUBGRAPH_INPUT, LifeTime.SUBGRAPH_OUTPUT]


def test_PART_5_constants_are_aligned_for_vector_instructions_and_stored_once() -> None:
    sketch = Sketch()
    x, last = sketch.input(), sketch.output()
    scalars = [sketch.constant(False), sketch.constant(0)]
    ones = sketch.constant((VECTOR, struct.pack("<4f", 1, 1, 1, 1)))
    sketch.operation(ADD, [x, ones, scalars[1]], last)
    model = sketch.model()
    operands = list(model.main.operands)
    operands.append(operands[ones])  # a second operand with the same bytes
    model = replace(model, main=replace(model.main, operands=tuple(operands)))
    both = Operation(ADD, (ones, len(operands) - 1, scalars[1]), (last,))
    model = replace(model, main=replace(model.main, operations=(both,)))

    part = extract_model(model, 0, [0], [], [last])

    locations = [o.location for o in part.main.operands if o.type == OperandType.TENSOR_FLOAT32 and o.location.length]
    assert locations[0] == locations[1]
    assert locations[0].offset % 16 == 0
    assert len(part.operand_values) == 32


def test_PART_5_large_constants_stay_in_their_pools_which_are_shared() -> None:
    pools = [BytesPool(bytes(16)), BytesPool(struct.pack("<8f", *range(8)))]
    sketch = Sketch()
    x, between, last, none = sketch.input(), sketch.temporary(), sketch.output(), sketch.constant(0)
    referenced = replace(VECTOR, lifetime=LifeTime.CONSTANT_REFERENCE)
    first = sketch.other(replace(referenced, location=DataLocation(0, 0, 16)))
    second = sketch.other(replace(referenced, location=DataLocation(1, 16, 16)))
    sketch.operation(ADD, [x, first, none], between)
    sketch.operation(ADD, [between, second, none], last)
    model = sketch.model(pools=tuple(pools))

    part = extract_model(model, 0, [1], [between], [last])

    assert validate_model(part) == 1
    assert part.pools[0] is pools[1]
    assert len(part.pools) == 1
    assert [4.0, 5.0, 6.0, 7.0] in constants(part, part.main)


def test_PART_5_a_step_with_a_loop_has_the_subgraphs_of_that_loop_at_any_depth() -> None:
    parts = Parts()
    unused = parts.binary(OperationType.MUL)
    inner = [named(parts.binary(ADD)), named(parts.binary(OperationType.SUB))]
    condition, x, y = inputs(TRUTH, REAL, REAL)
    nested = parts.add([condition, *inner, x, y, output(REAL)], [Operation(IF, (0, 1, 2, 3, 4), (5,))])
    operands = [condition, named(nested), x, y, output(REAL), output(REAL), named(unused)]
    operations = [Operation(IF, (0, 6, 6, 2, 3), (4,)), Operation(IF, (0, 1, 1, 0, 2, 3), (5,))]
    model = parts.model(operands, operations)

    part = extract_model(model, 0, [1], [0, 2, 3], [5])

    assert validate_model(part) == 4
    called = [[operation.type for operation in graph.operations] for graph in part.referenced]
    assert called == [[IF], [ADD], [OperationType.SUB]]
    assert [constants(part, graph) for graph in part.referenced] == [[], [0], [0]]


def test_PART_5_a_step_names_only_extensions_that_it_uses_and_keeps_the_relaxed_flag() -> None:
    names = (ExtensionNameAndPrefix("com.acme.dsp", 5), ExtensionNameAndPrefix("com.acme.npu", 6))
    sketch = Sketch()
    x, between = sketch.input(), sketch.temporary(Operand(OperandType(6 << 16 | 1), (2,)))
    last = sketch.output()
    sketch.operation(OperationType(5 << 16 | 1), [x], between)
    sketch.operation(OperationType(6 << 16 | 1), [between], last)
    model = sketch.model(extensions=names, relax_computation_float32_to_float16=True)

    first, second = extract_model(model, 0, [0], [x], [between]), extract_model(model, 0, [1], [between], [last])

    assert [first.extensions, second.extensions] == [names, names[1:]]
    assert first.relax_computation_float32_to_float16
    assert [validate_model(first), validate_model(second)] == [3, 3]


def test_PART_5_an_omitted_operand_stays_omitted() -> None:
    sketch = Sketch()
    omitted = sketch.other(Operand(OperandType.TENSOR_FLOAT32, lifetime=LifeTime.NO_VALUE))
    x, last = sketch.input(), sketch.output()
    sketch.operation(OperationType(5 << 16 | 1), [x, omitted], last)
    model = sketch.model(extensions=(ExtensionNameAndPrefix("com.acme.dsp", 5),))

    part = extract_model(model, 0, [0], [x], [last])

    assert part.main.operands[0].lifetime == LifeTime.NO_VALUE


def test_a_subgraph_becomes_the_main_one_of_a_model_of_its_own() -> None:
    model = counting()

    body = subgraph_as_model(model, 2)

    assert subgraph_as_model(model, 0) is model
    assert validate_model(body) == 4  # ADD of TENSOR_INT32
    assert [operation.type for operation in body.main.operations] == [ADD, ADD]
    assert not body.referenced
    assert sorted(map(str, constants(body, body.main))) == ["0", "[1]"]


@pytest.mark.parametrize(
    ("operand", "is_unknown"),
    [
        (Operand(OperandType.TENSOR_FLOAT32, (2, 3)), False),
        (Operand(OperandType.TENSOR_FLOAT32, (2, 0)), True),
        (Operand(OperandType.TENSOR_FLOAT32), True),
        (scalar(0)[0], False),
        (branching().main.operands[1], False),
        (Operand(OperandType.TENSOR_FLOAT32, lifetime=LifeTime.NO_VALUE), False),
        (Operand(OperandType(5 << 16 | 1)), False),
        (Operand(OperandType(5 << 16 | 1), (0,)), True),
    ],
)
def test_an_operand_has_an_unknown_size_if_it_is_a_tensor_with_an_unknown_dimension(
    operand: Operand, is_unknown: bool
) -> None:
    assert has_unknown_size(operand) == is_unknown
