"""One of the engine's instruction sets for a test: this machine's code, or an emulator's where it cannot run here."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from llvmlite import binding as llvm

from nnfmq.engines.compiled import jit, partition
from nnfmq.engines.compiled.jit import Kernel, compile_kernels, host_target
from nnfmq.engines.compiled.target import TARGETS, Target, runnable
from support.linked import undefined_symbols

__all__ = ["ACC16", "DOT4", "OUTSIDE", "all_processors", "default_sets", "emulator", "known_symbols_only", "using"]

DOT4 = "dot4"
"""Not a set of its own: this machine's, with products of quads made of those of pairs."""

ACC16 = "acc16"
"""This machine's, with products of octets even where it has quads."""

OUTSIDE = frozenset(("memcpy", "memset", "logf", "powf", "sinf"))
"""All that kernels may call. Nothing that is an instruction elsewhere is among it, such as fmaf: it would be slow."""


def all_processors() -> None:
    """Let LLVM generate code for all that it knows."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def default_sets() -> tuple[str, ...]:
    """Return what the tests of kernels run for: this machine's best, and in part others that run fast here."""
    return ("host", *(("sse4.1", "neon") if platform.machine() == "x86_64" else ()))


def _runs_here(target: Target) -> bool:
    return runnable(target, llvm.get_process_triple(), llvm.get_host_cpu_features())


def _named(name: str) -> Target:
    if name == DOT4:
        return replace(host_target(), name=DOT4, has_dot4=True, vpdpbusd=None)
    if name == ACC16:
        if host_target().pmaddubsw is None:
            pytest.skip("this machine has no instruction that products of octets are made with")
        return replace(host_target(), name=ACC16, has_dot4=False)
    return TARGETS[name]


@contextmanager
def emulator(name: str | None, always: bool) -> Iterator[Any]:
    """Start the emulator that outlives a test, if `name` needs it; `always` also for what runs here."""
    target = TARGETS.get(name or "")
    if target is None or target.name == "neon" or (_runs_here(target) and not always):
        yield None
        return
    from support.bochs import Bochs

    with Bochs(target) as machine:
        yield machine


@contextmanager
def known_symbols_only() -> Iterator[None]:
    """Refuse kernels that call anything but what is in OUTSIDE."""
    generate = compile_kernels

    def checked(kernels: Iterable[Kernel], target: Target) -> bytes:
        code = generate(kernels, target)
        assert undefined_symbols(code) <= OUTSIDE
        return code

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "compile_kernels", checked)
        yield


@contextmanager
def using(name: str, machine: Any = None) -> Iterator[None]:
    """Prepare and run models for the instruction set `name`, on `machine` if it is given."""
    target = _named(name)
    if machine is None and _runs_here(target):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(partition, "host_target", lambda: target)
            patch.setitem(TARGETS, name, target)
            yield
        return
    if machine is None:
        pytest.importorskip("unicorn", reason="unicorn is not installed")
        from support.arm import Arm

        machine = Arm()
    from support.emulated import elsewhere

    all_processors()
    with elsewhere(machine):
        yield
