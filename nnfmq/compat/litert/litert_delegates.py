"""LiteRT's delegates and operator resolvers: scripts name them, the driver does not use them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from enum import Enum, unique
from typing import Any, NoReturn

__all__ = ["Delegate", "OpResolverType", "load_delegate", "warn_of_delegates"]


@unique
class OpResolverType(Enum):
    """Which kernels LiteRT uses. Without effect: the driver's device decides."""

    AUTO = 0
    BUILTIN = 1
    BUILTIN_REF = 2
    BUILTIN_WITHOUT_DEFAULT_DELEGATES = 3


class Delegate:
    """A delegate by the name of its library, which is not loaded."""

    def __init__(self, library: str, options: Mapping[Any, Any] | None = None) -> None:
        """Keep the name and the options; warns that the delegate is ignored."""
        self._library = library
        self._options = dict(options or {})
        _warn(f"delegate {library} is ignored: the driver of nnfmq runs the model")

    def _get_native_delegate_pointer(self) -> NoReturn:
        raise NotImplementedError(f"delegate {self._library} is not loaded: nnfmq has no delegates")


def load_delegate(library: str, options: Mapping[Any, Any] | None = None) -> Delegate:
    """Return a delegate that is ignored, with a warning; the library is not loaded and need not exist."""
    return Delegate(library, options)


def warn_of_delegates(delegates: Iterable[Any]) -> None:
    """Warn once for each delegate that was not made here.

    Raises:
        AttributeError: If one of them is no delegate.
    """
    for delegate in delegates:
        delegate._get_native_delegate_pointer  # noqa: B018  LiteRT reads it, and so tells a delegate
        if not isinstance(delegate, Delegate):
            _warn(f"{delegate!r} is ignored: the driver of nnfmq runs the model")


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=4)
