"""Roofline ceilings: peak rates of multiply-adds, quantized outputs and copies, measured by generated kernels.

A ceiling is the best of many short runs, by one thread and by the whole thread pool. It is what generated code can
reach with the target's instructions; other instructions of the CPU may reach more. The kernels are compiled in this
process: they are not among the `kernels` that compile processes know.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import numpy as np

from nnfmq.engines.compiled.code_generator import compile_kernels
from nnfmq.engines.compiled.executor import CompiledPartition
from nnfmq.engines.compiled.ir_builder import F32, I8, I16, I32, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels import Kernel
from nnfmq.engines.compiled.kernels.gemm_tile import TILE_PRODUCTS, configured_tiles, tile_instruction
from nnfmq.engines.compiled.kernels.micro_kernels import Float32, dot2, dot4, dot4_signed, madd_acc16
from nnfmq.engines.compiled.lowering import KernelLaunch
from nnfmq.engines.compiled.lowering.products import convolution
from nnfmq.engines.compiled.memory_plan import ALIGNMENT, ArraySpec, PartitionLaunch, align, plan_partition
from nnfmq.engines.compiled.object_code import LoadedCode
from nnfmq.engines.compiled.target import Target, host_target
from nnfmq.engines.compiled.thread_pool import ThreadPool
from nnfmq.engines.execution import DEFAULT_RUN_OPTIONS
from nnfmq.hal.types import FusedActivationFunc, OperationType, PaddingScheme
from nnfmq.operations.declaration import Array, Match, Shape, Tensor

__all__ = [
    "MULTIPLY_ADDS",
    "Ceiling",
    "CopyBandwidth",
    "FmaThroughput",
    "MultiplyAdd",
    "OpCost",
    "TileThroughput",
    "compute_op_cost",
    "measure_ceilings",
    "quantized_outputs",
    "roofline_kernels",
]

_FMA_ITERATIONS, _FMA_WORK_ITEMS = 1 << 12, 64
_TILE_ACCUMULATORS, _TILE_BYTES, _TILE_ITERATIONS = 4, 1 << 10, 1 << 9
_MEMORY_CHUNK, _MEMORY_CHUNKS = 1 << 20, 32
_CACHE_CHUNK, _CACHE_ITERATIONS = 1 << 17, 32
_OUTPUT_SHAPE, _OUTPUT_K = (1, 64, 64, 128), 4  # fits the second-level cache; K of one dot product
_LIMITS_NS = 20_000_000, 40_000_000  # one thread; all threads, which rarely have all CPUs to themselves
_MIN_RUNS = 4
_PARALLEL_NS = 1 << 30  # an estimate at which a launch runs on all threads
_NO_CLAMP = Float32(-np.inf, np.inf)


class MultiplyAdd(Enum):
    """A multiply-add instruction, with the multiplications that it does for each 32-bit lane."""

    FLOAT32 = 1
    DOT2 = 2
    DOT4 = 4
    ACC16 = 8


@dataclass(frozen=True, slots=True)
class FmaThroughput:
    """Multiply-adds on registers only.

    Each accumulator depends on itself alone: with 12 of them, two execution units with a latency of 5 or 6 cycles are
    never idle. The other factor is the accumulator itself, because LLVM computes a product of constants once. From a
    first element of 0.25, float32 accumulators converge to 1/3: never infinite, never subnormal.
    """

    instruction: MultiplyAdd
    accumulators: int
    lanes: int
    iterations: int
    work_items: int

    compile_cost = 1

    @property
    def operations(self) -> int:
        """Multiplications and additions of all work items."""
        multiplications = self.lanes * self.instruction.value
        return 2 * multiplications * self.accumulators * self.iterations * self.work_items

    def scratch_bytes(self, target: Target) -> int:
        """Return 0: no scratch is used."""
        return 0

    def emit(self, kb: KernelBuilder) -> None:
        """Args: a vector of factors (for ACC16 two), 4 bytes per lane; output, as many bytes for each work item."""
        factors, out = map(kb.argument, range(2))
        is_float, is_acc16 = self.instruction is MultiplyAdd.FLOAT32, self.instruction is MultiplyAdd.ACC16
        kind = {
            MultiplyAdd.FLOAT32: vector(F32, self.lanes),
            MultiplyAdd.DOT2: vector(I16, 2 * self.lanes),
        }.get(self.instruction) or vector(I8, 4 * self.lanes)
        first = kb.load(vector(F32 if is_float else I32, self.lanes), factors)
        factor = kb.load(kind, factors)
        second_factor = kb.load(kind, factors, 4 * self.lanes) if is_acc16 else factor

        def multiply_add(_: Value, accs: Sequence[Value]) -> Sequence[Value]:
            if is_float:
                return [_NO_CLAMP.multiply_add(kb, first, acc, factor) for acc in accs]
            lhs = [kb.ir.bitcast(acc, kind) for acc in accs]
            if is_acc16:
                both = (factor, second_factor)
                return [madd_acc16(kb, acc, (x, x), both) for acc, x in zip(accs, lhs, strict=True)]
            fours = dot4 if kb.target.sdot is None else dot4_signed
            dot = fours if self.instruction is MultiplyAdd.DOT4 else dot2
            return [dot(kb, acc, x, factor) for acc, x in zip(accs, lhs, strict=True)]

        with kb.loop(kb.begin, kb.end) as work_item:
            total, *others = kb.for_loop(self.iterations, [first] * self.accumulators, multiply_add)
            for acc in others:
                total = (kb.ir.fadd if is_float else kb.ir.add)(total, acc)
            kb.store(total, out, kb.mul(work_item, 4 * self.lanes))
        kb.return_void()


@dataclass(frozen=True, slots=True)
class TileThroughput:
    """Products of matrices in AMX's tile registers only, four independent ones."""

    iterations: int
    work_items: int

    compile_cost = 1

    @property
    def operations(self) -> int:
        """Multiplications and additions of all work items."""
        return 2 * TILE_PRODUCTS * _TILE_ACCUMULATORS * self.iterations * self.work_items

    def scratch_bytes(self, target: Target) -> int:
        """Return 0: no scratch is used."""
        return 0

    def emit(self, kb: KernelBuilder) -> None:
        """Args: a tile of uint8 factors, then one of int8; output, the accumulators of each work item."""
        factors, out = map(kb.argument, range(2))
        accumulators, row_bytes = range(_TILE_ACCUMULATORS), kb.i64(64)
        lhs, weights = _TILE_ACCUMULATORS, _TILE_ACCUMULATORS + 1
        with configured_tiles(kb):
            for number, register in enumerate((lhs, weights)):
                tile_instruction(kb, "tileloadd64", register, kb.at(factors, number * _TILE_BYTES), row_bytes)
            with kb.loop(kb.begin, kb.end) as work_item:
                for number in accumulators:
                    tile_instruction(kb, "tilezero", number)
                with kb.loop(0, self.iterations):
                    for number in accumulators:
                        tile_instruction(kb, "tdpbusd", number, lhs, weights)
                first = kb.at(out, kb.mul(work_item, _TILE_ACCUMULATORS * _TILE_BYTES))
                for number in accumulators:
                    tile_instruction(kb, "tilestored64", number, kb.at(first, number * _TILE_BYTES), row_bytes)
        kb.return_void()


@dataclass(frozen=True, slots=True)
class CopyBandwidth:
    """Copies a chunk per work item, `iterations` times."""

    chunk_bytes: int
    iterations: int
    work_items: int

    compile_cost = 1

    @property
    def bytes_copied(self) -> int:
        """Bytes that all work items read and write."""
        return 2 * self.chunk_bytes * self.iterations * self.work_items

    def scratch_bytes(self, target: Target) -> int:
        """Return 0: no scratch is used."""
        return 0

    def emit(self, kb: KernelBuilder) -> None:
        """Args: input, output."""
        source, out = map(kb.argument, range(2))
        with kb.loop(kb.begin, kb.end) as work_item:
            offset = kb.mul(work_item, self.chunk_bytes)
            with kb.loop(0, self.iterations):
                kb.memcpy(kb.at(out, offset), kb.at(source, offset), self.chunk_bytes)
        kb.return_void()


# -- measuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A peak rate in 10^9 operations, outputs or bytes per second, of one thread and of all."""

    one_thread: float
    all_threads: float


def measure_ceilings(pool: ThreadPool) -> dict[str, Ceiling]:
    """Return the ceilings: `float32` and `quantized` in operations, `memory` and `cache` in bytes read and written.

    If the target has tile registers, `tiles` are the operations of 8-bit products in them, and `quantized` all others.
    `outputs` is the rate at which quantized products are requantized and stored, without their multiply-adds. Memory is
    copied from 32 MiB to 32 MiB, cache from 128 KiB to 128 KiB in each thread. Blocks for about half a second. Uses the
    threads of `pool`, which keep running.
    """
    target = host_target()
    kernels = roofline_kernels(target, pool.worker_count + 1)
    outputs = quantized_outputs(target)
    partition, frame = _bind([*(KernelLaunch(kernel, (), 0) for kernel in kernels.values()), outputs], pool, target)
    partition(frame)
    run = partition.range_runner(frame)
    amounts = {
        name: kernel.bytes_copied if isinstance(kernel, CopyBandwidth) else kernel.operations
        for name, kernel in kernels.items()
    }
    ceilings = {}
    for number, (name, amount) in enumerate({**amounts, "outputs": math.prod(_OUTPUT_SHAPE)}.items()):
        one_thread = amount / _best_ns(run, 2 * number, _LIMITS_NS[0])
        all_threads = amount / _best_ns(run, 2 * number + 1, _LIMITS_NS[1]) if pool.worker_count else one_thread
        ceilings[name] = Ceiling(one_thread, max(one_thread, all_threads))
    return ceilings


def roofline_kernels(target: Target, threads: int) -> dict[str, FmaThroughput | TileThroughput | CopyBandwidth]:
    """Return the kernel that measures each ceiling."""
    accumulators = 12 if target.registers == 16 else 24
    quantized = MultiplyAdd.DOT4 if target.has_dot4 else MultiplyAdd.ACC16 if target.pmaddubsw else MultiplyAdd.DOT2
    shape = accumulators, target.lanes, _FMA_ITERATIONS, _FMA_WORK_ITEMS
    tiles = {"tiles": TileThroughput(_TILE_ITERATIONS, _FMA_WORK_ITEMS)} if target.has_tiles else {}
    return {
        "float32": FmaThroughput(MultiplyAdd.FLOAT32, *shape),
        "quantized": FmaThroughput(quantized, *shape),
        **tiles,
        "memory": CopyBandwidth(_MEMORY_CHUNK, 1, _MEMORY_CHUNKS),
        "cache": CopyBandwidth(_CACHE_CHUNK, _CACHE_ITERATIONS, threads),
    }


def quantized_outputs(target: Target) -> KernelLaunch:
    """Return the launch of a 1×1 convolution of int8 that has little to multiply for each output."""
    *positions, channels = _OUTPUT_SHAPE
    s8, filters = np.dtype(np.int8), (channels, 1, 1, _OUTPUT_K)
    weights = (np.arange(channels * _OUTPUT_K) % 255 - 127).astype(np.int8).reshape(filters)
    launch = convolution(
        Tensor((*positions, _OUTPUT_K), s8, 0.5),
        Tensor(filters, s8, 0.25, value=weights),
        Tensor((channels,), np.dtype(np.int32), 0.125, value=np.zeros(channels, np.int32)),
        output=Tensor(_OUTPUT_SHAPE, s8, 16.0),
        target=target,
        activation=FusedActivationFunc.NONE,
        padding_scheme=PaddingScheme.VALID,
        stride_width=1,
        stride_height=1,
    )
    assert launch is not None, "every target has a kernel for it"
    return launch


def _bind(launches: Sequence[KernelLaunch], pool: ThreadPool, target: Target) -> tuple[CompiledPartition, list[Any]]:
    """Return a partition with two launches of each kernel, serial and parallel, and its frame."""
    kernels: list[Kernel] = [launch.kernel for launch in launches]
    constants, offsets = _constants(launches)
    source, first_output = 0, 1 + len(kernels)
    size = max(_MEMORY_CHUNK * _MEMORY_CHUNKS, _CACHE_CHUNK * (pool.worker_count + 1))
    specs = {first_output + number: ArraySpec(np.dtype(np.uint8), (size,)) for number in range(len(kernels))}
    planned = [
        PartitionLaunch(kernel, (source,), (first_output + number,), offsets[number], estimated_ns)
        for number, kernel in enumerate(kernels)
        for estimated_ns in (0, _PARALLEL_NS)
    ]
    plan = plan_partition(planned, specs, {}, [source], [], target)
    slot = first_output + len(kernels)
    code = LoadedCode([compile_kernels(kernels, target)])
    partition = CompiledPartition(plan, constants, code, pool, slot)
    frame: list[Any] = [None] * (slot + 1)
    frame[source] = np.full(size // 4, 0.25, np.float32).view(np.uint8)
    return partition, [*frame, DEFAULT_RUN_OPTIONS]


def _constants(launches: Sequence[KernelLaunch]) -> tuple[Array, list[tuple[int, ...]]]:
    """Return the constants of all launches in one array aligned to cache lines, and their offsets by launch."""
    parts: list[tuple[int, bytes]] = []
    size, offsets = 0, []
    for launch in launches:
        begins = []
        for constant in launch.constants:
            parts.append((size, constant if isinstance(constant, bytes) else bytes(constant())))
            begins.append(size)
            size += align(len(parts[-1][1]))
        offsets.append(tuple(begins))
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    skip = -memory.ctypes.data % ALIGNMENT
    constants = memory[skip : skip + size]
    for begin, data in parts:
        constants[begin : begin + len(data)] = np.frombuffer(data, np.uint8)
    return constants, offsets


def _best_ns(run: Callable[[int, int], None], number: int, limit_ns: int) -> int:
    """Run a launch for `limit_ns`, and return its shortest time."""
    times: list[int] = []
    while sum(times) < limit_ns or len(times) < _MIN_RUNS:
        begin_ns = time.perf_counter_ns()
        run(number, number + 1)
        times.append(time.perf_counter_ns() - begin_ns)
    return min(times)


# ----------------------------------------------------------------------------------------------------------------------
# Op cost: the multiply-accumulates and elements of an operation, from its shapes alone.
#
# Rates such as GFLOP/s are relative to these numbers. Counted are the multiply-accumulates of convolutions, matrix
# products and recurrent cells; activations, requantization, clipping and elementwise gates are not. Every other
# operation has only the count of its output elements. The numbers are those of the operation, not of an engine's
# implementation: taps over padding count, recomputed work does not, and each input pixel of a transposed convolution
# counts all taps, including those outside the output.


_Rule: TypeAlias = Callable[[Mapping[str, Shape], Shape], int]  # (argument shapes by name, first output) -> MACs


@dataclass(frozen=True, slots=True)
class OpCost:
    """Multiply-accumulates (None if the operation multiplies no matrices) and output elements of one execution."""

    multiply_adds: int | None
    elements: int

    @property
    def arithmetic_operations(self) -> int | None:
        """Multiplications plus additions: twice the multiply-accumulates."""
        return None if self.multiply_adds is None else 2 * self.multiply_adds


def compute_op_cost(match: Match, inputs: Sequence[Shape | None], outputs: Sequence[Shape]) -> OpCost:
    """Return the cost of a matched operation with these argument shapes (None: omitted) and output shapes."""
    named = {p.name: shape for p, shape in zip(match.parameters, inputs, strict=True) if shape is not None}
    rule = MULTIPLY_ADDS.get(match.declaration.code)
    return OpCost(rule(named, outputs[0]) if rule else None, sum(map(math.prod, outputs)))


def _convolution(shapes: Mapping[str, Shape], output: Shape) -> int:
    """A filter has shape (filters, height, width, channels per group), for grouped convolutions too."""
    return math.prod(output) * math.prod(shapes["filter"][1:])


def _depthwise(shapes: Mapping[str, Shape], output: Shape) -> int:
    _, height, width, _ = shapes["filter"]
    return math.prod(output) * height * width


def _transposed(shapes: Mapping[str, Shape], _output: Shape) -> int:
    return math.prod(shapes["input"]) * math.prod(shapes["filter"][:-1])


def _fully_connected(shapes: Mapping[str, Shape], output: Shape) -> int:
    return math.prod(output) * shapes["weights"][1]


def _batch_matmul(shapes: Mapping[str, Shape], output: Shape) -> int:
    """K is the axis of the left matrix that is not the output's rows; `adjoint_left` decides which one that is."""
    left = shapes["left"]
    rows = output[-2]
    return math.prod(output) * left[-2] * left[-1] // rows if rows else 0


def _recurrent(shapes: Mapping[str, Shape], _output: Shape) -> int:
    """All weight matrices, once for each step of each sequence; peepholes and layer norm weights are vectors."""
    weights = (math.prod(shape) for name, shape in shapes.items() if "weights" in name and len(shape) == 2)
    return math.prod(shapes["input"][:-1]) * sum(weights)


MULTIPLY_ADDS: Mapping[OperationType, _Rule] = {
    OperationType.CONV_2D: _convolution,
    OperationType.GROUPED_CONV_2D: _convolution,
    OperationType.DEPTHWISE_CONV_2D: _depthwise,
    OperationType.TRANSPOSE_CONV_2D: _transposed,
    OperationType.FULLY_CONNECTED: _fully_connected,
    OperationType.BATCH_MATMUL: _batch_matmul,
    OperationType.RNN: _recurrent,
    OperationType.UNIDIRECTIONAL_SEQUENCE_RNN: _recurrent,
    OperationType.BIDIRECTIONAL_SEQUENCE_RNN: _recurrent,
    OperationType.LSTM: _recurrent,
    OperationType.UNIDIRECTIONAL_SEQUENCE_LSTM: _recurrent,
    OperationType.BIDIRECTIONAL_SEQUENCE_LSTM: _recurrent,
    OperationType.QUANTIZED_LSTM: _recurrent,
    OperationType.QUANTIZED_16BIT_LSTM: _recurrent,
    OperationType.SVDF: _recurrent,
}
