"""The operand types of extensions, as the device that supports them reports them.

The client library has no plug-ins: the element types that it needs for arrays come from the driver, and are validated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nnfmq.hal.errors import GeneralFailure, ProtocolError
from nnfmq.hal.extension_codes import HIDL_PREFIX_BITS, extension_code, extension_prefix, extension_type, is_extension
from nnfmq.hal.tensor_info import ElementInfo
from nnfmq.hal.types import Model, OperandType
from nnfmq.serialize.messages import DeviceInfo, OperandTypeData

__all__ = ["extension_types"]

_NUMERIC_KINDS = "biufc"  # NumPy's kinds of numeric elements: no pointers, no structures


def extension_types(model: Model, devices: Sequence[DeviceInfo]) -> dict[OperandType, ElementInfo]:
    """Return the element types of a model's extensions by the model's type codes, as `devices` report them.

    Of several devices with one extension, the last decides.

    Raises:
        GeneralFailure: If an input or output has an extension's type that no device has.
        ProtocolError: If a device reports an invalid type.
    """
    stated = {extension.name: extension.operand_types for device in devices for extension in device.extensions}
    known = {
        OperandType(extension_code(entry.prefix, kind.type, prefix_bits=HIDL_PREFIX_BITS)): _element(entry.name, kind)
        for entry in model.extensions
        if entry.prefix  # the driver rejects a prefix of 0
        for kind in stated.get(entry.name, ())
    }
    _require_known(model, known, devices)
    return known


def _require_known(model: Model, known: dict[OperandType, ElementInfo], devices: Sequence[DeviceInfo]) -> None:
    names = {entry.prefix: entry.name for entry in model.extensions}
    for index in (*model.main.input_indexes, *model.main.output_indexes):
        code = model.main.operands[index].type
        name = names.get(extension_prefix(code)) if is_extension(code) else None
        if name is not None and code not in known:
            where = f"operand {index}: device {', '.join(device.name for device in devices)}"
            found = [extension.name for device in devices for extension in device.extensions]
            raise GeneralFailure(
                f"{where} has no type {extension_type(code)} of extension {name}; its extensions are: {found}"
            )


def _element(extension: str, kind: OperandTypeData) -> ElementInfo:
    try:
        dtype = np.dtype(kind.dtype)
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or dtype.kind not in _NUMERIC_KINDS or dtype.itemsize != kind.byte_size:
        text = f"elements of {kind.dtype!r} in {kind.byte_size} bytes"
        raise ProtocolError(f"the driver reports {text} for type {kind.type} of {extension}")
    return ElementInfo(kind.dtype, not kind.is_tensor)
