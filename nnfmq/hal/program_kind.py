"""ProgramKind: what executes a prepared model. In a module of its own, because every client loads it."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["ProgramKind"]


class ProgramKind(IntEnum):
    """What a device has prepared to execute a model.

    OTHER is a program of a plug-in's device, or one that is not known. BASELINE is the interpreter's, until the
    background compilation of FAST_SINGLE_ANSWER replaces it. COMPILED is machine code that was generated during this
    preparation, CACHED machine code from a cache.
    """

    OTHER = 0
    INTERPRETER = 1
    BASELINE = 2
    COMPILED = 3
    CACHED = 4

    @property
    def is_machine_code(self) -> bool:
        """Whether a program of the device `compiled` executes the model from the first execution on."""
        return self in (ProgramKind.COMPILED, ProgramKind.CACHED)
