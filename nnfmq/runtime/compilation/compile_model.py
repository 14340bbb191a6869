"""compile_model: prepare a model on a choice of devices, and on the CPU device if they fail."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nnfmq.deadlines import deadline_after, remaining_s
from nnfmq.hal.errors import InvalidArgument, NnfmqError
from nnfmq.hal.extension_codes import is_extension
from nnfmq.hal.types import Model, OperationType
from nnfmq.runtime.prepare_arguments import ModelArgument, name_for_display, to_hal_model, to_model

if TYPE_CHECKING:
    from nnfmq.runtime.client_device import PrepareOptions
    from nnfmq.runtime.devices.runtime_device import RuntimeDevice
    from nnfmq.runtime.prepared_model import PreparedModel

__all__ = ["compile_model"]

_log = logging.getLogger("nnfmq.runtime")


def compile_model(
    model: ModelArgument, devices: Sequence[RuntimeDevice], is_explicit: bool, options: PrepareOptions
) -> PreparedModel:
    """Return the model, prepared on the first of `devices` that supports all of it; blocks. The caller closes it.

    If preparing fails, and the application did not list the devices, the CPU device is used instead, unless the model
    is not valid or has operations of vendors (PREP-12, PART-6, EXT-5).

    Raises:
        NnfmqError: As `Device.prepare`.
    """
    deadline_ns = deadline_after(options.get("timeout"))
    options["name"] = name_for_display(model, options.get("name"))
    loaded = to_model(model)
    hal_model = to_hal_model(loaded)
    chosen = _first_supporting(hal_model, devices)
    try:
        return chosen.prepare(loaded, **options)
    except NnfmqError as error:
        cpu = next((device for device in devices if device.is_cpu), None)
        if isinstance(error, InvalidArgument) or is_explicit or chosen is cpu or cpu is None:
            raise
        if has_vendor_operations(hal_model):
            raise
        _log.warning("the model is prepared on %s, because %s failed: %s", cpu.name, chosen.name, error)
        if deadline_ns is not None:
            options["timeout"] = remaining_s(deadline_ns)
        return cpu.prepare(loaded, **options)


def has_vendor_operations(model: Model) -> bool:
    """Return whether an operation is of an extension or OEM, which the CPU device does not have."""
    operations = (operation for graph in (model.main, *model.referenced) for operation in graph.operations)
    return any(is_extension(found.type) or found.type is OperationType.OEM_OPERATION for found in operations)


def _first_supporting(model: Model, devices: Sequence[RuntimeDevice]) -> RuntimeDevice:
    if len(devices) == 1:
        return devices[0]
    for device in devices:
        try:
            if all(device.supported_operations(model)):
                return device
        except InvalidArgument:
            raise
        except NnfmqError as error:
            _log.info("device %s is not considered: %s", device.name, error)
    raise InvalidArgument(f"no device supports the whole model; asked: {', '.join(d.name for d in devices)}")
