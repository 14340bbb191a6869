"""Memory with constants of built models: its end."""

from __future__ import annotations

import gc
import os

import pytest

from nnfmq.base.shared_constants import SharedConstants


@pytest.mark.parametrize("is_cyclic", [False, True])
def test_API_16_the_last_reference_to_constants_closes_their_memory(is_cyclic: bool) -> None:
    """In a cycle the garbage collector finalizes in any order; a memory that it finalizes open would complain."""
    constants, _ = SharedConstants.of_values([memoryview(b"1234")])
    fd = constants.fileno()
    holder: list[object] = [constants]
    if is_cyclic:
        holder.append(holder)
    del constants, holder
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
