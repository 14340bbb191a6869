"""Run the node tests of the package onnx through nnfmq's importer and interpreter, and count the results.

    python3 tools/onnx_node_tests.py [--refused] [--reasons]

Inputs are bound by value, as sessions of nnfmq.compat.onnxruntime do, if the importer needs constants: integers, and
then floats, of up to 16 elements. Inputs of unknown shapes get those of the test. The share is that of tests that have
only tensors of numbers and no operator of strings, sequences, optionals, training or ai.onnx.ml.

A test passes if the importer accepts the model and each output is within 1e-5 of the largest element (float16 and
bfloat16: 1e-2) of the expected one; from numbers that a test states with 4 decimals, one unit of the last. It is
refused if the importer rejects the model with a reason. Everything else is a failure: then the exit status is 1.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections import Counter
from typing import Any

import numpy as np
from msgspec.structs import replace

import nnfmq
from nnfmq.compat.onnxruntime.shape_plans import bindings
from nnfmq.engines import interpreter
from nnfmq.hal.errors import InvalidArgument, NnfmqError
from nnfmq.importers import load_source
from nnfmq.importers.file_format import read_source
from nnfmq.validation import validate_model

_SEED = 1
_SHORT = ("float16", "bfloat16")
_DECIMALS = 4
_NOT_NUMERIC = ("StringConcat", "StringNormalizer", "StringSplit", "RegexFullMatch", "TfIdfVectorizer", "ImageDecoder")


def main() -> int:
    """Print the counts and the failures; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refused", action="store_true", help="print the reason of each refusal")
    parser.add_argument("--reasons", action="store_true", help="print how often each operator is refused, and why")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    numeric: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for case in node_cases():
        status, reason = outcome(case)
        counts[status] += 1
        if is_numeric(case):
            numeric[status] += 1
            reasons.update([_summary(reason)] if status == "refused" else [])
        if status == "failed" or (status == "refused" and arguments.refused):
            print(f"{status}: {case.name}: {reason}")
    print(", ".join(f"{counts[status]} {status}" for status in ("passed", "refused", "failed")))
    if arguments.reasons:
        print("\n".join(f"{count:4} {reason}" for reason, count in reasons.most_common()))
    total = numeric.total()
    print(f"tensors of numbers: {numeric['passed']} of {total} passed ({100 * numeric['passed'] / total:.1f} %)")
    return 1 if counts["failed"] else 0


def is_numeric(case: Any) -> bool:
    """Return False for tests of strings, sequences, optionals, training and the domain ai.onnx.ml."""
    import onnx

    graph = case.model.graph
    kinds = [info.type for info in (*graph.input, *graph.output)]
    if any(entry.domain.startswith(("ai.onnx.ml", "ai.onnx.preview.training")) for entry in case.model.opset_import):
        return False
    if any(node.op_type in _NOT_NUMERIC for node in graph.node):
        return False
    return all(
        kind.WhichOneof("value") == "tensor_type" and kind.tensor_type.elem_type != onnx.TensorProto.STRING
        for kind in kinds
    )


def _summary(reason: str) -> str:
    """Return the first operator that is refused and why, without numbers of nodes and types."""
    lines = [re.sub(r"operators? [\d, ]+", "", line.strip()) for line in reason.splitlines()]
    return re.sub(r" \[.*", "", lines[min(1, len(lines) - 1)])[:110]


def node_cases() -> list[Any]:
    """Return the package's test cases, with the same random inputs each time."""
    from onnx.backend.test.case.node import collect_testcases

    np.random.seed(_SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(collect_testcases(None))


def outcome(case: Any) -> tuple[str, str]:
    """Return "passed", "refused" or "failed", and the reason."""
    given, expected = ([_array(value) for value in values] for values in case.data_sets[0])
    try:
        loaded = _load(case.model, given)
    except InvalidArgument as error:
        return "refused", str(error)
    try:
        arrays = {info.name: array for info, array in zip(case.model.graph.input, given, strict=True)}
        found = _execute(loaded, [arrays[info.name] for info in loaded.inputs])
        found = [a.astype(b.dtype) if b.dtype.kind in "iu" else a for a, b in zip(found, expected, strict=True)]
    except (NnfmqError, ValueError) as error:
        return "failed", str(error)
    for result, reference in zip(found, expected, strict=True):
        reason = _difference(result, reference)
        if reason:
            return "failed", reason
    return "passed", ""


def _load(model: Any, given: list[Any]) -> Any:
    """Return the imported model; inputs are bound by value only if it cannot be imported otherwise."""
    data = model.SerializeToString()
    try:
        return nnfmq.load(data)
    except InvalidArgument as error:
        first = error
    arrays = {info.name: array for info, array in zip(model.graph.input, given, strict=True)}
    names = [info.name for info in model.graph.input]
    bound = [{names[place]: given[place] for place in places} for places in bindings(given)]
    for values in ({}, *bound):
        shapes: Any = {name: array.shape for name, array in arrays.items() if name not in values and array.dtype != "O"}
        source = replace(read_source(data), shapes=shapes, values=values)
        try:
            return load_source(source)
        except InvalidArgument as error:
            first = error
    raise first


def _array(value: Any) -> Any:
    import onnx

    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value)
    return np.asarray(value) if isinstance(value, (np.ndarray, np.generic)) else np.array(None, object)


def _execute(loaded: Any, given: list[Any]) -> list[Any]:
    validate_model(loaded.model)
    pairs = zip(given, loaded.inputs, strict=True)
    inputs = [_held(_narrowed(np.ascontiguousarray(array), np.dtype(info.dtype)), info) for array, info in pairs]
    outputs = [_held(np.zeros(info.shape, info.dtype), info) for info in loaded.outputs]
    views = [[a.view(np.uint8) if a.dtype == bool else a for a in arrays] for arrays in (inputs, outputs)]
    interpreter.prepare(loaded.model).execute(*views)
    return [
        array[:0].reshape(info.shape) if info.is_empty else array.reshape(info.shape)
        for array, info in zip(outputs, loaded.outputs, strict=True)
    ]


def _held(array: Any, info: Any) -> Any:
    """Return an array in the shape of its operand."""
    return np.zeros(1, info.dtype) if info.is_empty else array.reshape(info.shape or (1,))


def _narrowed(array: Any, dtype: Any) -> Any:
    """Return an input in the type that the model computes with."""
    found = array.astype(dtype)
    if dtype.kind in "iu" and not np.array_equal(found, array):
        raise InvalidArgument(f"an input of {array.dtype} has values beyond {dtype}")
    return found


def _difference(found: Any, expected: Any) -> str:
    """Return how an output differs from the expected one; "" if it does not."""
    if found.shape != expected.shape:
        return f"shape {found.shape}, expected {expected.shape}"
    wanted = expected.reshape(found.shape).astype(float)
    finite = wanted[np.isfinite(wanted)]
    is_float = expected.dtype.kind == "f" or expected.dtype.name in _SHORT
    relative = 0.0 if not is_float else 1e-2 if expected.dtype.name in _SHORT else 1e-5
    tolerance = relative * float(np.abs(finite).max(initial=1e-3))
    if is_float and np.array_equal(np.round(wanted, _DECIMALS), np.round(wanted, 6), equal_nan=True):
        tolerance = max(tolerance, 10**-_DECIMALS)  # the test states rounded numbers
    close = np.isclose(found.astype(float), wanted, rtol=0, atol=tolerance, equal_nan=True)
    return "" if close.all() else f"{int((~close).sum())} of {close.size} elements differ"


if __name__ == "__main__":
    sys.exit(main())
