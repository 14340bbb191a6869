"""ProgramKind and DeviceChoice: what executes a prepared model, and who chose its device."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, TypeAlias

from nnfmq.hal.errors import GeneralFailure

__all__ = ["DeviceChoice", "ProgramKind", "require_compiler_s_program", "require_machine_code"]


class ProgramKind(IntEnum):
    """The program that a device has prepared to execute a model.

    OTHER is a program of a plug-in's device, or one that is not known. BASELINE is the interpreter's, until the
    background compilation of FAST_SINGLE_ANSWER replaces it. COMPILED is machine code that was generated during this
    preparation, CACHED machine code from a cache; of both the interpreter executes operations that have no kernel.
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


def require_machine_code(device: str, program: ProgramKind, compiled_operations: int) -> None:
    """Check that what is measured as the device `compiled` is machine code; nothing for other devices.

    Raises:
        GeneralFailure: If it is not, or if the interpreter executes all of its operations.
    """
    require_compiler_s_program(device, program)
    if device == "compiled" and not compiled_operations:
        raise GeneralFailure("the device compiled has prepared a program in which the interpreter executes everything")


def require_compiler_s_program(device: str, program: ProgramKind) -> None:
    """Check that what is compared as the device `compiled` is a program of the compiler; nothing for other devices.

    It may have no operation for which the compiler has a kernel.

    Raises:
        GeneralFailure: If it is not.
    """
    if device == "compiled" and not program.is_machine_code:
        raise GeneralFailure(f"the device compiled has prepared a program of the kind {program.name}, not machine code")


# ----------------------------------------------------------------------------------------------------------------------
# DeviceChoice: who chose the device of a preparation. A module of its own, because every client loads it.


DeviceChoice: TypeAlias = Literal["application", "best", "fallback", "step"]
"""The application, the runtime, or the fallback after other devices have failed.

"step": the preparation is that of a step of a plan, and the plan's own preparation says who chose.
"""
