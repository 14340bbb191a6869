"""What every kernel is: a description of one loop nest, with its work cut into units that threads share out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

from nnfmq.engines.compiled.emission import Emitter
from nnfmq.engines.compiled.target import Target

__all__ = ["Kernel", "name_of"]


class Kernel(Protocol):
    """One loop nest over fixed shapes. Its table holds the addresses of its inputs, outputs and constants, in order."""

    @property
    def units(self) -> int:
        """Into how many pieces the work is cut; any order and any sharing out gives the same results."""
        ...

    def scratch_bytes(self, target: Target) -> int:
        """How much memory of its own each thread needs."""
        ...

    def emit(self, e: Emitter) -> None:
        """Write the instructions."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel with its constants, which follow inputs and outputs in its table."""

    kernel: Kernel
    constants: tuple[bytes, ...] = ()
    work: int = 0


def name_of(kernel: Kernel) -> str:
    """Return the name of a kernel's function: equal kernels have equal names."""
    text = repr(kernel)
    return f"{type(kernel).__name__}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
