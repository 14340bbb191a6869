"""One operation with many arguments, given by the names of its declaration; through validation and the interpreter.

Controls are constants. Arrays are inputs of the model, or constants where their names are in `constants`; None is
NO_VALUE, and OMITTED an input of the model that the request leaves out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from nnfmq.engines import interpreter
from nnfmq.hal.types import LifeTime, Model, Operand, OperandType, Operation, OperationType, is_scalar
from nnfmq.operations import REGISTRY
from nnfmq.operations.declaration import NUMPY_TYPES, Parameter, Role, Variant
from nnfmq.validation import validate_model
from support.small_models import graph

Array = npt.NDArray[Any]
OMITTED = object()

_MOST_BYTES = 1 << 16


class Use:
    """An operation's model and request, ready to be run; `quantization` maps names to (scale, zero point)."""

    def __init__(
        self,
        code: OperationType,
        values: Mapping[str, Any],
        output_count: int,
        *,
        first_type: OperandType = OperandType.TENSOR_FLOAT32,
        quantization: Mapping[str, tuple[float, int]] | None = None,
        constants: Collection[str] = (),
        known: bool = True,
    ) -> None:
        declaration = REGISTRY[code]
        variant = next(v for v in declaration.variants if v.types.get("T") == first_type)
        given = [(p, values[p.name]) for p in declaration.overloads[0].parameters if p.name in values]
        self._places = quantization or {}
        operands = [self._operand(p, value, variant, p.name in constants, known) for p, value in given]
        types = [variant.types[t] if isinstance(t, str) else t for t in declaration.outputs[:output_count]]
        self.outputs = [
            Operand(t, (), *self._places.get(f"output{i}", (0.0, 0)), LifeTime.SUBGRAPH_OUTPUT)
            for i, t in enumerate(types)
            if t is not None
        ]
        count = len(operands)
        operation = Operation(code, tuple(range(count)), tuple(range(count, count + output_count)))
        stored = {i: _stored(o, values[p.name]) for i, (o, (p, _)) in enumerate(zip(operands, given, strict=True))}
        is_stored = [o.lifetime == LifeTime.CONSTANT_COPY for o in operands]
        self.model: Model = graph(
            [*operands, *self.outputs], [operation], {i: b for i, b in stored.items() if is_stored[i]}
        )
        inputs = zip(operands, given, strict=True)
        self.inputs = [
            None if value is OMITTED else np.asarray(value, NUMPY_TYPES[o.type])
            for o, (_, value) in inputs
            if o.lifetime == LifeTime.SUBGRAPH_INPUT
        ]

    def _operand(self, parameter: Parameter, value: Any, variant: Variant, constant: bool, known: bool) -> Operand:
        type = variant.types[parameter.type] if isinstance(parameter.type, str) else parameter.type
        assert type is not None
        dimensions = () if is_scalar(type) or value is None or value is OMITTED else np.shape(value)
        lifetime = LifeTime.SUBGRAPH_INPUT
        if value is None:
            lifetime = LifeTime.NO_VALUE
        elif constant or parameter.role is Role.ATTRIBUTE:
            lifetime = LifeTime.CONSTANT_COPY
        elif not known:
            dimensions = ()
        scale = self._places.get(parameter.name) or self._places.get(type.name, (0.0, 0))
        return Operand(type, dimensions, *scale, lifetime)

    def run(self) -> list[Array]:
        """Validate, prepare, execute; return the outputs."""
        validate_model(self.model)
        buffers = [bytearray(_MOST_BYTES) for _ in self.outputs]
        shapes = interpreter.prepare(self.model).execute(self.inputs, buffers)
        return [
            np.frombuffer(buffer, NUMPY_TYPES[o.type], int(np.prod(shape.dimensions))).reshape(shape.dimensions)
            for buffer, o, shape in zip(buffers, self.outputs, shapes, strict=True)
        ]

    def declaring(self, index: int, dimensions: tuple[int, ...]) -> Use:
        """Declare the dimensions of one output."""
        operands = list(self.model.main.operands)
        place = self.model.main.output_indexes[index]
        operands[place] = replace(operands[place], dimensions=dimensions)
        self.model = replace(self.model, main=replace(self.model.main, operands=tuple(operands)))
        return self


def _stored(operand: Operand, value: Any) -> bytes:
    if operand.lifetime != LifeTime.CONSTANT_COPY:
        return b""
    return np.asarray(value, NUMPY_TYPES[operand.type]).tobytes()
