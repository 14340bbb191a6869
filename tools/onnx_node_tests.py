"""Run the node tests of the package onnx through nnfmq's importer and interpreter, and count the results.

    python3 tools/onnx_node_tests.py [--refused]

A test passes if the importer accepts the model and each output is within 1e-5 of the largest element (float16: 1e-2) of
the expected one. It is refused if the importer rejects the model with a reason. Everything else is a failure: then the
exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from typing import Any

import numpy as np

import nnfmq
from nnfmq.engines import interpreter
from nnfmq.hal.errors import InvalidArgument, NnfmqError
from nnfmq.validation import validate_model

_SEED = 1


def main() -> int:
    """Print the counts and the failures; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refused", action="store_true", help="print the reason of each refusal")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    for case in node_cases():
        status, reason = outcome(case)
        counts[status] += 1
        if status == "failed" or (status == "refused" and arguments.refused):
            print(f"{status}: {case.name}: {reason}")
    print(", ".join(f"{counts[status]} {status}" for status in ("passed", "refused", "failed")))
    return 1 if counts["failed"] else 0


def node_cases() -> list[Any]:
    """Return the package's test cases, with the same random inputs each time."""
    from onnx.backend.test.case.node import collect_testcases

    np.random.seed(_SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(collect_testcases(None))


def outcome(case: Any) -> tuple[str, str]:
    """Return "passed", "refused" or "failed", and the reason."""
    try:
        loaded = nnfmq.load(case.model.SerializeToString())
    except InvalidArgument as error:
        return "refused", str(error)
    given, expected = ([_array(value) for value in values] for values in case.data_sets[0])
    try:
        found = _execute(loaded, given)
    except (NnfmqError, ValueError) as error:
        return "failed", str(error)
    for result, reference in zip(found, expected, strict=True):
        reason = _difference(result, reference)
        if reason:
            return "failed", reason
    return "passed", ""


def _array(value: Any) -> Any:
    import onnx

    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def _execute(loaded: Any, given: list[Any]) -> list[Any]:
    validate_model(loaded.model)
    inputs = [
        np.ascontiguousarray(array).astype(info.dtype).reshape(info.shape)
        for array, info in zip(given, loaded.inputs, strict=True)
    ]
    outputs = [np.zeros(info.shape, info.dtype) for info in loaded.outputs]
    views = [[a.view(np.uint8) if a.dtype == bool else a for a in arrays] for arrays in (inputs, outputs)]
    interpreter.prepare(loaded.model).execute(*views)
    return outputs


def _difference(found: Any, expected: Any) -> str:
    """Return how an output differs from the expected one; "" if it does not."""
    if found.shape != (expected.shape or (1,)):
        return f"shape {found.shape}, expected {expected.shape}"
    wanted = expected.reshape(found.shape).astype(float)
    finite = wanted[np.isfinite(wanted)]
    relative = 0.0 if expected.dtype.kind != "f" else 1e-2 if expected.dtype == np.float16 else 1e-5
    tolerance = relative * float(np.abs(finite).max(initial=1e-3))
    close = np.isclose(found.astype(float), wanted, rtol=0, atol=tolerance, equal_nan=True)
    return "" if close.all() else f"{int((~close).sum())} of {close.size} elements differ"


if __name__ == "__main__":
    sys.exit(main())
