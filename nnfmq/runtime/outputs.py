"""Outputs: the arrays that an execution returns, by position and by name; and inputs that are given by name.

The type of a model's results has its names, so that a result costs little more than a tuple: a burst makes one each
time. `outputs_type` makes the type once for each list of names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, SupportsIndex, TypeVar, overload

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.summaries import counted, listed, nearest
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.runtime.tensor_layout import Array

__all__ = ["Outputs", "in_order", "names_of", "outputs_type"]

_NAMES_SHOWN = 16
ValueT = TypeVar("ValueT")


class Outputs(tuple[Array, ...]):
    """The outputs of an execution: a tuple of arrays in the model's order, `scores, = model(image)`.

    An output can also be taken by its name: `model(image)["scores"]`.
    """

    __slots__ = ()
    names: tuple[str, ...] = ()
    """The names of the outputs, in the same order."""

    @overload
    def __getitem__(self, key: SupportsIndex | str) -> Array: ...

    @overload
    def __getitem__(self, key: slice) -> tuple[Array, ...]: ...

    def __getitem__(self, key: SupportsIndex | slice | str) -> Array | tuple[Array, ...]:
        """Return an output by its position or its name.

        Raises:
            InvalidArgument: If there is no output of this name, or several; the message lists the names.
            IndexError: If there is none at this position.
        """
        if isinstance(key, str):
            key = _position("output", self.names, key)
        try:
            return tuple.__getitem__(self, key)
        except IndexError:
            the_model = f"the model has {counted(len(self), 'output')}: {_listed(self.names)}"
            raise IndexError(f"there is no output {key}; {the_model}") from None

    def as_dict(self) -> dict[str, Array]:
        """Return the outputs by name. Raises InvalidArgument if several have the same name."""
        return {name: self[name] for name in self.names}

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.names, tuple(self))


def _restored(names: tuple[str, ...], arrays: tuple[Array, ...]) -> Outputs:
    """Return outputs again that were pickled or are copied."""
    return outputs_type(names)(arrays)


@lru_cache(maxsize=256)
def outputs_type(names: tuple[str, ...]) -> type[Outputs]:
    """Return the type of the outputs that have these names."""
    return type("Outputs", (Outputs,), {"__slots__": (), "__module__": __name__, "names": names})


def names_of(infos: Sequence[TensorInfo]) -> tuple[str, ...]:
    """Return the names of inputs or outputs."""
    return tuple(info.name for info in infos)


def in_order(infos: Sequence[TensorInfo], values: Sequence[Any]) -> Sequence[Any]:
    """Return an execution's inputs in the model's order: `values`, or those of its only element, a mapping by name.

    Raises:
        InvalidArgument: If a name is wrong or missing, or several inputs have it; the message lists the names.
    """
    if len(values) != 1 or not isinstance(values[0], Mapping):
        return values
    given, names = dict(values[0]), names_of(infos)
    by_position = {_position("input", names, name): value for name, value in given.items()}
    missing = [name for position, name in enumerate(names) if position not in by_position]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise InvalidArgument(
            f"of the model's {counted(len(names), 'input')} {_listed(missing)} {verb} missing; given: "
            f"{_listed(given) or 'none'}"
        )
    return [by_position[position] for position in range(len(names))]


def _position(kind: str, names: Sequence[str], name: object) -> int:
    """Return the position of the input or output `name`; `kind` is "input" or "output"."""
    count = names.count(name) if isinstance(name, str) else 0
    if count == 1:
        return names.index(str(name))
    all_names = f"{counted(len(names), kind)}: {_listed(names)}"
    if count:
        raise InvalidArgument(f"{count} {kind}s are called {name!r}: use their positions; the model has {all_names}")
    raise InvalidArgument(f"no {kind} is called {name!r}; the model has {all_names}{nearest(name, names)}")


def _listed(names: Any) -> str:
    shown = [repr(name) for name in names]
    return listed(shown[:_NAMES_SHOWN], len(shown))
