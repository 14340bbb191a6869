"""Operators of the domain ai.onnx.ml on numbers, as converters of scikit-learn's models write them.

ONNX's text leaves much open; ONNX Runtime's results count. It computes with float32, and returns it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers.onnx.file import dtype_of
from nnfmq.importers.onnx.operators.composition import Composition
from nnfmq.importers.onnx.values import Array, Node, Value

__all__ = ["CONVERTERS"]

_FLOAT = 1  # the number of float32 as an element type
_NORMS = {"L1": 1, "L2": 2}


def _numbers(node: Node, types: tuple[str, ...] = ("float32",)) -> Value:
    """Return the input, vectors or rows of numbers, as float32."""
    value = node.value(0)
    if value.dtype.name not in types or len(value.shape) not in (1, 2):
        raise InvalidArgument(f"an input of {value.dtype.name} and the shape {value.shape} is not supported")
    return value if value.dtype == dtype_of(_FLOAT) else Composition(node)("Cast", value, to=_FLOAT)


def _of_columns(node: Node, name: str, columns: int) -> Value:
    """Return the numbers of an attribute: one for all columns, or one for each."""
    found = np.array(node.attribute(name, ()), np.float32)
    if found.size not in (1, columns):
        raise InvalidArgument(f"attribute {name} has {found.size} numbers for {columns} columns")
    return Value.of(found)


def _scaler(node: Node) -> None:
    x, compose = _numbers(node, ("float32", "int32", "int64")), Composition(node)
    offset, scale = (_of_columns(node, name, x.shape[-1]) for name in ("offset", "scale"))
    node.results[0] = compose("Mul", compose("Sub", x, offset), scale)


def _imputer(node: Node) -> None:
    """Convert to a selection between the input and the numbers that replace one of its values, which may be NaN."""
    x, compose = _numbers(node), Composition(node)
    replaced = float(node.attribute("replaced_value_float", 0.0))
    is_missing = compose("IsNaN", x) if np.isnan(replaced) else compose("Equal", x, compose.like(replaced, x))
    node.results[0] = compose("Where", is_missing, _of_columns(node, "imputed_value_floats", x.shape[-1]), x)


def _binarizer(node: Node) -> None:
    x, compose = _numbers(node), Composition(node)
    is_above = compose("Greater", x, compose.like(node.attribute("threshold", 0.0), x))
    node.results[0] = compose("Cast", is_above, to=_FLOAT)


def _normalizer(node: Node) -> None:
    """Convert to rows that are divided by their norm or maximum, unless that is 0."""
    x, compose, norm = _numbers(node, ("float32", "int32", "int64")), Composition(node), node.attribute("norm", "MAX")
    if norm in _NORMS:
        node.results[0] = compose("LpNormalization", x, axis=-1, p=_NORMS[norm])
        return
    if norm != "MAX":
        raise InvalidArgument(f"norm {norm!r} is unknown")
    largest = compose("ReduceMax", x, axes=(len(x.shape) - 1,))
    is_zero = compose("Equal", largest, compose.like(0.0, x))
    node.results[0] = compose("Where", is_zero, x, compose("Div", x, largest))


def _array_feature_extractor(node: Node) -> None:
    """Convert to Gather along the last axis; a vector is a row."""
    x, indices, compose = node.value(0), node.value(1), Composition(node)
    known, extent = indices.array, x.shape[-1] if x.shape else 0
    if not extent or (known is not None and not ((known >= 0) & (known < extent)).all()):
        raise InvalidArgument(f"an index is outside the last dimension of the shape {x.shape}")
    found = compose("Gather", x, compose.reshape(indices, indices.size), axis=len(x.shape) - 1)
    node.results[0] = found if len(x.shape) > 1 else compose.reshape(found, 1, indices.size)


def _scores(node: Node, rows: int | None) -> Value:
    """Return the products of the input with `rows` of coefficients, plus the intercepts."""
    x = _numbers(node)
    coefficients = np.array(node.attribute("coefficients", ()), np.float32)
    if len(x.shape) != 2 or not rows or coefficients.size != rows * x.shape[1]:
        raise InvalidArgument(f"{coefficients.size} coefficients for {rows} results of an input of shape {x.shape}")
    intercepts: Array = np.array(node.attribute("intercepts", ()) or (0.0,) * rows, np.float32)
    if intercepts.size != rows:
        raise InvalidArgument(f"{intercepts.size} intercepts for {rows} results")
    return Composition(node)("Gemm", x, Value.of(coefficients.reshape(rows, -1)), Value.of(intercepts), transB=1)


def _linear_regressor(node: Node) -> None:
    scores = _scores(node, node.attribute("targets", 1))
    node.results[0] = _transformed(node, scores)


def _linear_classifier(node: Node) -> None:
    """Convert to the label of the first of the highest scores, and the scores."""
    labels, compose = node.attribute("classlabels_ints", ()), Composition(node)
    node.attribute("multi_class", 0)
    if len(labels) < 2:
        raise InvalidArgument("it needs two or more labels that are integers")
    scores = _scores(node, len(labels))
    best = compose("ArgMax", scores, axis=1, keepdims=0)
    node.results[0] = compose("Gather", Value.of(np.array(labels, np.int64)), best)
    node.results[1] = _transformed(node, scores)


def _transformed(node: Node, scores: Value) -> Value:
    name, compose = node.attribute("post_transform", "NONE"), Composition(node)
    if name == "NONE":
        return scores
    if name == "SOFTMAX":
        return compose("Softmax", scores, axis=1)
    if name == "LOGISTIC":
        return compose("Sigmoid", scores)
    raise InvalidArgument(f"post_transform {name!r} is not supported")


CONVERTERS: dict[str, Callable[[Node], None]] = {
    f"ai.onnx.ml.{name}": convert
    for name, convert in {
        "ArrayFeatureExtractor": _array_feature_extractor,
        "Binarizer": _binarizer,
        "Imputer": _imputer,
        "LinearClassifier": _linear_classifier,
        "LinearRegressor": _linear_regressor,
        "Normalizer": _normalizer,
        "Scaler": _scaler,
    }.items()
}
