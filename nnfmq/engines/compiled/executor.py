"""A compiled partition: consecutive lowered operations, whose launches the thread pool runs one after the other.

Inputs are read in place from the frame, intermediates live in an arena, and outputs are published in the frame as views
of the arena, or written directly to the request's arrays (`write_directly`). Everything that holds addresses (arena,
argument arrays) is an `ExecutionContext`: an execution owns one from its first run to its end, then it returns to the
partition's pool.

A partition is one step of a program with others, or it is the whole program: then a run of a `CompiledExecution`
only runs the launches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nnfmq.engines import memory as process_memory
from nnfmq.engines.compiled.guard_pages import GuardedContext
from nnfmq.engines.compiled.memory_plan import ALIGNMENT, FIRST_INPUT_BASE, Allocation, ArraySpec, PartitionPlan
from nnfmq.engines.compiled.object_code import LoadedCode
from nnfmq.engines.compiled.thread_pool import RECORD_WORDS, ThreadPool
from nnfmq.engines.execution import DEFAULT_RUN_OPTIONS, RunOptions
from nnfmq.engines.program import ExecutionFrame, OutputWriter
from nnfmq.hal.errors import ResourceExhaustedTransient
from nnfmq.hal.types import OutputShape
from nnfmq.observe.trace_points import TRACING, TraceRecorder
from nnfmq.operations.declaration import Array

__all__ = ["CompiledExecution", "CompiledPartition"]

_CHECK_PERIOD_NS = 200_000
_MAX_POOLED_CONTEXTS = 4  # as many executions run at the same time; open bursts keep their own


class CompiledPartition:
    """A `Partition` of a program. Executions use it concurrently; each has its context in slot `slot` of its frame."""

    def __init__(self, plan: PartitionPlan, constants: Array, code: LoadedCode, pool: ThreadPool, slot: int) -> None:
        self.plan = plan
        self._constants, self._code, self._pool, self._slot = constants, code, pool, slot
        self._functions = [code.address(launch.function) for launch in plan.launches]
        self.launch_count = len(plan.launches)
        self._free_contexts: list[ExecutionContext] = []
        self._trace_names: Callable[[int], str] | None = None
        self._traced_by: TraceRecorder | None = None
        self._name_ids = b""  # of the operations of all launches, in the ring of `_traced_by`
        fits = process_memory.charge(self.context_bytes)  # a model that can never run is rejected when it is prepared
        if fits is not None:
            fits.close()
        process_memory.register(self)

    def __call__(self, frame: ExecutionFrame) -> None:
        """Run all launches, and publish the outputs in the frame.

        `RunOptions.check` may raise before the first launch, and about every `_CHECK_PERIOD_NS` from then on.
        """
        acquired: _AcquiredContext | None = frame[self._slot]
        if acquired is None:
            acquired = frame[self._slot] = _AcquiredContext(self, self.acquire())
        context = acquired.context
        context.relocate(frame)
        self.run_launches(context, frame[-1])
        self.publish_outputs(frame)

    def bind(
        self,
        frame: ExecutionFrame,
        write_outputs: OutputWriter,
        write_directly: Callable[[ExecutionFrame], OutputWriter] | None,
    ) -> CompiledExecution:
        """See `Partition.bind`."""
        return CompiledExecution(self, frame, write_outputs, write_directly)

    def settled_context(self, frame: ExecutionFrame) -> ExecutionContext | None:
        """Return the frame's context if it has the addresses of all arrays, also for further runs with this frame.

        None if an input is copied in each run. The partition must have been called with the frame before.
        """
        context: ExecutionContext = frame[self._slot].context
        return None if context.copies_inputs else context

    def run_launches(self, context: ExecutionContext, options: RunOptions) -> None:
        """Run all launches of a context that has all addresses.

        Raises:
            GeneralFailure: If a launch reported an error.
        """
        if TRACING.recorder is None and options is DEFAULT_RUN_OPTIONS:
            self._pool.run(context.records, 0, self.launch_count, context.scratch, context.scratch_stride, 0)
        else:
            self._run_observed(context, options)
        if context.errors is not None:
            self.plan.require_no_error(context.errors)

    def name_launches(self, names: Callable[[int], str]) -> None:
        """Let the launches have the names of their operations in traces; `names` returns that of a number."""
        self._trace_names = names

    def _add_trace_names(self, recorder: TraceRecorder) -> None:
        names = self._trace_names or "[NN_LC_PCO]operation {}".format
        ids = recorder.ids_of(names(launch.operation) for launch in self.plan.launches)
        self._name_ids, self._traced_by = ids, recorder

    def _run_observed(self, context: ExecutionContext, options: RunOptions) -> None:
        """Run all launches; check the options meanwhile, and record a slice for each launch in a trace."""
        recorder = TRACING.recorder
        times = 0
        if recorder is not None:
            times = context.times_address or context.allocate_times()
            self._pool.take_pauses()  # of runs that nobody recorded
        if options is DEFAULT_RUN_OPTIONS:
            self._pool.run(context.records, 0, self.launch_count, context.scratch, context.scratch_stride, times)
        else:
            self._run_with_checks(context, options, times)
        if recorder is not None:
            if self._traced_by is not recorder:
                self._add_trace_names(recorder)
            recorder.ring.launches(self._name_ids, context.times)
            recorder.pauses(self._pool.take_pauses())

    def _run_with_checks(self, context: ExecutionContext, options: RunOptions, times: int) -> None:
        """Run all launches; check the options before a launch if `_CHECK_PERIOD_NS` have passed since the last check.

        How many launches that is follows from the last run: a check costs as much as a small launch.
        """
        run, last = self._pool.run, self.launch_count
        begin_ns = time.monotonic_ns()
        for first in range(0, last, context.launches_per_check):
            options.check()
            end = min(first + context.launches_per_check, last)
            run(context.records, first, end, context.scratch, context.scratch_stride, times)
        elapsed_ns = max(time.monotonic_ns() - begin_ns, 1)
        context.launches_per_check = max(1, last * _CHECK_PERIOD_NS // elapsed_ns)

    def range_runner(self, frame: ExecutionFrame) -> Callable[[int, int], None]:
        """See `Partition.range_runner`. The function is valid as long as the frame's arrays stay the same."""
        context: ExecutionContext = frame[self._slot].context
        context.relocate(frame)
        run, records, stride = self._pool.run, context.records, context.scratch_stride
        return lambda first, last: run(records, first, last, context.scratch, stride)

    def arena_view(self, frame: ExecutionFrame, place: Allocation) -> Array:
        """Return an operand's place in the arena, as an array. For tests of single launches, see `range_runner`."""
        context: ExecutionContext = frame[self._slot].context
        return context.view(place.offset, place.spec)

    def publish_outputs(self, frame: ExecutionFrame) -> None:
        """See `Partition.publish_outputs`. The outputs are views of the arena."""
        context: ExecutionContext = frame[self._slot].context
        for index, array in context.outputs:
            frame[index] = array

    @property
    def direct_outputs(self) -> tuple[int, ...]:
        """The operands for which `write_directly` takes an array."""
        return self.plan.direct_outputs

    def write_directly(self, frame: ExecutionFrame, arrays: Mapping[int, Array]) -> None:
        """From the next run with `frame` on, write direct outputs to `arrays` instead of to the arena.

        The partition must have been called with this frame before. The arrays have the operands' dtypes and shapes, are
        contiguous and writable, and overlap neither each other nor any array that a step reads. `arrays` may have
        other operands, too. A run that fails may leave a part of its results in them.

        This is safe, although another process may be able to write to the arrays: no launch reads a direct output that
        another launch has written (`plan_partition`), and a kernel that reads again what it has written itself derives
        neither addresses nor counts from it. Kernels never write past an output's last element.
        """
        context: ExecutionContext = frame[self._slot].context
        found = {index: arrays[index] for index in self.plan.direct_outputs if index in arrays}
        context.write_directly(found)
        for index, array in found.items():
            frame[index] = array  # keeps it alive as long as the context has its address

    def launch_records(self, args: int) -> Array:
        """Return the launch records for `ThreadPool.run`, with argument arrays that begin at address `args`."""
        records = np.empty((self.launch_count, RECORD_WORDS), np.int64)
        for number, (launch, function) in enumerate(zip(self.plan.launches, self._functions, strict=True)):
            records[number] = function, args, launch.work_items, launch.parallelism
            args += 8 * launch.arg_count
        return records

    def acquire(self) -> ExecutionContext:
        """Return a context that no execution owns: a pooled one if there is one, else a new one."""
        try:
            return self._free_contexts.pop()
        except IndexError:
            return ExecutionContext(self)

    def new_memory(self) -> _ContextMemory | GuardedContext:
        """Return memory for a context. Raises MemoryError."""
        plan = self.plan
        if plan.guards is None:
            return _ContextMemory(self.context_bytes, plan.arena_bytes, plan.scratch_bytes)
        return GuardedContext(plan.guards, plan.arena_bytes, self._pool.scratch_slots, ALIGNMENT)

    def release(self, context: ExecutionContext) -> None:
        """Return a context to the pool, or drop it if the pool is full."""
        context.forget_arrays()
        if len(self._free_contexts) < _MAX_POOLED_CONTEXTS:
            self._free_contexts.append(context)

    def trim(self) -> None:
        """Free the pooled contexts."""
        self._free_contexts.clear()

    @property
    def constants_address(self) -> int:
        """Address of the constants."""
        return int(self._constants.ctypes.data)

    @property
    def thread_count(self) -> int:
        """Maximum number of threads that compute it: the calling thread and the workers."""
        return self._pool.worker_count + 1

    @property
    def context_bytes(self) -> int:
        """Size of a context's memory: the arena, and scratch memory for each thread that the pool may ever have."""
        plan = self.plan
        return plan.arena_bytes + self._pool.scratch_slots * plan.scratch_bytes + ALIGNMENT


class _ContextMemory:
    """The memory of one execution of a partition without guard pages; `GuardedContext` describes it."""

    def __init__(self, size: int, arena_bytes: int, scratch_stride: int) -> None:
        memory = np.empty(size, np.uint8)
        self.arena = memory[-memory.ctypes.data % ALIGNMENT :]
        self.scratch = self.arena.ctypes.data + arena_bytes
        self.scratch_stride = scratch_stride

    def input_array(self, _position: int, array: Array) -> Array:
        """Return an input, or a copy of it if its elements are not contiguous."""
        return np.ascontiguousarray(array)


class _AcquiredContext:
    """An execution's ownership of a context, which returns to its partition when the frame is freed."""

    __slots__ = ("_partition", "context")

    def __init__(self, partition: CompiledPartition, context: ExecutionContext) -> None:
        self._partition = partition
        self.context = context

    def __del__(self) -> None:
        self._partition.release(self.context)


class ExecutionContext:
    """One execution's arena, scratch memory and argument arrays.

    Contexts are pooled because a new arena costs a page fault for each page at its first use. Only the addresses of
    inputs depend on the execution.
    """

    def __init__(self, partition: CompiledPartition) -> None:
        plan = self._plan = partition.plan
        self._charge = process_memory.charge(partition.context_bytes)  # as long as this object exists
        self._memory = partition.new_memory()
        self._arena = self._memory.arena
        address = self._arena.ctypes.data
        self.errors = plan.errors_in(self._arena) if plan.errors else None
        """What the launches of the last run reported, see `PartitionPlan.errors_in`."""
        self.scratch, self.scratch_stride = self._memory.scratch, self._memory.scratch_stride
        self._arena_outputs = [(index, self.view(offset, spec)) for index, offset, spec in plan.outputs]
        offsets = {index: offset for index, offset, _ in plan.outputs}
        self._arena_addresses = [address + offsets[index] for index in plan.direct_outputs]
        input_addresses = [0] * len(plan.inputs)  # set in each execution
        bases = [address, partition.constants_address, *input_addresses, *self._arena_addresses]
        self._base_addresses = np.array(bases, np.int64)
        self._args = np.empty_like(plan.relocation_offsets)
        self._records = partition.launch_records(self._args.ctypes.data)
        self.records = int(self._records.ctypes.data)
        """Address of the launch records."""
        self.launches_per_check = 1  # until a run has shown how long the launches take
        self.times = memoryview(b"")  # before and after each launch of the last run (i64), if it is traced
        self.times_address = 0
        self.forget_arrays()

    def view(self, offset: int, spec: ArraySpec) -> Array:
        """Return a part of the arena as an array."""
        return self._arena[offset : offset + spec.bytes].view(spec.dtype).reshape(spec.shape)

    def allocate_times(self) -> int:
        """Give `times` a place for each launch and one more, and return its address."""
        times = np.zeros(len(self._plan.launches) + 1, np.int64)
        self.times, self.times_address = times.data, int(times.ctypes.data)
        return self.times_address

    def forget_arrays(self) -> None:
        """Drop the references to inputs, and the addresses of direct outputs: both may be a client's memory."""
        count = len(self._plan.inputs)
        self._last_inputs: list[Any] = [None] * count  # None: its address is not known
        self._keepalive: list[Any] = [None] * count
        self._is_relocated = False
        self._base_addresses[self._plan.first_output_base :] = self._arena_addresses
        self.outputs = self._arena_outputs

    def write_directly(self, arrays: Mapping[int, Array]) -> None:
        """Write the direct outputs in `arrays` there, until `forget_arrays`. Borrows the arrays."""
        for base, index in enumerate(self._plan.direct_outputs, self._plan.first_output_base):
            if index in arrays:
                self._base_addresses[base] = arrays[index].ctypes.data
        self.outputs = [(index, array) for index, array in self._arena_outputs if index not in arrays]
        self._is_relocated = False

    @property
    def copies_inputs(self) -> bool:
        """Whether `relocate` copies an input, since its elements are not contiguous."""
        return any(kept is not array for kept, array in zip(self._keepalive, self._last_inputs, strict=True))

    def relocate(self, frame: ExecutionFrame) -> None:
        """Give the launches the addresses of the frame's inputs, and of the direct outputs.

        Only inputs that are not the arrays of the last run are looked at, because an address takes a microsecond. An
        array that is not contiguous is copied in each run, because its elements may have changed.
        """
        last = self._last_inputs
        for position, index in enumerate(self._plan.inputs):
            array = frame[index]
            if array is not last[position]:
                kept = self._keepalive[position] = self._memory.input_array(position, array)
                last[position] = array if kept is array else None
                self._base_addresses[FIRST_INPUT_BASE + position] = kept.ctypes.data
                self._is_relocated = False
        if not self._is_relocated:
            np.add(self._base_addresses[self._plan.relocation_bases], self._plan.relocation_offsets, out=self._args)
            self._is_relocated = True


class CompiledExecution:
    """A bound program that one partition computes. `run` may be called any number of times, by one thread at a time.

    The first run acquires a context. Before the second, `write_directly` lets launches write to the request's arrays;
    a request that is executed only once saves the cost of it. From then on the context has all addresses.
    """

    __slots__ = ("_context", "_has_run", "_partition", "_write_directly", "frame", "write_outputs")

    def __init__(
        self,
        partition: CompiledPartition,
        frame: ExecutionFrame,
        write_outputs: OutputWriter,
        write_directly: Callable[[ExecutionFrame], OutputWriter] | None,
    ) -> None:
        self._partition = partition
        self._context: ExecutionContext | None = None  # known when it has all addresses; the frame owns it
        self.frame = frame
        self.write_outputs = write_outputs
        self._write_directly = write_directly
        self._has_run = False

    def run(self, options: RunOptions = DEFAULT_RUN_OPTIONS) -> tuple[OutputShape, ...]:
        """Execute once: read the inputs, fill the outputs, return the shape of each. Raises as `Program.execute`."""
        try:
            if self._context is None:
                return self._run_unsettled(options)
            self._partition.run_launches(self._context, options)
            return self.write_outputs(self.frame)
        except (MemoryError, RecursionError) as error:
            raise ResourceExhaustedTransient(f"out of memory while executing the model: {error}") from error

    def _run_unsettled(self, options: RunOptions) -> tuple[OutputShape, ...]:
        """Execute as a step of a program, which looks at the inputs again."""
        frame = self.frame
        if self._write_directly is not None and self._has_run:
            self.write_outputs, self._write_directly = self._write_directly(frame), None
        frame[-1] = options
        self._partition(frame)
        shapes = self.write_outputs(frame)
        self._has_run = True
        if self._write_directly is None:
            self._context = self._partition.settled_context(frame)
        return shapes
