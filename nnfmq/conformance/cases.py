"""One test model and what is derived from it, judged: passed, failed with a reason, or skipped with a reason.

A test is skipped only where the vectors' rules allow it: it needs a newer feature level than the device has, the device
declines an operation (of a coupled pair: of both models), or the HAL has it refused with INVALID_ARGUMENT, and it was:
operands of unknown size at a control-flow boundary, or outputs that are not fully specified in a fenced execution. A
target that dies fails the test that it was running. Anything else that is raised is a failure, too.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from nnfmq.conformance import variants
from nnfmq.conformance.criteria import Complaint, complaints, coupling_complaints
from nnfmq.conformance.targets import Answered, Asked, Prepared, Target
from nnfmq.conformance.testmodels import FEATURE_LEVELS, Array, Line, TestModel, read
from nnfmq.hal.errors import (
    DeadObject,
    InvalidArgument,
    MissedDeadline,
    NnfmqError,
    OutputInsufficientSize,
    status_for_error,
)
from nnfmq.hal.types import Model, OperationType, OutputShape, is_scalar
from nnfmq.validation import validate_model

MODEL = "model"
"""The kind of the data's own test models; the others are `variants.KINDS`."""
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
_ENDLESS_NS = 1_000_000
_INT8_LEVEL = 4
_UNSPECIFIED_OUTPUT = "outputs not fully specified, refused with INVALID_ARGUMENT when fenced (N-FEN-1, N-FEN-2)"
_UNSPECIFIED_BOUNDARY = "control-flow boundaries of unknown size, refused with INVALID_ARGUMENT (N-VAL-20)"
_REFUSED = (_UNSPECIFIED_BOUNDARY, _UNSPECIFIED_OUTPUT)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came out of one test of one kind; the reason says why it did not pass."""

    kind: str
    outcome: str
    reason: str = ""
    complaints: tuple[Complaint, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """All verdicts on one test model, the operations and operand types that it uses, and how long it took."""

    name: str
    spec: str
    cells: tuple[tuple[str, str], ...]
    verdicts: tuple[Verdict, ...]
    duration_ns: int
    dumped: str = ""
    """The file that a failing random graph was written to."""

    @property
    def has_failed(self) -> bool:
        """Return True if the test model or one of its variants failed."""
        return any(verdict.outcome == FAILED for verdict in self.verdicts)


class _Skip(Exception):
    """Raised inside this module with the reason."""


class _Declined(_Skip):
    """The device declines an operation of the model."""


class _Failure(Exception):
    """Raised inside this module with what is wrong."""

    def __init__(self, *found: Complaint) -> None:
        super().__init__("; ".join(complaint.reason for complaint in found))
        self.complaints = found


def run_test(test: TestModel, target: Target) -> Result:
    """Run a test model and its variants; blocks until all are judged."""
    began_ns = time.monotonic_ns()
    own = _judged(MODEL, test, target)
    verdicts = [own]
    for kind in variants.kinds_of(test):
        if kind == variants.INSUFFICIENT_OUTPUT and not target.can_be_short:
            continue
        # Of a pair, both are declined or none; but what the HAL has refused is refused in either form.
        skips = own.outcome == SKIPPED and (kind != variants.INT8_COUPLING or own.reason in _REFUSED)
        verdicts.append(Verdict(kind, SKIPPED, own.reason) if skips else _judged(kind, test, target))
    spent_ns = time.monotonic_ns() - began_ns
    return Result(test.name, str(test.line["spec"]), tuple(cells(test.line)), tuple(verdicts), spent_ns)


def cells(line: Line) -> Iterable[tuple[str, str]]:
    """Return each operation of a test model with each tensor type among its operands, once, sorted."""
    found: set[tuple[str, str]] = set()
    for graph in (line["main"], *line["referenced"]):
        for operation in graph["operations"]:
            types = {graph["operands"][index]["type"] for index in (*operation["inputs"], *operation["outputs"])}
            found.update((operation["type"], name) for name in types if name.startswith("TENSOR_"))
    return sorted(found)


def _judged(kind: str, test: TestModel, target: Target) -> Verdict:
    try:
        _RUN[kind](test, target)
    except _Skip as skip:
        return Verdict(kind, SKIPPED, str(skip))
    except _Failure as failure:
        return Verdict(kind, FAILED, str(failure), failure.complaints)
    except DeadObject as error:
        target.close()
        return Verdict(kind, FAILED, f"the driver died: {error}")
    except NnfmqError as error:
        return Verdict(kind, FAILED, f"{status_for_error(error).name}: {error}")
    except Exception as error:  # noqa: BLE001  a bug in what is tested fails this test, and the others go on
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename}:{place.lineno}"
        return Verdict(kind, FAILED, f"{type(error).__name__} escaped at {where}: {error}")
    return Verdict(kind, PASSED)


# ------------------------------------------------------------------------------------------------ the kinds


def _run_model(test: TestModel, target: Target) -> None:
    _require_level(test, target)
    if test.must_fail:
        _run_failing(test, target)
    elif target.refuses_unspecified_boundaries and _has_unspecified_boundary(test.model):
        _require_refusal(test.model, target)
    else:
        _run_passing(test, target)


def _require_level(test: TestModel, target: Target) -> None:
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


def _require_refusal(model: Model, target: Target) -> None:
    try:
        with target.prepared(model):
            pass
    except InvalidArgument:
        raise _Skip(_UNSPECIFIED_BOUNDARY) from None
    raise _Failure(Complaint("control-flow boundaries of unknown size were accepted; N-VAL-20 has them refused"))


def _run_failing(test: TestModel, target: Target) -> None:
    endless = test.model.main.operations[0].type == OperationType.WHILE
    wanted = MissedDeadline if endless else NnfmqError
    try:
        # Declining an endless loop is no missed deadline; a model that is invalid must be refused by every device.
        with _prepared(test.model, target) if endless else target.prepared(test.model) as prepared:
            _execute(prepared, test, loop_timeout_ns=_ENDLESS_NS if endless else None)
    except DeadObject:
        raise
    except NnfmqError as error:
        if isinstance(error, wanted):
            return
        wrong = f"the loop never ends: MISSED_DEADLINE is expected, actual {status_for_error(error).name}: {error}"
        raise _Failure(Complaint(wrong)) from error
    raise _Failure(Complaint("preparing or executing it must fail; both succeeded"))


def _run_passing(test: TestModel, target: Target) -> None:
    _compare(test, _answered(test, test.model, target))


def _run_coupled(test: TestModel, target: Target) -> None:
    """Run a uint8 model and its int8 form: both are supported or neither, and their outputs are 128 apart (TST-12)."""
    _require_level(test, target)
    if target.feature_level < _INT8_LEVEL:
        raise _Skip(f"int8 came with feature level {_INT8_LEVEL}, the device has {target.feature_level}")
    coupled = read(variants.signed(test.line))
    unsigned, signed = _answered_unless_declined(test, target), _answered_unless_declined(coupled, target)
    if isinstance(unsigned, _Declined) and isinstance(signed, _Declined):
        raise unsigned
    if isinstance(unsigned, _Declined):
        raise _Failure(Complaint(f"the int8 model is supported, so the uint8 one must be: {unsigned}"))
    if isinstance(signed, _Declined):
        raise _Failure(Complaint(f"the uint8 model is supported, so this one must be: {signed}"))
    _compare(coupled, signed)
    if apart := coupling_complaints(test, _arrays(test, unsigned), _arrays(coupled, signed)):
        raise _Failure(*apart)


def _answered_unless_declined(test: TestModel, target: Target) -> Answered | _Declined:
    try:
        return _answered(test, test.model, target)
    except _Declined as declined:
        return declined


def _run_unknown_shapes(test: TestModel, target: Target) -> None:
    answered = _answered(test, variants.with_unknown_output_shapes(test.model), target)
    if not answered.shapes:
        raise _Failure(Complaint("no output shapes are reported; the outputs' shapes are unknown in the model"))
    _compare(test, answered)


def _run_short(test: TestModel, target: Target) -> None:
    with _prepared(variants.with_unknown_output_shapes(test.model), target) as prepared:
        if target.refuses_unspecified_outputs:
            _require_refused_execution(prepared, test)
        try:
            prepared.execute(Asked(test.inputs, test.expected, short_bytes=1))
        except OutputInsufficientSize as error:
            _check_short(test, error.output_shapes)
        else:
            raise _Failure(Complaint("a buffer one byte short was accepted; OUTPUT_INSUFFICIENT_SIZE is expected"))


def _check_short(test: TestModel, shapes: tuple[OutputShape, ...]) -> None:
    if len(shapes) != len(test.expected):
        raise _Failure(Complaint(f"{len(shapes)} output shapes are reported; expected {len(test.expected)}"))
    found = list(_short_complaints(test, shapes))
    if found:
        raise _Failure(*found)


def _short_complaints(test: TestModel, shapes: tuple[OutputShape, ...]) -> Iterator[Complaint]:
    for number, (want, got) in enumerate(zip(test.expected, shapes, strict=True)):
        operand = f"operand {test.model.main.output_indexes[number]}"
        if got.is_sufficient != (number > 0):
            yield Complaint(f"{operand}: expected isSufficient {number > 0}, actual {got.is_sufficient}")
        fits = len(got.dimensions) == want.ndim and all(
            a in (0, w) for a, w in zip(got.dimensions, want.shape, strict=True)
        )
        if got.dimensions and not fits:
            yield Complaint(f"{operand}: expected shape {list(want.shape)}, actual {list(got.dimensions)}")


_RUN = {
    MODEL: _run_model,
    variants.UNKNOWN_OUTPUT_SHAPES: _run_unknown_shapes,
    variants.INT8_COUPLING: _run_coupled,
    variants.INSUFFICIENT_OUTPUT: _run_short,
}


# ------------------------------------------------------------------------------------------------ executing


def _answered(test: TestModel, model: Model, target: Target) -> Answered:
    with _prepared(model, target) as prepared:
        if target.refuses_unspecified_outputs and not _has_specified_outputs(model):
            _require_refused_execution(prepared, test)
        return _execute(prepared, test)


def _has_specified_outputs(model: Model) -> bool:
    outputs = (model.main.operands[index] for index in model.main.output_indexes)
    return all(is_scalar(output.type) or (output.dimensions and 0 not in output.dimensions) for output in outputs)


def _require_refused_execution(prepared: Prepared, test: TestModel) -> None:
    try:
        _execute(prepared, test)
    except InvalidArgument:
        raise _Skip(_UNSPECIFIED_OUTPUT) from None
    raise _Failure(Complaint("outputs not fully specified were accepted; N-FEN-1 and N-FEN-2 have them refused"))


@contextmanager
def _prepared(model: Model, target: Target) -> Iterator[Prepared]:
    """Prepare a model for the length of a `with`; where the device declines it, the test is skipped."""
    with ExitStack() as stack:
        try:
            prepared = stack.enter_context(target.prepared(model))
        except DeadObject:
            raise
        except NnfmqError as error:
            if not target.supports(model):
                raise _Declined(f"the device declines the model: {status_for_error(error).name}: {error}") from None
            raise
        yield prepared


def _execute(prepared: Prepared, test: TestModel, loop_timeout_ns: int | None = None) -> Answered:
    return prepared.execute(Asked(test.inputs, test.expected, loop_timeout_ns=loop_timeout_ns))


def _compare(test: TestModel, answered: Answered) -> None:
    """Raise what is wrong; where outputs were fully specified, no shapes may be reported at all."""
    shapes = answered.shapes or tuple(OutputShape(_stated(test, number)) for number in range(len(test.expected)))
    found = complaints(test, shapes, _arrays(test, answered))
    if found:
        raise _Failure(*found)


def _arrays(test: TestModel, answered: Answered) -> list[Array]:
    """Return the outputs in the expected types and shapes."""
    return [_array(expected, raw) for expected, raw in zip(test.expected, answered.outputs, strict=True)]


def _stated(test: TestModel, number: int) -> tuple[int, ...]:
    """Return the dimensions that the model states of an output; an unknown one is not an answer."""
    operand = test.model.main.operands[test.model.main.output_indexes[number]]
    return () if is_scalar(operand.type) else operand.dimensions


def _array(expected: Array, raw: bytes) -> Array:
    return np.frombuffer(raw, expected.dtype, expected.size).reshape(expected.shape)
