"""What passes and what does not, from the description of the test vectors: tolerances, ignored outputs, shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import model_lines

from nnfmq.conformance import testmodels
from nnfmq.conformance.criteria import complaints, tolerances
from nnfmq.hal.types import OutputShape


def changed(**fields: Any) -> testmodels.TestModel:
    return testmodels.read(model_lines.changed(lambda line: line.update(fields)))


def judged(test: testmodels.TestModel, *values: float) -> list[str]:
    return [found.reason for found in complaints(test, [OutputShape((3,))], [np.float32(values)])]


def test_the_expected_values_pass() -> None:
    assert judged(changed(), 11, 22, 33) == []


def test_a_wrong_value_is_named_with_operand_index_expected_and_actual() -> None:
    assert judged(changed(), 11, 22.5, 33) == [
        "operand 3 (c), index [1]: expected 22.0, actual 22.5 (1 of 3 elements are wrong)"
    ]


def test_a_nan_never_passes() -> None:
    assert len(judged(changed(isRelaxed=True), np.nan, 22, 33)) == 1


@pytest.mark.parametrize(("relaxed", "passes"), [(False, False), (True, True)])
def test_relaxed_models_may_be_as_coarse_as_float16(relaxed: bool, passes: bool) -> None:
    assert (judged(changed(isRelaxed=relaxed), 11, 22.05, 33) == []) is passes


def test_a_float16_operand_anywhere_makes_float32_outputs_coarse() -> None:
    line = model_lines.add()
    line["main"]["operands"].append(model_lines.operand("half", "NO_VALUE", None, "TENSOR_FLOAT16"))

    assert tolerances(testmodels.read(line), "TENSOR_FLOAT32") == (5 * 2**-10, 5 * 2**-10)


@pytest.mark.parametrize(
    ("name", "operand_type", "atol"),
    [
        ("add", "TENSOR_QUANT8_ASYMM", 1),
        ("mobilenet_quantized", "TENSOR_QUANT8_ASYMM", 3),
        ("mobilenet_quantized", "TENSOR_QUANT16_SYMM", 1),
        ("mobilenet_quantized", "TENSOR_INT32", 1),
    ],
)
def test_integers_are_compared_as_stored(name: str, operand_type: str, atol: int) -> None:
    assert tolerances(changed(name=name), operand_type) == (atol, 0)


def test_a_reported_shape_has_to_be_the_expected_one() -> None:
    found = complaints(changed(), [OutputShape((1, 3))], [np.float32([11, 22, 33])])
    assert [complaint.reason for complaint in found] == ["operand 3 (c): expected shape [3], actual [1, 3]"]


def test_ignored_outputs_may_hold_anything() -> None:
    test = testmodels.read(model_lines.changed(lambda line: line["main"]["operands"][3].update(isIgnored=True)))
    assert judged(test, 0, 0, 0) == []


def multinomial(*samples: int) -> list[str]:
    """Judge samples of two classes with the probabilities 1/4 and 3/4, of which 0.1 may be missing."""
    line = model_lines.add() | {"expectedMultinomialDistributionTolerance": 0.1}
    logits = model_lines.floats(0, np.log(3))
    line["main"]["operands"][0].update(dimensions=[1, 2], data=logits)
    line["main"]["operands"][3].update(type="TENSOR_INT32", dimensions=[1, 4], isIgnored=True)
    line["main"]["operands"][3]["data"] = "AAAAAAAAAAAAAAAAAAAAAA=="
    test = testmodels.read(line)
    return [found.reason for found in complaints(test, [OutputShape((1, 4))], [np.int32([samples])])]


def test_samples_pass_by_their_distribution() -> None:
    assert multinomial(1, 0, 1, 1) == []


def test_a_wrong_distribution_is_named_by_class() -> None:
    first, second = multinomial(0, 0, 1, 1)
    assert "class 0: expected a share of 0.250000 ± 0.1, actual 0.500000" in first
    assert "class 1: expected a share of 0.750000 ± 0.1, actual 0.500000" in second
