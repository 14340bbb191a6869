"""The HAL's own test models through the interpreter: every one whose operations are all declared, no exceptions.

Kinds as AOSP runs them: general, dynamic output shapes (enough room, and one byte short), and int8 in place of uint8.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import places, vts

from nnfmq.engines import interpreter
from nnfmq.hal.errors import InvalidArgument, MissedDeadlineTransient, NnfmqError, OutputInsufficientSize
from nnfmq.hal.types import Model, OperationType, OutputShape
from nnfmq.operations import REGISTRY
from nnfmq.validation import validate_model

FOLDER = places.data_path() / "vts"
DECLARED = {code.name for code in REGISTRY}
SPECS = sorted(
    spec
    for spec, entry in (vts.index(FOLDER) if FOLDER.is_dir() else {}).items()
    if set(entry["operations"]) <= DECLARED
)


def runnable(spec: str) -> Iterator[dict[str, Any]]:
    return (line for line in vts.lines(FOLDER, spec) if vts.operation_types(line) <= set(REGISTRY))


def buffers(test: vts.TestModel) -> list[vts.Array]:
    return [np.empty(expected.shape, expected.dtype) for expected in test.expected]


def run(
    model: Model, test: vts.TestModel, outputs: list[Any], loop_timeout_ns: int | None = None
) -> tuple[OutputShape, ...]:
    validate_model(model, allow_unspecified_boundaries=True)
    return interpreter.prepare(model).execute(test.inputs, outputs, loop_timeout_ns=loop_timeout_ns)


def problems_of(test: vts.TestModel, model: Model) -> list[str]:
    outputs = buffers(test)
    shapes = run(model, test, outputs)
    wrong_shapes = [shape.dimensions for shape in shapes] != [expected.shape for expected in test.expected]
    return vts.mismatches(test, outputs) + [f"{test.name}: shapes {shapes}"] * wrong_shapes


def test_the_suite_runs_the_models_that_it_should(data_dir: Path) -> None:
    lines = [line for spec in SPECS for line in runnable(spec)]

    assert len(lines) >= 1000
    assert {code for line in lines for code in vts.operation_types(line)} == set(REGISTRY)


@pytest.mark.parametrize("spec", SPECS)
def test_outputs_are_within_the_tolerance(spec: str) -> None:
    tests = [vts.read(line) for line in runnable(spec)]

    assert [problem for test in tests if not test.must_fail for problem in problems_of(test, test.model)] == []


@pytest.mark.parametrize("spec", SPECS)
def test_models_that_must_fail_do(spec: str) -> None:
    for test in [vts.read(line) for line in runnable(spec) if line["expectFailure"]]:
        endless = test.model.main.operations[0].type == OperationType.WHILE
        with pytest.raises(MissedDeadlineTransient if endless else NnfmqError):
            run(test.model, test, buffers(test), loop_timeout_ns=1_000_000)


@pytest.mark.parametrize("spec", SPECS)
def test_SHP_1_outputs_of_unknown_shape_are_computed_and_reported(spec: str) -> None:
    tests = [vts.read(line) for line in runnable(spec) if not line["expectFailure"]]

    problems = [p for test in tests for p in problems_of(test, vts.with_unknown_output_shapes(test.model))]
    assert problems == []


@pytest.mark.parametrize("spec", SPECS)
def test_SHP_4_a_buffer_that_is_one_byte_short_is_refused_with_all_shapes(spec: str) -> None:
    for test in [vts.read(line) for line in runnable(spec) if not line["expectFailure"]]:
        size = test.expected[0].nbytes
        if size > 1:
            outputs: list[Any] = [bytearray(size - 1), *buffers(test)[1:]]
            with pytest.raises(OutputInsufficientSize) as caught:
                run(vts.with_unknown_output_shapes(test.model), test, outputs)
            shapes = caught.value.output_shapes
            assert [s.dimensions for s in shapes] == [expected.shape for expected in test.expected]
            assert [s.is_sufficient for s in shapes] == [False] + [True] * (len(shapes) - 1)


@pytest.mark.parametrize("spec", SPECS)
def test_uint8_models_pass_as_int8_models(spec: str) -> None:
    tests = [vts.read(vts.signed(line)) for line in runnable(spec) if vts.is_coupled(line)]

    assert [problem for test in tests for problem in problems_of(test, test.model)] == []


def refusal(model: Model) -> str:
    try:
        validate_model(model)
    except InvalidArgument as error:
        return str(error)
    return ""


def test_N_VAL_20_models_with_unknown_sizes_at_boundaries_are_refused_at_the_hal_s_level(data_dir: Path) -> None:
    specs = [spec for spec in vts.index(FOLDER) if spec.startswith("V1_3_cts_only/")]
    tests = [vts.read(line) for spec in specs for line in vts.lines(FOLDER, spec)]

    refused = [refusal(test.model).startswith("N-VAL-20: ") for test in tests]
    assert refused == [not test.must_fail for test in tests]
    assert (len(tests), sum(refused)) == (238, 232)


SPELLED_OUT_DEFAULTS = ("_nhwc", "_neg", "_default_values")
"""Models that spell out NHWC, the last axis or flags that are off: the argument needs HAL 1.2 or 1.3, the vectors name
what can do without."""


@pytest.mark.parametrize("spec", SPECS)
def test_VAL_2_the_feature_level_is_the_one_that_the_vectors_name(spec: str) -> None:
    named = [line for line in runnable(spec) if line["minSupportedVersion"] in vts.FEATURE_LEVELS]
    lines = [line for line in named if not any(part in line["name"] for part in SPELLED_OUT_DEFAULTS)]
    tests = [vts.read(line) for line in lines if not line["expectFailure"]]

    levels = {test.name: validate_model(test.model) for test in tests}
    assert levels == {test.name: vts.FEATURE_LEVELS[test.line["minSupportedVersion"]] for test in tests}
