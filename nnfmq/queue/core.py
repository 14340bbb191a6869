"""The core that runs the queues: compiled, or its plain-Python twin. Chosen once, at import.

How it is chosen, and by which variable, is in `nnfmq.cores`. `core_name`, `core_path` and `core_reason` say what was
chosen and why; `load` has each of them by name, for tests and for processes that must not depend on the environment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from nnfmq.cores import Cores

if TYPE_CHECKING:
    from nnfmq.queue import twin

_CORES = Cores(compiled="nnfmq.queue._core", twin="nnfmq.queue.twin")


class Core(Protocol):
    """What both cores offer: the twin's classes, or extension types that behave as they do."""

    @property
    def EventWord(self) -> type[twin.EventWord]:
        """The class of event words."""
        ...

    @property
    def Ring(self) -> type[twin.Ring]:
        """The class of rings."""
        ...


def load(name: str) -> Core:
    """Import the core `name` (`compiled` or `twin`). Raises ImportError with the remedy where it cannot be had."""
    return cast(Core, _CORES.load(name))


def available() -> tuple[str, ...]:
    """Return the names of the cores that can be loaded here, the faster one first."""
    return _CORES.available()


core_name, core_reason = _CORES.choose()
active = load(core_name)
core_path = str(_CORES.load(core_name).__file__)
