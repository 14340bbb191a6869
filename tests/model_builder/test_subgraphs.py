"""Models that call others: IF and WHILE, and how the parts of several builders become one model."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.rebuilt import content

import nnfmq
from nnfmq.engines import interpreter
from nnfmq.hal.types import ExtensionNameAndPrefix, LifeTime, Model, OperandType
from nnfmq.validation import validate_model

F32, LARGE = "TENSOR_FLOAT32", 64  # elements; more than 128 bytes


def binary(stack: ExitStack, operation: str, second: float | None = None, count: int = LARGE) -> nnfmq.ModelBuilder:
    """Return a finished model of one operation on its input and a constant, or a second input."""
    builder = stack.enter_context(nnfmq.ModelBuilder())
    x, y, none, result = (
        builder.add_operand(*o) for o in ((F32, (count,)), (F32, (count,)), ("INT32",), (F32, (count,)))
    )
    builder.set_operand_value(none, 0)
    if second is not None:
        builder.set_operand_value(y, np.full(count, second, np.float32))
    builder.add_operation(operation, [x, y, none], [result])
    builder.identify_inputs_and_outputs([x] if second is not None else [x, y], [result])
    builder.finish()
    return builder


def branching(
    stack: ExitStack, then: nnfmq.ModelBuilder, otherwise: nnfmq.ModelBuilder, count: int = LARGE
) -> nnfmq.ModelBuilder:
    """Return a finished model that applies one of two models of one input: inputs are the condition and x."""
    builder = stack.enter_context(nnfmq.ModelBuilder())
    condition, first, second = (builder.add_operand(*o) for o in (("TENSOR_BOOL8", (1,)), ("SUBGRAPH",), ("SUBGRAPH",)))
    x, result = builder.add_operand(F32, (count,)), builder.add_operand(F32, (count,))
    builder.set_operand_value_from_model(first, then)
    builder.set_operand_value_from_model(second, otherwise)
    builder.add_operation("IF", [condition, first, second, x], [result])
    builder.identify_inputs_and_outputs([condition, x], [result])
    builder.finish()
    return builder


def run(model: Model, *inputs: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Execute a model in the reference interpreter; return its only output."""
    validate_model(model)
    output = model.main.operands[model.main.output_indexes[0]]
    result = np.empty(output.dimensions, np.float32)
    stored = [array.view(np.uint8) if array.dtype == bool else array for array in inputs]
    interpreter.prepare(model).execute(stored, [result])
    return result


X = np.arange(LARGE, dtype=np.float32)
YES, NO = np.array([True]), np.array([False])


@pytest.mark.parametrize("count", [4, LARGE])
def test_API_3_an_IF_calls_one_of_two_models_with_constants_of_their_own(resources: ExitStack, count: int) -> None:
    branches = binary(resources, "ADD", 10, count), binary(resources, "MUL", 3, count)
    model = branching(resources, *branches, count).model
    resources.close()
    x = np.arange(count, dtype=np.float32)
    assert run(model, YES, x).tolist() == [value + 10 for value in range(count)]
    assert run(model, NO, x).tolist() == [value * 3 for value in range(count)]


def test_API_3_models_are_called_at_any_depth(resources: ExitStack) -> None:
    inner = branching(resources, binary(resources, "ADD", 1), binary(resources, "ADD", 2))
    outer = branching(resources, binary(resources, "SUB", 7), nested(resources, inner))
    assert len(outer.model.referenced) == 5
    assert run(outer.model, YES, X).tolist() == (X - 7).tolist()
    assert run(outer.model, NO, X).tolist() == (X + 2).tolist()


def nested(stack: ExitStack, inner: nnfmq.ModelBuilder) -> nnfmq.ModelBuilder:
    """Return a finished model of one input that takes the second branch of `inner`'s."""
    builder = stack.enter_context(nnfmq.ModelBuilder())
    x, result = builder.add_operand(F32, (LARGE,)), builder.add_operand(F32, (LARGE,))
    never, same, other = builder.add_operand("TENSOR_BOOL8", (1,)), *(builder.add_operand("SUBGRAPH") for _ in range(2))
    builder.set_operand_value(never, [False])
    builder.set_operand_value_from_model(same, inner)
    builder.set_operand_value_from_model(other, inner)
    builder.add_operation("IF", [never, same, other, never, x], [result])
    builder.identify_inputs_and_outputs([x], [result])
    builder.finish()
    return builder


def test_API_3_a_WHILE_calls_its_condition_and_body(resources: ExitStack) -> None:
    """It doubles x until a counter is 5."""
    condition = resources.enter_context(nnfmq.ModelBuilder())
    i, x, limit, result = (
        condition.add_operand(*o)
        for o in (("TENSOR_INT32", (1,)), (F32, (2,)), ("TENSOR_INT32", (1,)), ("TENSOR_BOOL8", (1,)))
    )
    condition.set_operand_value(limit, [5])
    condition.add_operation("LESS", [i, limit], [result])
    condition.identify_inputs_and_outputs([i, x], [result])
    condition.finish()

    body = resources.enter_context(nnfmq.ModelBuilder())
    i, x, one, none = (
        body.add_operand(*o) for o in (("TENSOR_INT32", (1,)), (F32, (2,)), ("TENSOR_INT32", (1,)), ("INT32",))
    )
    next_i, next_x = body.add_operand("TENSOR_INT32", (1,)), body.add_operand(F32, (2,))
    body.set_operand_value(one, [1])
    body.set_operand_value(none, 0)
    body.add_operation("ADD", [i, one, none], [next_i])
    body.add_operation("ADD", [x, x, none], [next_x])
    body.identify_inputs_and_outputs([i, x], [next_i, next_x])
    body.finish()

    main = resources.enter_context(nnfmq.ModelBuilder())
    called = [main.add_operand("SUBGRAPH") for _ in range(2)]
    i, x, last_i, last_x = (main.add_operand(*o) for o in (("TENSOR_INT32", (1,)), (F32, (2,))) * 2)
    main.set_operand_value(i, [0])
    for operand, builder in zip(called, (condition, body), strict=True):
        main.set_operand_value_from_model(operand, builder)
    main.add_operation("WHILE", [*called, i, x], [last_i, last_x])
    main.identify_inputs_and_outputs([x], [last_x])
    main.finish()
    assert run(main.model, np.array([1, 3], np.float32)).tolist() == [32, 96]


# -- parts of several builders ----------------------------------------------------------------------------------------


def test_API_3_a_model_that_is_called_twice_is_there_once(resources: ExitStack) -> None:
    same = binary(resources, "ADD", 10)
    model = branching(resources, same, same).model
    assert len(model.referenced) == len(model.pools) == 1
    assert run(model, NO, X).tolist() == (X + 10).tolist()


def test_API_3_a_model_called_at_two_depths_keeps_one_copy_of_its_constants(resources: ExitStack) -> None:
    same = binary(resources, "ADD", 10)
    model = branching(resources, same, nested(resources, branching(resources, binary(resources, "MUL", 2), same))).model
    assert len(model.pools) == 2
    assert run(model, YES, X).tolist() == (X + 10).tolist()
    assert run(model, NO, X).tolist() == (X + 10).tolist()


def test_API_3_pools_of_all_models_come_together(resources: ExitStack) -> None:
    model = branching(resources, binary(resources, "ADD", 10), binary(resources, "MUL", 3)).model
    constants = [
        content(model, operand)
        for graph in model.referenced
        for operand in graph.operands
        if operand.lifetime == LifeTime.CONSTANT_REFERENCE
    ]
    assert constants == [np.full(LARGE, value, np.float32).tobytes() for value in (10, 3)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_API_3_constants_of_each_model_remain_aligned(resources: ExitStack, size: int) -> None:
    """The main model has `size` bytes of constants, so those of the called ones begin at the next multiple of 4."""
    branches = binary(resources, "ADD", 10, 4), binary(resources, "MUL", 3, 4)
    builder = resources.enter_context(nnfmq.ModelBuilder())
    padding = builder.add_operand("TENSOR_QUANT8_ASYMM", (size,), 1.0)
    copy = builder.add_operand("TENSOR_QUANT8_ASYMM", (size,), 1.0)
    condition, first, second = (builder.add_operand(*o) for o in (("TENSOR_BOOL8", (1,)), ("SUBGRAPH",), ("SUBGRAPH",)))
    x, result = builder.add_operand(F32, (4,)), builder.add_operand(F32, (4,))
    builder.set_operand_value(padding, bytes(range(size)))
    for operand, branch in ((first, branches[0]), (second, branches[1])):
        builder.set_operand_value_from_model(operand, branch)
    builder.add_operation("IF", [condition, first, second, x], [result])
    builder.add_operation("RELU", [padding], [copy])
    builder.identify_inputs_and_outputs([condition, x], [result, copy])
    builder.finish()
    offsets = [
        operand.location.offset
        for graph in builder.model.referenced
        for operand in graph.operands
        if operand.lifetime == LifeTime.CONSTANT_COPY
    ]
    assert len(offsets) == 4
    assert [offset % 4 for offset in offsets] == [0] * 4
    assert builder.model.operand_values[:size] == bytes(range(size))


def extended(stack: ExitStack, name: str, *others: str) -> nnfmq.ModelBuilder:
    """Return a finished model of one input with operation 5 of the extension `name`; it mentions `others` first."""
    builder = stack.enter_context(nnfmq.ModelBuilder())
    for other in others:
        builder.get_extension_operation_type(other, 0)
    x, result = builder.add_operand(F32, (LARGE,)), builder.add_operand(F32, (LARGE,))
    middle = builder.add_operand(builder.get_extension_operand_type(name, 7), (2,))
    builder.set_extension_data(middle, b"data")
    code = builder.get_extension_operation_type(name, 5)
    builder.add_operation(code, [x], [middle])
    builder.add_operation(code, [middle], [result])
    builder.identify_inputs_and_outputs([x], [result])
    builder.finish()
    return builder


def test_API_3_extensions_of_called_models_get_the_prefixes_of_the_calling_one(resources: ExitStack) -> None:
    first, second, third = "com.example.a", "com.example.b", "com.example.c"
    one, two = extended(resources, second), extended(resources, third, first, second)
    assert one.model.extensions != two.model.extensions
    model = branching(resources, one, two).model
    prefixes = {entry.name: entry.prefix for entry in model.extensions}
    assert set(prefixes) == {second, third}
    for graph, name in zip(model.referenced, (second, third), strict=True):
        assert {operation.type for operation in graph.operations} == {prefixes[name] << 16 | 5}
        (operand,) = (operand for operand in graph.operands if operand.extension_data)
        assert operand.type == prefixes[name] << 16 | 7
    assert model.extensions == tuple(ExtensionNameAndPrefix(name, prefixes[name]) for name in prefixes)


def test_API_3_a_called_model_with_an_extension_that_the_device_lacks_is_rejected(resources: ExitStack) -> None:
    class Described:
        """An extension without operand types."""

        name, operand_types = "com.example.a", ()

    builder = resources.enter_context(nnfmq.ModelBuilder(extensions=[Described()]))
    builder.add_operand("SUBGRAPH")
    builder.set_operand_value_from_model(0, extended(resources, "com.example.b"))
    with pytest.raises(nnfmq.InvalidArgument, match=r"there is no extension 'com\.example\.b'"):
        builder.finish()


def test_API_3_boundaries_of_unknown_size_are_left_to_the_runtime(resources: ExitStack) -> None:
    """No driver takes them, N-VAL-20; a runtime interprets the IF itself."""
    model = branching(resources, binary(resources, "ADD", 1), binary(resources, "MUL", 2), 0).model
    with pytest.raises(nnfmq.InvalidArgument, match="N-VAL-20"):
        validate_model(model)
    assert model.main.operands[0].type == OperandType.TENSOR_BOOL8
