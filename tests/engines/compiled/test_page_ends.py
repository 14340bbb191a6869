"""Kernels over inputs that end or begin where a mapping does, in a process of their own: one byte too far ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from support import page_ends

PROGRAM = Path(page_ends.__file__)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PROGRAM.parents[1]), *sys.path])}
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_no_kernel_touches_a_byte_beside_its_inputs() -> None:
    done = run()
    count = sum(len(list(page_ends.models(type))) for type in (page_ends.F32, page_ends.Q8))

    assert (done.returncode, done.stdout.strip()) == (0, str(count)), done.stderr


def test_who_touches_one_is_ended() -> None:
    assert run("beyond").returncode == -signal.SIGSEGV
