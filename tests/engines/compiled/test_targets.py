"""Code for each instruction set: which instructions it contains, and which set a machine's code is for."""

from __future__ import annotations

import ctypes
import io
import os
import re
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from llvmlite import binding as llvm
from support.instruction_sets import initialize_all_targets

from nnfmq.base import settings
from nnfmq.engines.compiled import code_generator
from nnfmq.engines.compiled.ir_builder import KernelBuilder, Module
from nnfmq.engines.compiled.kernels import Kernel
from nnfmq.engines.compiled.kernels.conv_shape import ConvShape
from nnfmq.engines.compiled.kernels.gemm import GemmKernel, LhsLayout
from nnfmq.engines.compiled.kernels.gemm_plan import plan_gemm
from nnfmq.engines.compiled.kernels.micro_kernels import (
    AmxS8S8x64,
    AmxU8S8x64,
    Dot4,
    DotS8S8x4,
    DotS16x2,
    DotU8S8x4,
    Float32,
    MaddU8S8Acc16,
    MicroKernel,
    MmlaS8S8x8,
    MmlaU8S8x8,
    s8_micro_kernel,
)
from nnfmq.engines.compiled.kernels.requantize import NO_REQUANTIZATION
from nnfmq.engines.compiled.lowering import KernelLaunch
from nnfmq.engines.compiled.partition import LOWERING_RULES
from nnfmq.engines.compiled.target import TARGETS, Target, chosen_target, host_features, request_tile_registers
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import OperationType
from nnfmq.lab.roofline import FmaThroughput, roofline_kernels
from nnfmq.operations.declaration import Tensor
from nnfmq.operations.shapes import window_dimension

_REQUEST = "nnfmq.engines.compiled.target.request_tile_registers"
_WIDE = """
define void @wide(ptr %a, ptr %b) {
  %bytes = load <32 x i8>, ptr %a, align 1
  %shifted = shl <32 x i8> %bytes, splat(i8 3)
  store <32 x i8> %shifted, ptr %b, align 1
  %x = load <8 x i64>, ptr %a, align 1
  %y = load <8 x i64>, ptr %b, align 1
  %kernel = mul <8 x i64> %x, %y
  %more = icmp sgt <8 x i64> %x, %kernel
  %chosen = select <8 x i1> %more, <8 x i64> %y, <8 x i64> %kernel
  store <8 x i64> %chosen, ptr %b, align 1
  ret void
}
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="needs the features of x86-64 by name")
@pytest.mark.parametrize("processor", ["haswell", "skylake-avx512", "alderlake", "znver4", "graniterapids"])
def test_code_has_only_instructions_of_its_set(processor: str) -> None:
    """For any CPU that it is tuned to: a virtual machine may mask features, and a cache may come from elsewhere."""
    target, parsed = TARGETS["avx2"], llvm.parse_assembly(_WIDE)
    parsed.triple = target.triple
    initialize_all_targets()
    assembly = code_generator.create_target_machine(target, processor, llvm.get_host_cpu_features()).emit_assembly(
        parsed
    )
    assert "ymm" in assembly
    assert not re.search(r"gf2p8|vpmullq|zmm|%k[0-7]|[xy]mm(1[6-9]|2\d|3[01])", assembly)


def test_the_kernel_lists_the_features_that_llvm_finds() -> None:
    known = {feature for target in TARGETS.values() for feature in target.features}
    found = llvm.get_host_cpu_features()
    assert host_features() == {feature for feature in known if found.get(feature)}
    assert any(host_features().issuperset(target.features) for target in TARGETS.values())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "flags\t: fpu sse4_1 ssse3 avx512_vnni bmi1\n\nflags\t: avx\n",
            {"sse4.1", "ssse3", "avx512vnni", "bmi"},
        ),
        ("BogoMIPS\t: 50.00\nFeatures\t: fp asimd evtstrm\n", {"neon"}),
        ("Features\t: fp asimd asimdhp asimddp bf16 i8mm\n", {"neon", "dotprod", "i8mm"}),
        ("flags\t: avx512_vnni amx_bf16 amx_tile amx_int8\n", {"avx512vnni", "amx-tile", "amx-int8"}),
        ("Processor: 0\n", set()),
    ],
    ids=["x86_64", "aarch64", "aarch64 with i8mm", "x86_64 with AMX", "unknown"],
)
def test_features_of_the_first_cpu_are_read(text: str, expected: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(_REQUEST, lambda: True)
        patch.setattr("builtins.open", lambda *_args, **_options: io.StringIO(text))
        found = host_features()
    assert found == expected


def test_tile_registers_that_the_kernel_refuses_are_no_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(_REQUEST, lambda: False)
        patch.setattr("builtins.open", lambda *_args, **_options: io.StringIO("flags : avx amx_tile amx_int8\n"))
        assert host_features() == {"avx"}


@pytest.mark.parametrize(
    ("machine", "result", "expected"), [("x86_64", 0, True), ("x86_64", -1, False), ("aarch64", 0, False)]
)
def test_tile_registers_need_the_permission_of_an_x86_kernel(
    machine: str, result: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    class Library:
        def syscall(self, *arguments: int) -> int:
            calls.append(arguments)
            return result

    with monkeypatch.context() as patch:
        patch.setattr(os, "uname", lambda: SimpleNamespace(machine=machine))
        patch.setattr(ctypes, "CDLL", lambda *_arguments, **_options: Library())
        assert request_tile_registers.__wrapped__() is expected
    # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), of asm/unistd_64.h and asm/prctl.h
    assert calls == ([(158, 0x1023, 18)] if machine == "x86_64" else [])


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({"neon"}, "neon"),
        ({"neon", "dotprod"}, "neon-dotprod"),
        ({"neon", "i8mm"}, "neon"),
        ({"neon", "dotprod", "i8mm"}, "neon-i8mm"),
    ],
)
def test_the_best_set_of_an_aarch64_machine_is_chosen(
    features: set[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(settings.TARGET.variable, raising=False)
    assert chosen_target("aarch64", frozenset(features)) is TARGETS[expected]
    monkeypatch.setenv(settings.TARGET.variable, "neon")
    assert chosen_target("aarch64", frozenset(features)) is TARGETS["neon"]


def test_a_set_that_the_machine_lacks_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.TARGET.variable, "neon-i8mm")
    with pytest.raises(InvalidArgument, match=r"can run: neon-dotprod, neon$"):
        chosen_target("aarch64", frozenset(("neon", "dotprod")))


def planned_gemm(
    micro_kernel: MicroKernel, size: int, target: Target, widths: Sequence[int] = range(1, 9)
) -> GemmKernel:
    """Return a convolution with `size` x `size` filters."""
    along = window_dimension(28, size, 1, 1, 1)
    return plan_gemm(ConvShape(1, 28, 28, 128, along, along, 256), micro_kernel, target, widths)


def assembly_of(kernel: Kernel, target: Target) -> str:
    """Return the assembly of a kernel."""
    module = Module()
    kernel.emit(KernelBuilder(module, "kernel", target))
    parsed = llvm.parse_assembly(str(module))
    parsed.triple = target.triple
    initialize_all_targets()
    machine = code_generator.create_target_machine(target, "", ())
    machine.set_asm_verbosity(True)  # comments on spills
    return machine.emit_assembly(parsed)


@pytest.mark.parametrize(("rows", "is_prefetched"), [(128, True), (8, False)])
def test_weights_that_do_not_fit_the_cache_are_prefetched(rows: int, is_prefetched: bool) -> None:
    """One tile reads each weight once, and prefetches nothing."""
    target, pointwise = TARGETS["avx512vnni"], window_dimension(1, 1, 1, 1, 1)
    shape = ConvShape(1, 1, rows, 4096, pointwise, window_dimension(rows, 1, 1, 1, 1), 4096)
    kernel = plan_gemm(shape, Float32(-np.inf, np.inf), target)

    assert ("prefetcht1" in assembly_of(kernel, target)) is is_prefetched


def vnni_assembly(micro_kernel: MicroKernel, size: int) -> str:
    """Return the assembly of a convolution for avx512vnni."""
    target = TARGETS["avx512vnni"]
    return assembly_of(planned_gemm(micro_kernel, size, target), target)


@pytest.mark.parametrize("size", [1, 3])
def test_dot2_is_one_instruction(size: int) -> None:
    """Without tuning LLVM would add separately, because that has less latency. An iteration has two K groups."""
    assembly = vnni_assembly(DotS16x2(False, NO_REQUANTIZATION), size)
    mr, nr_vectors = (6, 4) if size == 1 else (7, 2)
    assert assembly.count("vpdpwssd") == 2 * mr * nr_vectors
    assert "vpmaddwd" not in assembly
    assert not re.search(r"zmm.*(Spill|Reload)", assembly)


@pytest.mark.parametrize("has_weight_zero_point", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_dot4_is_one_instruction(size: int, has_weight_zero_point: bool) -> None:
    """An iteration has two K groups.

    Row sums take one instruction for each position of a tile in their loop, and one for the tail.
    """
    assembly = vnni_assembly(DotU8S8x4(False, NO_REQUANTIZATION, has_weight_zero_point), size)
    mr, nr_vectors = (6, 4) if size == 1 else (7, 2)
    assert assembly.count("vpdpbusd") == 2 * mr * nr_vectors + 2 * mr * has_weight_zero_point
    assert not re.search(r"zmm.*(Spill|Reload)", assembly)


def k_loop(assembly: str, instruction: str) -> str:
    """Return the basic block of AArch64 code that has an instruction most often."""
    blocks = re.split(r"^\.LBB", assembly, flags=re.MULTILINE)
    return max(blocks, key=lambda block: block.count(f"\t{instruction}\t")).partition("\tb.")[0]


@pytest.mark.parametrize("size", [1, 3])
def test_the_tile_of_floats_fits_the_registers_of_neon(size: int) -> None:
    """LLVM loads the inputs of both K groups of an iteration at once."""
    target = TARGETS["neon"]
    kernel = planned_gemm(Float32(0.0, 6.0), size, target)
    loop = k_loop(assembly_of(kernel, target), "fmla")
    assert len(re.findall(r"\tfmla\tv\d+\.4s, v\d+\.4s, v\d+\.s\[0\]", loop)) == 2 * kernel.mr * kernel.nr_vectors
    assert "[sp" not in loop


@pytest.mark.parametrize("size", [1, 3])
def test_dot2_is_two_instructions_of_neon(size: int) -> None:
    """An iteration has two K groups. The element of the input is a part of the instruction."""
    target = TARGETS["neon"]
    kernel = planned_gemm(DotS16x2(False, NO_REQUANTIZATION), size, target)
    loop = k_loop(assembly_of(kernel, target), "smlal")
    assert (
        len(re.findall(r"\tsmlal\tv\d+\.4s, v\d+\.4h, v\d+\.h\[[01]\]", loop)) == 2 * 2 * kernel.mr * kernel.nr_vectors
    )
    assert "[sp" not in loop


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("name", "micro_kernel", "instruction"),
    [
        ("neon-dotprod", DotS8S8x4(False, NO_REQUANTIZATION, False), "sdot"),
        ("neon-i8mm", DotU8S8x4(False, NO_REQUANTIZATION, False), "usdot"),
        ("neon-i8mm", DotS8S8x4(True, NO_REQUANTIZATION, False), "sdot"),
    ],
)
def test_dot4_is_one_instruction_of_aarch64(name: str, micro_kernel: MicroKernel, instruction: str, size: int) -> None:
    """An iteration has two K groups. No vector is stored within the loop."""
    kernel = planned_gemm(micro_kernel, size, TARGETS[name])
    loop = k_loop(assembly_of(kernel, TARGETS[name]), instruction)
    assert loop.count(f"\t{instruction}\t") == 2 * kernel.mr * kernel.nr_vectors
    assert "[sp" not in loop


@pytest.mark.parametrize("has_weight_zero_point", [False, True])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("kind", "instruction"), [(MmlaU8S8x8, "usmmla"), (MmlaS8S8x8, "smmla")])
def test_products_of_matrices_are_one_instruction(
    kind: type[Dot4], instruction: str, size: int, has_weight_zero_point: bool
) -> None:
    """An iteration has two K groups; a tile has an instruction for each accumulator, as with dot4."""
    target = TARGETS["neon-i8mm"]
    kernel = planned_gemm(kind(instruction == "smmla", NO_REQUANTIZATION, has_weight_zero_point), size, target)
    loop = k_loop(assembly_of(kernel, target), instruction)
    assert loop.count(f"\t{instruction}\t") == 2 * kernel.mr * kernel.nr_vectors
    assert "[sp" not in loop


@pytest.mark.parametrize(
    ("rows", "k", "expected"),
    [(2, 5, MmlaU8S8x8), (2, 4, DotU8S8x4), (1, 64, DotU8S8x4)],
    ids=["matrices", "few K elements", "one row"],
)
def test_matrices_are_multiplied_where_two_rows_share_weights(rows: int, k: int, expected: type[MicroKernel]) -> None:
    along, across = (window_dimension(extent, 1, 1, 1, 1) for extent in (rows, 1))
    shape, target = ConvShape(1, 1, rows, k, across, along, 8), TARGETS["neon-i8mm"]
    assert type(s8_micro_kernel(target, shape, False, False, NO_REQUANTIZATION)) is expected


def test_targets_with_dot4_have_an_instruction_for_it() -> None:
    with_dot4 = {target.name for target in TARGETS.values() if target.has_dot4}
    assert with_dot4 == {"amx", "avx512vnni", "neon-i8mm", "neon-dotprod"}
    assert all(TARGETS[name].vpdpbusd or TARGETS[name].sdot for name in with_dot4)


@pytest.mark.parametrize(
    ("name", "instruction"), [("avx512vnni", "vpdpbusd"), ("neon-i8mm", "sdot"), ("neon-dotprod", "sdot")]
)
def test_the_quantized_ceiling_is_that_of_the_dot4_instruction(name: str, instruction: str) -> None:
    kernel = roofline_kernels(TARGETS[name], 1)["quantized"]
    assert isinstance(kernel, FmaThroughput)
    assembly = assembly_of(kernel, TARGETS[name])
    assert len(re.findall(rf"\t{instruction}\t", assembly)) == kernel.accumulators


@pytest.mark.parametrize("name", ["avx512", "avx2", "sse4.1"])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("size", [1, 3])
def test_acc16_takes_weights_from_memory(size: int, width: int, name: str) -> None:
    """No register is free for them beside the accumulators of several rows.

    SSE instructions need aligned memory operands, so there each weight vector is loaded into a register.
    """
    target = TARGETS[name]
    kernel = planned_gemm(MaddU8S8Acc16(False, NO_REQUANTIZATION), size, target, [width])
    assembly = assembly_of(kernel, target)
    mr, nr_vectors = kernel.tile
    operands = re.findall(r"pmaddubsw\s+(\S+),", assembly)
    assert mr > 1 and nr_vectors == width
    assert len(operands) == 2 * mr * nr_vectors == 2 * len(re.findall(r"pmaddwd\s", assembly))
    assert all(operand.endswith(")") for operand in operands) or name == "sse4.1"
    assert not re.search(r"[xyz]mm.*(Spill|Reload)", assembly)


_MICRO_KERNELS: dict[str, tuple[type[MicroKernel], type[MicroKernel]]] = {  # for uint8, for int8
    "amx": (AmxU8S8x64, AmxS8S8x64),
    "avx512vnni": (DotU8S8x4, DotU8S8x4),
    "avx512": (MaddU8S8Acc16, MaddU8S8Acc16),
    "avx2": (MaddU8S8Acc16, MaddU8S8Acc16),
    "sse4.1": (MaddU8S8Acc16, MaddU8S8Acc16),
    "sse4.1-fma": (MaddU8S8Acc16, MaddU8S8Acc16),
    "neon-i8mm": (MmlaU8S8x8, MmlaS8S8x8),
    "neon-dotprod": (DotS8S8x4, DotS8S8x4),
    "neon": (DotS16x2, DotS16x2),
}


@pytest.mark.parametrize("is_signed", [False, True])
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_each_target_has_its_micro_kernel(target: Target, is_signed: bool) -> None:
    kind, middle = np.dtype("i1" if is_signed else "u1"), 128 * (not is_signed)
    weights = np.random.default_rng(1).integers(middle - 10, middle + 11, (64, 256), kind)
    lowered = LOWERING_RULES[OperationType.FULLY_CONNECTED](
        Tensor((16, 256), kind, 0.5, middle - 11),
        Tensor(weights.shape, kind, 0.0078125, middle, value=weights),
        Tensor((64,), np.dtype("<i4"), 0.5 * 0.0078125, value=np.zeros(64, np.int32)),
        output=Tensor((16, 64), kind, 1.0, middle - 8),
        target=target,
        activation=0,
    )
    assert isinstance(lowered, KernelLaunch)
    assert isinstance(lowered.kernel, GemmKernel)
    expected = _MICRO_KERNELS[target.name][is_signed]
    assert type(lowered.kernel.micro_kernel) is expected
    if target.has_dot4:  # inputs are read in place if the instruction multiplies their type
        is_direct = is_signed == (expected in (AmxS8S8x64, DotS8S8x4, MmlaS8S8x8))
        assert lowered.kernel.lhs_layout == (LhsLayout.DIRECT if is_direct else LhsLayout.PACKED)
