"""Which core runs the queues: the compiled one or its plain-Python twin. Chosen once, at import; never a guess.

$NNFMQ_CORE names it (`compiled` or `twin`); unset, the compiled one is taken where it was built. `core_name`,
`core_path` and `core_reason` say what was chosen and why. A source tree (which has no compiled core until it is built
in place) can hide an installed nnfmq that has one, by lying in the current directory: that is warned about.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from nnfmq.queue import twin

VARIABLE = "NNFMQ_CORE"
REMEDY = (
    "in a source tree run `python setup.py build_ext --inplace`, else reinstall nnfmq with a C compiler and Cython "
    "present; or set NNFMQ_CORE=twin to run on plain Python"
)
_MODULES = {"compiled": "nnfmq.queue._core", "twin": "nnfmq.queue.twin"}
_PACKAGE = Path(__file__).resolve().parents[1]


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
    if name not in _MODULES:
        raise ImportError(f"${VARIABLE} is {name!r}; allowed are {' and '.join(_MODULES)}")
    try:
        return cast(Core, importlib.import_module(_MODULES[name]))
    except ModuleNotFoundError as error:
        if error.name != _MODULES[name]:
            raise
        raise ImportError(f"the compiled core is not built in {_PACKAGE}: {REMEDY}") from None


def available() -> tuple[str, ...]:
    """Return the names of the cores that can be loaded here, the faster one first."""
    found = importlib.util.find_spec(_MODULES["compiled"]) is not None
    return ("compiled", "twin") if found else ("twin",)


def hidden_installations() -> Iterator[Path]:
    """Yield other nnfmq packages further on in sys.path, which this one hides."""
    for entry in sys.path:
        package = Path(entry or os.curdir, "nnfmq").resolve()
        if package != _PACKAGE and (package / "__init__.py").is_file():
            yield package


def _choose() -> tuple[str, str]:
    """Return the name of the core, and why it is that one."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted:
        return wanted, f"${VARIABLE} asks for it"
    if "compiled" in available():
        return "compiled", "it is built, and nothing else was asked for"
    _warn_if_hiding()
    return "twin", f"the compiled core is not built in {_PACKAGE}"


def _warn_if_hiding() -> None:
    hidden = next(hidden_installations(), None)
    if hidden is not None:
        warnings.warn(
            f"nnfmq is imported from the source tree {_PACKAGE}, which has no compiled core and hides the nnfmq "
            f"installed in {hidden}: start Python in another directory, or {REMEDY}",
            RuntimeWarning,
            stacklevel=2,
        )


core_name, core_reason = _choose()
active = load(core_name)
core_path = str(sys.modules[_MODULES[core_name]].__file__)
