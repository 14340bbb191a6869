"""Run the node tests of the package onnx through nnfmq's importer and interpreter, and count the results.

    python3 tools/onnx_node_tests.py [--refused] [--reasons] [--device onnxruntime]

Inputs are bound by value, as sessions of nnfmq.compat.onnxruntime do, if the importer needs constants: integers, and
then floats, of up to 16 elements. Inputs of unknown shapes get those of the test. The share is that of tests that have
only tensors of numbers and no operator of strings, sequences, optionals, training or ai.onnx.ml.

A test passes if the importer accepts the model and each output is within 1e-5 of the largest element (float16 and
bfloat16: 1e-2) of the expected one; from numbers that a test states with 4 decimals, one unit of the last. It is
refused if the importer rejects the model with a reason. Everything else is a failure: then the exit status is 1.

With --device, an embedded driver runs the models on this device, which hosts ONNX Runtime, by call and by burst. A test
passes if the bits of all outputs are those of ONNX Runtime in this process, with one thread each. It is refused if the
device says which input or output is no tensor of numbers, and left out if ONNX Runtime itself does not run it here.
"""

from __future__ import annotations

import argparse
import ctypes
import math
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
_NUMBERS = r"tensor\((float|double|float16|bfloat16|bool|u?int(8|16|32|64))\)"
_NOT_NUMERIC = ("StringConcat", "StringNormalizer", "StringSplit", "RegexFullMatch", "TfIdfVectorizer", "ImageDecoder")


def main() -> int:
    """Print the counts and the failures; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refused", action="store_true", help="print the reason of each refusal")
    parser.add_argument("--reasons", action="store_true", help="print how often each operator is refused, and why")
    parser.add_argument("--device", help="compare this device, which hosts ONNX Runtime, with ONNX Runtime")
    arguments = parser.parse_args()
    if arguments.device is not None:
        return _compare_with_onnxruntime(arguments.device, arguments.refused)
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


# ----------------------------------------------------------------------------------------------------------------------
# A device that hosts ONNX Runtime, compared with ONNX Runtime in this process.


def _compare_with_onnxruntime(device: str, shows_refused: bool) -> int:
    """Print the counts and the failures; return the exit status."""
    counts: Counter[str] = Counter()
    with nnfmq.connect(embedded=True) as client:
        for case in node_cases():
            status, reason = hosted_outcome(client.device(device), case)
            counts[status] += 1
            if status == "failed" or (status != "passed" and shows_refused):
                print(f"{status}: {case.name}: {reason}")
    print(", ".join(f"{counts[status]} {status}" for status in ("passed", "refused", "failed", "left out")))
    total = counts["passed"] + counts["failed"]
    print(f"of those that ONNX Runtime runs, with tensors of numbers: {counts['passed']} of {total}")
    return 1 if counts["failed"] else 0


def hosted_outcome(device: nnfmq.Device, case: Any) -> tuple[str, str]:
    """Return "passed", "refused", "failed" or "left out", and the reason."""
    data = case.model.SerializeToString()
    given = {info.name: value for info, value in zip(case.model.graph.input, case.data_sets[0][0], strict=True)}
    try:
        expected = _own_results(data, given)
    except Exception as error:  # noqa: BLE001  whatever ONNX Runtime raises
        return "left out", str(error)
    try:
        found = _hosted_results(device, data, given)
    except NnfmqError as error:
        is_clear = isinstance(error, InvalidArgument) and "put '" in str(error) and "has elements of type" in str(error)
        return "refused" if expected is None and is_clear else "failed", str(error)
    if expected is None:
        return "failed", "it runs, although not all inputs and outputs are tensors of numbers"
    for form, results in found.items():
        for index, (result, wanted) in enumerate(zip(results, expected[_EXECUTIONS[form]], strict=True)):
            if (result.dtype, result.shape) != (wanted.dtype, wanted.shape):
                return "failed", f"{form}: output {index} is {result.dtype} {result.shape}, not {wanted.shape}"
            if result.tobytes() != wanted.tobytes():
                return "failed", f"{form}: output {index} has other bits"
    return "passed", ""


_EXECUTIONS = {"call": 0, "burst": 2}
"""Which execution of the model has the results of a form: random numbers differ from one to the next."""


def _own_results(data: bytes, given: dict[str, Any]) -> list[list[Any]] | None:
    """Return the results of ONNX Runtime in this process, of three executions.

    None if not all inputs and outputs are tensors of numbers.

    Raises:
        Exception: If ONNX Runtime does not run the model.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    if not all(re.fullmatch(_NUMBERS, info.type) for info in (*session.get_inputs(), *session.get_outputs())):
        return None
    feeds = {info.name: _ort_value(_words(given[info.name]), info.type) for info in session.get_inputs()}
    return [[_values_of(value) for value in session.run_with_ort_values(None, feeds)] for _ in range(3)]


def _hosted_results(device: nnfmq.Device, data: bytes, given: dict[str, Any]) -> dict[str, Any]:
    """Return the results of a call and of the second execution of a burst."""
    sizes = {name: np.shape(_array(value)) for name, value in given.items()}
    # A request cannot say that a tensor has rank 0, or no elements: the preparation does.
    shapes: Any = {name: shape for name, shape in sizes.items() if not all(shape or (0,))}
    options: dict[str, Any] = {"runtime_options": {"threads": 1}}
    try:
        prepared = device.prepare(data, shapes=shapes, **options)
    except InvalidArgument as error:
        if "shapes: there is no input" not in str(error):  # an initializer is no input
            raise
        prepared = device.prepare(data, **options)
    with prepared as model:
        arrays = [_words(given[info.name]) for info in model.inputs]
        found: dict[str, Any] = {"call": model.execute(*arrays)}
        with model.burst() as burst:
            burst.execute(*arrays)
            found["burst"] = tuple(map(np.copy, burst.execute(*arrays)))
    return found


def _words(value: Any) -> Any:
    """Return an input as nnfmq takes it: bfloat16 as its words."""
    array = np.ascontiguousarray(_array(value)).reshape(np.shape(_array(value)))
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def _ort_value(array: Any, kind: str) -> Any:
    import onnxruntime as ort

    if kind == "tensor(bfloat16)":
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, 16)
    return ort.OrtValue.ortvalue_from_numpy(array)


def _values_of(value: Any) -> Any:
    if value.data_type() != "tensor(bfloat16)":
        return value.numpy()
    return np.array((ctypes.c_uint16 * math.prod(value.shape())).from_address(value.data_ptr())).reshape(value.shape())


if __name__ == "__main__":
    sys.exit(main())
