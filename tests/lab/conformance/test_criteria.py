"""The criteria of the test vectors' rules: tolerances, ignored outputs, shapes, and criteria of a test model."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import model_lines

from nnfmq.hal.types import OutputShape
from nnfmq.lab.conformance import testmodels
from nnfmq.lab.conformance.criteria import compare_outputs, tolerances


def changed(**fields: Any) -> testmodels.TestModel:
    return testmodels.read(model_lines.changed(lambda line: line.update(fields)))


def mismatches_of(test: testmodels.TestModel, *values: float) -> list[str]:
    return [found.reason for found in compare_outputs(test, [OutputShape((3,))], [np.float32(values)])]


def test_the_expected_values_pass() -> None:
    assert mismatches_of(changed(), 11, 22, 33) == []


def test_a_mismatch_has_operand_index_expected_and_actual_value() -> None:
    assert mismatches_of(changed(), 11, 22.5, 33) == [
        "operand 3 (c), index [1]: expected 22.0, actual 22.5 (1 of 3 elements are wrong)"
    ]


def test_a_nan_never_passes() -> None:
    assert len(mismatches_of(changed(isRelaxed=True), np.nan, 22, 33)) == 1


@pytest.mark.parametrize(("relaxed", "passes"), [(False, False), (True, True)])
def test_TST_3_relaxed_models_have_the_tolerance_of_float16(relaxed: bool, passes: bool) -> None:
    assert (mismatches_of(changed(isRelaxed=relaxed), 11, 22.05, 33) == []) is passes


def test_TST_3_a_float16_operand_anywhere_gives_float32_outputs_the_tolerance_of_float16() -> None:
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
def test_TST_3_integers_are_compared_as_stored(name: str, operand_type: str, atol: int) -> None:
    assert tolerances(changed(name=name), operand_type) == (atol, 0)


@pytest.mark.parametrize(
    ("relaxed", "difference", "passes"),
    [
        (False, 1e-5 + 16 * 5 * 1.1920928955078125e-7 - 2**-20, True),
        (False, 1e-5 + 16 * 5 * 1.1920928955078125e-7 + 2**-20, False),
        (True, 17 * 5 * 0.0009765625, True),
        (True, 17 * 5 * 0.0009765625 + 2**-19, False),
    ],
)
def test_TST_3_the_tolerance_is_atol_plus_rtol_times_the_expected_value(
    relaxed: bool, difference: float, passes: bool
) -> None:
    line = model_lines.add("add", (16, 22, 33)) | {"isRelaxed": relaxed}
    for sign in (1, -1):
        assert (mismatches_of(testmodels.read(line), 16 + sign * difference, 22, 33) == []) is passes


@pytest.mark.parametrize(("operand_type", "passing"), [("TENSOR_QUANT8_ASYMM", [10, 11, 12]), ("TENSOR_BOOL8", [1, 7])])
def test_TST_3_quantized_values_may_differ_by_one_and_booleans_not_at_all(
    operand_type: str, passing: list[int]
) -> None:
    line = model_lines.add()
    expected = 11 if operand_type == "TENSOR_QUANT8_ASYMM" else 1
    data = base64.b64encode(bytes([expected] * 3)).decode()
    line["main"]["operands"][3] |= {"type": operand_type, "scale": float(expected == 11), "data": data}
    test = testmodels.read(line)
    found = [
        value
        for value in range(14)
        if not compare_outputs(test, [OutputShape((3,))], [np.full(3, value, test.expected[0].dtype)])
    ]
    assert found == (passing if expected == 11 else list(range(1, 14)))


def test_a_reported_shape_must_be_the_expected_one() -> None:
    found = compare_outputs(changed(), [OutputShape((1, 3))], [np.float32([11, 22, 33])])
    assert [mismatch.reason for mismatch in found] == ["operand 3 (c): expected shape [3], actual [1, 3]"]


def test_ignored_outputs_are_not_compared() -> None:
    test = testmodels.read(model_lines.changed(lambda line: line["main"]["operands"][3].update(isIgnored=True)))
    assert mismatches_of(test, 0, 0, 0) == []


def multinomial(*samples: int) -> list[str]:
    """Evaluate samples of two classes with the probabilities 1/4 and 3/4, and a tolerance of 0.1."""
    line = model_lines.add() | {"expectedMultinomialDistributionTolerance": 0.1}
    logits = model_lines.floats(0, np.log(3))
    line["main"]["operands"][0].update(dimensions=[1, 2], data=logits)
    line["main"]["operands"][3].update(type="TENSOR_INT32", dimensions=[1, 4], isIgnored=True)
    line["main"]["operands"][3]["data"] = "AAAAAAAAAAAAAAAAAAAAAA=="
    test = testmodels.read(line)
    return [found.reason for found in compare_outputs(test, [OutputShape((1, 4))], [np.int32([samples])])]


def test_samples_with_the_expected_distribution_pass() -> None:
    assert multinomial(1, 0, 1, 1) == []


def test_a_wrong_distribution_is_reported_for_each_class() -> None:
    first, second = multinomial(0, 0, 1, 1)
    assert "class 0: expected a share of 0.250000 ± 0.1, actual 0.500000" in first
    assert "class 1: expected a share of 0.750000 ± 0.1, actual 0.500000" in second


# ------------------------------------------------------------------------------------------------ custom criteria


def with_criteria(criteria: dict[str, dict[str, float]], type: str = "TENSOR_FLOAT32") -> testmodels.TestModel:
    """Return `add` with an output of 12 elements of this type, all expected to be 1, and with these criteria."""
    dtype = np.dtype(testmodels.DTYPES[type])
    data = base64.b64encode(np.ones(12, dtype).tobytes()).decode()
    output = {"type": type, "dimensions": [12], "data": data}
    line = model_lines.changed(lambda line: line["main"]["operands"][3].update(output))
    return testmodels.read(line | {"criteria": {type: criteria}} if criteria else line)


def mismatches_from_ones(test: testmodels.TestModel, *values: float) -> list[str]:
    """Evaluate 12 elements, which are `values`, then 1."""
    array = np.ones(12, test.expected[0].dtype)
    array[: len(values)] = values
    return [found.reason for found in compare_outputs(test, [OutputShape((12,))], [array])]


def test_TST_6_criteria_of_a_test_model_replace_the_tolerances() -> None:
    assert mismatches_from_ones(with_criteria({"atol": 0.5}), 1.5, 0.5) == []
    assert (
        "expected 1.0, actual 1.75" in mismatches_from_ones(with_criteria({"atol": 0.5, "rtol": 0.125}), 1.625, 1.75)[0]
    )


def test_TST_6_types_without_criteria_keep_the_tolerances() -> None:
    test = with_criteria({})
    test.criteria["TENSOR_INT32"] = testmodels.Criterion(atol=100)
    assert len(mismatches_from_ones(test, 2)) == 1


def test_TST_6_a_bias_is_limited_if_each_element_is_within_its_tolerance() -> None:
    test = with_criteria({"atol": 0.5, "bias": 0.125})
    assert mismatches_from_ones(test, *[1.125] * 12) == []
    assert mismatches_from_ones(test, *[1.25] * 12) == [
        "operand 3 (c): the mean difference is 0.25, at most 0.125 is allowed"
    ]
    assert mismatches_from_ones(test, *[1.25, 0.75] * 6) == []


def test_TST_6_the_mean_squared_difference_is_limited() -> None:
    assert mismatches_from_ones(with_criteria({"atol": 1, "mse": 0.0625}), *[1.25, 0.75] * 6) == []
    assert mismatches_from_ones(with_criteria({"atol": 1, "mse": 0.0625}), *[1.5, 0.5] * 6) == [
        "operand 3 (c): the mean squared difference is 0.25, at most 0.0625 is allowed"
    ]


@pytest.mark.parametrize(("first_values", "is_limited"), [([1.0] * 2, True), ([8.0] * 2, True), ([8.0] * 3, False)])
def test_TST_6_means_are_limited_if_10_or_more_elements_are_compared(
    first_values: list[float], is_limited: bool
) -> None:
    test = with_criteria({"atol": 1, "bias": 0.125, "skipAbove": 4})
    expected = np.array(first_values + [1.0] * (12 - len(first_values)), np.float32)
    test.expected[0] = expected
    found = compare_outputs(test, [OutputShape((12,))], [expected + np.float32(0.25)])
    assert bool(found) is is_limited


def test_TST_6_differences_of_floats_above_1_are_relative() -> None:
    test = with_criteria({"atol": 1, "bias": 0.25})
    test.expected[0] = np.full(12, 4, np.float32)
    assert compare_outputs(test, [OutputShape((12,))], [np.full(12, 5, np.float32)]) == []


def test_TST_6_elements_whose_expected_value_is_too_large_are_not_compared() -> None:
    test = with_criteria({"atol": 0.5, "skipAbove": 100})
    test.expected[0] = np.array([np.inf, 101, -101, *[1.0] * 9], np.float32)
    assert mismatches_from_ones(test, np.nan, 0, np.inf) == []
    assert len(mismatches_from_ones(test, 0, 0, 0, np.nan)) == 1


@pytest.mark.parametrize(("wrong", "passes"), [(1, True), (2, True), (3, False)])
def test_TST_6_a_share_of_booleans_rounded_up_may_be_wrong(wrong: int, passes: bool) -> None:
    test = with_criteria({"wrongShare": 0.1}, "TENSOR_BOOL8")  # 1.2 of 12
    assert (mismatches_from_ones(test, *[0] * wrong) == []) is passes


@pytest.mark.parametrize("criteria", [{"TENSOR_FLOAT32": {"atoll": 1}}, {"TENSOR_FLOAT32": {"atol": "much"}}, [1]])
def test_TST_6_invalid_criteria_are_a_format_error(criteria: Any, tmp_path: Path) -> None:
    line = model_lines.add() | {"criteria": criteria}
    with pytest.raises(testmodels.FormatError):
        testmodels.read_at(tmp_path / "one.jsonl", 1, line)


def test_TST_12_criteria_for_uint8_apply_to_the_int8_form() -> None:
    line = with_criteria({"atol": 3, "bias": 0.5}, "TENSOR_QUANT8_ASYMM").line
    assert testmodels.read(testmodels.signed(line)).criteria == {
        "TENSOR_QUANT8_ASYMM_SIGNED": testmodels.Criterion(atol=3, bias=0.5)
    }
