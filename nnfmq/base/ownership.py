"""Rules of objects that own a descriptor, a mapping or a connection: no copies, and one call at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, Final, NoReturn, ParamSpec, Self, SupportsIndex, TypeAlias, TypeVar

__all__ = ["CLAIM", "Claims", "Closable", "Uncopyable", "claimed", "exclusive", "release"]


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


class Closable(Uncopyable):
    """An object that its owner closes; `with` does it at the end of the block."""

    __slots__ = ()

    def close(self) -> None:
        """Release everything. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


# ----------------------------------------------------------------------------------------------------------------------
# Claims: one call at a time uses an object. Atomic on free-threaded builds, and signal-safe.
#
# A call claims its object with `dict.setdefault`, which is one atomic operation in C (with the GIL, and with the per-
# dict lock of a free-threaded build): of concurrent calls exactly one stores its claim, and every call sees that one.
#
# CPython runs signal handlers on the main thread between bytecodes: at the start of a function, after a call, and at
# backward jumps (`CHECK_EVAL_BREAKER` in Python/ceval.c). An exception that a handler raises must not leave a claim
# behind, or the object could never be used again:
#
# * It may be raised after `setdefault` has stored the claim, but before its value is compared. The claim is made inside
#   the `try`, and the `finally` finds the claim by its identity instead of a local flag. A `threading.Lock` has no such
#   identity: whether `acquire(blocking=False)` succeeded is known only from the return value, which the exception
#   discards. Nor is a context manager safe: a handler may raise when `__enter__` has claimed, or `__exit__` begins.
# * It may not be raised within the `finally`, between its test and `del`: neither a subscript nor `del` of a dict item
#   with an `int` key calls Python code or jumps backwards.
#
# `claimed` does that. `ModelBurst` repeats its lines, because the call takes a twentieth of a null model's execution.


Claims: TypeAlias = dict[int, object]
"""The claim of the call that uses an object, as the item CLAIM; empty while none does."""
CLAIM: Final = 0

P = ParamSpec("P")
S = TypeVar("S", bound=Any)
T = TypeVar("T")


def claimed(claims: Claims, claim: object, use: Callable[[], T], busy: Callable[[Any], T]) -> T:
    """Return `use()`, during which no other claim is accepted; or `busy(other)` if the object has another claim."""
    try:
        other = claims.setdefault(CLAIM, claim)
        return use() if other is claim else busy(other)
    finally:
        # No calls here: see above.
        try:
            if claims[CLAIM] is claim:
                del claims[CLAIM]
        except KeyError:  # the other call has ended since
            pass


def release(claims: Claims, claim: object) -> bool:
    """End a claim and return True; False if the object has another claim, or none.

    A signal handler may raise when this begins: on the main thread `claimed` is safe.
    """
    try:
        if claims[CLAIM] is claim:
            del claims[CLAIM]
            return True
    except KeyError:
        pass
    return False


def exclusive(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate a method so that only one call of all `exclusive` methods runs on an object; others raise immediately.

    This includes a call by a signal handler that interrupts the first one. The object has its Claims in `_claims`, and
    its `_busy_error()` returns the exception for a call that another one excludes.
    """

    @wraps(method)
    def wrapper(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return claimed(self._claims, object(), partial(method, self, *args, **kwargs), partial(_reject, self))

    return wrapper


def _reject(user: Any, _claim: object) -> NoReturn:
    raise user._busy_error()
