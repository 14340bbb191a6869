"""Python with the hooks of `chaos_steps`: started instead of the interpreter, it runs `-P -m MODULE ARGUMENT...`.

`tools/chaos.py` starts the driver by it. It sets `sys.executable` to the same script, so that the processes which the
driver starts later (the model repository, imports, unfinished compilations, workers that are interpreters of their own)
report their steps, too.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PROGRAM_VARIABLE = "CHAOS_PROGRAM"
"""The script that replaces the interpreter."""
_TIMES: Mapping[str, float] = {
    "nnfmq.repository.repository:LOOK_S": 0.05,
    "nnfmq.repository.repository:PAUSE_MAX_S": 0.2,
    "nnfmq.repository.repository:RESTORE_PAUSE_S": 0.5,
    "nnfmq.driver.process.workers:PAUSE_MAX_S": 0.2,
}
"""Pauses before something is done again, which the tool would only wait for: module and name → seconds instead."""


def write_program(path: Path) -> None:
    """Write the script that runs this module by the interpreter of the calling process."""
    command = shlex.join([sys.executable, "-P", str(Path(__file__).resolve())])
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)  # workers may have a uid of their own


def main(words: Sequence[str]) -> None:
    """Install the hooks for the process that `words` start, and run its module."""
    if list(words[:2]) != ["-P", "-m"]:
        raise SystemExit(f"only `-P -m MODULE` is possible, not {shlex.join(words)}")
    module, arguments = words[2], list(words[3:])
    sys.path.append(str(Path(__file__).resolve().parent))
    from nnfmq.base.processes import use_one_blas_thread

    faulthandler.register(signal.SIGUSR1)  # the tool wants to know where a process hangs
    use_one_blas_thread()  # as `nnfmq serve`: a supervisor with threads does not fork
    from chaos_steps import PAGE_VARIABLE, Page, Role, find, install

    role = Role.SUPERVISOR
    if module == "nnfmq.repository":
        role = Role.IMPORT if arguments[:1] == ["--import"] else Role.REPOSITORY
    elif "--compile" in arguments:
        role = Role.UNFINISHED
    elif "--worker" in arguments:
        role = Role.WORKER
    sys.executable = os.environ[PROGRAM_VARIABLE]
    install(Page(Path(os.environ[PAGE_VARIABLE])), role)
    for name, seconds in _TIMES.items():
        holder, attribute, _ = find(name)
        setattr(holder, attribute, seconds)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
