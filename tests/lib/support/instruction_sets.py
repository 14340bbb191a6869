"""One of the engine's instruction sets for a test: this machine's code, or an emulator's where it cannot run here."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from llvmlite import binding as llvm

from nnfmq.engines.compiled import program
from nnfmq.engines.compiled.target import TARGETS, Target, runnable

__all__ = ["all_processors", "runs_here", "using"]


def all_processors() -> None:
    """Let LLVM generate code for all that it knows."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def runs_here(target: Target) -> bool:
    """Return whether this machine has it."""
    return runnable(target, llvm.get_process_triple(), llvm.get_host_cpu_features())


@contextmanager
def using(name: str) -> Iterator[None]:
    """Prepare and run models for the instruction set `name`; skip the test where nothing here runs it."""
    target = TARGETS[name]
    if runs_here(target):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(program, "host_target", lambda: target)
            yield
        return
    all_processors()
    from support.emulated import elsewhere  # both need what only some machines have

    if name == "neon":
        if importlib.util.find_spec("unicorn") is None:
            pytest.skip("unicorn is not installed")
        from support.arm import Arm

        with elsewhere(Arm()):
            yield
        return
    from support.bochs import bochs_for

    with elsewhere(bochs_for(target)):
        yield


def default_sets() -> tuple[str, ...]:
    """Return what the tests of kernels run for: this machine's best, and a part of them for others that run fast."""
    others = ("sse4.1", "neon") if platform.machine() == "x86_64" else ()
    return ("host", *others)
