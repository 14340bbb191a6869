"""The options of a version: the file `model.toml` beside its model (docs/reference/model-options.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import DEFAULT_PREFERENCE, ExecutionPreference, Priority

__all__ = ["FILE_NAME", "VersionOptions", "read_options"]

FILE_NAME = "model.toml"
_BYTES_MAX = 64 * 1024
_DEVICE_CHARACTERS_MAX = 256
_BATCH_MAX = 65536
_SHAPES_MAX, _RANK_MAX, _SIZE_MAX = 256, 32, 2**31 - 1
_SHOWN_CHARACTERS = 80


class VersionOptions(msgspec.Struct, frozen=True):
    """What a version's `model.toml` sets, or the defaults.

    `device` is empty for the best available one. `signature` is None for a file's first subgraph. `shapes` has new
    shapes of inputs, by name. `batch` is 1 unless the model's inputs get this first dimension.
    """

    device: str = ""
    preference: int = DEFAULT_PREFERENCE
    priority: int = Priority.MEDIUM
    batch: int = 1
    signature: str | None = None
    shapes: dict[str, tuple[int, ...]] = {}


class _Key(NamedTuple):
    """What a key allows; `value` converts a value to that of the option, None = it is not allowed."""

    allowed: str
    value: Callable[[Any], object]


_PREFERENCES = {
    "low_power": ExecutionPreference.LOW_POWER,
    "fast_single_answer": ExecutionPreference.FAST_SINGLE_ANSWER,
    "sustained_speed": ExecutionPreference.SUSTAINED_SPEED,
}
_PRIORITIES = {"low": Priority.LOW, "medium": Priority.MEDIUM, "high": Priority.HIGH}


def _text(value: Any) -> object:
    return value if isinstance(value, str) and 0 < len(value) <= _DEVICE_CHARACTERS_MAX else None


def _batch(value: Any) -> object:
    return value if _is_size(value) and value <= _BATCH_MAX else None


def _shapes(value: Any) -> object:
    is_table = isinstance(value, dict) and 0 < len(value) <= _SHAPES_MAX
    return (
        {name: tuple(shape) for name, shape in value.items()}
        if is_table and all(map(_is_shape, value.values()))
        else None
    )


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= _RANK_MAX and all(map(_is_size, value))


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _SIZE_MAX  # a bool is no size


def _one_of(names: Mapping[str, int]) -> _Key:
    return _Key(", ".join(map(repr, names)), lambda value: names.get(value) if isinstance(value, str) else None)


_KEYS: dict[str, _Key] = {
    "device": _Key("the name of a device of the driver", _text),
    "preference": _one_of(_PREFERENCES),
    "priority": _one_of(_PRIORITIES),
    "batch": _Key(f"an integer from 1 to {_BATCH_MAX}", _batch),
    "signature": _Key("the name of a signature of the model file", _text),
    "shapes": _Key("a table of shapes by the names of inputs, each an array of integers of at least 1", _shapes),
}


def read_options(folder: Path) -> VersionOptions:
    """Return the options of the version in `folder`; the defaults if it has no such file. Blocks.

    Raises:
        InvalidArgument: If the file is not valid; the message names the key, the value and what is allowed.
        OSError: If the file cannot be read.
    """
    try:
        with (folder / FILE_NAME).open("rb") as file:
            data = file.read(_BYTES_MAX + 1)
    except FileNotFoundError:
        return VersionOptions()
    if len(data) > _BYTES_MAX:
        raise InvalidArgument(f"{FILE_NAME} has more than {_BYTES_MAX} bytes")
    try:
        table = msgspec.toml.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"{FILE_NAME} is no TOML: {error}") from None
    return VersionOptions(**{name: _checked(name, value) for name, value in table.items()})


def _checked(name: str, value: object) -> Any:
    key = _KEYS.get(name)
    if key is None:
        raise InvalidArgument(f"{FILE_NAME}: there is no key {name!r}; allowed: {', '.join(_KEYS)}")
    checked = key.value(value)
    if checked is None:
        raise InvalidArgument(f"{FILE_NAME}: {name} is {repr(value)[:_SHOWN_CHARACTERS]}; allowed: {key.allowed}")
    return checked
