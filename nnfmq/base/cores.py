"""Selection of a core: which of two implementations of a hot part runs, the compiled one or the one in Python.

The setting `core` ($NNFMQ_CORE) selects for all parts; if it is unset, each part takes its compiled module if that
was built. The modules that have two implementations describe them by a `CorePair` (`queue.core`, `serialize.codec`).

An installation from a source tree builds the compiled modules in the tree, too (setup.py), so that Python in a clone
uses them. A warning reports a tree in which they could be built and are not, or which hides an installed nnfmq that has
them: the slow core would run silently. Without a C compiler the Python core is what was installed, and there is no
warning. Another warning reports a module in the tree whose sources have changed since it was built (`build_stamp`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar, cast

from nnfmq.base import settings

REMEDY = (
    "run `pip install .` in the source tree, or reinstall nnfmq, with a C compiler and Cython "
    "present; or set NNFMQ_CORE=python to run on plain Python"
)
_PACKAGE = Path(__file__).resolve().parents[1]
CoreT = TypeVar("CoreT")


class CorePair(NamedTuple, Generic[CoreT]):
    """The full names of two modules with the same interface, CoreT, and behaviour."""

    compiled: str
    python: str

    def load(self, name: str) -> CoreT:
        """Import and return the module of the core `name` (`compiled` or `python`).

        Raises:
            ImportError: If there is no core of that name, or the compiled one is not built. The text has the remedy.
        """
        modules = {"compiled": self.compiled, "python": self.python}
        if name not in modules:
            raise ImportError(f"there is no core {name!r}; allowed are {' and '.join(modules)}")
        try:
            return cast(CoreT, importlib.import_module(modules[name]))
        except ModuleNotFoundError as error:
            if error.name != modules[name]:
                raise
            raise ImportError(f"the compiled core is not built in {_PACKAGE}: {REMEDY}") from None

    def available(self) -> tuple[str, ...]:
        """Return the names of the cores that can be loaded, the fastest first."""
        return ("compiled", "python") if importlib.util.find_spec(self.compiled) is not None else ("python",)

    def choose(self) -> tuple[str, str]:
        """Return the name of the core to run, and the reason.

        Raises:
            InvalidArgument: If the setting is neither of the two names.
        """
        selected = settings.CORE.effective()
        if selected.value is not None:
            return selected.value, f"{selected.origin} asks for it"
        if "compiled" in self.available():
            _warn_if_outdated(self.compiled)
            return "compiled", "it is built, and nothing else was asked for"
        _warn_if_unbuilt()
        return "python", f"the compiled core is not built in {_PACKAGE}"


def hidden_installations() -> Iterator[Path]:
    """Yield the nnfmq packages that come later in sys.path and are therefore hidden by this one."""
    for entry in sys.path:
        package = Path(entry or os.curdir, "nnfmq").resolve()
        if package != _PACKAGE and (package / "__init__.py").is_file():
            yield package


def _is_compiled(package: Path) -> bool:
    return any((package / "queue" / f"_core{suffix}").is_file() for suffix in EXTENSION_SUFFIXES)


def _is_buildable() -> bool:
    """Return whether this is a source tree, on a machine with a C compiler."""
    if not (_PACKAGE.parent / "setup.py").is_file():
        return False
    compilers = os.environ.get("CC", "").split()[:1] or ["cc", "gcc", "clang"]
    from shutil import which  # imports decompressors

    return any(which(compiler) for compiler in compilers)


def _warn_if_outdated(module: str) -> None:
    """Warn if the sources of a compiled module in a source tree are not those that it was built from."""
    built = importlib.util.find_spec(module)
    if built is None or built.origin is None or not (_PACKAGE.parent / "setup.py").is_file():
        return
    from nnfmq.base.build_stamp import changed_since_build  # in source trees only

    if changed_since_build(Path(built.origin)):
        text = f"the sources of {built.origin} have changed since it was built: run `pip install .` in the source tree"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


@functools.cache  # warn once, not once for each part
def _warn_if_unbuilt() -> None:
    hidden = next(filter(_is_compiled, hidden_installations()), None)
    if hidden is not None:
        problem = f"which has no compiled core and hides the nnfmq installed in {hidden}: "
        problem += "start Python in another directory, or"
    elif _is_buildable():
        problem = "in which the compiled core is not built, and runs on the slow one:"
    else:
        return
    warnings.warn(
        f"nnfmq is imported from the source tree {_PACKAGE}, {problem} {REMEDY}", RuntimeWarning, stacklevel=2
    )
