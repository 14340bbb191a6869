"""Conversion of ONNX operators to HAL operations: CONVERTERS, by the operator's name.

A converter reads a node's inputs and attributes and adds operations. It raises InvalidArgument, with the reason, for
what the HAL cannot express. Attributes that later opsets made inputs are read from either.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TypeAlias

from nnfmq.importers.onnx.values import Node

__all__ = ["CONVERTERS", "Converter"]

Converter: TypeAlias = Callable[[Node], None]

_MODULES = (
    "attention",
    "convolution",
    "elementwise",
    "fused",
    "indexing",
    "integers",
    "machine_learning",
    "movement",
    "normalization",
    "pooling",
    "products",
    "quantization",
    "quantized",
    "recurrent",
    "reduction",
    "resizing",
    "skip_normalization",
    "transposed_convolution",
    "windows",
)

CONVERTERS: dict[str, Converter] = {
    name: converter
    for module in _MODULES
    for name, converter in import_module(f"{__name__}.{module}").CONVERTERS.items()
}
