"""Targets: the instruction sets that code is generated for, and which of them this machine can run.

A target has a vector width, a number of vector registers and LLVM features. Quantized results are exact integers and so
equal on all targets. `$NNFMQ_TARGET` forces one that this machine can run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nnfmq.hal.errors import InvalidArgument

__all__ = ["TARGETS", "TARGET_VARIABLE", "Target", "chosen_target"]

TARGET_VARIABLE = "NNFMQ_TARGET"


@dataclass(frozen=True, slots=True)
class Target:
    """One instruction set.

    `lanes` are 32-bit lanes of a vector, `registers` vector registers. pmaddwd, pmaddubsw, vpdpwssd and vpdpbusd are
    the names of LLVM's intrinsics on whole vectors, None if the target has no such instruction. 8-bit values are
    multiplied by dot4 if `has_dot4`, else by acc16 if there is pmaddubsw, else by dot2. `tuning` are LLVM features that
    only influence its choice between instructions.
    """

    name: str
    triple: str
    features: tuple[str, ...]
    lanes: int
    registers: int
    pmaddwd: str | None
    pmaddubsw: str | None
    vpdpwssd: str | None = None
    vpdpbusd: str | None = None
    has_dot4: bool = False
    tuning: tuple[str, ...] = ()

    def feature_flags(self, others: Iterable[str] = ()) -> str:
        """Return LLVM's feature string: the target's features switched on, all of `others` that it lacks switched off.

        `others` are the features of the CPU that LLVM tunes for. The target must not use them, because a virtual
        machine may mask some, and because a cache may bring the code to another machine.
        """
        without = sorted(set(others).difference(self.features, _EVERYWHERE))
        with_these = (*self.features, *self.tuning)
        return ",".join([*(f"-{feature}" for feature in without), *(f"+{feature}" for feature in with_these)])


_EVERYWHERE = ("64bit", "cmov", "cx8", "fxsr", "mmx", "sse", "sse2", "sse3", "ssse3", "sse4.1", "sse4.2", "popcnt")
"""Features that every CPU with AVX2 has."""

_X86 = "x86_64-unknown-linux-gnu"
_AVX2 = ("avx", "avx2", "fma", "f16c", "bmi", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd")

_AVX512_PMADDWD, _AVX512_PMADDUBSW = "llvm.x86.avx512.pmaddw.d.512", "llvm.x86.avx512.pmaddubs.w.512"

TARGETS = {
    target.name: target
    for target in (
        Target(
            "avx512vnni",
            _X86,
            (*_AVX512, "avx512vnni"),
            lanes=16,
            registers=32,
            pmaddwd=_AVX512_PMADDWD,
            pmaddubsw=_AVX512_PMADDUBSW,
            vpdpwssd="llvm.x86.avx512.vpdpwssd.512",
            vpdpbusd="llvm.x86.avx512.vpdpbusd.512",
            has_dot4=True,
            tuning=("fast-dpwssd",),  # else LLVM adds separately, which has less latency but also less throughput
        ),
        Target("avx512", _X86, _AVX512, 16, 32, _AVX512_PMADDWD, _AVX512_PMADDUBSW),
        Target("avx2", _X86, _AVX2, 8, 16, "llvm.x86.avx2.pmadd.wd", "llvm.x86.avx2.pmadd.ub.sw"),
        Target("sse4.1", _X86, ("sse4.1", "ssse3"), 4, 16, "llvm.x86.sse2.pmadd.wd", "llvm.x86.ssse3.pmadd.ub.sw.128"),
        Target("neon", "aarch64-unknown-linux-gnu", ("neon",), 4, 32, None, None),
    )
}
"""All targets by name, the best first."""


def can_run(target: Target, host: str, features: Mapping[str, bool]) -> bool:
    """Return whether a machine with LLVM's triple `host` and these features can run code for `target`."""
    return host.split("-")[0] == target.triple.split("-")[0] and all(features.get(name) for name in target.features)


def chosen_target(host: str, features: Mapping[str, bool]) -> Target:
    """Return the best target that a machine can run, or the one that `$NNFMQ_TARGET` names.

    Raises:
        InvalidArgument: If the machine can run none, or not the named one.
    """
    here = [target for target in TARGETS.values() if can_run(target, host, features)]
    known = ", ".join(target.name for target in here) or "none"
    forced = os.environ.get(TARGET_VARIABLE)
    if forced:
        found = TARGETS.get(forced)
        if found not in here:
            raise InvalidArgument(f"{TARGET_VARIABLE} is {forced!r}, but this machine can run: {known}")
        return found
    if not here:
        raise InvalidArgument(f"no code can be generated for {host}")
    return here[0]
