"""Run and evaluate one test model and its variants: passed, failed with a reason, or skipped with a reason.

A test is skipped only if the test vectors' rules allow it: it needs a newer feature level than the device has; the
device does not support an operation (of a coupled pair: neither model); or the HAL requires INVALID_ARGUMENT, and the
target returned it: operands of unknown size at a control-flow boundary, or outputs that are not fully specified in a
fenced execution. If a target dies, the test that it was running fails. Any other exception is a failure as well.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from nnfmq.hal.errors import (
    DeadObject,
    InvalidArgument,
    MissedDeadline,
    NnfmqError,
    OutputInsufficientSize,
    status_for_error,
)
from nnfmq.hal.types import Model, OperationType, OutputShape, is_scalar
from nnfmq.lab.conformance import testmodels
from nnfmq.lab.conformance.criteria import OutputMismatch, compare_outputs, coupling_mismatches
from nnfmq.lab.conformance.targets import (
    NO_PLANS,
    ExecutionOutput,
    ExecutionRequest,
    ExecutionTarget,
    PlanCounts,
    Prepared,
    TargetMismatch,
    has_specified_outputs,
)
from nnfmq.lab.conformance.testmodels import FEATURE_LEVELS, Array, Line, TestModel, read
from nnfmq.validation import validate_model

MODEL = "model"
"""The kind of the test models themselves; the others are `variants.KINDS`."""
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
_ENDLESS_NS = 1_000_000
_INT8_LEVEL = 4
_UNSPECIFIED_OUTPUT = "outputs not fully specified, rejected with INVALID_ARGUMENT when fenced (N-FEN-1, N-FEN-2)"
_UNSPECIFIED_BOUNDARY = "control-flow boundaries of unknown size, rejected with INVALID_ARGUMENT (N-VAL-20)"
_REJECTED = (_UNSPECIFIED_BOUNDARY, _UNSPECIFIED_OUTPUT)


@dataclass(frozen=True, slots=True)
class TestOutcome:
    """The outcome of one kind of test on a test model: PASSED, or FAILED or SKIPPED with a reason."""

    __test__ = False  # not a test case of pytest

    kind: str
    status: str
    reason: str = ""
    mismatches: tuple[OutputMismatch, ...] = ()


@dataclass(frozen=True, slots=True)
class ConformanceResult:
    """The outcomes of a test model and its variants, the operations and operand types that it uses, and the time."""

    name: str
    spec: str
    matrix_entries: tuple[tuple[str, str], ...]
    outcomes: tuple[TestOutcome, ...]
    duration_ns: int
    dumped: str = ""
    """The file that a failing random graph was written to."""
    compared_steps: int = 0
    """The number of compiled operations that were compared with the interpreter's."""
    plans: PlanCounts = NO_PLANS
    """The plans of the model and its variants, if a runtime prepared them."""

    @property
    def has_failed(self) -> bool:
        """Return True if the test model or one of its variants failed."""
        return any(outcome.status == FAILED for outcome in self.outcomes)


class _Skip(Exception):
    """The test is skipped, for the reason in the message. Does not leave this module."""


class _Declined(_Skip):
    """The device does not support an operation of the model."""


class _Failure(Exception):
    """The test failed, for the reason in the message. Does not leave this module."""

    def __init__(self, *found: OutputMismatch) -> None:
        super().__init__("; ".join(mismatch.reason for mismatch in found))
        self.mismatches = found


def run_test(test: TestModel, target: ExecutionTarget, *, with_variants: bool = True) -> ConformanceResult:
    """Run a test model and its variants, and evaluate the results. Blocks."""
    began_ns, compared_before, plans_before = time.monotonic_ns(), target.compared_steps, target.plans
    model_outcome = _evaluate(MODEL, test, target)
    outcomes = [model_outcome]
    for kind in testmodels.kinds_of(test) if with_variants else ():
        if kind == testmodels.INSUFFICIENT_OUTPUT and not target.allows_short_buffers:
            continue
        # The variants of a skipped model are skipped. Except the int8 form, which must be unsupported as well, unless
        # the HAL requires the model to be rejected.
        skips = model_outcome.status == SKIPPED and (
            kind != testmodels.INT8_COUPLING or model_outcome.reason in _REJECTED
        )
        outcomes.append(TestOutcome(kind, SKIPPED, model_outcome.reason) if skips else _evaluate(kind, test, target))
    spent_ns = time.monotonic_ns() - began_ns
    return ConformanceResult(
        test.name,
        str(test.line["spec"]),
        tuple(matrix_entries(test.line)),
        tuple(outcomes),
        spent_ns,
        compared_steps=target.compared_steps - compared_before,
        plans=target.plans - plans_before,
    )


def matrix_entries(line: Line) -> Iterable[tuple[str, str]]:
    """Return each operation of a test model with each tensor type among its operands, once, sorted."""
    entries: set[tuple[str, str]] = set()
    for graph in (line["main"], *line["referenced"]):
        for operation in graph["operations"]:
            types = {graph["operands"][index]["type"] for index in (*operation["inputs"], *operation["outputs"])}
            entries.update((operation["type"], name) for name in types if name.startswith("TENSOR_"))
    return sorted(entries)


def _evaluate(kind: str, test: TestModel, target: ExecutionTarget) -> TestOutcome:
    try:
        _RUN[kind](test, target)
    except _Skip as skip:
        return TestOutcome(kind, SKIPPED, str(skip))
    except (_Failure, TargetMismatch) as failure:
        return TestOutcome(kind, FAILED, str(failure), failure.mismatches)
    except DeadObject as error:
        target.close()
        return TestOutcome(kind, FAILED, f"the driver died: {error}")
    except NnfmqError as error:
        return TestOutcome(kind, FAILED, f"{status_for_error(error).name}: {error}")
    except Exception as error:  # noqa: BLE001  an internal error of the target fails this test only
        frame = traceback.extract_tb(error.__traceback__)[-1]
        location = f"{frame.filename}:{frame.lineno}"
        return TestOutcome(kind, FAILED, f"{type(error).__name__} escaped at {location}: {error}")
    return TestOutcome(kind, PASSED)


# ------------------------------------------------------------------------------------------------ kinds of tests


def _run_model(test: TestModel, target: ExecutionTarget) -> None:
    _require_level(test, target)
    if test.must_fail:
        _run_failing(test, target)
    elif target.rejects_unspecified_boundaries and _has_unspecified_boundary(test.model):
        _require_rejection(test.model, target)
    else:
        _run_passing(test, target)


def _require_level(test: TestModel, target: ExecutionTarget) -> None:
    needed, has = FEATURE_LEVELS.get(test.line["minSupportedVersion"], 0), target.feature_level
    if needed > has:
        raise _Skip(f"it needs feature level {needed}, the device has {has}")


def _has_unspecified_boundary(model: Model) -> bool:
    try:
        validate_model(model, allow_unspecified_boundaries=True)
    except InvalidArgument:
        return False
    try:
        validate_model(model)
    except InvalidArgument:
        return True
    return False


def _require_rejection(model: Model, target: ExecutionTarget) -> None:
    try:
        with target.prepared(model):
            pass
    except InvalidArgument:
        raise _Skip(_UNSPECIFIED_BOUNDARY) from None
    raise _Failure(
        OutputMismatch("control-flow boundaries of unknown size were accepted; they must be rejected (N-VAL-20)")
    )


def _run_failing(test: TestModel, target: ExecutionTarget) -> None:
    endless = test.model.main.operations[0].type == OperationType.WHILE
    expected_error = MissedDeadline if endless else NnfmqError
    try:
        # An unsupported endless loop is skipped; an invalid model must be rejected by every device.
        with _prepared(test.model, target) if endless else target.prepared(test.model) as prepared:
            _execute(prepared, test, loop_timeout_ns=_ENDLESS_NS if endless else None)
    except DeadObject:
        raise
    except NnfmqError as error:
        if isinstance(error, expected_error):
            return
        wrong = f"the loop does not end: MISSED_DEADLINE is expected, actual {status_for_error(error).name}: {error}"
        raise _Failure(OutputMismatch(wrong)) from error
    raise _Failure(OutputMismatch("preparing or executing it must fail; both succeeded"))


def _run_passing(test: TestModel, target: ExecutionTarget) -> None:
    _compare(test, _executed(test, test.model, target))


def _run_coupled(test: TestModel, target: ExecutionTarget) -> None:
    """Run a uint8 model and its int8 form: both or neither are supported, and outputs differ by 128 (TST-12)."""
    _require_level(test, target)
    if target.feature_level < _INT8_LEVEL:
        raise _Skip(f"int8 was introduced with feature level {_INT8_LEVEL}, the device has {target.feature_level}")
    coupled = read(testmodels.signed(test.line))
    unsigned, signed = _executed_unless_declined(test, target), _executed_unless_declined(coupled, target)
    if isinstance(unsigned, _Declined) and isinstance(signed, _Declined):
        raise unsigned
    if isinstance(unsigned, _Declined):
        raise _Failure(OutputMismatch(f"the int8 model is supported, so the uint8 one must be: {unsigned}"))
    if isinstance(signed, _Declined):
        raise _Failure(OutputMismatch(f"the uint8 model is supported, so this one must be: {signed}"))
    _compare(coupled, signed)
    if mismatches := coupling_mismatches(test, _arrays(test, unsigned), _arrays(coupled, signed)):
        raise _Failure(*mismatches)


def _executed_unless_declined(test: TestModel, target: ExecutionTarget) -> ExecutionOutput | _Declined:
    try:
        return _executed(test, test.model, target)
    except _Declined as declined:
        return declined


def _run_unknown_shapes(test: TestModel, target: ExecutionTarget) -> None:
    executed = _executed(test, testmodels.with_unknown_output_shapes(test.model), target)
    if not executed.shapes:
        raise _Failure(OutputMismatch("no output shapes are reported; the outputs' shapes are unknown in the model"))
    _compare(test, executed)


def _run_short(test: TestModel, target: ExecutionTarget) -> None:
    with _prepared(testmodels.with_unknown_output_shapes(test.model), target) as prepared:
        if target.rejects_unspecified_outputs:
            _require_rejected_execution(prepared, test)
        try:
            prepared.execute(ExecutionRequest(test.inputs, test.expected, short_bytes=1))
        except OutputInsufficientSize as error:
            _check_short(test, error.output_shapes)
        else:
            raise _Failure(OutputMismatch("a buffer one byte short was accepted; OUTPUT_INSUFFICIENT_SIZE is expected"))


def _check_short(test: TestModel, shapes: tuple[OutputShape, ...]) -> None:
    if len(shapes) != len(test.expected):
        raise _Failure(OutputMismatch(f"{len(shapes)} output shapes are reported; expected {len(test.expected)}"))
    found = list(_short_mismatches(test, shapes))
    if found:
        raise _Failure(*found)


def _short_mismatches(test: TestModel, shapes: tuple[OutputShape, ...]) -> Iterator[OutputMismatch]:
    for number, (want, got) in enumerate(zip(test.expected, shapes, strict=True)):
        operand = f"operand {test.model.main.output_indexes[number]}"
        if got.is_sufficient != (number > 0):
            yield OutputMismatch(f"{operand}: expected isSufficient {number > 0}, actual {got.is_sufficient}")
        fits = len(got.dimensions) == want.ndim and all(
            a in (0, w) for a, w in zip(got.dimensions, want.shape, strict=True)
        )
        if got.dimensions and not fits:
            yield OutputMismatch(f"{operand}: expected shape {list(want.shape)}, actual {list(got.dimensions)}")


_RUN = {
    MODEL: _run_model,
    testmodels.UNKNOWN_OUTPUT_SHAPES: _run_unknown_shapes,
    testmodels.INT8_COUPLING: _run_coupled,
    testmodels.INSUFFICIENT_OUTPUT: _run_short,
}


# ------------------------------------------------------------------------------------------------ executing


def _executed(test: TestModel, model: Model, target: ExecutionTarget) -> ExecutionOutput:
    with _prepared(model, target) as prepared:
        if target.rejects_unspecified_outputs and not has_specified_outputs(model):
            _require_rejected_execution(prepared, test)
        return _execute(prepared, test)


def _require_rejected_execution(prepared: Prepared, test: TestModel) -> None:
    try:
        _execute(prepared, test)
    except InvalidArgument:
        raise _Skip(_UNSPECIFIED_OUTPUT) from None
    raise _Failure(
        OutputMismatch("outputs not fully specified were accepted; they must be rejected (N-FEN-1, N-FEN-2)")
    )


@contextmanager
def _prepared(model: Model, target: ExecutionTarget) -> Iterator[Prepared]:
    """Prepare a model, until the block ends. Skips the test if the device does not support the model."""
    with ExitStack() as stack:
        try:
            prepared = stack.enter_context(target.prepared(model))
        except DeadObject:
            raise
        except NnfmqError as error:
            if not target.supports(model):
                raise _Declined(
                    f"the device does not support the model: {status_for_error(error).name}: {error}"
                ) from None
            raise
        yield prepared


def _execute(prepared: Prepared, test: TestModel, loop_timeout_ns: int | None = None) -> ExecutionOutput:
    return prepared.execute(ExecutionRequest(test.inputs, test.expected, loop_timeout_ns=loop_timeout_ns))


def _compare(test: TestModel, executed: ExecutionOutput) -> None:
    """Raise _Failure if outputs are wrong. Shapes need not be reported if all outputs are fully specified."""
    shapes = executed.shapes or tuple(
        OutputShape(_model_dimensions(test, number)) for number in range(len(test.expected))
    )
    found = compare_outputs(test, shapes, _arrays(test, executed))
    if found:
        raise _Failure(*found)


def _arrays(test: TestModel, executed: ExecutionOutput) -> list[Array]:
    """Return the outputs in the expected types and shapes."""
    return [_array(expected, raw) for expected, raw in zip(test.expected, executed.outputs, strict=True)]


def _model_dimensions(test: TestModel, number: int) -> tuple[int, ...]:
    """Return the dimensions of an output in the model, which may be unknown (0)."""
    operand = test.model.main.operands[test.model.main.output_indexes[number]]
    return () if is_scalar(operand.type) else operand.dimensions


def _array(expected: Array, raw: bytes) -> Array:
    return np.frombuffer(raw, expected.dtype, expected.size).reshape(expected.shape)
