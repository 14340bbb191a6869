"""FarmHash against the C++ implementation's values, and LSH_PROJECTION against its definition."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace
from support.one_result import tensor
from support.small_models import graph, scalar

from nnfmq.engines import interpreter
from nnfmq.hal.types import LifeTime, Operand, OperandType, Operation, OperationType
from nnfmq.operations.lsh_projection import fingerprint64
from nnfmq.validation import validate_model

Array = npt.NDArray[Any]
OUTPUT = Operand(OperandType.TENSOR_INT32, (0,), lifetime=LifeTime.SUBGRAPH_OUTPUT)
SPARSE_DEPRECATED, DENSE, SPARSE = 1, 2, 3

PUBLISHED = {  # examples of BigQuery's FARM_FINGERPRINT
    b"1footrue": -1541654101129638711,
    b"2applefalse": 2794438866806483259,
    b"3true": -4880158226897771312,
}
BY_LENGTH = {  # farmhash 1.1 (C++), Fingerprint64 of the characters 33 + 7 * i % 90
    4: 0x98F5BE5B22958558,
    7: 0xEECFA6806AF0AD02,
    8: 0xBFE89E3958B0BD2D,
    16: 0x80973607791AC20A,
    17: 0x63CE9EE2EB5A9B9B,
    32: 0x42AD1BCFCA5447CA,
    33: 0x512971C4311651F1,
    64: 0xE89D7555193CB5D2,
    65: 0x9C2FCCDB6970267A,
    128: 0x558D7524AE02E6EE,
    129: 0x0FCC9D8FD6A83014,
    200: 0x97209875643B9613,
}


def rows(*keys: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)


@pytest.mark.parametrize("text", PUBLISHED)
def test_a_fingerprint_is_the_published_one(text: bytes) -> None:
    assert fingerprint64(rows(text)).view(np.int64).tolist() == [PUBLISHED[text]]


@pytest.mark.parametrize("length", BY_LENGTH)
def test_a_fingerprint_of_each_kind_of_length_is_that_of_the_c_implementation(length: int) -> None:
    text = bytes(33 + i * 7 % 90 for i in range(length))

    assert fingerprint64(rows(text)).tolist() == [BY_LENGTH[length]]


def test_each_row_is_hashed_by_itself() -> None:
    texts = [bytes([first, *range(99)]) for first in (1, 2, 3)]

    assert fingerprint64(rows(*texts)).tolist() == [int(fingerprint64(rows(text))[0]) for text in texts]


def bit(seed: float, input: Array, weights: Any) -> int:
    score = 0.0
    for row, weight in zip(input, [1.0] * len(input) if weights is None else weights, strict=True):
        key = struct.pack("<f", seed) + np.ascontiguousarray(row).tobytes()
        score += float(weight) * float(fingerprint64(rows(key)).view(np.int64)[0])
    return int(score > 0)


def projected(seeds: Any, input: Any, weights: Any, kind: int, dtype: str = "float32") -> list[int]:
    (seed_operand, seed_values), (weight_operand, weight_values) = tensor(seeds, dtype), tensor(weights or [0], dtype)
    lifetime = LifeTime.NO_VALUE if weights is None else LifeTime.SUBGRAPH_INPUT
    type_operand, type_bytes = scalar(kind)
    given = [replace(operand, lifetime=LifeTime.SUBGRAPH_INPUT) for operand in (seed_operand, input[0])]
    operands = [*given, replace(weight_operand, lifetime=lifetime), type_operand, OUTPUT]
    model = graph(operands, [Operation(OperationType.LSH_PROJECTION, (0, 1, 2, 3), (4,))], {3: type_bytes})
    found = np.empty(seeds.size, np.int32)

    validate_model(model)
    inputs = [seed_values, input[1], weight_values][: len(model.main.input_indexes)]
    (shape,) = interpreter.prepare(model).execute(inputs, [found])
    return [int(value) for value in found[: shape.dimensions[0]]]


SEEDS = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
INPUTS = [
    tensor([3, 1, 4, 1, 5, 9], "int32"),
    tensor(np.random.default_rng(2).standard_normal((6, 5, 3))),
    tensor(np.arange(12).reshape(6, 2), "float16"),
    tensor(np.arange(6), "uint8", 1.0, 0),
]
WEIGHTS = [0.5, -1.25, 2.0, 0.125, -0.5, 1.0]


@pytest.mark.parametrize("input", INPUTS, ids=lambda pair: pair[0].type.name)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_dense_projection_is_a_bit_for_each_seed(dtype: str, input: Any) -> None:
    seeds = SEEDS.astype(dtype)

    expected = [bit(float(seed), input[1], WEIGHTS) for seed in seeds.ravel()]
    assert projected(seeds, input, WEIGHTS, DENSE, dtype) == expected


def test_a_sparse_projection_is_a_number_for_each_row_of_seeds() -> None:
    bits = [[bit(float(seed), INPUTS[0][1], None) for seed in row] for row in SEEDS]
    numbers = [int("".join(map(str, row)), 2) for row in bits]

    assert projected(SEEDS, INPUTS[0], None, SPARSE_DEPRECATED) == numbers
    assert projected(SEEDS, INPUTS[0], None, SPARSE) == [n + 16 * i for i, n in enumerate(numbers)]


def test_thirty_two_bits_fill_an_int32() -> None:
    seeds = np.random.default_rng(3).standard_normal((2, 32)).astype(np.float32)
    bits = ["".join(str(bit(float(seed), INPUTS[0][1], None)) for seed in row) for row in seeds]

    expected = [int.from_bytes(int(row, 2).to_bytes(4, "little"), "little", signed=True) for row in bits]
    assert projected(seeds, INPUTS[0], None, SPARSE) == expected
