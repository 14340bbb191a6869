"""Validation of the driver's device list (DEV-10).

The driver is not trusted: a device with an invalid description is left out. The checks are here and not in
`validation`, whose import would make every application start slower.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from nnfmq.hal.capabilities import MAX_NUMBER_OF_CACHE_FILES
from nnfmq.serialize.messages import DeviceInfo
from nnfmq.verbose_log import vlog

_log = logging.getLogger("nnfmq.client")


def valid_devices(devices: Sequence[DeviceInfo]) -> list[DeviceInfo]:
    """Return the devices with a valid description, and log the others (DEV-10)."""
    found = []
    for info in devices:
        problem = next(_problems(info), None)
        if problem is None:
            vlog("manager", "found device %s", info.summary())
            found.append(info)
        else:
            _log.warning("device %r of the driver is left out: %s", info.name, problem)
    return found


def _problems(info: DeviceInfo) -> Iterator[str]:
    if not info.version:
        yield "its version string is empty (DEV-4)"
    if not info.feature_level:
        yield "its feature level is 0, the lowest is 1"
    for count in (info.model_cache_files, info.data_cache_files):
        if count > MAX_NUMBER_OF_CACHE_FILES:
            yield f"it wants {count} cache files of a kind, {MAX_NUMBER_OF_CACHE_FILES} are allowed (DEV-6)"
    if info.extensions:  # few devices have any, and the module costs a millisecond
        from nnfmq.hal.extension_codes import is_extension_name

        for extension in info.extensions:
            types = [element.type for element in extension.operand_types]
            if not is_extension_name(extension.name):
                yield f"no extension is called {extension.name!r} (EXT-1)"
            if len(set(types)) != len(types) or not all(element.byte_size for element in extension.operand_types):
                yield f"extension {extension.name} has a type twice, or one of no bytes (EXT-1)"
