"""Random graphs as crash tests: generate, prepare and perhaps execute them, and count the outcomes.

The outcomes are MLTS's. A graph that could not be generated and one that the device does not support count as success;
a failure ends the test, and the graph is written to a file that `nnfmq conformance` reads.
"""

from __future__ import annotations

import json
import time
from enum import StrEnum
from pathlib import Path

from nnfmq.conformance.driver_targets import in_shared_memory
from nnfmq.conformance.random_graphs import GraphClass, generate
from nnfmq.conformance.random_source import GraphLimits
from nnfmq.conformance.testmodels import Criterion, Line, TestModel, read
from nnfmq.hal.errors import DeadObject, GeneralFailure, NnfmqError
from nnfmq.hal.types import OperandType
from nnfmq.mlts.crash_context import WorkloadContext
from nnfmq.mlts.crash_list import GraphSize, Workload
from nnfmq.runtime.client_device import Device

_SEARCH_S = 30.0  # without a graph that the device supports
_SEED_STRIDE = 1_000_000  # between the first seeds of two threads


class GraphOutcome(StrEnum):
    """The outcome of one random graph."""

    SUCCESS = "success"
    FAILED_COMPILATION = "failed compilation"
    FAILED_EXECUTION = "failed execution"
    OTHER_FAILURE = "other API failure"
    INVALID_MODEL = "invalid model generated"
    UNSUPPORTED_MODEL = "unsupported model"


FAILURES = (GraphOutcome.FAILED_COMPILATION, GraphOutcome.FAILED_EXECUTION, GraphOutcome.OTHER_FAILURE)


class GraphFailed(GeneralFailure):
    """A random graph failed; the message has the outcome, the error and the file of the graph."""


def run_random_graphs(context: WorkloadContext, worker: int) -> None:
    """Run graph after graph until the deadline, the number of graphs, or 30 s without a supported one. Blocks.

    Raises:
        GraphFailed: If a graph fails.
        DeadObject: If the driver exits.
    """
    task = context.task
    assert task.graphs is not None
    graph_class = class_of(task.graphs)
    device, first = context.device(), task.seed + worker * _SEED_STRIDE
    succeeded_at = time.monotonic()
    for seed in range(first, first + task.graphs.count):
        outcome = _run_seed(context, device, graph_class, seed)
        context.count(outcome)
        now = time.monotonic()
        succeeded_at = now if outcome is GraphOutcome.SUCCESS else succeeded_at
        if context.is_over or now - succeeded_at > _SEARCH_S:
            return
        if outcome is GraphOutcome.SUCCESS:
            context.pause()


def class_of(size: GraphSize) -> GraphClass:
    """Return the class of graphs of this size: operations of all types and ranks."""
    name = f"stress_{size.operations}_operations"
    criteria = dict.fromkeys(OperandType, Criterion())  # results are not evaluated
    return GraphClass(name, "stress", GraphLimits(size.max_dimension), criteria, size.operations)


def _run_seed(context: WorkloadContext, device: Device, graph_class: GraphClass, seed: int) -> GraphOutcome:
    try:
        line = generate(graph_class, seed)
    except GeneralFailure:
        return GraphOutcome.INVALID_MODEL
    executes = context.task.workload is Workload.RANDOM_INFERENCE
    outcome, error = run_graph(device, read(line), executes=executes)
    if outcome in FAILURES:
        path = _dump(line, context.task.dump_to)
        raise GraphFailed(f"{outcome}: {error}; the graph is in {path}" if path else f"{outcome}: {error}")
    return outcome


def run_graph(device: Device, test: TestModel, *, executes: bool) -> tuple[GraphOutcome, NnfmqError | None]:
    """Prepare a graph, and execute it; return the outcome, and the error of a failure. Blocks.

    Raises:
        DeadObject: If the driver exits.
    """
    failure = GraphOutcome.OTHER_FAILURE
    try:
        with in_shared_memory(test.model) as model:
            if not all(device.supported_operations(model)):
                return GraphOutcome.UNSUPPORTED_MODEL, None
            failure = GraphOutcome.FAILED_COMPILATION
            with device.prepare(model) as prepared:
                failure = GraphOutcome.FAILED_EXECUTION
                if executes:
                    arrays = [array for array in test.inputs if array is not None]
                    prepared.execute(*(a.astype(i.dtype) for a, i in zip(arrays, prepared.inputs, strict=True)))
                failure = GraphOutcome.OTHER_FAILURE
    except DeadObject:
        raise
    except NnfmqError as error:
        return failure, error
    return GraphOutcome.SUCCESS, None


def _dump(line: Line, folder: str) -> str:
    if not folder:
        return ""
    path = Path(folder) / f"{line['name']}.jsonl"
    path.write_text(json.dumps(line) + "\n", encoding="ascii")
    return str(path)
