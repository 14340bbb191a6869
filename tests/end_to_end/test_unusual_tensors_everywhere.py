"""Scalars, empty tensors and INT64 of TFLite models: between two devices, in managed buffers, and in recordings.

LiteRT's reference kernels are the oracle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.plans import linear_plan
from support.tflite_files import Operator, Tensor, writer

import nnfmq
from nnfmq.client.connection.device import Device
from nnfmq.client.model.compiled_model import CompiledModel
from nnfmq.client.partitioned.model import PartitionedModel
from nnfmq.hal.types import DataLocation, Request, RequestArgument
from nnfmq.lab.replay import ReplayOptions, ReplaySpeed, replay
from nnfmq.recording.reader import RecordingFile
from nnfmq.recording.writer import ExecutionRecorder

litert: Any = pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")

DTYPES = {"FLOAT32": np.float32, "INT32": np.int32, "INT64": np.int64}
SHAPES = [(), (3, 0), (2, 3)]


def model_of(kind: str, shape: tuple[int, ...]) -> bytes:
    """Return (x + k) · -1 · k > k, and the product as FLOAT32, for x and k."""
    tensors = [Tensor(name, shape, kind) for name in ("x", "k", "sum", "negative", "product")]
    tensors += [Tensor("above", shape, "BOOL"), Tensor("real", shape, "FLOAT32")]
    operators = [
        Operator("ADD", (0, 1), (2,), "AddOptions"),
        Operator("NEG", (2,), (3,)),
        Operator("MUL", (3, 1), (4,), "MulOptions"),
        Operator("GREATER", (4, 1), (5,)),
        Operator("CAST", (4,), (6,), "CastOptions"),
    ]
    content: bytes = writer.write(tensors, operators, (0, 1), (5, 6))
    return content


def by_litert(content: bytes, inputs: Sequence[Any]) -> list[Any]:
    resolver = litert.OpResolverType.BUILTIN_REF
    runner = litert.Interpreter(model_content=content, experimental_op_resolver_type=resolver)
    runner.allocate_tensors()
    for detail, array in zip(runner.get_input_details(), inputs, strict=True):
        runner.set_tensor(detail["index"], array)
    runner.invoke()
    return [runner.get_tensor(detail["index"]) for detail in runner.get_output_details()]


def loaded_with(kind: str, shape: tuple[int, ...]) -> tuple[nnfmq.LoadedModel, list[Any], list[Any]]:
    """Return a model, its inputs, and LiteRT's outputs."""
    content = model_of(kind, shape)
    inputs = [np.asarray(np.random.default_rng(seed).integers(-5, 6, shape)).astype(DTYPES[kind]) for seed in (1, 2)]
    shapes = {"x": shape, "k": shape} if 0 in shape else None
    return nnfmq.load(content, shapes=shapes), inputs, by_litert(content, inputs)


def results(model: CompiledModel, inputs: Sequence[Any]) -> Iterator[Sequence[Any]]:
    yield model.execute(*inputs)
    with model.burst() as burst:
        yield burst.execute(*inputs)
        yield tuple(array.copy() for array in burst.execute(out=burst.outputs))
    with model.create_reusable_execution() as execution:
        yield execution.compute(*inputs)
        yield execution.compute()
    yield model.execute_async(*inputs).result()


def require_equal(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", DTYPES)
def test_a_model_divided_between_two_devices_returns_what_litert_does(
    shared_client: nnfmq.Client, kind: str, shape: tuple[int, ...]
) -> None:
    loaded, inputs, wanted = loaded_with(kind, shape)
    devices = [shared_client.device(name) for name in ("reference", "compiled")]
    plan = linear_plan(loaded.model, *([n] for n in range(len(loaded.model.main.operations))))
    steps = [devices[step.device].prepare(step.model) for step in plan.execution_steps]
    with PartitionedModel(plan, steps, None, loaded.inputs, loaded.outputs) as model:
        for found in results(model, inputs):
            require_equal(found, wanted)


def by_buffers(device: Device, loaded: nnfmq.LoadedModel, inputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of an execution whose inputs and outputs are all in buffers of the device."""
    with ExitStack() as stack:
        model = stack.enter_context(device.prepare(loaded))
        given = [stack.enter_context(device.allocate(inputs=[(model, place)])) for place in range(len(inputs))]
        for buffer, array in zip(given, inputs, strict=True):
            buffer.copy_from(array)
        results = [stack.enter_context(device.allocate(outputs=[(model, n)])) for n in range(len(loaded.outputs))]
        places = [RequestArgument(location=DataLocation(n)) for n in range(len(given) + len(results))]
        pools = tuple(buffer.pool for buffer in (*given, *results))
        model.execute_request(Request(tuple(places[: len(given)]), tuple(places[len(given) :]), pools))
        return [buffer.array() for buffer in results]


@pytest.mark.parametrize("device", ["reference", "compiled"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", DTYPES)
def test_buffers_hold_what_litert_computes(
    shared_client: nnfmq.Client, kind: str, shape: tuple[int, ...], device: str
) -> None:
    loaded, inputs, wanted = loaded_with(kind, shape)
    require_equal(by_buffers(shared_client.device(device), loaded, inputs), wanted)


@pytest.mark.parametrize("kind", DTYPES)
def test_a_recording_of_scalars_and_empty_tensors_is_replayed(
    shared_client: nnfmq.Client, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "calls.nnrec"
    with ExecutionRecorder.start(path):
        for shape in SHAPES:
            loaded, inputs, wanted = loaded_with(kind, shape)
            with shared_client.device("reference").prepare(loaded) as model:
                for found in results(model, inputs):
                    require_equal(found, wanted)
    with RecordingFile(path) as recording:
        outcome = replay(shared_client, recording, ReplayOptions(ReplaySpeed("max")))
    assert len(outcome.executions) == len(SHAPES) * 6
    assert all(done.is_equal for done in outcome.executions)
