"""Sparse constants: dense when they are read, as LiteRT's DENSIFY makes them, and limited by the file's size."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.both_runners import Theirs, ours
from support.tflite_files import Operator, Tensor, writer

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers import load

Sparsity: Any = writer.Sparsity
DENSE = np.zeros((4, 6), np.float32)
DENSE[0, 2], DENSE[2, 0], DENSE[2, 5], DENSE[3, 1] = 1.5, -2, 3, 4


def rows(dense: npt.NDArray[Any]) -> tuple[Any, bytes]:
    """Return the compressed rows of a matrix."""
    places = [np.flatnonzero(row) for row in dense]
    segments = np.cumsum([0, *map(len, places)]).tolist()
    indexes = np.concatenate(places).tolist()
    return Sparsity((0, 1), (len(dense), (segments, indexes))), dense[dense != 0].tobytes()


def blocks(dense: npt.NDArray[Any]) -> tuple[Any, bytes]:
    """Return a matrix in blocks of 2x3: rows of blocks, which of them have values, and the blocks' elements."""
    parts = dense.reshape(2, 2, 2, 3).transpose(0, 2, 1, 3)  # row of blocks, column, row in it, column in it
    places = [np.flatnonzero(row.any(axis=(1, 2))) for row in parts]
    segments = np.cumsum([0, *map(len, places)]).tolist()
    values = np.concatenate([row[place] for row, place in zip(parts, places, strict=True)])
    return Sparsity((0, 1, 2, 3), (2, (segments, np.concatenate(places).tolist()), 2, 3), (0, 1)), values.tobytes()


def model(sparsity: Any, data: bytes, kind: str = "FLOAT32") -> bytes:
    """Return x + DENSIFY(constant)."""
    tensors = [
        Tensor("x", (4, 6), kind), Tensor("sparse", (4, 6), kind, data, sparsity=sparsity),
        Tensor("dense", (4, 6), kind), Tensor("y", (4, 6), kind),
    ]  # fmt: skip
    operators = [Operator("DENSIFY", (1,), (2,), "DensifyOptions"), Operator("ADD", (0, 2), (3,), "AddOptions")]
    content: bytes = writer.write(tensors, operators, (0,), (3,))
    return content


@pytest.mark.parametrize("form", [rows, blocks])
def test_a_sparse_constant_is_litert_s(form: Any) -> None:
    content = model(*form(DENSE))
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    (found,) = ours(content)([x])
    np.testing.assert_array_equal(found, x + DENSE)
    np.testing.assert_array_equal(found, Theirs(content)([x])[0])
    assert [operation.type.name for operation in load(content).model.main.operations] == ["ADD"]


GOOD, VALUES = rows(DENSE)
SEGMENTS, INDEXES = GOOD.levels[1]


@pytest.mark.parametrize(
    ("sparsity", "data"),
    [
        (GOOD, VALUES[:-4]),
        (Sparsity((0, 0), GOOD.levels), VALUES),
        (Sparsity((0, 1), (4,)), VALUES),
        (Sparsity((0, 1), (5, GOOD.levels[1])), VALUES),
        (Sparsity((0, 1), (4, (SEGMENTS[:-1], INDEXES))), VALUES),
        (Sparsity((0, 1), (4, (SEGMENTS, [2, 0, 6, 1]))), VALUES),
        (Sparsity((0, 1), (4, (SEGMENTS, [2, -1, 5, 1]))), VALUES),
        (Sparsity((0, 1), (4, ([0, 3, 1, 3, 4], INDEXES))), VALUES),
        (Sparsity((0, 1), (4, (SEGMENTS, [*INDEXES, 0]))), VALUES),
        (Sparsity((0, 1, 2), (4, 2, 4), (1,)), VALUES),
        (Sparsity((0, 1, 2), (4, 2, 3), (2,)), VALUES),
    ],
)
def test_indexes_that_do_not_fit_are_rejected(sparsity: Any, data: bytes) -> None:
    with pytest.raises(InvalidArgument, match="sparse tensor"):
        load(model(sparsity, data))


def test_the_dense_size_is_limited_by_the_file_s() -> None:
    sparsity = Sparsity((0, 1), (1, ([0, 1], [0])))
    tensors = [
        Tensor("x", (1, 1 << 26)), Tensor("w", (1, 1 << 26), data=bytes(4), sparsity=sparsity),
        Tensor("y", (1, 1 << 26)),
    ]  # fmt: skip
    content = writer.write(tensors, [Operator("ADD", (0, 1), (2,), "AddOptions")], (0,), (2,))
    with pytest.raises(InvalidArgument, match="sparse tensors of 268435456 bytes or more: a file of"):
        load(content)
