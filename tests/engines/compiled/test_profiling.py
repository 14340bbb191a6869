"""The compiling engine's data for the profiler: launches by operation, arena allocations; roofline ceilings."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.compiled import outputs_of, random_inputs
from support.small_models import one_operation

from nnfmq import example_path
from nnfmq.engines.compiled.code_generator import compile_kernels
from nnfmq.engines.compiled.executor import CompiledPartition
from nnfmq.engines.compiled.kernels import Kernel
from nnfmq.engines.compiled.memory_plan import Allocation, ArraySpec, PartitionLaunch, plan_partition
from nnfmq.engines.compiled.object_code import LoadedCode
from nnfmq.engines.compiled.partition import prepare
from nnfmq.engines.compiled.target import host_target
from nnfmq.engines.compiled.thread_pool import ThreadPool, default_thread_pool
from nnfmq.engines.execution import DEFAULT_RUN_OPTIONS
from nnfmq.engines.program import Program
from nnfmq.hal.types import Model, Operand, OperandType, OperationType
from nnfmq.importers import load
from nnfmq.lab.roofline import (
    CopyBandwidth,
    FmaThroughput,
    MultiplyAdd,
    TileThroughput,
    measure_ceilings,
    roofline_kernels,
)


def digits(name: str = "digits.tflite") -> Model:
    return load(example_path(name)).model


def partition_of(program: Program) -> CompiledPartition:
    (step,) = program.steps
    assert isinstance(step.function, CompiledPartition)
    return step.function


def test_each_launch_has_the_number_of_its_operation() -> None:
    model = digits()
    calls = partition_of(prepare(model)).plan.source_launches

    made = {call.outputs[-1]: call.operation for call in calls}
    assert made == {o.outputs[0]: n for n, o in enumerate(model.main.operations) if o.outputs[0] in made}
    assert [call.operation for call in calls] == sorted(call.operation for call in calls)


def test_layout_conversions_belong_to_the_operation_that_needs_them() -> None:
    image = Operand(OperandType.TENSOR_FLOAT32, (1, 8, 6, 6))
    output = Operand(OperandType.TENSOR_FLOAT32, (1, 2, 12, 12))
    calls = partition_of(
        prepare(one_operation(OperationType.DEPTH_TO_SPACE, [image, 2, True], output))
    ).plan.source_launches

    assert (len(calls), {call.operation for call in calls}) == (3, {0})


@pytest.mark.parametrize("name", ["digits.tflite", "digits_quant.tflite"])
def test_single_launches_return_the_results_of_a_run(name: str) -> None:
    model = digits(name)
    program, inputs = prepare(model), random_inputs(digits(name), 3)
    (expected,) = outputs_of(program, model, inputs)
    found = np.zeros_like(expected)
    execution = program.bind(inputs, [np.empty_like(expected)])
    execution.run()
    partition, frame = partition_of(program), execution.frame
    for index, *_ in partition.plan.outputs:
        frame[index] = None

    run = partition.range_runner(frame)
    for number in range(partition.launch_count):
        run(number, number)
        run(number, number + 1)
    partition.publish_outputs(frame)
    found[...] = frame[model.main.output_indexes[0]]

    np.testing.assert_array_equal(found, expected)


def overlapping(places: tuple[Allocation, ...]) -> Iterator[tuple[Allocation, Allocation]]:
    """Yield the pairs of allocations that share a byte during some launch."""
    for one, other in combinations(places, 2):
        in_time = one.begin <= other.end and other.begin <= one.end
        in_space = one.offset < other.offset + other.spec.bytes and other.offset < one.offset + one.spec.bytes
        if in_time and in_space:
            yield one, other


@pytest.mark.parametrize("model", ["mobilenet_v1_0.25_128_quant", "mobilenet_v2_1.0_224_quant", "tts_float"])
def test_simultaneously_live_allocations_do_not_overlap_in_the_arena(data_dir: Path, model: str) -> None:
    loaded = load(data_dir / "models" / f"{model}.tflite").model
    plan = partition_of(prepare(loaded)).plan

    assert list(overlapping(plan.allocations)) == []
    assert max(place.offset + place.spec.bytes for place in plan.allocations) <= plan.arena_bytes
    kept = {(place.offset, place.spec.bytes) for place in plan.allocations if place.end == len(plan.source_launches)}
    assert kept == {(offset, value.bytes) for _, offset, value in plan.outputs}


def test_the_worker_count_of_a_pool_can_be_reduced_and_restored() -> None:
    pool = ThreadPool(1)
    pool.set_worker_count(0)
    without_workers = pool.worker_count
    pool.set_worker_count(1)

    assert (without_workers, pool.worker_count) == (0, 1)


# -- ceilings ---------------------------------------------------------------------------------------------------------


def run_once(kernel: Kernel, source: np.ndarray[Any, Any], output_bytes: int) -> np.ndarray[Any, Any]:
    """Run a kernel with one input and return its output as bytes."""
    target = host_target()
    values = {1: ArraySpec(np.dtype(np.uint8), (output_bytes,))}
    plan = plan_partition([PartitionLaunch(kernel, (0,), (1,), (), 0)], values, {}, [0], [1], target)
    partition = CompiledPartition(
        plan, np.zeros(1, np.uint8), LoadedCode([compile_kernels([kernel], target)]), default_thread_pool(), 2
    )
    frame: list[Any] = [source, None, None, DEFAULT_RUN_OPTIONS]
    partition(frame)
    made: np.ndarray[Any, Any] = frame[1].copy()
    return made


def test_float_multiply_adds_compute_the_counted_operations() -> None:
    lanes, accumulators, iterations = host_target().lanes, 5, 40
    source = np.linspace(-0.5, 0.5, lanes, dtype=np.float32)
    expected = source.astype(np.float64)
    for _ in range(iterations):
        expected = expected * source + source

    made = run_once(FmaThroughput(MultiplyAdd.FLOAT32, accumulators, lanes, iterations, 2), source, 2 * 4 * lanes)

    np.testing.assert_allclose(made.view(np.float32).reshape(2, lanes), [accumulators * expected] * 2, rtol=1e-5)


def test_dot2_multiply_adds_compute_the_counted_operations() -> None:
    lanes, accumulators, iterations = host_target().lanes, 3, 11
    source = np.arange(1, 2 * lanes + 1, dtype=np.int16)
    value = source.view(np.int32).astype(np.int64)
    for _ in range(iterations):
        pairs = (value & 0xFFFFFFFF).astype(np.uint32).view(np.int16).astype(np.int64) * source
        value = value + pairs.reshape(lanes, 2).sum(axis=1)

    made = run_once(FmaThroughput(MultiplyAdd.DOT2, accumulators, lanes, iterations, 1), source, 4 * lanes)

    np.testing.assert_array_equal(made.view(np.uint32), (accumulators * value & 0xFFFFFFFF).astype(np.uint32))


def test_dot4_multiply_adds_compute_the_counted_operations() -> None:
    lanes, accumulators, iterations = host_target().lanes, 3, 11
    lhs_type = np.uint8 if host_target().sdot is None else np.int8
    source = np.arange(1, 4 * lanes + 1, dtype=np.int64).astype(np.int8)
    value = source.view(np.int32).astype(np.int64)
    for _ in range(iterations):
        quads = (value & 0xFFFFFFFF).astype(np.uint32).view(lhs_type).astype(np.int64) * source
        value = value + quads.reshape(lanes, 4).sum(axis=1)

    made = run_once(FmaThroughput(MultiplyAdd.DOT4, accumulators, lanes, iterations, 1), source, 4 * lanes)

    np.testing.assert_array_equal(made.view(np.uint32), (accumulators * value & 0xFFFFFFFF).astype(np.uint32))


@pytest.mark.skipif(host_target().pmaddubsw is None, reason="the target has no pmaddubsw")
def test_acc16_multiply_adds_compute_the_counted_operations() -> None:
    lanes, accumulators, iterations = host_target().lanes, 3, 11
    source = (np.arange(8 * lanes, dtype=np.int64) % 17 - 8).astype(np.int8)  # four products fit 16 bits
    factors = source.reshape(2, lanes, 4).sum(axis=0, dtype=np.int64)
    value = source[: 4 * lanes].view(np.int32).astype(np.int64)
    for _ in range(iterations):
        quads = (value & 0xFFFFFFFF).astype(np.uint32).view(np.uint8).astype(np.int64).reshape(lanes, 4)
        value = value + (quads * factors).sum(axis=1)

    made = run_once(FmaThroughput(MultiplyAdd.ACC16, accumulators, lanes, iterations, 1), source, 4 * lanes)

    np.testing.assert_array_equal(made.view(np.uint32), (accumulators * value & 0xFFFFFFFF).astype(np.uint32))


@pytest.mark.skipif(not host_target().has_tiles, reason="the target has no tile registers")
def test_tile_multiply_adds_compute_the_counted_operations() -> None:
    iterations, random = 11, np.random.default_rng(2)
    lhs, weights = random.integers(0, 256, (16, 64), np.uint8), random.integers(-128, 128, (16, 16, 4), np.int8)
    source = np.concatenate([lhs.reshape(-1), weights.reshape(-1).view(np.uint8)])
    product = lhs.astype(np.int64) @ weights.transpose(0, 2, 1).reshape(64, 16)
    kernel = TileThroughput(iterations, 2)

    made = run_once(kernel, source, 2 * 4 * 1024)

    np.testing.assert_array_equal(made.view(np.int32).reshape(8, 16, 16), [iterations * product] * 8)
    assert kernel.operations == 2 * 16 * 16 * 64 * 4 * iterations * 2


def test_a_copy_copies() -> None:
    source = np.random.default_rng(1).integers(0, 256, 3 * 1000, np.uint8)

    np.testing.assert_array_equal(run_once(CopyBandwidth(1000, 2, 3), source, 3000), source)


def test_the_counted_operations_and_bytes_are_those_of_the_loops() -> None:
    float32, dot2, dot4, acc16 = (FmaThroughput(instruction, 12, 8, 100, 4) for instruction in MultiplyAdd)

    assert float32.operations == 2 * 8 * 12 * 100 * 4
    assert dot2.operations == 2 * 16 * 12 * 100 * 4
    assert dot4.operations == 2 * 32 * 12 * 100 * 4
    assert acc16.operations == 2 * 64 * 12 * 100 * 4
    assert CopyBandwidth(1000, 5, 3).bytes_copied == 2 * 1000 * 5 * 3


def test_accumulators_hide_the_latency_of_two_fma_units_and_fit_the_registers() -> None:
    for kernel in roofline_kernels(host_target(), 1).values():
        if isinstance(kernel, FmaThroughput):
            assert 10 <= kernel.accumulators <= host_target().registers - 4


def test_ceilings_are_measured_with_one_thread_and_with_all_threads() -> None:
    ceilings = measure_ceilings(default_thread_pool())

    tiles = ["tiles"] if host_target().has_tiles else []
    assert list(ceilings) == ["float32", "quantized", *tiles, "memory", "cache", "outputs"]
    assert all(0 < ceiling.one_thread <= ceiling.all_threads for ceiling in ceilings.values())
