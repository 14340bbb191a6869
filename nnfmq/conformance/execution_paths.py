"""The names of the execution paths, and the target of each."""

from __future__ import annotations

from nnfmq.conformance.driver_targets import ALL_PATHS, DRIVER_PATHS, Driver
from nnfmq.conformance.stepwise import StepwiseEngine
from nnfmq.conformance.targets import CompilingEngine, ExecutionTarget, Interpreter

_ENGINES = {"interpreter": Interpreter, "compiled": CompilingEngine, "compiled-steps": StepwiseEngine}
PATHS = (*_ENGINES, *DRIVER_PATHS, ALL_PATHS)


def open_target(path: str, device: str, connect_to: str | None) -> ExecutionTarget:
    """Return the target of an execution path, which connects when first used. The caller closes it."""
    return _ENGINES[path]() if path in _ENGINES else Driver(device, connect_to, path)
