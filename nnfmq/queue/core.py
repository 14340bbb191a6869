"""The core that runs the queues: `_core` (Cython) or `_pycore` (Python). Selected once, at import.

`nnfmq.base.cores` documents how. `core_name`, `core_path` and `core_reason` are for display; `load` returns a core
by its name, for tests and for processes whose core must not depend on the environment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from nnfmq.base.cores import CorePair

if TYPE_CHECKING:
    from nnfmq.queue import _pycore

_CORES = CorePair(compiled="nnfmq.queue._core", python="nnfmq.queue._pycore")


class Core(Protocol):
    """Interface of both cores: the classes of `_pycore`, or equivalent extension types with other polling times."""

    @property
    def EventFlagWord(self) -> type[_pycore.EventFlagWord]:
        """The class of event flag words."""
        ...

    @property
    def Ring(self) -> type[_pycore.Ring]:
        """The class of rings."""
        ...


def load(name: str) -> Core:
    """Import and return the core `name` (`compiled` or `python`).

    Raises:
        ImportError: If there is no core of that name, or the compiled one is not built. The text has the remedy.
    """
    return cast(Core, _CORES.load(name))


def available() -> tuple[str, ...]:
    """Return the names of the cores that can be loaded, the fastest first."""
    return _CORES.available()


core_name, core_reason = _CORES.choose()
ACTIVE_CORE = load(core_name)
core_path = str(_CORES.load(core_name).__file__)
