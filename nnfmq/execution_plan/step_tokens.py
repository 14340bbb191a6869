"""The caching token of a step: what tells its compilation apart from every other one of the same application."""

from __future__ import annotations

import hashlib
import struct

from nnfmq.execution_plan.plan import ExecutionStep, PlanningDevice
from nnfmq.hal.types import DEFAULT_PREFERENCE, ExecutionPreference, Priority

__all__ = ["step_token"]


def step_token(
    token: bytes,
    step: ExecutionStep,
    device: PlanningDevice,
    preference: ExecutionPreference = DEFAULT_PREFERENCE,
    priority: Priority = Priority.MEDIUM,
) -> bytes:
    """Return the token for a step's compilation, 32 bytes: a SHA-256.

    It differs with the application's token, with the name and version of the device, with preference and priority, and
    with the operations of the step, so another partition of the same model does not get this step's compilation. A
    step's operations decide its inputs and outputs as well.

    Args:
        token: The application's token, which identifies the source model.
        step: The step.
        device: The device of the step.
        preference: The preference of the compilation.
        priority: The priority of the compilation.
    """
    digest = hashlib.sha256()
    numbers = (preference, priority, step.subgraph, *step.operations)
    fields = token, device.name.encode(), device.version_string.encode(), struct.pack(f"<{len(numbers)}I", *numbers)
    for field in fields:  # each with its length: otherwise bytes could belong to either of two neighbours
        digest.update(struct.pack("<Q", len(field)) + field)
    return digest.digest()
