"""Kernels in an emulator of another machine: it runs the launches instead of the thread pool.

`emulated_on` makes the engine generate code for the emulator's target and run each partition there. Every memory region
is a copy that ends at the end of a page, before an unmapped one; inputs and constants are read-only; the arena begins
filled with NaN bytes. The work items of a launch are computed in two parts, the second one first, because any schedule
must give equal results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pytest

from nnfmq.engines.compiled import artifact, partition
from nnfmq.engines.compiled.executor import CompiledPartition
from nnfmq.engines.compiled.memory_plan import PartitionPlan
from nnfmq.engines.compiled.target import Target
from nnfmq.engines.compiled.thread_pool import ThreadPool
from nnfmq.engines.program import ExecutionFrame
from nnfmq.operations.declaration import Array
from support.linked import Image

__all__ = ["PAGE", "Call", "Machine", "Memory", "Region", "emulated_on"]

PAGE = 4096
CODE = 0x4000_0000
_DATA = 0x10_0000_0000
_NAN_BYTE = 0xFF


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes at an address."""

    address: int
    data: Array
    writable: bool


@dataclass(slots=True)
class Memory:
    """Regions between unmapped pages."""

    regions: list[Region] = field(default_factory=list)
    _free: int = _DATA

    def add(self, array: Array, writable: bool = False) -> Region:
        """Add a copy of `array` at an address with which it ends at the end of a page."""
        data = np.frombuffer(array.tobytes(), np.uint8).copy()
        pages = -(-max(data.nbytes, 1) // PAGE)
        region = Region(self._free + pages * PAGE - data.nbytes, data, writable)
        self.regions.append(region)
        self._free += (pages + 1) * PAGE
        return region


@dataclass(frozen=True, slots=True)
class Call:
    """A function's address and at most six arguments."""

    function: int
    arguments: tuple[int, ...]


class Machine(Protocol):
    """An emulator."""

    target: Target

    def load(self, *code: bytes) -> Image:
        """Link object files for it."""
        ...

    def run(self, image: Image, regions: Sequence[Region], calls: Sequence[Call]) -> None:
        """Make the calls, one after the other, and update the regions' data.

        Raises:
            AssertionError: If a call accesses memory outside of all regions, or writes to a read-only one.
        """
        ...


class _EmulatedCode:
    """Replaces `object_loader.LoadedCode`."""

    def __init__(self, machine: Machine, codes: Sequence[bytes]) -> None:
        self.machine = machine
        self.image = machine.load(*codes)

    def address(self, name: str) -> int:
        return self.image.functions[name]


class _EmulatedPartition(CompiledPartition):
    """A partition whose launches run in the emulator."""

    def __init__(self, plan: PartitionPlan, constants: Array, code: _EmulatedCode, pool: ThreadPool, slot: int) -> None:
        super().__init__(plan, constants, code, pool, slot)  # type: ignore[arg-type]
        self._emulated = code

    def __call__(self, frame: ExecutionFrame) -> None:
        frame[-1].check()
        plan, memory = self.plan, Memory()
        arena = memory.add(np.full(plan.arena_bytes, _NAN_BYTE, np.uint8), writable=True)
        scratch = memory.add(np.full(plan.scratch_bytes, _NAN_BYTE, np.uint8), writable=True)
        constants = memory.add(self._constants)
        inputs = [memory.add(np.ascontiguousarray(frame[index])) for index in plan.inputs]
        direct = {
            index: memory.add(np.full(spec.bytes, _NAN_BYTE, np.uint8), writable=True)
            for index, _, spec in plan.outputs
            if index in plan.direct_outputs
        }
        bases = [
            region.address for region in (arena, constants, *inputs, *(direct[index] for index in plan.direct_outputs))
        ]
        args = memory.add(np.array(bases, np.int64)[plan.relocation_bases] + plan.relocation_offsets)
        calls = [
            Call(int(function), (int(launch_args), begin, end, scratch.address))
            for function, launch_args, work_items, _ in self.launch_records(args.address)
            for begin, end in _halves(int(work_items))
        ]
        self._emulated.machine.run(self._emulated.image, memory.regions, calls)
        if plan.errors:
            plan.require_no_error(plan.errors_in(arena.data))
        for index, offset, spec in plan.outputs:
            region, begin = (direct[index], 0) if index in direct else (arena, offset)
            frame[index] = region.data[begin : begin + spec.bytes].view(spec.dtype).reshape(spec.shape)

    def settled_context(self, frame: ExecutionFrame) -> None:
        """None: each run has memory of its own."""

    def write_directly(self, frame: ExecutionFrame, arrays: Mapping[int, Array]) -> None:
        """Do nothing: the emulator has memory of its own, and each direct output is a region of it."""

    @property
    def direct_outputs(self) -> tuple[int, ...]:
        """None: the results in `frame` are copied."""
        return ()


def _halves(work_items: int) -> list[tuple[int, int]]:
    half = work_items // 2
    return [(half, work_items), (0, half)] if half else [(0, work_items)]


@contextmanager
def emulated_on(machine: Machine) -> Iterator[None]:
    """Generate code for `machine`, and run it there, in the `with` block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "host_target", lambda: machine.target)
        patch.setattr(artifact, "LoadedCode", lambda codes: _EmulatedCode(machine, codes))
        patch.setattr(artifact, "CompiledPartition", _EmulatedPartition)
        yield
