"""DeviceChoice: who chose the device of a preparation. A module of its own, because every client loads it."""

from __future__ import annotations

from typing import Literal, TypeAlias

__all__ = ["DeviceChoice"]

DeviceChoice: TypeAlias = Literal["application", "best", "fallback", "step"]
"""The application, the runtime, or the fallback after other devices have failed.

"step": the preparation is that of a step of a plan, and the plan's own preparation says who chose.
"""
