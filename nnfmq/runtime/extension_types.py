"""The operand types of extensions, as the device that supports them reports them.

The client library has no plug-ins: the element types that it needs for arrays come from the driver, and are validated.
"""

from __future__ import annotations

from collections.abc import Sequence

from nnfmq.hal.errors import GeneralFailure, InvalidArgument, ProtocolError
from nnfmq.hal.extension_codes import HIDL_PREFIX_BITS, extension_code, extension_prefix, extension_type, is_extension
from nnfmq.hal.tensor_info import ElementInfo
from nnfmq.hal.types import Model, OperandType
from nnfmq.serialize.messages import DeviceInfo, OperandTypeData
from nnfmq.validation.extension_elements import element_info

__all__ = ["extension_types"]


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
        return element_info(extension, kind)
    except InvalidArgument as error:
        raise ProtocolError(f"the driver reports {error}") from error
