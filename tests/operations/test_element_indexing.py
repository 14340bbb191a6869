"""GATHER_ELEMENTS, SCATTER_ELEMENTS, SCATTER_ND*, BITWISE_AND, LEFT_SHIFT and ROUND_TO_FORMAT of the extension.

Results are those of NumPy, ONNX Runtime or ml_dtypes, on the reference engine and on the compiling one. Each check
rejects something, whether shapes are known when the model is prepared or only when it is executed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray
from support.executed import model_of
from support.one_result import tensor, truths
from support.small_models import scalar

from nnfmq.engines import interpreter
from nnfmq.engines.compiled.partition import prepare as compiling
from nnfmq.engines.compiled.thread_pool import default_thread_pool
from nnfmq.engines.program import Program
from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.extensions import NAME, PREFIX, TfliteOperation, operation_code
from nnfmq.hal.types import ExtensionNameAndPrefix, Operand
from nnfmq.operations.declaration import NUMPY_TYPES
from nnfmq.validation import validate_model

Array = NDArray[Any]
Arguments = Sequence[Any]
ENGINES = pytest.mark.parametrize("prepare", [interpreter.prepare, compiling], ids=["reference", "compiling"])


@pytest.fixture(autouse=True)
def _stop_thread_pool() -> Iterator[None]:
    yield
    default_thread_pool().stop()


REDUCTIONS = ("none", "add", "mul", "max", "min")
OVERFLOWS = {"largest": 0, "infinity": 1, "nan": 2, "largest, no nan": 3}
LOWEST, HIGHEST = -(2**31), 2**31 - 1


def computed(prepare: Callable[..., Program], name: str, arguments: Arguments, *, unknown: bool = False) -> Array:
    """Return the result, which has the type of the first argument. `unknown`: no tensor has a rank in the model."""
    given = [_pair(argument) for argument in arguments]
    constants = [at for at, argument in enumerate(arguments) if not isinstance(argument, tuple)]
    operands = [(replace(operand, dimensions=()) if unknown else operand, array) for operand, array in given]
    output = replace(given[0][0], dimensions=())
    model = model_of(operation_code(TfliteOperation[name]), operands, [output], constants)
    model = replace(model, extensions=(ExtensionNameAndPrefix(NAME, PREFIX),))
    validate_model(model)
    buffer = bytearray(1 << 16)
    inputs = [array for at, (_, array) in enumerate(given) if at not in constants]
    (found,) = prepare(model).execute(inputs, [buffer])
    count = int(np.prod(found.dimensions))
    return np.frombuffer(buffer, NUMPY_TYPES[output.type], count).reshape(found.dimensions)


def _pair(argument: Any) -> tuple[Operand, Array]:
    if isinstance(argument, tuple):
        return argument[0], argument[1]
    operand, content = scalar(argument)
    return operand, np.frombuffer(content, NUMPY_TYPES[operand.type]).reshape(())


def onnx_runtime(operator: str, inputs: dict[str, Array], **attributes: Any) -> Array:
    """Return what ONNX Runtime computes."""
    onnx: Any = pytest.importorskip("onnx", reason="onnx is not installed")
    runtime: Any = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    types = {name: onnx.helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in inputs.items()}
    values = [onnx.helper.make_tensor_value_info(name, types[name], array.shape) for name, array in inputs.items()]
    first = next(iter(inputs))
    result = onnx.helper.make_tensor_value_info("y", types[first], inputs[first].shape)
    node = onnx.helper.make_node(operator, list(inputs), ["y"], **attributes)
    graph = onnx.helper.make_graph([node], "graph", values, [result])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    found: Array = runtime.InferenceSession(model.SerializeToString()).run(None, inputs)[0]
    return found


# -- gathers and scatters ---------------------------------------------------------------------------------------------


@ENGINES
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "uint8"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_elements_are_gathered_along_an_axis(prepare: Any, dtype: str, axis: int) -> None:
    values = np.arange(24).reshape(2, 3, 4).astype(dtype)
    indices = np.random.default_rng(0).integers(0, values.shape[axis], (2, 3, 4)).astype(np.int32)
    found = computed(
        prepare, "GATHER_ELEMENTS", [tensor(values, dtype, 1.0 * (dtype == "uint8")), _ints(indices), axis]
    )
    np.testing.assert_array_equal(found, np.take_along_axis(values, indices, axis), strict=True)


@ENGINES
def test_indices_may_be_fewer_than_the_elements_and_more_along_the_axis(prepare: Any) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    found = computed(prepare, "GATHER_ELEMENTS", [tensor(values), _ints([[3, 0, 0, 1, 2], [2, 2, 1, 0, 3]]), 1])
    assert found.tolist() == [[3, 0, 0, 1, 2], [6, 6, 5, 4, 7]]


@ENGINES
@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("axis", [0, 1])
def test_elements_are_scattered_as_onnx_runtime_does(prepare: Any, dtype: str, reduction: str, axis: int) -> None:
    random = np.random.default_rng(1)
    values = random.integers(-9, 9, (4, 5)).astype(dtype)
    updates = random.integers(-9, 9, (3, 4)).astype(dtype)
    indices = random.integers(0, 4, (3, 4))  # the same element more than once
    if reduction == "none":
        indices = np.argsort(random.normal(size=(4, 4)), axis=axis)[:3]  # which update is the last is not specified
    inputs = {"x": values, "i": indices, "u": updates}
    arguments = [tensor(values, dtype), _ints(indices), tensor(updates, dtype), axis, REDUCTIONS.index(reduction)]
    found = computed(prepare, "SCATTER_ELEMENTS", arguments)
    expected = onnx_runtime("ScatterElements", inputs, axis=axis, reduction=reduction)
    np.testing.assert_array_equal(found, expected, strict=True)


@ENGINES
@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("indices", [[[2], [0]], [[[1, 3], [0, 0]], [[2, 4], [1, 1]]]], ids=["rows", "elements"])
def test_slices_are_scattered_as_onnx_runtime_does(prepare: Any, dtype: str, reduction: str, indices: Any) -> None:
    random = np.random.default_rng(2)
    places = np.array(indices if reduction == "none" else indices * 2)  # then, each is updated twice
    values = random.integers(-9, 9, (3, 5)).astype(dtype)
    updates = random.integers(-9, 9, (*places.shape[:-1], *values.shape[places.shape[-1] :])).astype(dtype)
    arguments = [tensor(values, dtype), _ints(places), tensor(updates, dtype), REDUCTIONS.index(reduction)]
    found = computed(prepare, "SCATTER_ND_UPDATE", arguments)
    expected = onnx_runtime("ScatterND", {"x": values, "i": places, "u": updates}, reduction=reduction)
    np.testing.assert_array_equal(found, expected, strict=True)


@ENGINES
@pytest.mark.parametrize(("reduction", "expected"), [(0, 9), (1, 11)])
def test_one_index_vector_updates_one_element(prepare: Any, reduction: int, expected: float) -> None:
    values = np.arange(4, dtype=np.float32).reshape(2, 2)
    found = computed(prepare, "SCATTER_ND_UPDATE", [tensor(values), _ints([1, 0]), tensor([9]), reduction])
    assert found.tolist() == [[0, 1], [expected, 3]]


@ENGINES
def test_one_index_vector_scatters_one_element(prepare: Any) -> None:
    found = computed(prepare, "SCATTER_ND", [_ints([1, 0]), _ints([9]), _ints([2, 2])])
    assert found.tolist() == [[0, 0], [9, 0]]


def _ints(values: Any) -> tuple[Operand, Array]:
    return tensor(values, "int32")


MATRIX = tensor(np.zeros((2, 3)))
ONES = tensor(np.ones((2, 3)))
ZEROS = _ints(np.zeros((2, 3), np.int32))


@ENGINES
@pytest.mark.parametrize("unknown", [False, True], ids=["known", "unknown"])
@pytest.mark.parametrize(
    ("rule", "name", "arguments"),
    [
        ("C1", "GATHER_ELEMENTS", [MATRIX, _ints([[0, 3, 0]]), 1]),
        ("C1", "GATHER_ELEMENTS", [MATRIX, _ints([[0, -1, 0]]), 1]),
        ("C1", "GATHER_ELEMENTS", [MATRIX, _ints([[2, 0, 0]]), 0]),
        ("C2", "GATHER_ELEMENTS", [MATRIX, _ints([0, 1]), 0]),
        ("C2", "GATHER_ELEMENTS", [MATRIX, _ints([[[0]]]), 0]),
        ("C2", "GATHER_ELEMENTS", [MATRIX, _ints([[0, 0, 0, 0]]), 0]),
        ("C2", "GATHER_ELEMENTS", [MATRIX, _ints([[0], [0], [0]]), 1]),
        ("A1", "GATHER_ELEMENTS", [MATRIX, ZEROS, 2]),
        ("A1", "GATHER_ELEMENTS", [MATRIX, ZEROS, -3]),
        ("C1", "SCATTER_ELEMENTS", [MATRIX, _ints([[2, 0, 0]]), tensor([[1, 1, 1]]), 0, 0]),
        ("C1", "SCATTER_ELEMENTS", [MATRIX, _ints([[-1, 0, 0]]), tensor([[1, 1, 1]]), 0, 1]),
        ("C2", "SCATTER_ELEMENTS", [MATRIX, _ints([[0, 0, 0, 0]]), tensor([[1, 1, 1, 1]]), 0, 0]),
        ("C2", "SCATTER_ELEMENTS", [MATRIX, ZEROS, tensor([[1, 1, 1]]), 0, 0]),
        ("C3", "SCATTER_ELEMENTS", [MATRIX, ZEROS, ONES, 0, -1]),
        ("C3", "SCATTER_ELEMENTS", [MATRIX, ZEROS, ONES, 0, 5]),
        ("A1", "SCATTER_ELEMENTS", [MATRIX, ZEROS, ONES, 2, 0]),
        ("C1", "SCATTER_ND_UPDATE", [MATRIX, _ints([[2]]), tensor([[1, 1, 1]]), 0]),
        ("C1", "SCATTER_ND_UPDATE", [MATRIX, _ints([[0, -1]]), tensor([1]), 0]),
        ("C2", "SCATTER_ND_UPDATE", [MATRIX, _ints([[0, 0, 0]]), tensor([1]), 0]),
        ("C2", "SCATTER_ND_UPDATE", [MATRIX, _ints([[0]]), tensor([[1, 1]]), 0]),
        ("C2", "SCATTER_ND_UPDATE", [MATRIX, _ints([[0, 1]]), tensor([[1]]), 0]),
        ("C2", "SCATTER_ND_UPDATE", [MATRIX, _ints(0), MATRIX, 0]),
        ("C3", "SCATTER_ND_UPDATE", [MATRIX, _ints([[0]]), tensor([[1, 1, 1]]), -1]),
        ("C3", "SCATTER_ND_UPDATE", [MATRIX, _ints([[0]]), tensor([[1, 1, 1]]), 5]),
        ("C1", "FLOOR_MOD", [_ints([4, 5]), _ints([2, 0])]),
        ("C1", "TRUNCATED_DIV", [_ints([4, 5]), _ints([2, 0])]),
        ("C1", "ROUND_TO_FORMAT", [MATRIX, -1, -14, 65504.0, 0]),
        ("C1", "ROUND_TO_FORMAT", [MATRIX, 24, -14, 65504.0, 0]),
        ("C1", "ROUND_TO_FORMAT", [MATRIX, 10, -150, 65504.0, 0]),
        ("C1", "ROUND_TO_FORMAT", [MATRIX, 10, 150, 65504.0, 0]),
        ("C2", "ROUND_TO_FORMAT", [MATRIX, 10, -14, 65504.0, -1]),
        ("C2", "ROUND_TO_FORMAT", [MATRIX, 10, -14, 65504.0, 4]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_that_do_not_fit_are_rejected(
    prepare: Any, rule: str, name: str, arguments: Arguments, unknown: bool
) -> None:
    with pytest.raises(GeneralFailure, match=rf"\(nnfmq\.tflite\.{name}\): .*\({rule}\)$"):
        computed(prepare, name, arguments, unknown=unknown)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("GATHER_ELEMENTS", [MATRIX, MATRIX, 0]),
        ("SCATTER_ELEMENTS", [tensor([[1]], "uint8", 1.0), _ints([[0]]), tensor([[1]], "uint8", 1.0), 0, 0]),
        ("SCATTER_ND_UPDATE", [MATRIX, _ints([[0]]), _ints([[1, 1, 1]]), 0]),
        ("BITWISE_AND", [MATRIX, MATRIX]),
        ("LEFT_SHIFT", [truths([1]), truths([1])]),
        ("ROUND_TO_FORMAT", [tensor([1], "float16"), 10, -14, 65504.0, 0]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_types_are_rejected(name: str, arguments: Arguments) -> None:
    with pytest.raises(InvalidArgument, match=rf"nnfmq\.tflite\.{name}"):
        computed(interpreter.prepare, name, arguments)


# -- bits -------------------------------------------------------------------------------------------------------------


@ENGINES
def test_bits_that_both_have_are_numpy_s(prepare: Any) -> None:
    a, b = np.array([[LOWEST], [-1], [0b1101]], np.int32), np.array([HIGHEST, -2, 0b0110], np.int32)
    np.testing.assert_array_equal(computed(prepare, "BITWISE_AND", [_ints(a), _ints(b)]), a & b, strict=True)


@ENGINES
def test_truths_that_both_have(prepare: Any) -> None:
    found = computed(prepare, "BITWISE_AND", [truths([0, 0, 1, 1]), truths([0, 1, 0, 1])])
    assert found.tolist() == [0, 0, 0, 1]


@ENGINES
@pytest.mark.parametrize("dtype", ["int32", "uint8", "int8"])
def test_bits_that_are_shifted_out_are_lost(prepare: Any, dtype: str) -> None:
    info = np.iinfo(dtype)
    values = np.array([[info.min], [info.max], [1], [3]], dtype)
    counts = np.arange(info.bits, dtype=dtype)
    scale = 1.0 * (dtype != "int32")
    found = computed(prepare, "LEFT_SHIFT", [tensor(values, dtype, scale), tensor(counts, dtype, scale)])
    wide = values.astype(np.int64) << counts.astype(np.int64)
    np.testing.assert_array_equal(found, wide.astype(dtype), strict=True)


@ENGINES
def test_a_shift_by_all_bits_or_by_less_than_none_is_zero(prepare: Any) -> None:
    found = computed(prepare, "LEFT_SHIFT", [_ints([1, -1, 7, 7, 7]), _ints([32, 33, -1, LOWEST, HIGHEST])])
    assert found.tolist() == [0] * 5


# -- narrower floats --------------------------------------------------------------------------------------------------


def reals() -> NDArray[np.float32]:
    """Return numbers of all magnitudes, those halfway between two numbers of a format, zeros, infinities and NaN."""
    random = np.random.default_rng(3)
    spread = random.normal(size=400) * 2.0 ** random.integers(-30, 20, 400)
    halves = np.arange(-64, 64) / 16 * 2.0 ** np.arange(-8, 8)[:, None]
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.99, 65520, 448, 464, 465, -480, 57344, 61440, 2.0**-24]
    return np.concatenate([spread, halves.ravel(), special]).astype(np.float32)


@ENGINES
@pytest.mark.parametrize(
    ("name", "fraction", "exponent", "largest", "overflow"),
    [
        ("float16", 10, -14, 65504.0, "infinity"),
        ("bfloat16", 7, -126, 3.3895313892515355e38, "infinity"),
        ("float8_e5m2", 2, -14, 57344.0, "infinity"),
        ("float8_e4m3fn", 3, -6, 448.0, "nan"),
        ("float4_e2m1fn", 1, 0, 6.0, "largest, no nan"),
    ],
)
def test_numbers_are_rounded_to_those_of_a_format(
    prepare: Any, name: str, fraction: int, exponent: int, largest: float, overflow: str
) -> None:
    ml_dtypes: Any = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    values = reals()
    if overflow == "largest, no nan":
        values = values[~np.isnan(values)]  # the format has none
    found = computed(prepare, "ROUND_TO_FORMAT", [tensor(values), fraction, exponent, largest, OVERFLOWS[overflow]])
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16 if name == "float16" else getattr(ml_dtypes, name)).astype(np.float32)
    np.testing.assert_array_equal(found, expected, strict=True)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


@ENGINES
@pytest.mark.parametrize(
    ("overflow", "expected"),
    [
        ("largest", [448, -448, 448, -448, np.nan]),
        ("infinity", [np.inf, -np.inf, np.inf, -np.inf, np.nan]),
        ("nan", [np.nan] * 5),
        ("largest, no nan", [448, -448, 448, -448, 0]),
    ],
)
def test_larger_numbers_become_what_overflow_says(prepare: Any, overflow: str, expected: list[float]) -> None:
    values = tensor([1000, -1000, np.inf, -np.inf, np.nan])
    found = computed(prepare, "ROUND_TO_FORMAT", [values, 3, -6, 448.0, OVERFLOWS[overflow]])
    np.testing.assert_array_equal(found, np.array(expected, np.float32), strict=True)
