"""What passes: AOSP's checkResults (TestHarness.cpp), element by element in double, or by distribution.

    |actual - expected| <= atol + rtol * |expected|

Every element has to pass, a NaN never does, and integers and quantized values are compared as stored. Every difference
is named by output operand and index, with what was expected and what came.

A test model may have criteria of its own, by the type of an output, as AOSP's random graphs have:

    atol, rtol   in place of the usual tolerances
    skipAbove    elements of which more is expected, or infinity, are not judged
    bias, mse    limits of |mean difference| and of the mean squared difference, where 10 elements or more are judged;
                 float differences are divided by max(1, |expected|)
    wrongShare   of booleans, how many may be wrong: this share of all, rounded up
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nnfmq.conformance.testmodels import Array, Criterion, Line, TestModel
from nnfmq.conformance.variants import is_unsigned
from nnfmq.hal.types import OutputShape

SHOWN = 8
"""Differences that are kept of one output; the count says how many there are."""
LEAST_JUDGED = 10
"""Elements from which bias and mean squared error are limited."""
_COARSE = (5 * 2**-10, 5 * 2**-10)
_FINE = (1e-5, 5 * 2**-23)


@dataclass(frozen=True, slots=True)
class Difference:
    """One element that is wrong: its output operand, its index, and the two values, as numbers to be read."""

    operand: str
    index: tuple[int, ...]
    expected: str
    actual: str


@dataclass(frozen=True, slots=True)
class Complaint:
    """What is wrong with one output, in a sentence, and its first differences."""

    reason: str
    differences: tuple[Difference, ...] = ()


def complaints(test: TestModel, shapes: Sequence[OutputShape], actual: Sequence[Array]) -> list[Complaint]:
    """Return what is wrong with an execution; empty = passed. `actual` have the expected shapes."""
    wrong_shapes = shape_complaints(test, shapes)
    return wrong_shapes or value_complaints(test, actual)


def shape_complaints(test: TestModel, shapes: Sequence[OutputShape]) -> list[Complaint]:
    """Return the outputs whose reported shape is not the expected one."""
    if len(shapes) != len(test.expected):
        return [Complaint(f"{len(shapes)} output shapes are reported; expected {len(test.expected)}")]
    pairs = zip(_labels(test), test.expected, shapes, strict=True)
    return [
        Complaint(f"{label}: expected shape {list(want.shape)}, actual {list(got.dimensions)}")
        for label, want, got in pairs
        if got.dimensions != want.shape
    ]


def value_complaints(test: TestModel, actual: Sequence[Array]) -> list[Complaint]:
    """Return the outputs with wrong elements."""
    tolerance = test.line["expectedMultinomialDistributionTolerance"]
    if tolerance > 0:
        return list(_wrong_distribution(test, actual[0], tolerance))
    outputs = zip(_labels(test), test.output_operands, test.expected, actual, strict=True)
    return [
        found
        for label, operand, want, got in outputs
        if not operand["isIgnored"]
        for found in _judged(label, _criterion(test, operand["type"]), want, got, operand["type"])
    ]


def coupling_complaints(test: TestModel, unsigned: Sequence[Array], signed: Sequence[Array]) -> list[Complaint]:
    """Return the outputs in which a uint8 model and its int8 form differ, beside the 128 between their codes."""
    outputs = zip(_labels(test), test.output_operands, unsigned, signed, strict=True)
    found = []
    for label, operand, first, second in outputs:
        want = (first ^ 0x80).view(np.int8) if is_unsigned(operand) else first
        wrong = np.asarray((want != second) & ~((want != want) & (second != second)))
        if wrong.any() and not operand["isIgnored"]:
            found.append(_complaint(f"{label}, of uint8 less 128 and of int8", want, second, wrong))
    return found


def _judged(label: str, rule: Criterion, want: Array, got: Array, type: str) -> Iterator[Complaint]:
    if type == "TENSOR_BOOL8":
        wrong = np.asarray((want != 0) != (got != 0))
        if np.count_nonzero(wrong) > math.ceil(rule.wrong_share * want.size):
            yield _complaint(label, want, got, wrong)
        return
    expected = want.astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinities, which make NaN, and that never passes
        differences = got.astype(np.float64) - expected
        close = np.abs(differences) <= rule.atol + rule.rtol * np.abs(expected)
    judged = np.abs(expected) <= rule.skip_above if rule.skip_above < math.inf else np.ones(want.shape, bool)
    wrong = np.asarray(judged & ~close)
    if wrong.any():
        yield _complaint(label, want, got, wrong)
    elif np.count_nonzero(judged) >= LEAST_JUDGED:
        scale = np.maximum(1.0, np.abs(expected[judged])) if want.dtype.kind == "f" else 1.0
        yield from _outside_means(label, rule, differences[judged] / scale)


def _outside_means(label: str, rule: Criterion, differences: Array) -> Iterator[Complaint]:
    bias, mse = float(np.mean(differences)), float(np.mean(np.square(differences)))
    if not abs(bias) <= rule.bias:
        yield Complaint(f"{label}: the mean difference is {bias:.3g}, at most {rule.bias:.3g} is allowed")
    if not mse <= rule.mse:
        yield Complaint(f"{label}: the mean squared difference is {mse:.3g}, at most {rule.mse:.3g} is allowed")


def _labels(test: TestModel) -> list[str]:
    """Return what an output is called: the operand's number in the main subgraph, and its name."""
    operands = zip(test.model.main.output_indexes, test.output_operands, strict=True)
    return [f"operand {index} ({operand['name']})" for index, operand in operands]


def _complaint(label: str, want: Array, got: Array, wrong: Array) -> Complaint:
    places = np.argwhere(np.atleast_1d(wrong))
    differences = tuple(_difference(label, want, got, tuple(map(int, place))) for place in places[:SHOWN])
    first = differences[0]
    return Complaint(
        f"{label}, index {list(first.index)}: expected {first.expected}, actual {first.actual}"
        f" ({len(places)} of {want.size} elements are wrong)",
        differences,
    )


def _difference(label: str, want: Array, got: Array, place: tuple[int, ...]) -> Difference:
    expected, actual = np.atleast_1d(want)[place], np.atleast_1d(got)[place]
    return Difference(label, place if want.ndim else (), str(expected), str(actual))


def _criterion(test: TestModel, operand_type: str) -> Criterion:
    if operand_type in test.criteria:
        return test.criteria[operand_type]
    return Criterion() if operand_type == "TENSOR_BOOL8" else Criterion(*tolerances(test, operand_type))


def tolerances(test: TestModel, operand_type: str) -> tuple[float, float]:
    """Return the usual atol and rtol for an output of this type."""
    if operand_type == "TENSOR_FLOAT16":
        return _COARSE
    if operand_type == "TENSOR_FLOAT32":
        return _COARSE if test.line["isRelaxed"] or _has_half(test.line) else _FINE
    return (3 if "mobilenet" in test.name and "QUANT8" in operand_type else 1), 0


def _has_half(line: Line) -> bool:
    graphs = (line["main"], *line["referenced"])
    return any(operand["type"] == "TENSOR_FLOAT16" for graph in graphs for operand in graph["operands"])


def _wrong_distribution(test: TestModel, samples: Array, tolerance: float) -> Iterator[Complaint]:
    """Compare how often each class was drawn with its probability, the softmax of the one input."""
    (logits,) = test.inputs
    assert logits is not None, "the one input of RANDOM_MULTINOMIAL is never omitted"
    weights = np.exp(logits.astype(np.float64).reshape(-1))
    for drawn, probability in enumerate(weights / math.fsum(weights)):
        share = float(np.mean(samples == drawn))
        if not abs(share - probability) <= tolerance:
            label = _labels(test)[0]
            reason = f"{label}, class {drawn}: expected a share of {probability:.6f} ± {tolerance}, actual {share:.6f}"
            yield Complaint(reason, (Difference(label, (drawn,), f"share {probability:.6f}", f"{share:.6f}"),))
