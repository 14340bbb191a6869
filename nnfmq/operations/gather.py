"""GATHER, EMBEDDING_LOOKUP, HASHTABLE_LOOKUP and TOPK_V2: elements selected by index, key or size.

Indices and keys are attributes: they are validated at preparation, so that no kernel can read outside its array.
GATHER's indices may also come with the request; then each execution validates a private copy.

GATHER            C1 an index is in [0, dimension)
EMBEDDING_LOOKUP  C1 an index is in [0, dimension)   C2 lookups are a vector, values have rank 2 or more
HASHTABLE_LOOKUP  C2 lookups and keys are vectors    C3 there are as many keys as values
TOPK_V2           C4 k is in [1, last dimension]
"""

from __future__ import annotations

import numpy as np

from nnfmq.hal.types import OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Run, Shape, Tensor
from nnfmq.operations.kernel_adapters import stateless
from nnfmq.operations.quantization import require_quantization
from nnfmq.operations.reshape_concat import data_movement_variants, moved_in_extension
from nnfmq.operations.shapes import normalize_axis, require

_BAND_ELEMENTS = 1 << 18  # sorted at a time: NumPy's indices take 8 bytes, quantized values only one


def _require_any(indices: Array) -> None:
    require(indices.size > 0, "R3", "an input has a dimension of 0")


def _require_inside(indices: Array, dimension: int) -> None:
    _require_any(indices)
    values = indices.ravel().tolist() if indices.size == 1 else (int(indices.min()), int(indices.max()))  # 4 µs less
    inside = all(0 <= value < dimension for value in values)
    require(inside, "C1", outside(dimension))


def outside(dimension: int) -> str:
    """Return the text of the error of an index that is not in [0, `dimension`)."""
    return f"an index is outside [0, {dimension})"


def _require_same(input: Tensor, output: Tensor) -> None:
    same = (input.scale, input.zero_point) == (output.scale, output.zero_point)
    require(same, "Q7", f"scale and zero point differ from the input's ({input.scale}, {input.zero_point})")


def gather_shape(input: Shape, *, axis: int, indices: Array) -> Shape:
    """Return the input's shape with that of the indices in place of the axis."""
    axis = normalize_axis(axis, len(input))
    _require_inside(indices, input[axis])
    return input[:axis] + indices.shape + input[axis + 1 :]


def gather(input: Array, *, axis: int, indices: Array) -> Array:
    """Return the slices of `input` at the indices."""
    return input.take(indices, axis=axis)


def gather_unbound(input: Array, axis: Array, indices: Array) -> Array:
    """Return the slices of `input` at the indices, which are copied and then checked."""
    positions, dimension = indices.astype(np.intp), int(axis)
    _require_inside(positions, input.shape[dimension])
    return input.take(positions, axis=dimension)


def embedding_lookup_shape(values: Shape, *, lookups: Array) -> Shape:
    """Return the shape of as many rows as there are lookups."""
    message = f"lookups {lookups.shape} and values {values} must have rank 1 and at least 2"
    require(lookups.ndim == 1 and len(values) >= 2, "C2", message)
    _require_inside(lookups, values[0])
    return lookups.shape + values[1:]


def embedding_lookup(values: Array, *, lookups: Array) -> Array:
    """Return the rows at the lookups."""
    return values.take(lookups, axis=0)


def hashtable_lookup_shape(values: Shape, *, lookups: Array, keys: Array) -> tuple[Shape, Shape]:
    """Return the shapes of the selected rows and of the hits."""
    require(lookups.ndim == keys.ndim == 1, "C2", f"lookups {lookups.shape} and keys {keys.shape} are not vectors")
    _require_any(lookups)
    require(keys.shape == values[:1], "C3", f"{len(keys)} keys for values of shape {values}")
    return lookups.shape + values[1:], lookups.shape


def plan_hashtable_lookup(values: Tensor, *, output: tuple[Tensor, Tensor], lookups: Array, keys: Array) -> Run:
    """Plan rows selected by key (keys ascend); a missing key gives zero bytes and no hit."""
    found, hits = output
    _require_same(values, found)
    require_quantization(hits, 1.0, 0)
    rows = np.minimum(np.searchsorted(keys, lookups), len(keys) - 1)
    is_hit = keys[rows] == lookups
    missing = np.flatnonzero(~is_hit)

    def run(array: Array) -> tuple[Array, Array]:
        result = array.take(rows, axis=0)
        result[missing] = 0
        return result, is_hit.astype(np.uint8)

    return run


def topk_shape(input: Shape, *, k: int) -> tuple[Shape, Shape]:
    """Return the input's shape with `k` as the last dimension, for values and indices."""
    require(bool(input), "R1", "the input has no dimensions")
    require(0 < k <= input[-1], "C4", f"k is {k}, allowed is 1 to {input[-1]}")
    shape = (*input[:-1], k)
    return shape, shape


def plan_topk(input: Tensor, *, output: tuple[Tensor, Tensor], k: int) -> Run:
    """Plan the `k` largest of each row and their indices."""
    _require_same(input, output[0])
    return lambda array: topk(array, k)


def topk(array: Array, k: int) -> tuple[Array, Array]:
    """Return the `k` largest values of each row, descending, and their indices. Of equal values, the last is first."""
    rows = array.copy().reshape(-1, array.shape[-1])  # read twice: a client must not change it in between
    values, indices = np.empty((len(rows), k), rows.dtype), np.empty((len(rows), k), np.int32)
    count = max(1, _BAND_ELEMENTS // rows.shape[1])
    for start in range(0, len(rows), count):
        band = slice(start, start + count)
        order = np.argsort(rows[band], axis=-1, kind="stable")[:, : -k - 1 : -1]
        values[band], indices[band] = np.take_along_axis(rows[band], order, axis=-1), order
    shape = (*array.shape[:-1], k)
    return values.reshape(shape), indices.reshape(shape)


def topk_first(array: Array, *, k: int) -> tuple[Array, Array]:
    """Return the same as `topk`, as TFLite defines it: of equal values, the first is first."""
    values, from_end = topk(array[..., ::-1], k)
    return values, (array.shape[-1] - 1 - from_end).astype(np.int32)


DECLARATIONS = (
    op.Declaration(
        OperationType.GATHER,
        since=op.V1_2,
        overloads=(
            op.overload(op.data("input"), op.attribute("axis"), op.attribute("indices", op.I32), level=op.V1_2),
        ),
        variants=data_movement_variants(stateless(gather), op.V1_2, int32=op.V1_2),
        shape=gather_shape,
        same_quantization=True,
        unbound=gather_unbound,
        extended=moved_in_extension(stateless(gather), op.B8, *op.WIDE),
    ),
    op.Declaration(
        OperationType.EMBEDDING_LOOKUP,
        since=op.V1_0,
        overloads=(op.overload(op.attribute("lookups", op.I32), op.data("values")),),
        variants=tuple(
            op.Variant({"T": type}, level, stateless(embedding_lookup))
            for type, level in (
                (op.F32, op.V1_0),
                (op.I32, op.V1_2),
                (op.Q8, op.V1_2),
                (op.F16, op.V1_3),
                (op.Q8S, op.V1_3),
            )
        ),
        shape=embedding_lookup_shape,
        same_quantization=True,
        extended=(op.sixteen_bits(*op.of_types(stateless(embedding_lookup), op.Q16S)),),
    ),
    op.Declaration(
        OperationType.HASHTABLE_LOOKUP,
        since=op.V1_0,
        overloads=(op.overload(op.attribute("lookups", op.I32), op.attribute("keys", op.I32), op.data("values")),),
        variants=tuple(op.Variant({"T": type}, op.V1_0, plan_hashtable_lookup) for type in (op.F32, op.I32, op.Q8)),
        shape=hashtable_lookup_shape,
        outputs=("T", op.Q8),
    ),
    op.Declaration(
        OperationType.TOPK_V2,
        since=op.V1_2,
        overloads=(op.overload(op.data("input"), op.attribute("k"), level=op.V1_2),),
        variants=data_movement_variants(plan_topk, op.V1_2, int32=op.V1_2),
        shape=topk_shape,
        outputs=("T", op.I32),
        extended=(
            op.tflite(*op.of_types(stateless(topk_first), op.F32, op.F16, op.I32, op.Q8, op.Q8S, *op.WIDE)),
            op.sixteen_bits(*op.of_types(stateless(topk_first), op.Q16S)),
        ),
    ),
)
