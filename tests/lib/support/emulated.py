"""Kernels on a machine that is not this one: the same tests, with an emulator in the place of the thread team.

`elsewhere` makes the engine generate code for the emulated machine's target and run each segment there. Every region
of memory is a copy of its own that ends where a page does, before one that is not there; inputs and constants cannot
be written; the arena begins with bytes that are no numbers. A step's units are computed in two parts, the second one
first: any sharing out must give the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pytest

from nnfmq.engines.compiled import compiled_artifact, jit, partition
from nnfmq.engines.compiled.executor import CompiledPartition
from nnfmq.engines.compiled.memory_plan import PartitionPlan
from nnfmq.engines.compiled.target import Target
from nnfmq.engines.compiled.thread_pool import ThreadPool
from nnfmq.engines.execution import ExecutionFrame
from nnfmq.operations.signature import Array
from support.linked import Image

__all__ = ["PAGE", "Call", "Machine", "Memory", "Region", "elsewhere"]

PAGE = 4096
CODE = 0x4000_0000
_DATA = 0x10_0000_0000
_NO_NUMBERS = 0xFF


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes at an address."""

    address: int
    data: Array
    writable: bool


@dataclass(slots=True)
class Memory:
    """Regions between pages that are not there."""

    regions: list[Region] = field(default_factory=list)
    _free: int = _DATA

    def add(self, array: Array, writable: bool = False) -> Region:
        """Give a copy of `array` an address such that it ends where a page does."""
        data = np.frombuffer(array.tobytes(), np.uint8).copy()
        pages = -(-max(data.nbytes, 1) // PAGE)
        region = Region(self._free + pages * PAGE - data.nbytes, data, writable)
        self.regions.append(region)
        self._free += (pages + 1) * PAGE
        return region


@dataclass(frozen=True, slots=True)
class Call:
    """A function, by its address, and at most six arguments."""

    function: int
    arguments: tuple[int, ...]


class Machine(Protocol):
    """An emulator."""

    target: Target

    def load(self, code: bytes) -> Image:
        """Link object code for it."""
        ...

    def run(self, image: Image, regions: Sequence[Region], calls: Sequence[Call]) -> None:
        """Make the calls, one after the other; what they wrote is in the regions' data then.

        Raises AssertionError where a call touches what is in no region.
        """
        ...


class _LoadedCode:
    """In the place of `objects.LoadedCode`."""

    def __init__(self, machine: Machine, code: bytes) -> None:
        self.machine = machine
        self.image = machine.load(code)

    def address(self, name: str) -> int:
        return self.image.functions[name]


class _Segment(CompiledPartition):
    """A segment whose steps run in the emulator."""

    def __init__(self, plan: PartitionPlan, constants: Array, code: _LoadedCode, pool: ThreadPool, slot: int) -> None:
        super().__init__(plan, constants, code, pool, slot)  # type: ignore[arg-type]
        self._there = code

    def __call__(self, scope: ExecutionFrame) -> None:
        scope[-1].check()
        plan, memory = self.plan, Memory()
        arena = memory.add(np.full(plan.arena_bytes, _NO_NUMBERS, np.uint8), writable=True)
        scratch = memory.add(np.full(plan.scratch_bytes, _NO_NUMBERS, np.uint8), writable=True)
        constants = memory.add(self._constants)
        inputs = [memory.add(np.ascontiguousarray(scope[index])) for index in plan.inputs]
        bases = [region.address for region in (arena, constants, *inputs)]
        tables = memory.add(np.array(bases, np.int64)[plan.relocation_bases] + plan.relocation_offsets)
        calls = [
            Call(int(function), (int(table), begin, end, scratch.address))
            for function, table, units, _ in self.launch_records(tables.address)
            for begin, end in _parts(int(units))
        ]
        self._there.machine.run(self._there.image, memory.regions, calls)
        for index, offset, value in plan.outputs:
            scope[index] = arena.data[offset : offset + value.bytes].view(value.dtype).reshape(value.shape)


def _parts(units: int) -> list[tuple[int, int]]:
    half = units // 2
    return [(half, units), (0, half)] if half else [(0, units)]


@contextmanager
def elsewhere(machine: Machine) -> Iterator[None]:
    """Generate code for `machine`, and run it there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "host_target", lambda: machine.target)
        patch.setattr(jit, "_SHARDS_IN_PROCESS", 1)  # an emulator loads one object file
        patch.setattr(compiled_artifact, "LoadedCode", lambda codes, target: _LoadedCode(machine, *codes))
        patch.setattr(compiled_artifact, "CompiledPartition", _Segment)
        yield
