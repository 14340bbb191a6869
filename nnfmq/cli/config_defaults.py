"""The defaults that code computes, for `nnfmq config`: from the same functions that the driver and the client call.

Each is computed from the effective values of other settings: the socket's default is in the runtime directory that
$XDG_RUNTIME_DIR selects.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nnfmq.base import settings
from nnfmq.hal.errors import InvalidArgument

__all__ = ["COMPUTED", "DESCRIBED", "computed_default"]

_MIB = 1 << 20


def computed_default(setting: settings.Setting[Any]) -> object:
    """Return the value that is used if `setting` is not set; None if it is not a single value, or not available."""
    compute = COMPUTED.get(setting.name)
    return None if compute is None else compute()


def _socket() -> str:
    from nnfmq.base.paths import SOCKET_NAME, runtime_directory

    return str(runtime_directory() / SOCKET_NAME)


def _core() -> str:
    from nnfmq.queue import core

    return str(core.core_name)


def _target() -> str | None:
    from nnfmq.engines.compiled.target import host_target

    try:
        return host_target().name
    except InvalidArgument:  # no code can be generated for this machine
        return None


def _devices() -> str:
    from nnfmq.driver.devices.configuration import PACKAGED_DEVICES

    return str(PACKAGED_DEVICES)


def _memory_mib() -> int:
    from nnfmq.driver.memory.quota import total_limit_bytes

    return total_limit_bytes() // _MIB


def _client_memory_mib() -> int:
    from nnfmq.driver.memory.quota import quota_limit_bytes

    return quota_limit_bytes() // _MIB


def _below_home(folder: str) -> str | None:
    home = os.path.expanduser("~")
    return str(Path(home) / folder) if home.startswith("/") else None


COMPUTED: dict[str, Callable[[], object]] = {
    "socket": _socket,
    "core": _core,
    "target": _target,
    "devices": _devices,
    "memory_mib": _memory_mib,
    "client_memory_mib": _client_memory_mib,
    "TMPDIR": lambda: "/tmp",
    "XDG_CONFIG_HOME": lambda: _below_home(".config"),
    "XDG_STATE_HOME": lambda: _below_home(".local/state"),
    "XDG_CACHE_HOME": lambda: _below_home(".cache"),
}
"""Setting → function that returns its value if it is not set."""

DESCRIBED = (
    *("extensions", "models", "telemetry", "NNFMQ_TRACE", "NNFMQ_RECORD", "NNFMQ_RECORD_LIMIT_BYTES"),
    *("NNFMQ_CONFIG", "NNFMQ_DATA", "XDG_RUNTIME_DIR", "NO_COLOR"),
)
"""Settings whose default is not a single value, but described by `Setting.default_text`."""
