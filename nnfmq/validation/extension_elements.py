"""The element types of extensions, as a device describes them. The peer that does is not trusted."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.tensor_info import ElementInfo

__all__ = ["DescribedType", "element_info"]

_NUMERIC_KINDS = "biufc"  # NumPy's kinds of numeric elements: no pointers, no structures


class DescribedType(Protocol):
    """An operand type of an extension, as `DeviceInfo` has it."""

    @property
    def type(self) -> int:
        """The type's number within its extension."""
        ...

    @property
    def is_tensor(self) -> bool:
        """Whether it has dimensions."""
        ...

    @property
    def byte_size(self) -> int:
        """The size of an element in bytes."""
        ...

    @property
    def dtype(self) -> str:
        """NumPy's name of the element type."""
        ...


def element_info(extension: str, kind: DescribedType) -> ElementInfo:
    """Return NumPy's element type of an operand type of `extension`.

    Raises:
        InvalidArgument: If NumPy has no numeric element of that name and size.
    """
    try:
        dtype = np.dtype(kind.dtype)
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or dtype.kind not in _NUMERIC_KINDS or dtype.itemsize != kind.byte_size:
        text = f"elements of {kind.dtype!r} in {kind.byte_size} bytes"
        raise InvalidArgument(f"{text} for type {kind.type} of {extension}")
    return ElementInfo(kind.dtype, not kind.is_tensor)
