"""The emulator of x86-64: it has the instructions of a set and no others, and reports what code may not do."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace
from support.compiled import assert_kernels_agree_on
from support.emulated import CODE, PAGE, Call, Machine, Memory
from support.instruction_sets import default_sets, initialize_all_targets, using
from support.linked import Image
from support.quantized_gemm import (
    INPUTS,
    constants_of,
    filter_kind,
    fully_connected,
    inputs_of,
)

from nnfmq.engines.compiled.code_generator import compile_ir
from nnfmq.engines.compiled.kernels.gemm import GemmKernel
from nnfmq.engines.compiled.kernels.micro_kernels import AmxS8S8x64, DotU8S8x4, MaddU8S8Acc16
from nnfmq.engines.compiled.target import TARGETS, Target

if TYPE_CHECKING:
    from support.bochs import Bochs


def bochs(target: Target = TARGETS["avx512"]) -> Bochs:
    from support.bochs import Bochs

    return Bochs(target)


pytestmark = pytest.mark.skipif(importlib.util.find_spec("bochscpu") is None, reason="bochscpu-python is not installed")


@pytest.fixture(autouse=True)
def _all_targets() -> None:
    initialize_all_targets()


TILES = {"amx-tile", "amx-int8"}
INT8 = INPUTS[4]
SETS = [target for target in reversed(TARGETS.values()) if target.triple.startswith("x86_64")]

# How CPUID tells that a CPU has a feature: function, register and bit. Intel's Software Developer's Manual, volume 2.
CPUID = {
    "ssse3": (1, "ecx", 9),
    "fma": (1, "ecx", 12),
    "sse4.1": (1, "ecx", 19),
    "avx": (1, "ecx", 28),
    "f16c": (1, "ecx", 29),
    "bmi": (7, "ebx", 3),
    "avx2": (7, "ebx", 5),
    "bmi2": (7, "ebx", 8),
    "avx512f": (7, "ebx", 16),
    "avx512dq": (7, "ebx", 17),
    "avx512cd": (7, "ebx", 28),
    "avx512bw": (7, "ebx", 30),
    "avx512vl": (7, "ebx", 31),
    "avx512vnni": (7, "ecx", 11),
    "amx-tile": (7, "edx", 24),
    "amx-int8": (7, "edx", 25),
}
# void f(uint32_t registers[4], uint32_t function): push rbx; mov r8, rdi; mov eax, esi; xor ecx, ecx; cpuid;
# mov [r8], eax; mov [r8 + 4], ebx; mov [r8 + 8], ecx; mov [r8 + 12], edx; pop rbx; ret
_CPUID = bytes.fromhex("53 4989f8 89f0 31c9 0fa2 418900 41895804 41894808 4189500c 5b c3")


def features_of_the_cpu(machine: Machine) -> set[str]:
    memory, image = Memory(), Image(CODE, _CPUID, {})
    outputs = {function: memory.add(np.zeros(4, np.uint32), writable=True) for function in (0, 1, 7)}
    machine.run(image, memory.regions, [Call(CODE, (region.address, at)) for at, region in outputs.items()])
    registers = {
        at: dict(zip(("eax", "ebx", "ecx", "edx"), region.data.view(np.uint32), strict=True))
        for at, region in outputs.items()
    }
    highest = registers[0]["eax"]  # the answer to a higher number would be that to this one
    return {name for name, (at, register, bit) in CPUID.items() if at <= highest and registers[at][register] >> bit & 1}


@pytest.mark.parametrize(
    ("target", "next_target"), [*zip(SETS, [*SETS[1:], None], strict=True)], ids=[target.name for target in SETS]
)
def test_the_cpu_in_bochs_has_the_set_and_not_the_next_one(target: Target, next_target: Target | None) -> None:
    """The package's CPU has no AMX: `support.amx` executes those instructions. If it gets AMX, delete that module."""
    found = features_of_the_cpu(bochs(target))
    assert found.issuperset(set(target.features) - TILES)
    assert found.isdisjoint(TILES)
    # sse4.1-fma is no set of a CPU: it computes with the instructions of sse4.1.
    assert next_target in (None, TARGETS["sse4.1"]) or not found.issuperset(next_target.features)


def test_a_set_that_no_cpu_in_bochs_has_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="has all of avx10"):
        bochs(replace(TARGETS["avx512"], name="avx10", features=("avx10.1-512",)))


def run_ir(
    machine: Machine, text: str, memory: Memory, arguments: tuple[int, ...], compiled_for: Target | None = None
) -> None:
    """Run the function `run` of an LLVM IR module."""
    image = machine.load(compile_ir(text, compiled_for or machine.target))
    machine.run(image, memory.regions, [Call(image.functions["run"], arguments)])


_SQUARE = """
define void @run(ptr %a, ptr %b) {
  %x = load <16 x i32>, ptr %a, align 1
  %square = mul <16 x i32> %x, %x
  store <16 x i32> %square, ptr %b, align 1
  ret void
}
"""
_DOT = """
declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, <16 x i32>, <16 x i32>)
define void @run(ptr %a, ptr %b) {
  %x = load <16 x i32>, ptr %a, align 1
  %dot = call <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32> zeroinitializer, <16 x i32> %x, <16 x i32> %x)
  store <16 x i32> %dot, ptr %b, align 1
  ret void
}
"""
_RELEASE = """
declare void @llvm.x86.tilerelease()
define void @run(ptr %a, ptr %b) {
  call void @llvm.x86.tilerelease()
  ret void
}
"""


@pytest.mark.parametrize(
    ("code", "target", "older"),
    [
        (_SQUARE, TARGETS["avx2"], TARGETS["sse4.1"]),
        (_SQUARE, TARGETS["avx512"], TARGETS["avx2"]),
        (_DOT, TARGETS["avx512vnni"], TARGETS["avx512"]),
        (_RELEASE, TARGETS["amx"], TARGETS["avx512vnni"]),
    ],
    ids=["avx2", "avx512", "avx512vnni", "amx"],
)
def test_bochs_rejects_instructions_of_other_sets(code: str, target: Target, older: Target) -> None:
    """They raise the exception of an invalid instruction on a CPU that only has an older set."""
    memory = Memory()
    operands = tuple(memory.add(np.zeros(64, np.uint8), writable=True).address for _ in range(2))
    run_ir(bochs(target), code, memory, operands)
    with pytest.raises(AssertionError, match=r"^exception 6 at 0x[0-9a-f]+ of the function"):
        run_ir(bochs(older), code, memory, operands, compiled_for=target)


_ACCESSES = """
define void @run(ptr %from, ptr %to) {
  %value = load volatile i32, ptr %from, align 1
  store volatile i32 %value, ptr %to, align 1
  ret void
}
"""


@pytest.mark.parametrize(
    ("from_offset", "to_offset", "expected"),
    [
        (7, 0, "read of {source:#x}, not mapped"),
        (-PAGE, 0, "read of {source:#x}, not mapped"),
        (0, 7, "write to {target:#x}, not mapped"),
    ],
)
def test_bochs_says_where_an_access_outside_of_operands_is(from_offset: int, to_offset: int, expected: str) -> None:
    """The instruction's offset too: the load is the function's first instruction, and the store follows."""
    memory = Memory()
    source, target = memory.add(np.arange(10, dtype=np.uint8)), memory.add(np.zeros(10, np.uint8), writable=True)
    arguments = source.address + from_offset, target.address + to_offset
    # An access that crosses into the next page faults there.
    touched = expected.format(
        source=source.address + (10 if from_offset > 0 else from_offset), target=target.address + 10
    )
    with pytest.raises(AssertionError) as caught:
        run_ir(bochs(), _ACCESSES, memory, arguments)
    assert f"exception 14 ({touched}) at {'0x0' if from_offset else '0x2'} of the function" in str(caught.value)
    assert not target.data.any()


def test_bochs_says_which_write_to_read_only_memory_was_tried() -> None:
    memory = Memory()
    source = memory.add(np.arange(10, dtype=np.uint8))
    message = rf"exception 14 \(write to {source.address + 4:#x}, protected\) at 0x2 of the function"
    with pytest.raises(AssertionError, match=message):
        run_ir(bochs(), _ACCESSES, memory, (source.address, source.address + 4))
    assert source.data.tolist() == [*range(10)]


# -- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", SETS, ids=lambda target: target.name)
def test_a_model_runs_in_bochs_although_this_machine_may_have_the_set(
    target: Target, planned: list[GemmKernel]
) -> None:
    """Its micro-kernel is the target's; it is not the same for all of them."""
    weights = np.random.default_rng(1).integers(-16, 17, (96, 65), np.int8)  # four of a sign fit acc16
    model = fully_connected(INT8, constants_of(filter_kind(INT8, 128), weights), batch=33, scale=5.0)
    with using(target.name, always_emulated=True):
        assert_kernels_agree_on(model, inputs_of(model, INT8, ("random", "high")))
    kinds = {"amx": AmxS8S8x64, "avx512vnni": DotU8S8x4}
    assert type(planned[-1].micro_kernel) is kinds.get(target.name, MaddU8S8Acc16)


def test_the_best_set_is_tested_on_machines_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("support.instruction_sets.platform.machine", lambda: "x86_64")
        for name, features in {target.name: frozenset(target.features) for target in SETS}.items():
            patch.setattr("support.instruction_sets.host_features", lambda features=features: features)
            assert ("amx" in default_sets()) is (name != "amx")
        patch.setattr("support.instruction_sets.platform.machine", lambda: "aarch64")
        assert default_sets("dot4") == ("host",)


# -- functions of the C library ---------------------------------------------------------------------------------------

_BYTES = """
declare ptr @memcpy(ptr, ptr, i64)
declare ptr @memset(ptr, i32, i64)
define void @run(ptr %to, ptr %from, i64 %size, ptr %filled, ptr %results) {
  %copy = call ptr @memcpy(ptr %to, ptr %from, i64 %size)
  %fill = call ptr @memset(ptr %filled, i32 2047, i64 3)
  %second = getelementptr ptr, ptr %results, i64 1
  store ptr %copy, ptr %results
  store ptr %fill, ptr %second
  ret void
}
"""


class Bytes:
    """The operands of `_BYTES`."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.source = self.memory.add(np.arange(40, dtype=np.uint8))
        self.target = self.memory.add(np.zeros(40, np.uint8), writable=True)
        self.filled = self.memory.add(np.zeros(40, np.uint8), writable=True)
        self.results = self.memory.add(np.zeros(2, np.int64), writable=True)

    def arguments(self, to: int, size: int, filled: int) -> tuple[int, ...]:
        return to, self.source.address, size, filled, self.results.address


def test_bochs_copies_and_fills_bytes() -> None:
    operands = Bytes()
    to, filled = operands.target.address + 10, operands.filled.address + 37
    run_ir(bochs(), _BYTES, operands.memory, operands.arguments(to, 30, filled))
    assert operands.target.data.tolist() == [0] * 10 + [*range(30)]
    assert operands.filled.data.tolist() == [0] * 37 + [255] * 3
    assert operands.results.data.view(np.int64).tolist() == [to, filled]


@pytest.mark.parametrize(
    ("to", "size", "filled", "message"),
    [
        ("target", 41, "filled", r"memcpy\(0x\w+, 0x\w+, 0x29\), called before 0x\w+ of the function"),
        ("source", 4, "filled", "memcpy"),  # it is read-only
        ("target", 4, "source", "memset"),
        ("target", 4, "past the end", r"memset\(0x\w+, 0x7ff, 0x3\), called before"),
    ],
)
def test_bochs_does_not_copy_or_fill_bytes_outside_of_operands(to: str, size: int, filled: str, message: str) -> None:
    operands = Bytes()
    places = {name: getattr(operands, name).address for name in ("source", "target", "filled")}
    places["past the end"] = operands.filled.address + 38
    with pytest.raises(AssertionError, match=f"^{message}"):
        run_ir(bochs(), _BYTES, operands.memory, operands.arguments(places[to], size, places[filled]))


def test_bochs_has_no_system() -> None:
    text = "declare i64 @syscall(i64)\ndefine void @run() {\n  %r = call i64 @syscall(i64 1)\n  ret void\n}\n"
    with pytest.raises(AssertionError, match=r"^syscall\(0x1, .*, called before"):
        run_ir(bochs(), text, Memory(), ())


# -- control flow -----------------------------------------------------------------------------------------------------


def test_bochs_makes_calls_one_after_the_other_with_six_arguments() -> None:
    names = "abcdef"
    adds = "\n".join(f"  %s{n} = add i64 %{'s' + str(n - 1) if n else 'old'}, %{name}" for n, name in enumerate(names))
    body = f"  %p = inttoptr i64 %f to ptr\n  %old = load i64, ptr %p\n{adds}\n  store i64 %s4, ptr %p\n  ret void"
    text = f"define void @run({', '.join('i64 %' + name for name in names)}) {{\n{body}\n}}\n"
    machine, memory = bochs(TARGETS["sse4.1"]), Memory()
    out = memory.add(np.array([7]), writable=True)
    image = machine.load(compile_ir(text, machine.target))
    calls = [Call(image.functions["run"], (1, 20, 300, 4000, 50000, out.address)) for _ in range(3)]
    machine.run(image, memory.regions, calls)
    assert out.data.view(np.int64).tolist() == [7 + 3 * 54321]


def test_calls_before_one_that_fails_are_visible() -> None:
    machine, memory = bochs(), Memory()
    source, target = memory.add(np.arange(4, dtype=np.uint8)), memory.add(np.zeros(4, np.uint8), writable=True)
    image = machine.load(compile_ir(_ACCESSES, machine.target))
    with pytest.raises(AssertionError, match=r"of the function, \(5, 6\)$"):
        machine.run(
            image,
            memory.regions,
            [Call(image.functions["run"], arguments) for arguments in ((source.address, target.address), (5, 6))],
        )
    assert target.data.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("ffe7", r"exception 14 \(fetch of {data:#x}, protected\)"),  # jmp rdi
        ("31c0 ffe0", r"exception 14 \(fetch of 0x0, not mapped\)"),  # xor eax, eax; jmp rax
        ("90 f4", r"HLT at 0x1 of the function"),
        ("31c9 f7f1", r"exception 0 at 0x2 of the function"),  # xor ecx, ecx; div ecx
        ("c6055900000001", r"exception 14 \(write to {code:#x}, protected\) at 0x0"),  # mov byte [rip + 89], 1
        ("50 ebfd", r"exception 14 \(write to {stack:#x}, not mapped\) at 0x0"),  # push rax, forever
        ("48b80000000000800000 8a00", r"exception 13 \(0x0\) at 0xa"),  # mov rax, 0x8000'0000'0000; mov al, [rax]
    ],
    ids=["data", "nothing", "hlt", "division", "code", "stack", "address"],
)
def test_bochs_reports_exceptions(code: str, message: str) -> None:
    """The exception of a stack that is full too: it has a stack of its own."""
    memory = Memory()
    data = memory.add(np.full(16, 0xC3, np.uint8), writable=True)
    image = Image(CODE, bytes.fromhex(code).ljust(128, b"\0"), {})
    expected = message.format(data=data.address, code=CODE + 96, stack=0x2000_0000 - 8)
    with pytest.raises(AssertionError, match=f"^{expected}"):
        bochs().run(image, memory.regions, [Call(CODE, (data.address,))])


def test_bochs_ends_an_endless_loop() -> None:
    from support.bochs import Bochs

    machine, loop = Bochs(TARGETS["sse4.1"], limit_s=0.01), Image(CODE, bytes.fromhex("ebfe"), {})
    with pytest.raises(AssertionError, match="processor time is over"):
        machine.run(loop, [], [Call(CODE, ())])
    machine.run(Image(CODE, bytes.fromhex("c3"), {}), [], [Call(CODE, ())])


def test_a_region_may_be_larger_than_a_page_table_and_empty() -> None:
    memory = Memory()
    empty, large = memory.add(np.zeros(0, np.uint8)), memory.add(np.zeros(5 << 20, np.uint8), writable=True)
    source = memory.add(np.arange(1, 5, dtype=np.uint8))
    assert empty.data.size == 0
    run_ir(bochs(), _ACCESSES, memory, (source.address, large.address + (3 << 20)))
    assert np.flatnonzero(large.data).tolist() == [*range(3 << 20, (3 << 20) + 4)]
