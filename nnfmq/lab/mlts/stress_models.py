"""The models of the crash tests: model files, and small models for devices that support few operations.

`survey` measures how long a device needs for each, so that a test with many threads uses models that it can finish: an
execution that waits for 60 others must not be mistaken for a hang.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from msgspec.structs import replace

from nnfmq.base.file_memory import FileMemory
from nnfmq.client.connection.device import Device
from nnfmq.client.connection.prepare_arguments import NamedModel
from nnfmq.hal.errors import InvalidArgument, NnfmqError
from nnfmq.hal.types import (
    DataLocation,
    ExecutionPreference,
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
)
from nnfmq.importers import example_path, load
from nnfmq.lab.mlts.crash_tests import CrashTest
from nnfmq.lab.mlts.models import Array

if TYPE_CHECKING:
    from nnfmq.client.model.compiled_model import CompiledModel

PARALLEL_BUDGET_S = 8.0
"""How long the executions, or preparations, of all threads of a test may take one after the other."""
_SURVEY_TIMEOUT_S = 20.0
COMPLETE = ExecutionPreference.SUSTAINED_SPEED
"""With this preference a preparation waits for the compiler; with FAST_SINGLE_ANSWER it may end before."""
_SMALL = "small:"
_SMALL_TYPES = {
    "float32": Operand(OperandType.TENSOR_FLOAT32, (4,)),
    "uint8": Operand(OperandType.TENSOR_QUANT8_ASYMM, (4,), 0.5, 128),
    "int8": Operand(OperandType.TENSOR_QUANT8_ASYMM_SIGNED, (4,), 0.5, 0),
}
SMALL_MODELS = tuple(f"{_SMALL}{operation} {name}" for operation in ("ADD", "RELU") for name in _SMALL_TYPES)
"""Names of the small models: one operation on four elements."""


@dataclass(frozen=True, slots=True)
class ModelCost:
    """A model, by path or name, and the times of a preparation, of one that waits for the compiler, and an execution.

    Times are 0 if they could not be measured.
    """

    name: str
    prepare_s: float = 0.0
    compile_s: float = 0.0
    execute_s: float = 0.0


def open_model(name: str) -> Model | NamedModel:
    """Return the model of a path or of a name in SMALL_MODELS."""
    if not name.startswith(_SMALL):
        return load(Path(name))
    operation, element_type = name.removeprefix(_SMALL).split()
    return _one_operation(OperationType[operation], _SMALL_TYPES[element_type])


def _one_operation(operation: OperationType, tensor: Operand) -> Model:
    inputs = [replace(tensor, lifetime=LifeTime.SUBGRAPH_INPUT)]
    if operation is OperationType.ADD:
        activation = Operand(OperandType.INT32, lifetime=LifeTime.CONSTANT_COPY, location=DataLocation(0, 0, 4))
        inputs = [*inputs, *inputs, activation]
    operands = (*inputs, replace(tensor, lifetime=LifeTime.SUBGRAPH_OUTPUT))
    indexes = tuple(range(len(inputs)))
    inputs_of_model = tuple(i for i in indexes if operands[i].lifetime is LifeTime.SUBGRAPH_INPUT)
    graph = Subgraph(operands, (Operation(operation, indexes, (len(inputs),)),), inputs_of_model, (len(inputs),))
    return Model(graph, operand_values=struct.pack("<i", 0) if len(inputs) > 1 else b"")


def hal_model(model: Model | NamedModel) -> Model:
    """Return the HAL's model of a loaded one."""
    return model if isinstance(model, Model) else model.model


def candidates(folder: Path | None) -> list[str]:
    """Return the names of the models to try: the files in a folder, or else the example models of the package."""
    files = sorted(map(str, folder.glob("*.tflite"))) if folder is not None and folder.is_dir() else []
    return files or [str(example_path(name)) for name in ("digits.tflite", "digits_quant.tflite")]


def survey(open_device: Callable[[], Device], names: Sequence[str]) -> list[ModelCost]:
    """Return the models that a device supports and their costs; the first small one if it supports no other.

    A model whose preparation or execution fails is included: the tests will report that. `open_device` is called for
    each model, because a driver may die.
    """
    found = [cost for name in names if (cost := _cost(open_device(), name)) is not None]
    if found:
        return found
    return next(([cost] for name in SMALL_MODELS if (cost := _cost(open_device(), name)) is not None), [])


def _cost(device: Device, name: str) -> ModelCost | None:
    model = open_model(name)
    try:
        if not all(device.supported_operations(hal_model(model), timeout=_SURVEY_TIMEOUT_S)):
            return None
        times = [time.monotonic()]
        with device.prepare(model, timeout=_SURVEY_TIMEOUT_S):
            times.append(time.monotonic())
        with device.prepare(model, preference=COMPLETE, timeout=_SURVEY_TIMEOUT_S):
            times.append(time.monotonic())
        with device.prepare(model, timeout=_SURVEY_TIMEOUT_S) as prepared:
            times.append(time.monotonic())
            prepared.execute(*inputs_for(prepared), timeout=_SURVEY_TIMEOUT_S)
            times.append(time.monotonic())
        return ModelCost(name, times[1] - times[0], times[2] - times[1], times[4] - times[3])
    except InvalidArgument:
        return None
    except NnfmqError:
        return ModelCost(name)


def affordable(costs: Sequence[ModelCost], test: CrashTest) -> list[ModelCost]:
    """Return the models that all threads of a test finish within the budget, or else the fastest one."""

    def seconds(cost: ModelCost) -> float:
        prepare_s = cost.compile_s if test.compiles_fully else cost.prepare_s
        return prepare_s if test.only_compiles else max(prepare_s, cost.execute_s)

    parallelism = test.processes * test.threads
    fitting = [cost for cost in costs if seconds(cost) * parallelism <= PARALLEL_BUDGET_S]
    return fitting or sorted(costs, key=seconds)[:1]


def inputs_for(prepared: CompiledModel) -> list[Array]:
    """Return inputs of a prepared model, the same ones each time."""
    random = np.random.default_rng(0)
    return [
        random.random(info.shape).astype(info.dtype)
        if np.dtype(info.dtype).kind == "f"
        else random.integers(0, 100, info.shape).astype(info.dtype)
        for info in prepared.inputs
    ]


@contextmanager
def with_constants_in_file(model: Model, file: BinaryIO) -> Iterator[Model]:
    """Yield the model with its small constants in a file, as an application memory-maps them. Borrows `file`.

    A model without small constants is yielded as it is.
    """
    if not model.operand_values:
        yield model
        return
    file.write(model.operand_values)
    file.flush()
    pool_index = len(model.pools)
    graphs = [
        replace(graph, operands=tuple(_by_reference(operand, pool_index) for operand in graph.operands))
        for graph in (model.main, *model.referenced)
    ]
    with FileMemory.from_fd(file.fileno(), len(model.operand_values)) as memory:
        pools = (*model.pools, memory)
        yield replace(model, main=graphs[0], referenced=tuple(graphs[1:]), operand_values=b"", pools=pools)


def _by_reference(operand: Operand, pool_index: int) -> Operand:
    if operand.lifetime is not LifeTime.CONSTANT_COPY:
        return operand
    location = replace(operand.location, pool_index=pool_index)
    return replace(operand, lifetime=LifeTime.CONSTANT_REFERENCE, location=location)
