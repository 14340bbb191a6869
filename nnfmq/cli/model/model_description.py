"""The description of a model that `nnfmq model show` prints: plain values, as in its JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nnfmq.cli.model.model_inspection import InspectedModel
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.feature_levels import FeatureLevel, interface_name
from nnfmq.hal.summaries import code_name
from nnfmq.hal.types import LifeTime, Model, Operand, Operation, Subgraph
from nnfmq.validation import validate_model

if TYPE_CHECKING:
    from nnfmq.hal.tensor_info import TensorInfo

__all__ = ["describe_model"]

_CONSTANTS = (LifeTime.CONSTANT_COPY, LifeTime.CONSTANT_REFERENCE)


def describe_model(inspected: InspectedModel, supported: Mapping[str, Sequence[bool]]) -> dict[str, Any]:
    """Return the description. `supported` has, for each device that was asked, a bool for each main operation."""
    model = inspected.model
    subgraphs = (model.main, *model.referenced)
    level = _feature_level(model)
    operations = [_operation(model.main, number, supported) for number in range(len(model.main.operations))]
    return {
        "model": inspected.name,
        "feature_level": level,
        "interface": None if level is None else interface_name(level),
        "inputs": [_tensor(info) for info in inspected.inputs],
        "outputs": [_tensor(info) for info in inspected.outputs],
        "states": [_tensor(state.tensor) for state in inspected.states],
        "signatures": list(inspected.signatures),
        "open_inputs": {name: list(shape) for name, shape in inspected.open_inputs.items()},
        "operations": operations,
        "subgraphs": [[_operation(graph, i, {}) for i in range(len(graph.operations))] for graph in model.referenced],
        "counts": dict(Counter(code_name(one.type) for graph in subgraphs for one in graph.operations).most_common()),
        "operands": sum(len(graph.operands) for graph in subgraphs),
        "constants_bytes": sum(_constant_bytes(graph, range(len(graph.operands))) for graph in subgraphs),
        "extensions": [extension.name for extension in model.extensions],
        "relaxes_float32": model.relax_computation_float32_to_float16,
        "devices": {name: {"supported": sum(found), "of": len(found)} for name, found in supported.items()},
    }


def _feature_level(model: Model) -> FeatureLevel | None:
    """Return the feature level that the model needs; None if it is not valid (`nnfmq model validate` says why)."""
    try:
        return FeatureLevel(validate_model(model, allow_unspecified_boundaries=True))
    except InvalidArgument:
        return None


def _tensor(info: TensorInfo) -> dict[str, Any]:
    quantization = {"scale": info.scale, "zero_point": info.zero_point} if info.scale else None
    return {"name": info.name, "dtype": info.dtype, "shape": list(info.shape), "quantization": quantization}


def _operation(graph: Subgraph, number: int, supported: Mapping[str, Sequence[bool]]) -> dict[str, Any]:
    operation = graph.operations[number]
    return {
        "number": number,
        "operation": code_name(operation.type),
        "inputs": [_operand(graph.operands[index]) for index in _values(graph, operation)],
        "outputs": [_operand(graph.operands[index]) for index in operation.outputs if index < len(graph.operands)],
        "constants_bytes": _constant_bytes(graph, dict.fromkeys(operation.inputs)),
        "supported_by": [name for name, found in supported.items() if found[number]],
    }


def _values(graph: Subgraph, operation: Operation) -> list[int]:
    """Return the inputs of an operation that are computed or come with the request."""
    others = (*_CONSTANTS, LifeTime.NO_VALUE, LifeTime.SUBGRAPH)
    found = [index for index in operation.inputs if index < len(graph.operands)]
    return [index for index in found if graph.operands[index].lifetime not in others]


def _operand(operand: Operand) -> dict[str, Any]:
    return {"type": code_name(operand.type), "dimensions": list(operand.dimensions)}


def _constant_bytes(graph: Subgraph, indexes: Sequence[int] | Mapping[int, object]) -> int:
    operands = [graph.operands[index] for index in indexes if index < len(graph.operands)]
    return sum(operand.location.length for operand in operands if operand.lifetime in _CONSTANTS)
