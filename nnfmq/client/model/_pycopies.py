"""Copies between an application's arrays and those in shared memory, in Python: the specification of `_copies`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ArrayCopies"]

Array = NDArray[Any]


class ArrayCopies:
    """Copies arrays of an application into `inputs`, and `outputs` into new arrays. It keeps both alive."""

    def __init__(self, inputs: Sequence[Array], outputs: Sequence[Array], /) -> None:
        self._inputs = tuple(inputs)
        self._copies = tuple(output.copy for output in outputs)

    def copy_in(self, values: Sequence[object], /) -> bool:
        """Copy `values` into the inputs; False unless they are as many arrays of the same dtypes and shapes.

        Some of them may have been copied then.
        """
        if len(values) != len(self._inputs):
            return False
        for target, value in zip(self._inputs, values, strict=True):
            if type(value) is not np.ndarray or value.dtype != target.dtype or value.shape != target.shape:
                return False
            target[...] = value
        return True

    def copy_out(self) -> list[Array]:
        """Return new arrays with the outputs."""
        return [copy() for copy in self._copies]
