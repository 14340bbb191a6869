"""Instruction sets for tests of kernels: code for this machine, or for an emulator if this machine cannot run it."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from llvmlite import binding as llvm

from nnfmq.engines.compiled import code_generator, partition
from nnfmq.engines.compiled.code_generator import compile_kernels
from nnfmq.engines.compiled.jit import Kernel
from nnfmq.engines.compiled.target import TARGETS, Target, can_run, host_features, host_target
from support.linked import undefined_symbols

__all__ = [
    "ACC16",
    "DOT4",
    "LIBRARY_FUNCTIONS",
    "default_sets",
    "emulator",
    "initialize_all_targets",
    "known_symbols_only",
    "using",
]

DOT4 = "dot4"
"""This machine's set, with dot4 emulated by dot2."""

ACC16 = "acc16"
"""This machine's set, with acc16 even if it has dot4."""

LIBRARY_FUNCTIONS = frozenset(("memcpy", "memset", "logf", "powf", "sinf"))
"""All functions that kernels may call. fmaf and the like are missing: LLVM calls them if an instruction lacks."""


def initialize_all_targets() -> None:
    """Initialize LLVM's code generators for all architectures."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def default_sets(micro_kernel: str | None = None) -> tuple[str, ...]:
    """Return the sets that tests of kernels run for: this machine's best, and others that run fast here.

    Tests of dot4 also run for those that are `neon` with a dot4 instruction.
    """
    with_dot4 = ("neon-dotprod", "neon-i8mm") if micro_kernel == "dot4" else ()
    return ("host", *(("sse4.1", "neon", *with_dot4) if platform.machine() == "x86_64" else ()))


def _runs_here(target: Target) -> bool:
    return can_run(target, platform.machine(), host_features())


def _named(name: str) -> Target:
    if name == DOT4:
        return replace(host_target(), name=DOT4, has_dot4=True, has_tiles=False, vpdpbusd=None, usdot=None, sdot=None)
    if name == ACC16:
        if host_target().pmaddubsw is None:
            pytest.skip("this machine has no pmaddubsw")
        return replace(host_target(), name=ACC16, has_dot4=False, has_tiles=False)
    return TARGETS[name]


@contextmanager
def emulator(name: str | None, always: bool) -> Iterator[Any]:
    """Start an emulator for the whole session if the set `name` needs one; if `always`, also for sets that run here."""
    target = TARGETS.get(name or "")
    if target is None or _is_arm(target) or (_runs_here(target) and not always):
        yield None
        return
    from support.bochs import Bochs

    with Bochs(target) as machine:
        yield machine


@contextmanager
def known_symbols_only() -> Iterator[None]:
    """Assert that kernels call no function that is not in LIBRARY_FUNCTIONS."""
    real_compile = compile_kernels

    def checked(kernels: Sequence[Kernel], target: Target) -> bytes:
        code = real_compile(kernels, target)
        assert undefined_symbols(code) <= LIBRARY_FUNCTIONS
        return code

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code_generator, "compile_kernels", checked)
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
    from support.emulated import emulated_on

    initialize_all_targets()
    with emulated_on(machine or _arm(target)):
        yield


def _is_arm(target: Target) -> bool:
    return target.triple.startswith("aarch64")


def _arm(target: Target) -> Any:
    """Return the emulator for a set of AArch64."""
    if "i8mm" in target.features:
        from support.qemu import Qemu

        return Qemu(target)
    pytest.importorskip("unicorn", reason="unicorn is not installed")
    from support.arm import Arm

    return Arm(target)
