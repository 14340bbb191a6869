"""graph_dump: a model in Graphviz's language, in the form of NNAPI's graphDump (UTL-6).

An operation is a box `n<i>`, an operand an ellipse `d<i>`, where i is the index. Inputs and outputs of the model are
white on black. NNAPI leaves out referenced subgraphs; here each is a cluster, whose names begin with `s<number>_`,
counted from 1. With an execution plan, each of its steps is a cluster with the colour of its device.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple, Protocol

from nnfmq.base.verbose_log import vlog, vlog_is_on
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.hosted import call_of, is_hosted
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.summaries import code_name
from nnfmq.hal.types import LifeTime, Model, Operand, OperandType, Operation
from nnfmq.planning.plan import ExecutionPlan, ExecutionStep, IfStep, WhileStep, subgraph_of

__all__ = [
    "COLOURS", "INTERPRETED", "NO_CLUSTER", "StepCluster", "StepClusters", "file_names", "graph_dump", "graph_lines",
]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# StepClusters: the step of an execution plan in which an operation is executed, and how a graph shows that.


COLOURS = ("#6ba3e8", "#f0a35e", "#7cc07c", "#c99be0", "#e88585", "#62c2c8", "#d6bf57", "#a9a9a9")
"""The colours of devices, in the order of the plan; the last one is that of all further devices."""

INTERPRETED = "the runtime"


class StepCluster(NamedTuple):
    """The step that executes an operation. `step` is a name for Graphviz, empty without a plan; `device` its number.

    `device` is -1 if the runtime interprets the operation, IF or WHILE, itself.
    """

    step: str
    label: str
    device: int

    @property
    def fill(self) -> str:
        """The attributes that fill the operation's box with the device's colour; each begins with a space."""
        if not self.step or self.device < 0:
            return ""
        return f' style=filled fillcolor="{COLOURS[min(self.device, len(COLOURS) - 1)]}"'


NO_CLUSTER = StepCluster("", "", -1)


class StepClusters:
    """The clusters of the operations of a model. Without a plan, or for an operation that it lacks, there are none."""

    def __init__(self, plan: ExecutionPlan | None) -> None:
        self._clusters: dict[tuple[int, int], StepCluster] = {}
        for number, step in enumerate(() if plan is None else plan.steps):
            if isinstance(step, ExecutionStep):
                assert plan is not None
                cluster = StepCluster(
                    f"step{number}", f"step {number}: {_escaped(plan.devices[step.device])}", step.device
                )
                self._clusters |= {(step.subgraph, operation): cluster for operation in step.operations}
            elif isinstance(step, IfStep | WhileStep):
                self._clusters[step.subgraph, step.operation] = StepCluster(
                    f"step{number}", f"step {number}: {INTERPRETED}", -1
                )

    def of(self, subgraph: int, operation: int) -> StepCluster:
        """Return the cluster of an operation of a subgraph; MAIN = 0."""
        return self._clusters.get((subgraph, operation), NO_CLUSTER)


def _escaped(text: str) -> str:
    """Return text for a label in quotation marks: a driver has chosen the device's name."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


# ----------------------------------------------------------------------------------------------------------------------
# graph_dump: a model in Graphviz's language, in the form of NNAPI's graphDump (UTL-6).


_TYPES = {
    OperandType.FLOAT32: "F32",
    OperandType.INT32: "I32",
    OperandType.UINT32: "U32",
    OperandType.TENSOR_FLOAT32: "TF32",
    OperandType.TENSOR_INT32: "TI32",
    OperandType.TENSOR_QUANT8_ASYMM: "TQ8A",
    OperandType.OEM: "OEM",
    OperandType.TENSOR_OEM_BYTE: "TOEMB",
}
_KINDS = {
    LifeTime.CONSTANT_COPY: "COPY",
    LifeTime.CONSTANT_REFERENCE: "REF",
    LifeTime.NO_VALUE: "NO",
    LifeTime.SUBGRAPH: "SUBGRAPH",
}
_SCALARS = {
    OperandType.FLOAT32: "<f",
    OperandType.FLOAT16: "<e",
    OperandType.INT32: "<i",
    OperandType.UINT32: "<I",
    OperandType.BOOL: "<?",
}
_BORDERED = "color=black penwidth=2"


class _Stream(Protocol):
    def write(self, text: str, /) -> object:
        """Write text."""
        ...


def graph_dump(name: str, model: Model, stream: _Stream | None = None, plan: ExecutionPlan | None = None) -> None:
    """Write the graph of `model` to `stream`; None = to the verbose log, tag `model`.

    `name` appears in a comment. The model need not be valid.
    """
    if stream is not None:
        stream.write("".join(f"{line}\n" for line in graph_lines(name, model, plan)))
    elif vlog_is_on("model"):
        for line in graph_lines(name, model, plan):
            vlog("model", "%s", line)


def graph_lines(name: str, model: Model, plan: ExecutionPlan | None = None) -> Iterator[str]:
    """Yield the lines of the graph, without their ends."""
    yield f"// {' '.join(name.split())}"
    yield "digraph {"
    clusters = StepClusters(plan)
    for number in range(1 + len(model.referenced)):
        yield from _cluster(number, _subgraph_lines(model, number, clusters))
    yield "}"


def _cluster(number: int, lines: Iterator[str]) -> Iterator[str]:
    """Yield the lines of a subgraph; those of a referenced one in a cluster."""
    if number:
        yield f'    subgraph cluster_s{number} {{ label="referenced subgraph {number - 1}"'
    yield from lines
    if number:
        yield "    }"


def _subgraph_lines(model: Model, number: int, clusters: StepClusters) -> Iterator[str]:
    subgraph, prefix = subgraph_of(model, number), f"s{number}_" if number else ""
    boundary = {*subgraph.input_indexes, *subgraph.output_indexes}
    files = {} if number else file_names(model)
    for index, operand in enumerate(subgraph.operands):
        style = "style=filled fillcolor=black fontcolor=white " if index in boundary else ""
        yield f'    {prefix}d{index} [{style}label="{_operand_text(model, index, operand, files)}"]'
    for index, operation in enumerate(subgraph.operations):
        cluster = clusters.of(number, index)
        box = (
            f'{prefix}n{index} [shape=box{_ordering(operation)}{cluster.fill} label="{index}: {_name(operation.type)}"]'
        )
        yield (
            f'    subgraph cluster_{cluster.step} {{ {_BORDERED} label="{cluster.label}" {box} }}'
            if cluster.step
            else f"    {box}"
        )
        yield from _edges(operation, f"{prefix}n{index}", prefix)


def file_names(model: Model) -> dict[int, str]:
    """Return the names of the files of a hosted model by the operands that have their bytes; of others, none."""
    if not is_hosted(model):
        return {}
    with suppress(InvalidArgument, IndexError):  # the model is not valid
        names = [file.name for file in call_of(model).files for _ in range(file.parts)]
        return dict(zip(model.main.operations[0].inputs[1:], names, strict=False))
    return {}


def _ordering(operation: Operation) -> str:
    """Return the attribute that keeps several inputs, or else several outputs, in their order."""
    inputs, outputs = len(operation.inputs), len(operation.outputs)
    if max(inputs, outputs) < 2:
        return ""
    return " ordering=in" if inputs >= outputs else " ordering=out"


def _edges(operation: Operation, box: str, prefix: str) -> Iterator[str]:
    for position, index in enumerate(operation.inputs):
        yield f"    {prefix}d{index} -> {box}{_position(position, len(operation.inputs))}"
    for position, index in enumerate(operation.outputs):
        yield f"    {box} -> {prefix}d{index}{_position(position, len(operation.outputs))}"


def _position(position: int, count: int) -> str:
    return f" [label={position}]" if count > 1 else ""


def _name(code: OperandType | OperationType) -> str:
    return code_name(code)


def _operand_text(model: Model, index: int, operand: Operand, files: Mapping[int, str]) -> str:
    kind = f": {_KINDS[operand.lifetime]}" if operand.lifetime in _KINDS else ""
    name = _TYPES.get(operand.type) or _name(operand.type)
    extents = "x".join(map(str, operand.dimensions))
    file = f"\\n{_escaped(files[index])}" if index in files else ""
    return f"{index}{kind}\\n{name}{_value(model, operand)}{f'({extents})' if extents else ''}{file}"


def _value(model: Model, operand: Operand) -> str:
    """Return the value of a scalar constant, or the number of a subgraph; nothing if it cannot be read."""
    if operand.lifetime is LifeTime.SUBGRAPH:
        return f" = {operand.location.offset}"
    code, location = _SCALARS.get(operand.type), operand.location
    if code is None or operand.lifetime is not LifeTime.CONSTANT_COPY or location.length != struct.calcsize(code):
        return ""
    data = model.operand_values[location.offset : location.offset + location.length]
    if len(data) != location.length:
        return ""
    (value,) = struct.unpack(code, data)
    return f" = {value:g}" if isinstance(value, float) else f" = {int(value)}"
