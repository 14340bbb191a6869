"""Background compilation of models prepared with FAST_SINGLE_ANSWER (tier-up).

The model first runs on its baseline program; this job compiles it and replaces the program. The job holds a weak
reference only: if the model is released, a job that waits is dropped, and a running one stops after the part that is
being compiled. If compiling fails, the model keeps the baseline program, and a warning is logged.
"""

from __future__ import annotations

import logging
import weakref
from functools import partial

from nnfmq.engines.execution import TieredProgram
from nnfmq.hal.errors import GeneralFailure, NnfmqError
from nnfmq.service.compile_jobs import PrepareContext, prepare_context

__all__ = ["tier_up"]

_log = logging.getLogger("nnfmq.background_compile")


def tier_up(program_ref: weakref.ref[TieredProgram]) -> None:
    """Compile a program and let the result replace it, if the program is still in use. Blocks; raises nothing."""
    program = program_ref()
    compile_program = None if program is None else program.compile_program
    del program  # no strong reference while compiling
    if compile_program is None:
        return
    compiled = None
    try:
        on_progress = partial(_require_in_use, program_ref)
        with prepare_context(PrepareContext(on_progress=on_progress, is_background=True)):
            compiled = compile_program()
    except NnfmqError as error:
        level = logging.DEBUG if program_ref() is None else logging.WARNING
        _log.log(level, "a model stays on its baseline program: %s", error)
    except Exception:  # noqa: BLE001  code of a plug-in may raise anything
        _log.exception("a model stays on its baseline program")
    program = program_ref()
    if program is None:
        return
    if compiled is None:
        program.stay()
    else:
        program.tier_up(compiled)


def _require_in_use(program_ref: weakref.ref[TieredProgram], _done: int, _total: int) -> None:
    """Abort a compilation whose program has been released."""
    if program_ref() is None:
        raise GeneralFailure("the model was released before it was compiled")
