"""The classes of random graphs that the command runs: AOSP's, and additional ones.

    single     179 tests of one operation with the overloads and types of one HAL version; dimensions up to 1000
    small      graphs of 5 operations of one type and rank; dimensions up to 1000
    large      graphs of 40 operations of one type and rank; dimensions up to 10
    quantized  small and large graphs of uint8 and int8, which AOSP does not have
    later      single operations that were introduced after HAL 1.3, which AOSP does not have
    divided    graphs of 12 operations whose arrays are no constants, to be divided among devices: a step needs an input

The operations and limits of each class are those of AOSP's TestRandomGraph (Android 13).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from msgspec.structs import replace

from nnfmq.conformance.random_graphs import MAX_REAL, Criteria, GraphClass, generate, name_of
from nnfmq.conformance.random_source import GraphLimits
from nnfmq.conformance.testmodels import FEATURE_LEVELS, Criterion, Line
from nnfmq.hal.types import OperandType, OperationType

SEEDS = (0, 49)
"""First and last seed that AOSP runs."""
USUAL_FAMILIES = ("single", "small", "large")
FAMILIES = (*USUAL_FAMILIES, "quantized", "later", "divided")

_WIDE, _NARROW = GraphLimits(1000), GraphLimits(10)
_FLOAT32, _FLOAT16 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16
_QUANTIZED_TYPES = tuple(type for type in OperandType if "QUANT" in type.name)
_EXACT: dict[OperandType, Criterion] = {
    OperandType.TENSOR_INT32: Criterion(atol=1),
    OperandType.INT32: Criterion(atol=1),
    OperandType.TENSOR_BOOL8: Criterion(wrong_share=0.1),
}


def _criteria(float32: Criterion, float16: Criterion, quantized: Criterion) -> Criteria:
    floats = {_FLOAT32: float32, _FLOAT16: float16}
    with_limits = {type: replace(rule, skip_above=MAX_REAL[type]) for type, rule in floats.items()}
    return {**with_limits, **dict.fromkeys(_QUANTIZED_TYPES, quantized), **_EXACT}


_STRICT = _criteria(
    Criterion(1e-6, 1e-6, bias=1e-7, mse=1e-10),
    Criterion(1e-3, 1e-3, bias=1e-4, mse=1e-8),
    Criterion(1, bias=0.1, mse=0.1),
)
"""For operations that only move or compare values."""
_MEDIUM = _criteria(
    Criterion(1e-5, 1e-5, bias=1e-6, mse=1e-8),
    Criterion(1e-2, 1e-2, bias=1e-3, mse=1e-5),
    Criterion(2, bias=1.2, mse=1.2),
)
"""For one simple computation on each value."""
_RELAXED = _criteria(
    Criterion(1e-3, 1e-3, bias=3e-5, mse=1e-6),
    Criterion(1.0, 1.0, bias=5e-3, mse=1e-3),
    Criterion(10, bias=1.5, mse=1.5),
)
"""For transcendental functions, and for sums."""
_PRODUCTS = _criteria(
    Criterion(2e-2, 2e-2, bias=4e-4, mse=1e-5),
    Criterion(1.0, 1.0, bias=5e-2, mse=1e-2),
    Criterion(10, bias=1.5, mse=1.5),
)
"""For convolutions, whose sums may be long."""
_SMALL = _criteria(
    Criterion(1e-2, 1e-2, bias=4e-4, mse=1e-5), Criterion(1.0, 1.0, bias=5e-2, mse=1e-2), Criterion(12, bias=2, mse=2)
)
_LARGE = _criteria(
    Criterion(1e-1, 1e-1, bias=1e-2, mse=1e-4), Criterion(1.0, 1.0, bias=1e-1, mse=5e-2), Criterion(12, bias=2, mse=2)
)

_SINGLE: tuple[tuple[Criteria, str], ...] = (
    (
        _STRICT,
        "DEPTH_TO_SPACE.023 SPACE_TO_DEPTH.023 EMBEDDING_LOOKUP.023 HASHTABLE_LOOKUP.0 RESHAPE.023 "
        "BATCH_TO_SPACE_ND.123 SPACE_TO_BATCH_ND.123 PAD.123 TRANSPOSE.123 SQUEEZE.123 STRIDED_SLICE.123 ARGMAX.23 "
        "ARGMIN.23 EQUAL.23 GREATER.23 GREATER_EQUAL.23 LESS.23 LESS_EQUAL.23 NOT_EQUAL.23 LOGICAL_AND.2 "
        "LOGICAL_NOT.2 LOGICAL_OR.2 CHANNEL_SHUFFLE.23 PAD_V2.23 EXPAND_DIMS.23 TILE.23 GATHER.23 SELECT.23 "
        "TOPK_V2.23 SLICE.23 FILL.3 RANK.3",
    ),
    (
        _MEDIUM,
        "ADD.023 MUL.023 FLOOR.02 RELU.023 RELU1.023 RELU6.023 CONCATENATION.023 DEQUANTIZE.023 SUB.123 ABS.23 NEG.2 "
        "MAXIMUM.23 MINIMUM.23 PRELU.23 QUANTIZE.23 CAST.23 SPLIT.23 DIV.3 ELU.3 HARD_SWISH.3",
    ),
    (
        _RELAXED,
        "LOGISTIC.023 TANH.023 SOFTMAX.023 L2_NORMALIZATION.023 LOCAL_RESPONSE_NORMALIZATION.02 AVERAGE_POOL_2D.023 "
        "L2_POOL_2D.02 MAX_POOL_2D.023 RESIZE_BILINEAR.023 FULLY_CONNECTED.023 DIV.12 MEAN.123 EXP.2 LOG.2 RSQRT.2 "
        "SIN.2 SQRT.2 POW.2 REDUCE_ALL.2 REDUCE_ANY.2 REDUCE_MAX.23 REDUCE_MIN.23 REDUCE_PROD.2 REDUCE_SUM.2 "
        "INSTANCE_NORMALIZATION.2 LOG_SOFTMAX.2 RESIZE_NEAREST_NEIGHBOR.23 ROI_ALIGN.23 ROI_POOLING.23 "
        "HEATMAP_MAX_KEYPOINT.23",
    ),
    (_PRODUCTS, "CONV_2D.023 DEPTHWISE_CONV_2D.023 GROUPED_CONV_2D.23 TRANSPOSE_CONV_2D.23"),
)
"""Operations by criterion, with the minor versions of HAL 1.x whose overloads and types are tested."""
_LATER: tuple[tuple[Criteria, str], ...] = (
    (_STRICT, "RESHAPE.AIDL_V2 PACK.AIDL_V2 MIRROR_PAD.AIDL_V3 REVERSE.AIDL_V3"),
    (_RELAXED, "RSQRT.AIDL_V3"),
    (_PRODUCTS, "BATCH_MATMUL.AIDL_V2"),
)
_GRAPH_TYPES = {
    "float32": _FLOAT32, "float16": _FLOAT16, "int32": OperandType.TENSOR_INT32, "bool": OperandType.TENSOR_BOOL8,
}  # fmt: skip
_UINT8_INT8_TYPES = {"uint8": OperandType.TENSOR_QUANT8_ASYMM, "int8": OperandType.TENSOR_QUANT8_ASYMM_SIGNED}
_RANKS = (1, 2, 3, 4)


def _single_classes(family: str, table: tuple[tuple[Criteria, str], ...]) -> Iterator[GraphClass]:
    for criteria, entries in table:
        for name, minors in (entry.split(".") for entry in entries.split()):
            for version in [minors] if minors.startswith("AIDL") else [f"V1_{minor}" for minor in minors]:
                yield GraphClass(
                    f"{family}_{name.lower()}_{version.lower()}",
                    family,
                    _WIDE,
                    criteria,
                    code=OperationType[name],
                    exact_level=FEATURE_LEVELS[version],
                )


def _graph_classes(types: dict[str, OperandType]) -> Iterator[GraphClass]:
    for name, type in types.items():
        for rank in _RANKS:
            small = GraphClass(f"small_{name}_rank{rank}", "small", _WIDE, _SMALL, 5, type, rank)
            yield small
            yield replace(
                small,
                name=f"large_{name}_rank{rank}",
                family="large",
                limits=_NARROW,
                criteria=_LARGE,
                operation_count=40,
            )


def _divided_classes() -> Iterator[GraphClass]:
    for name, type in {**_GRAPH_TYPES, **_UINT8_INT8_TYPES}.items():
        for rank in (2, 4):
            yield GraphClass(
                f"divided_{name}_rank{rank}", "divided", _NARROW, _LARGE, 12, type, rank, has_constants=False
            )


@cache
def classes() -> dict[str, GraphClass]:
    """Return all classes by name, families in the order of `FAMILIES`."""
    found = [*_single_classes("single", _SINGLE), *_graph_classes(_GRAPH_TYPES)]
    found += [replace(c, family="quantized") for c in _graph_classes(_UINT8_INT8_TYPES)]
    found += _single_classes("later", _LATER)
    found += _divided_classes()
    found.sort(key=lambda graph_class: FAMILIES.index(graph_class.family))
    return {graph_class.name: graph_class for graph_class in found}


@dataclass(frozen=True, slots=True)
class Batch:
    """The graphs of one class with seeds from `first` to `last`; used like a file of test models."""

    class_name: str
    first: int
    last: int

    def lines(self, search: re.Pattern[str]) -> Iterator[tuple[int, Line]]:
        """Yield seed and test model of each graph whose name matches the expression."""
        graph_class = classes()[self.class_name]
        return ((seed, generate(graph_class, seed)) for seed in self.seeds(search))

    def seeds(self, search: re.Pattern[str]) -> list[int]:
        """Return the seeds of the graphs whose name matches, without generating them."""
        graph_class = classes()[self.class_name]
        return [seed for seed in range(self.first, self.last + 1) if search.search(name_of(graph_class, seed))]


def batches(families: Sequence[str], first: int, last: int) -> list[Batch]:
    """Return a batch for each class of the families."""
    return [Batch(c.name, first, last) for c in classes().values() if c.family in families]
