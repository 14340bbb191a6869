"""Targets: the instruction sets that code is generated for, and which of them this machine can run.

A target has a vector width, a number of vector registers and LLVM features. Results have the same bits on all targets:
quantized ones are exact integers, and the order of each sum of floats and what it rounds depend on shapes only. The
exception is sse4.1, whose multiply-adds round twice. `$NNFMQ_TARGET` selects one that this machine can run.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from functools import cache

from msgspec import Struct
from msgspec.structs import replace

from nnfmq.base import settings
from nnfmq.hal.errors import InvalidArgument

__all__ = ["TARGETS", "Target", "can_run", "chosen_target", "host_features", "host_target", "request_tile_registers"]


# ----------------------------------------------------------------------------------------------------------------------
# Permission to use AMX's tile registers, which Linux gives to a process that asks for it.
#
# The kernel saves 8 KiB of tiles for each thread that has used them, and gives none to a process that has not asked.
# The permission holds for all threads and for forked children, and ends at execve(2).


_SYS_ARCH_PRCTL = 158  # of x86-64
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


@cache
def request_tile_registers() -> bool:
    """Return whether this process may use tile registers from now on. False before Linux 5.16.

    A thread whose alternative signal stack is too small for the larger signal frame also makes the kernel refuse.
    """
    if os.uname().machine != "x86_64":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


# ----------------------------------------------------------------------------------------------------------------------
# Targets: the instruction sets that code is generated for, and which of them this machine can run.


class Target(Struct, frozen=True):
    """One instruction set.

    `lanes` are 32-bit lanes of a vector, `registers` vector registers. `half_lanes` are those of a vector of half that
    length, which some CPUs compute in half the time; 0 if the target has none. pmaddwd, pmaddubsw, vpdpwssd, vpdpbusd,
    usdot, sdot, usmmla, smmla and psign are the names of LLVM's intrinsics on whole vectors, None if the target has no
    such instruction; vpdpbusd_half is the one on half a vector. 8-bit values are multiplied in AMX's tile registers if
    it `has_tiles` and there are enough values, else by dot4 or mmla if it `has_dot4`, else by acc16 if there is
    pmaddubsw, else by dot2; those that are quantized at run time with psign, if there is one. `tuning` are LLVM
    features that only influence its choice between instructions. A target that `emulates_fma` has no instruction that
    rounds multiply-adds once, and computes them with several.
    """

    name: str
    triple: str
    features: tuple[str, ...]
    lanes: int
    registers: int
    pmaddwd: str | None
    pmaddubsw: str | None
    half_lanes: int = 0
    vpdpwssd: str | None = None
    vpdpbusd: str | None = None
    vpdpbusd_half: str | None = None
    usdot: str | None = None
    sdot: str | None = None
    usmmla: str | None = None
    smmla: str | None = None
    psign: str | None = None
    has_dot4: bool = False
    has_tiles: bool = False
    tuning: tuple[str, ...] = ()
    emulates_fma: bool = False

    @property
    def has_fma(self) -> bool:
        """Whether an instruction multiplies and adds floats with one rounding."""
        return "fma" in self.features or self.triple.startswith("aarch64")

    @property
    def deterministic(self) -> Target:
        """The target for the same machines whose floats have the bits of all targets."""
        return self if self.has_fma or self.emulates_fma else TARGETS[f"{self.name}{_EMULATING}"]

    @property
    def multiplies_by_element(self) -> bool:
        """Whether a factor may be an element of a vector (AArch64); LLVM then loads those of two K groups at once."""
        return self.triple.startswith("aarch64")

    @property
    def has_half(self) -> bool:
        """Whether there are instructions that convert between float16 and float32."""
        return "f16c" in self.features or self.triple.startswith("aarch64")

    def dot4_is_signed(self, is_signed: bool) -> bool:
        """Return whether dot4 takes inputs of a type as int8: they are not converted if there is an instruction."""
        return self.sdot is not None and (is_signed or self.usdot is None)

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

_ARM = "aarch64-unknown-linux-gnu"
_USDOT, _SDOT, _USMMLA, _SMMLA = (
    f"llvm.aarch64.neon.{name}.v4i32.v16i8" for name in ("usdot", "sdot", "usmmla", "smmla")
)

_TILES = ("amx-tile", "amx-int8")
_AVX512_PMADDWD, _AVX512_PMADDUBSW = "llvm.x86.avx512.pmaddw.d.512", "llvm.x86.avx512.pmaddubs.w.512"

_AVX512VNNI = Target(
    "avx512vnni",
    _X86,
    (*_AVX512, "avx512vnni"),
    lanes=16,
    registers=32,
    pmaddwd=_AVX512_PMADDWD,
    pmaddubsw=_AVX512_PMADDUBSW,
    half_lanes=8,
    vpdpwssd="llvm.x86.avx512.vpdpwssd.512",
    vpdpbusd="llvm.x86.avx512.vpdpbusd.512",
    vpdpbusd_half="llvm.x86.avx512.vpdpbusd.256",
    has_dot4=True,
    tuning=("fast-dpwssd",),  # else LLVM adds separately, which has less latency but also less throughput
)

_EMULATING = "-fma"
_SSE41 = Target(
    "sse4.1",
    _X86,
    ("sse4.1", "ssse3"),
    lanes=4,
    registers=16,
    pmaddwd="llvm.x86.sse2.pmadd.wd",
    pmaddubsw="llvm.x86.ssse3.pmadd.ub.sw.128",
    psign="llvm.x86.ssse3.psign.b.128",
)

TARGETS = {
    target.name: target
    for target in (
        replace(_AVX512VNNI, name="amx", features=(*_AVX512VNNI.features, *_TILES), has_tiles=True),
        _AVX512VNNI,
        Target("avx512", _X86, _AVX512, 16, 32, _AVX512_PMADDWD, _AVX512_PMADDUBSW, half_lanes=8),
        Target(
            "avx2",
            _X86,
            _AVX2,
            lanes=8,
            registers=16,
            pmaddwd="llvm.x86.avx2.pmadd.wd",
            pmaddubsw="llvm.x86.avx2.pmadd.ub.sw",
            psign="llvm.x86.avx2.psign.b",
        ),
        _SSE41,
        replace(_SSE41, name=f"{_SSE41.name}{_EMULATING}", emulates_fma=True),
        Target(
            "neon-i8mm",
            _ARM,
            ("neon", "dotprod", "i8mm"),
            lanes=4,
            registers=32,
            pmaddwd=None,
            pmaddubsw=None,
            usdot=_USDOT,
            sdot=_SDOT,
            usmmla=_USMMLA,
            smmla=_SMMLA,
            has_dot4=True,
        ),
        Target("neon-dotprod", _ARM, ("neon", "dotprod"), 4, 32, None, None, sdot=_SDOT, has_dot4=True),
        Target("neon", _ARM, ("neon",), 4, 32, None, None),
    )
}
"""All targets by name, the best first."""


@cache
def host_target() -> Target:
    """Return the target that this machine's kernels are compiled for.

    Raises:
        InvalidArgument: If there is none for this machine, or `$NNFMQ_TARGET` names one that it cannot run.
    """
    return chosen_target(os.uname().machine, host_features())


_FEATURES_IN_CPUINFO = {
    "amx_int8": "amx-int8",
    "amx_tile": "amx-tile",
    "asimd": "neon",
    "asimddp": "dotprod",
    "bmi1": "bmi",
    "sse4_1": "sse4.1",
    "avx512_vnni": "avx512vnni",
}
"""The kernel's names of features that LLVM calls otherwise."""


def host_features() -> frozenset[str]:
    """Return the features of this machine, by LLVM's names, as far as targets have them.

    The kernel lists what programs may use: features of registers that it does not save are missing, those that a
    virtual machine masks as well. LLVM would ask the CPU, but loading LLVM takes 0.1 s and 40 MiB. If the kernel lists
    tile registers, this process asks for them, and they are missing if it refuses.
    """
    known = frozenset(feature for target in TARGETS.values() for feature in target.features)
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, words = line.partition(":")
            if name.strip() in ("flags", "Features"):  # x86-64, AArch64; those of the first CPU
                found = known.intersection(_FEATURES_IN_CPUINFO.get(word, word) for word in words.split())
                return found if found.isdisjoint(_TILES) or request_tile_registers() else found.difference(_TILES)
    return frozenset()


def can_run(target: Target, machine: str, features: frozenset[str]) -> bool:
    """Return whether a machine, as `uname -m` names it, with these features of LLVM can run code for `target`."""
    return machine == target.triple.split("-")[0] and features.issuperset(target.features)


def chosen_target(machine: str, features: frozenset[str]) -> Target:
    """Return the best target that a machine can run, or the one that `$NNFMQ_TARGET` names.

    Raises:
        InvalidArgument: If the machine can run none, or not the named one.
    """
    here = [target for target in TARGETS.values() if can_run(target, machine, features)]
    known = ", ".join(target.name for target in here) or "none"
    forced = settings.TARGET.effective()
    if forced.value is not None:
        found = TARGETS[forced.value]
        if found not in here:
            raise InvalidArgument(f"{forced.origin} is {forced.value!r}, but this machine can run: {known}")
        return found
    if not here:
        raise InvalidArgument(f"no code can be generated for {machine}")
    return here[0]
