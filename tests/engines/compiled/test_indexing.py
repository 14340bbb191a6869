"""Kernels whose indices come with the request, compared with the interpreter: results, and errors of bad indices."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from support.compiled import assert_kernels_agree, assert_kernels_agree_on, outputs_of
from support.small_models import OUTPUT, TEMPORARY, graph, one_operation, scalar, vector

from nnfmq.engines import interpreter
from nnfmq.engines.compiled.partition import prepare
from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.extensions import NAME, PREFIX, Scheme, TfliteOperation, extended_code, operation_code
from nnfmq.hal.types import ExtensionNameAndPrefix, LifeTime, Model, Operand, OperandType, Operation, OperationType
from nnfmq.operations.declaration import NUMPY_TYPES, Array

pytestmark = pytest.mark.instruction_sets

F32, F16, I32, B8, Q8 = (
    OperandType.TENSOR_FLOAT32,
    OperandType.TENSOR_FLOAT16,
    OperandType.TENSOR_INT32,
    OperandType.TENSOR_BOOL8,
    OperandType.TENSOR_QUANT8_ASYMM,
)
WIDE = [kind for kind in NUMPY_TYPES if getattr(kind, "name", "").startswith("nnfmq.tflite.")]
I64, F64 = (next(kind for kind in WIDE if kind.name.endswith(name)) for name in ("INT64", "FLOAT64"))
GATHER_WIDER = extended_code(OperationType.GATHER, Scheme.WIDER)
MANY = (300, 40)  # more than a work item


def declared(model: Model) -> Model:
    """Return a model that may use the extension."""
    return replace(model, extensions=(ExtensionNameAndPrefix(NAME, PREFIX),))


def operand(kind: OperandType, shape: tuple[int, ...]) -> Operand:
    return Operand(kind, shape, 0.5 if kind == Q8 else 0.0)


def values(kind: OperandType, shape: tuple[int, ...], seed: int = 0) -> Array:
    dtype = np.dtype(NUMPY_TYPES[kind])
    random = np.random.default_rng(seed)
    if dtype.kind == "f":
        return random.normal(size=shape).astype(dtype)
    return random.integers(0, 2 if kind == B8 else 100, shape).astype(dtype)


def indices(*shape: int, below: int | tuple[int, ...], seed: int = 1) -> Array:
    return np.random.default_rng(seed).integers(0, below, shape).astype(np.int32)


def model_of(code: OperationType, arguments: list[object], kind: OperandType, result: tuple[int, ...]) -> Model:
    return declared(one_operation(code, arguments, operand(kind, result)))


def extension_code(name: str) -> OperationType:
    return operation_code(TfliteOperation[name])


# -- gathers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "axis", "chosen", "result"),
    [
        ((7, 5), 0, (4,), (4, 5)),
        ((7, 5), -1, (2, 3), (7, 2, 3)),
        ((3, 4, 6), 1, (5,), (3, 5, 6)),
        ((9,), 0, (1,), (1,)),
        (MANY, 0, (500,), (500, 40)),
        (MANY, 1, (70,), (300, 70)),
    ],
)
@pytest.mark.parametrize("kind", [F32, F16, Q8, I32], ids=lambda kind: kind.name)
def test_gathers_with_indices_of_the_request_are_the_interpreter_s(
    kind: OperandType, shape: tuple[int, ...], axis: int, chosen: tuple[int, ...], result: tuple[int, ...]
) -> None:
    model = model_of(OperationType.GATHER, [operand(kind, shape), axis, Operand(I32, chosen)], kind, result)
    given = [[values(kind, shape, n), indices(*chosen, below=shape[axis], seed=n)] for n in range(2)]
    assert_kernels_agree_on(model, given, 0)


@pytest.mark.parametrize("kind", [I64, F64, B8], ids=lambda kind: kind.name)
def test_gathers_of_the_extension_s_types_are_the_interpreter_s(kind: OperandType) -> None:
    model = model_of(GATHER_WIDER, [operand(kind, (6, 3)), 0, Operand(I32, (4,))], kind, (4, 3))
    assert_kernels_agree_on(model, [[values(kind, (6, 3)), indices(4, below=6)]], 0)


def test_a_gather_s_result_has_the_shape_of_the_indices_if_the_model_does_not_state_it() -> None:
    operands = [
        Operand(F32, (6, 3), lifetime=LifeTime.SUBGRAPH_INPUT),
        scalar(0)[0],
        Operand(I32, (4,), lifetime=LifeTime.SUBGRAPH_INPUT),
        Operand(F32, (), lifetime=TEMPORARY),
        Operand(F32, (4, 3), lifetime=OUTPUT),
    ]
    operations = [Operation(OperationType.GATHER, (0, 1, 2), (3,)), Operation(OperationType.NEG, (3,), (4,))]
    model = graph(operands, operations, {1: scalar(0)[1]})
    assert_kernels_agree_on(model, [[values(F32, (6, 3)), indices(4, below=6)]], 0)


def test_embeddings_with_lookups_of_the_request_are_the_interpreter_s() -> None:
    model = model_of(OperationType.EMBEDDING_LOOKUP, [Operand(I32, (5,)), operand(F32, (8, 3, 2))], F32, (5, 3, 2))
    assert_kernels_agree_on(model, [[indices(5, below=8), values(F32, (8, 3, 2))]], 0)


@pytest.mark.parametrize("kind", [F32, Q8, I64], ids=lambda kind: kind.name)
def test_other_gathers_are_the_interpreter_s(kind: OperandType) -> None:
    array, given = operand(kind, (3, 4, 5, 2)), values(kind, (3, 4, 5, 2))
    batches = model_of(extension_code("BATCH_GATHER"), [array, 2, Operand(I32, (3, 7)), 1], kind, (3, 4, 7, 2))
    assert_kernels_agree_on(batches, [[given, indices(3, 7, below=5)]], 0)
    for width, result in ((1, (6, 4, 5, 2)), (2, (6, 5, 2)), (4, (6,))):
        chosen = indices(6, width, below=(3, 4, 5, 2)[:width])
        slices = model_of(extension_code("GATHER_ND"), [array, Operand(I32, (6, width))], kind, result)
        assert_kernels_agree_on(slices, [[given, chosen]], 0)
    for axis in (0, 2, -1):
        shape = (2, 4, 3, 2)
        elements = model_of(extension_code("GATHER_ELEMENTS"), [array, Operand(I32, shape), axis], kind, shape)
        assert_kernels_agree_on(elements, [[given, indices(*shape, below=(3, 4, 5, 2)[axis])]], 0)


# -- scatters, updates, reversed sequences ----------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", range(5))
@pytest.mark.parametrize("kind", [F32, I32, I64, F64], ids=lambda kind: kind.name)
def test_scatters_combine_runs_in_the_order_of_the_indices(kind: OperandType, reduction: int) -> None:
    shape, updates = (5, 4, 37), (9, 37)
    array, given = operand(kind, shape), values(kind, shape)
    arguments = [array, Operand(I32, (9, 2)), operand(kind, updates), reduction]
    chosen = indices(9, 2, below=(2, 2))  # several are equal
    slices = model_of(extension_code("SCATTER_ND_UPDATE"), arguments, kind, shape)
    assert_kernels_agree_on(slices, [[given, chosen, values(kind, updates, 3)]], 0)
    for axis in (0, -1):
        small = (4, 3, 30)
        arguments = [array, Operand(I32, small), operand(kind, small), axis, reduction]
        elements = model_of(extension_code("SCATTER_ELEMENTS"), arguments, kind, shape)
        assert_kernels_agree_on(elements, [[given, indices(*small, below=2), values(kind, small, 3)]], 0)


def test_scatters_of_16_bits_replace() -> None:
    arguments = [operand(F16, (5, 3)), Operand(I32, (2, 1)), operand(F16, (2, 3)), 0]
    model = model_of(extension_code("SCATTER_ND_UPDATE"), arguments, F16, (5, 3))
    assert_kernels_agree_on(model, [[values(F16, (5, 3)), indices(2, 1, below=5), values(F16, (2, 3), 2)]], 0)


@pytest.mark.parametrize("reduction", [3, 4])
def test_nan_wins_over_numbers(reduction: int) -> None:
    given, updates = np.array([np.nan, 1, 2, 0.0], np.float32), np.array([5, np.nan, 3, -0.0], np.float32)
    arguments = [operand(F32, (4,)), Operand(I32, (4,)), operand(F32, (4,)), 0, reduction]
    model = model_of(extension_code("SCATTER_ELEMENTS"), arguments, F32, (4,))
    assert_kernels_agree_on(model, [[given, np.arange(4, dtype=np.int32), updates]], 0)


@pytest.mark.parametrize("kind", [F32, I32], ids=lambda kind: kind.name)
def test_scatters_into_zeros_add(kind: OperandType) -> None:
    arguments = [Operand(I32, (6, 1)), operand(kind, (6, 9)), vector([4, 9])]
    model = model_of(extension_code("SCATTER_ND"), arguments, kind, (4, 9))
    assert_kernels_agree_on(model, [[indices(6, 1, below=4), values(kind, (6, 9))]], 0)


@pytest.mark.parametrize("update", [(2, 3, 6), (4, 5, 6), (1, 1, 1), (4, 1, 6)])
@pytest.mark.parametrize("start", [(0, 0, 0), (1, 2, 3), (-5, 100, (1 << 31) - 1)])
def test_a_slice_is_updated_where_all_of_it_is_inside(update: tuple[int, ...], start: tuple[int, ...]) -> None:
    arguments = [operand(F32, (4, 5, 6)), operand(F32, update), Operand(I32, (3,))]
    model = model_of(extension_code("DYNAMIC_UPDATE_SLICE"), arguments, F32, (4, 5, 6))
    given = [values(F32, (4, 5, 6)), values(F32, update, 2), np.array(start, np.int32)]
    assert_kernels_agree_on(model, [given], 0)


@pytest.mark.parametrize(("sequence", "batch"), [(0, 1), (1, 0), (0, 2), (3, 1), (2, 3)])
@pytest.mark.parametrize("kind", [F32, B8, I64], ids=lambda kind: kind.name)
def test_the_first_elements_of_sequences_are_reversed(kind: OperandType, sequence: int, batch: int) -> None:
    shape = (4, 3, 5, 2)
    arguments = [operand(kind, shape), Operand(I32, (shape[batch],)), sequence, batch]
    model = model_of(extension_code("REVERSE_SEQUENCE"), arguments, kind, shape)
    lengths = indices(shape[batch], below=shape[sequence] + 1)
    assert_kernels_agree_on(model, [[values(kind, shape), lengths]], 0)


# -- indices outside --------------------------------------------------------------------------------------------------


def failing(name: str) -> tuple[Model, list[Array], list[tuple[int, ...]]]:
    """Return a model, its inputs, and places of the last INT32 input that may each get a bad index."""
    array, given = operand(F32, (3, 4)), values(F32, (3, 4))
    if name == "GATHER":
        model = model_of(OperationType.GATHER, [array, 1, Operand(I32, (5,))], F32, (3, 5))
        return model, [given, indices(5, below=4)], [(0,), (4,)]
    if name == "EMBEDDING_LOOKUP":
        model = model_of(OperationType.EMBEDDING_LOOKUP, [Operand(I32, (5,)), array], F32, (5, 4))
        return model, [indices(5, below=3), given], [(2,)]
    if name == "GATHER_ND":
        model = model_of(extension_code(name), [array, Operand(I32, (5, 2))], F32, (5,))
        return model, [given, indices(5, 2, below=(3, 4))], [(0, 0), (4, 1)]
    if name == "SCATTER_ND_UPDATE":
        model = model_of(extension_code(name), [array, Operand(I32, (2, 2)), operand(F32, (2,)), 1], F32, (3, 4))
        return model, [given, indices(2, 2, below=(3, 4)), values(F32, (2,))], [(1, 0), (1, 1)]
    if name == "SCATTER_ELEMENTS":
        arguments = [array, Operand(I32, (2, 4)), operand(F32, (2, 4)), 0, 0]
        return (
            model_of(extension_code(name), arguments, F32, (3, 4)),
            [given, indices(2, 4, below=3), given[:2]],
            [(1, 3)],
        )
    model = model_of(extension_code(name), [array, Operand(I32, (4,)), 0, 1], F32, (3, 4))
    return model, [given, indices(4, below=4)], [(0,), (3,)]


OPERATIONS = ["GATHER", "EMBEDDING_LOOKUP", "GATHER_ND", "SCATTER_ND_UPDATE", "SCATTER_ELEMENTS", "REVERSE_SEQUENCE"]


@pytest.mark.parametrize("index", [-1, 4, 5, (1 << 31) - 1, -(1 << 31)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_index_outside_is_the_interpreter_s_error(name: str, index: int) -> None:
    model, inputs, places = failing(name)
    number = next(n for n, array in enumerate(inputs) if array.dtype == np.int32)
    compiled, reference = prepare(model), interpreter.prepare(model)
    expected = outputs_of(reference, model, inputs)
    if index == 4 and name == "REVERSE_SEQUENCE":
        index = 6
    for place in places:
        changed = [array.copy() for array in inputs]
        changed[number][place] = index
        with pytest.raises(GeneralFailure) as error:
            outputs_of(compiled, model, changed)
        with pytest.raises(GeneralFailure) as interpreter_s:
            outputs_of(reference, model, changed)
        assert str(error.value) == str(interpreter_s.value)
        np.testing.assert_array_equal(outputs_of(compiled, model, inputs)[0], expected[0])


def test_of_two_numbers_outside_the_first_one_of_the_index_vector_is_reported() -> None:
    model, (given, chosen), _ = failing("GATHER_ND")
    chosen[0, 1], chosen[4, 0] = 9, 9
    with pytest.raises(GeneralFailure, match=r"operation 0 .*GATHER_ND.*outside \[0, 3\) \(C1\)"):
        outputs_of(prepare(model), model, [given, chosen])


def test_of_two_operations_the_first_one_is_reported() -> None:
    operands = [
        Operand(F32, (6, 3), lifetime=LifeTime.SUBGRAPH_INPUT),
        scalar(0)[0],
        Operand(I32, (2,), lifetime=LifeTime.SUBGRAPH_INPUT),
        Operand(I32, (4,), lifetime=LifeTime.SUBGRAPH_INPUT),
        Operand(F32, (2, 3), lifetime=TEMPORARY),
        Operand(F32, (4, 3), lifetime=OUTPUT),
    ]
    gathers = [Operation(OperationType.GATHER, (0, 1, 2), (4,)), Operation(OperationType.GATHER, (4, 1, 3), (5,))]
    model = graph(operands, gathers, {1: scalar(0)[1]})
    program, array = prepare(model), values(F32, (6, 3))
    good, bad = np.array([0, 1], np.int32), np.array([0, 6], np.int32)
    for first, second, text in (
        (good, [0, 1, 2, 0], r"operation 1 .*\[0, 2\)"),
        (bad, [9] * 4, r"operation 0 .*\[0, 6\)"),
    ):
        with pytest.raises(GeneralFailure, match=text):
            outputs_of(program, model, [array, first, np.array(second, np.int32)])
    outputs_of(program, model, [array, good, np.array([0, 1, 1, 0], np.int32)])


def test_a_program_of_a_cache_reports_the_same_error() -> None:
    model, (given, chosen), _ = failing("GATHER")
    cached = prepare(model, prepare(model).prepacked)
    chosen[1] = 7
    with pytest.raises(GeneralFailure, match=r"operation 0 \(GATHER\): an index is outside \[0, 4\) \(C1\)"):
        outputs_of(cached, model, [given, chosen])


def test_a_gather_whose_declared_shape_is_another_one_fails_when_it_is_executed() -> None:
    model = model_of(OperationType.GATHER, [operand(F32, (3, 4)), 0, Operand(I32, (5,))], F32, (6, 4))
    program = prepare(model)
    assert program.compiled_ops == frozenset()
    with pytest.raises(GeneralFailure, match="R4"):
        outputs_of(program, model, [values(F32, (3, 4)), indices(5, below=3)])


# -- elements of 64 bits, and other types of the extension ------------------------------------------------------------


@pytest.mark.parametrize("kind", [I64, F64, B8, F32], ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("code", "shape", "arguments", "result"),
    [
        (OperationType.REVERSE, (4, 6), [vector([1])], (4, 6)),
        (OperationType.TRANSPOSE, (5, 7, 3), [vector([2, 0, 1])], (3, 5, 7)),
        (OperationType.TRANSPOSE, (2, 3, 2, 5, 2), [vector([4, 0, 3, 1, 2])], (2, 2, 5, 3, 2)),
        (OperationType.SLICE, (9, 33), [vector([1, 2]), vector([4, 31])], (4, 31)),
        (OperationType.TILE, (2, 3), [vector([2, 3])], (4, 9)),
        (OperationType.PAD, (2, 3), [(Operand(I32, (2, 2)), np.int32([1, 0, 2, 1]).tobytes())], (3, 6)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_elements_of_the_extension_s_types_are_copied_by_kernels(
    code: OperationType, shape: tuple[int, ...], arguments: list[object], result: tuple[int, ...], kind: OperandType
) -> None:
    model = model_of(extended_code(code, Scheme.WIDER), [operand(kind, shape), *arguments], kind, result)
    assert_kernels_agree_on(model, [[values(kind, shape)]], 0)


def test_64_bits_become_32_that_saturate() -> None:
    model = model_of(extension_code("SATURATE"), [operand(I64, (3, 7))], I32, (3, 7))
    given = np.array([0, -1, 1 << 31, (1 << 31) - 1, -(1 << 31), -(1 << 31) - 1, 1 << 62], np.int64)
    assert_kernels_agree_on(model, [[np.stack([given, -given, given // 3])]])
    assert_kernels_agree(model)
