"""What files keep small or leave open: weights as halves or codes, and shapes that the file computes."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.both_runners import Theirs, ours
from support.tflite_files import CONV, Operator, Tensor, ints, single, writer

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.types import LifeTime, OperandType
from nnfmq.importers import load

Array = npt.NDArray[Any]

RNG = np.random.default_rng(11)
X = Tensor("x", (2, 4))
Y = Tensor("y", (2, 3))
REAL = RNG.uniform(-1, 1, (3, 4)).astype(np.float32)
CODES = RNG.integers(-127, 128, (3, 4)).astype(np.int8)
GIVEN = RNG.uniform(-1, 1, (2, 4)).astype(np.float32)
SCALES = np.float32([0.01, 0.02, 0.03])


def dequantized_first(weights: Any) -> bytes:
    """Return a file that turns `weights` into floats, and connects the input with them."""
    tensors = [X, weights, Tensor("real", (3, 4)), Y]
    operators = [Operator("DEQUANTIZE", (1,), (2,)), Operator("FULLY_CONNECTED", (0, 2), (3,))]
    data: bytes = writer.write(tensors, operators, (0,), (3,))
    return data


def coded(*scales: float, zero_point: int = 0) -> Any:
    return Tensor("w", (3, 4), "INT8", CODES.tobytes(), scales, (zero_point,) * len(scales))


@pytest.mark.parametrize(
    "weights",
    [Tensor("w", (3, 4), "FLOAT16", REAL.astype(np.float16).tobytes()), coded(0.01, zero_point=5)],
    ids=["halves", "codes"],
)
def test_weights_that_the_file_widens_are_constants_of_floats(weights: Any) -> None:
    content = dequantized_first(weights)
    (operation,) = load(content).model.main.operations
    operand = load(content).model.main.operands[operation.inputs[1]]
    assert (operation.type, operand.type) == (Op.FULLY_CONNECTED, OperandType.TENSOR_FLOAT32)
    assert operand.lifetime == LifeTime.CONSTANT_COPY
    np.testing.assert_allclose(ours(content)([GIVEN]), Theirs(content)([GIVEN]), rtol=1e-6)


@pytest.mark.parametrize(
    ("weights", "real"),
    [
        (coded(0.5, zero_point=5), (CODES.astype(np.float32) - 5) * 0.5),
        (coded(*SCALES), CODES * SCALES[:, np.newaxis]),
    ],
    ids=["one scale", "scales per channel"],
)
def test_codes_as_weights_of_a_float_input_are_the_numbers_that_they_stand_for(weights: Any, real: Array) -> None:
    (found,) = ours(single("FULLY_CONNECTED", [X, weights, Y]))([GIVEN])
    scale = np.abs(GIVEN).max(axis=1, keepdims=True) / 127  # TFLite's, of the input at each execution
    represented = np.rint(GIVEN / scale) * scale
    np.testing.assert_allclose(found, represented @ real.astype(np.float32).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "weights",
    [Tensor("w", (3, 4), "FLOAT16", struct.pack("<12H", *[0x7C01] * 12)), coded(3e38)],
    ids=["signalling", "endless"],
)
def test_numbers_that_are_none_are_taken_without_a_warning(weights: Any) -> None:
    load(dequantized_first(weights))  # a warning would be an error here


def test_the_channels_of_a_depthwise_filter_are_its_last_dimension() -> None:
    weights = Tensor("w", (1, 1, 1, 3), "INT8", bytes([1, 2, 3]), SCALES.tolist(), (0, 0, 0), dimension=3)
    image = Tensor("x", (1, 1, 1, 3))
    content = single("DEPTHWISE_CONV_2D", [image, weights, image], "DepthwiseConv2DOptions", CONV)
    (found,) = ours(content)([np.ones((1, 1, 1, 3), np.float32)])
    np.testing.assert_allclose(found.reshape(-1), [0.01, 0.04, 0.09], rtol=1e-6)


def test_halves_that_come_in_are_widened_by_cast() -> None:
    content = single("DEQUANTIZE", [Tensor("x", (2, 4), "FLOAT16"), Tensor("y", (2, 4))])
    (operation,) = load(content).model.main.operations
    (found,) = ours(content)([GIVEN.astype(np.float16)])
    assert operation.type == Op.CAST
    np.testing.assert_array_equal(found, GIVEN.astype(np.float16).astype(np.float32))


def test_widened_weights_that_claim_the_same_bytes_cannot_multiply_the_memory() -> None:
    # 300 tensors over one buffer of 100,000 codes: as floats 120 MB.
    size, count = 100_000, 300
    kind = {"type": "INT8", "scales": [0.1], "zero_points": [0]}
    first = Tensor("w", (1, size), data=bytes(size), **kind)
    others = [Tensor("w", (1, size), extra={"Buffer": 1}, **kind) for _ in range(count)]
    results = [Tensor("y", (1, 1)) for _ in range(count)]
    operators = [Operator("FULLY_CONNECTED", (0, 2 + n), (2 + count + n,)) for n in range(count)]
    tensors = [Tensor("x", (1, size)), first, *others, *results]
    content = writer.write(tensors, operators, (0,), range(2 + count, 2 + 2 * count))
    tracemalloc.start()
    with pytest.raises(InvalidArgument, match="the file's size allows"):
        load(content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def computed_shape() -> bytes:
    """Return a file that flattens its input as converters write it: (SHAPE(x)[0], -1)."""
    tensors = [
        Tensor("x", (2, 3, 4)), Tensor("shape", (3,), "INT32"), Tensor("zero", (1,), "INT32", ints(0)),
        Tensor("one", (1,), "INT32", ints(1)), Tensor("batch", (), "INT32"), Tensor("rest", (), "INT32", ints(-1)),
        Tensor("wanted", (2,), "INT32"), Tensor("y", (2, 12)),
    ]  # fmt: skip
    operators = [
        Operator("SHAPE", (0,), (1,), "ShapeOptions", {"OutType": 2}),
        Operator("STRIDED_SLICE", (1, 2, 3, 3), (4,), "StridedSliceOptions", {"ShrinkAxisMask": 1}),
        Operator("PACK", (4, 5), (6,), "PackOptions", {"ValuesCount": 2, "Axis": 0}),
        Operator("RESHAPE", (0, 6), (7,), "ReshapeOptions"),
    ]
    data: bytes = writer.write(tensors, operators, (0,), (7,))
    return data


def test_the_shape_that_a_file_computes_is_the_one_that_it_states() -> None:
    x = RNG.uniform(-1, 1, (2, 3, 4)).astype(np.float32)
    assert [operation.type for operation in load(computed_shape()).model.main.operations] == [Op.RESHAPE]
    np.testing.assert_array_equal(ours(computed_shape())([x]), Theirs(computed_shape())([x]))


IMAGE = Tensor("x", (1, 2, 2, 2))
FILTER = Tensor("w", (3, 2, 2, 2), data=RNG.uniform(-1, 1, 24).astype(np.float32).tobytes())
COMPUTED: dict[str, tuple[tuple[int, ...], list[Any], tuple[int, ...], str]] = {
    "BROADCAST_TO": ((2, 4), [Tensor("x", (1, 4)), None], (2, 4), ""),
    "FILL": ((2, 4), [None, Tensor("v", (), data=struct.pack("<f", 7))], (2, 4), ""),
    "RESIZE_BILINEAR": ((3, 5), [IMAGE, None], (1, 3, 5, 2), "ResizeBilinearOptions"),
    "RESIZE_NEAREST_NEIGHBOR": ((3, 5), [IMAGE, None], (1, 3, 5, 2), "ResizeNearestNeighborOptions"),
    "TRANSPOSE_CONV": ((1, 4, 4, 3), [None, FILTER, IMAGE], (1, 4, 4, 3), "TransposeConvOptions"),
}


def computed_size(name: str) -> bytes:
    """Return a file whose operator takes a size that others compute from the shape of an input."""
    size, given, shape, table = COMPUTED[name]
    count = len(size)
    start = [
        Tensor("like", (1,) * count),
        Tensor("shape", (count,), "INT32"),
        Tensor("rest", (count,), "INT32", ints(*(extent - 1 for extent in size))),
        Tensor("size", (count,), "INT32"),
    ]
    tensors = [*start, *(tensor for tensor in given if tensor is not None), Tensor("y", shape)]
    places = [3 if tensor is None else tensors.index(tensor) for tensor in given]
    sources = [0, *(place for place in places if place != 3 and tensors[place].data is None)]
    options = {"Padding": 0, "StrideW": 2, "StrideH": 2} if name == "TRANSPOSE_CONV" else {}
    last = len(tensors) - 1
    operators = [
        Operator("SHAPE", (0,), (1,), "ShapeOptions", {"OutType": 2}),
        Operator("ADD", (1, 2), (3,), "AddOptions"),
        Operator(name, places, (last,), table, options),
    ]
    data: bytes = writer.write(tensors, operators, sources, (last,))
    return data


@pytest.mark.parametrize("name", COMPUTED)
def test_a_size_that_a_file_computes_from_a_shape_is_that_of_the_result_it_states(name: str) -> None:
    content = computed_size(name)
    imported, litert = ours(content), Theirs(content)
    shapes = [info.shape for info in imported.loaded.inputs]
    inputs = [RNG.uniform(-1, 1, shape).astype(np.float32) for shape in shapes]
    np.testing.assert_allclose(imported(inputs), litert(inputs), rtol=1e-5, atol=1e-6)
    assert Op.ADD not in [operation.type for operation in imported.loaded.model.main.operations]


def test_operators_that_no_output_needs_are_dropped() -> None:
    tensors = [Tensor(name, (2,)) for name in ("x", "needless", "y")]
    operators = [Operator("COS", (0,), (1,)), Operator("RELU", (0,), (2,))]
    loaded = load(writer.write(tensors, operators, (0,), (2,)))
    assert [operation.type for operation in loaded.model.main.operations] == [Op.RELU]
