"""The interpreter's Program: inputs, outputs, deadlines and shapes of requests; operations are tested elsewhere."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.small_models import (
    F32,
    I32,
    INPUT,
    Q8,
    one_operation,
    two_adds,
    vector,
    with_operand,
    with_operation,
)

from nnfmq.engines import interpreter
from nnfmq.engines.execution import Array, DynamicOutput
from nnfmq.engines.program import Program
from nnfmq.hal.errors import (
    GeneralFailure,
    InvalidArgument,
    MissedDeadlineTransient,
    OutputInsufficientSize,
)
from nnfmq.hal.types import DataLocation, LifeTime, Model, Operand, OperationType, OutputShape
from nnfmq.lab.conformance.testmodels import BytesPool
from nnfmq.validation import validate_model

ONES = np.ones((2, 2), np.float32)


OFFSET = (101 - (4095 * 255 * 255 + 255)).to_bytes(4, "little", signed=True)


def prepared(model: Model) -> Program:
    validate_model(model)
    return interpreter.prepare(model)


def reshape_by_request() -> Program:
    """Return the program of a RESHAPE whose new shape is an input."""
    arguments = [Operand(F32, (2, 3)), Operand(I32, (2,))]
    return prepared(one_operation(OperationType.RESHAPE, arguments, Operand(F32, (0, 0))))


def test_operations_run_in_order_and_fill_the_output() -> None:
    out = np.zeros((2, 2), np.float32)

    shapes = prepared(two_adds()).execute([ONES, 2 * ONES], [out])

    assert (out == 5).all()
    assert shapes == (OutputShape((2, 2), True),)


@pytest.mark.parametrize(
    "make", [bytearray, lambda size: memoryview(bytearray(size)), lambda size: np.zeros(size, "u1")]
)
def test_an_output_may_be_any_writable_buffer_and_a_longer_one(make: Any) -> None:
    buffer = make(20)

    prepared(two_adds()).execute([ONES, ONES], [buffer])

    assert np.frombuffer(buffer, np.float32)[:4].tolist() == [3.0] * 4


@pytest.mark.parametrize("extents", [(2, 2), (0, 0)], ids=["known", "unknown"])
def test_DOM_11_a_dynamic_output_is_allocated_with_the_shape_and_filled(extents: tuple[int, ...]) -> None:
    made: list[Array] = []

    def allocate(shape: tuple[int, ...]) -> Array:
        made.append(np.empty(shape, np.float32))
        return made[-1]

    model = with_operand(two_adds(), 4, dimensions=extents)
    assert prepared(model).execute([ONES, ONES], [DynamicOutput(allocate)]) == (OutputShape((2, 2)),)
    assert [array.tolist() for array in made] == [[[3.0] * 2] * 2]


def test_DOM_14_nothing_is_written_if_a_dynamic_output_cannot_be_allocated() -> None:
    def fail(shape: tuple[int, ...]) -> Array:
        raise GeneralFailure(f"no memory for {shape}")

    model = two_adds()
    model = replace(model, main=replace(model.main, output_indexes=(3, 4)))
    model = with_operand(model, 3, lifetime=LifeTime.SUBGRAPH_OUTPUT)
    first = bytearray(16)
    with pytest.raises(GeneralFailure, match=r"no memory for \(2, 2\)"):
        prepared(model).execute([ONES, ONES], [first, DynamicOutput(fail)])
    assert first == bytes(16)


def test_an_unwanted_output_may_be_omitted() -> None:
    assert prepared(two_adds()).execute([ONES, ONES], [None]) == (OutputShape((2, 2), True),)


def test_SHP_4_a_short_buffer_is_rejected_and_nothing_is_written() -> None:
    buffer = bytearray(b"\x07" * 15)

    with pytest.raises(OutputInsufficientSize) as caught:
        prepared(two_adds()).execute([ONES, ONES], [buffer])
    assert caught.value.output_shapes == (OutputShape((2, 2), False),)
    assert buffer == b"\x07" * 15


@pytest.mark.parametrize(
    "inputs", [[], [ONES], [ONES, ONES.astype(np.float64)], [ONES, ONES[0]], [ONES, None], [ONES, ONES, ONES]]
)
def test_inputs_that_do_not_fit_the_model_are_rejected(inputs: list[Any]) -> None:
    with pytest.raises(InvalidArgument):
        prepared(two_adds()).execute(inputs, [None])


def test_a_wrong_number_of_outputs_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="2 outputs"):
        prepared(two_adds()).execute([ONES, ONES], [None, None])


def test_an_execution_after_its_deadline_fails() -> None:
    with pytest.raises(MissedDeadlineTransient):
        prepared(two_adds()).execute([ONES, ONES], [None], deadline_ns=time.monotonic_ns() - 1)


def test_a_cancelled_execution_ends_between_operations() -> None:
    polls = iter([False, True])

    with pytest.raises(GeneralFailure, match="cancelled"):
        prepared(two_adds()).execute([ONES, ONES], [None], is_cancelled=lambda: next(polls))


def test_an_unsupported_operation_is_named() -> None:
    model = with_operation(two_adds(), 1, type=OperationType.LSTM)

    with pytest.raises(GeneralFailure, match=r"operation 1 \(LSTM\) is not supported"):
        interpreter.prepare(model)


def test_SHP_1_a_shape_that_comes_with_the_request_is_used() -> None:
    program, values = reshape_by_request(), np.arange(6, dtype=np.float32).reshape(2, 3)

    shapes = [program.execute([values, np.array(shape, np.int32)], [None]) for shape in ([3, 2], [6, -1], [1, 6])]

    assert [found[0].dimensions for found in shapes] == [(3, 2), (6, 1), (1, 6)]


def test_N_OPF_2_a_shape_that_comes_with_the_request_is_checked() -> None:
    with pytest.raises(GeneralFailure, match=r"operation 0 \(RESHAPE\): .*\(C1\)$"):
        reshape_by_request().execute([np.zeros((2, 3), np.float32), np.array([4, 2], np.int32)], [None])


def test_SHP_1_an_input_of_unknown_shape_takes_each_requests_shape() -> None:
    model = with_operand(with_operand(two_adds(), 0, dimensions=(0, 2)), 1, dimensions=(1, 2))
    for index in (3, 4):
        model = with_operand(model, index, dimensions=())
    program = prepared(model)

    shapes = [program.execute([np.ones((n, 2), np.float32), ONES[:1]], [None])[0].dimensions for n in (1, 5, 2)]

    assert shapes == [(1, 2), (5, 2), (2, 2)]


def test_an_input_that_contradicts_a_known_dimension_is_rejected() -> None:
    program = prepared(with_operand(two_adds(), 0, dimensions=(0, 2)))

    with pytest.raises(InvalidArgument):
        program.execute([np.ones((2, 3), np.float32), ONES], [None])


def test_R4_a_result_that_contradicts_the_declared_output_is_rejected() -> None:
    program = prepared(with_operand(with_operand(two_adds(), 0, dimensions=(0, 2)), 1, dimensions=(1, 2)))

    with pytest.raises(GeneralFailure, match="R4"):
        program.execute([np.ones((3, 2), np.float32), ONES[:1]], [None])


def test_N_OPF_10_an_empty_input_is_rejected_unless_the_operation_allows_it() -> None:
    model = one_operation(OperationType.SQUEEZE, [Operand(F32, (0, 1)), None], Operand(F32, (0,)))

    with pytest.raises(GeneralFailure, match="R3"):
        prepared(model).execute([np.empty((0, 1), np.float32)], [None])


def test_a_convolution_accepts_an_empty_batch() -> None:
    filter = (Operand(F32, (3, 2, 2, 1)), bytes(48))
    bias = (Operand(F32, (3,)), bytes(12))
    arguments = [Operand(F32, (0, 4, 4, 1)), filter, bias, 2, 1, 1, 0]
    program = prepared(one_operation(OperationType.CONV_2D, arguments, Operand(F32, (0, 3, 3, 3))))

    shapes = program.execute([np.empty((0, 4, 4, 1), np.float32)], [bytearray(1)])

    assert shapes[0].dimensions == (0, 3, 3, 3)


def test_each_request_may_omit_an_optional_input() -> None:
    model = one_operation(
        OperationType.SQUEEZE, [Operand(F32, (1, 2, 1)), replace(Operand(I32, (1,)), lifetime=INPUT)], Operand(F32)
    )
    program, values = prepared(model), np.ones((1, 2, 1), np.float32)

    assert program.execute([values, None], [None])[0].dimensions == (2,)
    assert program.execute([values, np.array([0], np.int32)], [None])[0].dimensions == (2, 1)


def test_several_threads_may_execute_one_program_concurrently() -> None:
    program, wrong = prepared(two_adds()), []

    def work(value: int) -> None:
        for _ in range(50):
            out = np.empty((2, 2), np.float32)
            program.execute([value * ONES, ONES], [out])
            if not (out == value + 2).all():
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert wrong == []


def test_constants_are_copied_from_the_clients_pools() -> None:
    shared = bytearray(np.ones((2, 2), np.float32).tobytes())

    class Changing(BytesPool):
        @property
        def view(self) -> memoryview:
            return memoryview(shared)

    operand = {"lifetime": LifeTime.CONSTANT_REFERENCE, "location": DataLocation(0, 0, 16)}
    model = replace(with_operand(two_adds(), 1, **operand), pools=(Changing(bytes(16)),))
    model = replace(model, main=replace(model.main, input_indexes=(0,)))
    program = prepared(model)
    shared[:] = bytes(16)
    out = np.empty((2, 2), np.float32)

    program.execute([ONES], [out])

    assert (out == 3).all()


def test_a_small_constant_does_not_keep_all_constants_of_the_model() -> None:
    """Those of the other operations may be large weights, which kernels have packed; a large one is not copied."""
    large, small = np.ones((64, 64), np.float32), np.ones((2, 2), np.float32)
    image, other = Operand(F32, (64, 64)), Operand(F32, (2, 2))
    model = one_operation(OperationType.ADD, [(image, large.tobytes()), (other, small.tobytes()), 0], image)
    stored = np.frombuffer(model.operand_values, np.uint8)
    found = [interpreter.load_constant(model, operand) for operand in model.main.operands[:2]]
    assert [array is not None and np.shares_memory(array, stored) for array in found] == [True, False]


def test_large_images_are_computed_in_bands_with_the_same_result() -> None:
    rng = np.random.default_rng(7)
    image = rng.integers(0, 256, (2, 96, 96, 16), dtype=np.uint8)
    filter = rng.integers(0, 256, (1, 3, 3, 16), dtype=np.uint8)
    constants = ((Operand(Q8, filter.shape, 0.5, 100), filter.tobytes()), (Operand(I32, (16,), 0.5), bytes(64)))
    arguments = [Operand(Q8, image.shape, 1.0, 3), *constants, 1, 2, 2, 1, 1]
    program = prepared(
        one_operation(OperationType.DEPTHWISE_CONV_2D, arguments, Operand(Q8, (2, 48, 48, 16), 64.0, 10))
    )
    out = np.empty((2, 48, 48, 16), np.uint8)

    program.execute([image], [out])

    padded = np.full((2, 97, 97, 16), 3, np.int64)
    padded[:, :96, :96] = image
    sums = sum(
        (padded[:, i : i + 95 : 2, j : j + 95 : 2] - 3) * (filter[0, i, j].astype(np.int64) - 100)
        for i in range(3)
        for j in range(3)
    )
    halves = (sums + 1) >> 1  # the multiplier 1/128 is 1/2 rounded half up, then 1/64 rounded half away from zero
    away = np.sign(halves) * ((np.abs(halves) + 32) // 64)
    np.testing.assert_array_equal(out, np.clip(away + 10, 10, 255))


def test_accumulators_too_large_for_float32_are_exact() -> None:
    weights = np.full((1, 4096), 255, np.uint8)
    weights[0, 0] = 1
    image = np.full((1, 4096), 255, np.uint8)
    constants = ((Operand(Q8, weights.shape, 1.0, 0), weights.tobytes()), (Operand(I32, (1,), 1.0), OFFSET))
    arguments = [Operand(Q8, (1, 4096), 1.0, 0), *constants, 0]
    program = prepared(one_operation(OperationType.FULLY_CONNECTED, arguments, Operand(Q8, (1, 1), 1.5, 0)))
    found = np.empty((1, 1), np.uint8)

    program.execute([image], [found])

    assert found[0, 0] == 67  # 101 / 1.5; an accumulator rounded to float32 would differ by up to 8


def test_NaN_is_quantized_to_the_zero_point() -> None:
    program = prepared(one_operation(OperationType.QUANTIZE, [Operand(F32, (3,))], Operand(Q8, (3,), 0.5, 7)))
    out = np.empty(3, np.uint8)

    program.execute([np.array([np.nan, np.inf, -np.inf], np.float32)], [out])

    assert out.tolist() == [7, 255, 0]


def test_a_null_model_of_one_reshape_copies_its_float() -> None:
    program = prepared(one_operation(OperationType.RESHAPE, [Operand(F32, (1,)), vector([1])], Operand(F32, (1,))))
    out = np.zeros(1, np.float32)

    program.execute([np.array([2.5], np.float32)], [out])

    assert out[0] == 2.5
