"""Targets: the instruction sets that code is generated for, and which of them this machine has.

A target says how wide vectors are, how many registers hold them, and which LLVM features may be used. Results do not
depend on it: quantized ones are exact integers everywhere. `$NNFMQ_TARGET` forces one that this machine can run.
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
    """One instruction set. `lanes` are of 32 bits. LLVM's names of what an instruction does for all of them:

    `pmaddwd` is the sum of two products of 16 bits; `vpdpwssd` adds it to another sum; `pmaddubsw` are sums of
    two products of bytes in 16 bits, of which the first are without sign; `vpdpbusd` adds four of these to another sum.
    Products of codes are made in `quads`, or in octets where there are `pmaddubsw`, or in pairs. `tuning` are what
    LLVM chooses between instructions that `features` have anyhow.
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
        """Return the features as LLVM is told of them, and that it must not use any of `others` that are not among
        them: those that LLVM knows of a processor by its name may be switched off in a virtual machine, or not be those
        of the machine that takes the code from a cache.
        """
        without = sorted(set(others).difference(self.features, _EVERYWHERE))
        with_these = (*self.features, *self.tuning)
        return ",".join([*(f"-{feature}" for feature in without), *(f"+{feature}" for feature in with_these)])


_EVERYWHERE = ("64bit", "cmov", "cx8", "fxsr", "mmx", "sse", "sse2", "sse3", "ssse3", "sse4.1", "sse4.2", "popcnt")
"""What comes with AVX2."""

_X86 = "x86_64-unknown-linux-gnu"
_AVX2 = ("avx", "avx2", "fma", "f16c", "bmi", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd")

_AVX512_PAIRS, _AVX512_BYTES = "llvm.x86.avx512.pmaddw.d.512", "llvm.x86.avx512.pmaddubs.w.512"

TARGETS = {
    target.name: target
    for target in (
        Target(
            "avx512vnni",
            _X86,
            (*_AVX512, "avx512vnni"),
            lanes=16,
            registers=32,
            pmaddwd=_AVX512_PAIRS,
            pmaddubsw=_AVX512_BYTES,
            vpdpwssd="llvm.x86.avx512.vpdpwssd.512",
            vpdpbusd="llvm.x86.avx512.vpdpbusd.512",
            has_dot4=True,
            tuning=("fast-dpwssd",),  # or sums would be added separately: sooner each, but here are many side by side
        ),
        Target("avx512", _X86, _AVX512, 16, 32, _AVX512_PAIRS, _AVX512_BYTES),
        Target("avx2", _X86, _AVX2, 8, 16, "llvm.x86.avx2.pmadd.wd", "llvm.x86.avx2.pmadd.ub.sw"),
        Target("sse4.1", _X86, ("sse4.1", "ssse3"), 4, 16, "llvm.x86.sse2.pmadd.wd", "llvm.x86.ssse3.pmadd.ub.sw.128"),
        Target("neon", "aarch64-unknown-linux-gnu", ("neon",), 4, 32, None, None),
    )
}
"""By name, the best first."""


def runnable(target: Target, host: str, features: Mapping[str, bool]) -> bool:
    """Return True where a machine of LLVM's triple `host` with these `features` runs `target`'s code."""
    return host.split("-")[0] == target.triple.split("-")[0] and all(features.get(name) for name in target.features)


def chosen_target(host: str, features: Mapping[str, bool]) -> Target:
    """Return the best target of a machine, or the one that `$NNFMQ_TARGET` names. Raises InvalidArgument."""
    here = [target for target in TARGETS.values() if runnable(target, host, features)]
    known = ", ".join(target.name for target in here) or "none"
    forced = os.environ.get(TARGET_VARIABLE)
    if forced:
        found = TARGETS.get(forced)
        if found not in here:
            raise InvalidArgument(f"{TARGET_VARIABLE} is {forced!r}; this machine runs: {known}")
        return found
    if not here:
        raise InvalidArgument(f"no code is generated for machines like {host}")
    return here[0]
