"""The defaults of `connect`, in a module of their own: `connect` imports the rest while a driver starts."""

from __future__ import annotations

__all__ = ["DEFAULT_TIMEOUT_S", "INTERFACE", "level_of"]

DEFAULT_TIMEOUT_S = 10.0
INTERFACE = "AIDL v4"
"""The default interface version."""


_LEVEL = 8  # of `INTERFACE`


def level_of(interface: str) -> int:
    """Return the feature level of an interface version. Raises InvalidArgument if it is unknown."""
    if interface == INTERFACE:
        return _LEVEL
    from nnfmq.hal.feature_levels import interface_level  # it would make every application start slower

    return interface_level(interface)
