"""What passes: AOSP's checkResults (TestHarness.cpp), element by element in double, or by distribution.

    |actual - expected| <= atol + rtol * |expected|

Every element has to pass, a NaN never does, and integers and quantized values are compared as stored. Every difference
is named by output operand and index, with what was expected and what came.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nnfmq.conformance.testmodels import Array, Line, TestModel
from nnfmq.hal.types import OutputShape

SHOWN = 8
"""Differences that are kept of one output; the count says how many there are."""
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
        _complaint(label, want, got, wrong)
        for label, operand, want, got in outputs
        if not operand["isIgnored"] and (wrong := _wrong_elements(test, operand, want, got)).any()
    ]


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


def _wrong_elements(test: TestModel, operand: Line, expected: Array, found: Array) -> Array:
    if operand["type"] == "TENSOR_BOOL8":
        return np.asarray((expected != 0) != (found != 0))
    atol, rtol = tolerances(test, operand["type"])
    want, got = expected.astype(np.float64), found.astype(np.float64)
    with np.errstate(invalid="ignore"):
        return np.asarray(~(np.abs(got - want) <= atol + rtol * np.abs(want)))


def tolerances(test: TestModel, operand_type: str) -> tuple[float, float]:
    """Return atol and rtol for an output of this type."""
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
