"""The HAL's test models in the interpreter: all of them, with the variants that AOSP derives.

`nnfmq.lab.conformance`, which is tested elsewhere, decides whether a model passes. Here every spec must pass.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support import places

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import Model
from nnfmq.lab.conformance import testmodels
from nnfmq.lab.conformance.cases import MODEL, PASSED, ConformanceResult, run_test
from nnfmq.lab.conformance.targets import Interpreter
from nnfmq.operations import HAL_DECLARATIONS
from nnfmq.validation import validate_model

FOLDER = places.data_path() / "vts"
INDEX: dict[str, Any] = json.loads((FOLDER / "index.json").read_text()) if FOLDER.is_dir() else {}
SPECS = sorted(INDEX)


def lines(spec: str) -> Iterator[dict[str, Any]]:
    return (line for _, line in testmodels.lines(FOLDER / f"{spec}.jsonl.gz"))


def test_TST_4_the_suite_runs_the_expected_number_of_models(data_dir: Path) -> None:
    found = [testmodels.operation_types(line) for spec in SPECS for line in lines(spec)]

    assert len(found) == sum(entry["testModels"] for entry in INDEX.values()) >= 1000
    assert set().union(*found) == set(HAL_DECLARATIONS)


@pytest.mark.parametrize(
    ("variant", "count"),
    [
        ("all_inputs_as_internal", 3293),
        ("all_tensors_as_inputs", 1460),
        ("relaxed", 1540),
        ("float16", 1400),
        ("quant8", 2077),
        ("nchw", 1492),
        ("zero_sized", 191),
    ],
)
def test_TST_4_the_suite_has_the_variants_that_the_generator_derives(variant: str, count: int, data_dir: Path) -> None:
    assert sum(variant in line["name"] for spec in SPECS for line in lines(spec)) == count


@cache
def results(spec: str) -> tuple[ConformanceResult, ...]:
    """Return the results of a spec, which runs once for all tests."""
    return tuple(run_test(testmodels.read(line), Interpreter()) for line in lines(spec))


def not_passed(spec: str, kind: str) -> list[str]:
    outcomes = [(result.name, outcome) for result in results(spec) for outcome in result.outcomes]
    return [f"{name}: {v.reason}" for name, v in outcomes if v.kind == kind and v.status != PASSED]


@pytest.mark.parametrize("spec", SPECS)
def test_TST_3_TST_4_outputs_are_within_the_tolerance_and_models_that_must_fail_do(spec: str) -> None:
    assert not_passed(spec, MODEL) == []


@pytest.mark.parametrize("spec", SPECS)
def test_SHP_1_TST_5_outputs_of_unknown_shape_are_computed_and_reported(spec: str) -> None:
    assert not_passed(spec, testmodels.UNKNOWN_OUTPUT_SHAPES) == []


@pytest.mark.parametrize("spec", SPECS)
def test_SHP_4_TST_5_a_buffer_that_is_one_byte_short_is_rejected_with_all_shapes(spec: str) -> None:
    assert not_passed(spec, testmodels.INSUFFICIENT_OUTPUT) == []


@pytest.mark.parametrize("spec", SPECS)
def test_TST_12_uint8_models_pass_as_int8_models_with_outputs_128_lower(spec: str) -> None:
    assert not_passed(spec, testmodels.INT8_COUPLING) == []


def validation_error(model: Model) -> str:
    try:
        validate_model(model)
    except InvalidArgument as error:
        return str(error)
    return ""


def test_N_VAL_20_models_with_unknown_shapes_at_subgraph_boundaries_are_rejected_by_the_hals_version(
    data_dir: Path,
) -> None:
    specs = [spec for spec in INDEX if spec.startswith("V1_3_cts_only/")]
    tests = [testmodels.read(line) for spec in specs for line in lines(spec)]

    refused = [validation_error(test.model).endswith("(N-VAL-20)") for test in tests]
    assert refused == [not test.must_fail for test in tests]
    assert (len(tests), sum(refused)) == (238, 232)


SPELLED_OUT_DEFAULTS = ("_nhwc", "_neg", "_default_values")
"""Models with an explicit NHWC flag, last axis or unset flag: the argument needs HAL 1.2 or 1.3, the vectors name
what can do without."""


@pytest.mark.parametrize("spec", SPECS)
def test_VAL_2_the_feature_level_is_the_one_that_the_vectors_name(spec: str) -> None:
    named = [line for line in lines(spec) if line["minSupportedVersion"] in testmodels.FEATURE_LEVELS]
    exact = [line for line in named if not any(part in line["name"] for part in SPELLED_OUT_DEFAULTS)]
    tests = [testmodels.read(line) for line in exact if not line["expectFailure"]]

    levels = {test.name: validate_model(test.model) for test in tests}
    assert levels == {test.name: testmodels.FEATURE_LEVELS[test.line["minSupportedVersion"]] for test in tests}
