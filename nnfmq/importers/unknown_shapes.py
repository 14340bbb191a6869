"""UnknownShapes: the error for a model whose inputs have dimensions without a size, with what the inputs are."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from nnfmq.hal.errors import InvalidArgument

__all__ = ["DeclaredInput", "UnknownShapes"]

_EXAMPLE_SIDE, _EXAMPLE_LENGTH = 224, 128  # of pictures, and of all other dimensions but the first
Dimension = int | str | None
"""A size, the name of a symbol, or None if it has neither."""


class DeclaredInput(Struct, frozen=True):
    """An input as the file declares it. `dimensions` is None if the rank is not known."""

    name: str
    dimensions: tuple[Dimension, ...] | None
    is_known: bool = False
    """Whether each dimension has a size, in the file or among the shapes given."""

    def text(self) -> str:
        """Return the dimensions: `(batch, 3, ?)`."""
        if self.dimensions is None:
            return "of unknown rank"
        return f"({', '.join(str('?' if size is None else size) for size in self.dimensions)})"


class UnknownShapes(InvalidArgument):
    """INVALID_ARGUMENT: dimensions of inputs have no size. `inputs` has all inputs, `origin` begins the message."""

    def __init__(self, inputs: Sequence[DeclaredInput], origin: str = "") -> None:
        self.inputs, self.origin = tuple(inputs), origin
        examples = ", ".join(f"{name!r}: {shape}" for name, shape in self.example_shapes().items())
        super().__init__(f"{self.reason}; give them as `shapes`, for example shapes={{{examples}}}")

    @property
    def reason(self) -> str:
        """What is not known."""
        listed = "; ".join(f"input {each.name!r} is {each.text()}" for each in self.inputs if not each.is_known)
        return f"{self.origin}sizes of dimensions are not known: {listed}"

    def example_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return shapes that would do, of all inputs that need one: 1 for a first dimension, one size for a symbol."""
        symbols: dict[str, int] = {}
        return {each.name: _example(each.dimensions, symbols) for each in self.inputs if not each.is_known}


def _example(dimensions: tuple[Dimension, ...] | None, symbols: dict[str, int]) -> tuple[int, ...]:
    if dimensions is None:
        return (1, _EXAMPLE_LENGTH)
    shape = []
    for index, size in enumerate(dimensions):
        free = 1 if index == 0 else _EXAMPLE_SIDE if len(dimensions) == 4 else _EXAMPLE_LENGTH
        shape.append(size if isinstance(size, int) else free if size is None else symbols.setdefault(size, free))
    return tuple(shape)
