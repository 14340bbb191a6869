"""The records of telemetry: one for each preparation and each execution.

The fields are those of the diagnostic records of Android's NNAPI runtime: a model is identified by a hash of its
architecture, and neither weights nor inputs nor outputs appear. Durations are in ns; NO_TIME (-1) = not measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.models import model_architecture_hash
from nnfmq.hal.timing import NO_TIME
from nnfmq.hal.types import (
    QUANTIZED_TYPES,
    HalExecutionMode,
    LifeTime,
    Operand,
    OperandType,
    OperationType,
    Subgraph,
    has_unspecified_dimensions,
)
from nnfmq.observe.executions import ObservedExecution, ObservedPreparation

__all__ = [
    "CompilationRecord",
    "DataClass",
    "ExecutionRecord",
    "TelemetryMode",
    "TelemetryRecord",
    "compilation_record",
    "data_class",
    "execution_record",
]


class DataClass(IntEnum):
    """A coarse class of the element types of a model's inputs, or of its outputs (OBS-3).

    Types that are neither floats nor quantized count only if there are no others.
    """

    UNKNOWN = 0
    OTHER = 1
    FLOAT32 = 2
    FLOAT16 = 3
    QUANT = 4
    MIXED = 5


class TelemetryMode(IntEnum):
    """The execution modes that NNAPI distinguishes. A reusable execution is synchronous, an AIDL burst is a burst."""

    ASYNC = 0
    SYNC = 1
    BURST = 2
    ASYNC_WITH_DEPS = 3


@dataclass(frozen=True, slots=True)
class CompilationRecord:
    """One preparation of a model (OBS-1)."""

    model_arch_hash: str
    """A SHA-256 in hexadecimal; empty if the application gave only a signature."""
    device_id: str
    """`name=version` of each device, sorted, separated by commas."""
    error_code: int
    """An ErrorStatus."""
    input_data_class: DataClass
    output_data_class: DataClass
    compilation_time_ns: int
    """From the call to the driver until its reply, or for all steps of a plan; NO_TIME if it failed."""
    fallback_to_cpu: bool
    """Whether the CPU device has prepared the model, because its own devices failed to."""
    introspection_used: bool
    """Whether the application chose the devices."""
    cache_used: bool
    """Whether the application gave cache files, or a directory for them."""
    has_control_flow: bool
    has_dynamic_temporaries: bool
    step_count: int = 1
    """How many steps of its plan devices execute; 1 if one device executes the whole model."""


@dataclass(frozen=True, slots=True)
class ExecutionRecord:
    """One execution (OBS-2); the fields of the compilation are those of its model."""

    model_arch_hash: str
    device_id: str
    mode: TelemetryMode
    error_code: int
    """An ErrorStatus."""
    input_data_class: DataClass
    output_data_class: DataClass
    duration_runtime_ns: int
    """From the application's call until its result was read; NO_TIME if it failed."""
    duration_driver_ns: int
    """NO_TIME unless the application asked for it with `measure`."""
    duration_hardware_ns: int
    """As `duration_driver_ns`."""
    introspection_used: bool
    cache_used: bool
    has_control_flow: bool
    has_dynamic_temporaries: bool


TelemetryRecord: TypeAlias = CompilationRecord | ExecutionRecord

_MODES = {
    HalExecutionMode.SYNCHRONOUS: TelemetryMode.SYNC,
    HalExecutionMode.REUSABLE: TelemetryMode.SYNC,
    HalExecutionMode.ASYNCHRONOUS: TelemetryMode.ASYNC,
    HalExecutionMode.FENCED: TelemetryMode.ASYNC_WITH_DEPS,
    HalExecutionMode.BURST: TelemetryMode.BURST,
    HalExecutionMode.AIDL_BURST: TelemetryMode.BURST,
}
_CLASSES = {
    DataClass.FLOAT32: (OperandType.FLOAT32, OperandType.TENSOR_FLOAT32),
    DataClass.FLOAT16: (OperandType.FLOAT16, OperandType.TENSOR_FLOAT16),
    DataClass.QUANT: QUANTIZED_TYPES,
}
_CLASS_OF = {operand_type: found for found, types in _CLASSES.items() for operand_type in types}
_CONTROL_FLOW = (OperationType.IF, OperationType.WHILE)


def data_class(operand_types: Iterable[OperandType]) -> DataClass:
    """Return the class of inputs or outputs of these types; UNKNOWN if there are none (OBS-3)."""
    found = {_CLASS_OF.get(operand_type, DataClass.OTHER) for operand_type in operand_types}
    significant = found - {DataClass.OTHER}
    if len(significant) > 1:
        return DataClass.MIXED
    return next(iter(significant or found), DataClass.UNKNOWN)


def compilation_record(preparation: ObservedPreparation) -> CompilationRecord:
    """Return the record of a preparation."""
    model, is_successful = preparation.model, preparation.status == ErrorStatus.NONE
    graphs = () if model is None else (model.main, *model.referenced)
    return CompilationRecord(
        "" if model is None else model_architecture_hash(model),
        _device_id(preparation),
        preparation.status,
        DataClass.UNKNOWN if model is None else _class_of(model.main, model.main.input_indexes),
        DataClass.UNKNOWN if model is None else _class_of(model.main, model.main.output_indexes),
        preparation.end_ns - preparation.begin_ns if is_successful else NO_TIME,
        preparation.choice == "fallback",
        preparation.choice == "application",
        preparation.is_cached,
        any(operation.type in _CONTROL_FLOW for graph in graphs for operation in graph.operations),
        any(_is_dynamic_temporary(operand) for graph in graphs for operand in graph.operands),
        len(preparation.plan_devices) or 1,
    )


def _device_id(preparation: ObservedPreparation) -> str:
    devices = preparation.plan_devices or [(preparation.device, preparation.device_version)]
    return ",".join(sorted({f"{name}={version}" for name, version in devices}))


def _class_of(graph: Subgraph, indexes: Sequence[int]) -> DataClass:
    """Return the class of some operands; of a model that the driver has rejected, those that exist."""
    return data_class(graph.operands[index].type for index in indexes if 0 <= index < len(graph.operands))


def _is_dynamic_temporary(operand: Operand) -> bool:
    is_temporary = operand.lifetime is LifeTime.TEMPORARY_VARIABLE
    return is_temporary and has_unspecified_dimensions(operand.type, operand.dimensions)


def execution_record(compilation: CompilationRecord, execution: ObservedExecution) -> ExecutionRecord:
    """Return the record of an execution of the model that `compilation` describes."""
    is_successful = execution.status == ErrorStatus.NONE
    return ExecutionRecord(
        compilation.model_arch_hash,
        compilation.device_id,
        _MODES[execution.mode],
        execution.status,
        compilation.input_data_class,
        compilation.output_data_class,
        execution.end_ns - execution.intended_ns if is_successful else NO_TIME,
        execution.time_in_driver_ns,
        execution.time_on_device_ns,
        compilation.introspection_used,
        compilation.cache_used,
        compilation.has_control_flow,
        compilation.has_dynamic_temporaries,
    )
