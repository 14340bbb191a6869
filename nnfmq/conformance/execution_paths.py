"""The names of the execution paths, and the target of each."""

from __future__ import annotations

from nnfmq.conformance.driver_targets import ALL_PATHS, DRIVER_PATHS, Driver
from nnfmq.conformance.runtime_targets import RUNTIME_PATHS, RuntimeTarget, arrangement
from nnfmq.conformance.stepwise import StepwiseEngine
from nnfmq.conformance.targets import CompilingEngine, ExecutionTarget, Interpreter

_ENGINES = {"interpreter": Interpreter, "compiled": CompilingEngine, "compiled-steps": StepwiseEngine}
PATHS = (*_ENGINES, *DRIVER_PATHS, ALL_PATHS, *RUNTIME_PATHS)


def open_target(path: str, device: str, connect_to: str | None, partition: str = "") -> ExecutionTarget:
    """Return the target of an execution path, which connects when first used. The caller closes it."""
    if path in _ENGINES:
        return _ENGINES[path]()
    if path in RUNTIME_PATHS:
        return RuntimeTarget(path, arrangement(partition, device, connect_to))
    return Driver(device, connect_to, path)
