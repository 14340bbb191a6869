"""What a client's data can make fail in ways that no check foresaw, and the status that it gets for it.

A model of impossible size, or a kernel that meets numbers which numpy refuses, fails one call and not the driver: the
error is logged, since it may be a bug, and answered. Errors of other kinds end the worker, visibly. (LIFE-8)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from nnfmq.hal.errors import GeneralFailure, NnfmqError, ResourceExhaustedTransient

FAULTS = (ArithmeticError, LookupError, MemoryError, TypeError, ValueError)  # what numpy raises
_log = logging.getLogger("nnfmq.faults")


@contextmanager
def faults_as_errors(what: str) -> Iterator[None]:
    """Raise a fault in the block as ResourceExhaustedTransient (no memory) or GeneralFailure, which says `what` failed.

    Errors with a status pass.
    """
    try:
        yield
    except NnfmqError:
        raise
    except MemoryError as error:
        raise ResourceExhaustedTransient(f"{what} failed: there is not enough memory") from error
    except FAULTS as error:
        _log.exception("%s failed", what)
        raise GeneralFailure(f"{what} failed: {error!r}") from error
