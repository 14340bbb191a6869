"""The built-in extension `nnfmq.tflite`: operations that TFLite and ONNX models need and the HAL does not have.

They are declared as those of a vendor's plug-in (`operations.extensions`), and devices report them in the same way. A
module holds one family and lists its operations in `DECLARATIONS`; their numbers are in `hal.tflite_codes`. Where the
HAL has an operation or an operand type, importers use that instead.
"""

from __future__ import annotations

from importlib import import_module

from nnfmq.hal.tflite_codes import DTYPES, NAME
from nnfmq.operations.extensions import ExtensionType, VendorExtension
from nnfmq.operations.signature import Declaration

__all__ = ["EXTENSION", "EXTENSION_FAMILIES"]

_MODULES = (
    "custom_images",
    "dynamic_quantization",
    "dynamic_sizes",
    "element_indexing",
    "hybrid_recurrent",
    "indexing",
    "integer_functions",
    "landmarks",
    "narrow_floats",
    "segments",
    "integer_recurrent",
    "sixteen_bit_arithmetic",
    "sixteen_bit_functions",
    "sixteen_bit_images",
    "sixteen_bit_movement",
    "sixteen_bit_products",
    "spectral",
    "suppression",
    "unary_functions",
    "volumes",
    "wider_types",
)

EXTENSION_FAMILIES: dict[str, tuple[Declaration, ...]] = {
    name: import_module(f"{__name__}.{name}").DECLARATIONS for name in _MODULES
}

EXTENSION = VendorExtension(
    NAME,
    types=tuple(ExtensionType(operand_type, dtype) for operand_type, dtype in DTYPES.items()),
    declarations=tuple(declaration for family in EXTENSION_FAMILIES.values() for declaration in family),
)
