"""Each compiled operation on the interpreter's inputs, compared with the interpreter's outputs.

`nnfmq conformance TESTS --path compiled-steps` does so for all test models. Here are one for each use of an operation,
in the deep tier all of them, random graphs, and the real models.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support import models, places
from support.tiers import IS_DEEP
from support.vts_models import executable_lines, one_of_each

import nnfmq
from nnfmq.client.model.handle import initial_values
from nnfmq.engines import interpreter
from nnfmq.engines.compiled.partition import prepare
from nnfmq.hal.types import FusedActivationFunc, Model, OperationType
from nnfmq.lab.conformance import testmodels
from nnfmq.lab.conformance.cases import PASSED, run_test
from nnfmq.lab.conformance.random_graphs import classes, generate
from nnfmq.lab.conformance.stepwise import StepReport, StepwiseEngine, compare_operations

Arrays = list[npt.NDArray[Any]]
PARTS = 4
SEEDS = range(50 if IS_DEEP else 1)
REAL_TOLERANCE = (2e-5, 5 * 2**-23)
"""Twice the vectors' atol: layers of the float MobileNet sum 256 products, whose magnitudes add up to 70. In another
order that differs by up to 1.6e-5, and as much from the exact sum."""
MODELS = places.data_path() / "models"
LISTED = json.loads((MODELS / "models.json").read_text())["models"] if MODELS.is_dir() else []
GOLDEN = {entry["name"]: MODELS / entry["inputOutputs"][0]["input"] for entry in LISTED}
TFLITE = sorted(MODELS.glob("**/*.tflite"))


def compare(model: Model, inputs: Any, tolerance: tuple[float, float] | None = None) -> StepReport:
    return compare_operations(model, interpreter.prepare(model), prepare(model), inputs, tolerance)


@pytest.mark.usefixtures("data_dir")
@pytest.mark.parametrize("part", range(PARTS))
def test_the_outputs_of_every_compiled_operation_are_the_interpreter_s(part: int) -> None:
    tests = map(testmodels.read, executable_lines()) if IS_DEEP else one_of_each()
    chosen = [test for test in tests if not test.must_fail][part::PARTS]
    reports = {test.name: compare(test.model, test.inputs) for test in chosen}
    assert sum(report.operations for report in reports.values()) > 50
    assert {name: report.mismatches for name, report in reports.items() if report.mismatches} == {}


@pytest.mark.parametrize("family", ["small", "large", "quantized"])
def test_TST_6_random_graphs_and_their_compiled_operations_pass(family: str) -> None:
    """One graph of each class; `nnfmq conformance --random-graphs --path compiled-steps` runs any number."""
    target = StepwiseEngine()
    graphs = [generate(chosen, seed) for chosen in classes().values() if chosen.family == family for seed in SEEDS]
    results = [run_test(testmodels.read(line), target, with_variants=False) for line in graphs]
    assert target.compared_steps > 3 * len(results)
    assert [(result.name, one.reason) for result in results for one in result.outcomes if one.status != PASSED] == []


@pytest.mark.parametrize("path", TFLITE, ids=lambda path: path.stem)
def test_the_outputs_of_every_layer_of_a_real_model_are_the_interpreter_s(path: Path) -> None:
    loaded = nnfmq.load(path)
    report = compare(loaded.model, [*given_to(path, loaded.inputs), *initial_values(loaded.states)], REAL_TOLERANCE)
    assert report.operations > 0.5 * len(loaded.model.main.operations)
    assert report.mismatches == []


def given_to(path: Path, infos: Any) -> Arrays:
    """Return the golden input of a model, the first step of a sequence; other inputs are random bytes, or 0."""
    random = np.random.default_rng(7)
    arrays = []
    for info in infos:
        size_bytes = np.dtype(info.dtype).itemsize * math.prod(info.shape)
        raw = GOLDEN[path.stem].read_bytes()[:size_bytes] if path.stem in GOLDEN and not arrays else None
        if raw is None:
            raw = bytes(size_bytes) if np.dtype(info.dtype).kind == "f" else random.bytes(size_bytes)
        arrays.append(np.frombuffer(raw, info.dtype).reshape(info.shape))
    return arrays


def saturating() -> Model:
    """FULLY_CONNECTED with weights of 1, then SOFTMAX, which returns 1/4 for any four equal sums."""
    builder = models._Builder()
    given, total, result = builder.input((1, 16)), builder.tensor((1, 4)), builder.output((1, 4))
    weights, bias = builder.floats((4, 16), 1.0), builder.floats((4,), 0.0)
    none = builder.scalar(FusedActivationFunc.NONE)
    builder.operation(OperationType.FULLY_CONNECTED, [given, weights, bias, none], [total])
    builder.operation(OperationType.SOFTMAX, [total, builder.float_scalar(1.0)], [result])
    return builder.model()


def layers(*values: float) -> Model:
    """FULLY_CONNECTED operations in sequence, each with 64 x 64 weights that equal one of `values`."""
    builder = models._Builder()
    last = builder.input((1, 64))
    for number, value in enumerate(values):
        result = (builder.output if number == len(values) - 1 else builder.tensor)((1, 64))
        arguments = [last, builder.floats((64, 64), value), builder.floats((64,), 0.5)]
        builder.operation(
            OperationType.FULLY_CONNECTED, [*arguments, builder.scalar(FusedActivationFunc.NONE)], [result]
        )
        last = result
    return builder.model()


def test_operations_with_equal_weights_share_them() -> None:
    def constant_bytes(model: Model) -> int:
        (step,) = prepare(model).steps
        return int(step.function._constants.nbytes)  # type: ignore[attr-defined]

    one, weights_bytes = constant_bytes(layers(0.25)), 64 * 64 * 4
    assert constant_bytes(layers(0.25, 0.25, 0.25)) < one + weights_bytes / 4
    assert constant_bytes(layers(0.25, 0.5, 0.25)) >= one + weights_bytes
    assert compare(layers(0.25, 0.5, 0.25), [np.arange(64, dtype=np.float32)[None] / 64]).mismatches == []


def test_a_wrong_operation_is_reported_even_if_a_later_one_hides_it() -> None:
    model, inputs = saturating(), [np.full((1, 16), 3, np.float32)]
    compiled = prepare(model)
    right = compare_operations(model, interpreter.prepare(model), compiled, inputs)
    assert (right.partitions, right.operations, right.outputs, right.mismatches) == (1, 2, 3, [])
    (step,) = compiled.steps
    constants = step.function._constants.view(np.float32)  # type: ignore[attr-defined]
    constants[constants == 1.0] = 2.0
    outputs = [np.zeros((1, 4), np.float32)]
    compiled.execute(inputs, outputs)
    assert outputs[0].tolist() == [[0.25] * 4]  # as before
    report = compare_operations(model, interpreter.prepare(model), compiled, inputs)
    assert [mismatch.reason for mismatch in report.mismatches] == [
        "operation 0, launch 0, operand 1, index [0, 0]: expected 48.0, actual 96.0 (4 of 4 elements are wrong)"
    ]
