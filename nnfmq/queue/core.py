"""The core that runs the queues: `_core` (Cython) or `_pycore` (Python). Selected once, at import.

`nnfmq.base.cores` documents how. `core_name`, `core_path` and `core_reason` are for display; `CORES` loads a core
by its name, for tests and for processes whose core must not depend on the environment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from nnfmq.base.cores import CorePair

if TYPE_CHECKING:
    from nnfmq.queue import _pycore


class Core(Protocol):
    """Interface of both cores: the classes of `_pycore`, or equivalent extension types with other polling times."""

    __file__: str

    @property
    def EventFlagWord(self) -> type[_pycore.EventFlagWord]:
        """The class of event flag words."""
        ...

    @property
    def Ring(self) -> type[_pycore.Ring]:
        """The class of rings."""
        ...

    @property
    def Responder(self) -> type[_pycore.Responder]:
        """The class that answers requests of one ring in another of the same core."""
        ...


CORES: CorePair[Core] = CorePair(compiled="nnfmq.queue._core", python="nnfmq.queue._pycore")
core_name, core_reason = CORES.choose()
ACTIVE_CORE = CORES.load(core_name)
core_path = ACTIVE_CORE.__file__
