"""Which implementation of a hot part runs: the compiled one or its plain-Python twin. Chosen at import; never a guess.

$NNFMQ_CORE names it for all parts at once (`compiled` or `twin`); unset, each takes the compiled one where it is built.
Whoever has a pair of modules describes it by `Cores` (`queue.core`, `serialize.codec`). A source tree (which has
nothing compiled until it is built in place) can hide an installed nnfmq that has it, by lying in the current directory:
that is warned about. Left out: what the modules must offer; that is their part's business.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

VARIABLE = "NNFMQ_CORE"
REMEDY = (
    "in a source tree run `python setup.py build_ext --inplace`, else reinstall nnfmq with a C compiler and Cython "
    "present; or set NNFMQ_CORE=twin to run on plain Python"
)
_PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Cores:
    """The full names of two modules that do the same."""

    compiled: str
    twin: str

    def load(self, name: str) -> ModuleType:
        """Import the one called `name` (`compiled` or `twin`). Raises ImportError, with the remedy, if it cannot."""
        modules = {"compiled": self.compiled, "twin": self.twin}
        if name not in modules:
            raise ImportError(f"${VARIABLE} is {name!r}; allowed are {' and '.join(modules)}")
        try:
            return importlib.import_module(modules[name])
        except ModuleNotFoundError as error:
            if error.name != modules[name]:
                raise
            raise ImportError(f"the compiled core is not built in {_PACKAGE}: {REMEDY}") from None

    def available(self) -> tuple[str, ...]:
        """Return the names that can be loaded here, the faster one first."""
        return ("compiled", "twin") if importlib.util.find_spec(self.compiled) is not None else ("twin",)

    def choose(self) -> tuple[str, str]:
        """Return the name of the one to run, and why it is that one."""
        wanted = os.environ.get(VARIABLE, "")
        if wanted:
            return wanted, f"${VARIABLE} asks for it"
        if "compiled" in self.available():
            return "compiled", "it is built, and nothing else was asked for"
        _warn_if_hiding()
        return "twin", f"the compiled core is not built in {_PACKAGE}"


def hidden_installations() -> Iterator[Path]:
    """Yield other nnfmq packages further on in sys.path, which this one hides."""
    for entry in sys.path:
        package = Path(entry or os.curdir, "nnfmq").resolve()
        if package != _PACKAGE and (package / "__init__.py").is_file():
            yield package


@functools.cache  # once for all parts
def _warn_if_hiding() -> None:
    hidden = next(hidden_installations(), None)
    if hidden is not None:
        warnings.warn(
            f"nnfmq is imported from the source tree {_PACKAGE}, which has no compiled core and hides the nnfmq "
            f"installed in {hidden}: start Python in another directory, or {REMEDY}",
            RuntimeWarning,
            stacklevel=2,
        )
