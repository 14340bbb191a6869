"""Comparison of outputs with expected outputs, as AOSP's checkResults (TestHarness.cpp): by element or distribution.

    |actual - expected| <= atol + rtol * |expected|

is evaluated in float64. All elements must pass; NaN never passes; integers and quantized values are compared as stored.
Each mismatch names the output operand and the index, with the expected and the actual value.

A test model may specify other criteria for each type of output, as AOSP's random graphs do:

    atol, rtol   in place of the usual tolerances
    skipAbove    elements whose expected value is larger, or infinite, are not compared
    bias, mse    limits of |mean difference| and of the mean squared difference, if 10 or more elements are compared;
                 float differences are divided by max(1, |expected|)
    wrongShare   the share of boolean elements that may be wrong, rounded up
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nnfmq.hal.types import Model, OperandType, OutputShape
from nnfmq.lab.conformance.testmodels import Array, Criterion, Line, TestModel, is_unsigned

MAX_REPORTED = 8
"""Mismatching elements of one output that are reported; the message has the number of all."""
MIN_COMPARED_ELEMENTS = 10
"""Bias and mean squared error are evaluated from this number of elements."""
_COARSE = (5 * 2**-10, 5 * 2**-10)
_FINE = (1e-5, 5 * 2**-23)


@dataclass(frozen=True, slots=True)
class ElementMismatch:
    """A wrong element: its output operand, its index, and both values in decimal."""

    operand: str
    index: tuple[int, ...]
    expected: str
    actual: str


@dataclass(frozen=True, slots=True)
class OutputMismatch:
    """The reason why an output is wrong, and its first wrong elements."""

    reason: str
    differences: tuple[ElementMismatch, ...] = ()


def compare_outputs(test: TestModel, shapes: Sequence[OutputShape], actual: Sequence[Array]) -> list[OutputMismatch]:
    """Return the mismatches of an execution; none if it passed. `actual` have the expected shapes."""
    wrong_shapes = shape_mismatches(test, shapes)
    return wrong_shapes or value_mismatches(test, actual)


def shape_mismatches(test: TestModel, shapes: Sequence[OutputShape]) -> list[OutputMismatch]:
    """Return the outputs whose reported shape is not the expected one."""
    if len(shapes) != len(test.expected):
        return [OutputMismatch(f"{len(shapes)} output shapes are reported; expected {len(test.expected)}")]
    pairs = zip(_labels(test), test.expected, shapes, strict=True)
    return [
        OutputMismatch(f"{label}: expected shape {list(want.shape)}, actual {list(got.dimensions)}")
        for label, want, got in pairs
        if got.dimensions != want.shape
    ]


def value_mismatches(test: TestModel, actual: Sequence[Array]) -> list[OutputMismatch]:
    """Return the outputs with wrong elements."""
    tolerance = test.line["expectedMultinomialDistributionTolerance"]
    if tolerance > 0:
        return list(_wrong_distribution(test, actual[0], tolerance))
    outputs = zip(_labels(test), test.output_operands, test.expected, actual, strict=True)
    return [
        found
        for label, operand, want, got in outputs
        if not operand["isIgnored"]
        for found in _evaluate(label, _criterion(test, operand["type"]), want, got, operand["type"])
    ]


def coupling_mismatches(test: TestModel, unsigned: Sequence[Array], signed: Sequence[Array]) -> list[OutputMismatch]:
    """Return the outputs in which a uint8 model and its int8 form differ by anything but the offset of 128."""
    outputs = zip(_labels(test), test.output_operands, unsigned, signed, strict=True)
    found = []
    for label, operand, first, second in outputs:
        want = (first ^ 0x80).view(np.int8) if is_unsigned(operand) else first
        wrong = np.asarray((want != second) & ~((want != want) & (second != second)))
        if wrong.any() and not operand["isIgnored"]:
            found.append(describe_mismatch(f"{label}, of uint8 less 128 and of int8", want, second, wrong))
    return found


def _evaluate(label: str, rule: Criterion, want: Array, got: Array, type: str) -> Iterator[OutputMismatch]:
    if type == "TENSOR_BOOL8":
        wrong = np.asarray((want != 0) != (got != 0))
        if np.count_nonzero(wrong) > math.ceil(rule.wrong_share * want.size):
            yield describe_mismatch(label, want, got, wrong)
        return
    expected = want.astype(np.float64)
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, which never passes
        differences = got.astype(np.float64) - expected
        close = np.abs(differences) <= rule.atol + rule.rtol * np.abs(expected)
    is_compared = np.abs(expected) <= rule.skip_above if rule.skip_above < math.inf else np.ones(want.shape, bool)
    wrong = np.asarray(is_compared & ~close)
    if wrong.any():
        yield describe_mismatch(label, want, got, wrong)
    elif np.count_nonzero(is_compared) >= MIN_COMPARED_ELEMENTS:
        scale = np.maximum(1.0, np.abs(expected[is_compared])) if want.dtype.kind == "f" else 1.0
        yield from _outside_means(label, rule, differences[is_compared] / scale)


def _outside_means(label: str, rule: Criterion, differences: Array) -> Iterator[OutputMismatch]:
    bias, mse = float(np.mean(differences)), float(np.mean(np.square(differences)))
    if not abs(bias) <= rule.bias:
        yield OutputMismatch(f"{label}: the mean difference is {bias:.3g}, at most {rule.bias:.3g} is allowed")
    if not mse <= rule.mse:
        yield OutputMismatch(f"{label}: the mean squared difference is {mse:.3g}, at most {rule.mse:.3g} is allowed")


def _labels(test: TestModel) -> list[str]:
    """Return a label for each output: the operand's index in the main subgraph, and its name."""
    operands = zip(test.model.main.output_indexes, test.output_operands, strict=True)
    return [f"operand {index} ({operand['name']})" for index, operand in operands]


def describe_mismatch(label: str, want: Array, got: Array, wrong: Array) -> OutputMismatch:
    """Return the mismatch of an output with the elements that are True in `wrong`."""
    indexes = np.argwhere(np.atleast_1d(wrong))
    differences = tuple(_difference(label, want, got, tuple(map(int, index))) for index in indexes[:MAX_REPORTED])
    first = differences[0]
    return OutputMismatch(
        f"{label}, index {list(first.index)}: expected {first.expected}, actual {first.actual}"
        f" ({len(indexes)} of {want.size} elements are wrong)",
        differences,
    )


def _difference(label: str, want: Array, got: Array, index: tuple[int, ...]) -> ElementMismatch:
    expected, actual = np.atleast_1d(want)[index], np.atleast_1d(got)[index]
    return ElementMismatch(label, index if want.ndim else (), str(expected), str(actual))


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


def tolerance_of_float32(model: Model) -> tuple[float, float]:
    """Return the usual atol and rtol for float32 in a model."""
    subgraphs = (model.main, *model.referenced)
    has_half = any(operand.type == OperandType.TENSOR_FLOAT16 for graph in subgraphs for operand in graph.operands)
    return _COARSE if model.relax_computation_float32_to_float16 or has_half else _FINE


def _has_half(line: Line) -> bool:
    graphs = (line["main"], *line["referenced"])
    return any(operand["type"] == "TENSOR_FLOAT16" for graph in graphs for operand in graph["operands"])


def _wrong_distribution(test: TestModel, samples: Array, tolerance: float) -> Iterator[OutputMismatch]:
    """Compare the frequency of each class with its probability, the softmax of the single input."""
    (logits,) = test.inputs
    assert logits is not None, "the one input of RANDOM_MULTINOMIAL is never omitted"
    weights = np.exp(logits.astype(np.float64).reshape(-1))
    for sampled, probability in enumerate(weights / math.fsum(weights)):
        share = float(np.mean(samples == sampled))
        if not abs(share - probability) <= tolerance:
            label = _labels(test)[0]
            reason = (
                f"{label}, class {sampled}: expected a share of {probability:.6f} ± {tolerance}, actual {share:.6f}"
            )
            yield OutputMismatch(
                reason, (ElementMismatch(label, (sampled,), f"share {probability:.6f}", f"{share:.6f}"),)
            )
