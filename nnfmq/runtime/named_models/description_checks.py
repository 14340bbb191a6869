"""Checks of a model's description: the repository is another process, whose data is not trusted.

They cover what decides sizes and types of arrays in the client. Whether the description fits the model is checked by
the driver with each request: it validates requests against the model that it has.
"""

from __future__ import annotations

import math

import numpy as np

from nnfmq.hal.errors import InvalidArgument, ProtocolError
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.types import ExecutionPreference, Priority
from nnfmq.serialize.repository_protocol import ModelDescription

__all__ = ["check_description", "difference"]

_DTYPES = frozenset(
    ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")
)
_RANK_MAX, _DIMENSION_MAX = 64, 2**32 - 1


def check_description(description: ModelDescription, name: str, version: int) -> None:
    """Check that a description is one of this model and version (0 = any), and can be used.

    Raises:
        ProtocolError: If it is not.
    """
    is_version = description.version == version if version else description.version > 0
    if description.name != name or not is_version:
        wanted = f"version {version or 'any'} of {name!r}"
        raise ProtocolError(f"instead of {wanted} came version {description.version} of {description.name!r}")
    try:
        _check_options(description)
        for info in (*description.inputs, *description.outputs):
            _check_tensor(info)
        for state in description.states:
            _check_state(state)
    except InvalidArgument as error:
        raise ProtocolError(f"the description of {name!r} is invalid: {error}") from error


def _check_options(description: ModelDescription) -> None:
    if description.preference not in list(ExecutionPreference) or description.priority not in list(Priority):
        raise InvalidArgument(f"preference {description.preference} or priority {description.priority} is unknown")


def _check_tensor(info: TensorInfo) -> None:
    if info.dtype not in _DTYPES:
        raise InvalidArgument(f"{info.dtype!r} is no element type")
    if len(info.shape) > _RANK_MAX or not all(0 <= size <= _DIMENSION_MAX for size in info.shape):
        raise InvalidArgument(f"{info.shape} is no shape")


def _check_state(state: StateInfo) -> None:
    info = state.tensor
    _check_tensor(info)
    dtype = np.dtype(info.dtype)
    if state.initial and len(state.initial) != math.prod(info.shape) * dtype.itemsize:
        raise InvalidArgument(f"{len(state.initial)} bytes are not the initial values of {info!r}")
    if dtype.kind in "iu" and not np.iinfo(dtype).min <= info.zero_point <= np.iinfo(dtype).max:
        raise InvalidArgument(f"no element of {info!r} can be its zero point")


def difference(old: ModelDescription, new: ModelDescription) -> str:
    """Return how a newer version differs in what an application has to know; empty if it can replace the old one."""
    for kind, before, after in (
        ("inputs", old.inputs, new.inputs),
        ("outputs", old.outputs, new.outputs),
        ("states", tuple(state.tensor for state in old.states), tuple(state.tensor for state in new.states)),
    ):
        if before != after:
            return f"its {kind} are {_texts(after)}, not {_texts(before)}"
    return "" if old.batch == new.batch else f"its batch is {new.batch}, not {old.batch}"


def _texts(infos: tuple[TensorInfo, ...]) -> str:
    return ", ".join(repr(info).removeprefix("<TensorInfo: ").removesuffix(">") for info in infos) or "none"
