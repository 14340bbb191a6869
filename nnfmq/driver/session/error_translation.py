"""Translation of exceptions that a client's data can cause into errors with a HAL status.

NumPy and the kernels raise Python's own exceptions for values that no earlier check rejected, for example for a model
of impossible size. Such an exception fails one call and not the driver: it is logged, because it may be a bug, and
reported to the client (LIFE-8). Exceptions of other types terminate the worker; see
`session.abort_on_internal_error`. Any exception that a plug-in raises fails only the call.

`hal.errors` translates between errors and statuses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nnfmq.base import settings
from nnfmq.hal.errors import DeadObject, GeneralFailure, NnfmqError, ResourceExhaustedTransient

RECOVERABLE_ERRORS = (ArithmeticError, LookupError, MemoryError, TypeError, ValueError)
"""The exceptions that NumPy raises for bad data."""

_log = logging.getLogger("nnfmq.errors")


@contextmanager
def errors_to_status(action: str) -> Iterator[None]:
    """Translate the recoverable exceptions of the block; `action` is the subject of the message, "reading the model".

    Other NnfmqErrors pass unchanged, except DeadObject: no peer takes part in what the blocks do, so it can only be the
    death of another driver, whose client a plug-in is (EXE-9).

    Raises:
        ResourceExhaustedTransient: If the block raises MemoryError.
        GeneralFailure: If the block raises DeadObject, or another one of RECOVERABLE_ERRORS.
    """
    try:
        yield
    except DeadObject as error:
        raise GeneralFailure(str(error)) from error
    except NnfmqError:
        raise
    except MemoryError as error:
        raise memory_shortage(f"{action} failed") from error
    except RECOVERABLE_ERRORS as error:
        _log.exception("%s failed", action)
        raise GeneralFailure(f"{action} failed: {error!r}") from error


def memory_shortage(what: str) -> ResourceExhaustedTransient:
    """Return the error for an allocation that has failed: the kernel limits a worker by what its client may have."""
    return ResourceExhaustedTransient(
        f"{what}: there is not enough memory; ${settings.CLIENT_MEMORY_MIB.variable} of the driver limits what its "
        "process for this client may take"
    )


def wrap_plugin_call(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` wrapped so that every exception becomes GeneralFailure.

    HAL errors and MemoryError pass unchanged. DeadObject does not: a plug-in may be the client of another driver, and
    the death of that driver is not the death of this client.

    Args:
        name: The plug-in's name in messages.
        function: A function of the plug-in.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if isinstance(error, NnfmqError | MemoryError) and not isinstance(error, DeadObject):
                raise
            _log.exception("the plug-in of %s failed", name)
            raise GeneralFailure(f"the plug-in of {name} failed: {error!r}") from error

    return call
