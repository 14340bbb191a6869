"""The built-in extension `nnfmq.tflite`: operations that TFLite and ONNX models need and the HAL does not have.

They are declared as those of a vendor's plug-in (`operations.extensions`), and devices report them in the same way. A
module holds one family, lists its operations in `DECLARATIONS`, and is imported when one of them is first used; their
numbers are in `hal.extensions`. Where the HAL has an operation or an operand type, importers use that instead. What the
extension only adds to an operation of the HAL, such as types, is stated by `Declaration.extended` of that operation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from msgspec.structs import replace

from nnfmq.hal.extensions import DTYPES, NAME, TfliteOperation, extended_operations
from nnfmq.operations import declaration as op
from nnfmq.operations import extensions
from nnfmq.operations.declaration import Declaration, Extended, Plan
from nnfmq.operations.extensions import ExtensionType, define_operation
from nnfmq.operations.shapes import same_shape

__all__ = [
    "ANY_TENSOR",
    "EXTENSION_FAMILIES",
    "any_tensor_variants",
    "declare",
    "extended_family",
    "family",
    "function_of_one",
    "install_families",
]

EXTENSION_FAMILIES: Mapping[str, str] = {
    "blockwise": "BLOCKWISE_MATMUL",
    "dynamic_sizes": "RANGE SHAPE WHERE UNIQUE",
    "functions": (
        "GELU COS BITCAST FAKE_QUANT ERF ROUND SIGN TAN ASIN ACOS ATAN SINH COSH ASINH ACOSH ATANH SOFTPLUS "
        "MISH ROUND_TO_FORMAT FLOOR_MOD TRUNCATED_DIV BITWISE_XOR BITWISE_AND LEFT_SHIFT RIGHT_SHIFT ATAN2 "
        "SATURATE Q8_CLAMP Q8_LEAKY_RELU Q16_LEAKY_RELU Q8_SQUARED_DIFFERENCE"
    ),
    "indexing": (
        "BATCH_GATHER GATHER_ND SCATTER_ND SPARSE_TO_DENSE ONE_HOT DYNAMIC_UPDATE_SLICE REVERSE_SEQUENCE "
        "GATHER_ELEMENTS SCATTER_ELEMENTS SCATTER_ND_UPDATE"
    ),
    "matrices": "RFFT2D REAL IMAG COMPLEX_ABS DETERMINANT",
    "mediapipe": "TRANSFORM_LANDMARKS TRANSFORM_TENSOR LANDMARKS_TO_TRANSFORM_MATRIX MAX_POOL_WITH_ARGMAX MAX_UNPOOL",
    "quantization": "QUANTIZE_LINEAR QLINEAR_ADD QLINEAR_MUL DYNAMIC_QUANTIZE DYNAMIC_QUANTIZE_LINEAR REQUANTIZE",
    "recurrent": "INTEGER_LSTM INTEGER_SVDF",
    "segments": "CUMSUM SEGMENT_SUM UNSORTED_SEGMENT MATRIX_DIAG MATRIX_SET_DIAG BUCKETIZE",
    "suppression": "NON_MAX_SUPPRESSION",
    "volumes": "CONV_3D CONV_3D_TRANSPOSE",
}
"""The names of each family's operations, by its module."""


def family(name: str) -> tuple[Declaration, ...]:
    """Return the declarations of a family, and import its module."""
    declarations: tuple[Declaration, ...] = import_module(f"{__name__}.{name}").DECLARATIONS
    return declarations


# ----------------------------------------------------------------------------------------------------------------------
# What the declarations of the families share.


ANY_TENSOR = (op.F32, op.F16, op.I32, op.Q8, op.Q8S, op.Q16S, op.B8, *op.WIDE)
"""The operand types of operations that only move elements."""


def declare(operation: TfliteOperation, *parameters: op.Parameter, **others: Any) -> Declaration:
    """Return the declaration of an operation with these parameters; `others` are further attributes, by name."""
    return Declaration(
        define_operation(operation, operation.name),
        since=op.V1_2,
        overloads=(op.overload(*parameters, level=op.V1_2),),
        **others,
    )


def function_of_one(
    operation: TfliteOperation, variants: Iterable[op.Variant], *attributes: op.Parameter
) -> Declaration:
    """Return the declaration of a function of each element of one tensor, which may have none.

    The output has the type O of a variant if it has that, else T.
    """
    variants = tuple(variants)
    return declare(
        operation,
        op.data("input"),
        *attributes,
        variants=variants,
        shape=same_shape,
        outputs=("O" if "O" in variants[0].types else "T",),
        zero_sized=True,
    )


def any_tensor_variants(plan: Plan) -> tuple[op.Variant, ...]:
    """Return the variants of an operation that only moves elements."""
    return op.of_types(plan, *ANY_TENSOR)


# ----------------------------------------------------------------------------------------------------------------------
# What the extension adds to operations of the HAL, and the installation.


def extended_family(module: str) -> tuple[Declaration, ...]:
    """Return the declarations of the extension that extend those of a family of the HAL, and import its module."""
    declarations: tuple[Declaration, ...] = import_module(module).DECLARATIONS
    return tuple(_expanded(declaration, one) for declaration in declarations for one in declaration.extended)


def _expanded(base: Declaration, extended: Extended) -> Declaration:
    operation = extended_operations()[base.code, extended.scheme]
    same = {
        "overloads": tuple(replace(one, arities=dict.fromkeys(one.arities, op.V1_2)) for one in base.overloads),
        "output_counts": dict.fromkeys(base.output_counts, op.V1_2),
    }
    added = tuple(replace(variant, level=op.V1_2) for variant in base.variants) if extended.adds else ()
    return replace(
        base,
        code=define_operation(operation, operation.name),
        since=op.V1_2,
        variants=(*added, *extended.variants),
        level=lambda inputs, output: op.V1_0,
        extended=(),
        **{**same, **extended.changes},
    )


def install_families(hal_families: Mapping[str, str]) -> None:
    """Install the extension in this process. Its families are imported when they are first used.

    `hal_families` are the names of the operations of each family of the HAL, by its module.
    """
    types = tuple(ExtensionType(operand_type, dtype) for operand_type, dtype in DTYPES.items())
    extended = defaultdict(list)
    for (base, _), operation in extended_operations().items():
        extended[base.name].append(operation.name)
    families = [(partial(family, module), names.split()) for module, names in EXTENSION_FAMILIES.items()]
    families += [
        (partial(extended_family, module), [name for base in names.split() for name in extended[base]])
        for module, names in hal_families.items()
    ]
    codes = [(load, [define_operation(TfliteOperation[name], name) for name in names]) for load, names in families]
    extensions.install_families(NAME, types, codes)
