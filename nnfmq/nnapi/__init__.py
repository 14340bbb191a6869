"""NNAPI's objects, with its states and errors: for applications that are ported from Android, and for their tests.

    compilation = CompilationBuilder(model, [device])
    compilation.finish()
    with ExecutionBuilder(compilation) as execution:
        execution.set_input(0, image)
        execution.set_output(0, scores)
        execution.compute()

Each object is one of Android's Neural Networks API, and each method one of its functions, in snake case;
docs/reference/nnapi.md has all of them. A result code is an exception: BAD_DATA and UNEXPECTED_NULL are
InvalidArgument, BAD_STATE is BadState, OP_FAILED is GeneralFailure, and the others have the names of their codes. Times
are in seconds, durations that were measured in nanoseconds.

Applications that are new use `nnfmq.connect` and `PreparedModel`, which need fewer calls.
"""

from nnfmq.hal.capabilities import DurationCode, PriorityCode
from nnfmq.nnapi.burst import BurstBuilder
from nnfmq.nnapi.compilation import CompilationBuilder
from nnfmq.nnapi.event import Event
from nnfmq.nnapi.execution import ExecutionBuilder, get_default_loop_timeout, get_maximum_loop_timeout
from nnfmq.nnapi.memory import DeviceMemory, MemoryBuilder, copy_memory, create_memory_from_fd

__all__ = [
    "BurstBuilder",
    "CompilationBuilder",
    "DeviceMemory",
    "DurationCode",
    "Event",
    "ExecutionBuilder",
    "MemoryBuilder",
    "PriorityCode",
    "copy_memory",
    "create_memory_from_fd",
    "get_default_loop_timeout",
    "get_maximum_loop_timeout",
]
