"""Test models and their variants with targets that violate one rule each, and with drivers that die."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import model_lines

from nnfmq.cli import conformance as command
from nnfmq.hal.errors import GeneralFailure, OutputInsufficientSize
from nnfmq.hal.types import Model, OperandType, OutputShape
from nnfmq.lab.conformance import testmodels
from nnfmq.lab.conformance.cases import FAILED, MODEL, PASSED, SKIPPED, ConformanceResult, run_test
from nnfmq.lab.conformance.driver_targets import ALL_PATHS, DRIVER_PATHS, Driver
from nnfmq.lab.conformance.runner import PATHS, open_target
from nnfmq.lab.conformance.targets import (
    INTERPRETER_LEVEL,
    CompilingEngine,
    ExecutionOutput,
    ExecutionRequest,
    ExecutionTarget,
    Interpreter,
    Prepared,
)

UINT8, INT8 = OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED
SUM = np.float32([11, 22, 33]).tobytes()
Execute = Callable[[ExecutionRequest], ExecutionOutput]


class Fake(Interpreter):
    """A target that returns the outputs of a given function."""

    def __init__(self, execute: Execute, level: int = 8, rejects_all: bool = False) -> None:
        self.execute = execute
        self.feature_level = level
        self.rejects_all = rejects_all

    @contextmanager
    def prepared(self, model: Model) -> Iterator[Prepared]:
        if self.rejects_all:
            raise GeneralFailure("ADD is not supported")
        yield self

    def supports(self, model: Model) -> bool:
        return not self.rejects_all


def returning(shapes: tuple[OutputShape, ...]) -> Execute:
    return lambda execution: ExecutionOutput(shapes, (SUM,))


def outcomes(result: ConformanceResult) -> dict[str, str]:
    return {outcome.kind: outcome.status for outcome in result.outcomes}


def reasons(result: ConformanceResult) -> dict[str, str]:
    return {outcome.kind: outcome.reason for outcome in result.outcomes}


def run_add(target: Any, **fields: Any) -> ConformanceResult:
    return run_test(testmodels.read(model_lines.add() | fields), target)


@pytest.fixture(scope="module")
def opened(request: pytest.FixtureRequest) -> Iterator[ExecutionTarget]:
    """The reference device over one execution path, with one driver for all tests of the path."""
    with closing(open_target(request.param, "reference", "embedded")) as target:
        assert target.feature_level == INTERPRETER_LEVEL  # connects, so that the first test is not charged for it
        yield target


@pytest.fixture
def target(opened: ExecutionTarget) -> Iterator[ExecutionTarget]:
    yield opened
    if isinstance(opened, CompilingEngine):
        opened.close()  # stops the thread pool


@pytest.fixture
def path(request: pytest.FixtureRequest) -> str:
    """Return the path of `target`."""
    return str(request.node.callspec.params["opened"])


def on(*paths: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("opened", paths, indirect=True)


@on(*(path for path in PATHS if not path.endswith("fenced")))
def test_TST_5_a_model_and_its_variants_pass_on_every_path(target: ExecutionTarget, path: str) -> None:
    result = run_add(target)
    # A driver-managed buffer is never too small.
    kinds = [
        MODEL,
        *testmodels.KINDS[:1],
        *([] if path.startswith("memory-domain") else [testmodels.INSUFFICIENT_OUTPUT]),
    ]
    assert outcomes(result) == dict.fromkeys(kinds, PASSED)


@on(*PATHS)
def test_wrong_values_are_a_failure_on_every_path(target: ExecutionTarget) -> None:
    result = run_test(testmodels.read(model_lines.add("add", (11, 22, 34))), target)
    assert outcomes(result)[MODEL] == FAILED


@on(*PATHS)
def test_a_model_that_must_fail_but_succeeds_is_a_failure(target: ExecutionTarget) -> None:
    result = run_add(target, expectFailure=True)
    assert reasons(result) == {MODEL: "preparing or executing it must fail; both succeeded"}


@on("fenced", "memory-domain-fenced")
def test_TST_5_in_fenced_executions_a_model_passes_and_unknown_shapes_are_skipped(target: ExecutionTarget) -> None:
    found = outcomes(run_add(target))
    assert found[MODEL] == PASSED
    assert found[testmodels.UNKNOWN_OUTPUT_SHAPES] == SKIPPED


def test_the_command_has_every_path() -> None:
    assert command.PATHS == PATHS


def test_shapes_may_be_unreported_only_if_the_model_specifies_them() -> None:
    result = run_add(Fake(returning(())))
    assert outcomes(result)[MODEL] == PASSED
    assert reasons(result)[testmodels.UNKNOWN_OUTPUT_SHAPES].startswith("no output shapes are reported")


def test_a_short_buffer_must_be_rejected() -> None:
    result = run_add(Fake(returning((OutputShape((3,)),))))
    assert "OUTPUT_INSUFFICIENT_SIZE is expected" in reasons(result)[testmodels.INSUFFICIENT_OUTPUT]


@pytest.mark.parametrize(
    ("shape", "mismatch"),
    [
        (OutputShape((3,), True), "operand 3: expected isSufficient False, actual True"),
        (OutputShape((4,), False), "operand 3: expected shape [3], actual [4]"),
        (OutputShape((0,), False), ""),
    ],
)
def test_the_shapes_reported_for_a_short_buffer_are_checked(shape: OutputShape, mismatch: str) -> None:
    def reject(execution: ExecutionRequest) -> ExecutionOutput:
        raise OutputInsufficientSize("too small", (shape,))

    assert reasons(run_add(Fake(reject)))[testmodels.INSUFFICIENT_OUTPUT] == mismatch


def test_a_model_that_needs_a_newer_device_is_skipped_with_all_its_variants() -> None:
    result = run_add(Fake(returning(()), level=3), minSupportedVersion="V1_3")
    assert set(outcomes(result).values()) == {SKIPPED}
    assert set(reasons(result).values()) == {"it needs feature level 4, the device has 3"}


def test_a_model_that_the_device_does_not_support_is_skipped() -> None:
    result = run_add(Fake(returning(()), rejects_all=True))
    assert reasons(result)[MODEL] == "the device does not support the model: GENERAL_FAILURE: ADD is not supported"
    assert outcomes(result)[MODEL] == SKIPPED


def test_an_unexpected_exception_is_a_failure_with_its_location() -> None:
    def crash(execution: ExecutionRequest) -> ExecutionOutput:
        raise ZeroDivisionError("of a kernel")

    result = run_add(Fake(crash))
    assert outcomes(result)[MODEL] == FAILED
    assert "ZeroDivisionError escaped at" in reasons(result)[MODEL]


class _Dying(Driver):
    """A driver that is killed once, after the first model is prepared."""

    is_alive = True

    @contextmanager
    def prepared(self, model: Model) -> Iterator[Prepared]:
        with super().prepared(model) as prepared:
            if self.is_alive:
                self.is_alive = False
                os.kill(self.worker_pid, signal.SIGKILL)
            yield prepared


@pytest.mark.parametrize("path", ["sync", "async", "reusable", "burst", "aidl-burst"])
def test_a_driver_that_dies_fails_its_test_and_the_next_gets_a_new_one(path: str) -> None:
    with closing(_Dying("reference", "embedded", path)) as target:
        result = run_add(target)
    assert reasons(result)[MODEL].startswith("the driver died: ")
    assert outcomes(result) == {
        MODEL: FAILED,
        testmodels.UNKNOWN_OUTPUT_SHAPES: PASSED,
        testmodels.INSUFFICIENT_OUTPUT: PASSED,
    }


class _Only(Interpreter):
    """A target that supports only tensors of one type."""

    def __init__(self, type: OperandType) -> None:
        self.type = type

    @contextmanager
    def prepared(self, model: Model) -> Iterator[Prepared]:
        if not self.supports(model):
            raise GeneralFailure(f"only {self.type.name}")
        with super().prepared(model) as prepared:
            yield prepared

    def supports(self, model: Model) -> bool:
        return all(operand.type in (self.type, OperandType.INT32) for operand in model.main.operands)


def quantized_add() -> testmodels.TestModel:
    line = model_lines.add()
    for operand, data in zip(line["main"]["operands"], ["AQID", "ChQe", None, "CxYh"], strict=True):
        if data is not None:
            operand.update(type="TENSOR_QUANT8_ASYMM", scale=1.0, data=data)
    return testmodels.read(line)


def test_TST_12_a_pair_passes_if_both_models_do() -> None:
    assert outcomes(run_test(quantized_add(), Interpreter()))[testmodels.INT8_COUPLING] == PASSED


def test_TST_12_N_BAS_4_int8_must_be_supported_if_uint8_is() -> None:
    result = run_test(quantized_add(), _Only(UINT8))
    assert outcomes(result)[MODEL] == PASSED
    assert reasons(result)[testmodels.INT8_COUPLING].startswith("the uint8 model is supported, so this one must be")


@on("fenced")
def test_N_FEN_1_unspecified_outputs_are_skipped_after_a_fenced_execution_rejects_them(
    target: ExecutionTarget,
) -> None:
    result = run_add(target)
    assert outcomes(result) == {
        MODEL: PASSED,
        testmodels.UNKNOWN_OUTPUT_SHAPES: SKIPPED,
        testmodels.INSUFFICIENT_OUTPUT: SKIPPED,
    }
    assert "N-FEN-1" in reasons(result)[testmodels.UNKNOWN_OUTPUT_SHAPES]


class _LenientFenced(Interpreter):
    """The interpreter, which accepts unspecified outputs, in place of fenced executions."""

    rejects_unspecified_outputs = True


def test_fenced_executions_must_reject_unspecified_outputs() -> None:
    result = run_add(_LenientFenced())
    assert outcomes(result)[MODEL] == PASSED
    for kind in (testmodels.UNKNOWN_OUTPUT_SHAPES, testmodels.INSUFFICIENT_OUTPUT):
        assert "they must be rejected (N-FEN-1, N-FEN-2)" in reasons(result)[kind]


def test_TST_12_N_BAS_4_uint8_must_be_supported_if_int8_is() -> None:
    result = run_test(quantized_add(), _Only(INT8))
    assert outcomes(result)[MODEL] == SKIPPED
    assert reasons(result)[testmodels.INT8_COUPLING].startswith("the int8 model is supported, so the uint8 one must be")


def test_TST_12_a_device_may_support_neither() -> None:
    result = run_test(quantized_add(), _Only(OperandType.TENSOR_FLOAT32))
    assert set(outcomes(result).values()) == {SKIPPED}


class _OneMore(Interpreter):
    """A target whose int8 results are too high by one, which is within the tolerance."""

    @contextmanager
    def prepared(self, model: Model) -> Iterator[Prepared]:
        with super().prepared(model) as prepared:
            yield _AddOne(prepared) if INT8 in {operand.type for operand in model.main.operands} else prepared


@dataclass(frozen=True)
class _AddOne:
    prepared: Prepared

    def execute(self, execution: ExecutionRequest) -> ExecutionOutput:
        executed = self.prepared.execute(execution)
        return replace(executed, outputs=tuple(bytes(q + 1 for q in raw) for raw in executed.outputs))


def test_TST_12_outputs_that_do_not_differ_by_128_fail_even_within_the_tolerance() -> None:
    result = run_test(quantized_add(), _OneMore())
    assert outcomes(result)[MODEL] == PASSED
    assert reasons(result)[testmodels.INT8_COUPLING] == (
        "operand 3 (c), of uint8 less 128 and of int8, index [0]: expected -117, actual -116"
        " (3 of 3 elements are wrong)"
    )


def test_TST_12_int8_is_skipped_on_a_device_with_an_older_feature_level() -> None:
    target = Interpreter()
    target.feature_level = 3
    result = run_test(quantized_add(), target)
    assert reasons(result) == {
        MODEL: "",
        testmodels.UNKNOWN_OUTPUT_SHAPES: "",
        testmodels.INSUFFICIENT_OUTPUT: "",
        testmodels.INT8_COUPLING: "int8 was introduced with feature level 4, the device has 3",
    }


@pytest.mark.parametrize("operation", ["CAST", "PAD_V2", "HASHTABLE_LOOKUP", "LSH_PROJECTION", "QUANTIZED_16BIT_LSTM"])
def test_SUP_5_operations_whose_int8_form_differs_or_is_missing_are_not_coupled(operation: str) -> None:
    line = quantized_add().line
    line["main"]["operations"][0]["type"] = operation
    assert not testmodels.is_coupled(line)


@on(*DRIVER_PATHS, ALL_PATHS)
def test_control_flow_boundaries_of_unknown_size_are_skipped_after_a_driver_rejects_them(
    target: ExecutionTarget, data_dir: Path
) -> None:
    (_, line), *_ = testmodels.lines(data_dir / "vts" / "V1_3_cts_only" / "while_fib_unknown_rank.jsonl.gz")
    result = run_test(testmodels.read(line), target)
    assert outcomes(result)[MODEL] == SKIPPED
    assert "N-VAL-20" in reasons(result)[MODEL]


@on("sync")
def test_TST_12_a_pair_that_the_hal_rejects_is_skipped_in_both_forms(target: ExecutionTarget, data_dir: Path) -> None:
    folder = data_dir / "vts" / "V1_3_cts_only"
    tests = (testmodels.read(line) for path in sorted(folder.glob("*.gz")) for _, line in testmodels.lines(path))
    pair = next(test for test in tests if testmodels.INT8_COUPLING in testmodels.kinds_of(test))
    result = run_test(pair, target)
    assert outcomes(result)[MODEL] == outcomes(result)[testmodels.INT8_COUPLING] == SKIPPED
    assert "N-VAL-20" in reasons(result)[testmodels.INT8_COUPLING]


class _Lenient(Interpreter):
    """The interpreter, which accepts boundaries of unknown size, in place of a driver."""

    rejects_unspecified_boundaries = True


def test_a_driver_that_accepts_boundaries_of_unknown_size_fails(data_dir: Path) -> None:
    (_, line), *_ = testmodels.lines(data_dir / "vts" / "V1_3_cts_only" / "while_fib_unknown_rank.jsonl.gz")
    assert "they must be rejected (N-VAL-20)" in reasons(run_test(testmodels.read(line), _Lenient()))[MODEL]


@on(*PATHS)
def test_an_endless_loop_must_miss_its_deadline(target: ExecutionTarget, data_dir: Path) -> None:
    lines = testmodels.lines(data_dir / "vts" / "V1_3" / "while_infinite_loop.jsonl.gz")
    results = [run_test(testmodels.read(line), target) for _, line in lines]
    assert {outcome.status for result in results for outcome in result.outcomes} == {PASSED}


def test_an_endless_loop_that_the_device_does_not_support_is_skipped(data_dir: Path) -> None:
    (_, line), *_ = testmodels.lines(data_dir / "vts" / "V1_3" / "while_infinite_loop.jsonl.gz")
    with closing(open_target("sync", "sample-minimal", "embedded")) as target:
        (outcome,) = run_test(testmodels.read(line), target).outcomes
    assert outcome.status == SKIPPED
    assert outcome.reason.startswith("the device does not support the model")
