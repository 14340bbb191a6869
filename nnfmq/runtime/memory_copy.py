"""copy: between shared memory, memory in files and managed buffers."""

from __future__ import annotations

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.runtime.managed_buffer import AnyMemory, Buffer, copy_bytes


def copy(source: AnyMemory | Buffer, target: AnyMemory | Buffer, *, timeout: float | None = None) -> None:
    """Copy all of `source` to all of `target`, which has the same size; blocks.

    Either is shared memory, memory in a file, or a managed buffer. A copy from a buffer keeps its shape. A copy from a
    memory into a buffer needs a buffer of fixed shape; otherwise use `Buffer.copy_from`.

    Raises:
        InvalidArgument: If the size, shape or dtype does not fit.
        GeneralFailure: If the source is an uninitialized buffer.
        MissedDeadline: If `timeout` (seconds; None = no limit) passes first.
        DeadObject: If the driver exits.
    """
    if isinstance(source, Buffer) and isinstance(target, Buffer):
        array = source.array(timeout=timeout)
        if array.dtype != np.dtype(target.info.dtype):
            raise InvalidArgument(f"a buffer of {array.dtype} cannot be copied into one of {target.info.dtype}")
        target.copy_from(array, timeout=timeout)
    elif isinstance(source, Buffer):
        source.copy_to(target, timeout=timeout)  # type: ignore[arg-type]
    elif isinstance(target, Buffer):
        target.copy_from(source, timeout=timeout)
    else:
        copy_bytes(source, target)
