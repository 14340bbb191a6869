"""What a client's data can make fail in ways that no check foresaw, and the status that it gets for it.

A model of impossible size, or a kernel that meets numbers which numpy refuses, fails one call and not the driver: the
error is logged, since it may be a bug, and answered. Errors of other kinds end the worker, visibly; but what a plug-in
raises, whatever it is, fails the call alone. (LIFE-8)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nnfmq.hal.errors import DeadObject, GeneralFailure, NnfmqError, ResourceExhaustedTransient

RECOVERABLE_ERRORS = (ArithmeticError, LookupError, MemoryError, TypeError, ValueError)  # what numpy raises
_log = logging.getLogger("nnfmq.faults")


@contextmanager
def errors_to_status(what: str) -> Iterator[None]:
    """Raise a fault in the block as ResourceExhaustedTransient (no memory) or GeneralFailure, which says `what` failed.

    Errors with a status pass.
    """
    try:
        yield
    except NnfmqError:
        raise
    except MemoryError as error:
        raise ResourceExhaustedTransient(f"{what} failed: there is not enough memory") from error
    except RECOVERABLE_ERRORS as error:
        _log.exception("%s failed", what)
        raise GeneralFailure(f"{what} failed: {error!r}") from error


def wrap_plugin_call(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a plug-in that fails in the HAL's way, whatever it raises; `name` says whose it is."""

    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except Exception as error:
            if isinstance(error, NnfmqError | MemoryError) and not isinstance(error, DeadObject):
                raise  # a DeadObject is not this client's: of another driver that the plug-in asks, say
            _log.exception("the plug-in of %s failed", name)
            raise GeneralFailure(f"the plug-in of {name} failed: {error!r}") from error

    return call
