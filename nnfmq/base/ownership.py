"""Rules of objects that own a descriptor, a mapping or a connection: no copies, and one call at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, SupportsIndex, TypeVar

__all__ = ["ExclusiveUse", "Uncopyable", "exclusive"]


class Uncopyable:
    """An object that cannot be copied or pickled.

    A copy would close what the original owns, and a pickled descriptor would be another file's in the process that
    unpickles it.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raise TypeError. `copy` and `pickle` call this, and everything that is built on them."""
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: it owns file descriptors or memory of this process"
        )


# ----------------------------------------------------------------------------------------------------------------------
# exclusive: reject a second concurrent call on an object. Atomic on free-threaded builds, and signal-safe.
#
# A call claims its object with `dict.setdefault`, which is one atomic operation in C (with the GIL, and with the per-
# dict lock of a free-threaded build): of concurrent calls exactly one stores its key object, and every call sees that
# one.
#
# CPython runs signal handlers on the main thread between bytecodes: at the start of a function, after a call, and at
# backward jumps (`CHECK_EVAL_BREAKER` in Python/ceval.c). An exception that a handler raises must not leave a claim
# behind, or the object could never be used again:
#
# * It may be raised after `setdefault` has stored the claim, but before its value is compared. The claim is made inside
#   the `try`, and the `finally` finds the claim by the identity of its key object instead of a local flag. A
#   `threading.Lock` has no such identity: whether `acquire(blocking=False)` succeeded is known only from the return
#   value, which the exception discards.
# * It may not be raised within the `finally`, between its test and `del`: neither a subscript nor `del` of a dict item
#   with an `int` key calls Python code or jumps backwards.


CLAIM = 0

P = ParamSpec("P")
T = TypeVar("T")


class ExclusiveUse(Protocol):
    """An object with methods that are decorated with `exclusive`."""

    _claims: dict[int, object]
    """Empty at first. Holds the claim of the call in progress."""

    def _busy_error(self) -> Exception:
        """Return the exception for a call that another one excludes."""
        ...


S = TypeVar("S", bound="ExclusiveUse | Any")


def exclusive(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate a method so that only one call of all `exclusive` methods runs on an object; others raise immediately.

    This includes a call by a signal handler that interrupts the first one.
    """

    @wraps(method)
    def wrapper(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        claims, claim = self._claims, object()
        try:
            if claims.setdefault(CLAIM, claim) is not claim:
                raise self._busy_error()
            return method(self, *args, **kwargs)
        finally:
            # No calls here: see the module's docstring.
            try:
                if claims[CLAIM] is claim:
                    del claims[CLAIM]
            except KeyError:  # this call was rejected, and the other one has ended since
                pass

    return wrapper
