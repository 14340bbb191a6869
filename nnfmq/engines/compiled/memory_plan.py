"""Memory planning: offsets in one arena for the operands of a partition, and the launches that use them.

A plan has no addresses: each pointer of a launch is a relocation, an offset from the arena, the constants or an input.
So a plan can be saved, and any number of executions use it at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct

from nnfmq.engines.compiled.guard_pages import Guards, guarded_layout
from nnfmq.engines.compiled.kernels import Kernel, symbol_name
from nnfmq.engines.compiled.target import Target
from nnfmq.engines.compiled.thread_pool import Parallelism
from nnfmq.hal.errors import GeneralFailure
from nnfmq.operations.declaration import Array, Shape

__all__ = [
    "ALIGNMENT",
    "FIRST_INPUT_BASE",
    "Allocation",
    "ArraySpec",
    "LiveRange",
    "PartitionLaunch",
    "PartitionPlan",
    "PlannedErrors",
    "PlannedLaunch",
    "Views",
    "align",
    "plan_offsets",
    "plan_partition",
    "storage_of",
]

ALIGNMENT = 64  # bytes of a cache line
_OVERREAD_BYTES = 64  # between operands: vectors may read past the last element
_PARALLEL_MIN_NS = 2000
_WAKE_MIN_NS = 80_000  # twice the time in which a worker thread wakes
_ARENA_BASE, _CONSTANTS_BASE, FIRST_INPUT_BASE = 0, 1, 2


def align(size: int) -> int:
    """Return `size` rounded up to whole cache lines."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class LiveRange(Struct, frozen=True):
    """An operand of `size` bytes, written by launch `begin` and last read by launch `end`."""

    size: int
    begin: int
    end: int


def plan_offsets(ranges: Sequence[LiveRange]) -> tuple[list[int], int]:
    """Return the arena offset of each operand, and the size of the arena in bytes.

    Greedy by size, each at the lowest offset that is free during its live range (as TFLite's ArenaPlanner).
    """
    offsets, total = [0] * len(ranges), 0
    placed = np.empty((4, len(ranges)), np.int64)  # of those that have an offset: begin, end, first byte, last byte
    largest_first = sorted(range(len(ranges)), key=lambda n: (-ranges[n].size, ranges[n].begin))
    for count, number in enumerate(largest_first):
        live, (begins, ends, firsts, lasts) = ranges[number], placed[:, :count]
        overlapping = np.flatnonzero((begins <= live.end) & (live.begin <= ends))
        offset, size = 0, align(live.size + _OVERREAD_BYTES)
        for other in overlapping[np.argsort(firsts[overlapping], kind="stable")].tolist():
            if firsts[other] - offset >= size:
                break
            offset = max(offset, int(lasts[other]))
        offsets[number] = offset
        total = max(total, offset + size)
        placed[:, count] = live.begin, live.end, offset, offset + size
    return offsets, total


class ArraySpec(Struct, frozen=True):
    """The dtype and shape of an operand."""

    dtype: np.dtype[Any]
    shape: Shape

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def permuted(self, permutation: Sequence[int]) -> ArraySpec:
        """Return the spec of the transposed array."""
        return ArraySpec(self.dtype, tuple(self.shape[axis] for axis in permutation))


class PartitionLaunch(Struct, frozen=True):
    """A kernel launch in a partition: operand indexes, constant offsets, estimated single-thread time in ns.

    `operation` is the number of the operation that it belongs to; its kernels also compute the operations `fused`.
    If it has `errors`, its last output has an int32 for each work item and each of these errors.
    """

    kernel: Kernel
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: tuple[int, ...]
    estimated_ns: int
    operation: int = -1
    fused: tuple[int, ...] = ()
    errors: tuple[str, ...] = ()

    @property
    def runs_parallel(self) -> bool:
        """Whether distributing the work items over threads is worth the synchronization."""
        return self.estimated_ns >= _PARALLEL_MIN_NS and self.kernel.work_items > 1


class Allocation(Struct, frozen=True):
    """The part of the arena that an operand or intermediate has from launch `begin` to launch `end`.

    `end` is the number of launches if the operand is read after the partition. `index` is ~i for the NHWC copy of
    operand i.
    """

    index: int
    spec: ArraySpec
    offset: int
    begin: int
    end: int


class PlannedErrors(Struct, frozen=True, array_like=True):
    """The errors that a launch may report, and for how many work items; see `PartitionPlan.errors`."""

    rows: int
    texts: tuple[str, ...]

    @property
    def count(self) -> int:
        """Numbers that the launch writes."""
        return self.rows * len(self.texts)


class PlannedLaunch(Struct, frozen=True, array_like=True):
    """A launch without addresses: symbol, number of arguments, work items, parallelism, number of its operation.

    An artifact stores it as it is.
    """

    function: str
    arg_count: int
    work_items: int
    parallelism: Parallelism
    operation: int


class PartitionPlan(Struct, frozen=True):
    """All that a partition executes, without addresses.

    `inputs` are operand indexes; `outputs` are (operand index, arena offset, spec). `direct_outputs` are the outputs
    that may be elsewhere than in the arena. `errors` are the errors of the launches that report some, in order; their
    int32 numbers are one after the other at `errors_offset` in the arena. The relocations list (base, offset) of each
    argument of all launches in order; bases are the arena, the constants, the inputs, then the direct outputs.
    `guards` are None but for debugging. `source_launches` and `allocations` are for profiling; a plan from a cache has
    none.
    """

    launches: tuple[PlannedLaunch, ...]
    inputs: tuple[int, ...]
    outputs: tuple[tuple[int, int, ArraySpec], ...]
    direct_outputs: tuple[int, ...]
    relocation_bases: Array
    relocation_offsets: Array
    arena_bytes: int
    scratch_bytes: int
    errors: tuple[PlannedErrors, ...] = ()
    errors_offset: int = 0
    guards: Guards | None = None
    source_launches: tuple[PartitionLaunch, ...] = ()
    allocations: tuple[Allocation, ...] = ()

    @property
    def first_output_base(self) -> int:
        """The relocation base of the first direct output."""
        return FIRST_INPUT_BASE + len(self.inputs)

    def errors_in(self, arena: Array) -> Array:
        """Return the numbers of all launches that report errors, as a view of an arena's bytes."""
        count = sum(errors.count for errors in self.errors)
        return arena[self.errors_offset : self.errors_offset + 4 * count].view(np.int32)

    def require_no_error(self, reported: Array) -> None:
        """Require that no number of `errors_in` is set.

        Raises:
            GeneralFailure: If one is: the first error of the first launch that reports one.
        """
        if not reported.any():
            return
        first = 0
        for errors in self.errors:
            are_set = reported[first : first + errors.count].reshape(errors.rows, -1).any(axis=0)
            if are_set.any():
                raise GeneralFailure(errors.texts[int(are_set.argmax())])
            first += errors.count


Views: TypeAlias = dict[int, tuple[int, int]]
"""An operand → the one in whose memory it is, which may be a view, too, and the byte of that one where it begins."""


def storage_of(index: int, views: Views) -> tuple[int, int]:
    """Return the operand that is no view in whose memory an operand is, and the byte of it where it begins."""
    offset = 0
    while index in views:
        index, begin = views[index]
        offset += begin
    return index, offset


def plan_partition(
    launches: Sequence[PartitionLaunch],
    specs: Mapping[int, ArraySpec],
    views: Views,
    inputs: Sequence[int],
    outputs: Sequence[int],
    target: Target,
    results: AbstractSet[int] = frozenset(),
    guard_side: str | None = None,
) -> PartitionPlan:
    """Plan the memory and the parallelism of launches.

    `specs` describes each operand that a launch writes, and the outputs. `results` are the outputs that no operation
    reads. Those are direct outputs, unless their memory is also that of another output or of an operand that a launch
    reads. With `guard_side` the operands have guard pages, see `guard_pages`, and there are no direct outputs.
    """
    errors = {
        launch.outputs[-1]: PlannedErrors(launch.kernel.work_items, launch.errors)
        for launch in launches
        if launch.errors
    }
    scratch_bytes = max((launch.kernel.scratch_bytes(target) for launch in launches), default=0)
    ranges = _live_ranges(launches, specs, views, outputs, errors)
    arena = _plan_arena(ranges, errors, scratch_bytes, guard_side)
    direct = () if guard_side is not None else _direct_outputs(launches, views, outputs, results)
    locations = {index: (_ARENA_BASE, offset) for index, offset in arena.offsets.items()}
    others = [*inputs, *(storage_of(index, views)[0] for index in direct)]
    locations |= {index: (base, 0) for base, index in enumerate(others, FIRST_INPUT_BASE)}
    bases, from_base = _relocations(launches, locations, views)
    return PartitionPlan(
        launches=tuple(map(_planned_launch, launches, _choose_parallelism(launches))),
        inputs=tuple(inputs),
        outputs=tuple(
            (index, arena.offsets[owner] + within, specs[index])
            for index in outputs
            for owner, within in [storage_of(index, views)]
        ),
        direct_outputs=direct,
        relocation_bases=bases,
        relocation_offsets=from_base,
        arena_bytes=arena.size,
        scratch_bytes=align(scratch_bytes + ALIGNMENT),
        errors=tuple(errors.values()),
        errors_offset=arena.errors_offset,
        guards=arena.guards,
        source_launches=tuple(launches),
        allocations=tuple(
            Allocation(index, specs[index], arena.offsets[index], live.begin, live.end)
            for index, live in ranges.items()
        ),
    )


def _live_ranges(
    launches: Sequence[PartitionLaunch],
    specs: Mapping[int, ArraySpec],
    views: Views,
    outputs: Sequence[int],
    errors: Mapping[int, PlannedErrors],
) -> dict[int, LiveRange]:
    """Return the live range of each operand that a launch writes; one of views is that of all of them."""

    def root(index: int) -> int:
        return storage_of(index, views)[0]

    begins, ends = {}, {}
    for number, launch in enumerate(launches):
        begins.update({root(index): number for index in launch.outputs if index not in errors})
        ends.update({root(index): number for index in (*launch.inputs, *launch.outputs)})
    ends.update({root(index): len(launches) for index in outputs})
    return {index: LiveRange(specs[index].bytes, begin, ends[index]) for index, begin in begins.items()}


class _Arena(Struct, frozen=True):
    """The offsets of operands and of launches' errors in an arena of `size` bytes, by operand."""

    offsets: dict[int, int]
    errors_offset: int
    size: int
    guards: Guards | None


def _plan_arena(
    ranges: Mapping[int, LiveRange], errors: Mapping[int, PlannedErrors], scratch_bytes: int, guard_side: str | None
) -> _Arena:
    """Return the arena: operands share memory, or, with `guard_side`, each is between guards."""
    errors_bytes = 4 * sum(planned.count for planned in errors.values())
    if guard_side is None:
        guards = None
        found, errors_offset = plan_offsets(list(ranges.values()))
        size = align(errors_offset + errors_bytes)
    else:
        layout = guarded_layout([*(live.size for live in ranges.values()), errors_bytes], guard_side)
        guards, size = Guards(guard_side, layout.guards, scratch_bytes), layout.size
        *found, errors_offset = layout.offsets
    offsets = dict(zip(ranges, found, strict=True))
    next_offset = errors_offset
    for index, planned in errors.items():
        offsets[index] = next_offset
        next_offset += 4 * planned.count
    return _Arena(offsets, errors_offset, size, guards)


def _direct_outputs(
    launches: Sequence[PartitionLaunch], views: Views, outputs: Sequence[int], results: AbstractSet[int]
) -> tuple[int, ...]:
    """Return the outputs of `results` whose memory no launch reads, and that no other output shares."""
    roots = [storage_of(index, views)[0] for index in outputs]
    read = {storage_of(index, views)[0] for launch in launches for index in launch.inputs}
    sharers = Counter(roots)
    pairs = zip(outputs, roots, strict=True)
    return tuple(index for index, root in pairs if index in results and root not in read and sharers[root] == 1)


def _relocations(
    launches: Sequence[PartitionLaunch], locations: Mapping[int, tuple[int, int]], views: Views
) -> tuple[Array, Array]:
    """Return the base of each argument, inputs, outputs and constants, and its offset from that."""
    found: list[tuple[int, int]] = []
    for launch in launches:
        for index in (*launch.inputs, *launch.outputs):
            owner, within = storage_of(index, views)
            base, offset = locations[owner]
            found.append((base, offset + within))
        found += [(_CONSTANTS_BASE, offset) for offset in launch.constants]
    bases, offsets = np.array(found, np.int64).reshape(-1, 2).T.copy()
    return bases, offsets


def _planned_launch(launch: PartitionLaunch, parallelism: Parallelism) -> PlannedLaunch:
    arg_count = len(launch.inputs) + len(launch.outputs) + len(launch.constants)
    return PlannedLaunch(symbol_name(launch.kernel), arg_count, launch.kernel.work_items, parallelism, launch.operation)


def _choose_parallelism(launches: Sequence[PartitionLaunch]) -> list[Parallelism]:
    """Choose each launch's parallelism.

    Sleeping workers are woken only if >= 80 µs of parallel work remain, twice the wake-up latency: near the end of a
    partition they would find nothing left to do.
    """
    found, remaining_ns = [], 0
    for launch in reversed(launches):
        if not launch.runs_parallel:
            found.append(Parallelism.SERIAL)
            continue
        remaining_ns += launch.estimated_ns
        found.append(Parallelism.PARALLEL_WAKE if remaining_ns >= _WAKE_MIN_NS else Parallelism.PARALLEL)
    return found[::-1]
