"""LoadedModel, the result of an importer, and the problems of a model that it rejects. Imports no importer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from msgspec import Struct, field

from nnfmq.hal.errors import InvalidArgument, ModelProblem, UnsupportedModel
from nnfmq.hal.summaries import clipped, code_name, html_tables, listed, signature
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.types import Model

__all__ = [
    "DeclaredInput",
    "LoadedModel",
    "ModelMetadata",
    "ProblemGroup",
    "Problems",
    "TensorMetadata",
    "UnknownShapes",
    "grouped",
    "summary",
]


class TensorMetadata(Struct, frozen=True):
    """The metadata of an input or output by the file's author: its normalization, the labels of its elements or values.

    Inputs are normalized as (x - mean) / std, before they are quantized. `mean` and `std` have one element or one for
    each channel; none if there is no normalization.
    """

    name: str = ""
    description: str = ""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()

    def __repr__(self) -> str:
        parts = [clipped(repr(self.name), 64)]
        if self.mean:
            mean, std = (listed(values[:4], len(values)) for values in (self.mean, self.std))
            parts.append(f"mean {mean}, std {std}")
        parts += [f"{len(self.labels)} labels"] if self.labels else []
        return f"<TensorMetadata: {', '.join(parts)}>"


class ModelMetadata(Struct, frozen=True):
    """The metadata of a model by the file's author: its inputs and outputs (without states), and the files in it."""

    name: str = ""
    description: str = ""
    version: str = ""
    author: str = ""
    license: str = ""
    inputs: tuple[TensorMetadata, ...] = ()
    outputs: tuple[TensorMetadata, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.name, self.version, self.inputs, self.outputs))  # `files` is a dict

    def __repr__(self) -> str:
        name, version = clipped(repr(self.name), 64), clipped(repr(self.version))
        return f"<ModelMetadata: {name}, version {version}, {len(self.files)} files>"


class LoadedModel(Struct, frozen=True):
    """A model read from a file, ready for `Device.prepare`, and its inputs, outputs and states in the model's order.

    The inputs and outputs of `model` are these, followed by the states. `metadata` is None if the file has none.
    `signatures` are the names of those in the file, for `nnfmq.load(file, signature=name)`. `file_name` is the file's
    name without its folders, "" if the model was given as bytes. `data_files` are other files of its folder, which have
    weights of an ONNX file.
    """

    model: Model
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    metadata: ModelMetadata | None = None
    states: tuple[StateInfo, ...] = ()
    signatures: tuple[str, ...] = ()
    file_name: str = ""
    data_files: tuple[str, ...] = ()

    def __repr__(self) -> str:
        states = f", {len(self.states)} states" if self.states else ""
        operations = len(self.model.main.operations)
        return f"<LoadedModel: {signature(self.inputs, self.outputs)}; {operations} operations{states}>"

    def _repr_html_(self) -> str:
        """Return tables of inputs, outputs and operations, for notebooks."""
        operations = [code_name(operation.type) for operation in self.model.main.operations]
        return html_tables(f"LoadedModel: {len(operations)} operations", self.inputs, self.outputs, operations)


# ----------------------------------------------------------------------------------------------------------------------
# The problems of a model that an importer cannot convert: collected during the import, reported together.


_PROBLEMS_MAX = 1000  # bounds the work on a hostile file
_LINES_MAX = 40
_INDEXES_MAX = 4
_TENSOR = re.compile(r"tensor \d+ \((?:'[^']*'|\"[^\"]*\")\)")


class ProblemGroup(Struct, frozen=True):
    """Problems that differ only in the operator's index and the tensors; `problem` is the first of them."""

    problem: ModelProblem
    indexes: tuple[int, ...]

    @property
    def reason(self) -> str:
        """The reason, without the first one's tensors if there are several."""
        return self.problem.reason if len(self.indexes) < 2 else _TENSOR.sub("a tensor", self.problem.reason)

    @property
    def operators(self) -> str:
        """The indexes of the operators; empty if it is a problem of the whole model."""
        if not self.problem.operator:
            return ""
        shown = [str(index) for index in self.indexes[:_INDEXES_MAX]]
        hidden = len(self.indexes) - len(shown)
        return ", ".join(shown) + (f" and {hidden} more" if hidden else "")

    def __str__(self) -> str:
        if not self.problem.operator:
            return self.problem.reason
        plural = "s" if len(self.indexes) > 1 else ""
        return f"operator{plural} {self.operators} ({self.problem.operator}): {self.reason} [{self.problem.types}]"


def grouped(problems: Iterable[ModelProblem]) -> list[ProblemGroup]:
    """Return equal problems as one group each, sorted by the operator's name and index."""
    groups: dict[tuple[str, str, str], list[ModelProblem]] = {}
    for problem in sorted(problems, key=lambda problem: (problem.operator, problem.index)):
        reason = _TENSOR.sub("", problem.reason) if problem.operator else problem.reason
        groups.setdefault((problem.operator, problem.types, reason), []).append(problem)
    return [ProblemGroup(group[0], tuple(problem.index for problem in group)) for group in groups.values()]


class Problems:
    """A list of problems, of operators and of the whole model."""

    def __init__(self) -> None:
        self._problems: list[ModelProblem] = []

    def add(self, reason: str, index: int = -1, operator: str = "", types: str = "") -> None:
        """Add one problem; without an operator it is one of the whole model.

        Raises:
            UnsupportedModel: If there are too many.
        """
        is_known = not operator and any(problem.reason == reason for problem in self._problems)
        if not is_known:
            self._problems.append(ModelProblem(index, operator, types, reason))
        if len(self._problems) >= _PROBLEMS_MAX:
            self.raise_if_any()

    @contextmanager
    def collect(self, where: str = "") -> Iterator[None]:
        """Add a problem of the whole model if the block raises InvalidArgument; `where` precedes its text."""
        try:
            yield
        except InvalidArgument as error:
            self.add(f"{where}{error}")

    def raise_if_any(self) -> None:
        """Raise UnsupportedModel with all problems, if there are any."""
        if self._problems:
            raise UnsupportedModel(_report(self._problems), tuple(self._problems))


def _report(problems: list[ModelProblem]) -> str:
    groups = grouped(problems)
    if len(groups) == 1:
        return str(groups[0])
    lines = [f"  {group}" for group in groups[:_LINES_MAX]]
    lines += [f"  … {len(groups) - _LINES_MAX} more"] if len(groups) > _LINES_MAX else []
    return "\n".join([f"{summary(problems)}:", *lines])


def summary(problems: Iterable[ModelProblem]) -> str:
    """Return how many operators are not supported, and how many other problems there are."""
    names = [problem.operator for problem in problems]
    operators, others = sum(map(bool, names)), sum(not name for name in names)
    parts = [f"{operators} operator{'s are' if operators > 1 else ' is'} not supported"] if operators else []
    parts += [f"{others} other problem{'s' * (others > 1)}"] if others else []
    return ", ".join(parts)


# ----------------------------------------------------------------------------------------------------------------------
# UnknownShapes: the error for a model whose inputs have dimensions without a size, with what the inputs are.


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
    """INVALID_ARGUMENT: dimensions of inputs have no size. `inputs` has all inputs, `origin` begins the message.

    `advice` ends it, as that of UnsupportedModel.
    """

    def __init__(self, inputs: Sequence[DeclaredInput], origin: str = "", advice: str = "") -> None:
        self.inputs, self.origin, self.advice = tuple(inputs), origin, advice
        examples = ", ".join(f"{name!r}: {shape}" for name, shape in self.example_shapes().items())
        message = f"{self.reason}; give them as `shapes`, for example shapes={{{examples}}}"
        super().__init__(f"{message}\n{advice}" if advice else message)

    @property
    def reason(self) -> str:
        """The text about the shapes that are not known."""
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
