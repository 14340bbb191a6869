"""The work behind a program that was ready at once: making the better one, and letting it take over.

It holds the program by a weak reference, so a model that is released meanwhile goes at once: what was not begun is not
done, and what is under way ends with the next part that is compiled. What fails leaves the program as it is, and a
log line.
"""

from __future__ import annotations

import logging
import weakref
from functools import partial

from nnfmq.engines.provisional import TieredProgram
from nnfmq.hal.errors import GeneralFailure, NnfmqError
from nnfmq.service.compile_jobs import Preparation, preparing

__all__ = ["improve"]

_log = logging.getLogger("nnfmq.improvement")


def improve(wanted: weakref.ref[TieredProgram]) -> None:
    """Replace a program by what it is provisional for, if anybody still has it. Blocks as long as `compile`."""
    program = wanted()
    make = None if program is None else program.make
    del program
    if make is None:
        return
    try:
        with preparing(Preparation(heard=partial(_require_wanted, wanted))):
            made = make()
    except NnfmqError as error:
        _log.log(
            logging.DEBUG if wanted() is None else logging.WARNING,
            "a model stays on the program that it has: %s",
            error,
        )
        made = None
    except Exception:  # noqa: BLE001  a device's own code may raise anything
        _log.exception("a model stays on the program that it has")
        made = None
    program = wanted()
    if program is None:
        return
    if made is None:
        program.keep()
    else:
        program.replace(made)


def _require_wanted(wanted: weakref.ref[TieredProgram], _done: int, _total: int) -> None:
    """End a preparation that nobody waits for any more."""
    if wanted() is None:
        raise GeneralFailure("the model was released before it was compiled")
