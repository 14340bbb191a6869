"""The emulators: they compute what the code says, and report what a real machine would not let it do."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace
from support.emulated import CODE, PAGE, Call, Machine, Memory
from support.instruction_sets import initialize_all_targets
from support.library_functions import float_result
from support.linked import Image
from support.qemu import Qemu

from nnfmq.engines.compiled.code_generator import compile_ir
from nnfmq.engines.compiled.target import TARGETS, Target

if TYPE_CHECKING:
    from support.bochs import Bochs

# Copies 16 bytes from args[0] + begin to args[1] + end.
_COPY = """
define void @copy(ptr %args, i64 %begin, i64 %end, ptr %scratch) {
  %source = load ptr, ptr %args, align 8
  %at = getelementptr i8, ptr %args, i64 8
  %target = load ptr, ptr %at, align 8
  %from = getelementptr i8, ptr %source, i64 %begin
  %to = getelementptr i8, ptr %target, i64 %end
  %bytes = load <16 x i8>, ptr %from, align 1
  store <16 x i8> %bytes, ptr %to, align 1
  ret void
}
"""


def unicorn(name: str = "neon") -> Machine:
    from support.arm import Arm

    return Arm(TARGETS[name])


def qemu() -> Machine:
    return Qemu(TARGETS["neon-i8mm"])


def bochs(target: Target = TARGETS["avx512"]) -> Bochs:
    from support.bochs import Bochs

    return Bochs(target)


needs_unicorn = pytest.mark.skipif(importlib.util.find_spec("unicorn") is None, reason="unicorn is not installed")
needs_bochs = pytest.mark.skipif(
    importlib.util.find_spec("bochscpu") is None, reason="bochscpu-python is not installed"
)


@pytest.fixture(autouse=True)
def _all_targets() -> None:
    initialize_all_targets()


@pytest.fixture(
    params=[
        pytest.param(unicorn, id="neon", marks=needs_unicorn),
        pytest.param(qemu, id="neon-i8mm"),
        pytest.param(bochs, id="avx512", marks=needs_bochs),
    ]
)
def emulated(request: pytest.FixtureRequest) -> Machine:
    create: Callable[[], Machine] = request.param
    return create()


def copied(machine: Machine, begin: int, end: int, to_input: bool = False) -> np.ndarray:
    memory = Memory()
    source, target = memory.add(np.arange(33, dtype=np.uint8)), memory.add(np.zeros(33, np.uint8), writable=True)
    args = memory.add(np.array([source.address, (source if to_input else target).address], np.int64))
    image = machine.load(compile_ir(_COPY, machine.target))
    machine.run(image, memory.regions, [Call(image.functions["copy"], (args.address, begin, end, 0))])
    return target.data


def test_an_emulator_returns_what_was_computed(emulated: Machine) -> None:
    expected = np.zeros(33, np.uint8)
    expected[17:] = np.arange(5, 21)
    np.testing.assert_array_equal(copied(emulated, 5, 17), expected)


@pytest.mark.parametrize(("begin", "end", "to_input"), [(18, 0, False), (0, 18, False), (0, 0, True)])
def test_an_emulator_detects_accesses_outside_of_operands(
    emulated: Machine, begin: int, end: int, to_input: bool
) -> None:
    with pytest.raises(AssertionError, match="of the function"):
        copied(emulated, begin, end, to_input)
    copied(emulated, 0, 0)  # the emulator works after an error


_SDOT = """
declare <4 x i32> @llvm.aarch64.neon.sdot.v4i32.v16i8(<4 x i32>, <16 x i8>, <16 x i8>)
define <4 x i32> @dot(<4 x i32> %acc, <16 x i8> %a, <16 x i8> %b) {
  %sum = call <4 x i32> @llvm.aarch64.neon.sdot.v4i32.v16i8(<4 x i32> %acc, <16 x i8> %a, <16 x i8> %b)
  ret <4 x i32> %sum
}
"""


@needs_unicorn
def test_an_emulator_of_aarch64_rejects_instructions_of_other_sets() -> None:
    target = TARGETS["neon-dotprod"]
    machine = unicorn("neon")
    image = machine.load(compile_ir(_SDOT, target))
    with pytest.raises(AssertionError, match="of the function"):
        machine.run(image, [], [Call(image.functions["dot"], ())])
    machine = unicorn(target.name)
    machine.run(image, [], [Call(image.functions["dot"], ())])


# -- Bochs ------------------------------------------------------------------------------------------------------------

TILES = {"amx-tile", "amx-int8"}
AMX = TARGETS["amx"]
SETS = [
    *(target for target in reversed(TARGETS.values()) if target.triple.startswith("x86_64") and target.name != "amx"),
    AMX,
]

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


@needs_bochs
@pytest.mark.parametrize(
    ("target", "next_target"), [*zip(SETS, [*SETS[1:], None], strict=True)], ids=[target.name for target in SETS]
)
def test_the_cpu_in_bochs_has_the_set_and_not_the_next_one(target: Target, next_target: Target | None) -> None:
    """The package's CPU has no AMX: `support.amx` executes those instructions. If it gets AMX, delete that module."""
    found = features_of_the_cpu(bochs(target))
    assert found.issuperset(set(target.features) - TILES)
    assert found.isdisjoint(TILES)
    assert next_target is None or not found.issuperset(next_target.features)


@needs_bochs
def test_a_set_that_no_cpu_in_bochs_has_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="has all of avx10"):
        bochs(replace(TARGETS["avx512"], name="avx10", features=("avx10.1-512",)))


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


@needs_bochs
@pytest.mark.parametrize(
    ("code", "target", "older"),
    [
        (_SQUARE, TARGETS["avx2"], TARGETS["sse4.1"]),
        (_SQUARE, TARGETS["avx512"], TARGETS["avx2"]),
        (_DOT, TARGETS["avx512vnni"], TARGETS["avx512"]),
        (_RELEASE, AMX, TARGETS["avx512vnni"]),
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


def run_ir(
    machine: Machine, text: str, memory: Memory, arguments: tuple[int, ...], compiled_for: Target | None = None
) -> None:
    """Run the function `run` of an LLVM IR module."""
    image = machine.load(compile_ir(text, compiled_for or machine.target))
    machine.run(image, memory.regions, [Call(image.functions["run"], arguments)])


_ACCESSES = """
define void @run(ptr %from, ptr %to) {
  %value = load volatile i32, ptr %from, align 1
  store volatile i32 %value, ptr %to, align 1
  ret void
}
"""


@needs_bochs
@pytest.mark.parametrize(
    ("from_offset", "to_offset", "expected"),
    [
        (7, 0, "read of {source:#x}, where nothing is"),
        (-PAGE, 0, "read of {source:#x}, where nothing is"),
        (0, 7, "write to {target:#x}, where nothing is"),
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


@needs_bochs
def test_bochs_says_which_write_to_read_only_memory_was_tried() -> None:
    memory = Memory()
    source = memory.add(np.arange(10, dtype=np.uint8))
    message = rf"exception 14 \(write to {source.address + 4:#x}, which forbids it\) at 0x2 of the function"
    with pytest.raises(AssertionError, match=message):
        run_ir(bochs(), _ACCESSES, memory, (source.address, source.address + 4))
    assert source.data.tolist() == [*range(10)]


# -- functions of the C library ---------------------------------------------------------------------------------------

_LIBRARY = """
declare float @logf(float)
declare float @powf(float, float)
declare float @sinf(float)
define void @run(ptr %in, ptr %out) {
  %second = getelementptr float, ptr %in, i64 1
  %x = load float, ptr %in
  %y = load float, ptr %second
  %log = call float @logf(float %x)
  %pow = call float @powf(float %x, float %y)
  %sin = call float @sinf(float %x)
  %out1 = getelementptr float, ptr %out, i64 1
  %out2 = getelementptr float, ptr %out, i64 2
  store float %log, ptr %out
  store float %pow, ptr %out1
  store float %sin, ptr %out2
  ret void
}
"""
FUNCTION_MACHINES = [
    pytest.param(unicorn, id="neon", marks=needs_unicorn),
    pytest.param(bochs, id="avx512", marks=needs_bochs),
]


@pytest.mark.parametrize("create", FUNCTION_MACHINES)
@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (2.0, 0.5, (math.log(2), math.sqrt(2), math.sin(2))),
        (1e30, 2.0, (30 * math.log(10), math.inf, math.sin(float(np.float32(1e30))))),
        (0.0, -1.0, (-math.inf, math.inf, 0.0)),
        (-1.5, 3.0, (math.nan, -3.375, math.sin(-1.5))),
        (-2.0, 0.5, (math.nan, math.nan, math.sin(-2.0))),
        (math.inf, 1.0, (math.inf, math.inf, math.nan)),
    ],
)
def test_an_emulator_computes_functions_of_floats(
    create: Callable[[], Machine], x: float, y: float, expected: tuple[float, ...]
) -> None:
    memory = Memory()
    values = memory.add(np.array([x, y], np.float32))
    out = memory.add(np.zeros(3, np.float32), writable=True)
    run_ir(create(), _LIBRARY, memory, (values.address, out.address))
    np.testing.assert_allclose(out.data.view(np.float32), np.array(expected, np.float32), rtol=1e-7)


@pytest.mark.parametrize(
    ("x", "y", "expected"), [(1e38, 1e38, math.inf), (-1e38, 9.0, -math.inf), (-1e38, 8.0, math.inf)]
)
def test_a_power_that_is_too_large_is_an_infinity_of_the_right_sign(x: float, y: float, expected: float) -> None:
    bits = np.array([x, y], np.float32).view(np.uint32).tolist()
    assert np.array([float_result("powf", *bits)], np.uint32).view(np.float32)[0] == expected


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


@needs_bochs
def test_bochs_copies_and_fills_bytes() -> None:
    operands = Bytes()
    to, filled = operands.target.address + 10, operands.filled.address + 37
    run_ir(bochs(), _BYTES, operands.memory, operands.arguments(to, 30, filled))
    assert operands.target.data.tolist() == [0] * 10 + [*range(30)]
    assert operands.filled.data.tolist() == [0] * 37 + [255] * 3
    assert operands.results.data.view(np.int64).tolist() == [to, filled]


@needs_bochs
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


@needs_bochs
def test_bochs_has_no_system() -> None:
    text = "declare i64 @syscall(i64)\ndefine void @run() {\n  %r = call i64 @syscall(i64 1)\n  ret void\n}\n"
    with pytest.raises(AssertionError, match=r"^syscall\(0x1, .*, called before"):
        run_ir(bochs(), text, Memory(), ())


# -- control flow -----------------------------------------------------------------------------------------------------


@needs_bochs
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


@needs_bochs
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


@needs_bochs
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("ffe7", r"exception 14 \(fetch of {data:#x}, which forbids it\)"),  # jmp rdi
        ("31c0 ffe0", r"exception 14 \(fetch of 0x0, where nothing is\)"),  # xor eax, eax; jmp rax
        ("90 f4", r"HLT at 0x1 of the function"),
        ("31c9 f7f1", r"exception 0 at 0x2 of the function"),  # xor ecx, ecx; div ecx
        ("c6055900000001", r"exception 14 \(write to {code:#x}, which forbids it\) at 0x0"),  # mov byte [rip + 89], 1
        ("50 ebfd", r"exception 14 \(write to {stack:#x}, where nothing is\) at 0x0"),  # push rax, forever
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


@needs_bochs
def test_bochs_ends_an_endless_loop() -> None:
    from support.bochs import Bochs

    machine, loop = Bochs(TARGETS["sse4.1"], limit_s=0.01), Image(CODE, bytes.fromhex("ebfe"), {})
    with pytest.raises(AssertionError, match="processor time is over"):
        machine.run(loop, [], [Call(CODE, ())])
    machine.run(Image(CODE, bytes.fromhex("c3"), {}), [], [Call(CODE, ())])


@needs_bochs
def test_a_region_may_be_larger_than_a_page_table_and_empty() -> None:
    memory = Memory()
    empty, large = memory.add(np.zeros(0, np.uint8)), memory.add(np.zeros(5 << 20, np.uint8), writable=True)
    source = memory.add(np.arange(1, 5, dtype=np.uint8))
    assert empty.data.size == 0
    run_ir(bochs(), _ACCESSES, memory, (source.address, large.address + (3 << 20)))
    assert np.flatnonzero(large.data).tolist() == [*range(3 << 20, (3 << 20) + 4)]
