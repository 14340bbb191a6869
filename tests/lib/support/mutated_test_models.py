"""The HAL's test models with random mutations of arguments: types, shapes, quantization, values, omitted arguments.

`mutated_test` makes one: a model that may be legal or not, and its inputs, which may fit it or not. Tensors are small
unless a size is mutated, and for such a size nothing is allocated. An engine or driver must reject or compute each.
`mutated_tests` lets Hypothesis draw one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from msgspec.structs import replace

from nnfmq.hal.types import (
    ChannelQuant,
    DataLocation,
    LifeTime,
    Model,
    Operand,
    OperandType,
    OperationType,
    is_scalar,
)
from nnfmq.lab.conformance.testmodels import TestModel
from nnfmq.operations.declaration import NUMPY_TYPES
from support.choices import Choices, DrawnChoices
from support.vts_models import one_of_each

Array = npt.NDArray[Any]

_CONSTANTS = (LifeTime.CONSTANT_COPY, LifeTime.CONSTANT_REFERENCE)
_INTEGERS = (0, 1, 2, 3, 4, 5, 6, 7, 63, 64, 65, 1 << 16, 1 << 30, (1 << 31) - 1)
_REALS = (0.0, 1.0, 0.5, 100.0, 1e-45, 1e-38, 65504.0, 3e38, float("inf"), float("nan"))
_SCALES = (1e-45, 1e-30, 1 / 256, 0.125, 0.5, 1.0, 3.0, 1e30, 3e38, 0.0, -1.0, float("nan"), float("inf"))
_ZERO_POINTS = (0, 1, -1, 127, 128, -128, 255, 256, 32768, 65535, -(1 << 31))
_EXTENTS = (0, 1, 2, 3, 5, 64, 1 << 16, (1 << 16) + 1, 1 << 24, 1 << 30, (1 << 31) - 1, (1 << 32) - 1, 1 << 32, -1)
_MOST_ELEMENTS = 1 << 14
_TYPES = [kind for kind in OperandType if kind in NUMPY_TYPES]
"""Those of the HAL: an extension that is installed later adds none."""


@dataclass
class Draft:
    """A test model that is being mutated: main's operands, and an array for each that has a value before a run."""

    model: Model
    operands: list[Operand]
    arrays: dict[int, Array]

    @classmethod
    def of(cls, test: TestModel) -> Draft:
        """Return the draft of a test model."""
        main = test.model.main
        arrays = {
            index: array for index, array in zip(main.input_indexes, test.inputs, strict=True) if array is not None
        }
        for index, operand in enumerate(main.operands):
            if operand.lifetime in _CONSTANTS:
                arrays[index] = _constant(test.model, operand)
        return cls(test.model, list(main.operands), arrays)

    def finished(self) -> tuple[Model, list[Array | None]]:
        """Return the model, whose constants are the arrays, and the inputs."""
        values, operands = bytearray(self.model.operand_values), list(self.operands)
        for index, operand in enumerate(operands):
            if operand.lifetime in _CONSTANTS:
                data = self.arrays[index].tobytes()
                values += bytes(-len(values) % 4)
                place = DataLocation(0, len(values), len(data))
                operands[index] = replace(operand, lifetime=LifeTime.CONSTANT_COPY, location=place)
                values += data
        inputs = tuple(i for i, operand in enumerate(operands) if operand.lifetime is LifeTime.SUBGRAPH_INPUT)
        main = replace(self.model.main, operands=tuple(operands), input_indexes=inputs)
        called = (operand.lifetime for graph in self.model.referenced for operand in graph.operands)
        pools = self.model.pools if LifeTime.CONSTANT_REFERENCE in called else ()
        model = replace(self.model, main=main, operand_values=bytes(values), pools=pools)
        return model, [self.arrays.get(i) for i in inputs]


def _constant(model: Model, operand: Operand) -> Array:
    place = operand.location
    is_copy = operand.lifetime is LifeTime.CONSTANT_COPY
    source = memoryview(model.operand_values) if is_copy else model.pools[place.pool_index].view
    raw = bytes(source[place.offset : place.offset + place.length])
    return np.frombuffer(raw, NUMPY_TYPES[operand.type]).reshape(operand.dimensions)


# -- mutations of an operand ------------------------------------------------------------------------------------------


def _value(choices: Choices, draft: Draft, index: int) -> None:
    array = draft.arrays.get(index)
    if array is None or not array.size:
        return
    changed = array.copy()
    place = choices.between(0, array.size - 1) if choices.flag() else slice(None)
    changed.reshape(-1)[place] = _number(choices, array.dtype)
    draft.arrays[index] = changed


def _number(choices: Choices, dtype: np.dtype[Any]) -> Any:
    sign = choices.one_of((1, -1))
    if dtype.kind == "f":
        with np.errstate(all="ignore"):
            return np.float64(sign * choices.one_of(_REALS)).astype(dtype)
    info = np.iinfo(dtype)
    return min(max(sign * choices.one_of(_INTEGERS), int(info.min)), int(info.max))


def _reshape(draft: Draft, index: int, dimensions: Sequence[int]) -> None:
    """Give the operand other dimensions, and its array as well if that stays small."""
    operand = draft.operands[index]
    draft.operands[index] = replace(operand, dimensions=tuple(dimensions))
    array = draft.arrays.get(index)
    count = 1
    for extent in dimensions:
        count *= max(extent, 0)
    if array is not None and count <= _MOST_ELEMENTS and min(dimensions, default=0) >= 0 and len(dimensions) <= 64:
        draft.arrays[index] = (
            np.resize(array, dimensions) if array.size and count else np.zeros(dimensions, array.dtype)
        )


def _extent(choices: Choices, draft: Draft, index: int) -> None:
    dimensions = list(draft.operands[index].dimensions)
    if dimensions:
        axis = choices.between(0, len(dimensions) - 1)
        dimensions[axis] = choices.one_of((*_EXTENTS, dimensions[axis] + 1, dimensions[axis] - 1))
        _reshape(draft, index, dimensions)


def _rank(choices: Choices, draft: Draft, index: int) -> None:
    dimensions = draft.operands[index].dimensions
    ones = choices.one_of((0, 0, 1, 2, 4, 60, 64, 70))
    _reshape(draft, index, (1,) * ones + dimensions if ones else dimensions[1:])


def _open(choices: Choices, draft: Draft, index: int) -> None:
    operand = draft.operands[index]
    dimensions = () if choices.flag() else (0,) * len(operand.dimensions)
    if operand.lifetime not in _CONSTANTS:
        draft.operands[index] = replace(operand, dimensions=dimensions)


def _scale(choices: Choices, draft: Draft, index: int) -> None:
    operand, scale = draft.operands[index], choices.one_of(_SCALES)
    if operand.channel_quant is not None:
        quant = ChannelQuant((scale, *operand.channel_quant.scales[1:]), operand.channel_quant.channel_dim)
        draft.operands[index] = replace(operand, channel_quant=quant)
    elif operand.scale:
        draft.operands[index] = replace(operand, scale=float(np.float32(scale)))


def _zero_point(choices: Choices, draft: Draft, index: int) -> None:
    if draft.operands[index].scale:
        draft.operands[index] = replace(draft.operands[index], zero_point=choices.one_of(_ZERO_POINTS))


def _type(choices: Choices, draft: Draft, index: int) -> None:
    operand = draft.operands[index]
    kind = choices.one_of([kind for kind in _TYPES if is_scalar(kind) == is_scalar(operand.type)])
    is_code = kind not in (OperandType.TENSOR_INT32, OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)
    scale = (operand.scale or 0.5) if is_code and not is_scalar(kind) and kind is not OperandType.TENSOR_BOOL8 else 0.0
    draft.operands[index] = replace(operand, type=kind, scale=scale, zero_point=0, channel_quant=None)
    if index in draft.arrays:
        with np.errstate(all="ignore"):
            draft.arrays[index] = draft.arrays[index].astype(NUMPY_TYPES[kind])


def _lifetime(choices: Choices, draft: Draft, index: int) -> None:
    """Make a constant an input, or the reverse."""
    operand = draft.operands[index]
    if index in draft.arrays:
        to = LifeTime.SUBGRAPH_INPUT if operand.lifetime in _CONSTANTS else LifeTime.CONSTANT_COPY
        draft.operands[index] = replace(operand, lifetime=to, location=DataLocation())


def _omit(choices: Choices, draft: Draft, index: int) -> None:
    """Leave an argument out: in the model, or in the request alone."""
    operand = draft.operands[index]
    if index in draft.arrays:
        if operand.lifetime is LifeTime.SUBGRAPH_INPUT and choices.flag():
            del draft.arrays[index]
        else:
            draft.operands[index] = replace(operand, lifetime=LifeTime.NO_VALUE, location=DataLocation())


_MUTATIONS: Mapping[str, tuple[int, Callable[[Choices, Draft, int], None]]] = {
    "value": (6, _value),
    "extent": (3, _extent),
    "rank": (1, _rank),
    "open": (2, _open),
    "scale": (2, _scale),
    "zero point": (1, _zero_point),
    "type": (1, _type),
    "lifetime": (3, _lifetime),
    "omit": (1, _omit),
}
"""The weight of each mutation, and its function."""

_CHOICES = [mutation for mutation, (weight, _) in _MUTATIONS.items() for _ in range(weight)]


_ALIKE = {OperationType.LESS_EQUAL: OperationType.GREATER_EQUAL}
"""Operations that no test model has in its main subgraph, and ones that take the same arguments."""


@dataclass(frozen=True)
class MutatedTest:
    """A mutated test model: its name, the mutations with the operand of each, and the resulting model and inputs."""

    name: str
    mutations: tuple[tuple[str, int], ...]
    model: Model
    inputs: tuple[Array | None, ...]

    def __repr__(self) -> str:
        """Return what is needed to reproduce the model."""
        operands = [self.model.main.operands[index] for _, index in self.mutations]
        return f"{self.name}: {self.mutations} -> {operands}"


def mutated_test(choices: Choices, codes: Sequence[OperationType]) -> MutatedTest:
    """Return a test model of one of the operations, with up to four operands mutated."""
    code = choices.one_of(codes)
    test = choices.one_of(_of(code))
    draft = Draft.of(test)
    some = [index for operation in test.model.main.operations[:1] for index in (*operation.inputs, *operation.outputs)]
    mutations = [(choices.one_of(_CHOICES), choices.one_of(some)) for _ in range(choices.between(1, 4))]
    for mutation, index in mutations:
        _MUTATIONS[mutation][1](choices, draft, index)
    model, inputs = draft.finished()
    return MutatedTest(test.name, tuple(mutations), model, tuple(inputs))


@st.composite
def mutated_tests(draw: Any, codes: Sequence[OperationType]) -> MutatedTest:
    """Draw a mutated test model of one of the operations."""
    return mutated_test(DrawnChoices(draw), codes)


@cache
def _of(code: OperationType) -> list[TestModel]:
    """Return the test models whose first operation is `code`, or else those that have it anywhere in main."""
    first = [test for test in one_of_each() if test.model.main.operations[0].type is code]
    anywhere = (test for test in one_of_each() if code in {o.type for o in test.model.main.operations})
    return first or list(anywhere) or [_with_code(test, code) for test in _of(_ALIKE[code])]


def _with_code(test: TestModel, code: OperationType) -> TestModel:
    main = test.model.main
    operation = replace(main.operations[0], type=code)
    return replace(test, model=replace(test.model, main=replace(main, operations=(operation,))))
