"""The common parts of generators of random models: tensors of a graph, random choices, and elements with extremes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]

EXTENTS = (1, 1, 2, 2, 3, 3, 4, 5, 7)
MAX_ELEMENTS = 20_000  # of a tensor
CORE = frozenset(("float32", "float16", "int32", "bool"))
"""Graphs whose tensors have these types are counted by themselves."""
_REUSE = 0.7  # probability that an input is an earlier result, if one fits
_CONSTANT = 0.35  # probability that a new tensor is a constant
_ATTEMPTS = 30  # for one node
_EMPTY = 0.02  # probability that a new extent is 0


class Value(NamedTuple):
    """A tensor of a graph: its name, its elements for the inputs of this seed, and its quantization."""

    name: str
    array: Array
    is_constant: bool = False
    scale: float = 0.0
    zero_point: int = 0


class Discard(Exception):
    """The values of the graph do not fit the operator, or the other runtime refuses the node."""


class Part(NamedTuple):
    """A graph or one of its nodes as a model: what it is given, and what the other runtime computes from it."""

    operators: list[str]
    content: bytes
    inputs: list[Value]
    outputs: list[Value]
    reference: Callable[[], list[Array]] | None = None
    """Computes the outputs of a node by its definition, in float64; None without an implementation of that."""


class Graph(Protocol):
    """A random graph as it is run and compared."""

    seed: int

    @property
    def is_core(self) -> bool:
        """True if all tensors but constants of integers have types of `CORE`."""

    def whole(self) -> Part:
        """Return the graph as a model."""

    def parts(self) -> Iterator[Part]:
        """Yield each node as a model, in the order of execution."""

    def describe(self) -> Iterator[str]:
        """Yield lines of text about the graph and its nodes."""


@dataclass
class RandomChoices:
    """The random choices of a seed, and the tensors so far."""

    seed: int
    rng: np.random.Generator = field(init=False)
    values: list[Value] = field(default_factory=list)
    home: tuple[str, ...] = ()
    """The element types of new tensors, if the operator allows one of them."""

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def choose_home(self, families: Mapping[str, tuple[float, tuple[str, ...]]]) -> None:
        """Make the types of a family those of new tensors; a family has a share and types."""
        shares = [share for share, _ in families.values()]
        self.home = families[str(self.rng.choice(list(families), p=np.array(shares) / sum(shares)))][1]

    @property
    def is_core(self) -> bool:
        """True if all tensors but constants of integers have types of `CORE`."""
        return all(
            value.array.dtype.name in CORE or (value.is_constant and value.array.dtype.kind in "iu")
            for value in self.values
        )

    def chance(self, probability: float = 0.5) -> bool:
        """Return True with this probability."""
        return bool(self.rng.random() < probability)

    def one_of(self, choices: Iterable[Any]) -> Any:
        """Return one of the choices."""
        found = list(choices)
        if not found:
            raise Discard
        return found[int(self.rng.integers(len(found)))]

    def number(self, low: int, high: int) -> int:
        """Return an integer of low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def some(self, **choices: Callable[[], Any] | Any) -> dict[str, Any]:
        """Return a random part of the attributes; a function makes the value."""
        return {name: made() if callable(made) else made for name, made in choices.items() if self.chance()}

    def shape(self, rank: int | None = None) -> tuple[int, ...]:
        """Return a shape, of the rank or of 0 to 5 dimensions."""
        rank = self.one_of((0, 1, 1, 2, 2, 3, 3, 4, 4, 5)) if rank is None else rank
        return tuple(0 if self.chance(_EMPTY) else int(self.one_of(EXTENTS)) for _ in range(rank))

    def elements(self, dtype: str, shape: Sequence[int]) -> Array:
        """Return random elements: mostly small ones, sometimes halves, extremes, infinity and NaN."""
        shape = tuple(shape)
        if dtype == "bool":
            return self.rng.random(shape) < 0.5
        kind = self.rng.random()
        if np.dtype(dtype).kind in "iu":
            return self._integer_elements(np.dtype(dtype), shape, kind)
        with np.errstate(all="ignore"):
            if kind < 0.65:
                scale = float(self.one_of((0.1, 1.0, 1.0, 3.0, 10.0)))
                return np.asarray(self.rng.standard_normal(shape) * scale).astype(dtype)
            if kind < 0.75:
                return np.asarray(self.rng.integers(-8, 9, shape) / 2).astype(dtype)
            limits = np.finfo(dtype)
            if kind < 0.85:
                exponents = self.rng.uniform(limits.minexp, limits.maxexp, shape) * float(self.one_of((0.1, 0.3, 1)))
                return np.asarray(np.sign(self.rng.standard_normal(shape)) * 2.0**exponents).astype(dtype)
            special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 0.5, -1.5, 1.0, -1.0, 1e-7, 88.5, -20.0, 300.0, 1e20]
            special += [float(limits.max), float(limits.min), float(limits.smallest_subnormal), float(limits.eps)]
            usual = self.rng.standard_normal(shape)
            chosen = np.array(special)[self.rng.integers(len(special), size=shape)]
            return np.asarray(np.where(self.rng.random(shape) < 0.4, chosen, usual)).astype(dtype)

    def _integer_elements(self, dtype: np.dtype[Any], shape: tuple[int, ...], kind: float) -> Array:
        limits = np.iinfo(dtype)
        if kind < 0.8:
            return self.rng.integers(max(-9, limits.min), 10, shape).astype(dtype)
        if kind < 0.9:
            return self.rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
        chosen = [limits.min, limits.max, 0, 1, limits.max - 1, limits.max // 2 + 1]
        return np.array(chosen, dtype)[self.rng.integers(len(chosen), size=shape)]

    def pick(self, dtypes: Sequence[str], rank: int | range | None = None, shape: Sequence[int] | None = None) -> Value:
        """Return a tensor of one of the types, and of the rank or the shape: an earlier result or a new one."""
        ranks = range(6) if rank is None else (rank,) if isinstance(rank, int) else rank
        wanted = None if shape is None else tuple(shape)
        fitting = [
            value
            for value in self.values
            if value.array.dtype.name in dtypes
            and (value.array.ndim in ranks if wanted is None else value.array.shape == wanted)
        ]
        if fitting and self.chance(_REUSE):
            return self.one_of(fitting)  # type: ignore[no-any-return]
        if wanted is None:
            ranks_found = [rank for rank in (0, 1, 2, 2, 3, 3, 4, 4, 5) if rank in ranks] or list(ranks)
            wanted = self.shape(int(self.one_of(ranks_found)))
        return self.new(self.elements(self.dtype(dtypes), wanted))

    def dtype(self, dtypes: Sequence[str]) -> str:
        """Return one of the types, if possible one of `home`."""
        home = [name for name in self.home if name in dtypes]
        return str(self.one_of(home or dtypes))

    def like(self, value: Value, shape: Sequence[int] | None = None) -> Value:
        """Return a tensor of the same type, and of this shape or the same one."""
        return self.pick((value.array.dtype.name,), shape=value.array.shape if shape is None else shape)

    def broadcast_partner(self, value: Value) -> Value:
        """Return a tensor of the same type whose shape broadcasts with that of `value`."""
        fitting = [
            each
            for each in self.values
            if each.array.dtype == value.array.dtype and _broadcast(each.array.shape, value.array.shape)
        ]
        if fitting and self.chance(_REUSE):
            return self.one_of(fitting)  # type: ignore[no-any-return]
        shape = [1 if self.chance(0.25) else extent for extent in value.array.shape]
        shape = shape[self.number(0, len(shape)) :] if self.chance(0.4) else shape
        if self.chance(0.1) and len(shape) < 5:
            shape = [int(self.one_of(EXTENTS)), *[1] * (value.array.ndim - len(shape)), *shape]
        return self.new(self.elements(value.array.dtype.name, tuple(shape)))

    def new(self, array: Array, is_constant: bool | None = None) -> Value:
        """Return a new input or constant of the graph."""
        is_constant = self.chance(_CONSTANT) if is_constant is None else is_constant
        return Value(f"{'c' if is_constant else 'x'}{len(self.values)}_{self.number(0, 999_999)}", array, is_constant)

    def constant(self, numbers: Any, dtype: str = "int64") -> Value:
        """Return a new constant."""
        return self.new(np.array(numbers, dtype), True)

    def integers(self, dtypes: Sequence[str], shape: Sequence[int], low: int, high: int) -> Value:
        """Return new integers of low to high."""
        return self.new(self.rng.integers(low, high + 1, tuple(shape)).astype(self.one_of(dtypes)))


def grow(graph: Any, operators: Mapping[str, Callable[[Any], Any]], nodes: tuple[int, int]) -> None:
    """Add a random number of nodes, of operators that are all as likely. One that cannot be drawn is left out."""
    wanted = graph.number(*nodes)
    while len(graph.nodes) < wanted:
        name = str(graph.one_of(operators))
        for _ in range(_ATTEMPTS):
            try:
                graph.add(name, operators[name](graph))
                break
            except Discard:
                continue


def _broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    try:
        np.broadcast_shapes(first, second)
    except ValueError:
        return False
    return True


def distinct(values: Iterable[Value | None]) -> list[Value]:
    """Return the values that are given, each name once."""
    found: dict[str, Value] = {}
    for value in values:
        if value is not None:
            found.setdefault(value.name, value)
    return list(found.values())


def few(value: Value | None) -> str:
    """Return a text of a value: its name, type, shape and first elements."""
    if value is None:
        return "omitted"
    numbers = np.array2string(value.array.reshape(-1)[:12], separator=",", max_line_width=200)
    quantization = f" scale {value.scale:g} zero point {value.zero_point}" if value.scale else ""
    return f"{value.name} {value.array.dtype}{list(value.array.shape)}{quantization} {numbers}"
