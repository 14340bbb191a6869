"""Operators of the domain ai.onnx.ml, which models of scikit-learn become: nnfmq's result is ONNX Runtime's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.onnx_files import OnnxCase, expected, results

import nnfmq

ROWS = np.random.default_rng(4).uniform(-3, 3, (4, 3)).astype(np.float32)
X = np.float32([[1, -2, 3], [0, 0, 0], [-1, -2, -4], [np.inf, 1, -2]])
GAPS = np.float32([[1, np.nan, 3], [np.nan, -2, 0.5]])
WEIGHTS, LABELS = [1.0, 2.0, 3.0, 4.0, -5.0, 6.0, -1.0, -2.0, 0.5], [7, 9, -3]


def case(name: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> OnnxCase:
    return OnnxCase(name, inputs, {"domain": "ai.onnx.ml", **attributes}, outputs=outputs)


def classifier(x: Any, **attributes: Any) -> OnnxCase:
    given = {"coefficients": WEIGHTS, "intercepts": [0.5, 0.25, 0.125], "classlabels_ints": LABELS, **attributes}
    return case("LinearClassifier", x, outputs=2, **given)


CASES = [
    *(case("Scaler", x, offset=[1.0, 2.0, 0.5], scale=[2.0, 0.5, -1.0])
      for x in (X, X[0], X[:3].astype(np.int32), X[:3].astype(np.int64))),
    case("Scaler", X, offset=[1.5], scale=[-2.0]),
    *(case("Normalizer", x, norm=norm) for norm in ("MAX", "L1", "L2") for x in (X[:3], X[0], X[:3].astype(np.int64))),
    case("Normalizer", X[:3]),
    case("Binarizer", X, threshold=0.5),
    case("Binarizer", X),
    case("Imputer", GAPS, replaced_value_float=float("nan"), imputed_value_floats=[7.0, 8.0, 9.0]),
    case("Imputer", X, replaced_value_float=-2.0, imputed_value_floats=[7.0]),
    case("LinearRegressor", ROWS, coefficients=WEIGHTS[:3], intercepts=[0.5]),
    case("LinearRegressor", ROWS, coefficients=WEIGHTS, targets=3),
    case("LinearRegressor", ROWS, coefficients=WEIGHTS, targets=3, post_transform="SOFTMAX"),
    *(classifier(ROWS, post_transform=name) for name in ("NONE", "SOFTMAX", "LOGISTIC")),
    classifier(ROWS, coefficients=WEIGHTS[:6], intercepts=[0.5, -0.5], classlabels_ints=[0, 1], multi_class=1),
    classifier(np.zeros((2, 3), np.float32), intercepts=[1.0, 1.0, 1.0]),  # the first of equal scores
    *(case("ArrayFeatureExtractor", x, np.array(places)) for x in (X, X[0], X[:3].astype(np.int64), X.reshape(2, 2, 3))
      for places in ([0, 2], [[1]], [1, 1, 0, 2])),
]  # fmt: skip


@pytest.mark.parametrize("given", CASES, ids=str)
def test_the_results_are_those_of_onnx_runtime(given: OnnxCase) -> None:
    content, fed = given.content(), given.fed()
    for found, wanted in zip(results(content, fed), expected(content, fed), strict=True):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found.astype(float), wanted.astype(float), rtol=1e-5, atol=1e-6)


REFUSED = {
    "float64": (case("Scaler", X.astype(float), offset=[0.0], scale=[1.0]), "an input of float64"),
    "a cube": (case("Normalizer", X.reshape(2, 2, 3)), r"the shape \(2, 2, 3\)"),
    "two factors": (case("Scaler", X, offset=[0.0], scale=[1.0, 2.0]), "attribute scale has 2 numbers for 3 columns"),
    "another norm": (case("Normalizer", X, norm="L3"), "norm 'L3' is unknown"),
    "no such column": (
        OnnxCase("ArrayFeatureExtractor", (X, np.array([3])), {"domain": "ai.onnx.ml"}, frozenset((1,))),
        "an index is outside the last dimension",
    ),
    "too few coefficients": (case("LinearRegressor", ROWS, coefficients=WEIGHTS[:4]), "4 coefficients for 1 results"),
    "a vector of numbers": (case("LinearRegressor", X[0], coefficients=WEIGHTS[:3]), r"an input of shape \(3,\)"),
    "too few intercepts": (
        case("LinearRegressor", ROWS, coefficients=WEIGHTS, targets=3, intercepts=[1.0]), "1 intercepts for 3 results",
    ),
    "texts": (
        case("LinearClassifier", ROWS, outputs=2, coefficients=WEIGHTS, classlabels_strings=["a", "b", "c"]),
        "labels that are integers",
    ),
    "another function": (classifier(ROWS, post_transform="PROBIT"), "post_transform 'PROBIT' is not supported"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_another_form_is_refused_with_the_reason(name: str) -> None:
    given, reason = REFUSED[name]
    with pytest.raises(nnfmq.UnsupportedModel, match=reason):
        nnfmq.load(given.content())
