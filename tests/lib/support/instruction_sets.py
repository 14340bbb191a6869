"""Instruction sets for tests of kernels: code for this machine, or for an emulator if this machine cannot run it."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from llvmlite import binding as llvm
from msgspec.structs import replace

from nnfmq.engines.compiled import code_generator, partition
from nnfmq.engines.compiled.code_generator import compile_kernels
from nnfmq.engines.compiled.kernels import Kernel
from nnfmq.engines.compiled.target import TARGETS, Target, can_run, host_features, host_target
from support.linked import undefined_symbols

if TYPE_CHECKING:
    from support.emulated import Machine

__all__ = [
    "ACC16",
    "DOT4",
    "LIBRARY_FUNCTIONS",
    "default_sets",
    "initialize_all_targets",
    "known_symbols_only",
    "using",
]

DOT4 = "dot4"
"""This machine's set, with dot4 emulated by dot2."""

ACC16 = "acc16"
"""This machine's set, with acc16 even if it has dot4."""

_WITH_DOT4 = ("avx512vnni", "neon-dotprod", "neon-i8mm")

LIBRARY_FUNCTIONS = frozenset(
    ("memcpy", "memset", "powf", "acosf", "acoshf", "asinf", "asinhf", "atanf", "atanhf", "cosf", "coshf", "sinf")
).union(("sinhf", "tanf"))
"""All functions that kernels may call. fmaf and the like are missing: LLVM calls them if an instruction lacks."""


def initialize_all_targets() -> None:
    """Initialize LLVM's code generators for all architectures."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def default_sets(micro_kernel: str | None = None) -> tuple[str, ...]:
    """Return the sets that tests of kernels run for: this machine's best, and others that run fast here.

    On x86-64 the best set of all is among them, in an emulator if this machine lacks it. Tests of dot4 also run for
    each set with a dot4 instruction.
    """
    if platform.machine() != "x86_64":
        return ("host",)
    best = next(iter(TARGETS.values()))
    lacking = () if _runs_here(best) else (best.name,)
    return ("host", *lacking, "sse4.1-fma", "neon", *(_WITH_DOT4 if micro_kernel == "dot4" else ()))


def _runs_here(target: Target) -> bool:
    return can_run(target, platform.machine(), host_features())


def _named(name: str) -> Target:
    if name == DOT4:
        without = {"vpdpbusd": None, "vpdpbusd_half": None, "usdot": None, "sdot": None}
        return replace(host_target(), name=DOT4, has_dot4=True, has_tiles=False, **without)
    if name == ACC16:
        if host_target().pmaddubsw is None:
            pytest.skip("this machine has no pmaddubsw")
        return replace(host_target(), name=ACC16, has_dot4=False, has_tiles=False)
    return TARGETS[name]


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
def using(name: str, always_emulated: bool = False) -> Iterator[None]:
    """Prepare and run models for the instruction set `name`, in an emulator if this machine lacks it or on demand."""
    target = _named(name)
    if _runs_here(target) and not always_emulated:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(partition, "host_target", lambda: target)
            patch.setitem(TARGETS, name, target)
            yield
        return
    from support.emulated import emulated_on

    initialize_all_targets()
    with emulated_on(_machine(target)):
        yield


def _machine(target: Target) -> Machine:
    """Return the emulator for a set, or skip the test if it is not installed."""
    if not target.triple.startswith("aarch64"):
        if importlib.util.find_spec("bochscpu") is None:
            pytest.skip("bochscpu-python is not installed")
        from support.bochs import Bochs

        return Bochs(target)
    if "i8mm" in target.features:
        from support.qemu import Qemu

        return Qemu(target)
    pytest.importorskip("unicorn", reason="unicorn is not installed")
    from support.arm import Arm

    return Arm(target)
